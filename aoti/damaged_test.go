package aoti

import (
	"bytes"
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
)

var damagedPackages = flag.Int("damaged", 1000, "how many packages TestDamagedPackages reads")

// damages are the kinds of damage. directory is the offset of the zip's central directory.
var damages = []struct {
	name string
	do   func(r *rand.Rand, bad []byte, directory int) []byte
}{
	{"cut", func(r *rand.Rand, bad []byte, _ int) []byte { return bad[:r.IntN(len(bad))] }},
	{"a byte of the directory", func(r *rand.Rand, bad []byte, directory int) []byte {
		bad[directory+r.IntN(len(bad)-directory)] = byte(r.Uint32())
		return bad
	}},
	{"a bit", func(r *rand.Rand, bad []byte, _ int) []byte {
		bad[r.IntN(len(bad))] ^= 1 << r.IntN(8)
		return bad
	}},
	{"a huge number in the directory", func(r *rand.Rand, bad []byte, directory int) []byte {
		at := directory + r.IntN(len(bad)-directory-8)
		copy(bad[at:], bytes.Repeat([]byte{0xff}, 1+r.IntN(8)))
		return bad
	}},
	{"a huge size of a member", func(r *rand.Rand, bad []byte, directory int) []byte {
		entry := oneOf(r, bad, directory, "PK\x01\x02")
		sizes := []uint32{0xffffffff, 0xfffffffe, 0x7fffffff, 1 << 30, r.Uint32()}
		if r.IntN(2) == 0 { // compressed
			binary.LittleEndian.PutUint32(bad[entry+20:], sizes[r.IntN(len(sizes))])
		}
		binary.LittleEndian.PutUint32(bad[entry+24:], sizes[r.IntN(len(sizes))])
		return bad
	}},
	{"a zip slip", func(r *rand.Rand, bad []byte, directory int) []byte {
		name := oneOf(r, bad, directory, "/data/aotinductor/model/")
		slips := []string{"/..", "/../..", "/../../../../../../../tmp", "\\..\\..", "/.", "//", "/C:", "\x00", "/../escaped.so"}
		copy(bad[name+r.IntN(40):], slips[r.IntN(len(slips))])
		return bad
	}},
	{"a member of a member", func(r *rand.Rand, bad []byte, directory int) []byte {
		entry := oneOf(r, bad, directory, "PK\x01\x02")
		binary.LittleEndian.PutUint32(bad[entry+42:], uint32(r.IntN(len(bad)))) // the offset
		return bad
	}},
	{"another part of the file", func(r *rand.Rand, bad []byte, _ int) []byte {
		n := 1 + r.IntN(4096)
		copy(bad[r.IntN(len(bad)-n):], bad[r.IntN(len(bad)-n):][:n])
		return bad
	}},
}

// oneOf returns the offset of a random occurrence of text from start on.
func oneOf(r *rand.Rand, data []byte, start int, text string) int {
	var found []int
	for at := start; ; at++ {
		next := bytes.Index(data[at:], []byte(text))
		if next < 0 {
			return found[r.IntN(len(found))]
		}
		at += next
		found = append(found, at)
	}
}

// Most damaged packages are refused. The others are still readable, for example because the damage
// is between members. Reading one takes memory for a few times the file at most. No code of a
// package runs, no unpacked file is left, and none is written outside of the folder for it.
func TestDamagedPackages(t *testing.T) {
	good, err := os.ReadFile(tiny)
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	folder := filepath.Join(root, "a", "b")
	if err := os.MkdirAll(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", folder)
	path := filepath.Join(t.TempDir(), "damaged.pt2")
	r := rand.New(rand.NewPCG(36, 36))
	directory := bytes.Index(good, []byte("PK\x01\x02"))
	refused := map[string]int{}
	for i := range *damagedPackages {
		kind := damages[i%len(damages)]
		if err := os.WriteFile(path, kind.do(r, slices.Clone(good), directory), 0o600); err != nil {
			t.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if unpackable(t, path) != nil {
			refused[kind.name]++
		}
		runtime.ReadMemStats(&after)
		if got, most := after.TotalAlloc-before.TotalAlloc, uint64(4*len(good)); got > most {
			t.Errorf("package %d, %s: reading it allocated %d bytes, want at most %d", i, kind.name, got, most)
		}
		if left, _ := filepath.Glob(filepath.Join(folder, "*")); len(left) > 0 {
			t.Fatalf("package %d, %s: left %v, want nothing", i, kind.name, left)
		}
	}
	t.Logf("of %d packages, these were refused: %v", *damagedPackages, refused)
	for _, kind := range damages {
		if each := *damagedPackages / len(damages); refused[kind.name] < each/10 {
			t.Errorf("%s: %d of %d packages were refused, want at least a tenth", kind.name, refused[kind.name], each)
		}
	}
	var written []string
	_ = filepath.WalkDir(root, func(path string, _ os.DirEntry, _ error) error {
		written = append(written, path)
		return nil
	})
	if len(written) != 3 { // root, a and b
		t.Errorf("in the folder for unpacked files are %v, want two empty folders", written)
	}
}

// unpackable does everything that Load does before Load runs the package's code.
func unpackable(t *testing.T, path string) error {
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	models, err := readArchive(f)
	if err != nil {
		return err
	}
	for _, m := range models {
		files, err := unpack(m)
		if err != nil {
			return err
		}
		err = checkLibrary(filepath.Join(files.path, m.library))
		if removed := files.remove(); removed != nil {
			t.Error(removed)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

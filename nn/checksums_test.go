package nn_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// rankFile returns the file of a rank.
func rankFile(t testing.TB, path, rank string) string {
	t.Helper()
	names, err := filepath.Glob(path + "-*-rank" + rank + "-*.safetensors")
	if err != nil || len(names) != 1 {
		t.Fatal(names, err)
	}
	return names[0]
}

// rewrite changes a file in place.
func rewrite(t testing.TB, name string, change func(data []byte)) {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	change(data)
	if err := os.WriteFile(name, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// A bit that flips anywhere in a rank's file is an error that names the file, and the tensor if it
// is in its bytes.
func TestEveryFlippedBitOfARankIsFound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	if err := saveDivided(t, path, 2, 1); err != nil {
		t.Fatal(err)
	}
	name := rankFile(t, path, "00001")
	good, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	c, err := nn.OpenCheckpoint(name)
	if err != nil {
		t.Fatal(err)
	}
	tensors := c.Tensors()
	c.Close()
	begin := 8 + int(binary.LittleEndian.Uint64(good)) // of the tensors, of which the last one is that of checksums
	end := len(good) - int(tensors[len(tensors)-1].Bytes())
	if len(tensors) != 4 || end-begin < 100 {
		t.Fatalf("the file has %v", tensors)
	}
	for i := range good {
		rewrite(t, name, func(b []byte) { b[i] ^= 1 << (i % 8) })
		_, err := readAll(path)
		if err == nil || !strings.Contains(err.Error(), filepath.Base(name)) || errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("byte %d of %d: %v", i, len(good), err)
		}
		if says := err.Error(); begin <= i && i < end && (!strings.Contains(says, ": tensor ") || !strings.Contains(says, "are not those that were written")) {
			t.Errorf("byte %d of %d: %v", i, len(good), err)
		}
		rewrite(t, name, func(b []byte) { copy(b, good) })
	}
	requireDivided(t, path, 1)
}

// A rank's file of another checkpoint is none of this one, whatever it says about itself.
func TestSwappedFileOfARankIsFound(t *testing.T) {
	dir := t.TempDir()
	path, other := filepath.Join(dir, "last.pt"), filepath.Join(dir, "other.pt")
	if err := errors.Join(saveDivided(t, path, 2, 1), saveDivided(t, other, 2, 2)); err != nil {
		t.Fatal(err)
	}
	name, from := rankFile(t, path, "00001"), rankFile(t, other, "00001")
	id := func(name string) []byte { return []byte(strings.Split(filepath.Base(name), "-")[1]) }
	data, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	for says, content := range map[string][]byte{
		"is not the file of rank 1 of this checkpoint":              data,
		"shapes or checksums are not those that were written: copy": bytes.Replace(data, id(from), id(name), 1),
	} {
		if err := os.WriteFile(name, content, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := readAll(path); err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), filepath.Base(name)) || !strings.Contains(err.Error(), "state_dict.") {
			t.Errorf("%v: want %q", err, says)
		}
	}
}

// Names in a rank's file that are exchanged give each tensor the other's bytes.
func TestExchangedNamesAreFound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	s, err := nn.BeginShards(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	d, v := nn.Divided{}, map[string]any{}
	for i, name := range []string{"left", "next"} {
		part := row(t, torch.Uint8, []byte{byte(i)})
		v[name] = part
		d[part] = nn.Division{Shape: []int64{1}, Strides: []int64{1}, First: []int64{0, 1}}
	}
	if err := errors.Join(s.Write(0, nn.DividedParts(v, d)), s.Commit(v, d)); err != nil {
		t.Fatal(err)
	}
	name := rankFile(t, path, "00000")
	rewrite(t, name, func(b []byte) {
		copy(b, strings.NewReplacer(`"left"`, `"next"`, `"next"`, `"left"`).Replace(string(b)))
	})
	if _, err := readAll(path); err == nil || !strings.Contains(err.Error(), filepath.Base(name)) || !strings.Contains(err.Error(), "names, shapes or checksums are not those") {
		t.Error(err)
	}
}

// saveLarge writes a checkpoint of ranks that divide one tensor of bytes.
func saveLarge(t testing.TB, path string, ranks int, whole []byte) {
	t.Helper()
	s, err := nn.BeginShards(path, ranks)
	if err != nil {
		t.Fatal(err)
	}
	at := first(int64(len(whole)), ranks)
	for rank := ranks - 1; rank >= 0; rank-- {
		part := row(t, torch.Uint8, whole[at[rank]:at[rank+1]])
		v := map[string]any{"state_dict": []nn.Named{{Name: "large", Tensor: part}}}
		d := nn.Divided{part: {Shape: []int64{int64(len(whole))}, Strides: []int64{1}, First: at}}
		if err := s.Write(rank, nn.DividedParts(v, d)); err != nil {
			t.Fatal(err)
		}
		if rank == 0 {
			if err := s.Commit(v, d); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A part of a tensor is checked by the blocks in which it is, and others may be damaged.
func TestPartsAreCheckedByBlocks(t *testing.T) {
	const block, size = 1 << 20, 5<<20 + 12345
	path := filepath.Join(t.TempDir(), "last.pt")
	whole := make([]byte, size)
	for i := range whole {
		whole[i] = byte(i * i >> 7)
	}
	saveLarge(t, path, 2, whole)
	half := first(size, 2)[1]
	flipped := half + 2*block - 1 // in the second block of rank 1
	name := rankFile(t, path, "00001")
	for _, damaged := range []bool{false, true} {
		if damaged {
			rewrite(t, name, func(b []byte) {
				at := bytes.Index(b, whole[half:half+4096])
				b[int64(at)+flipped-half] ^= 4
			})
		}
		c, err := nn.OpenCheckpoint(path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		stored, err := c.Tensor("large")
		if err != nil {
			t.Fatal(err)
		}
		for _, of := range []struct {
			first, n int64
			bad      bool // reads the damaged block
		}{
			{0, size, true}, {0, half, false}, {half - 1, 2, false}, {half, block, false}, {half, block + 1, true}, {half + block, block, true},
			{half + 2*block - 1, 1, true}, {half + 2*block, size - half - 2*block, false}, {block - 3, 2*block + 6, false}, {size - 1, 1, false}, {7, 0, false},
		} {
			part, err := stored.ReadPart([]int64{1}, of.first, of.n)
			if damaged && of.bad {
				if err == nil || !strings.Contains(err.Error(), filepath.Base(name)) || !strings.Contains(err.Error(), "state_dict.large") ||
					!strings.Contains(err.Error(), "its bytes 1048576 to 2097151 are not") {
					t.Errorf("%d bytes from %d: %v, %v", of.n, of.first, part, err)
				}
				continue
			}
			if err != nil {
				t.Fatalf("%d bytes from %d: %v", of.n, of.first, err)
			}
			got := make([]byte, of.n)
			if err := errors.Join(part.ReadBytes(got), part.Close()); err != nil || !bytes.Equal(got, whole[of.first:of.first+of.n]) {
				t.Errorf("%d bytes from %d differ: %v", of.n, of.first, err)
			}
		}
	}
}

// A file without checksums, as an earlier version of a rank would write it, commits nothing.
func TestCommitNeedsChecksums(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	s, err := nn.BeginShards(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	v, d := dividedValue(t, 0, 1, 1)
	if err := s.Write(0, nn.DividedParts(v, d)); err != nil {
		t.Fatal(err)
	}
	name := rankFile(t, path, "00000")
	if err := nn.SaveTensors(name, nn.DividedParts(v, d), map[string]string{"checkpoint": s.ID(), "rank": "0"}); err != nil {
		t.Fatal(err)
	}
	if err := s.Commit(v, d); err == nil || !strings.Contains(err.Error(), "bytes of checksums") || !strings.Contains(err.Error(), "rank 0") {
		t.Error(err)
	}
	if names := files(t, filepath.Dir(path)); len(names) != 0 {
		t.Errorf("%v", names)
	}
}

// What the checksums cost beside writing and reading.
func BenchmarkDividedCheckpoint(b *testing.B) {
	whole := make([]byte, 256<<20)
	for i := range whole {
		whole[i] = byte(i * i >> 7)
	}
	path := filepath.Join(b.TempDir(), "last.pt")
	b.Run("save", func(b *testing.B) {
		b.SetBytes(int64(len(whole)))
		for b.Loop() {
			saveLarge(b, path, 1, whole)
		}
	})
	b.Run("load", func(b *testing.B) {
		b.SetBytes(int64(len(whole)))
		for b.Loop() {
			if _, err := readAll(path); err != nil {
				b.Fatal(err)
			}
		}
	})
}

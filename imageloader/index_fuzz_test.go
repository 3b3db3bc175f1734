package imageloader

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// fuzzArchive has samples enough for some checkpoints, of few bytes.
func fuzzArchive(f *testing.F, dir string) (path string, index []byte, members []tarMember) {
	f.Helper()
	for i := range 6 {
		members = append(members, tarMember{name: "c/" + string(rune('a'+i)) + ".png", data: fakeImage(string(bytes.Repeat([]byte{byte(i), 1, 2, byte(i * i)}, 2000+i*3000)))})
	}
	path = filepath.Join(dir, "a.tgz")
	if err := os.WriteFile(path, gzipSplit(f, tarBytes(f, members...), 1<<20, 1), 0o644); err != nil {
		f.Fatal(err)
	}
	if _, err := MakeIndex(f.Context(), path, Options{}, nil); err != nil {
		f.Fatal(err)
	}
	index, err := os.ReadFile(path + sidecarSuffix)
	if err != nil {
		f.Fatal(err)
	}
	return path, index, members
}

// FuzzIndex: whatever an index file holds, its checksums right or not, loaders open, samples have their bytes or an error says that they don't, and nothing hangs.
func FuzzIndex(f *testing.F) {
	path, index, members := fuzzArchive(f, f.TempDir())
	want := contentOf(members)
	f.Add(index, uint16(0), uint8(0))
	kinds := []uint32{sectionShards, sectionDirs, sectionEntries, sectionNames, sectionCheckpoints, sectionWindows, sectionCounts, sectionHeads}
	for i := range kinds {
		f.Add(index, uint16(i*9), uint8(1<<i))
	}
	f.Add(index[:100], uint16(0), uint8(0))
	f.Fuzz(func(t *testing.T, data []byte, at uint16, flip uint8) {
		side := filepath.Join(t.TempDir(), "index")
		data = bytes.Clone(data)
		table := sidecarHeader + len(kinds)*sectionBytes
		if kind := kinds[int(at)%len(kinds)]; flip != 0 && len(data) == len(index) && bytes.Equal(data[:table], index[:table]) {
			data = forge(t, data, kind, func(b []byte) {
				if len(b) > 0 {
					b[int(at)%len(b)] ^= flip
				}
			})
		}
		if err := os.WriteFile(side, data, 0o644); err != nil {
			t.Fatal(err)
		}
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), IndexFile: side, ShuffleBytes: 1, MaxSampleBytes: 1 << 20}, openFile, fakeCodec{})
		if err != nil {
			if !errors.Is(err, ErrNoSamples) {
				t.Fatal(err)
			}
			return
		}
		defer l.Close()
		x := l.index.Load()
		a, err := openArchive(t.Context(), path, opener{file: openFile})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		r := newSampleReader(a, x)
		defer r.close()
		for i := range x.entries {
			_ = x.entriesOf(i, nil) // whatever it is, it is the decoder's to check
			e := &x.entries[i]
			if e.kind != kindFile || e.size > 1<<20 || e.size == 0 || x.work == 0 {
				continue
			}
			b := make([]byte, e.size)
			if r.read(i, b) == nil && e.flags&entrySummed != 0 && want[x.name(i)] != "" && len(want[x.name(i)]) == len(b) && want[x.name(i)] != string(b) {
				// Only where the index has the name of one sample and the place and checksum of another.
				if !contains(want, string(b)) {
					t.Errorf("%s has bytes of no sample", x.name(i))
				}
			}
		}
	})
}

func contains(m map[string]string, data string) bool {
	for _, d := range m {
		if d == data {
			return true
		}
	}
	return false
}

// FuzzGzip: the reader of gzip files takes any bytes, in any steps.
func FuzzGzip(f *testing.F) {
	f.Add(gzipSplit(f, []byte("hello hello hello"), 5, 6), uint16(3))
	f.Add(gzipSplit(f, bytes.Repeat([]byte("abc"), 30_000), 40_000, 1), uint16(1000))
	f.Fuzz(func(t *testing.T, data []byte, step uint16) {
		r, err := newGzipReader(&chunked{bytes.NewReader(data), int(step) + 1})
		if err != nil {
			return
		}
		defer r.close()
		k := newCheckpointer(func(checkpoint) {}, func() int64 { return 0 })
		if err := r.mark(k.note); err != nil {
			t.Fatal(err)
		}
		total := 0
		b := make([]byte, 1<<14)
		for total < 8<<20 {
			n, err := r.Read(b)
			total += n
			if err != nil {
				break
			}
		}
	})
}

// FuzzWindow: unpackWindow writes inside of the window alone.
func FuzzWindow(f *testing.F) {
	f.Add([]byte{1, 2, 3, 4})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0x0f, 1, 1})
	f.Fuzz(func(t *testing.T, packed []byte) {
		_ = unpackWindow(packed, make([]byte, 1000)) // an error or not
	})
}

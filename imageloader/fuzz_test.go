package imageloader

import (
	"archive/tar"
	"bytes"
	"io/fs"
	"testing"
	"time"
)

// memoryFile is an archive in memory.
type memoryFile struct {
	*bytes.Reader
}

func (memoryFile) Close() error                 { return nil }
func (f memoryFile) Stat() (fs.FileInfo, error) { return memoryInfo(f.Size()), nil }

type memoryInfo int64

func (memoryInfo) Name() string       { return "memory" }
func (i memoryInfo) Size() int64      { return int64(i) }
func (memoryInfo) Mode() fs.FileMode  { return 0o644 }
func (memoryInfo) ModTime() time.Time { return time.Time{} }
func (memoryInfo) IsDir() bool        { return false }
func (memoryInfo) Sys() any           { return nil }

// FuzzArchive: whatever bytes an archive has, with and without a scan before, epochs end, and two of them deliver the same samples and the same error.
func FuzzArchive(f *testing.F) {
	whole := fakeArchive(f, 12, func(i int) bool { return i == 5 })
	f.Add(whole)
	f.Add(gzipBytes(f, whole))
	f.Add(whole[:3000])
	f.Add(gzipBytes(f, whole[:3000]))
	f.Add(tarBytes(f, tarMember{name: "class1/link", kind: tar.TypeLink, link: "x"}, tarMember{name: "class1/\x7f", data: "text"}))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, classes := range [][]string{nil, {"class0", "class1", "class2", "class3", "class4"}} {
			for _, shuffleBytes := range []int64{0, 500} {
				o := Options{BatchSize: 4, Transform: Eval(2, 2), Classes: classes, BadSamples: Skip, Shuffle: true, ShuffleBytes: shuffleBytes, Workers: 2, MaxSampleBytes: 1 << 16}
				l, err := open(t.Context(), "memory", o, func(string) (source, error) { return memoryFile{bytes.NewReader(data)}, nil }, fakeCodec{})
				if err != nil {
					continue
				}
				first, err1 := collect(t, l, 0, 2)
				second, err2 := collect(t, l, 0, 2)
				if digest(first) != digest(second) || (err1 == nil) != (err2 == nil) {
					t.Errorf("%d samples, error %v, then %d samples, error %v", len(names(first)), err1, len(names(second)), err2)
				}
				if n := l.Len(); err1 == nil && (n < len(names(first)) || n < 1) {
					t.Errorf("%d samples of %d", len(names(first)), n)
				}
			}
		}
	})
}

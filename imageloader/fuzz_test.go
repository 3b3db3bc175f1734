package imageloader

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
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

// storedGzip and storedZstd pack without compression, which is fast.
func storedGzip(data []byte) []byte {
	out := []byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff}
	for rest := data; ; {
		n := min(len(rest), 1<<16-1)
		last := byte(0)
		if n == len(rest) {
			last = 1
		}
		out = append(out, last, byte(n), byte(n>>8), ^byte(n), ^byte(n>>8))
		out = append(out, rest[:n]...)
		if rest = rest[n:]; last == 1 {
			break
		}
	}
	out = binary.LittleEndian.AppendUint32(out, crc32.ChecksumIEEE(data))
	return binary.LittleEndian.AppendUint32(out, uint32(len(data)))
}

func storedZstd(data []byte) []byte {
	out := []byte{0x28, 0xb5, 0x2f, 0xfd, 0, 7 << 3} // a window of 128 KB, no checksum
	for rest := data; ; {
		n := min(len(rest), 1<<16)
		last := uint32(0)
		if n == len(rest) {
			last = 1
		}
		block := last | uint32(n)<<3
		out = append(out, byte(block), byte(block>>8), byte(block>>16))
		out = append(out, rest[:n]...)
		if rest = rest[n:]; last == 1 {
			return out
		}
	}
}

// FuzzArchive: whatever the bytes of an archive, packed or not, epochs end. Two epochs, the second
// with the index of the first, deliver the same samples and the same error. The argument how
// selects the packing and the options.
func FuzzArchive(f *testing.F) {
	whole := archivetest.Images(f, 12, func(i int) bool { return i == 5 })
	web := archivetest.Tar(f, archivetest.Member{Name: "a/1.png", Data: archivetest.Image("1")},
		archivetest.Member{Name: "a/1.cls", Data: "3\n"}, archivetest.Member{Name: "a/2.json", Data: `{"label": "x"}`},
		archivetest.Member{Name: "a/2.png", Data: archivetest.Image("2")},
		archivetest.Member{Name: "a/3.png", Data: archivetest.Image("3")})
	strange := archivetest.Tar(f, archivetest.Member{Name: "class1/link", Kind: tar.TypeLink, Link: "x"},
		archivetest.Member{Name: "class1/\x7f", Data: "text"},
		archivetest.Member{Name: "class2/" + strings.Repeat("long/", 40) + "a.png",
			Data: archivetest.Image("long")},
		archivetest.Member{Name: "class3/s.png", Kind: tar.TypeSymlink, Link: "b"})
	for how := range uint8(16) {
		for _, data := range [][]byte{whole, whole[:3000], web, strange,
			append(whole[:len(whole):len(whole)], web...)} {
			f.Add(data, how)
		}
	}
	for _, packed := range [][]byte{archivetest.Gzip(f, whole), archivetest.Zstd(f, whole),
		archivetest.GzipSplit(f, whole, 700, 1), archivetest.Gzip(f, whole[:3000]),
		append(archivetest.Gzip(f, web), archivetest.Gzip(f, strange)...)} {
		f.Add(packed, uint8(0))
		f.Add(packed[:len(packed)/2], uint8(4))
	}
	f.Fuzz(func(t *testing.T, data []byte, how uint8) {
		o := Options{BatchSize: 4, Transform: Eval(2, 2), BadSamples: Skip, Shuffle: true, Workers: 2,
			MaxSampleBytes: 1 << 16, NoIndex: true}
		switch how & 3 {
		case 1:
			data = storedGzip(data)
		case 2:
			data = storedZstd(data)
		}
		if how&4 != 0 {
			o.Classes = []string{"class0", "class1", "class2", "class3", "class4"}
		}
		if how&8 != 0 {
			o.ShuffleBytes = 500
		}
		o.WebDataset = how&16 != 0
		if how&32 != 0 {
			o.BadSamples = Fail
		}
		l, err := open(t.Context(), "memory", o,
			func(string) (archive.File, error) { return memoryFile{bytes.NewReader(data)}, nil }, fakeCodec{})
		if err != nil {
			return
		}
		defer l.Close()
		first, err1 := collect(t, l, 0, 2)
		second, err2 := collect(t, l, 0, 2)
		if digest(first) != digest(second) || (err1 == nil) != (err2 == nil) {
			t.Errorf("%d samples, error %v, then %d samples, error %v", len(names(first)), err1,
				len(names(second)), err2)
		}
		if n := l.Len(); err1 == nil && (n < len(names(first)) || n < 1) {
			t.Errorf("%d samples of %d", len(names(first)), n)
		}
	})
}

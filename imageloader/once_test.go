package imageloader

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// measuredFile counts the bytes that are read from it.
type measuredFile struct {
	archive.File
	bytes *atomic.Int64
}

func (f *measuredFile) Read(p []byte) (int, error) {
	n, err := f.File.Read(p)
	f.bytes.Add(int64(n))
	return n, err
}

func (f *measuredFile) ReadAt(p []byte, at int64) (int, error) {
	n, err := f.File.ReadAt(p, at)
	f.bytes.Add(int64(n))
	return n, err
}

// TestOpenAndEpochsReadAnArchiveOnce: an archive that fits in memory is read once, by Open, or with
// Classes by the first epoch. Beyond that, opening it reads its start.
func TestOpenAndEpochsReadAnArchiveOnce(t *testing.T) {
	noise, content := rand.NewChaCha8([32]byte{3}), make([]byte, 40_000)
	var members, web []archivetest.Member
	list := "path,label\n"
	for i := range 100 {
		if _, err := io.ReadFull(noise, content); err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprintf("class%d/%03d", i%5, i)
		image := archivetest.Member{Name: name + ".png", Data: archivetest.Image(string(content))}
		members = append(members, image)
		web = append(web, image, archivetest.Member{Name: name + ".cls", Data: fmt.Sprint(i % 5)})
		list += fmt.Sprintf("%s.png,%d\n", name, i%5)
	}
	labels := archivetest.WriteFile(t, "labels.csv", []byte(list))
	directories := []string{"class0", "class1", "class2", "class3", "class4"}
	for _, test := range []struct {
		name    string
		o       Options
		members []archivetest.Member
		byOpen  bool // Open reads the archive
	}{
		{"directories", Options{}, members, true},
		{"given classes", Options{Classes: directories}, members, false},
		{"WebDataset", Options{WebDataset: true}, web, true},
		{"list", Options{List: labels}, members, true},
		{"no index", Options{NoIndex: true}, members, true},
	} {
		for _, format := range []string{"a.tgz", "a.tar.zst"} {
			t.Run(test.name+", "+format, func(t *testing.T) {
				data := archivetest.Tar(t, test.members...)
				if format == "a.tgz" {
					data = archivetest.Gzip(t, data)
				} else {
					data = archivetest.Zstd(t, data)
				}
				path := archivetest.WriteFile(t, format, data)
				o := test.o
				o.Transform, o.Shuffle, o.IndexFile = Eval(4, 4), true, filepath.Join(t.TempDir(), "index")
				var bytes atomic.Int64
				l, err := open(t.Context(), path, o, func(path string) (archive.File, error) {
					f, err := os.Open(path)
					return &measuredFile{f, &bytes}, err
				}, fakeCodec{})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				// Each opening reads a buffer of 256 KiB. The index has digests of both ends.
				const opening = 600_000
				size := int64(len(data))
				if got, least := bytes.Load(), size; test.byOpen != (got >= least) || got > size+opening {
					t.Errorf("Open reads %d bytes of %d, want all of them once: %v", got, size, test.byOpen)
				}
				for epoch := range 3 {
					got, err := collect(t, l, epoch, 2)
					if err != nil || len(names(got)) != 100 {
						t.Fatalf("epoch %d has %d samples, error %v, want 100 and nil", epoch, len(names(got)), err)
					}
					if got, most := bytes.Load(), size+int64(epoch+2)*opening; got < size || got > most {
						t.Errorf("after epoch %d, %d bytes of %d are read, want at least all and at most %d",
							epoch, got, size, most)
					}
				}
			})
		}
	}
}

// TestFittingSamplesStayInMemoryAfterAWrongEstimate: if an archive starts with its images, they
// seem not to fit in memory. They fit, so later epochs have them in memory.
func TestFittingSamplesStayInMemoryAfterAWrongEstimate(t *testing.T) {
	noise := rand.NewChaCha8([32]byte{4})
	random := func(n int) string {
		b := make([]byte, n)
		if _, err := io.ReadFull(noise, b); err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	var members []archivetest.Member
	total := int64(0)
	for i := range 60 {
		image := archivetest.Image(random(20_000))
		total += int64(len(image))
		members = append(members, archivetest.Member{Name: fmt.Sprintf("class%d/%03d.png", i%5, i), Data: image})
	}
	for i := range 8 {
		members = append(members, archivetest.Member{Name: fmt.Sprintf("other/%d.bin", i), Data: random(1 << 20)})
	}
	data := archivetest.Tar(t, members...)
	directories := []string{"class0", "class1", "class2", "class3", "class4"}
	for name, packed := range map[string][]byte{"a.tgz": archivetest.Gzip(t, data), "a.tar.zst": archivetest.Zstd(t, data)} {
		path := archivetest.WriteFile(t, name, packed)
		for _, classes := range [][]string{nil, directories} {
			l := openFake(t, path, Options{Transform: Eval(4, 4), Shuffle: true, ShuffleBytes: total, Classes: classes})
			whole := ""
			for range 3 {
				got, err := collect(t, l, 7, 2)
				if err != nil || len(names(got)) != 60 {
					t.Fatalf("%d samples, error %v, want 60 and nil", len(names(got)), err)
				}
				if whole == "" {
					whole = digest(got)
				}
				if digest(got) != whole {
					t.Errorf("%s, classes %v: the epoch differs from its first run", name, classes)
				}
			}
			bytes := int64(0)
			for i := range l.Len() {
				bytes += int64(len(l.index.Load().InMemory(i)))
			}
			if bytes != total {
				t.Errorf("%s, classes %v: %d bytes are in memory, want %d", name, classes, bytes, total)
			}
		}
	}
}

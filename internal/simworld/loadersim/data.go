package loadersim

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/internal/simworld/imagecapi"
	"github.com/torchstream/torchstream/internal/simworld/world"
)

// Member is a file of the archive.
type Member struct {
	Name  string
	Data  []byte
	Bad   bool
	Label int
}

// drawMembers draws the files of an archive: images in the directories of classes, some of them
// damaged.
func drawMembers(w *world.World) (members []Member, classes []string) {
	n := []int{6, 1, 2, 3, 4, 5, 7, 8, 9, 12, 17, 25}[w.Choose("samples", 12)]
	k := min(n, 1+w.Choose("classes", 3))
	for c := range k {
		classes = append(classes, fmt.Sprintf("c%d", c))
	}
	damage := w.Choose("damage", 3) // 0: none
	for i := range n {
		label := i % k
		m := Member{Name: fmt.Sprintf("%s/i%02d.png", classes[label], i), Label: label}
		payload := bytes.Repeat([]byte{byte(i), byte(w.Choose("payload", 256))}, 20+w.Choose("size", 700))
		m.Data = imagecapi.Image(8+i%5, 6+i%7, payload)
		if damage > 0 && w.Choose("bad", 6) == 5 {
			m.spoil(w.Choose("spoil", 4))
		}
		members = append(members, m)
	}
	return members, classes
}

// spoil makes a sample bad in one of several ways.
func (m *Member) spoil(way int) {
	m.Bad = true
	switch way {
	case 0:
		m.Data[len(m.Data)-1] ^= 1 // the checksum
	case 1:
		m.Data = []byte("this is not an image")
	case 2:
		m.Data = nil
	case 3:
		m.Data = m.Data[:10] // ends in the header
	}
}

// Format is a format of an archive.
type Format int

// The formats.
const (
	Tar Format = iota
	TarGzip
	Tree
	Zip
	TwoTars
	TwoGzips
	formats
)

// gzipped reports whether the format is read as a stream.
func (f Format) gzipped() bool { return f == TarGzip || f == TwoGzips }

// indexed reports whether archives of the format have an index file.
func (f Format) indexed() bool { return f != Tree && f != Zip }

// path returns the path of the archive, and the path of its index.
func (f Format) path() (archive, index string) {
	switch f {
	case TarGzip:
		return folder + "/train.tgz", folder + "/train.tgz.tsidx"
	case Tree:
		return folder + "/train", ""
	case Zip:
		return folder + "/train.zip", ""
	case TwoTars:
		return folder + "/train-{0..1}.tar", folder + "/train-0.tar+1.tsidx"
	case TwoGzips:
		return folder + "/train-{0..1}.tgz", folder + "/train-0.tgz+1.tsidx"
	}
	return folder + "/train.tar", folder + "/train.tar.tsidx"
}

// pack writes an archive of the members to the disk. It returns the members in the archive's order.
func (f Format) pack(w *world.World, members []Member) ([]Member, error) {
	archive, _ := f.path()
	shard := func(i int) string { return strings.Replace(archive, "{0..1}", fmt.Sprint(i), 1) }
	switch f {
	case Tree:
		members = slices.Clone(members)
		slices.SortFunc(members, func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
		for _, m := range members {
			w.Disk.Write(archive+"/"+m.Name, m.Data)
		}
		return members, nil
	case TwoTars, TwoGzips:
		half := (len(members) + 1) / 2
		for i, part := range [][]Member{members[:half], members[half:]} {
			data, err := packFile(w, f, part)
			if err != nil {
				return nil, err
			}
			w.Disk.Write(shard(i), data)
		}
		return members, nil
	}
	data, err := packFile(w, f, members)
	w.Disk.Write(archive, data)
	return members, err
}

// packFile makes a file with some members.
func packFile(w *world.World, f Format, members []Member) ([]byte, error) {
	var b bytes.Buffer
	var err error
	switch {
	case f == Zip:
		err = packZip(w, &b, members)
	case f.gzipped():
		g := gzip.NewWriter(&b)
		flush := func() error { return nil }
		if w.Choose("flush", 2) == 1 { // a block for each member
			flush = g.Flush
		}
		if err = packTar(g, members, flush); err == nil {
			err = g.Close()
		}
	default:
		err = packTar(&b, members, func() error { return nil })
	}
	return b.Bytes(), err
}

func packTar(to io.Writer, members []Member, flush func() error) error {
	t := tar.NewWriter(to)
	for _, m := range members {
		h := tar.Header{Name: m.Name, Mode: 0o644, Size: int64(len(m.Data)), Format: tar.FormatUSTAR}
		if err := t.WriteHeader(&h); err != nil {
			return err
		}
		if _, err := t.Write(m.Data); err != nil {
			return err
		}
		if err := t.Flush(); err != nil {
			return err
		}
		if err := flush(); err != nil {
			return err
		}
	}
	return t.Close()
}

func packZip(w *world.World, to io.Writer, members []Member) error {
	z := zip.NewWriter(to)
	for _, m := range members {
		f, err := z.CreateHeader(&zip.FileHeader{Name: m.Name, Method: []uint16{zip.Store, zip.Deflate}[w.Choose("deflate", 2)]})
		if err != nil {
			return err
		}
		if _, err := f.Write(m.Data); err != nil {
			return err
		}
	}
	return z.Close()
}

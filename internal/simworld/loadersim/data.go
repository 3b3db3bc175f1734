package loadersim

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/parquettest"
	"github.com/torchstream/torchstream/internal/simworld/imagecapi"
	"github.com/torchstream/torchstream/internal/simworld/world"
)

// Member is a file of the archive.
type Member struct {
	Name  string
	Data  []byte
	Bad   bool
	Label int
	torn  bool // a zip has another checksum of it
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
	larger := 1
	if w.Choose("large samples", 12) == 11 { // an archive of several requests
		larger = 20
	}
	for i := range n {
		label := i % k
		m := Member{Name: fmt.Sprintf("%s/i%02d.png", classes[label], i), Label: label}
		payload := bytes.Repeat([]byte{byte(i), byte(w.Choose("payload", 256))}, larger*(20+w.Choose("size", 700)))
		m.Data = imagecapi.Image(8+i%5, 6+i%7, payload)
		if damage > 0 && w.Choose("bad", 6) == 5 {
			m.spoil(w.Choose("spoil", 5))
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
	case 4:
		m.torn = true
	}
}

// otherPayload returns the member with other pixels in a file of the same size.
func (m Member) otherPayload() Member {
	if !m.Bad {
		width, height := int(m.Data[8]), int(m.Data[10])
		payload := bytes.Clone(m.Data[12 : len(m.Data)-4])
		for i := range payload {
			payload[i] ^= 0x55
		}
		m.Data = imagecapi.Image(width, height, payload)
	}
	return m
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
	Parquet
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
	case Parquet:
		return folder + "/train.parquet", folder + "/train.parquet.tsidx"
	}
	return folder + "/train.tar", folder + "/train.tar.tsidx"
}

// files returns the names of the archive's files. A tree has one.
func (f Format) files() []string {
	archive, _ := f.path()
	if f != TwoTars && f != TwoGzips {
		return []string{archive}
	}
	return []string{strings.Replace(archive, "{0..1}", "0", 1), strings.Replace(archive, "{0..1}", "1", 1)}
}

// packing says how a file of an archive is packed.
type packing struct {
	flush   bool   // a deflate block for each member
	level   int    // of gzip
	joined  bool   // two archives, one after the other
	split   bool   // two gzip members, the first of which ends within a sample
	deflate []bool // for each member of a zip
	parquet parquettest.Layout
}

// drawPacking draws how each file of an archive is packed.
func (f Format) drawPacking(w *world.World, members []Member, classes []string) (list []packing) {
	for range f.files() {
		p := packing{level: gzip.DefaultCompression}
		switch {
		case f == Zip:
			for range members {
				p.deflate = append(p.deflate, w.Choose("deflate", 2) == 1)
			}
		case f == Parquet:
			p.parquet = parquettest.Layout{Classes: classes, Group: []int{0, 1, 3, 7}[w.Choose("group", 4)],
				Page: []int{0, 1, 2}[w.Choose("page", 3)], Snappy: w.Choose("snappy", 2) == 1}
		case f.gzipped():
			p.flush = w.Choose("flush", 2) == 1
			if w.Choose("stored gzip", 4) == 3 {
				p.level = gzip.NoCompression
			}
		}
		if f != Zip && f != Parquet {
			joined := w.Choose("joined", 5)
			p.joined, p.split = joined == 4, joined == 3 && f.gzipped()
		}
		list = append(list, p)
	}
	return list
}

// sorted returns the members in the archive's order.
func (f Format) sorted(members []Member) []Member {
	if f == Tree {
		members = slices.Clone(members)
		slices.SortFunc(members, func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
	}
	return members
}

// pack returns the files of an archive of the members.
func (f Format) pack(members []Member, how []packing) (map[string][]byte, error) {
	packed := map[string][]byte{}
	archive, _ := f.path()
	if f == Tree {
		for _, m := range members {
			packed[archive+"/"+m.Name] = m.Data
		}
		return packed, nil
	}
	names := f.files()
	share := (len(members) + len(names) - 1) / len(names)
	for i, name := range names {
		n := min(share, len(members))
		if i+1 == len(names) {
			n = len(members)
		}
		var err error
		if packed[name], err = how[i].file(f, members[:n]); err != nil {
			return nil, err
		}
		members = members[n:]
	}
	return packed, nil
}

// file makes a file with some members.
func (p *packing) file(f Format, members []Member) ([]byte, error) {
	var b bytes.Buffer
	switch {
	case f == Zip:
		err := packZip(&b, members, p.deflate)
		return b.Bytes(), err
	case f == Parquet:
		return packParquet(members, p.parquet), nil
	}
	parts := [][]Member{members}
	if half := len(members) / 2; p.joined && half > 0 {
		parts = [][]Member{members[:half], members[half:]}
	}
	for _, part := range parts {
		if err := p.tar(f, &b, part); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), nil
}

// tar appends a tar archive, or a compressed one.
func (p *packing) tar(f Format, to io.Writer, members []Member) error {
	if !f.gzipped() {
		return packTar(to, members, func() error { return nil })
	}
	if p.split {
		var b bytes.Buffer
		if err := packTar(&b, members, func() error { return nil }); err != nil {
			return err
		}
		half := b.Len()/2 + 100
		return errors.Join(p.gzip(to, func(g *gzip.Writer) error { _, err := g.Write(b.Bytes()[:half]); return err }),
			p.gzip(to, func(g *gzip.Writer) error { _, err := g.Write(b.Bytes()[half:]); return err }))
	}
	return p.gzip(to, func(g *gzip.Writer) error {
		flush := func() error { return nil }
		if p.flush {
			flush = g.Flush
		}
		return packTar(g, members, flush)
	})
}

// gzip appends a gzip member, whose content write writes.
func (p *packing) gzip(to io.Writer, write func(g *gzip.Writer) error) error {
	g, err := gzip.NewWriterLevel(to, p.level)
	if err != nil {
		return err
	}
	return errors.Join(write(g), g.Close())
}

// noTest is a testing.TB for packages that only call Helper.
type noTest struct{ testing.TB }

func (noTest) Helper() {}

func packParquet(members []Member, l parquettest.Layout) []byte {
	var rows []parquettest.Row
	for _, m := range members {
		rows = append(rows, parquettest.Row{Path: m.Name, Image: string(m.Data), Label: m.Label})
	}
	return parquettest.File(noTest{}, rows, l)
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

func packZip(to io.Writer, members []Member, deflate []bool) error {
	z := zip.NewWriter(to)
	for i, m := range members {
		h := &zip.FileHeader{Name: m.Name, Method: zip.Store}
		create := z.CreateHeader
		switch {
		case m.torn:
			h.CRC32, create = crc32.ChecksumIEEE(m.Data)+1, z.CreateRaw
			h.CompressedSize64, h.UncompressedSize64 = uint64(len(m.Data)), uint64(len(m.Data))
		case i < len(deflate) && deflate[i]:
			h.Method = zip.Deflate
		}
		f, err := create(h)
		if err != nil {
			return err
		}
		if _, err := f.Write(m.Data); err != nil {
			return err
		}
	}
	return z.Close()
}

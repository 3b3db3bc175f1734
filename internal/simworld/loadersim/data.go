package loadersim

import (
	"archive/tar"
	"bytes"
	"fmt"

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

// packTar makes a tar of the members.
func packTar(members []Member) ([]byte, error) {
	var b bytes.Buffer
	t := tar.NewWriter(&b)
	for _, m := range members {
		h := tar.Header{Name: m.Name, Mode: 0o644, Size: int64(len(m.Data)), Format: tar.FormatUSTAR}
		if err := t.WriteHeader(&h); err != nil {
			return nil, err
		}
		if _, err := t.Write(m.Data); err != nil {
			return nil, err
		}
	}
	err := t.Close()
	return b.Bytes(), err
}

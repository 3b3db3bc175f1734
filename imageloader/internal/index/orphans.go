package index

import (
	"encoding/binary"
	"log/slog"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Orphan is an image without a label. It is not a sample.
type Orphan struct {
	Name   string // name of the member
	Reason string
}

// MaxOrphans is the maximum number of images without a label whose names are kept.
const MaxOrphans = 10

// Reasons of orphans. They are positions in orphanReasons, and numbers in an index file.
const (
	orphanNoLabel = iota
	orphanNoField
	orphanNoFieldOfList
	orphanNoExtension
	orphanDotted
	orphanNull
)

var orphanReasons = [...]string{
	"no .cls or .json member with its key is next to it in the shard",
	"its .json has none of the fields label, cls and class",
	"its .json has none of the fields labels, label, cls and class",
	"its name has no extension, and so it belongs to no sample",
	"no .cls or .json member of the shard has its key, which is the name up to the first dot",
	"its row has no label",
}

// addOrphan counts an image without a label, and keeps the names of the first ones.
func (b *Builder) addOrphan(name string, reason int) {
	b.orphans++
	if len(b.orphansNamed) < MaxOrphans {
		b.orphansNamed = append(b.orphansNamed, Orphan{name, orphanReasons[reason]})
	}
}

// warnOfOrphans logs the number of images without a label, and names the first of them.
func warnOfOrphans(log *slog.Logger, archive string, count int, named []Orphan) {
	if count == 0 {
		return
	}
	log.Warn("images without a label are ignored", "archive", archive, "images", count)
	for _, o := range named {
		log.Warn("image without a label is ignored", "archive", archive, "name", o.Name, "reason", o.Reason)
	}
}

// orphanHead is the size of an orphan in an index file, without its name.
const orphanHead = 8

// encodeOrphans returns the section of orphans.
func encodeOrphans(list []Orphan) (data []byte) {
	for _, o := range list {
		reason := 0
		for i, text := range orphanReasons {
			if text == o.Reason {
				reason = i
			}
		}
		data = binary.LittleEndian.AppendUint32(data, uint32(reason))
		data = binary.LittleEndian.AppendUint32(data, uint32(len(o.Name)))
		data = append(data, o.Name...)
	}
	return data
}

// loadOrphans reads the section of orphans.
func (s *sidecar) loadOrphans() (list []Orphan, err error) {
	if p := s.places[sectionOrphans]; p.count > MaxOrphans || p.size > MaxOrphans*(orphanHead+archive.MaxNameBytes) {
		return nil, errIndexDamaged
	}
	data, n, err := s.read(sectionOrphans, orphanHead)
	if err != nil {
		return nil, err
	}
	for range n {
		if len(data) < orphanHead {
			return nil, errIndexDamaged
		}
		reason, length := binary.LittleEndian.Uint32(data), binary.LittleEndian.Uint32(data[4:])
		data = data[orphanHead:]
		if int64(reason) >= int64(len(orphanReasons)) || int64(length) > int64(len(data)) {
			return nil, errIndexDamaged
		}
		list = append(list, Orphan{string(data[:length]), orphanReasons[reason]})
		data = data[length:]
	}
	return list, nil
}

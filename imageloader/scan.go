package imageloader

import (
	"hash/crc32"
	"io"
	"time"
)

// scan reads the archive through and makes the index. Of a plain .tar and a directory it reads the headers alone, so that their samples have no checksums.
func (l *Loader) scan(a *archive) (*index, error) {
	began := time.Now()
	l.o.Logger.Info("scanning archive", "archive", l.path, "bytes", a.info.Size())
	x, err := newIndexer(l.path, l.o.Classes)
	if err != nil {
		return nil, err
	}
	x.hold(l.o.ShuffleBytes)
	if err := a.noteCheckpoints(); err != nil {
		return nil, err
	}
	for {
		m, head, err := a.nextHead()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		s, number, err := x.add(&m, head)
		if err != nil {
			return nil, err
		}
		if number < 0 || m.kind != kindFile {
			continue
		}
		if !a.streamed() {
			x.keeping = false // no need
			continue
		}
		if a.mark != nil && m.size > 0 {
			a.mark.member(m.offset)
		}
		var data []byte
		if s.Index >= 0 && m.size <= l.o.MaxSampleBytes {
			if x.wants(m.size) {
				data = make([]byte, m.size)
			}
			x.keep(number, data, m.size)
		}
		crc, err := a.content(&m, head, data)
		if err != nil {
			return nil, err
		}
		x.sum(number, crc)
	}
	orphans := x.orphans
	index := l.saveIndex(a, x)
	l.o.Logger.Info("scanned archive", "archive", l.path, "samples", len(index.entries), "classes", len(index.classes), "ignored", index.ignored,
		"seconds", time.Since(began).Seconds())
	if orphans > 0 {
		l.o.Logger.Warn("images outside of any directory have no class and are ignored", "archive", l.path, "images", orphans)
	}
	if len(index.entries) == 0 {
		_ = index.close() // nothing was kept
		return nil, l.noSamples(a.names, orphans)
	}
	return index, nil
}

// content reads a member's content, whose first bytes are head, into data if that is not nil, and takes its checksum.
func (a *archive) content(m *member, head, data []byte) (crc uint32, err error) {
	if data != nil {
		err = a.rest(head, data)
		return crc32.ChecksumIEEE(data), err
	}
	crc = crc32.ChecksumIEEE(head)
	for left := m.size - int64(len(head)); left > 0; {
		piece := a.scratch()[:min(left, skipBytes)]
		if err := a.read(piece); err != nil {
			return 0, err
		}
		crc = crc32.Update(crc, crc32.IEEETable, piece)
		left -= int64(len(piece))
	}
	return crc, nil
}

package imageloader

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"time"
)

// scan reads the archive through and makes the index. Of a plain .tar and a directory it reads the headers alone, so that their samples have no checksums.
func (l *Loader) scan(a *archive) (*index, error) {
	x, err := l.collect(a, l.o.ShuffleBytes, nil)
	if err != nil {
		return nil, err
	}
	defer x.close()
	index, err := l.saveIndex(a, x)
	if err != nil {
		return nil, fmt.Errorf("imageloader: %s: making the index: %w", l.path, err)
	}
	if len(index.entries) == 0 {
		_ = index.close() // nothing was kept
		return nil, l.noSamples(a.names, x.orphans)
	}
	if index.held == nil && index.fits(l.o.ShuffleBytes, l.o.MaxSampleBytes) {
		if err := l.holdAfter(a, index); err != nil {
			_ = index.close() // err says more
			return nil, err
		}
	}
	return index, nil
}

// collect reads the archive through for its index. hold is how many bytes of contents are kept with it at most; 0: none.
func (l *Loader) collect(a *archive, hold int64, progress func(Progress)) (_ *indexer, err error) {
	began := time.Now()
	l.o.Logger.Info("scanning archive", "archive", l.path, "bytes", a.info.Size())
	x, err := l.indexer()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			x.close()
		}
	}()
	x.spools(l.spoolBeside(a))
	if hold > 0 {
		x.hold(hold)
	}
	if err := a.noteCheckpoints(x.mark); err != nil {
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
		if progress != nil && a.names%64 == 1 {
			progress(a.progress())
		}
		var s Sample
		var number int
		if l.o.WebDataset {
			var label []byte
			if isWebLabel(&m) {
				label = make([]byte, m.size)
				if err := a.rest(head, label); err != nil {
					return nil, err
				}
			}
			if s, number, err = x.addWeb(&m, head, label); err != nil {
				return nil, a.fail(err)
			}
		} else if s, number, err = x.add(&m, head); err != nil {
			return nil, err
		}
		if number < 0 || m.kind != kindFile {
			continue
		}
		image := x.last.flags&entryImage != 0
		if !a.streamed() {
			x.keeping = false // no need
			if a.format == formatTar {
				x.sum(m.block, entryBlock)
				if image {
					h, _, err := a.header(l.codec, &m, head)
					if err != nil {
						return nil, err
					}
					x.head(h)
				}
			}
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
		crc, h, err := a.content(l.codec, image, &m, head, data)
		if err != nil {
			return nil, err
		}
		x.head(h)
		x.sum(crc, entrySummed)
	}
	if x.web != nil {
		if err := x.closeWeb(); err != nil {
			return nil, err
		}
	}
	l.o.Logger.Info("scanned archive", "archive", l.path, "members", x.count, "ignored", x.ignored, "seconds", time.Since(began).Seconds())
	if x.orphans > 0 {
		l.o.Logger.Warn("images outside of any directory have no class and are ignored", "archive", l.path, "images", x.orphans)
	}
	return x, nil
}

// holdAfter keeps in memory what a loader that finds the index would: it counts the samples alone, which are known at the end. Both have to have the same order.
func (l *Loader) holdAfter(a *archive, x *index) error {
	again, err := openArchive(a.ctx, l.path, l.open)
	if err != nil {
		return err
	}
	defer func() { _ = again.Close() }() // only read
	return x.hold(again, l.o.ShuffleBytes, l.o.MaxSampleBytes)
}

// content reads a member's content, whose first bytes are head, into data if that is not nil, takes its checksum, and if it is an image looks for its header.
func (a *archive) content(c codec, image bool, m *member, head, data []byte) (crc uint32, h imageHead, err error) {
	if data != nil {
		if err := a.rest(head, data); err != nil {
			return 0, h, err
		}
		if image {
			h, _ = headOf(c, data, true)
		}
		return crc32.ChecksumIEEE(data), h, nil
	}
	first := head
	if image {
		if h, first, err = a.header(c, m, head); err != nil {
			return 0, h, err
		}
	}
	crc = crc32.ChecksumIEEE(first)
	for left := m.size - int64(len(first)); left > 0; {
		piece := a.scratch()[:min(left, skipBytes)]
		if err := a.read(piece); err != nil {
			return 0, h, err
		}
		crc = crc32.Update(crc, crc32.IEEETable, piece)
		left -= int64(len(piece))
	}
	return crc, h, nil
}

// progress is how far the archive has been read.
func (a *archive) progress() Progress {
	p := Progress{Members: a.names, TotalBytes: a.info.Size()}
	for i := range a.shard {
		p.Bytes += a.shards[i].info.Size()
	}
	if a.streamed() {
		p.Bytes += a.packed.count
	} else {
		p.Bytes += a.in.offset
	}
	return p
}

// IndexReport is what MakeIndex has made.
type IndexReport struct {
	File        string // the index
	Bytes       int64  // its size
	Samples     int
	Classes     int
	Checkpoints int // of gzip files
	// Random says whether samples can be read in any order, and Work how many bytes are read or inflated for one of samples then. An archive that only can be
	// read in its own order has no Work.
	Random bool
	Work   float64
}

// MakeIndex reads an archive through and writes its index, as the first epoch over it does by itself, whether or not there is one. Of the options IndexFile,
// Classes, WebDataset, OpenSource and Logger matter; WebDataset has to be what the loaders have, which do not use the index otherwise. progress, if not nil, is called now and then
// from MakeIndex's own goroutine. A directory needs no index: an error.
func MakeIndex(ctx context.Context, path string, o Options, progress func(Progress)) (*IndexReport, error) {
	o.NoIndex = false
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Loader{path: path, o: o, open: opener{openFile, o.OpenSource}, codec: shimCodec{}}
	a, err := openArchive(ctx, path, l.open)
	if err != nil {
		return nil, stopCause(ctx, err)
	}
	defer func() { _ = a.Close() }() // only read
	if a.format == formatTree {
		return nil, fmt.Errorf("imageloader: %s is a directory, which needs no index", path)
	}
	x, err := l.collect(a, 0, progress)
	if err != nil {
		return nil, stopCause(ctx, err)
	}
	defer x.close()
	r := &IndexReport{Checkpoints: x.marked}
	if r.Samples, r.Work, err = x.survey(a); err != nil {
		return nil, fmt.Errorf("imageloader: %s: making the index: %w", path, err)
	}
	if r.Samples == 0 {
		return nil, l.noSamples(a.names, x.orphans)
	}
	classes, _ := x.labels()
	r.Classes, r.Random = len(classes), randomBy(r.Work)
	s := l.writeIndex(a, x)
	if s == nil {
		return nil, errors.New("imageloader: " + path + ": the index can't be written, neither beside the archive nor in the cache folder: give another place for it")
	}
	defer func() { _ = s.close() }() // only read
	info, err := s.file.Stat()
	if err != nil {
		return nil, fmt.Errorf("imageloader: %w", err)
	}
	r.File, r.Bytes = s.path, info.Size()
	return r, nil
}

package index

import (
	"hash/crc32"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Found is a member that a walk has come to and that is a sample, or may become one.
type Found struct {
	archive.Member
	Index int // among the samples, as far as is known: see Visitor
	Label int // with given classes
	Dir   int // the number of its directory: see Labels
}

// Visitor takes part in a walk. With given classes it meets the samples, and their indexes and
// labels are final. Without, it meets every member that lies in a directory, in order, with its
// number among them as its index: whether the directory is a class is known at the end only.
type Visitor interface {
	// Buffer returns memory for the content of a sample, of its size; nil if the content is not
	// wanted.
	Buffer(f *Found) ([]byte, error)
	// Visit takes the sample, when its content has been read into the buffer.
	Visit(f *Found, data []byte) error
}

// Walk reads the archive to its end, calls v for the samples, and collects what an index of them
// needs. v may be nil.
//
// The samples of a plain .tar and of a directory can be read in any order without more: of these
// Walk reads the headers alone, unless v wants the contents, and so their records have no
// checksums. It takes the checksum of every member of a compressed shard that is recorded.
func (b *Builder) Walk(a *archive.Archive, v Visitor) error {
	b.spoolTo(spoolBeside(indexPaths(&b.config, a)))
	if err := a.Checkpoints(b.mark); err != nil {
		return err
	}
	w := walk{b: b, a: a, visitor: v, record: true}
	return w.run()
}

// WalkLabels reads the archive to its end and calls v for the samples, but collects nothing for an
// index of them: only the Labels are known at the end.
func (b *Builder) WalkLabels(a *archive.Archive, v Visitor) error {
	w := walk{b: b, a: a, visitor: v}
	return w.run()
}

// walk is a walk over an archive.
type walk struct {
	b       *Builder
	a       *archive.Archive
	visitor Visitor // may be nil
	record  bool    // an index is made of what is found
	found   Found
}

func (w *walk) run() error {
	b, a := w.b, w.a
	for m, err := range a.Members() {
		if err != nil {
			return err
		}
		magic, err := a.Magic()
		if err != nil {
			return err
		}
		if b.config.Progress != nil && a.Position()%64 == 1 {
			b.config.Progress(a.Progress())
		}
		number, err := w.add(&m, magic)
		if err != nil {
			return err
		}
		if number >= 0 {
			if err := w.visit(); err != nil {
				return err
			}
		}
	}
	if b.web != nil {
		return b.closeGroup()
	}
	return nil
}

// add adds a member to the builder and to w.found. The number is -1 if it can't be a sample.
func (w *walk) add(m *archive.Member, magic []byte) (number int, err error) {
	b, a := w.b, w.a
	w.found = Found{Member: *m}
	if b.web == nil {
		number, w.found.Index, w.found.Label, err = b.add(m, magic)
		w.found.Dir = int(b.last.label)
		return number, err
	}
	var label []byte
	if isWebLabel(m) {
		label = make([]byte, m.Size)
		if err := a.Content(label); err != nil {
			return -1, err
		}
	}
	if number, err = b.addWeb(m, magic, label); err != nil {
		return -1, a.Fail(err)
	}
	w.found.Index = number
	return number, nil
}

// visit reads what is wanted of the newest member, completes its record, and hands it to the
// visitor.
func (w *walk) visit() error {
	b, a, f := w.b, w.a, &w.found
	sample, regular := f.Index >= 0, f.Kind == archive.Regular
	if w.visitor == nil && !regular {
		return nil
	}
	if w.record && regular {
		a.WantCheckpoint(&f.Member)
	}
	var data []byte
	var err error
	switch {
	case w.visitor != nil && sample:
		if data, err = w.visitor.Buffer(f); err != nil {
			return err
		}
	case w.visitor == nil && !a.Streamed():
		b.keeping = false // there is no need
	case w.visitor == nil && sample && f.Size <= b.config.MaxSampleBytes && b.wants(f.Size):
		data = b.room(f.Size)
	}
	if data != nil {
		err = a.Content(data)
	}
	if err == nil && w.record && regular {
		err = w.summarise(data)
	}
	if err == nil && w.visitor != nil && sample {
		err = w.visitor.Visit(f, data)
	}
	return err
}

// summarise completes the record of the newest member by its content, or if that is nil by what has
// to be read of it.
func (w *walk) summarise(data []byte) error {
	b, a, f := w.b, w.a, &w.found
	image := b.last.flags&recordImage != 0
	if data != nil {
		if image {
			b.lastHead, _ = headerOf(b.config.Codec, data, true)
		}
		b.sum(crc32.ChecksumIEEE(data), recordSummed)
	} else if a.Streamed() || a.PlainTar() {
		if image {
			h, err := peekHeader(a, b.config.Codec, &f.Member)
			if err != nil {
				return err
			}
			b.lastHead = h
		}
		if a.PlainTar() {
			b.sum(f.Block, recordBlock)
			return nil
		}
		crc, err := a.Checksum()
		if err != nil {
			return err
		}
		b.sum(crc, recordSummed)
	}
	if f.Index >= 0 && f.Size > 0 && f.Size <= b.config.MaxSampleBytes {
		if w.visitor != nil && b.wants(f.Size) {
			kept := b.room(f.Size)
			copy(kept, data) // the buffer is the visitor's
			data = kept
		}
		b.hold(data, f.Size)
	}
	return nil
}

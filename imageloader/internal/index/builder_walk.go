package index

import (
	"hash/crc32"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Found is a sample, or an image of WebDataset without a label, that a walk has reached.
type Found struct {
	archive.Member
	Index    int // among the samples
	Label    int // with given classes
	Dir      int // the number of its directory: see Labels
	Position int // its ordinal among all members and directories of the archive, from 1
	Group    int // the ordinal of its WebDataset group, from 1
}

// Visitor receives the samples of a walk, in order. If the classes are given, it knows each label
// at once, and otherwise only at the end of the archive. With WebDataset's labels, WalkLabels
// visits the image of each group when the group has ended. It also visits images without a label
// and the less preferred images of a group. These have Dir -1 and are not samples.
type Visitor interface {
	// Buffer returns memory of the sample's size for its content, or nil if the content is not
	// wanted.
	Buffer(f *Found) ([]byte, error)
	// Visit takes the sample, after its content has been read into the buffer.
	Visit(f *Found, data []byte) error
}

// Walk reads the archive to its end, calls v for the samples, and collects the records of an index.
// v may be nil.
//
// The samples of a plain .tar and of a directory can be read in any order without an index's help.
// Walk reads only their headers, unless v wants the contents, so their records have no checksums.
// It computes the checksum of every recorded member of a compressed shard.
func (b *Builder) Walk(a *archive.Archive, v Visitor) error {
	b.spoolTo(spoolBeside(indexPaths(&b.config, a)))
	if err := a.Checkpoints(b.mark); err != nil {
		return err
	}
	w := walk{b: b, a: a, visitor: v, record: true}
	if err := w.run(); err != nil {
		return err
	}
	b.config.warn(b.file, b.leftOut())
	return nil
}

// WalkLabels reads the archive to its end and calls v for the samples, but collects no records: the
// Builder only has the Labels at the end.
func (b *Builder) WalkLabels(a *archive.Archive, v Visitor) error {
	b.labelsOnly = true
	w := walk{b: b, a: a, visitor: v}
	switch {
	case b.web != nil:
		b.onGroup = w.endGroup
	case b.config.List != nil:
		w.listed = make([]bool, len(b.config.List.rows))
	}
	return w.run()
}

// walk is a walk over an archive.
type walk struct {
	b       *Builder
	a       *archive.Archive
	visitor Visitor // may be nil
	record  bool    // collects records for an index
	found   Found
	// waiting is the image of a WebDataset group whose label is not known yet, and waitingData its
	// content.
	waiting     Found
	waitingData []byte
	samples     int    // of the groups that have ended, or of the list
	listed      []bool // rows of the list that were met
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
	if err := b.endDirectories(a); err != nil {
		return err
	}
	if w.listed != nil {
		return b.config.List.missing(b.file, &b.unlisted, w.listed)
	}
	return nil
}

// add adds a member to the builder and to w.found. The number is -1 if the member can't be a
// sample.
func (w *walk) add(m *archive.Member, magic []byte) (number int, err error) {
	b, a := w.b, w.a
	b.clues.note(m.Name)
	w.found = Found{Member: *m, Position: a.Position()}
	if b.config.List != nil && b.labelsOnly {
		return w.addOfList(m, magic), nil
	}
	if b.config.Pairs != nil || b.config.List != nil {
		add := b.addPair
		if b.config.List != nil {
			add = b.addListed
		}
		number, err = add(m, magic)
		w.found.Index = number
		return number, err
	}
	if b.web == nil {
		number, w.found.Label, err = b.add(m, magic)
		w.found.Dir, w.found.Index = int(b.last.label), number
		return number, err
	}
	return w.addWeb(m, magic)
}

// addOfList adds a member to w.found if the list names it, with the number of its label as its
// directory.
func (w *walk) addOfList(m *archive.Member, magic []byte) (number int) {
	list := w.b.config.List
	row, listed := list.byPath[m.Name]
	if !listed {
		w.b.ignored++
		if claims(m, magic) {
			w.b.orphans++
			w.b.unlisted.note(list, m.Name)
		}
		return -1
	}
	w.listed[row] = true
	w.found.Dir, w.found.Index = int(list.rows[row].label), w.samples
	w.samples++
	return w.found.Index
}

// endGroup visits the image of a WebDataset group, now that its label is known.
func (w *walk) endGroup(label int32) error {
	f, data := w.waiting, w.waitingData
	w.waitingData = nil
	f.Dir, f.Index = int(label), -1
	if label >= 0 {
		f.Index = w.samples
		w.samples++
	}
	return w.visitor.Visit(&f, data)
}

// visit reads the newest member as far as needed, completes its record, and passes it to the
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
	data, err := w.content()
	if err == nil && w.record && regular {
		err = w.summarise(data)
	}
	if err == nil && w.visitor != nil && sample {
		if b.onGroup != nil {
			w.waiting, w.waitingData = *f, data
			return nil
		}
		err = w.visitor.Visit(f, data)
	}
	return err
}

// content returns the newest member's content if the visitor or the index wants it.
func (w *walk) content() ([]byte, error) {
	b, a, f := w.b, w.a, &w.found
	sample := f.Index >= 0
	var data []byte
	switch {
	case w.visitor != nil && sample:
		var err error
		if data, err = w.visitor.Buffer(f); err != nil {
			return nil, err
		}
	case w.visitor == nil && !a.Streamed():
		b.keeping = false // no contents need to be held
	case w.visitor == nil && sample && f.Size <= b.config.MaxSampleBytes && b.wants(f.Size):
		data = b.room(f.Size)
	}
	if data == nil {
		return nil, nil
	}
	return data, a.Content(data)
}

// summarise completes the record of the newest member from its content. If data is nil, it reads as
// much as needed.
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
			copy(kept, data) // a copy, because the buffer is the visitor's
			data = kept
		}
		b.hold(data, f.Size)
	}
	return nil
}

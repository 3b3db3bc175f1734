package index

import (
	"hash/crc32"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Found is a member that a walk has reached: a sample, or an image without a WebDataset label.
type Found struct {
	archive.Member
	Index    int // number among the samples
	Label    int // only with given classes
	Dir      int // number of its directory: see Labels
	Position int // its number among all members and directories of the archive, from 1
	Group    int // number of its WebDataset group, from 1
	// Damage is the reason why this member's content can't be read, although the archive can be
	// read. It may be nil.
	Damage *archive.MemberError
}

// Visitor receives the samples of a walk, in order. If classes are given, the labels are known at
// once. Otherwise they are known only at the end of the archive. With WebDataset, WalkLabels visits
// the image of a group at the end of the group. It also visits images without a label, and the
// images of a group that are not its sample. The Dir of such images is -1.
type Visitor interface {
	// Buffer returns memory for the sample's content, as large as the content. It returns nil if
	// the visitor does not need the content.
	Buffer(f *Found) ([]byte, error)
	// Visit is called after the sample's content has been read into the buffer. If f has Damage,
	// data is undefined.
	Visit(f *Found, data []byte) error
}

// Walk reads the archive to its end, calls v for the samples, and collects the records of an index.
// v may be nil.
//
// The samples of a plain .tar or a directory can be read in any order without checkpoints. Walk
// reads only their headers, unless v needs the contents, so their records have no checksums. In a
// compressed shard, Walk computes the checksum of every recorded member.
func (b *Builder) Walk(a *archive.Archive, v Visitor) error {
	b.spoolTo(spoolOf(&b.config, a))
	if err := a.Checkpoints(b.records.mark); err != nil {
		return err
	}
	w := walk{b: b, a: a, visitor: v, record: true}
	if err := w.run(); err != nil {
		return err
	}
	b.config.warn(b.file, b.leftOut())
	return nil
}

// WalkLabels reads the archive to its end and calls v for the samples, but collects no records.
// Afterwards the Builder has only the Labels.
func (b *Builder) WalkLabels(a *archive.Archive, v Visitor) error {
	b.records.discard = true
	w := walk{b: b, a: a, visitor: v}
	switch {
	case b.web != nil:
		b.onGroup = w.endGroup
	case b.config.List != nil:
		w.listed = newListMatcher(b.config.List, b.file)
	}
	return w.run()
}

// walk is a walk through an archive.
type walk struct {
	b       *Builder
	a       *archive.Archive
	visitor Visitor // may be nil
	record  bool    // collect records for an index
	found   Found
	// waiting is the image of a WebDataset group whose label is not known yet, and waitingData is
	// its content.
	waiting     Found
	waitingData []byte
	samples     int          // in the groups that have ended, or in the list
	listed      *listMatcher // nil: there is no list
	reported    time.Time    // when Config.Progress was last called
}

// progressEvery is the maximum interval between two calls of Config.Progress, apart from the time
// for one member.
const progressEvery = 100 * time.Millisecond

func (w *walk) run() error {
	b, a := w.b, w.a
	b.dirs.named, b.dirs.columns = a.Table()
	if a.Format() == archive.Tree {
		b.clues.folder = a.Path()
	}
	var m archive.Member // one for all, because its address escapes
	for member, err := range a.Members() {
		if err != nil {
			return err
		}
		m = member
		magic, err := magicOf(a, &m)
		if err != nil {
			return err
		}
		w.progress()
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
	b.ignored += a.Imageless()
	if b.web != nil {
		return b.closeGroup()
	}
	if err := b.endDirectories(a); err != nil {
		return err
	}
	if w.listed != nil {
		var err error
		if b.listed, err = w.listed.finish(b.config.Logger); err != nil {
			return err
		}
		b.orphans = b.listed.Unlisted
	}
	return nil
}

// progress reports the progress of the walk, unless it has just done so.
func (w *walk) progress() {
	if w.b.config.Progress == nil {
		return
	}
	if now := time.Now(); w.a.Position()%64 == 1 || now.Sub(w.reported) >= progressEvery {
		w.reported = now
		w.b.config.Progress(w.a.Progress())
	}
}

// add adds a member to the Builder and to w.found. The number is -1 if the member can't be a
// sample.
func (w *walk) add(m *archive.Member, magic []byte) (number int, err error) {
	b, a := w.b, w.a
	b.clues.note(m.Name)
	w.found = Found{Member: *m, Position: a.Position()}
	if b.config.List != nil && b.records.discard {
		return w.addOfList(m, magic)
	}
	if b.config.Pairs != nil || b.config.List != nil {
		add := b.addListed
		if b.config.Pairs != nil && !b.config.Pairs.Boxes {
			add = b.addPair
		}
		number, err = add(m, magic)
		w.found.Index = number
		return number, err
	}
	if b.web == nil {
		if b.config.Parquet {
			number, w.found.Label, err = b.addRow(m)
		} else {
			number, w.found.Label, err = b.add(m, magic)
		}
		w.found.Dir, w.found.Index = int(b.records.newest.label), number
		return number, err
	}
	return w.addWeb(m, magic)
}

// addOfList adds a member to w.found if the list names it. Dir is the number of its label.
func (w *walk) addOfList(m *archive.Member, magic []byte) (number int, err error) {
	row, err := w.listed.match(m.Name, claims(m, magic))
	if err != nil {
		return -1, err
	}
	if row < 0 {
		w.b.ignored++
		return -1, nil
	}
	w.found.Dir, w.found.Index = int(w.b.config.List.rows[row].label), w.samples
	w.samples++
	return w.found.Index, nil
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

// visit reads as much of the newest member as necessary, completes the member's record, and passes
// the member to the visitor.
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
	if err == nil && w.record && regular && f.Damage == nil {
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

// content returns the newest member's content. It returns nil if neither the visitor nor the index
// needs the content.
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
		b.held.keeping = false // no need to keep contents in memory
	case w.visitor == nil && sample && f.Size <= b.config.MaxSampleBytes && b.held.wants(f.Size):
		data = b.held.room(f.Size)
	}
	if data == nil {
		return nil, nil
	}
	err := a.Content(data)
	if f.Damage = archive.MemberDamage(err); f.Damage != nil {
		return data, nil
	}
	return data, err
}

// magicOf returns the first bytes of the archive's current member, if they may decide whether the
// member is a sample. In a zip, each such read costs time, so the result is nil if the name
// decides. It is also nil if the bytes are damaged.
func magicOf(a *archive.Archive, m *archive.Member) ([]byte, error) {
	if a.InParquet() {
		return a.Peek(tarHeaderBytes) // peekHeader needs them, and each read costs time
	}
	zipped := a.InZip()
	if zipped && claimsByName(m.Name) {
		return nil, nil
	}
	magic, err := a.Magic()
	if zipped && archive.MemberDamage(err) != nil {
		return nil, nil // reading the content returns the error again
	}
	return magic, err
}

// summarise completes the record of the newest member from its content. If data is nil, it reads as
// much of the content as necessary.
func (w *walk) summarise(data []byte) error {
	b, a, f := w.b, w.a, &w.found
	image := b.records.newest.flags&recordImage != 0
	if data != nil {
		if image {
			b.records.newest.head, _ = headerOf(b.config.Codec, data, true)
		}
		b.records.newest.sum(crc32.ChecksumIEEE(data), recordSummed)
	} else if a.Streamed() || a.PlainTar() || a.InParquet() {
		if image {
			h, err := peekHeader(a, b.config.Codec, &f.Member)
			if err != nil {
				return err
			}
			b.records.newest.head = h
		}
		if a.PlainTar() {
			b.records.newest.sum(f.Block, recordBlock)
			return nil
		}
		if f.Stored {
			return nil
		}
		crc, err := a.Checksum()
		if err != nil {
			return err
		}
		b.records.newest.sum(crc, recordSummed)
	}
	if f.Index >= 0 && f.Size > 0 && f.Size <= b.config.MaxSampleBytes {
		if w.visitor == nil || a.Format() == archive.TarGzip { // a wrong estimate can be made good: see Build, giveContents
			b.held.survey(a.Progress)
		}
		if w.visitor != nil && b.held.wants(f.Size) {
			kept := b.held.room(f.Size)
			copy(kept, data) // the visitor owns the buffer
			data = kept
		}
		b.held.hold(b.records.count, data, f.Size)
	}
	return nil
}

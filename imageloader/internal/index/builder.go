package index

import (
	"fmt"
	"math"
	"os"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Builder collects an index member by member. It records the images of all directories, even if
// classes are given, so that one index file serves both cases.
//
// The records are in spools, so that a Builder needs the same amount of memory for any archive,
// except for contents that it keeps in memory.
type Builder struct {
	file    string // the archive, for error messages
	config  Config
	dirs    *directories
	web     *webGroup // nil: directories are classes
	samples int       // number of samples among the members, if directories are classes

	nonSamples
	lacking webLacks

	records records
	held    heldContents

	listed *ListReport // after WalkLabels with a list

	// onGroup, if not nil, is called with the label number of each WebDataset group that has an
	// image, or -1 if the group has no label.
	onGroup func(label int32) error
}

// nonSamples describes the members of an archive that are not samples.
type nonSamples struct {
	ignored int // their number
	orphans int // number of ignored members that are images without a class
	clues   clues
	// orphansNamed has the first images that have no WebDataset label.
	orphansNamed []Orphan
}

// records collects the large sections of an index file.
type records struct {
	discard bool // collect nothing: only labels and counts are wanted
	count   int  // members
	newest  newestMember
	marked  int // number of checkpoints

	members, names, headers, marks, windows spool
}

// newestMember is the newest member of the records. It is still incomplete, so the spools do not
// have it.
type newestMember struct {
	record
	path []byte
	head header
}

// NewBuilder returns a Builder for the archive at path. It fails if a class is given twice. The
// caller closes the Builder.
func NewBuilder(path string, c Config) (*Builder, error) {
	dirs, err := newDirectories(path, &c)
	if err != nil {
		return nil, err
	}
	if c.List != nil {
		if _, err := c.List.resolve(&c); err != nil {
			return nil, err
		}
	}
	b := &Builder{file: path, config: c, dirs: dirs, held: heldContents{keeping: c.HoldBytes > 0, limit: c.HoldBytes}}
	if c.WebDataset {
		b.web = newWebGroup()
	}
	return b, nil
}

// Labels describes the classes and labels of an archive that has been read to its end.
type Labels struct {
	Classes []string
	// OfDirectory has the label of each directory, by number. The label is -1 for a directory that
	// is not a class: its members are not samples.
	OfDirectory []int32
	// With a List and MultiLabel, OfDirectory is nil, and Lists has the labels of each directory
	// instead.
	Lists   [][]int32
	List    *ListReport // nil: there is no list
	Ignored int         // number of members that are not samples
	Orphans int         // number of ignored members that are images without a class
	// OrphansNamed are the first images that have no WebDataset label.
	OrphansNamed []Orphan
	// Odd is the number of the first WebDataset label that is an error, or -1.
	Odd     int
	LeftOut []LeftOut
	Clues
}

// Clues say what an archive without samples may be.
type Clues struct {
	Advice  string // the likely reason, and the next step; "" if there is no clue
	Instead string // the path to open instead; "" if there is none
}

// Labels returns the labels of all collected members. With WebDataset, each directory in the result
// stands for a label.
func (b *Builder) Labels() Labels {
	l := Labels{Ignored: b.ignored, Orphans: b.orphans, OrphansNamed: b.orphansNamed, Odd: -1, LeftOut: b.leftOut()}
	if b.config.List != nil {
		labels, _ := b.config.List.resolve(&b.config) // NewBuilder has already checked for errors
		l.Classes, l.OfDirectory, l.Lists, l.List = labels.classes, labels.label, labels.lists, b.listed
		return l
	}
	l.Classes, l.OfDirectory, l.Odd = b.dirs.labels()
	if b.byDirectory() && b.samples == 0 {
		l.Advice, l.Instead = b.clues.advice()
	}
	return l
}

// Directory returns the name of the directory with a number. With WebDataset it returns the text of
// a label.
func (b *Builder) Directory(number int) string { return b.dirs.names[number] }

// Samples returns the number of samples collected so far, if directories are classes.
func (b *Builder) Samples() int { return b.samples }

// Orphans returns the number of images without a class so far.
func (b *Builder) Orphans() int { return b.orphans }

// spoolTo makes the Builder's spools write to files that create makes. If create is nil, they stay
// in memory.
func (b *Builder) spoolTo(create func() (*os.File, error)) {
	for _, s := range b.records.spools() {
		s.create = create
	}
}

// Close frees all collected records and contents.
func (b *Builder) Close() {
	for _, s := range b.records.spools() {
		s.close()
	}
	b.held.free()
}

// add records a member that may be a sample: it looks like an image and, if directories are
// classes, is in a directory that may be a class. magic is the member's first bytes. add returns
// the member's number and, with given classes, its label. For any other member it returns the
// number -1.
func (b *Builder) add(m *archive.Member, magic []byte) (number, label int, err error) {
	class, image := classOf(m.Name), claims(m, magic)
	if class == "" {
		if image {
			b.orphans++
		}
		return b.ignore(m, image)
	}
	dir, err := b.dirs.number(class)
	if err != nil {
		return -1, 0, err
	}
	b.dirs.claimed[dir] = b.dirs.claimed[dir] || image
	given, known := b.dirs.given[class]
	switch {
	case !image, isHidden(class):
		return b.ignore(m, image)
	case b.dirs.given != nil && !known:
		return -1, 0, b.dirs.unknown(m.Name, class)
	}
	if number, err = b.record(m, dir, recordImage); err != nil {
		return -1, 0, err
	}
	b.dirs.enter(m.Name)
	b.samples++
	return number, int(given), nil
}

// addRow implements add for a row of a Parquet file.
func (b *Builder) addRow(m *archive.Member) (number, label int, err error) {
	if len(m.Labels) == 0 && !b.dirs.lists {
		b.addOrphan(m.Name, orphanNull)
		b.ignored++
		return -1, 0, nil
	}
	text := ""
	if b.dirs.lists {
		if text, err = listOf(m.Labels); err != nil {
			return -1, 0, fmt.Errorf("imageloader: %s: %q: %w", b.file, m.Name, err)
		}
	} else {
		text = m.Labels[0]
	}
	if len(text) > archive.MaxNameBytes {
		return -1, 0, labelTooLong{fmt.Errorf("imageloader: %s: %q: a label of %d bytes, over the limit of %d", b.file,
			m.Name, len(text), archive.MaxNameBytes)}
	}
	if class, unknown := b.dirs.unknownIn(text); unknown {
		return -1, 0, b.dirs.unknown(m.Name, class)
	}
	given, known := b.dirs.given[text]
	if b.dirs.given != nil && !known && !b.dirs.lists {
		return -1, 0, b.dirs.unknown(m.Name, text)
	}
	dir, err := b.dirs.number(text)
	if err != nil {
		return -1, 0, err
	}
	b.dirs.claimed[dir] = true
	if number, err = b.record(m, dir, recordImage); err != nil {
		return -1, 0, err
	}
	b.samples++
	return number, int(given), nil
}

// ignore counts a member that is not a sample. It records a link or an archive, because the user
// may have meant it as a class.
func (b *Builder) ignore(m *archive.Member, image bool) (number, label int, err error) {
	b.ignored++
	if image {
		return -1, 0, nil
	}
	return -1, 0, b.dirs.noteLeftOut(m)
}

// record makes a member the newest member.
func (b *Builder) record(m *archive.Member, dir int32, flags uint8) (number int, err error) {
	number, ok := b.records.add(m, dir, flags)
	if !ok {
		return -1, fmt.Errorf("imageloader: %s: more than 4 GB of member names", b.file)
	}
	return number, nil
}

// drop removes the newest member.
func (b *Builder) drop() {
	b.records.drop()
	b.held.truncate(b.records.count)
}

// spools returns the spools of the large sections.
func (r *records) spools() []*spool {
	return []*spool{&r.members, &r.names, &r.headers, &r.marks, &r.windows}
}

// add makes a member the newest member. ok is false if the names of all members would be too long
// for an index.
func (r *records) add(m *archive.Member, dir int32, flags uint8) (number int, ok bool) {
	r.flush()
	if r.names.size()+int64(len(m.Name)) > math.MaxUint32 {
		return -1, false
	}
	r.newest.record = record{
		offset: m.Offset,
		size:   m.Size,
		name:   uint32(r.names.size()),
		label:  dir,
		shard:  uint16(m.Shard),
		kind:   m.Kind,
		flags:  flags,
	}
	if m.Stored {
		r.newest.flags |= recordStored
	}
	r.newest.path = append(r.newest.path[:0], m.Name...)
	r.newest.head = header{}
	r.count++
	return r.count - 1, true
}

// drop removes the newest member.
func (r *records) drop() {
	r.count--
	r.newest.path = r.newest.path[:0]
}

// sum sets the checksum of the newest member. flag is the kind of the checksum: recordSummed or
// recordBlock.
func (n *newestMember) sum(crc uint32, flag uint8) {
	n.crc = crc
	n.flags |= flag
}

// mark records a checkpoint of a shard.
func (r *records) mark(shard int, c archive.Checkpoint) {
	item := encodeMark(shard, archive.Mark{Bit: c.Bit, Output: c.Output, At: r.windows.size(),
		Size: int32(len(c.Window))})
	r.marks.write(item[:])
	r.windows.write(c.Window)
	r.marked++
}

// flush adds the newest member to members.
func (r *records) flush() {
	if r.discard || r.members.size() == int64(r.count)*memberBytes {
		return
	}
	item := r.newest.encode()
	r.members.write(item[:])
	r.names.write(r.newest.path)
	r.headers.write(r.newest.head[:])
}

// sections returns the large sections, as the index file will have them.
func (r *records) sections() map[uint32]section {
	r.flush()
	return map[uint32]section{
		sectionMembers:     r.members.section(r.count),
		sectionNames:       r.names.section(int(r.names.size())),
		sectionHeaders:     r.headers.section(r.count),
		sectionCheckpoints: r.marks.section(r.marked),
		sectionWindows:     r.windows.section(r.marked),
	}
}

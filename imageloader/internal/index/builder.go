package index

import (
	"fmt"
	"math"
	"os"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/arena"
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
	samples int       // if directories are classes: the number of samples among the members
	ignored int
	orphans int // images without a class
	clues   clues
	// unlisted has the images that a list does not name.
	unlisted unlisted
	// orphansNamed has the first images that have no WebDataset label.
	orphansNamed []Orphan
	seconds      int    // ignored images whose WebDataset group already has a sample
	second       string // member name of the first of them
	lone         int    // WebDataset labels without an image
	firstLone    string // member name of the first of them

	count    int    // members
	last     record // the latest member, still incomplete and not yet in members
	lastName []byte
	lastHead header
	marked   int // number of checkpoints
	// the large sections of the index file
	members, names, headers, marks, windows spool

	// labelsOnly collects only labels and counts, and no records for an index.
	labelsOnly bool
	// onGroup, if not nil, is called with the label number of each WebDataset group that has an
	// image, or -1 if the group has no label.
	onGroup func(label int32) error

	keeping   bool // contents are kept, in held
	held      [][]byte
	arena     *arena.Arena // memory of held; nil before the first content
	given     bool         // an Index now owns the arena
	heldBytes int64
}

// NewBuilder returns a Builder for the archive at path. It fails if a class is given twice. The
// caller closes the Builder.
func NewBuilder(path string, c Config) (*Builder, error) {
	dirs, err := newDirectories(path, &c)
	if err != nil {
		return nil, err
	}
	if c.List != nil {
		if _, _, err := c.List.classes(&c); err != nil {
			return nil, err
		}
	}
	b := &Builder{file: path, config: c, dirs: dirs, keeping: c.HoldBytes > 0}
	if c.WebDataset {
		b.web = newWebGroup()
	}
	return b, nil
}

// Labels describes the classes and labels of an archive that has been read to its end.
type Labels struct {
	Classes []string
	// OfDirectory has the label of each directory by number. It is -1 for a directory that is not a
	// class, so its members are not samples.
	OfDirectory []int32
	Ignored     int // number of members that are not samples
	Orphans     int // number of ignored members that are images without a class
	// OrphansNamed are the first images that have no WebDataset label.
	OrphansNamed []Orphan
	// Odd is the number of the first WebDataset label that is an error, or -1.
	Odd     int
	LeftOut []LeftOut
}

// Labels returns the labels of all collected members. With WebDataset, each directory in the result
// stands for a label.
func (b *Builder) Labels() Labels {
	l := Labels{Ignored: b.ignored, Orphans: b.orphans, OrphansNamed: b.orphansNamed, Odd: -1, LeftOut: b.leftOut()}
	if b.config.List != nil {
		l.Classes, l.OfDirectory, _ = b.config.List.classes(&b.config) // NewBuilder has already checked for errors
		return l
	}
	l.Classes, l.OfDirectory, l.Odd = b.dirs.labels()
	return l
}

// Directory returns the name of a directory, or with WebDataset of a label, by its number.
func (b *Builder) Directory(number int) string { return b.dirs.names[number] }

// Samples returns the number of samples collected so far, if directories are classes.
func (b *Builder) Samples() int { return b.samples }

// Orphans returns the number of images without a class so far.
func (b *Builder) Orphans() int { return b.orphans }

// spools returns the spools of the large sections.
func (b *Builder) spools() []*spool {
	return []*spool{&b.members, &b.names, &b.headers, &b.marks, &b.windows}
}

// spoolTo makes the Builder put its spools into files from create. If create is nil, they stay in
// memory.
func (b *Builder) spoolTo(create func() (*os.File, error)) {
	for _, s := range b.spools() {
		s.create = create
	}
}

// Close frees all collected records and contents.
func (b *Builder) Close() {
	for _, s := range b.spools() {
		s.close()
	}
	if !b.given {
		b.arena.Free()
	}
}

// room returns memory for a content to keep.
func (b *Builder) room(size int64) []byte {
	if b.arena == nil {
		b.arena = arena.New()
	}
	return b.arena.Alloc(int(size))
}

// wants reports whether a content of this size can still be kept in memory.
func (b *Builder) wants(size int64) bool { return b.keeping && b.heldBytes+size <= b.config.HoldBytes }

// hold keeps the latest member's content. The first content that does not fit makes the Builder
// drop all contents.
func (b *Builder) hold(data []byte, size int64) {
	if !b.wants(size) {
		b.keeping, b.held = false, nil
		b.arena.Free()
		return
	}
	b.held = append(b.held, make([][]byte, b.count-len(b.held))...)
	b.held[b.count-1] = data
	b.heldBytes += size
}

// sum sets the checksum of the latest member. flag is its kind: recordSummed or recordBlock.
func (b *Builder) sum(crc uint32, flag uint8) {
	b.last.crc = crc
	b.last.flags |= flag
}

// mark records a checkpoint of a shard.
func (b *Builder) mark(shard int, c archive.Checkpoint) {
	item := encodeMark(shard, archive.Mark{Bit: c.Bit, Output: c.Output, At: b.windows.size(), Size: int32(len(c.Window))})
	b.marks.write(item[:])
	b.windows.write(c.Window)
	b.marked++
}

// add records a member that may be a sample: it looks like an image and, if directories are
// classes, is in a directory that may be a class. magic is the member's first bytes. add returns
// the member's number and, with given classes, its label. The number is -1 for all other members.
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

// ignore counts a member that is not a sample. It records a link or an archive, because the user
// may have meant it as a class.
func (b *Builder) ignore(m *archive.Member, image bool) (number, label int, err error) {
	b.ignored++
	if image {
		return -1, 0, nil
	}
	return -1, 0, b.dirs.noteLeftOut(m)
}

// record makes a member the latest member.
func (b *Builder) record(m *archive.Member, dir int32, flags uint8) (number int, err error) {
	b.flush()
	if b.names.size()+int64(len(m.Name)) > math.MaxUint32 {
		return -1, fmt.Errorf("imageloader: %s: more than 4 GB of member names", b.file)
	}
	b.last = record{
		offset: m.Offset,
		size:   m.Size,
		name:   uint32(b.names.size()),
		label:  dir,
		shard:  uint16(m.Shard),
		kind:   m.Kind,
		flags:  flags,
	}
	b.lastName = append(b.lastName[:0], m.Name...)
	b.lastHead = header{}
	b.count++
	return b.count - 1, nil
}

// drop removes the latest member.
func (b *Builder) drop() {
	b.count--
	b.lastName = b.lastName[:0]
	b.held = b.held[:min(len(b.held), b.count)]
}

// flush adds the latest member to members.
func (b *Builder) flush() {
	if b.labelsOnly || b.members.size() == int64(b.count)*memberBytes {
		return
	}
	item := b.last.encode()
	b.members.write(item[:])
	b.names.write(b.lastName)
	b.headers.write(b.lastHead[:])
}

// sections returns the large sections, as the index file will have them.
func (b *Builder) sections() map[uint32]section {
	b.flush()
	return map[uint32]section{
		sectionMembers:     b.members.section(b.count),
		sectionNames:       b.names.section(int(b.names.size())),
		sectionHeaders:     b.headers.section(b.count),
		sectionCheckpoints: b.marks.section(b.marked),
		sectionWindows:     b.windows.section(b.marked),
	}
}

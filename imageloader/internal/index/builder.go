package index

import (
	"fmt"
	"math"
	"os"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/arena"
)

// Builder collects an index member by member. It records the members of all directories, whether or
// not classes are given, so that one sidecar serves both.
//
// The records lie in spools, so that a Builder takes the same memory whatever the archive has,
// except for contents that are held.
type Builder struct {
	file    string // the archive, for errors
	config  Config
	dirs    *directories
	web     *webGroup // nil: directories are classes
	samples int       // with classes given: how many of the members are samples
	ignored int
	orphans int    // images that have no class
	seconds int    // images that follow another one in their WebDataset group: they are ignored too
	second  string // the first of them

	count    int    // members
	last     record // the newest member, of which more becomes known: it is not in members yet
	lastName []byte
	lastHead header
	marked   int // checkpoints
	// The large sections of the index file.
	members, names, headers, marks, windows spool

	keeping   bool // contents, in held
	held      [][]byte
	arena     *arena.Arena // has held; nil before the first content
	given     bool         // an Index frees the arena
	heldBytes int64
}

// NewBuilder makes a Builder for the archive at path. It fails if a class is given twice. The
// caller closes it.
func NewBuilder(path string, c Config) (*Builder, error) {
	dirs, err := newDirectories(path, &c)
	if err != nil {
		return nil, err
	}
	b := &Builder{file: path, config: c, dirs: dirs, keeping: c.HoldBytes > 0}
	if c.WebDataset {
		b.web = &webGroup{image: -1}
	}
	return b, nil
}

// Labels is what a Builder knows of classes when the archive was read to its end.
type Labels struct {
	Classes []string
	// OfDirectory are the labels by number of directory; -1 for a directory that is no class, whose
	// members are no samples.
	OfDirectory []int32
	Ignored     int // members that are no samples
	Orphans     int // images among them that have no class
}

// Labels returns the labels of everything that was collected. They are not of WebDataset.
func (b *Builder) Labels() Labels {
	l := Labels{Ignored: b.ignored, Orphans: b.orphans}
	l.Classes, l.OfDirectory, _ = b.dirs.labels()
	for dir, n := range b.dirs.counts {
		if l.OfDirectory[dir] < 0 {
			l.Ignored += n
		}
	}
	return l
}

// Samples is how many samples of the given classes were collected.
func (b *Builder) Samples() int { return b.samples }

// Orphans is how many images were met that have no class.
func (b *Builder) Orphans() int { return b.orphans }

// spools are the large sections.
func (b *Builder) spools() []*spool {
	return []*spool{&b.members, &b.names, &b.headers, &b.marks, &b.windows}
}

// spoolTo makes the builder use files that create makes; nil: memory alone.
func (b *Builder) spoolTo(create func() (*os.File, error)) {
	for _, s := range b.spools() {
		s.create = create
	}
}

// Close drops what was collected.
func (b *Builder) Close() {
	for _, s := range b.spools() {
		s.close()
	}
	if !b.given {
		b.arena.Free()
	}
}

// room returns memory for a content that is to be held.
func (b *Builder) room(size int64) []byte {
	if b.arena == nil {
		b.arena = arena.New()
	}
	return b.arena.Alloc(int(size))
}

// wants says whether the content of a member of this size would still be kept in memory.
func (b *Builder) wants(size int64) bool { return b.keeping && b.heldBytes+size <= b.config.HoldBytes }

// hold keeps the newest member's content. The first one for which there is no room ends that: then
// none is kept.
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

// sum sets the checksum of the newest member; flag says of what.
func (b *Builder) sum(crc uint32, flag uint8) {
	b.last.crc = crc
	b.last.flags |= flag
}

// mark takes a checkpoint of a shard.
func (b *Builder) mark(shard int, c archive.Checkpoint) {
	item := encodeMark(shard, archive.Mark{Bit: c.Bit, Output: c.Output, At: b.windows.size(), Size: int32(len(c.Window))})
	b.marks.write(item[:])
	b.windows.write(c.Window)
	b.marked++
}

// add takes a member, whose first bytes are magic. It returns the member's number, -1 if it lies in
// no directory, and the index of its sample as far as is known: -1 if it is none; without given
// classes its number.
func (b *Builder) add(m *archive.Member, magic []byte) (number, sample, label int, err error) {
	class := classOf(m.Name)
	image := claims(m, magic)
	if class == "" {
		if image {
			b.orphans++
		}
		b.ignored++
		return -1, -1, 0, nil
	}
	given, known := b.dirs.given[class]
	if b.dirs.given != nil && !known && image {
		return -1, -1, 0, b.dirs.unknown(m.Name, class)
	}
	flags := uint8(0)
	if image {
		flags = recordImage
	}
	dir, err := b.dirs.number(class)
	if err != nil {
		return -1, -1, 0, err
	}
	b.dirs.claimed[dir] = b.dirs.claimed[dir] || image
	b.dirs.counts[dir]++
	if number, err = b.record(m, dir, flags); err != nil {
		return -1, -1, 0, err
	}
	switch {
	case b.dirs.given == nil:
		return number, number, 0, nil
	case known:
		b.samples++
		return number, b.samples - 1, int(given), nil
	}
	return number, -1, 0, nil
}

// record makes a member the newest one.
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

// drop takes the newest member back.
func (b *Builder) drop() {
	b.count--
	b.lastName = b.lastName[:0]
	b.held = b.held[:min(len(b.held), b.count)]
}

// flush puts the newest member where the others are.
func (b *Builder) flush() {
	if b.members.size() == int64(b.count)*memberBytes {
		return
	}
	item := b.last.encode()
	b.members.write(item[:])
	b.names.write(b.lastName)
	b.headers.write(b.lastHead[:])
}

// sections are the large sections, as the sidecar has them once it is written.
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

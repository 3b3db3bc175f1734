package index

import (
	"context"
	"io"
	"slices"
	"strings"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// index makes the Index from the sections. This run or an earlier run has collected them by reading
// the archive to its end. formats are the formats of the shards.
//
// The sections are untrusted, so every number in them is checked before use. An error is
// errIndexDamaged, an *UnknownClassError, a *LabelError, or a read error.
func (b *Builder) index(a *archive.Archive, formats []string, sections map[uint32]section) (*Index, error) {
	x := &Index{indexedArchive: indexedArchive{info: a.Info()}, nonSamples: b.nonSamples}
	for i, s := range a.Shards() {
		x.shards = append(x.shards, shard{path: s.Path, info: s.Info, format: formats[i]})
	}
	if err := x.loadMarks(sections); err != nil {
		return nil, err
	}
	if err := b.load(x, sections); err != nil {
		return nil, err
	}
	if err := x.keepPart(b.config.Part, b.file); err != nil {
		return nil, err
	}
	if err := x.loadOversize(sections[sectionHeaders], b.config.MaxPixels); err != nil {
		return nil, err
	}
	if windows := sections[sectionWindows]; windows.at == io.ReaderAt(&b.records.windows) {
		x.windows.take(&b.records.windows)
	} else {
		x.windows.ReaderAt = windows.at
	}
	b.giveContents(a.Context(), x)
	return x, nil
}

// giveContents passes the contents in memory to x, which then owns them.
func (b *Builder) giveContents(ctx context.Context, x *Index) {
	if c := &b.config; b.held.gaveUp && x.readsCheaply() && x.fits(c.HoldBytes, c.MaxSampleBytes) {
		x.share(ctx, c)
		x.holdLazily(c.MaxSampleBytes)
	}
	if !b.held.keeping || len(b.held.contents) == 0 {
		return
	}
	held := b.held.give(x)
	x.memory.held = make([][]byte, len(x.samples))
	for k := range x.memory.held {
		if i := int(x.number(k)); i < len(held) {
			x.memory.held[k] = held[i]
		}
	}
	x.shareHeld(ctx, &b.config)
}

// load reads the members and makes the records of x.
func (b *Builder) load(x *Index, sections map[uint32]section) error {
	switch {
	case b.config.Pairs != nil:
		return b.loadPairs(x, sections)
	case b.config.List != nil:
		return b.loadListed(x, sections)
	}
	return b.loadSamples(x, sections)
}

// loadSamples reads the members, and makes the members of classes the samples of x.
func (b *Builder) loadSamples(x *Index, sections map[uint32]section) error {
	var label []int32
	var odd int
	x.classes, label, odd = b.dirs.labels()
	if b.dirs.lists {
		_, x.lists, _ = b.dirs.eachList()
	}
	members, err := newMemberReader(x.shards, len(b.dirs.names), sections)
	if err != nil {
		return err
	}
	w := workMeter{shards: x.shards, next: x.eachMark()}
	kept := members.names[:0]
	var wrong error // the error for the first wrong label or class
	lost := b.byDirectory() && slices.Contains(b.dirs.claimed, false)
	x.samples = make([]record, 0, sections[sectionMembers].count)
	for i := 0; ; i++ {
		m, name, err := members.next()
		if err != nil {
			return err
		}
		if m == nil {
			break
		}
		l := label[m.label]
		if wrong == nil {
			wrong = b.wrongLabel(m, name, l, odd)
		}
		if dir := b.dirs.names[m.label]; b.byDirectory() &&
			classOf(unsafe.String(unsafe.SliceData(name), len(name))) != dir {
			return errIndexDamaged
		}
		if b.dirs.given != nil && m.flags&recordImage != 0 && l < 0 {
			continue
		}
		if l < 0 {
			x.ignored++
			continue
		}
		if lost {
			b.dirs.enter(string(name))
		}
		x.noteNumber(i, cap(x.samples))
		m.label, m.name = l, uint32(len(kept))
		kept = append(kept, name...) // in place: kept is never longer than the names read so far
		x.samples = append(x.samples, *m)
		w.sample(m)
	}
	if wrong != nil { // reported only now, because the checksum of the section is now verified
		return wrong
	}
	if odd >= 0 { // no member has the label that is an error
		return errIndexDamaged
	}
	x.left = b.leftOut()
	x.names = unsafe.String(unsafe.SliceData(kept), len(kept)) // kept does not change any more
	x.readCost = w.cost()
	return nil
}

// wrongLabel returns an error if the member's label is not a number although it should be, or if
// its class was not given. l is the sample's label. odd is the directory of the first WebDataset
// label that is an error, or -1.
func (b *Builder) wrongLabel(m *record, name []byte, l int32, odd int) error {
	dir := b.dirs.names[m.label]
	if int(m.label) == odd {
		return &LabelError{b.file, string(name), strings.ReplaceAll(strings.TrimPrefix(dir, "\n"), "\n", " ")}
	}
	if label, unknown := b.dirs.unknownIn(dir); unknown {
		return b.dirs.unknown(string(name), label)
	}
	if b.dirs.given != nil && m.flags&recordImage != 0 && l < 0 {
		return b.dirs.unknown(string(name), dir)
	}
	return nil
}

// memberReader reads the members of an index.
type memberReader struct {
	shards      []shard
	directories int
	names       []byte
	items       *itemReader
	current     record // the member that next returned
	following   record // the next member; its name starts where the current name ends
	more        bool   // there is a following member
}

func newMemberReader(shards []shard, directories int, sections map[uint32]section) (*memberReader, error) {
	members := sections[sectionMembers]
	if members.count > archive.MaxMembers || members.size != int64(members.count)*memberBytes ||
		sections[sectionHeaders].size != int64(members.count)*headerBytes {
		return nil, errIndexDamaged
	}
	names, err := sections[sectionNames].all()
	if err != nil {
		return nil, err
	}
	r := &memberReader{shards: shards, directories: directories, names: names, items: members.reader(memberBytes)}
	return r, r.follow(0)
}

// next returns the next member and its name. Both are valid until the next call. It returns nil at
// the end.
func (r *memberReader) next() (m *record, name []byte, err error) {
	if !r.more {
		return nil, nil, nil
	}
	r.current = r.following
	if err := r.follow(r.current.name); err != nil {
		return nil, nil, err
	}
	end := uint32(len(r.names))
	if r.more {
		end = r.following.name
	}
	return &r.current, r.names[r.current.name:end], nil
}

// follow reads the following member. Its name must start at or after before.
func (r *memberReader) follow(before uint32) error {
	item, err := r.items.next()
	r.more = item != nil && err == nil
	if !r.more {
		return err
	}
	m := &r.following
	m.decode(item)
	if m.kind != archive.Regular { // no content, whatever size its header claims
		m.size = 0
	}
	switch {
	case m.offset < 0, m.size < 0, uint64(m.name) > uint64(len(r.names)), m.name < before,
		m.label < 0, int(m.label) >= r.directories, int(m.shard) >= len(r.shards), m.kind > archive.OtherMethod:
		return errIndexDamaged
	}
	if s := &r.shards[m.shard]; s.format == archive.Parquet && m.flags&recordStored == 0 && len(s.marks) == 0 {
		return errIndexDamaged
	}
	if m.kind == archive.Regular && m.size > r.shards[m.shard].maxStreamBytes()-m.offset {
		return errIndexDamaged
	}
	return nil
}

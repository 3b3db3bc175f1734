package index

import (
	"io"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// index makes the Index of what was collected, in this run or, as sections says, in an earlier one.
// The archive was read to its end, then or now; formats are those of its shards.
//
// The sections are untrusted: nothing in them is used that would do harm. An error is
// errIndexDamaged, an *UnknownClassError, a *LabelError, or one of reading.
func (b *Builder) index(a *archive.Archive, formats []string, sections map[uint32]section) (*Index, error) {
	x := &Index{info: a.Info(), ignored: b.ignored, orphans: b.orphans}
	for i, s := range a.Shards() {
		x.shards = append(x.shards, shard{path: s.Path, info: s.Info, format: formats[i]})
	}
	if err := x.loadMarks(sections); err != nil {
		return nil, err
	}
	if err := b.loadSamples(x, sections); err != nil {
		return nil, err
	}
	if err := x.loadOversize(sections[sectionHeaders], b.config.MaxPixels); err != nil {
		return nil, err
	}
	if windows := sections[sectionWindows]; windows.at == io.ReaderAt(&b.windows) {
		x.spool, b.windows = b.windows, spool{}
		x.windows = &x.spool
	} else {
		x.windows = windows.at
	}
	b.giveContents(x)
	return x, nil
}

// giveContents makes the contents that are held x's, which frees them from now on.
func (b *Builder) giveContents(x *Index) {
	if !b.keeping || len(b.held) == 0 {
		return
	}
	x.memory.arena, b.given = b.arena, true
	x.memory.held = make([][]byte, len(x.samples))
	for k := range x.memory.held {
		if i := int(x.number(k)); i < len(b.held) {
			x.memory.held[k] = b.held[i]
		}
	}
}

// loadSamples reads the members, and makes those of classes the samples of x.
func (b *Builder) loadSamples(x *Index, sections map[uint32]section) error {
	var label []int32
	var odd int
	x.classes, label, odd = b.dirs.labels()
	members, err := newMemberReader(x.shards, len(b.dirs.names), sections)
	if err != nil {
		return err
	}
	w := workMeter{shards: x.shards, next: x.eachMark()}
	kept := members.names[:0]
	var wrong error // the first label or class that is one
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
		if wrong == nil && int(m.label) == odd {
			wrong = &LabelError{b.file, string(name), b.dirs.names[odd]}
		}
		if dir := b.dirs.names[m.label]; b.web == nil && classOf(unsafe.String(unsafe.SliceData(name), len(name))) != dir {
			return errIndexDamaged
		}
		if b.dirs.given != nil && m.flags&recordImage != 0 && l < 0 {
			if wrong == nil {
				wrong = b.dirs.unknown(string(name), b.dirs.names[m.label])
			}
			continue
		}
		if l < 0 {
			x.ignored++
			continue
		}
		x.noteNumber(i, cap(x.samples))
		m.label, m.name = l, uint32(len(kept))
		kept = append(kept, name...) // at most as far as names is read
		x.samples = append(x.samples, *m)
		w.sample(m)
	}
	if wrong != nil { // only now that the section's checksum was right
		return wrong
	}
	if odd >= 0 { // the label of no member
		return errIndexDamaged
	}
	x.names = unsafe.String(unsafe.SliceData(kept), len(kept)) // kept does not change any more
	x.work, x.reach = w.work(), w.inflated/max(1, w.samples)
	return nil
}

// memberReader reads the members of an index.
type memberReader struct {
	shards      []shard
	directories int
	names       []byte
	items       *itemReader
	current     record // the one that next returned
	following   record // the one after it, whose name begins where its name ends
	more        bool   // there is one
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

// next returns the next member, which is the caller's until the next call, and its name; nil at the
// end.
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

// follow reads the following member, whose name begins at before or behind it.
func (r *memberReader) follow(before uint32) error {
	item, err := r.items.next()
	r.more = item != nil && err == nil
	if !r.more {
		return err
	}
	m := &r.following
	m.decode(item)
	if m.kind != archive.Regular { // has no content, whatever size a header claims
		m.size = 0
	}
	switch {
	case m.offset < 0, m.size < 0, uint64(m.name) > uint64(len(r.names)), m.name < before,
		m.label < 0, int(m.label) >= r.directories, int(m.shard) >= len(r.shards), m.kind > archive.Other:
		return errIndexDamaged
	}
	if m.kind == archive.Regular && m.size > r.shards[m.shard].maxStreamBytes()-m.offset {
		return errIndexDamaged
	}
	return nil
}

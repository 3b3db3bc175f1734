package imageloader

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
)

// indexer collects an index member by member. With classes given, the members of these directories are the samples; without, those of every directory that
// has a member that claims to be an image (by its first bytes or its extension), which is known at the end only. It collects the members of all directories in
// either case, for a sidecar that serves both.
//
// What it has collected lies in spools, so that it takes the same memory whatever the archive has, except for contents that are to be held.
type indexer struct {
	file      string
	given     map[string]int32 // labels; nil: no classes are given
	list      []string         // the given classes
	dirs      map[string]int32
	dirList   []string  // by number
	claimed   []bool    // the same: has a member that claims to be an image
	counts    []int     // the same: how many members it has
	dirBytes  int       // of the section
	web       *webGroup // nil: directories are classes
	samples   int       // with classes given: how many of the entries are samples
	ignored   int
	orphans   int   // images outside of any directory
	maxPixels int64 // how large images may be that the index has to tell from others; 0: it does not matter

	count    int   // entries
	last     entry // the newest, of which more becomes known: it is not in entries yet
	lastName []byte
	lastHead imageHead
	marked   int // checkpoints
	// The large sections of the index file.
	entries, names, heads, marks, windows spool

	keeping   bool // contents, in held
	held      [][]byte
	heldBytes int64
	heldLimit int64
}

// mostDirBytes bounds the names of all directories, which stay in memory.
const mostDirBytes = 128 << 20

func newIndexer(file string, classes []string) (*indexer, error) {
	x := &indexer{file: file, dirs: map[string]int32{}, list: classes}
	if len(classes) > 0 {
		x.given = map[string]int32{}
	}
	for i, c := range classes {
		if _, twice := x.given[c]; twice {
			return nil, fmt.Errorf("imageloader: class %q is twice in Options.Classes", c)
		}
		x.given[c] = int32(i)
	}
	return x, nil
}

// hold makes the indexer keep contents, up to limit bytes in all: one more, and none is kept.
func (x *indexer) hold(limit int64) { x.keeping, x.heldLimit = true, limit }

// wants says whether the content of a member of this size would still be kept.
func (x *indexer) wants(size int64) bool { return x.keeping && x.heldBytes+size <= x.heldLimit }

// spools makes the indexer use files; nil: it does not.
func (x *indexer) spools(create func() (*os.File, error)) {
	for _, s := range []*spool{&x.entries, &x.names, &x.heads, &x.marks, &x.windows} {
		s.create = create
	}
}

// close drops what was collected.
func (x *indexer) close() {
	for _, s := range []*spool{&x.entries, &x.names, &x.heads, &x.marks, &x.windows} {
		s.close()
	}
}

// sum takes the checksum of the newest entry; flag says of what.
func (x *indexer) sum(crc uint32, flag uint8) {
	x.last.crc = crc
	x.last.flags |= flag
}

// head takes the header of the image that the newest entry is.
func (x *indexer) head(h imageHead) { x.lastHead = h }

// mark takes a checkpoint of a shard.
func (x *indexer) mark(shard int, c checkpoint) {
	var b [checkpointBytes]byte
	le := binary.LittleEndian
	le.PutUint64(b[0:], uint64(c.bit))
	le.PutUint64(b[8:], uint64(c.output))
	le.PutUint64(b[16:], uint64(x.windows.size()))
	le.PutUint32(b[24:], uint32(len(c.window)))
	le.PutUint32(b[28:], uint32(shard))
	x.marks.write(b[:])
	x.windows.write(c.window)
	x.marked++
}

// keep takes an entry's content. data is nil if it is too large to be kept.
func (x *indexer) keep(i int, data []byte, size int64) {
	if !x.wants(size) {
		x.keeping, x.held = false, nil
		return
	}
	x.held = append(x.held, make([][]byte, x.count-len(x.held))...)
	x.held[i] = data
	x.heldBytes += size
}

// classOf is the name of the directory that a member lies in; "" if there is none. name is clean.
func classOf(name string) string {
	slash := strings.LastIndexByte(name, '/')
	if slash <= 0 {
		return ""
	}
	class := name[:slash]
	class = class[strings.LastIndexByte(class, '/')+1:]
	if class == ".." || class == "." {
		return ""
	}
	return class
}

// claims says whether a member wants to be an image. magic holds its first bytes.
func claims(m *member, magic []byte) bool {
	if sniff(magic) != "" {
		return true
	}
	base := m.name[strings.LastIndexByte(m.name, '/')+1:]
	if strings.HasPrefix(base, ".") { // .DS_Store, and the ._x.jpg of macOS
		return false
	}
	switch dot := strings.LastIndexByte(base, '.'); strings.ToLower(base[dot+1:]) {
	case "jpg", "jpeg", "png", "ppm", "pgm", "bmp", "tif", "tiff", "webp", "gif": // torchvision's list, and GIF
		return dot >= 0
	}
	return false
}

// sniff names the format of an image by its first bytes; "" if it is none that is handled.
func sniff(b []byte) string {
	switch {
	case len(b) >= 3 && b[0] == 0xff && b[1] == 0xd8 && b[2] == 0xff:
		return "JPEG"
	case len(b) >= 8 && string(b[:8]) == "\x89PNG\r\n\x1a\n":
		return "PNG"
	case len(b) >= 12 && string(b[:4]) == "RIFF" && string(b[8:12]) == "WEBP":
		return "WebP"
	}
	return sniffRare(b)
}

// add takes a member. entry is its number among the entries, -1 if it is none; s its sample, whose Index is -1 if it is none as far as is known. Without given
// classes, Index is the entry's number, and there is no label yet. An error is an *UnknownClassError.
func (x *indexer) add(m *member, magic []byte) (s Sample, number int, err error) {
	s = Sample{Name: m.name, Index: -1}
	class := classOf(m.name)
	image := claims(m, magic)
	if class == "" {
		if image {
			x.orphans++
		}
		x.ignored++
		return s, -1, nil
	}
	label, known := x.given[class]
	if x.given != nil && !known && image {
		return s, -1, &UnknownClassError{File: x.file, Name: m.name, Class: class, Known: x.list}
	}
	flags := uint8(0)
	if image {
		flags = entryImage
	}
	dir, err := x.dir(class)
	if err != nil {
		return s, -1, err
	}
	x.claimed[dir] = x.claimed[dir] || image
	x.counts[dir]++
	if number, err = x.record(m, dir, flags); err != nil {
		return s, -1, err
	}
	switch {
	case x.given == nil:
		s.Index = number
	case known:
		s.Index, s.Label = x.samples, int(label)
		x.samples++
	}
	return s, number, nil
}

// dir is the number of a directory.
func (x *indexer) dir(name string) (int32, error) {
	dir, seen := x.dirs[name]
	if !seen {
		if x.dirBytes += 4 + len(name); x.dirBytes > mostDirBytes {
			return -1, fmt.Errorf("imageloader: %s: more than %d MB of names of directories, or of labels", x.file, mostDirBytes>>20)
		}
		dir = int32(len(x.dirList))
		name = strings.Clone(name)
		x.dirs[name] = dir
		x.dirList = append(x.dirList, name)
		x.claimed = append(x.claimed, false)
		x.counts = append(x.counts, 0)
	}
	return dir, nil
}

// record makes a member the newest entry.
func (x *indexer) record(m *member, dir int32, flags uint8) (number int, err error) {
	x.flush()
	if x.names.size()+int64(len(m.name)) > math.MaxUint32 {
		return -1, fmt.Errorf("imageloader: %s: more than 4 GB of member names", x.file)
	}
	x.last = entry{offset: m.offset, size: m.size, name: uint32(x.names.size()), label: dir, shard: uint16(m.shard), kind: m.kind, flags: flags}
	x.lastName = append(x.lastName[:0], m.name...)
	x.lastHead = imageHead{}
	x.count++
	return x.count - 1, nil
}

// drop takes the newest entry back.
func (x *indexer) drop() {
	x.count--
	x.lastName = x.lastName[:0]
	x.held = x.held[:min(len(x.held), x.count)]
}

// flush puts the newest entry where the others are.
func (x *indexer) flush() {
	if x.entries.size() == int64(x.count)*entryBytes {
		return
	}
	b := x.last.encode()
	x.entries.write(b[:])
	x.names.write(x.lastName)
	x.heads.write(x.lastHead[:])
}

func (e *entry) encode() (b [entryBytes]byte) {
	le := binary.LittleEndian
	le.PutUint64(b[0:], uint64(e.offset))
	le.PutUint64(b[8:], uint64(e.size))
	le.PutUint32(b[16:], e.name)
	le.PutUint32(b[20:], uint32(e.label))
	le.PutUint32(b[24:], e.crc)
	le.PutUint16(b[28:], e.shard)
	b[30], b[31] = byte(e.kind), e.flags
	return b
}

func (e *entry) decode(b []byte) {
	le := binary.LittleEndian
	*e = entry{offset: int64(le.Uint64(b)), size: int64(le.Uint64(b[8:])), name: le.Uint32(b[16:]), label: int32(le.Uint32(b[20:])), crc: le.Uint32(b[24:]),
		shard: le.Uint16(b[28:]), kind: memberKind(b[30]), flags: b[31]}
}

// stored are the large sections, as the sidecar has them once it is written.
func (x *indexer) stored() map[uint32]stored {
	x.flush()
	return map[uint32]stored{
		sectionEntries:     x.entries.section(x.count),
		sectionNames:       x.names.section(int(x.names.size())),
		sectionHeads:       x.heads.section(x.count),
		sectionCheckpoints: x.marks.section(x.marked),
		sectionWindows:     x.windows.section(x.marked),
	}
}

// labels are the classes, and the label of each directory; -1 if it is none.
func (x *indexer) labels() (classes []string, number []int32) {
	number = make([]int32, len(x.dirList))
	if x.given != nil {
		for d, name := range x.dirList {
			number[d] = -1
			if label, ok := x.given[name]; ok {
				number[d] = label
			}
		}
		return x.list, number
	}
	if numbered := x.numbered(); x.web != nil && numbered != nil {
		for d, name := range x.dirList {
			n, _ := strconv.Atoi(name) // as numbered has found
			number[d] = int32(n)
		}
		return numbered, number
	}
	for d, name := range x.dirList {
		if x.claimed[d] {
			classes = append(classes, name)
		}
	}
	slices.Sort(classes)
	for d, name := range x.dirList {
		number[d] = -1
		if n, found := slices.BinarySearch(classes, name); found {
			number[d] = int32(n)
		}
	}
	return classes, number
}

// build makes the index of what was collected, in this run or, as sections says, in an earlier one. The archive was read to its end, then or now. Of the sections nothing is
// believed that would do harm: an error is errIndexDamaged, an *UnknownClassError, or one of reading.
func (x *indexer) build(a *archive, sections map[uint32]stored) (*index, error) {
	out := &index{info: a.info, ignored: x.ignored, orphans: x.orphans}
	var number []int32
	out.classes, number = x.labels()
	for i := range a.shards {
		s := &a.shards[i]
		out.shards = append(out.shards, indexShard{path: s.path, info: s.info, format: s.format})
	}
	if err := out.loadMarks(sections); err != nil {
		return nil, err
	}
	for i := range out.shards {
		if s := &out.shards[i]; s.format == formatTarGz != (len(s.marks) > 0) {
			return nil, errIndexDamaged
		}
	}
	entries := sections[sectionEntries]
	if entries.count > maxMembers || entries.size != int64(entries.count)*entryBytes || sections[sectionHeads].size != int64(entries.count)*headBytes {
		return nil, errIndexDamaged
	}
	names, err := sections[sectionNames].all()
	if err != nil {
		return nil, err
	}
	r := entries.reader(entryBytes)
	read := func(e *entry, before uint32) (bool, error) {
		b, err := r.next()
		if b == nil || err != nil {
			return false, err
		}
		e.decode(b)
		if e.kind != kindFile { // has no content, whatever size a header claims
			e.size = 0
		}
		if e.offset < 0 || e.size < 0 || uint64(e.name) > uint64(len(names)) || e.name < before || e.label < 0 || int(e.label) >= len(x.dirList) ||
			int(e.shard) >= len(a.shards) || e.kind > kindOther || e.kind == kindFile && e.size > a.shards[e.shard].mostBytes()-e.offset {
			return false, errIndexDamaged
		}
		return true, nil
	}
	w := workMeter{shards: out.shards}
	w.next = out.eachMark()
	kept := names[:0]
	var e, next entry
	var unknown *UnknownClassError
	more, err := read(&e, 0)
	out.entries = make([]entry, 0, entries.count)
	for i := 0; more && err == nil; i++ {
		if more, err = read(&next, e.name); err != nil {
			break
		}
		end := uint32(len(names))
		if more {
			end = next.name
		}
		name := names[e.name:end]
		if x.given != nil && e.flags&entryImage != 0 && number[e.label] < 0 {
			if unknown == nil {
				unknown = &UnknownClassError{File: x.file, Name: string(name), Class: x.dirList[e.label], Known: x.list}
			}
			e = next
			continue
		}
		if e.label = number[e.label]; e.label < 0 {
			out.ignored++
			e = next
			continue
		}
		k := len(out.entries)
		if out.numbers == nil && i != k {
			out.numbers = make([]int32, k, entries.count)
			for j := range out.numbers {
				out.numbers[j] = int32(j)
			}
		}
		if out.numbers != nil {
			out.numbers = append(out.numbers, int32(i))
		}
		e.name = uint32(len(kept))
		kept = append(kept, name...)
		out.entries = append(out.entries, e)
		w.sample(&e)
		e = next
	}
	switch {
	case err != nil: // by now it is known whether the entries are what was written
		return nil, err
	case unknown != nil:
		return nil, unknown
	}
	out.names = unsafeString(kept) // nobody else has it
	out.work, out.reach = w.work(), w.inflated/max(1, w.samples)
	if x.keeping && len(x.held) > 0 {
		out.held = make([][]byte, len(out.entries))
		for k := range out.held {
			if i := int(out.number(k)); i < len(x.held) {
				out.held[k] = x.held[i]
			}
		}
	}
	if windows := sections[sectionWindows]; windows.at == io.ReaderAt(&x.windows) {
		out.spool, x.windows = x.windows, spool{}
		out.windows = &out.spool
	} else {
		out.windows = windows.at
	}
	return out, x.findOversize(out, sections[sectionHeads])
}

// findOversize notes the samples of an index whose images are over maxPixels.
func (x *indexer) findOversize(out *index, heads stored) error {
	if x.maxPixels == 0 {
		return nil
	}
	r := heads.reader(headBytes)
	k := 0
	for i := 0; ; i++ {
		b, err := r.next()
		if b == nil || err != nil {
			return err
		}
		if k == len(out.entries) || int(out.number(k)) != i {
			continue
		}
		h := imageHead(b)
		if info, _, ok := h.info(); ok && int64(info.Width)*int64(info.Height) > x.maxPixels {
			if out.oversize == nil {
				out.oversize = map[int32]imageHead{}
			}
			out.oversize[int32(k)] = h
		}
		k++
	}
}

// loadMarks reads the checkpoints.
func (x *index) loadMarks(sections map[uint32]stored) error {
	r := sections[sectionCheckpoints].reader(checkpointBytes)
	windows := uint64(sections[sectionWindows].size)
	for {
		b, err := r.next()
		if b == nil || err != nil {
			return err
		}
		shard, m, size := decodeMark(b)
		if uint64(shard) >= uint64(len(x.shards)) || uint64(m.at) > windows || uint64(size) > windows-uint64(m.at) || size > 4*windowBytes {
			return errIndexDamaged
		}
		s := &x.shards[shard]
		if m.bit < 0 || m.bit>>3 > s.info.Size() || m.output < 0 {
			return errIndexDamaged
		}
		if k := len(s.marks); k > 0 && (s.marks[k-1].bit > m.bit || s.marks[k-1].output > m.output) || k == 0 && m.output != 0 {
			return errIndexDamaged
		}
		s.marks = append(s.marks, m)
	}
}

func decodeMark(b []byte) (shard uint32, m mark, size uint32) {
	le := binary.LittleEndian
	size = le.Uint32(b[24:])
	return le.Uint32(b[28:]), mark{bit: int64(le.Uint64(b)), output: int64(le.Uint64(b[8:])), at: int64(le.Uint64(b[16:])), size: int32(size)}, size
}

// eachMark returns a function that returns one checkpoint after the other.
func (x *index) eachMark() func() (shard int, output int64, ok bool) {
	shard, i := 0, 0
	return func() (int, int64, bool) {
		for shard < len(x.shards) && i == len(x.shards[shard].marks) {
			shard, i = shard+1, 0
		}
		if shard == len(x.shards) {
			return 0, 0, false
		}
		i++
		return shard, x.shards[shard].marks[i-1].output, true
	}
}

// workMeter finds out what reading samples in any order costs. Samples and checkpoints come in the archive's order.
type workMeter struct {
	shards []indexShard
	next   func() (shard int, output int64, ok bool) // checkpoint

	begun     bool
	shard     int // of the next checkpoint
	output    int64
	left      bool  // there is one
	from      int64 // the last checkpoint before the sample
	fromShard int
	stream    bool // there is a sample without one

	inflated, wanted float64 // bytes
	samples          float64
}

func (w *workMeter) sample(e *entry) {
	if e.kind != kindFile || e.size == 0 {
		return
	}
	w.samples++
	w.wanted += float64(e.size)
	w.inflated += float64(e.size)
	if f := w.shards[e.shard].format; f == formatTar || f == formatTree {
		return
	}
	if !w.begun {
		w.begun, w.fromShard = true, -1
		w.shard, w.output, w.left = w.next()
	}
	for w.left && (w.shard < int(e.shard) || w.shard == int(e.shard) && w.output <= e.offset) {
		w.fromShard, w.from = w.shard, w.output
		w.shard, w.output, w.left = w.next()
	}
	if w.fromShard != int(e.shard) {
		w.stream = true
		return
	}
	w.inflated += float64(max(0, e.offset-w.from))
}

// work is how many bytes have to be read or inflated for one of samples; 0: the archive is a stream.
func (w *workMeter) work() float64 {
	switch {
	case w.stream:
		return 0
	case w.wanted == 0:
		return 1
	}
	return w.inflated / w.wanted
}

// survey says what build would make of the same, without making it: how many samples there are, and what work.
func (x *indexer) survey(a *archive) (samples int, work float64, err error) {
	sections := x.stored()
	_, number := x.labels()
	marks := sections[sectionCheckpoints].reader(checkpointBytes)
	var w workMeter
	for i := range a.shards {
		w.shards = append(w.shards, indexShard{format: a.shards[i].format})
	}
	w.next = func() (int, int64, bool) {
		var b []byte
		if b, err = marks.next(); b == nil || err != nil {
			return 0, 0, false
		}
		shard, m, _ := decodeMark(b)
		return int(shard), m.output, true
	}
	for r := sections[sectionEntries].reader(entryBytes); err == nil; {
		var b []byte
		if b, err = r.next(); b == nil {
			break
		}
		var e entry
		if e.decode(b); number[e.label] >= 0 {
			samples++
			w.sample(&e)
		}
	}
	return samples, w.work(), err
}

// checkpointer keeps, of the checkpoints of a stream, those that members are best read from: the last one before each.
type checkpointer struct {
	keep    func(checkpoint)
	reached func() int64 // no member that is still to come begins before it
	last    int64        // output of the one kept last; -1: none is kept
	pending []checkpoint // in order; the first may be kept already
	wanted  []int64      // where members begin for which that is not decided
	done    int          // how many of wanted are decided
}

// mostWindow is how much of the inflated bytes checkpoints may take: a larger one has to pay for itself by standing further from the one before.
const mostWindow = 48

func newCheckpointer(keep func(checkpoint), reached func() int64) *checkpointer {
	return &checkpointer{keep: keep, reached: reached, last: -1}
}

func (k *checkpointer) note(c checkpoint) {
	k.pending = append(k.pending, c)
	if k.last < 0 {
		k.last = c.output
		k.keep(c)
	}
	k.decide(false)
	if len(k.wanted) == 0 { // in the middle of a member, however large
		k.forget(k.reached())
	}
}

// member says that a member's content begins at offset, and none begins before it any more.
func (k *checkpointer) member(offset int64) {
	k.wanted = append(k.wanted, offset)
	k.decide(false)
	if k.done == len(k.wanted) {
		k.forget(offset)
	}
}

// forget drops the checkpoints that nothing from offset on needs.
func (k *checkpointer) forget(offset int64) {
	n := 0
	for n+1 < len(k.pending) && k.pending[n+1].output <= offset {
		n++
	}
	k.pending = slices.Delete(k.pending, 0, n)
}

func (k *checkpointer) decide(end bool) {
	for k.done < len(k.wanted) {
		offset := k.wanted[k.done]
		if !end && (len(k.pending) == 0 || k.pending[len(k.pending)-1].output <= offset) {
			return // a better one may come
		}
		k.done++
		k.forget(offset)
		if len(k.pending) == 0 {
			continue
		}
		c := &k.pending[0]
		if c.output > k.last && c.output <= offset && c.output-k.last >= int64(mostWindow*len(c.window)) {
			k.last = c.output
			k.keep(*c)
		}
	}
	k.wanted, k.done = k.wanted[:0], 0
}

// finish decides the rest: no more checkpoints come.
func (k *checkpointer) finish() { k.decide(true) }

package archive

import (
	"context"
	"io"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

const (
	gzipChunkBytes = 2 << 20   // compressed bytes of a chunk
	gzipSearch     = 256 << 10 // bytes of a chunk that are searched for its start
	gzipTrials     = 32        // places that are tried as a chunk's start
	gzipTrusted    = 64 << 10  // output after which a start counts as right, although damage follows
	gzipChunkRoom  = 128 << 10 // bytes that a chunk's goroutine inflates at a time
	gzipChunkRatio = 4         // a chunk's output is at most as many times its size
	maxGzipCopies  = 1 << 18   // copies from an unknown window, after which a chunk ends
	maxGzipMarks   = 1 << 10   // blocks, after which a chunk ends
	minGzipTasks   = 2         // two need 1.4 times the CPU of one, and 0.6 of its time
	maxGzipTasks   = 16        // chunks that are inflated at a time, at most
	gzipMisses     = 4         // useless chunks, after which chunks are left out
	maxGzipRest    = 64        // chunks that are left out at a time, at most
)

// gzipAhead inflates chunks of a gzip file ahead of its reader, on several goroutines.
//
// A chunk starts at the first place in a range of the file that looks like the start of a block or
// of a member. Its goroutine inflates from there without knowing the output before it. It records
// the matches that copy from this unknown window, directly or through other matches. When the
// reader has inflated everything up to exactly this place, it joins the chunk: it copies the
// window, makes the recorded copies again, and continues after the chunk's output, with the chunk's
// inflater.
//
// The reader inflates by itself wherever no chunk starts. So a wrong guess costs time, and changes
// no byte, checkpoint or error. Only the reader verifies checksums.
type gzipAhead struct {
	ctx    context.Context
	source *contextReader // the reader's, which reads from file
	file   *fileAt
	size   int64 // of the file
	bytes  int64 // of a chunk
	tasks  int   // chunks that are inflated at a time, at most

	queue   []*gzipChunk // not joined yet, in the file's order
	next    int64        // where the next chunk starts
	pace    gzipPace
	free    []gzipMemory // of earlier chunks
	stop    atomic.Bool
	running sync.WaitGroup
}

// gzipPace decides how many chunks are inflated.
type gzipPace struct {
	started int // limit of the queue, up to tasks
	joins   int // chunks that were joined
	misses  int // useless chunks since the last one that was joined
	rest    int // chunks to leave out
}

// fileAt reads a file from an offset on.
type fileAt struct {
	file   io.ReaderAt
	offset int64
}

func (f *fileAt) Read(p []byte) (int, error) {
	n, err := f.file.ReadAt(p, f.offset)
	f.offset += int64(n)
	if n > 0 && err == io.EOF {
		err = nil
	}
	return n, err
}

// inflateAhead makes up to tasks goroutines inflate ahead of the reader. source is the reader's
// file of the given size. It must be called before the first read.
func (r *gzipReader) inflateAhead(ctx context.Context, source *contextReader, file io.ReaderAt, size, bytes int64,
	tasks int) {
	if tasks = min(tasks, maxGzipTasks); tasks < minGzipTasks || size < 4*bytes {
		return
	}
	at := &fileAt{file, source.count}
	source.reader = at
	r.ahead = &gzipAhead{ctx: ctx, source: source, file: at, size: size, bytes: bytes, tasks: tasks, next: bytes,
		pace: gzipPace{started: 2}}
}

// gzipChunk is a chunk. Its goroutine owns the fields below done until it closes done.
type gzipChunk struct {
	start, end int64 // range of the file that is searched, and at whose end the chunk ends
	done       chan struct{}

	gzipMemory
	gzipStart
	inflater *imagecapi.Inflater
	in       gzipInput
	wr       int // the output is out[windowBytes:wr]
	gzipPart
	events []gzipEvent
	marks  []gzipMark
}

// gzipPart is the member that a chunk's inflater is in.
type gzipPart struct {
	open   bool  // the member's end has not been reached
	origin int64 // offset in the file that the inflater counts from
	base   int   // position in out that the inflater counts from
}

// gzipStart is the place where a chunk starts.
type gzipStart struct {
	usable bool
	kind   int   // see imagecapi.FindInflate
	bit    int64 // of the file
	reach  int   // bytes before the place that the chunk copies from
}

// gzipMemory is memory that chunks use one after the other.
type gzipMemory struct {
	head   []byte // the range in which the start is searched
	packed []byte // of the input
	out    []byte // the window and the output
	copies []imagecapi.InflateCopy
	used   []uint64 // of the marks
}

// gzipEvent is the start or the end of a member in a chunk's output.
type gzipEvent struct {
	at        int // position in out
	start     bool
	origin    int64 // of a start: the offset of the deflate stream in the file
	crc, size uint32
}

// gzipMark is a block's start in a chunk's output.
type gzipMark struct {
	at   int // position in out
	bit  int64
	used []uint64
}

// lowest returns the lowest bit of the file at which the chunk may start. The header of a stored
// block has up to 7 bits of padding.
func (c *gzipChunk) lowest() int64 {
	if c.kind == imagecapi.FoundStored {
		return c.bit - 7
	}
	return c.bit
}

// head returns the first chunk of the queue, or nil at the end of the file. It starts chunks.
func (g *gzipAhead) head() *gzipChunk {
	for len(g.queue) < g.pace.started && g.next < g.size {
		c := &gzipChunk{start: g.next, end: min(g.next+g.bytes, g.size), done: make(chan struct{})}
		g.next = c.end
		if g.pace.rest > 0 {
			g.pace.rest--
			continue
		}
		if n := len(g.free); n > 0 {
			c.gzipMemory, g.free = g.free[n-1], g.free[:n-1]
		}
		g.queue = append(g.queue, c)
		g.running.Go(func() { c.run(g) })
	}
	if len(g.queue) == 0 {
		return nil
	}
	return g.queue[0]
}

// pop removes the first chunk of the queue.
func (g *gzipAhead) pop(joined bool) {
	c := g.queue[0]
	g.queue = slices.Delete(g.queue, 0, 1)
	g.pace.started = min(g.pace.started+1, g.tasks)
	if joined {
		g.pace.joins++
		g.pace.misses = 0
		return
	}
	g.drop(c)
	if g.pace.misses++; g.pace.misses >= gzipMisses {
		g.pace.rest = min(1<<min(g.pace.misses, 30), maxGzipRest)
	}
}

// drop frees a chunk that is not joined.
func (g *gzipAhead) drop(c *gzipChunk) {
	if c.inflater != nil {
		imagecapi.FreeInflater(c.inflater)
		c.inflater = nil
	}
	g.recycle(c.gzipMemory)
}

// recycle keeps a chunk's memory for a later chunk.
func (g *gzipAhead) recycle(m gzipMemory) {
	if m.out != nil && len(g.free) < g.tasks {
		g.free = append(g.free, m)
	}
}

// close ends the goroutines.
func (g *gzipAhead) close() {
	g.stop.Store(true)
	g.running.Wait()
	for _, c := range g.queue {
		g.drop(c)
	}
	g.queue, g.next, g.free = nil, g.size, nil
}

// run searches for the chunk's start and inflates the chunk.
func (c *gzipChunk) run(g *gzipAhead) {
	defer close(c.done)
	if c.head == nil {
		c.head, c.packed = make([]byte, gzipSearch), make([]byte, gzipReadBytes)
	}
	head := c.head[:min(gzipSearch, g.size-c.start)]
	if n, _ := g.file.file.ReadAt(head, c.start); n < len(head) {
		return
	}
	inflater, err := imagecapi.NewInflater(1)
	if err != nil {
		return
	}
	c.inflater = inflater
	until := 8 * uint64(min(int64(len(head)), c.end-c.start))
	from := uint64(0)
	for range gzipTrials {
		bit, kind, err := imagecapi.FindInflate(head, from, until)
		if err != nil || kind == imagecapi.FoundNone {
			return
		}
		c.bit, c.kind = 8*c.start+int64(bit), kind
		if c.usable = c.inflate(g); c.usable || c.wr-windowBytes >= gzipTrusted {
			return
		}
		from = bit + 1
	}
}

// inflate inflates the chunk from its start. It returns false if the chunk is useless: the start is
// wrong, or the stream is damaged, which the reader then finds by itself.
func (c *gzipChunk) inflate(g *gzipAhead) bool {
	c.in = gzipInput{file: &fileAt{g.file.file, c.bit / 8}, packed: c.packed, offset: c.bit / 8}
	c.wr, c.base, c.origin = windowBytes, 0, c.bit/8
	c.copies, c.used, c.reach, c.events, c.marks = c.copies[:0], c.used[:0], 0, c.events[:0], c.marks[:0]
	if c.open = c.kind != imagecapi.FoundMember; c.open {
		if err := imagecapi.FollowInflater(c.inflater, int(c.bit&7), windowBytes); err != nil {
			return false
		}
	}
	for {
		if g.stop.Load() || g.ctx.Err() != nil {
			return false
		}
		if !c.open && !c.nextMember() {
			return len(c.events) > 0
		}
		if !c.grow(g) {
			return c.pause()
		}
		if ended, ok := c.step(); ended || !ok {
			return ok && c.pause()
		}
	}
}

// nextMember enters the next member. It returns false if it leaves that to the reader.
func (c *gzipChunk) nextMember() bool {
	if c.in.offset >= c.end || c.in.more(len(c.in.packed)/2) != nil {
		return false
	}
	b := c.in.waiting()
	n := gzipHeader(b)
	if n == 0 || b[3]&^byte(4|8|16) != 0 { // the reader verifies a header's checksum
		return false
	}
	c.in.consume(n)
	if imagecapi.FollowInflater(c.inflater, 0, 0) != nil {
		return false
	}
	c.open, c.origin, c.base = true, c.in.offset, c.wr
	c.events = append(c.events, gzipEvent{at: c.wr, start: true, origin: c.origin})
	return true
}

// grow makes room for the next step. It returns false if the chunk has reached its limit.
func (c *gzipChunk) grow(g *gzipAhead) bool {
	if len(c.out)-c.wr >= gzipChunkRoom {
		return true
	}
	size := min(max(2*int64(len(c.out)), windowBytes+gzipChunkRoom+g.bytes*5/4),
		windowBytes+gzipChunkRoom+gzipChunkRatio*g.bytes)
	if size-int64(c.wr) < gzipChunkRoom {
		return false
	}
	out := make([]byte, size)
	copy(out, c.out[:min(c.wr, len(c.out))])
	c.out = out
	return true
}

// step inflates the next bytes. ended means that the chunk ends here. ok is false if it is useless.
func (c *gzipChunk) step() (ended, ok bool) {
	stop := uint64(8 * max(0, c.end-c.origin)) // the header of a member may end after the chunk
	if err := imagecapi.StopInflaterAt(c.inflater, stop); err != nil || c.in.more(1<<10) != nil {
		return false, false
	}
	consumed, produced, done, err := imagecapi.Inflate(c.inflater, c.in.waiting(), c.in.end,
		c.out[:c.wr+gzipChunkRoom], c.wr)
	if err != nil {
		return false, false
	}
	c.in.consume(consumed)
	c.wr += produced
	for {
		m, found, err := imagecapi.NextInflateCheckpoint(c.inflater)
		if err != nil {
			return false, false
		}
		if !found {
			break
		}
		n := len(c.used)
		c.used = append(c.used, m.Used...) // earlier marks may keep the memory that it replaces
		c.marks = append(c.marks, gzipMark{c.base + int(m.Output), 8*c.origin + int64(m.Bit), c.used[n:]})
	}
	state, err := imagecapi.GetInflateState(c.inflater)
	if err != nil || state.Lacking {
		return false, false
	}
	if done {
		c.note(&state)
		b, err := c.in.next(8)
		if err != nil {
			return false, false
		}
		c.open = false
		c.events = append(c.events, gzipEvent{at: c.wr, crc: le32(b), size: le32(b[4:])})
		return false, true
	}
	ended = state.AtBlock && 8*c.origin+int64(state.Bit) >= 8*c.end || len(state.Copies) > maxGzipCopies ||
		len(c.marks) > maxGzipMarks
	return ended, ended || consumed+produced > 0
}

// note keeps the copies of the chunk's first member, which alone has an unknown window.
func (c *gzipChunk) note(s *imagecapi.InflateState) {
	if c.kind != imagecapi.FoundMember && len(c.events) == 0 {
		c.copies, c.reach = append(c.copies[:0], s.Copies...), s.Reach
	}
}

// pause ends the chunk within a member. It returns false if checkpoints before the chunk may need
// more of the stream.
func (c *gzipChunk) pause() bool {
	state, err := imagecapi.GetInflateState(c.inflater)
	if err != nil {
		return false
	}
	c.note(&state)
	return len(c.events) > 0 || c.wr >= 2*windowBytes
}

// join joins the chunk that starts where the reader is, if there is one.
func (r *gzipReader) join() (joined bool, err error) {
	g := r.ahead
	if g == nil {
		return false, nil
	}
	state := imagecapi.InflateState{AtBlock: true}
	at := 8 * r.in.offset
	if r.member.open {
		if state, err = imagecapi.GetInflateState(r.inflater); err != nil {
			return false, err
		}
		at = 8*r.member.origin + int64(state.Bit)
	}
	stop := int64(-1)
	for c := g.head(); c != nil; c = g.head() {
		if !state.AtBlock || at < 8*c.start {
			stop = 8 * c.start
			break
		}
		<-c.done
		if c.usable && at < c.lowest() {
			stop = c.lowest()
			break
		}
		joined := c.usable && r.startsAt(c, at, &state)
		g.pop(joined)
		if joined {
			if err := r.take(c, at); err != nil {
				g.drop(c)
				return true, err
			}
			g.head() // starts the next chunk while this one is delivered
			return true, nil
		}
	}
	if !r.member.open {
		return false, nil
	}
	if stop < 0 {
		return false, imagecapi.StopInflaterAt(r.inflater, 1<<63)
	}
	return false, imagecapi.StopInflaterAt(r.inflater, uint64(max(0, stop-8*r.member.origin)))
}

// startsAt reports whether a chunk starts exactly at bit at of the file, where the reader is.
func (r *gzipReader) startsAt(c *gzipChunk, at int64, s *imagecapi.InflateState) bool {
	if r.member.open == (c.kind == imagecapi.FoundMember) {
		return false
	}
	if r.member.open && int64(c.reach) > r.produced-r.member.first {
		return false // a match from before the member: the reader finds the error
	}
	if c.kind != imagecapi.FoundStored {
		return at == c.bit
	}
	if at < c.lowest() || at > c.bit || r.in.more(2) != nil || len(r.in.waiting()) < 2 {
		return false
	}
	b := r.in.waiting()
	have := (8 - at&7) & 7
	bits := int64(s.Rest) | int64(b[0])<<have | int64(b[1])<<(have+8)
	return bits&(1<<(c.bit+3-at)-1) == 0
}

// take makes a chunk's output the reader's next output, and continues with the chunk's inflater.
func (r *gzipReader) take(c *gzipChunk, at int64) error {
	base := r.produced - windowBytes // output offset of c.out[0]
	if r.member.open {
		n := min(r.wr, windowBytes)
		copy(c.out[windowBytes-n:windowBytes], r.out[r.wr-n:r.wr])
		if r.note != nil {
			if err := imagecapi.FinishInflater(r.inflater, c.out[:windowBytes], c.copies); err != nil {
				return err
			}
			if err := r.checkpoints(); err != nil {
				return err
			}
		}
		c.copyAgain()
		if r.note != nil && r.produced-r.member.last >= inflateSpacing {
			r.member.last = r.produced
			r.note(Checkpoint{Bit: at, Output: r.produced, Window: packWindow(c.out[:windowBytes], c.copied())})
		}
		r.member.origin, r.member.base = c.bit/8, base
	}
	last := c.space(r.member.last - base)
	if err := imagecapi.SettleInflater(c.inflater, c.out[:c.wr], r.spacing(), last-int64(c.base)); err != nil {
		return err
	}
	r.free()
	r.ahead.recycle(r.memory)
	r.memory = c.gzipMemory
	r.inflater, r.out, r.rd, r.wr, r.chunk = c.inflater, c.out, windowBytes, windowBytes, c
	c.inflater = nil
	r.in = c.in
	r.in.file = r.ahead.source
	r.ahead.file.offset = r.in.offset + int64(len(r.in.waiting()))
	r.ahead.source.count = r.ahead.file.offset
	return nil
}

// spacing returns the minimum distance between two checkpoints; 0: none are made.
func (r *gzipReader) spacing() int {
	if r.note == nil {
		return 0
	}
	return inflateSpacing
}

// copyAgain makes the recorded copies, now that the window is known.
func (c *gzipChunk) copyAgain() {
	for _, m := range c.copies {
		at, distance := int(m.At), int(m.Distance)
		n := min(int(m.Length), c.wr-at)
		if distance >= n {
			copy(c.out[at:at+n], c.out[at-distance:])
			continue
		}
		for i := at; i < at+n; i++ {
			c.out[i] = c.out[i-distance]
		}
	}
}

// copied returns a bit for each byte of the window: whether the chunk copies the byte.
func (c *gzipChunk) copied() []uint64 {
	used := make([]uint64, windowBytes/64)
	for _, m := range c.copies {
		from := int(m.At) - int(m.Distance)
		for i := from; i < min(from+int(m.Length), windowBytes); i++ {
			used[i/64] |= 1 << (i % 64)
		}
	}
	return used
}

// space keeps the marks that are at least inflateSpacing bytes apart. last is the position of the
// checkpoint before them. space returns the position of the last mark, or of the last member if it
// has none.
func (c *gzipChunk) space(last int64) int64 {
	events, kept := c.events, c.marks[:0]
	for _, m := range c.marks {
		for len(events) > 0 && events[0].at < m.at {
			if events[0].start {
				last = int64(events[0].at)
			}
			events = events[1:]
		}
		if int64(m.at)-last >= inflateSpacing {
			last = int64(m.at)
			kept = append(kept, m)
		}
	}
	c.marks = kept
	for _, e := range events {
		if e.start {
			last = int64(e.at)
		}
	}
	return last
}

// deliver adds the next bytes of the chunk to the member, up to an event.
func (r *gzipReader) deliver() error {
	c := r.chunk
	end := min(c.wr, r.wr+inflateRoom)
	if len(c.events) > 0 {
		end = min(end, c.events[0].at)
	}
	base := r.produced - int64(r.wr)
	r.add(end - r.wr)
	for ; len(c.marks) > 0 && c.marks[0].at <= end; c.marks = c.marks[1:] {
		if m := &c.marks[0]; r.note != nil {
			r.member.last = base + int64(m.at)
			r.note(Checkpoint{Bit: m.bit, Output: r.member.last, Window: packWindow(c.out[m.at-windowBytes:m.at], m.used)})
		}
	}
	if len(c.events) == 0 || c.events[0].at > end {
		if end == c.wr {
			r.chunk = nil
		}
		return nil
	}
	e := c.events[0]
	c.events = c.events[1:]
	if e.start {
		r.begin(e.origin)
		return nil
	}
	return r.endMember(e.crc, e.size)
}

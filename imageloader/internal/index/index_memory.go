package index

import (
	"sync/atomic"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/arena"
)

// maxLazyWork is the maximum work (see maxWork) for samples that are read from the archive only
// once, and later from memory.
const maxLazyWork = 64

// contents holds contents of samples in memory outside of Go's heap, because the garbage collector
// would let the heap grow to twice the archive's size. The zero value is empty.
type contents struct {
	arena  *arena.Arena    // the memory of held and lazy; nil: both are empty
	shared *sharedContents // the contents are in memory of all processes of the host; nil: they are not
	// held has all contents, if the Builder of this index has read them.
	held [][]byte
	// lazy has the contents that have been read so far, for an index from a file. lazy[i] points to
	// as many bytes as the size in record i.
	lazy []atomic.Pointer[byte]
	// A pointer in lazy points to claimed while a reader copies the content into the arena.
	// Otherwise a second reader could allocate arena memory for the same sample and waste it.
	claimed byte
	// limit is the maximum size of a content in lazy. Larger samples are never read.
	limit int64
}

// holds reports whether samples are kept in memory.
func (c *contents) holds() bool { return c.held != nil || c.grows() }

// grows reports whether samples are kept in memory when they are read.
func (c *contents) grows() bool { return c.lazy != nil || c.shared != nil }

// has reports whether grows is true and sample i is in memory, or is being copied to it.
func (c *contents) has(i int) bool {
	if c.shared != nil {
		return c.shared.memory.Flag(i)
	}
	return c.lazy[i].Load() != nil
}

// close frees the contents.
func (c *contents) close() {
	c.arena.Free()
	c.shared.close()
}

// of returns the content of sample i, which has the given size, or nil if it is not in memory.
func (c *contents) of(i int, size int64) []byte {
	if c.shared != nil {
		return c.shared.of(i)
	}
	if c.held != nil {
		return c.held[i]
	}
	if c.lazy != nil {
		if data := c.lazy[i].Load(); data != nil && data != &c.claimed {
			return unsafe.Slice(data, size)
		}
	}
	return nil
}

// keep puts a copy of sample i's content into lazy, or into the shared memory. It does nothing if
// the content is empty, if it is there already, or if another reader is copying it.
func (c *contents) keep(i int, data []byte) {
	if c.shared != nil {
		c.shared.tryKeep(i, data)
		return
	}
	if len(data) > 0 && c.lazy[i].CompareAndSwap(nil, &c.claimed) {
		c.lazy[i].Store(unsafe.SliceData(c.arena.Clone(data)))
	}
}

// fits reports whether the samples take at most limit bytes, and the archive or one of its Parquet
// pages is compressed. Samples larger than maxSize do not count, because they are never read.
func (x *Index) fits(limit, maxSize int64) bool {
	total, streamed := int64(0), false
	for i := range x.samples {
		if r := &x.samples[i]; r.kind == archive.Regular && r.size <= maxSize {
			if r.size > limit-total {
				return false
			}
			total += r.size
		}
	}
	for i := range x.shards {
		streamed = streamed || len(x.shards[i].marks) > 0 || x.shards[i].format == archive.TarZstd
	}
	return streamed
}

// hold keeps the samples in memory, if they fit. If the marks make random access cheap, each sample
// is kept when it is first read. Otherwise hold reads all samples now. It always reads all samples
// of Parquet files now, because each of their pages has many samples. The archive must be newly
// opened.
func (x *Index) hold(a *archive.Archive, c *Config) error {
	maxSize := c.MaxSampleBytes
	if !x.fits(c.HoldBytes, maxSize) {
		return nil
	}
	x.share(a.Context(), c)
	if x.readsCheaply() {
		x.holdLazily(maxSize)
		return nil
	}
	if x.memory.shared != nil {
		return x.readAllShared(a, c)
	}
	x.memory.arena = arena.New() // Close frees it
	held := make([][]byte, len(x.samples))
	for i := range x.samples {
		r := &x.samples[i]
		if r.kind != archive.Regular || r.size == 0 || r.size > maxSize {
			continue
		}
		held[i] = x.memory.arena.Alloc(int(r.size))
		if err := x.readForward(a, i, held[i]); err != nil {
			return err
		}
	}
	x.memory.held = held
	return a.ReadToEnd()
}

// readsCheaply reports whether the marks make random access so cheap that samples are read one by
// one to be kept in memory.
func (x *Index) readsCheaply() bool {
	return x.shards[0].format != archive.Parquet && x.work > 0 && (x.work <= maxLazyWork || x.reach <= segmentBytes/2)
}

// holdLazily makes readers keep the samples in memory, which processes of the host may share.
func (x *Index) holdLazily(maxSize int64) {
	x.memory.limit = maxSize
	if x.memory.shared != nil {
		return
	}
	x.memory.arena = arena.New()
	x.memory.lazy = make([]atomic.Pointer[byte], len(x.samples))
}

// heldContents are the contents of members that a Builder has read and keeps in memory.
type heldContents struct {
	keeping  bool // whether contents are kept
	limit    int64
	bytes    int64
	contents [][]byte     // by member
	arena    *arena.Arena // their memory; nil before the first content
	given    bool         // an Index now owns the arena
	surveyed int64        // the number of bytes at which survey makes its next estimate; 0: none yet
	gaveUp   bool         // survey has dropped the contents, which may fit nevertheless
}

// room returns memory for a content.
func (h *heldContents) room(size int64) []byte {
	if h.arena == nil {
		h.arena = arena.New()
	}
	return h.arena.Alloc(int(size))
}

// surveyShare is the share of the limit after which survey makes its first estimate.
const surveyShare = 16

// survey drops the contents if all of them are likely to take more than twice the limit. Keeping
// them would cost the time of copying them. It makes an estimate at each doubling of the bytes.
func (h *heldContents) survey(progress func() archive.Progress) {
	if !h.keeping || h.bytes <= max(h.surveyed, h.limit/surveyShare) {
		return
	}
	h.surveyed = 2 * h.bytes
	if p := progress(); float64(h.bytes)/2*float64(p.TotalBytes) > float64(h.limit)*float64(p.Bytes) {
		h.drop()
		h.gaveUp = true
	}
}

// drop drops all contents and keeps no more.
func (h *heldContents) drop() {
	h.keeping, h.contents = false, nil
	h.arena.Free()
}

// wants reports whether a content of this size can still be kept in memory.
func (h *heldContents) wants(size int64) bool { return h.keeping && h.bytes+size <= h.limit }

// hold keeps the content of the newest of count members. If a content does not fit, hold drops all
// contents and keeps no more.
func (h *heldContents) hold(count int, data []byte, size int64) {
	if !h.wants(size) {
		h.drop()
		return
	}
	h.contents = append(h.contents, make([][]byte, count-len(h.contents))...)
	h.contents[count-1] = data
	h.bytes += size
}

// truncate drops the contents of all members except the first count.
func (h *heldContents) truncate(count int) { h.contents = h.contents[:min(len(h.contents), count)] }

// give returns the contents and passes their memory to x, which then frees it.
func (h *heldContents) give(x *Index) [][]byte {
	x.memory.arena, h.given = h.arena, true
	return h.contents
}

// free frees the contents, unless an Index owns them.
func (h *heldContents) free() {
	if !h.given {
		h.arena.Free()
	}
}

// Package count has the counters of a loader. They count the samples that its epochs have read,
// decoded and delivered, and measure the times of these stages. They are always on. Loader.Stats
// (imageloader/stats.go) and imageloader/prometheus show them, so a new counter needs a field in
// both. All methods are safe for concurrent use.
package count

import (
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
)

// DecodePath is a way to decode an image. All of them give the same pixels.
type DecodePath string

// The paths. Package imageloader documents them.
const (
	ByEntryPoints DecodePath = "jpeg by entry points"
	ByPlan        DecodePath = "jpeg by plan"
	ByHuffman     DecodePath = "jpeg by own huffman"
	ByLibJPEG     DecodePath = "jpeg by libjpeg"
	ByPNG         DecodePath = "png"
	ByWebP        DecodePath = "webp"
	ByLibHEIF     DecodePath = "avif or heic"
	ByGo          DecodePath = "gif, bmp or tiff"
)

// Paths has every DecodePath, in the order of reports.
var Paths = [...]DecodePath{ByEntryPoints, ByPlan, ByHuffman, ByLibJPEG, ByPNG, ByWebP, ByLibHEIF, ByGo}

// maxNamed is the maximum number of bad samples, and also of tolerated samples, that Problems
// names.
const maxNamed = 100

// Counters are the counters of a loader, over all epochs. The zero value is ready for use.
type Counters struct {
	Delivered Delivered
	Queue     Queue
	Decoded   Decoded
	Times     Times

	mu       sync.Mutex
	problems Problems
	bad      map[int]bool // samples in problems.BadNamed
	warned   map[int]bool // samples in problems.WarnedNamed
	elapsed  time.Duration
	running  map[*time.Time]struct{} // start times of the running epochs
}

// Delivered counts the samples and batches that the consumer has received.
type Delivered struct{ Samples, Batches atomic.Int64 }

// Queue counts samples that have been read but not taken by a worker, and compressed bytes that
// have been read but not decoded.
type Queue struct{ Samples, Bytes atomic.Int64 }

// Decoded counts decoded images.
type Decoded struct {
	Bytes          atomic.Int64 // compressed
	Cropped        atomic.Int64 // images that were decoded only in part, for a crop
	GaveUp         atomic.Int64 // JPEGs that our Huffman decoder has passed on to libjpeg-turbo
	EntriesMade    atomic.Int64 // JPEGs whose entry points were recorded
	EntriesRefused atomic.Int64 // JPEGs whose entry points did not match their bytes
	by             [len(Paths)]atomic.Int64
}

// Times are sums over goroutines, in nanoseconds.
type Times struct{ Read, Inflate, Decode, Plan, WaitData, WaitSlot, ConsumerWait atomic.Int64 }

// By counts n images that were decoded by path p.
func (d *Decoded) By(p DecodePath, n int64) {
	if n > 0 {
		d.by[slices.Index(Paths[:], p)].Add(n)
	}
}

// Paths returns the number of images by path. It omits paths without images.
func (d *Decoded) Paths() map[DecodePath]int64 {
	by := map[DecodePath]int64{}
	for i, p := range Paths {
		if n := d.by[i].Load(); n > 0 {
			by[p] = n
		}
	}
	return by
}

// Fetched counts the time of a sample that was read by random access. all is the whole time. For a
// sample that was inflated, read is the part of all that was spent reading the disk. For any other
// sample, read is 0.
func (t *Times) Fetched(all, read time.Duration) {
	if read == 0 {
		read = all
	}
	t.Read.Add(int64(read))
	t.Inflate.Add(int64(all - read))
}

// Streamed counts the time of a sample that was read in the archive's order. all is the whole time,
// and before is the archive's ReadTime before the sample.
func (t *Times) Streamed(a *archive.Archive, all, before time.Duration) {
	read := all
	if a.Streamed() {
		read = min(all, a.ReadTime()-before)
	}
	t.Read.Add(int64(read))
	t.Inflate.Add(int64(all - read))
}

// StartEpoch starts the clock of an epoch. The caller calls stop once, when the epoch ends.
func (c *Counters) StartEpoch() (stop func()) {
	start := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == nil {
		c.running = map[*time.Time]struct{}{}
	}
	c.running[&start] = struct{}{}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.elapsed += time.Since(start)
		delete(c.running, &start)
	}
}

// Elapsed returns the sum of the times of all epochs. Epochs that run at the same time count
// separately.
func (c *Counters) Elapsed() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := c.elapsed
	for start := range c.running {
		all += time.Since(*start)
	}
	return all
}

// Problems counts bad samples and samples whose damage was tolerated. A sample counts once for each
// epoch in which it occurred. Problems also names the first of these samples, each once, in the
// order in which they occurred.
type Problems struct {
	Bad         int64
	BadBy       map[sample.Reason]int64
	BadNamed    []*sample.Error
	Warned      int64
	WarnedNamed []*sample.Error
}

// Problems returns a copy of the problems so far.
func (c *Counters) Problems() Problems {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.problems
	p.BadBy = maps.Clone(p.BadBy)
	if p.BadBy == nil {
		p.BadBy = map[sample.Reason]int64{}
	}
	p.BadNamed, p.WarnedNamed = slices.Clone(p.BadNamed), slices.Clone(p.WarnedNamed)
	return p
}

// Met counts and logs a bad sample.
func (c *Counters) Met(e *sample.Error, p sample.BadSamplePolicy, log *slog.Logger) {
	c.mu.Lock()
	if c.bad == nil {
		c.problems.BadBy, c.bad = map[sample.Reason]int64{}, map[int]bool{}
	}
	c.problems.Bad++
	c.problems.BadBy[e.Reason]++
	if !c.bad[e.Index] && len(c.problems.BadNamed) < maxNamed {
		c.bad[e.Index] = true
		c.problems.BadNamed = append(c.problems.BadNamed, e)
	}
	c.mu.Unlock()
	log.Warn("bad sample", "archive", e.File, "name", e.Name, "index", e.Index, "reason", string(e.Reason),
		"error", e.Err, "policy", p.String())
}

// Tolerated counts and logs a sample that was decoded despite its damage.
func (c *Counters) Tolerated(e *sample.Error, p sample.DamagePolicy, log *slog.Logger) {
	c.mu.Lock()
	if c.warned == nil {
		c.warned = map[int]bool{}
	}
	c.problems.Warned++
	if !c.warned[e.Index] && len(c.problems.WarnedNamed) < maxNamed {
		c.warned[e.Index] = true
		c.problems.WarnedNamed = append(c.problems.WarnedNamed, e)
	}
	c.mu.Unlock()
	log.Warn("damaged sample decoded", "archive", e.File, "name", e.Name, "index", e.Index, "damage", e.Err,
		"damaged", p.String())
}

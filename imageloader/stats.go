package imageloader

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// namedBad is how many bad samples Stats names.
const namedBad = 100

// Stats is what a Loader did since Open, over all epochs. Times are sums over goroutines: Decode / (Workers * wall time) is how busy the workers were.
type Stats struct {
	Samples  int64            // delivered
	Batches  int64            // delivered
	Bytes    int64            // compressed bytes of decoded images
	Bad      int64            // bad samples met, once for each epoch that met them
	BadBy    map[Reason]int64 // the same by reason
	BadNamed []*SampleError   // the first 100 different ones, in the order met; the log names every one
	Ignored  int              // members of the archive that are no samples: outside of a class's directory

	Workers  int
	Queue    int           // samples read and not yet taken by a worker, now
	Read     time.Duration // reading and inflating
	Decode   time.Duration // header, decode, crop, resize
	WaitData time.Duration // workers waiting for samples: high if reading is the bottleneck, or slots
	WaitSlot time.Duration // samples waiting for a free slot: high if the consumer is the bottleneck, as it should be
}

type counters struct {
	samples, batches, bytes, queue   atomic.Int64
	read, decode, waitData, waitSlot atomic.Int64 // ns
	mu                               sync.Mutex
	bad                              int64
	badBy                            map[Reason]int64
	badNamed                         []*SampleError
	badSeen                          map[int]bool
}

// met counts and logs a bad sample.
func (c *counters) met(e *SampleError, p Policy, log *slog.Logger) {
	c.mu.Lock()
	if c.badBy == nil {
		c.badBy, c.badSeen = map[Reason]int64{}, map[int]bool{}
	}
	c.bad++
	c.badBy[e.Reason]++
	if !c.badSeen[e.Index] && len(c.badNamed) < namedBad {
		c.badSeen[e.Index] = true
		c.badNamed = append(c.badNamed, e)
	}
	c.mu.Unlock()
	log.Warn("bad sample", "archive", e.File, "name", e.Name, "index", e.Index, "reason", string(e.Reason), "error", e.Err, "policy", p.String())
}

// Stats may be called at any time, also while an epoch runs.
func (l *Loader) Stats() Stats {
	c := &l.counters
	s := Stats{
		Samples: c.samples.Load(), Batches: c.batches.Load(), Bytes: c.bytes.Load(),
		Workers: l.o.Workers, Queue: int(c.queue.Load()),
		Read: time.Duration(c.read.Load()), Decode: time.Duration(c.decode.Load()),
		WaitData: time.Duration(c.waitData.Load()), WaitSlot: time.Duration(c.waitSlot.Load()),
		BadBy: map[Reason]int64{},
	}
	c.mu.Lock()
	s.Bad = c.bad
	for r, n := range c.badBy {
		s.BadBy[r] = n
	}
	s.BadNamed = append(s.BadNamed, c.badNamed...)
	c.mu.Unlock()
	if x := l.index.Load(); x != nil {
		s.Ignored = x.ignored
	}
	return s
}

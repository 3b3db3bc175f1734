package serve

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
)

// BatcherStats are the figures of a [Batcher] since it was made. Each call of Do that has returned
// is counted once: in Answered, Faulty, Refused, Cancelled or Failed.
type BatcherStats struct {
	Answered  int64 // with the model's outputs
	Faulty    int64 // the request's own image or row was wrong
	Refused   int64 // with ErrQueueFull
	Cancelled int64 // the context ended first
	Failed    int64 // every other error

	Waiting int // requests that have a place in the queue now
	Running int // requests in batches now

	Rows        int64         // rows of all batches that ran, without padding
	Padding     int64         // rows that filled batches up to their bucket
	Replays     int64         // batches that ran as a CUDA graph
	OutOfMemory int64         // batches that ran again in a smaller bucket
	Buckets     []BucketStats // from the smallest bucket up
	Devices     []DeviceStats // in the order of BatcherOptions.Devices

	Waited Latencies // from the call of Do until a worker took the request, decoding included
	Ran    Latencies // of batches: from filling the input until the outputs are in Go memory
	Took   Latencies // of calls of Do that were answered with outputs
}

// BucketStats counts the batches that ran with one batch size.
type BucketStats struct {
	Size    int // rows, including padding
	Batches int64
	Rows    int64 // without padding
}

// DeviceStats is the state of a device.
type DeviceStats struct {
	Device   cuda.Device
	MaxBatch int   // BatcherOptions.MaxBatch, or less after the device ran out of memory
	Lost     error // nil while the device serves
}

// LatencyBounds returns the upper bounds of the intervals of [Latencies].Counts, in ascending
// order: 0.25 ms, and each twice the bound before, up to 8.192 s. The last interval has none.
func LatencyBounds() []time.Duration {
	bounds := make([]time.Duration, latencyIntervals-1)
	for i := range bounds {
		bounds[i] = 250 * time.Microsecond << i
	}
	return bounds
}

const latencyIntervals = 17

// Latencies is a histogram of durations.
type Latencies struct {
	Count  int64
	Sum    time.Duration
	Counts [latencyIntervals]int64 // by interval; a duration equal to a bound counts below it
}

func (l *Latencies) add(d time.Duration) {
	l.Count++
	l.Sum += d
	i := 0
	for i < latencyIntervals-1 && d > 250*time.Microsecond<<i {
		i++
	}
	l.Counts[i]++
}

// counters are the part of BatcherStats that is counted as it happens.
type counters struct {
	mu sync.Mutex
	s  BatcherStats
}

// returned counts the end of a call of Do.
func (c *counters) returned(took time.Duration, err error, cancelled bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var faults decode.Errors
	switch {
	case err == nil:
		c.s.Answered++
		c.s.Took.add(took)
	case cancelled:
		c.s.Cancelled++
	case errors.Is(err, ErrQueueFull):
		c.s.Refused++
	case errors.As(err, &faults) || errors.Is(err, ErrRequest):
		c.s.Faulty++
	default:
		c.s.Failed++
	}
}

// began counts requests that a worker has taken.
func (c *counters) began(batch []*request, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.Running += len(batch)
	for _, r := range batch {
		c.s.Waited.add(now.Sub(r.entered))
	}
}

// ended counts requests of a batch that have been answered.
func (c *counters) ended(requests int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.Running -= requests
}

// ran counts a batch that has run.
func (c *counters) ran(bucket, rows int, took time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := &c.s.Buckets[bucket]
	b.Batches++
	b.Rows += int64(rows)
	c.s.Rows += int64(rows)
	c.s.Padding += int64(b.Size - rows)
	c.s.Ran.add(took)
}

func (c *counters) replayed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.Replays++
}

func (c *counters) outOfMemory() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.OutOfMemory++
}

// stats returns a copy.
func (c *counters) stats() BatcherStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.s
	s.Buckets = slices.Clone(s.Buckets)
	return s
}

package imageloader

import (
	"encoding/json"
	"fmt"
	"time"
)

// Stats may be called at any time, also while an epoch runs.
func (l *Loader) Stats() Stats {
	c := &l.counters
	s := Stats{
		Samples: c.samples.Load(), Batches: c.batches.Load(), Bytes: c.bytes.Load(),
		Workers: l.o.Workers, Queue: int(c.queue.Load()), QueueBytes: c.queueBytes.Load(),
		Read: time.Duration(c.read.Load()), Inflate: time.Duration(c.inflate.Load()), Decode: time.Duration(c.decode.Load()),
		WaitData: time.Duration(c.waitData.Load()), WaitSlot: time.Duration(c.waitSlot.Load()), ConsumerWait: time.Duration(c.consumerWait.Load()),
		Cropped: c.cropped.Load(), GaveUp: c.gaveUp.Load(), EntriesMade: c.entriesMade.Load(), EntriesRefused: c.entriesRefused.Load(),
		BadBy: map[Reason]int64{}, Decoded: map[DecodePath]int64{},
	}
	for i, p := range paths {
		if n := c.decoded[i].Load(); n > 0 {
			s.Decoded[p] = n
		}
	}
	c.mu.Lock()
	s.Bad = c.bad
	for r, n := range c.badBy {
		s.BadBy[r] = n
	}
	s.BadNamed = append(s.BadNamed, c.badNamed...)
	s.Warned = c.warned
	s.WarnedNamed = append(s.WarnedNamed, c.warnedNamed...)
	s.Elapsed = c.elapsed
	for _, since := range c.running {
		s.Elapsed += time.Since(since)
	}
	c.mu.Unlock()
	if p := l.points.Load(); p != nil {
		s.TranscodedBytes = p.transcodedBytes()
	}
	if x := l.index.Load(); x != nil {
		s.Ignored = x.Ignored()
	}
	return s
}

// Var returns the loader's Stats as an expvar.Var, for the program to publish under a name of its
// choice: expvar.Publish("train", loader.Var()).
func (l *Loader) Var() fmt.Stringer { return statsVar{l} }

type statsVar struct{ l *Loader }

func (v statsVar) String() string {
	data, err := json.Marshal(v.l.Stats())
	if err != nil { // numbers and strings only
		return "null"
	}
	return string(data)
}

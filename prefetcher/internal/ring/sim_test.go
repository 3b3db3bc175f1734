package ring

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/internal/simulate"
)

// This file implements the ring's device, source and consumer in the simulated world.

type (
	world    = simulate.World
	simEvent = simulate.Event
	cell     = simulate.Cell
	clock    = simulate.Clock
)

// Access kinds, as reports name them.
const (
	bySource   = "the source's fill"
	byCopy     = "a copy"
	byFinish   = "a finish"
	byConsumer = "the consumer's kernel"
	byFree     = "the ring's free"
	byFlags    = "the flags' copy"
	byCheck    = "the check of the flags"
)

// freed is the generation of the ring's free: it comes after all batches.
const freed = 1 << 30

// edge names the edge that should order a write and a read of a slot. The read of the same or a
// later batch comes after the write; the read of an earlier batch comes before it.
func edge(cell *simulate.Cell, write, read simulate.Access) string {
	host := strings.HasPrefix(cell.Name, "host")
	switch {
	case write.By == byFree:
		return "close"
	case read.By == byConsumer && write.Gen > read.Gen:
		return "released"
	case read.By == byCheck || write.By == byFlags:
		return "decoded"
	case read.By == byConsumer && !host:
		return "ready"
	case host && write.Gen > read.Gen:
		return "copied"
	case host:
		return "delivered" // the ring's lock orders the driver after the source
	}
	return "order of P"
}

// simDevice is a simulated GPU: stream 0 is P, stream 1 the default stream.
type simDevice struct {
	*world
	host  []*cell
	stage *cell
	slot  []*cell
	open  bool
	gen   int // generation of the batch that the driver works on

	// With Config.Checked, by device slot: the flags that the device writes to host memory after
	// the finish, the event after them, and whether the next check mends the batch.
	flags   []*cell
	decoded []*simEvent
	mends   []bool
}

func newSimDevice(w *world, cfg Config) *simDevice {
	w.Edge = edge
	d := &simDevice{world: w, stage: &cell{Name: "stage"}}
	for k := range cfg.HostSlots() {
		d.host = append(d.host, &cell{Name: fmt.Sprint("host slot ", k)})
	}
	for j := range cfg.Slots {
		d.slot = append(d.slot, &cell{Name: fmt.Sprint("device slot ", j)})
		if cfg.Checked {
			d.flags = append(d.flags, &cell{Name: fmt.Sprint("flags of slot ", j)})
			d.decoded = append(d.decoded, &simEvent{})
			d.mends = append(d.mends, false)
		}
	}
	return d
}

func (d *simDevice) driver(what string) {
	if d.Running().Name != "driver" {
		d.Report("%s is called by %s, not by the driver", what, d.Running().Name)
	}
}

func (d *simDevice) Open() error {
	d.driver("Open")
	d.Pause(nil)
	d.open = true
	return nil
}

func (d *simDevice) Close(released []*simEvent) error {
	d.driver("Close")
	for _, e := range released {
		if err := d.Wait(0, e); err != nil {
			return err
		}
	}
	idle := &simEvent{}
	if err := d.Record(idle, 0); err != nil {
		return err
	}
	if err := d.Synchronize(idle, nil); err != nil {
		return err
	}
	for _, cells := range [][]*cell{d.host, d.slot, {d.stage}} {
		for _, m := range cells {
			d.Touch(m, byFree, freed, true)
			m.Value = freed
		}
	}
	d.open = false
	return nil
}

func (d *simDevice) NewEvent(bool) (*simEvent, error) { return d.world.NewEvent(), nil }

func (d *simDevice) P() int { return 0 }

func (d *simDevice) Current() (int, error) {
	d.Pause(nil)
	return d.Running().Stream, nil
}

func (d *simDevice) Copy(slot, host, n int, released []*simEvent, copied *simEvent) error {
	d.driver("Copy")
	for i, e := range released {
		if slices.Contains(released[:i], e) {
			d.Report("the copy into slot %d waits twice for one event", slot)
		}
		if err := d.Wait(0, e); err != nil {
			return err
		}
	}
	d.Pause(nil)
	d.copy(slot, host, n)
	return d.Record(copied, 0)
}

// copy and finish take two steps each, so that other operations can run between their start and
// their end.
func (d *simDevice) copy(slot, host, n int) {
	src, dst, value := d.host[host], d.stage, 0
	d.gen = src.LastWrite().Gen
	gen := d.gen
	d.Enqueue(0, fmt.Sprintf("copy host %d", host), func(c *clock) {
		d.TouchOn(0, c, src, byCopy, gen, false)
		d.TouchOn(0, c, dst, byCopy, gen, true)
		value = src.Value
	})
	d.Enqueue(0, fmt.Sprintf("copy host %d, end", host), func(c *clock) {
		d.TouchOn(0, c, src, byCopy, gen, false)
		d.TouchOn(0, c, dst, byCopy, gen, true)
		if src.Value != value {
			d.Report("host slot %d changes from %d to %d while it is copied", host, value, src.Value)
		}
		dst.Value = value
	})
}

func (d *simDevice) Finish(slot, host, n int) error {
	d.driver("Finish")
	d.Pause(nil)
	src, dst, gen := d.stage, d.slot[slot], d.gen
	d.Enqueue(0, fmt.Sprintf("finish into slot %d", slot), func(c *clock) {
		d.TouchOn(0, c, src, byFinish, gen, false)
		d.TouchOn(0, c, dst, byFinish, gen, true)
		dst.Value = 0
	})
	d.Enqueue(0, fmt.Sprintf("finish into slot %d, end", slot), func(c *clock) {
		d.TouchOn(0, c, src, byFinish, gen, false)
		d.TouchOn(0, c, dst, byFinish, gen, true)
		dst.Value = src.Value
	})
	if d.flags == nil {
		return nil
	}
	// A batch that is to be mended has a wrong value until then.
	mend := d.Rand.IntN(4) == 0
	d.mends[slot] = mend
	d.Enqueue(0, fmt.Sprintf("flags of slot %d", slot), func(c *clock) {
		d.TouchOn(0, c, d.flags[slot], byFlags, gen, true)
		d.flags[slot].Value = gen
		if mend {
			d.TouchOn(0, c, dst, byFinish, gen, true)
			dst.Value = -gen
		}
	})
	return d.Record(d.decoded[slot], 0)
}

var errNotYet = errors.New("not yet")

// Check waits for the flags of a batch, and corrects a batch that the device has got wrong.
func (d *simDevice) Check(_ context.Context, slot, n int, info any, busy func() bool) (Checked, error, error) {
	d.driver("Check")
	for {
		if busy() {
			return Unchecked, nil, nil
		}
		if err := d.Synchronize(d.decoded[slot], func() error { return errNotYet }); err == nil {
			break
		} else if err != errNotYet {
			return Unchecked, nil, err
		}
	}
	d.Touch(d.flags[slot], byCheck, info.(int), false)
	if d.flags[slot].Value != info {
		d.Report("the flags of slot %d are those of batch %d, not %v", slot, d.flags[slot].Value, info)
	}
	if n == badCheck {
		return Unchecked, errCheck, nil
	}
	if !d.mends[slot] {
		return Good, nil, nil
	}
	m, gen := d.slot[slot], info.(int)
	d.Enqueue(0, fmt.Sprintf("mend slot %d", slot), func(c *clock) {
		d.TouchOn(0, c, m, byFinish, gen, true)
		m.Value = gen
	})
	return Mended, nil, nil
}

func (d *simDevice) Record(e *simEvent, stream int) error {
	d.RecordEvent(e, stream)
	return nil
}

func (d *simDevice) Wait(stream int, e *simEvent) error { return d.WaitEvent(stream, e) }

func (d *simDevice) HostWait(_ int, e *simEvent, stop func() error) error {
	return d.Synchronize(e, stop)
}

// fill simulates the source writing a host slot, in two steps.
func (d *simDevice) fill(host, value int) {
	m := d.host[host]
	d.Touch(m, bySource, value, true)
	m.Value = 0
	d.Pause(nil)
	d.Touch(m, bySource, value, true)
	m.Value = value
	d.Note("filled host %d with %d", host, value)
}

// kernel simulates the consumer reading a batch on a stream, in two steps.
func (d *simDevice) kernel(l *Lease[int, *simEvent], stream, value int) {
	m := d.slot[l.Slot]
	for _, what := range []string{"kernel", "kernel, end"} {
		d.Enqueue(stream, fmt.Sprintf("%s on slot %d", what, l.Slot), func(c *clock) {
			d.TouchOn(stream, c, m, byConsumer, value, false)
			if m.Value != value {
				d.Report("device slot %d holds batch %d, the consumer's is %d", l.Slot, m.Value, value)
			}
		})
	}
}

// order simulates a program's own event between two of its streams.
func (d *simDevice) order(e *simEvent, first, second int) error {
	return errors.Join(d.Record(e, first), d.Wait(second, e))
}

// cpuDevice simulates a machine without a GPU: the calling task does the work at once instead of
// enqueueing it.
type cpuDevice struct {
	*simDevice
	direct bool
}

func (d *cpuDevice) Close([]*simEvent) error                            { return d.simDevice.Close(nil) }
func (d *cpuDevice) Current() (int, error)                              { return 0, nil }
func (d *cpuDevice) Record(*simEvent, int) error                        { return nil }
func (d *cpuDevice) Wait(int, *simEvent) error                          { return nil }
func (d *cpuDevice) Copy(_, _, _ int, _ []*simEvent, _ *simEvent) error { return nil }
func (d *cpuDevice) HostWait(int, *simEvent, func() error) error        { return nil }

func (d *cpuDevice) Check(context.Context, int, int, any, func() bool) (Checked, error, error) {
	return Good, nil, nil
}

func (d *cpuDevice) Finish(slot, host, n int) error {
	d.driver("Finish")
	d.Pause(nil)
	if !d.direct {
		gen := d.host[host].LastWrite().Gen
		d.Touch(d.host[host], byFinish, gen, false)
		d.Touch(d.slot[slot], byFinish, gen, true)
		d.slot[slot].Value = d.host[host].Value
	}
	return nil
}

func (d *cpuDevice) kernel(l *Lease[int, *simEvent], _, value int) {
	m := d.slot[l.Slot]
	if d.direct {
		m = d.host[l.Host]
	}
	for range 2 {
		d.Touch(m, byConsumer, value, false)
		if m.Value != value {
			d.Report("%s holds %d, the consumer's batch is %d", m.Name, m.Value, value)
		}
		d.Pause(nil)
	}
}

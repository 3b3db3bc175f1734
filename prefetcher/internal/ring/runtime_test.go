package ring

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// freeDevice runs every stream in a separate goroutine, and the ring on the Go runtime. So the race
// detector checks the ring's variables, and the runtime scheduler wakes goroutines as in a real
// program. The machine determines the schedule. TestSchedules proves the edges.
type freeDevice struct {
	mu      sync.Mutex
	changed *sync.Cond
	queues  [3][]freeOp
	host    []int
	slot    []int
	stage   int
	current atomic.Int32
	closed  bool
	workers sync.WaitGroup
	bad     []string
	fail    atomic.Int32 // the n-th call of Copy from now fails
}

type freeOp struct {
	wait, record *bool
	run          func()
}

type freeEvent struct{ latest *bool }

func newFreeDevice(cfg Config) *freeDevice {
	d := &freeDevice{host: make([]int, cfg.HostSlots()), slot: make([]int, cfg.Slots)}
	d.changed = sync.NewCond(&d.mu)
	for i := range d.queues {
		d.workers.Go(func() { d.stream(i) })
	}
	return d
}

func (d *freeDevice) stream(i int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		for len(d.queues[i]) == 0 || d.queues[i][0].wait != nil && !*d.queues[i][0].wait {
			if d.closed && len(d.queues[i]) == 0 {
				return
			}
			d.changed.Wait()
		}
		d.mu.Unlock()
		runtime.Gosched() // simulates that the operation takes time
		d.mu.Lock()
		o := d.queues[i][0]
		d.queues[i] = d.queues[i][1:]
		if o.run != nil {
			o.run()
		}
		if o.record != nil {
			*o.record = true
		}
		d.changed.Broadcast()
	}
}

func (d *freeDevice) enqueue(stream int, o freeOp) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.queues[stream] = append(d.queues[stream], o)
	d.changed.Broadcast()
}

func (d *freeDevice) Open() error                       { return nil }
func (d *freeDevice) NewEvent(bool) (*freeEvent, error) { return &freeEvent{}, nil }
func (d *freeDevice) FreeEvent(*freeEvent)              {}
func (d *freeDevice) P() int                            { return 0 }
func (d *freeDevice) Current() (int, error)             { return int(d.current.Load()), nil }

func (d *freeDevice) Close(released []*freeEvent) error {
	for _, e := range released {
		_ = d.Wait(0, e)
	}
	idle := &freeEvent{}
	_ = d.Record(idle, 0)
	_ = d.HostWait(0, idle, func() error { return nil })
	d.mu.Lock()
	d.closed = true
	d.changed.Broadcast()
	d.mu.Unlock()
	return nil
}

func (d *freeDevice) Copy(slot, host, n int, released []*freeEvent, copied *freeEvent) error {
	if d.fail.Add(-1) == 0 {
		return errFinish
	}
	for _, e := range released {
		_ = d.Wait(0, e)
	}
	d.enqueue(0, freeOp{run: func() { d.stage = d.host[host] }})
	return d.Record(copied, 0)
}

func (d *freeDevice) Finish(slot, host, n int) error {
	d.enqueue(0, freeOp{run: func() { d.slot[slot] = d.stage }})
	return nil
}

// Check waits for all work on P, unless the ring has something better to do.
func (d *freeDevice) Check(_ context.Context, slot, n int, info any, busy func() bool) (Checked, error, error) {
	idle, errBusy := &freeEvent{}, errors.New("busy")
	_ = d.Record(idle, 0)
	err := d.HostWait(0, idle, func() error {
		if busy() {
			return errBusy
		}
		return nil
	})
	if err != nil {
		return Unchecked, nil, nil
	}
	return Mended, nil, nil
}

func (d *freeDevice) Record(e *freeEvent, stream int) error {
	d.mu.Lock()
	e.latest = new(bool)
	done := e.latest
	d.mu.Unlock()
	d.enqueue(stream, freeOp{record: done})
	return nil
}

func (d *freeDevice) Wait(stream int, e *freeEvent) error {
	d.mu.Lock()
	done := e.latest
	d.mu.Unlock()
	d.enqueue(stream, freeOp{wait: done})
	return nil
}

func (d *freeDevice) HostWait(_ int, e *freeEvent, stop func() error) error {
	for {
		d.mu.Lock()
		done := *e.latest
		d.mu.Unlock()
		if done {
			return nil
		}
		if err := stop(); err != nil {
			return err
		}
		runtime.Gosched()
	}
}

func (d *freeDevice) kernel(stream, slot, value int) {
	d.enqueue(stream, freeOp{run: func() {
		if d.slot[slot] != value {
			d.bad = append(d.bad, "wrong content")
		}
	}})
}

// TestRuntime runs rings on real goroutines through all ways in which an epoch can end.
func TestRuntime(t *testing.T) {
	limit := time.AfterFunc(2*time.Minute, func() {
		buf := make([]byte, 1<<20)
		panic("the ring hangs\n" + string(buf[:runtime.Stack(buf, true)]))
	})
	defer limit.Stop()
	before := runtime.NumGoroutine()
	for seed := range uint64(400) {
		runOnRuntime(t, seed)
	}
	// Goroutines that are about to end may have to wait for a core.
	for late := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before && time.Now().Before(late); {
		runtime.Gosched()
	}
	if n := runtime.NumGoroutine(); n > before {
		t.Errorf("%d goroutines before, %d after", before, n)
	}
}

// runtimeRun is one ring of TestRuntime, drawn from its seed.
type runtimeRun struct {
	t      *testing.T
	seed   uint64
	rng    *rand.Rand
	dev    *freeDevice
	ring   *Ring[int, *freeEvent]
	broken bool           // a copy has failed
	users  sync.WaitGroup // of retained batches
}

func runOnRuntime(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 2))
	var ranges, open atomic.Int64
	cfg := Config{Slots: 1 + rng.IntN(3), Hosts: 1 + rng.IntN(3), Batch: 4, Checked: rng.IntN(2) == 0,
		Range: func(string) func() {
			ranges.Add(1)
			open.Add(1)
			return func() { open.Add(-1) }
		}}
	r := &runtimeRun{t: t, seed: seed, rng: rng, dev: newFreeDevice(cfg)}
	var err error
	if r.ring, err = New(Device[int, *freeEvent](r.dev), cfg); err != nil {
		t.Fatal(err)
	}
	breaks := rng.IntN(6) == 0
	if breaks {
		r.dev.fail.Store(int32(1 + rng.IntN(6)))
	}
	for epoch := range 3 {
		r.epoch(epoch)
	}
	r.users.Wait()
	if err := r.ring.Close(); err != nil && !breaks {
		t.Errorf("seed %d: Close: %v", seed, err)
	}
	if err := r.ring.Close(); err != nil {
		t.Errorf("seed %d: second Close: %v, want no error", seed, err)
	}
	r.dev.workers.Wait()
	if ranges.Load() == 0 || open.Load() != 0 {
		t.Errorf("seed %d: %d of %d ranges have not ended, want 0 of more than 0", seed, open.Load(), ranges.Load())
	}
	for _, b := range r.dev.bad {
		t.Errorf("seed %d: %s", seed, b)
	}
}

func (r *runtimeRun) epoch(epoch int) {
	e := plan{epoch: epoch, batches: 1 + r.rng.IntN(6), ending: r.rng.IntN(byFinishError)}
	e.at = r.rng.IntN(e.batches)
	r.dev.current.Store(int32(1 + r.rng.IntN(2)))
	ctx, cancel := context.WithCancelCause(context.Background())
	if e.ending == byCancel {
		go func() {
			for range e.at * 20 {
				runtime.Gosched()
			}
			cancel(errCanceled)
		}()
	}
	seen := 0
	err := func() (err error) {
		defer func() {
			if v := recover(); v != nil {
				err = errors.New(v.(string))
			}
		}()
		return r.ring.Run(ctx, r.source(e), func(l *Lease[int, *freeEvent]) bool {
			seen++
			r.turn(l, epoch*100+seen)
			if seen-1 == e.at && e.ending == byPanic {
				panic("body")
			}
			return seen-1 != e.at || e.ending != byBreak
		})
	}()
	cancel(nil)
	r.checkEnd(e, seen, err)
}

func (r *runtimeRun) source(e plan) func(context.Context, Lend, Deliver) error {
	return func(ctx context.Context, lend Lend, deliver Deliver) error {
		for i := range e.batches {
			if i == e.at && e.ending == bySourceError {
				return errSource
			}
			if i == e.at && e.ending == bySourcePanic {
				runtime.Goexit()
			}
			k, err := lend(ctx)
			if err != nil {
				return err
			}
			r.dev.mu.Lock()
			r.dev.host[k] = e.epoch*100 + i + 1
			r.dev.mu.Unlock()
			if err := deliver(1, nil); err != nil {
				return err
			}
		}
		return nil
	}
}

// turn reads the batch, and sometimes retains it for another goroutine that reads it on stream 2.
func (r *runtimeRun) turn(l *Lease[int, *freeEvent], value int) {
	r.dev.kernel(int(r.dev.current.Load()), l.Slot, value)
	if r.rng.IntN(8) != 0 {
		return
	}
	if err := l.Retain(); err != nil {
		r.t.Error(err)
	}
	r.users.Go(func() {
		if err := l.Use(2); err != nil {
			r.t.Error(err)
		}
		r.dev.kernel(2, l.Slot, value)
		if err := l.Release(); err != nil {
			r.t.Error(err)
		}
	})
}

// checkEnd checks the number of batches seen and the error of an epoch against its plan.
func (r *runtimeRun) checkEnd(e plan, seen int, err error) {
	r.broken = r.broken || errors.Is(err, errFinish)
	switch {
	case errors.Is(err, ErrRetained): // the releasing goroutine was slow
	case r.broken:
		if !errors.Is(err, errFinish) {
			r.t.Errorf("seed %d: a broken ring continues: %v", r.seed, err)
		}
	case e.ending == byCancel && errors.Is(err, errCanceled):
	case e.ending == bySourceError && errors.Is(err, errSource) && seen == e.at:
	case e.ending == bySourcePanic && err != nil && strings.Contains(err.Error(), "Goexit") && seen == e.at:
	case e.ending == byPanic && err != nil && err.Error() == "body":
	case err == nil && (e.ending == byBreak && seen == e.at+1 || seen == e.batches):
	default:
		r.t.Errorf("seed %d: epoch %d ending %d at %d of %d: %d seen, %v", r.seed, e.epoch, e.ending, e.at,
			e.batches, seen, err)
	}
}

// lateDevice delays Current until the lease's end has started.
type lateDevice struct {
	*freeDevice
	late  atomic.Bool
	ended chan struct{}
}

func (d *lateDevice) Current() (int, error) {
	if d.late.Load() {
		<-d.ended
		return 2, nil
	}
	return d.freeDevice.Current()
}

// A Release on another goroutine while Close releases the same batch must not be a data race (the
// race detector checks this).
func TestReleaseDuringCloseHasNoRace(t *testing.T) {
	for range 50 {
		cfg := Config{Slots: 1, Hosts: 1, Batch: 1}
		dev := &lateDevice{freeDevice: newFreeDevice(cfg), ended: make(chan struct{})}
		r, err := New(Device[int, *freeEvent](dev), cfg)
		if err != nil {
			t.Fatal(err)
		}
		dev.current.Store(1)
		var kept *Lease[int, *freeEvent]
		err = r.Run(t.Context(), func(ctx context.Context, lend Lend, deliver Deliver) error {
			if _, err := lend(ctx); err != nil {
				return err
			}
			return deliver(1, nil)
		}, func(l *Lease[int, *freeEvent]) bool {
			kept = l
			l.OnEnd = func() {
				close(dev.ended)
				for range 100 { // lets the other goroutine continue
					runtime.Gosched()
				}
			}
			return l.Retain() == nil
		})
		if err != nil {
			t.Fatal(err)
		}
		dev.late.Store(true)
		var releasing sync.WaitGroup
		releasing.Go(func() {
			if err := kept.Release(); err != nil && !errors.Is(err, ErrClosed) {
				t.Errorf("Release: %v", err)
			}
		})
		for { // until Release has started: from then on only Close can end the lease
			r.sched.Lock()
			begun := kept.retains == 0
			r.sched.Unlock()
			if begun {
				break
			}
			runtime.Gosched()
		}
		if err := r.Close(); err != nil {
			t.Errorf("Close: %v, want no error", err)
		}
		releasing.Wait()
		dev.workers.Wait()
	}
}

// checkingDevice calls checking in each Check.
type checkingDevice struct {
	*freeDevice
	checking func()
}

func (d *checkingDevice) Check(context.Context, int, int, any, func() bool) (Checked, error, error) {
	d.checking()
	return Good, nil, nil
}

// A source that waits for the host slot of a batch gets it when the batch has passed its check, and
// not before.
func TestHostSlotIsFreeAfterTheCheck(t *testing.T) {
	const batches = 3
	lends := make(chan struct{}, batches)
	cfg := Config{Slots: 2, Hosts: 1, Batch: 1, Checked: true, Range: func(name string) func() {
		if name == lendWait {
			lends <- struct{}{}
		}
		return func() {}
	}}
	dev := &checkingDevice{freeDevice: newFreeDevice(cfg)}
	r, err := New(Device[int, *freeEvent](dev), cfg)
	if err != nil {
		t.Fatal(err)
	}
	checks, early := 0, 0
	dev.checking = func() {
		if checks++; checks == batches {
			return // the source has ended
		}
		<-lends // the lock was held, so lend waits for the slot or has taken it
		r.sched.Lock()
		early += len(r.epoch.lent) + len(r.epoch.filled)
		r.sched.Unlock()
	}
	seen := 0
	err = r.Run(t.Context(), func(ctx context.Context, lend Lend, deliver Deliver) error {
		for i := range batches {
			if _, err := lend(ctx); err != nil {
				return err
			}
			if i == 0 {
				<-lends
			}
			if err := deliver(1, nil); err != nil {
				return err
			}
		}
		return nil
	}, func(*Lease[int, *freeEvent]) bool { seen++; return true })
	if err != nil || seen != batches || checks != batches || early != 0 {
		t.Errorf("got %v, %d batches, %d checks, %d slots lent before their batch's check, want no error, %d, %d, 0",
			err, seen, checks, early, batches, batches)
	}
	if err := r.Close(); err != nil {
		t.Errorf("Close: got %v, want no error", err)
	}
	dev.workers.Wait()
}

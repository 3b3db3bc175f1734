package ring

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/internal/simulate"
)

var (
	schedules  = flag.Uint64("schedules", 15000, "simulated schedules to run, from seed 1 on")
	replaySeed = flag.Uint64("seed", 0, "run this one simulated schedule and print its steps")
)

var (
	errSource   = errors.New("source failed")
	errFinish   = errors.New("finish failed")
	errCheck    = errors.New("check failed")
	errCanceled = errors.New("cancelled by the test")
)

// simulated is a simulated Device together with its source and its consumer.
type simulated interface {
	Device[int, *simEvent]
	fill(host, value int)
	kernel(l *Lease[int, *simEvent], stream, value int)
	order(e *simEvent, first, second int) error
}

// The ways in which an epoch can end.
const (
	toTheEnd = iota
	byBreak
	byPanic
	byCancel
	bySourceError
	bySourcePanic
	bySourceCancel // a worker of the source fails and cancels the source's own context
	byFinishError
	byCheckError
	endings
)

// badCheck is the number of samples of a batch whose check fails.
const badCheck = 3

// program is one schedule: a ring, its source and its consumer, all drawn from the seed.
type program struct {
	*world
	dev  simulated
	cfg  Config
	ring *Ring[int, *simEvent]

	retained []*kept
	holding  int // retained and not yet released
	held     int // the maximum of holding in this epoch
	ended    int // number of OnEnd calls
	begun    int
	over     bool
	finishAt int // fails the finish of the batch with this value
}

type kept struct {
	lease *Lease[int, *simEvent]
	value int
	used  []int
	clock clock // the consumer's clock when it passes the batch on
}

// runSchedule runs the program of a seed and returns the world's reports. If mutate is not nil, it
// removes an edge from the device.
func runSchedule(seed uint64, mutate func(simulated) simulated, trace func(string, ...any)) (*program, []string) {
	w := simulate.New(seed, 4)
	w.Trace = trace
	w.Lenient = mutate != nil
	p := &program{world: w}
	p.cfg = Config{Slots: 1 + w.Rand.IntN(3), Hosts: 1 + w.Rand.IntN(4), Batch: 8, Scheduler: w,
		maxReleased: 1 + w.Rand.IntN(3)}
	onCPU := mutate == nil && w.Rand.IntN(8) == 0
	p.cfg.Direct = onCPU && w.Rand.IntN(2) == 0
	p.cfg.Checked = !onCPU && w.Rand.IntN(2) == 0
	gpu := newSimDevice(w, p.cfg)
	p.dev = gpu
	if onCPU {
		p.dev = &cpuDevice{gpu, p.cfg.Direct}
	}
	p.dev = &failing{p.dev, p}
	if mutate != nil {
		p.dev = mutate(p.dev)
	}
	w.Spawn("consumer", p.consumer)
	w.Spawn("releaser", p.releaser)
	if err := w.Run(); err != nil {
		w.Report("%v", err)
	}
	if w.Events != 0 {
		w.Report("%d events are left", w.Events)
	}
	if gpu.open {
		w.Report("the device is still open")
	}
	return p, w.Reports
}

// failing injects an error into the finish.
type failing struct {
	simulated
	p *program
}

func (f *failing) Finish(slot, host, n int) error {
	if f.p.finishAt > 0 && n == 1 { // batches of one sample are the marked ones
		return errFinish
	}
	return f.simulated.Finish(slot, host, n)
}

func (p *program) consumer() {
	defer func() { p.over = true }()
	var err error
	if p.ring, err = New(Device[int, *simEvent](p.dev), p.cfg); err != nil {
		p.Report("New: %v", err)
		return
	}
	for epoch := range 1 + p.Rand.IntN(3) {
		p.epoch(epoch)
	}
	if p.Rand.IntN(2) == 0 {
		for len(p.retained) > 0 {
			p.release()
		}
	}
	left := p.retained // Close releases them
	p.retained = nil
	// Wait until the releaser is idle: closing during its Release would be an error of the program.
	p.Pause(func() bool { return p.holding == len(left) })
	if len(left) > 0 && p.Rand.IntN(2) == 0 {
		late := left[0]
		left = left[1:]
		p.Spawn("late", func() {
			if err := late.lease.Release(); err != nil && !errors.Is(err, ErrClosed) {
				p.Report("Release during Close: %v", err)
			}
		})
	}
	if err := p.ring.Close(); err != nil {
		p.Report("Close: %v", err)
	}
	for _, k := range left {
		if err := k.lease.Release(); !errors.Is(err, ErrClosed) {
			p.Report("Release after Close: %v", err)
		}
	}
	if err := p.ring.Run(context.Background(), nil, nil); !errors.Is(err, ErrClosed) {
		p.Report("Run after Close: %v", err)
	}
	if p.ended != p.begun {
		p.Report("%d batches began, %d ended", p.begun, p.ended)
	}
}

// releaser is another goroutine of the consumer. It uses and releases retained batches on its own
// stream.
func (p *program) releaser() {
	p.Running().Stream = 3
	if p.Rand.IntN(3) == 0 {
		return // the batches stay retained
	}
	for {
		p.Pause(func() bool { return len(p.retained) > 0 || p.over })
		if p.over {
			return
		}
		if p.Rand.IntN(4) == 0 {
			p.release()
		}
	}
}

// release takes one retained batch, reads it once more and releases it.
func (p *program) release() {
	i := p.Rand.IntN(len(p.retained))
	k := p.retained[i]
	p.retained = append(p.retained[:i:i], p.retained[i+1:]...)
	p.Running().Clock.Join(&k.clock)
	if p.Rand.IntN(2) == 0 {
		if err := k.lease.Use(p.Running().Stream); err != nil {
			p.Report("Use of a retained batch: %v", err)
		}
		p.dev.kernel(k.lease, p.Running().Stream, k.value)
	}
	p.dev.kernel(k.lease, k.used[p.Rand.IntN(len(k.used))], k.value)
	if err := k.lease.Release(); err != nil {
		p.Report("Release: %v", err)
	}
	p.holding--
}

// plan describes the course of an epoch: it ends at batch `at` in one of the ways above.
type plan struct {
	epoch, batches, ending, at int
	retains                    bool
}

func (p *program) plan(epoch int) plan {
	rng := p.Rand
	e := plan{epoch: epoch, batches: rng.IntN(7), ending: rng.IntN(endings)}
	e.at = e.batches
	if e.batches > 0 && e.ending != toTheEnd {
		e.at = rng.IntN(e.batches)
	} else {
		e.ending = toTheEnd
	}
	if e.ending == byCheckError && !p.cfg.Checked {
		e.ending = byFinishError
	}
	e.retains = rng.IntN(3) == 0
	return e
}

func (p *program) epoch(epoch int) {
	rng, e := p.Rand, p.plan(epoch)
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	if e.ending == byCancel {
		pauses := rng.IntN(30 * e.batches)
		p.Spawn("canceller", func() {
			for range pauses {
				p.Pause(nil)
			}
			p.Cancel(cancel, errCanceled)
		})
	}
	p.finishAt = 0
	if e.ending == byFinishError {
		p.finishAt = e.at + 1
	}
	p.Running().Stream = [...]int{1, 1, 1, 2, 3, 0}[rng.IntN(6)]
	seen := 0
	p.held = p.holding
	panicked := false
	err := func() (err error) {
		defer func() { panicked = recover() != nil }()
		return p.ring.Run(ctx, p.source(e), func(l *Lease[int, *simEvent]) bool {
			value := 100*epoch + seen + 1
			if l.Index != seen || l.Info != value {
				p.Report("batch %d of epoch %d comes as index %d, info %v", seen, epoch, l.Index, l.Info)
			}
			seen++
			p.turn(l, value, e.retains)
			if seen-1 == e.at && e.ending == byPanic {
				panic("the loop's body panics")
			}
			return seen-1 != e.at || e.ending != byBreak
		})
	}()
	p.Note("epoch %d of %d batches (ending %d at %d): %d seen, failed %t", epoch, e.batches, e.ending, e.at,
		seen, err != nil)
	p.checkEnd(e, seen, panicked, err)
	if s := p.ring.Stats(); int(s.Batches) != p.begun {
		p.Report("Stats count %d batches of %d", s.Batches, p.begun)
	}
}

// checkEnd checks the number of batches seen and the error of an epoch against its plan.
func (p *program) checkEnd(e plan, seen int, panicked bool, err error) {
	if errors.Is(err, ErrRetained) {
		if p.held < p.cfg.Slots {
			p.Report("ErrRetained, but nothing is retained")
		}
		return
	}
	complete := err == nil && seen == e.batches
	ok := complete
	switch e.ending {
	case byCancel:
		ok = complete || errors.Is(err, errCanceled)
	case bySourceCancel:
		ok = complete || errors.Is(err, errSource)
	case bySourceError:
		ok = errors.Is(err, errSource) && seen == e.at
	case bySourcePanic:
		ok = err != nil && strings.Contains(err.Error(), "source panicked: at") && seen == e.at
	case byFinishError:
		ok = errors.Is(err, errFinish) && seen == e.at
	case byCheckError:
		ok = errors.Is(err, errCheck) && seen == e.at
	case byBreak, byPanic:
		ok = err == nil && seen == e.at+1 && panicked == (e.ending == byPanic)
	}
	if !ok {
		p.Report("epoch with ending %d at %d: %d of %d batches, panicked %t, %v", e.ending, e.at, seen,
			e.batches, panicked, err)
	}
}

// source returns a source that calls lend for several slots ahead, fills them, and delivers them.
func (p *program) source(e plan) func(context.Context, Lend, Deliver) error {
	return func(ctx context.Context, lend Lend, deliver Deliver) error {
		// Use a separate context below the given one, as a source with workers does.
		if e.ending == bySourceCancel || p.Rand.IntN(2) == 0 {
			var cancel context.CancelCauseFunc
			ctx, cancel = context.WithCancelCause(ctx)
			defer cancel(nil)
			if e.ending == bySourceCancel {
				pauses := p.Rand.IntN(30 * e.batches)
				p.Spawn("worker", func() {
					for range pauses {
						p.Pause(nil)
					}
					p.Cancel(cancel, errSource)
				})
			}
		}
		ahead := 1 + p.Rand.IntN(p.cfg.Hosts)
		if e.ending == byCancel || e.ending == bySourceCancel {
			// May ask for more slots than exist: only the cancellation ends that wait.
			ahead += p.Rand.IntN(2)
		}
		var hosts []int
		lent := 0
		for i := range e.batches {
			if i == e.at && e.ending == bySourceError {
				return errSource
			}
			if i == e.at && e.ending == bySourcePanic {
				panic("at")
			}
			for lent < e.batches && len(hosts) < ahead {
				k, err := lend(ctx)
				if err != nil {
					return err
				}
				hosts = append(hosts, k)
				lent++
			}
			p.dev.fill(hosts[0], 100*e.epoch+i+1)
			n := 2
			if i == e.at && e.ending == byFinishError {
				n = 1
			}
			if i == e.at && e.ending == byCheckError {
				n = badCheck
			}
			if err := deliver(n, 100*e.epoch+i+1); err != nil {
				return err
			}
			hosts = hosts[1:]
		}
		return nil
	}
}

func (p *program) turn(l *Lease[int, *simEvent], value int, retains bool) {
	rng := p.Rand
	p.begun++
	l.OnEnd = func() { p.ended++ }
	stream := p.Running().Stream
	used := []int{stream}
	for range rng.IntN(3) {
		p.dev.kernel(l, stream, value)
	}
	if rng.IntN(4) == 0 {
		other := rng.IntN(p.Streams())
		if err := l.Use(other); err != nil {
			p.Report("Use: %v", err)
		}
		p.dev.kernel(l, other, value)
		used = append(used, other)
		if rng.IntN(2) == 0 {
			p.Running().Stream = other // the consumer changes streams during its turn
		}
	}
	if rng.IntN(6) == 0 {
		// The consumer changes streams without Use, and orders the new stream after the old one
		// itself.
		other, e := rng.IntN(p.Streams()), &simEvent{}
		if err := p.dev.order(e, p.Running().Stream, other); err != nil {
			p.Report("changing streams: %v", err)
		}
		p.Running().Stream = other
		p.dev.kernel(l, other, value)
		used = append(used, other)
	}
	if retains && rng.IntN(2) == 0 {
		if err := l.Retain(); err != nil {
			p.Report("Retain: %v", err)
		}
		t := p.Running()
		p.retained = append(p.retained, &kept{l, value, used, t.Clock})
		t.Tick()
		p.holding++
		p.held = max(p.held, p.holding)
	}
}

// TestSchedules runs the ring under many schedules and expects no report.
func TestSchedules(t *testing.T) {
	if *replaySeed > 0 {
		_, reports := runSchedule(*replaySeed, nil, func(f string, a ...any) { t.Logf(f, a...) })
		for _, r := range reports {
			t.Error(r)
		}
		return
	}
	var steps, batches atomic.Int64
	parallel(*schedules, func(seed uint64) bool {
		p, reports := runSchedule(seed, nil, nil)
		steps.Add(int64(p.Steps))
		batches.Add(int64(p.begun))
		for _, r := range reports {
			t.Errorf("seed %d: %s\nreplay it with: go test -race ./prefetcher/internal/ring -run "+
				"TestSchedules -v -seed %d", seed, r, seed)
		}
		return len(reports) == 0
	})
	t.Logf("%d schedules, %d batches, %d steps", *schedules, batches.Load(), steps.Load())
}

// parallel calls fn for the seeds from 1 to n until one returns false.
func parallel(n uint64, fn func(seed uint64) bool) {
	var next atomic.Uint64
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for seed := next.Add(1); seed <= n && !stop.Load(); seed = next.Add(1) {
				if !fn(seed) {
					stop.Store(true)
				}
			}
		})
	}
	wg.Wait()
}

// A seed determines a schedule completely.
func TestScheduleIsAFunctionOfItsSeed(t *testing.T) {
	for seed := uint64(1); seed <= 50; seed++ {
		var logs [2]strings.Builder
		for i := range logs {
			runSchedule(seed, nil, func(f string, a ...any) { fmt.Fprintf(&logs[i], f+"\n", a...) })
		}
		if logs[0].String() != logs[1].String() {
			t.Fatalf("seed %d gave two different schedules", seed)
		}
	}
}

// Each mutant leaves out one of the ring's calls on its device.
type (
	noHostWait   struct{ simulated }
	noStreamWait struct{ simulated }
	noReadyWait  struct{ simulated }
	noRelease    struct{ simulated }
	wrongRelease struct{ simulated }
	earlyCopied  struct{ *simDevice }
	noCloseWaits struct{ simulated }
	noCheckWait  struct{ *simDevice }
	noReadyAgain struct{ *simDevice }
	noUseWait    struct {
		simulated
		w *world
	}
	onlyFirstWait struct{ simulated }
)

func (noHostWait) HostWait(int, *simEvent, func() error) error { return nil }

func (m noStreamWait) Copy(slot, host, n int, _ []*simEvent, copied *simEvent) error {
	return m.simulated.Copy(slot, host, n, nil, copied)
}

func (noReadyWait) Wait(int, *simEvent) error { return nil }

func (m noRelease) Record(e *simEvent, stream int) error {
	if stream == m.P() {
		return m.simulated.Record(e, stream)
	}
	return nil
}

func (m wrongRelease) Record(e *simEvent, stream int) error {
	if stream == m.P() {
		return m.simulated.Record(e, stream)
	}
	return m.simulated.Record(e, 1)
}

func (m onlyFirstWait) Copy(slot, host, n int, released []*simEvent, copied *simEvent) error {
	return m.simulated.Copy(slot, host, n, released[:min(1, len(released))], copied)
}

func (m earlyCopied) Copy(slot, host, n int, released []*simEvent, copied *simEvent) error {
	if err := m.Record(copied, m.P()); err != nil {
		return err
	}
	return m.simDevice.Copy(slot, host, n, released, &simEvent{})
}

func (m noUseWait) Wait(stream int, e *simEvent) error {
	if stream != m.w.Running().Stream {
		return nil
	}
	return m.simulated.Wait(stream, e)
}

// Check does not wait for the flags.
func (m noCheckWait) Check(ctx context.Context, slot, n int, info any, busy func() bool) (Checked, error, error) {
	decoded := m.decoded[slot]
	m.decoded[slot] = &simEvent{}
	m.RecordEvent(m.decoded[slot], 2)
	defer func() { m.decoded[slot] = decoded }()
	return m.simDevice.Check(ctx, slot, n, info, busy)
}

// Check does not report the work that it has enqueued.
func (m noReadyAgain) Check(ctx context.Context, slot, n int, info any, busy func() bool) (Checked, error, error) {
	checked, bad, err := m.simDevice.Check(ctx, slot, n, info, busy)
	return min(checked, Good), bad, err
}

func (m noCloseWaits) Close([]*simEvent) error { return m.simulated.Close(nil) }

// TestMissingEdges leaves out each edge in turn. The simulation must report each one by its name,
// and must report nothing else.
func TestMissingEdges(t *testing.T) {
	const within = 10000
	tests := []struct {
		name   string
		edge   string
		mutate func(simulated) simulated
	}{
		{"refill does not wait for copied(k)", "copied", func(d simulated) simulated { return noHostWait{d} }},
		{"copy does not wait for released(j)", "released", func(d simulated) simulated { return noStreamWait{d} }},
		{"the consumer's stream does not wait for ready(j)", "ready",
			func(d simulated) simulated { return noReadyWait{d} }},
		{"another stream of the consumer (Use) does not wait for ready(j)", "ready",
			func(d simulated) simulated { return noUseWait{d, d.(*failing).p.world} }},
		{"release is not recorded", "released", func(d simulated) simulated { return noRelease{d} }},
		{"release is recorded on the default stream", "released",
			func(d simulated) simulated { return wrongRelease{d} }},
		{"copy waits for only one of the consumer's streams", "released",
			func(d simulated) simulated { return onlyFirstWait{d} }},
		{"copied(k) is recorded before the copy", "copied", func(d simulated) simulated {
			f := d.(*failing)
			f.simulated = earlyCopied{f.simulated.(*simDevice)}
			return f
		}},
		{"a check does not wait for the flags", "decoded", func(d simulated) simulated {
			f := d.(*failing)
			f.simulated = noCheckWait{f.simulated.(*simDevice)}
			return f
		}},
		{"ready(j) is not recorded after a batch is mended", "ready", func(d simulated) simulated {
			f := d.(*failing)
			f.simulated = noReadyAgain{f.simulated.(*simDevice)}
			return f
		}},
		{"Close does not wait for released(j)", "close", func(d simulated) simulated { return noCloseWaits{d} }},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			caught, first := 0, uint64(0)
			for seed := uint64(1); seed <= within && caught < 20; seed++ {
				_, reports := runSchedule(seed, test.mutate, nil)
				found := false
				for _, r := range reports {
					switch {
					case strings.Contains(r, fmt.Sprintf("edge %q is missing", test.edge)):
						found = true
					case strings.Contains(r, `edge "close" is missing`):
					// Close waits through the released events too.
					case !strings.Contains(r, "edge"):
					// Wrong content: the damage itself.
					default:
						t.Errorf("seed %d: reported, but not as %q: %s", seed, test.edge, r)
					}
				}
				if found {
					if caught++; caught == 1 {
						first = seed
						t.Logf("seed %d: %s", seed, reports[0])
					}
				}
			}
			if caught == 0 {
				t.Fatalf("not reported in %d schedules, caught %v, want not 0", within, caught)
			}
			t.Logf("first reported by seed %d; %d schedules reported it", first, caught)
		})
	}
}

func TestNewRefusesMissingCopies(t *testing.T) {
	cfg := Config{Slots: 1, Hosts: 1, Batch: 1, Direct: true, Checked: true}
	if _, err := New[int, int](nil, cfg); err == nil || !strings.Contains(err.Error(), "no copies to check") {
		t.Error(err)
	}
}

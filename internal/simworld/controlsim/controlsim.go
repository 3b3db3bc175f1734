// Package controlsim runs jobs on simulated hosts. A model says for which reasons package control
// may end a job. Ranks are killed, stopped, cut off and late, have slow clocks, and make wrong
// calls.
package controlsim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/torchstream/torchstream/internal/control"
	"github.com/torchstream/torchstream/internal/simworld/world"
)

const token = "secret"

// job is a job of ranks, each on its host.
type job struct {
	w      *world.World
	limits Limits
	start  time.Time
	ranks  []*rank
	all    []int
	steps  []*step
	faults []*Fault
	wrong  error

	closing time.Duration // when rank 0 started to close the hub; 0: never
}

// step is a collective or a barrier of all ranks.
type step struct {
	barrier, compare bool
	queued           bool          // as on a GPU: a rank does not wait for the others
	work             time.Duration // before the step
	arrived          int
	done             chan struct{}
}

// rank is a rank of the job.
type rank struct {
	*job
	number int
	host   *world.Host
	dead   chan struct{}
	phase  Phase
	joined time.Duration // when it connected to the hub; 0: never
	left   time.Duration // when it called Part; 0: never
	member *control.Member
	hub    *control.Hub
	ended  chan struct{}
	end    End
	text   string
}

// Run draws a job and runs it.
func Run(w *world.World) error {
	j := &job{w: w, start: time.Now()}
	j.limits = Limits{control.Options{Interval: time.Second, Silence: time.Duration(6+w.Choose("silence", 7)) * time.Second}, 0}
	j.limits.Timeout = time.Duration(30+w.Choose("timeout", 30)) * time.Second
	if w.Choose("small buffers", 4) == 3 {
		w.Network.Buffer = 2 << 10
	}
	for i := range []int{2, 1, 3, 4, 2, 3}[w.Choose("ranks", 6)] {
		rate := []int{1000, 1000, 900, 1100}[w.Choose("clock", 4)]
		r := &rank{job: j, number: i, host: w.NewHost(fmt.Sprintf("rank%d", i), rate), dead: make(chan struct{}),
			ended: make(chan struct{})}
		r.host.OnDeath(func(bool) { close(r.dead) })
		j.ranks, j.all = append(j.ranks, r), append(j.all, i)
	}
	for range 1 + w.Choose("steps", 6) {
		s := &step{barrier: w.Choose("barrier", 3) == 2, compare: w.Choose("compare", 2) == 1, done: make(chan struct{})}
		s.queued = !s.barrier && w.Choose("queued", 3) == 2
		s.work = time.Duration(w.Choose("work", 8000)) * time.Millisecond
		j.steps = append(j.steps, s)
	}
	for range 1 + w.Choose("faults", 3)/2 {
		j.faults = append(j.faults, j.fault())
	}
	return j.run()
}

// fault draws a fault.
func (j *job) fault() *Fault {
	w := j.w
	f := &Fault{Kind: FaultKind(w.Choose("fault", int(faultKinds))), Rank: w.Choose("fault of rank", len(j.ranks)),
		At: time.Duration(w.Choose("fault at", 30_000)) * time.Millisecond, Step: w.Choose("fault at step", len(j.steps))}
	if w.Choose("rank 0 is stopped", 8) == 7 { // most rules are about the hub's own pauses
		f.Kind, f.Rank = Stop, 0
	}
	if w.Choose("an early fault", 4) == 3 {
		f.At %= 2 * time.Second
	}
	if len(j.faults) > 0 && w.Choose("soon after the first", 3) == 2 {
		f.At = j.faults[0].At + f.At/10
	}
	pause := time.Duration(w.Choose("fault for", 2*int(j.limits.Silence/time.Millisecond))) * time.Millisecond
	if w.Choose("about as long as the silence", 3) > 0 {
		pause = j.limits.Silence + pause/8 - j.limits.Silence/8
	}
	if !j.possible(f) {
		f.Kind = None
	}
	switch f.Kind {
	case Stranger:
		f.For = 2 * j.limits.Silence
	case Stop, Freeze:
		f.For = pause
	case Cut, CutTo, CutFrom:
		f.For = pause
		if f.Rank == 0 {
			f.Kind = None
		}
	case Late:
		f.For = time.Duration(w.Choose("late by", 100_000)) * time.Millisecond
	case Mismatch:
		s := j.steps[f.Step]
		s.compare, s.barrier, s.queued = true, true, false
	case Break:
		j.steps[max(0, f.Step-1)].queued = false // so that all ranks enter the step at about the same time
		j.steps[f.Step].barrier, j.steps[f.Step].queued = false, false
	case Leave:
		f.Needed, f.For = j.waits(f.Step)
	}
	w.Say("fault %+v", *f)
	return f
}

// possible reports whether the job may have a fault, in addition to those that it has.
func (j *job) possible(f *Fault) bool {
	if len(j.ranks) == 1 && (f.Kind >= Hang && f.Kind <= Leave || f.Kind == Stay) {
		return false
	}
	return len(j.faults) == 0 || (f.Kind < Hang || f.Kind == Duplicate) && f.Rank != j.faults[0].Rank &&
		j.faults[0].Kind != Break
}

// waits reports whether the ranks wait for each other in a step or after it, and how long they
// compute before that or before they leave.
func (j *job) waits(step int) (wait bool, work time.Duration) {
	for i, s := range j.steps[step:] {
		if i > 0 {
			work += s.work
		}
		if !s.queued {
			return true, work
		}
	}
	return false, work + maxLinger
}

// bound returns the time by which every rank must have ended.
func (j *job) bound() time.Duration {
	b := 3*j.limits.Timeout + 6*j.limits.Silence + time.Minute
	for _, s := range j.steps {
		b += 2 * s.work
	}
	for _, f := range j.faults {
		b += f.At + 2*f.For
	}
	return b
}

func (j *job) run() error {
	for _, r := range j.ranks {
		r.host.Do(func() { go r.live() })
	}
	for _, f := range j.faults {
		go j.disturb(f)
	}
	bound := time.After(j.bound())
	for _, r := range j.ranks {
		select {
		case <-r.ended:
		case <-r.dead:
		case <-bound:
			return fmt.Errorf("rank %d hangs: it has not ended after %v", r.number, time.Since(j.start))
		}
	}
	time.Sleep(j.bound()) // so that the faults are over
	ends, texts := map[int]End{}, map[int]string{}
	for _, r := range j.ranks {
		r.close()
		if !r.host.Dead() {
			ends[r.number], texts[r.number] = r.end, r.text
		}
	}
	if n := j.w.Network.Open(); n != 0 {
		return fmt.Errorf("%d sockets are left open", n)
	}
	j.w.Network.Shutdown()
	for _, f := range j.faults {
		f.Served = f.Kind == Late && j.ranks[f.Rank].joined > 0 && j.ranks[f.Rank].joined+slack < j.closing &&
			!slices.ContainsFunc(j.faults, func(other *Fault) bool { return other.Rank == 0 })
		// A fault that the others notice late may come too late.
		left := j.ranks[f.Rank].left
		if f.Phase == Running && left > 0 && left < f.At+j.limits.Silence+slack {
			f.Phase = Leaving
		}
		f.Left = f.Phase == Leaving && f.Rank > 0 && left+slack < f.At
	}
	return errors.Join(j.wrong, j.limits.Check(j.faults, ends, texts))
}

// disturb makes a fault happen that is not one of the program.
func (j *job) disturb(f *Fault) {
	time.Sleep(f.At)
	r := j.ranks[f.Rank]
	f.Phase = r.phase
	zero := j.ranks[0].host.Name
	switch f.Kind {
	case Kill, Power:
		if r.phase == Ended {
			return
		}
		f.Happened = true
		r.host.Kill(f.Kind == Power)
	case Stop, Freeze:
		f.Happened = true
		r.host.Stop()
		time.Sleep(f.For)
		r.host.Continue(f.Kind == Freeze)
	case Cut, CutTo, CutFrom:
		f.Happened = true
		if f.Kind != CutFrom {
			j.w.Network.Cut(zero, r.host.Name)
		}
		if f.Kind != CutTo {
			j.w.Network.Cut(r.host.Name, zero)
		}
		time.Sleep(f.For)
		j.w.Network.Heal(zero, r.host.Name)
		j.w.Network.Heal(r.host.Name, zero)
	case Stranger, Duplicate:
		f.Happened = true
		j.w.NewHost("stranger", 1000).Do(func() { j.intrude(f) })
	}
}

// intrude connects to the hub as another program does.
func (j *job) intrude(f *Fault) {
	secret := token
	if f.Kind == Stranger {
		secret = "another job's"
		if f.Step%2 == 1 { // it says nothing
			if c, err := j.w.Network.Dial("rank0", time.Second); err == nil {
				c.Write(make([]byte, 100*f.Step))
				c.SetReadDeadline(time.Now().Add(f.For))
				_, err = c.Read(make([]byte, 1))
				c.Close()
				if errors.Is(err, os.ErrDeadlineExceeded) && f.For > j.limits.Silence*6/5+slack &&
					len(j.faults) == 1 && j.ranks[0].phase < Ended {
					j.wrong = fmt.Errorf("a connection without a message is open after %v", f.For)
				}
			}
			return
		}
	}
	m, err := control.Dial(context.Background(), []string{"rank0"}, secret, f.Rank, j.limits.Options)
	if err != nil {
		return
	}
	go m.Arrive("job", j.all, control.Call{Seq: 1, Name: "Init"}, true, j.limits.Timeout)
	select {
	case <-m.Failed():
	case <-time.After(j.limits.Timeout):
	}
	want := control.Lost
	if f.Kind == Duplicate {
		want = control.Mismatch
	}
	if v := m.Verdict(); len(j.faults) == 1 && j.closing == 0 && (f.Kind == Stranger || f.Phase == Running) &&
		(v == nil || v.Kind != want || !m.Refused()) {
		j.wrong = fmt.Errorf("a process that is no rank gets %+v, want to be refused with %q", v, want)
	}
	m.Close()
}

// live is the rank's program.
func (r *rank) live() {
	err := r.work()
	r.phase = Ended
	r.text = "no error"
	var v *control.Verdict
	switch {
	case errors.As(err, &v):
		r.end, r.text = End{v.Kind, v.Rank}, v.Text
	case err != nil:
		r.end, r.text = End{unreachable, -1}, err.Error()
	}
	r.w.Say("rank %d ends: %s", r.number, r.text)
	if v != nil && r.w.Choose("lingers after the end", 4) == 3 {
		r.pause(r.limits.Timeout)
	}
	if !r.host.Dead() {
		began := time.Now()
		deaf := r.deaf()
		r.close()
		switch took := time.Since(began); {
		case r.hub == nil:
		case took > slack && !r.anyAway():
			r.wrong = fmt.Errorf("the hub closes after %v, although all ranks that live have read the verdict", took)
		case deaf != nil && !r.host.Dead() && r.deaf() == deaf && r.hasty(took, deaf):
			r.wrong = fmt.Errorf("the hub closes after %v, although rank %d has not read the verdict", took, deaf.Rank)
		}
	}
	close(r.ended)
}

// deaf returns the fault that stops a rank of the running job, which cannot read the verdict, or
// nil.
func (j *job) deaf() *Fault {
	for _, f := range j.faults {
		r := j.ranks[f.Rank]
		if (f.Kind == Stop || f.Kind == Freeze) && f.Rank > 0 && r.phase == Running && r.host.Stopped() {
			return f
		}
	}
	return nil
}

// hasty reports whether a hub that has just taken a time to close should have waited longer for a
// rank that is stopped: for an interval, and until the rank has been silent for Options.Silence.
func (j *job) hasty(took time.Duration, f *Fault) bool {
	silent := f.At + j.limits.Silence*9/10 - 3*j.limits.Interval/2
	return took < j.limits.Interval*3/4 || time.Since(j.start) < silent
}

// anyAway reports whether a rank may be unable to read the verdict for a while.
func (j *job) anyAway() bool {
	return slices.ContainsFunc(j.faults, func(f *Fault) bool { return f.Kind >= Power && f.Kind <= CutFrom })
}

// close closes the rank's group, as distributed.Group does.
func (r *rank) close() {
	if r.member != nil {
		r.member.Close()
	}
	if r.hub != nil {
		if r.closing == 0 {
			r.closing = time.Since(r.start)
		}
		r.hub.Close()
	}
}

// pause lets the program compute.
func (r *rank) pause(d time.Duration) {
	select {
	case <-time.After(d):
	case <-r.dead:
	}
	r.host.Gate()
}

// mine returns the fault of a kind that the rank has at a step, or nil.
func (r *rank) mine(kind FaultKind, step int) *Fault {
	for _, f := range r.faults {
		if f.Kind == kind && f.Rank == r.number && (f.Step == step || step < 0) {
			return f
		}
	}
	return nil
}

// maxLinger is the maximum time for which a rank computes before it leaves.
const maxLinger = 20 * time.Second

// work returns the reason for which the job ends, or nil.
func (r *rank) work() error {
	r.pause(time.Duration(r.w.Choose("starts", 3000)) * time.Millisecond)
	if f := r.mine(Late, -1); f != nil {
		f.Happened = true
		r.pause(f.For)
	}
	if err := r.join(); err != nil {
		return err
	}
	r.phase = Running
	for i := range r.steps {
		if left, err := r.step(i); err != nil || left {
			return err
		}
	}
	if r.w.Choose("lingers before Part", 4) == 3 {
		r.pause(time.Duration(r.w.Choose("lingers", int(maxLinger/time.Millisecond))) * time.Millisecond)
		if r.host.Dead() {
			return world.ErrKilled
		}
	}
	if f := r.mine(Stay, -1); f != nil {
		f.Happened = true
		return r.failed()
	}
	return r.part("end.go:1")
}

// part leaves the job. Then the rank may take a while to free its collectives, as on a GPU, and
// must not hear of a failure.
func (r *rank) part(at string) error {
	r.phase, r.left = Leaving, time.Since(r.start)
	err := r.member.Part(context.Background(), at, r.limits.Timeout)
	if err != nil || r.w.Choose("lingers after Part", 4) != 3 {
		return err
	}
	select {
	case <-r.member.Failed():
		return r.member.Verdict()
	case <-r.dead:
	case <-time.After(time.Duration(r.w.Choose("lingers after Part for", int(2*r.limits.Silence/time.Millisecond))) * time.Millisecond):
	}
	r.host.Gate()
	return nil
}

// join starts the hub on rank 0, and connects to it.
func (r *rank) join() (err error) {
	if r.number == 0 {
		r.hub = control.NewHub(r.w.Network.Listen(), len(r.ranks), token, r.limits.Options)
	}
	deadline := time.Now().Add(r.limits.Timeout)
	for {
		r.member, err = control.Dial(context.Background(), []string{"rank0"}, token, r.number, r.limits.Options)
		if err == nil {
			r.joined = time.Since(r.start)
			break
		}
		if time.Now().After(deadline) || r.host.Dead() {
			break
		}
		r.pause(500 * time.Millisecond)
	}
	if err != nil {
		return err
	}
	if err := r.member.Arrive("job", r.all, control.Call{Seq: 1, Name: "Init"}, true, r.limits.Timeout); err != nil {
		return err
	}
	r.member.Enter("world", control.Call{Name: "Subgroup", Done: true})
	return r.member.Arrive("world#connect", r.all, control.Call{Seq: 1, Name: "Subgroup"}, true, r.limits.Timeout)
}

// step makes a step of the program.
func (r *rank) step(i int) (left bool, err error) {
	s := r.steps[i]
	r.pause(s.work + time.Duration(r.w.Choose("jitter", 300))*time.Millisecond)
	call := control.Call{Seq: uint64(i + 1), Name: "AllReduce", What: "float32 [3], sum", Line: fmt.Sprintf("train.go:%d", i)}
	if f := r.mine(Hang, i); f != nil {
		f.Happened = true
		return false, r.failed()
	}
	if f := r.mine(Leave, i); f != nil {
		f.Happened = true
		return true, r.part("early.go:1")
	}
	if f := r.mine(Abort, i); f != nil {
		f.Happened = true
		if r.w.Choose("reports before Abort", 2) == 1 {
			r.member.Report("world", r.all, call, "failed")
		}
		r.member.Abort("enough")
		if r.w.Choose("closes after Abort", 2) == 1 {
			return false, &control.Verdict{Kind: control.Aborted, Rank: r.number, Text: "enough"}
		}
		return false, r.failed()
	}
	if f := r.mine(Break, i); f != nil {
		f.Happened = true
		r.member.Enter("world", call)
		r.member.Report("world", r.all, call, "connection reset")
		return false, r.failed()
	}
	if f := r.mine(Mismatch, i); f != nil && len(r.ranks) > 1 {
		f.Happened = true
		call.What = fmt.Sprintf("float32 [%d], sum", 4+r.number)
	}
	r.member.Enter("world", call)
	switch {
	case s.barrier:
		err = r.member.Arrive("world#b", r.all, call, s.compare, r.limits.Timeout)
	case !s.queued:
		err = r.collective(s, call)
	}
	r.member.Leave("world", call.Seq)
	return false, err
}

// failed waits for the end of the job.
func (r *rank) failed() error {
	select {
	case <-r.member.Failed():
		return r.member.Verdict()
	case <-r.dead:
		return world.ErrKilled
	}
}

// collective waits until all ranks have entered the step, like a collective of
// LibTorch: it hangs if a rank is missing.
func (r *rank) collective(s *step, call control.Call) error {
	if s.arrived++; s.arrived == len(r.ranks) {
		close(s.done)
	}
	select {
	case <-s.done:
		r.host.Gate()
		return nil
	case <-r.member.Failed():
		return r.member.Verdict()
	case <-r.dead:
		return world.ErrKilled
	case <-time.After(r.host.Real(r.limits.Timeout)):
	}
	r.host.Gate()
	r.member.Report("world", r.all, call, "timeout")
	return r.failed()
}

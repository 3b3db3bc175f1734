package distributed

import (
	"errors"
	"fmt"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed/internal/control"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/torch"
)

// Op is how the values of the ranks become one.
type Op int32

const (
	Sum     Op = capi.ReduceSum
	Average Op = capi.ReduceAverage // of floating point numbers
	Product Op = capi.ReduceProduct
	Min     Op = capi.ReduceMin
	Max     Op = capi.ReduceMax
)

func (o Op) String() string {
	if o < Sum || o > Max {
		return fmt.Sprintf("Op(%d)", int32(o))
	}
	return [...]string{"sum", "average", "product", "min", "max"}[o]
}

// call is a collective of this rank.
type call struct {
	g    *Group
	key  string // of the group, or of a pair of ranks, in beats
	of   []int  // ranks in the job
	call control.Call
	on   capi.Stream // of a GPU
	gpu  *capi.Group // nil on the CPU
}

// backend returns the group of the tensors' device.
func (c *call) backend() *capi.Group {
	if c.gpu != nil {
		return c.gpu
	}
	return c.g.cpu
}

// begin enters a collective on tensors, all of one device. It holds g.mu until end.
func (g *Group) begin(name string, detail any, tensors ...*torch.Tensor) (*call, error) {
	if err := g.check(name, tensors); err != nil {
		return nil, err
	}
	if err := g.lock(); err != nil {
		return nil, err
	}
	g.seq++
	c := &call{g: g, key: g.name, of: g.ranks, call: control.Call{Seq: g.seq, Name: name, Line: caller()}}
	if g.job.o.Debug {
		c.call.What = describe(tensors[0], detail)
	}
	c.enter()
	if g.job.o.Debug {
		if err := g.job.member.Arrive(g.name+"#debug", g.ranks, c.call, true, g.job.o.Timeout); err != nil {
			g.mu.Unlock()
			return nil, c.failed(err)
		}
	}
	return c, nil
}

// beginPair enters a send or receive, which only two ranks of the group make.
func (g *Group) beginPair(name string, from, to int, t *torch.Tensor) (*call, error) {
	if err := g.check(name, []*torch.Tensor{t}); err != nil {
		return nil, err
	}
	if from == to || min(from, to) < 0 || max(from, to) >= len(g.ranks) {
		return nil, fmt.Errorf("distributed: %s from rank %d to rank %d of a group of %d: they must be two ranks of it: %w", name, from, to, len(g.ranks), cuda.ErrInvalidArgument)
	}
	if err := g.lock(); err != nil {
		return nil, err
	}
	key := fmt.Sprintf("%s from %d to %d", g.name, from, to)
	g.pairs[key]++
	c := &call{g: g, key: key, of: []int{g.ranks[from], g.ranks[to]}, call: control.Call{Seq: g.pairs[key], Name: name, Line: caller()}}
	c.enter()
	return c, nil
}

// check refuses what has no effect on other ranks yet.
func (g *Group) check(name string, tensors []*torch.Tensor) error {
	if err := g.member(); err != nil {
		return err
	}
	if err := g.Err(); err != nil {
		return err
	}
	for _, t := range tensors {
		if err := t.Err(); err != nil {
			return fmt.Errorf("distributed: %s: %w", name, err)
		}
		if d := t.Device(); d != cuda.CPU && d != g.job.device {
			return fmt.Errorf("distributed: %s: a tensor is on %v, and this rank's tensors on %v or the CPU: %w", name, d, g.job.device, cuda.ErrInvalidArgument)
		}
	}
	return nil
}

func describe(t *torch.Tensor, detail any) string {
	return fmt.Sprintf("%v%v %s, %v", t.DType(), t.Shape(), deviceKind(t.Device()), detail)
}

func deviceKind(d cuda.Device) string {
	if d == cuda.CPU {
		return "cpu"
	}
	return "cuda"
}

// enter notes that the rank enters the call.
func (c *call) enter() {
	c.g.last.Store(&c.call)
	c.g.job.member.Enter(c.key, c.call)
}

// latest returns the group's last call on this rank.
func (g *Group) latest() control.Call {
	if c := g.last.Load(); c != nil {
		return *c
	}
	return control.Call{}
}

// failed turns an error of the job into one with the call.
func (c *call) failed(err error) error {
	j := c.g.job
	var v *control.Verdict
	if errors.As(err, &v) {
		err = verdict{v}
	}
	j.tell(err)
	return &Error{Call: c.call.String(), Group: c.g.name, Rank: j.env.Rank, Culprit: culprit(err), Err: err}
}

// launch is one of capi's functions with the arguments of a collective.
type launch func(c *call, t []*capi.Tensor) (*capi.Work, error)

// start launches the collective. On the CPU it returns its work. On a GPU it enqueues it: on the
// current stream, or with own on the group's, behind what the current stream has so far. end
// follows in either case.
func (c *call) start(own bool, tensors []*torch.Tensor, run launch) (work *capi.Work, done *cuda.Event, err error) {
	if tensors[0].Device() == cuda.CPU {
		err = torch.CAPI(c.call.Name, tensors, func(t []*capi.Tensor) (err error) {
			work, err = run(c, t)
			return err
		})
		return work, nil, c.local(err)
	}
	c.gpu = c.g.gpu
	current, err := cuda.GetCurrentCUDAStream(c.g.job.device)
	if err != nil {
		return nil, nil, err
	}
	on := current
	if own {
		on = c.g.stream.Stream
		if err := on.Wait(current); err != nil {
			return nil, nil, err
		}
		if done, err = cuda.NewEvent(cuda.EventOptions{}); err != nil {
			return nil, nil, err
		}
	}
	c.on = on.CAPI()
	err = torch.CAPI(c.call.Name, tensors, func(t []*capi.Tensor) error {
		_, err := run(c, t)
		return err
	})
	if err == nil && own {
		for _, t := range tensors {
			if err == nil {
				err = t.RecordStream(on)
			}
		}
		if err == nil {
			err = done.Record(on)
		}
	}
	if err != nil && done != nil {
		done.Close()
	}
	return nil, done, c.local(err)
}

// local adds the call to an error of the launch, which the other ranks do not know of.
func (c *call) local(err error) error {
	if err == nil {
		return nil
	}
	if v := c.g.job.member.Verdict(); v != nil {
		return c.failed(v)
	}
	return fmt.Errorf("distributed: %v: %w", c.call, err)
}

// end leaves a collective that was launched.
func (c *call) end() { c.g.mu.Unlock() }

// finish waits for work on the CPU, or for the end of the job.
func (c *call) finish(work *capi.Work) error {
	j := c.g.job
	done := make(chan error, 1)
	go func() { done <- capi.WaitWork(work) }()
	var err error
	select {
	case err = <-done:
	case <-j.member.Failed():
		capi.AbortWork(work)
		<-done
		err = j.member.Verdict()
	}
	capi.FreeWork(work)
	if err != nil {
		err = c.failed(c.explained(err))
	}
	j.member.Leave(c.key, c.call.Seq)
	return err
}

// explained returns the job's verdict about a collective that failed here, since the failure of one
// rank is often the end of another.
func (c *call) explained(err error) error {
	var v *control.Verdict
	if errors.As(err, &v) {
		return err
	}
	j := c.g.job
	j.member.Report(c.key, c.of, c.call, err.Error())
	timer := time.NewTimer(j.o.Silence)
	defer timer.Stop()
	ended := j.ended
	for {
		select {
		case <-j.member.Failed():
			return j.member.Verdict()
		case <-ended:
			ended = nil
			if j.isClosed() {
				return fmt.Errorf("%w: %v", ErrClosed, err)
			}
		case <-timer.C:
			return err
		}
	}
}

// sync makes a collective that is done, or on a GPU enqueued on the current stream, when it
// returns.
func (c *call) sync(tensors []*torch.Tensor, run launch) error {
	defer c.end()
	work, _, err := c.start(false, tensors, run)
	switch {
	case err != nil:
		return err
	case work != nil:
		return c.finish(work)
	}
	c.g.job.member.Leave(c.key, c.call.Seq)
	return nil
}

// async makes a collective that goes on behind the caller.
func (c *call) async(tensors []*torch.Tensor, run launch) (*Work, error) {
	defer c.end()
	work, event, err := c.start(true, tensors, run)
	if err != nil {
		return nil, err
	}
	w := &Work{call: c, event: event, done: make(chan struct{})}
	if work == nil {
		c.g.job.member.Leave(c.key, c.call.Seq)
		close(w.done)
		return w, nil
	}
	go func() {
		w.err = c.finish(work)
		close(w.done)
	}()
	return w, nil
}

// Work is a collective that goes on behind its caller.
type Work struct {
	call  *call
	done  chan struct{} // on the CPU closed when err is final
	err   error
	event *cuda.Event
}

// Wait waits for the collective: on the CPU it blocks, and returns the collective's error; on a GPU
// it makes work that is enqueued on the current stream from now on start after the collective, and
// the host does not block. Wait may be called on any number of streams, before Close.
func (w *Work) Wait() error {
	<-w.done
	if w.err != nil || w.event == nil {
		return w.err
	}
	if err := w.call.g.Err(); err != nil {
		return err
	}
	current, err := cuda.GetCurrentCUDAStream(w.call.g.job.device)
	if err != nil {
		return err
	}
	return current.WaitEvent(w.event)
}

// Close frees the work, and waits for it on the CPU. On a GPU the collective goes on, and its
// tensors' memory is kept until it is done.
func (w *Work) Close() error {
	<-w.done
	if w.event != nil {
		return w.event.Close()
	}
	return nil
}

func broadcast(root int) launch {
	return func(c *call, t []*capi.Tensor) (*capi.Work, error) {
		return capi.Broadcast(c.backend(), c.on, c.gpu != nil, t[0], root)
	}
}

func (g *Group) root(name string, root int) error {
	if root < 0 || root >= len(g.ranks) {
		return fmt.Errorf("distributed: %s from rank %d of a group of %d: ranks are 0 to %d: %w", name, root, len(g.ranks), len(g.ranks)-1, cuda.ErrInvalidArgument)
	}
	return nil
}

// Broadcast overwrites t on every rank with the root's. All ranks have the same shape and dtype. t
// is contiguous, on this rank's GPU or the CPU.
//
// Like all collectives without Async in their names, it runs on the current stream of the tensors'
// GPU, after what is enqueued there and before what follows, and returns when it is enqueued; on
// the CPU it returns when it is done. A collective on a GPU that fails later makes the next call
// fail, and [Group.Err]; its results are then undefined. Any error of another rank ends the job.
func (g *Group) Broadcast(t *torch.Tensor, root int) error {
	if err := g.root("Broadcast", root); err != nil {
		return err
	}
	c, err := g.begin("Broadcast", root, t)
	if err != nil {
		return err
	}
	return c.sync([]*torch.Tensor{t}, broadcast(root))
}

// BroadcastAsync is [Group.Broadcast] on the group's own stream.
//
// Like all collectives with Async in their names, it starts on a GPU after what the current stream
// has been given so far, beside what follows there; [Work.Wait] orders a stream after it. On the
// CPU it runs on threads of its own, and Wait blocks for it. Until then nothing may touch its
// tensors, which may be closed, but not overwritten.
func (g *Group) BroadcastAsync(t *torch.Tensor, root int) (*Work, error) {
	if err := g.root("BroadcastAsync", root); err != nil {
		return nil, err
	}
	c, err := g.begin("Broadcast", root, t)
	if err != nil {
		return nil, err
	}
	return c.async([]*torch.Tensor{t}, broadcast(root))
}

func allReduce(op Op) launch {
	return func(c *call, t []*capi.Tensor) (*capi.Work, error) {
		return capi.AllReduce(c.backend(), c.on, c.gpu != nil, t[0], int32(op))
	}
}

// AllReduce overwrites t on every rank with the reduction of all ranks' tensors, which is the same
// on all of them, bit for bit. See [Group.Broadcast] for streams and errors.
func (g *Group) AllReduce(t *torch.Tensor, op Op) error {
	c, err := g.begin("AllReduce", op, t)
	if err != nil {
		return err
	}
	return c.sync([]*torch.Tensor{t}, allReduce(op))
}

// AllReduceAsync is [Group.AllReduce] on the group's own stream: see [Group.BroadcastAsync].
func (g *Group) AllReduceAsync(t *torch.Tensor, op Op) (*Work, error) {
	c, err := g.begin("AllReduce", op, t)
	if err != nil {
		return nil, err
	}
	return c.async([]*torch.Tensor{t}, allReduce(op))
}

func reduceScatter(op Op) launch {
	return func(c *call, t []*capi.Tensor) (*capi.Work, error) {
		return capi.ReduceScatter(c.backend(), c.on, c.gpu != nil, t[0], t[1], int32(op))
	}
}

// ReduceScatter reduces the inputs of all ranks and writes part r of the result, of Size() equal
// parts, to the output of rank r. in has Size() times the elements of out, and keeps its values.
// See [Group.Broadcast] for streams and errors.
func (g *Group) ReduceScatter(out, in *torch.Tensor, op Op) error {
	c, err := g.begin("ReduceScatter", op, out, in)
	if err != nil {
		return err
	}
	return c.sync([]*torch.Tensor{out, in}, reduceScatter(op))
}

// ReduceScatterAsync is [Group.ReduceScatter] on the group's own stream: see
// [Group.BroadcastAsync].
func (g *Group) ReduceScatterAsync(out, in *torch.Tensor, op Op) (*Work, error) {
	c, err := g.begin("ReduceScatter", op, out, in)
	if err != nil {
		return nil, err
	}
	return c.async([]*torch.Tensor{out, in}, reduceScatter(op))
}

func allGather(c *call, t []*capi.Tensor) (*capi.Work, error) {
	return capi.AllGather(c.backend(), c.on, c.gpu != nil, t[0], t[1])
}

// AllGather writes the inputs of all ranks, in the order of ranks, to the output of every rank. out
// has Size() times the elements of in. See [Group.Broadcast] for streams and errors.
func (g *Group) AllGather(out, in *torch.Tensor) error {
	c, err := g.begin("AllGather", "", in, out)
	if err != nil {
		return err
	}
	return c.sync([]*torch.Tensor{out, in}, allGather)
}

// AllGatherAsync is [Group.AllGather] on the group's own stream: see [Group.BroadcastAsync].
func (g *Group) AllGatherAsync(out, in *torch.Tensor) (*Work, error) {
	c, err := g.begin("AllGather", "", in, out)
	if err != nil {
		return nil, err
	}
	return c.async([]*torch.Tensor{out, in}, allGather)
}

func allToAll(outRows, inRows []int64) launch {
	return func(c *call, t []*capi.Tensor) (*capi.Work, error) {
		return capi.AllToAll(c.backend(), c.on, c.gpu != nil, t[0], t[1], outRows, inRows)
	}
}

// AllToAllRows says how an all-to-all divides the first dimension. The zero value stands for equal
// parts. Otherwise both have a number of rows for each rank.
type AllToAllRows struct {
	Out []int64 // received from each rank
	In  []int64 // sent to each rank
}

func (g *Group) rows(r AllToAllRows) error {
	if (r.Out == nil) != (r.In == nil) || r.Out != nil && (len(r.Out) != len(g.ranks) || len(r.In) != len(g.ranks)) {
		return fmt.Errorf("distributed: AllToAll: %d rows out and %d in for %d ranks: give a number for each rank in both, or in neither: %w",
			len(r.Out), len(r.In), len(g.ranks), cuda.ErrInvalidArgument)
	}
	return nil
}

// AllToAll sends part r of in, by rows, to rank r, and writes what the ranks send to this one, in
// the order of ranks, to out. See [Group.Broadcast] for streams and errors.
func (g *Group) AllToAll(out, in *torch.Tensor, rows AllToAllRows) error {
	if err := g.rows(rows); err != nil {
		return err
	}
	c, err := g.begin("AllToAll", "", in, out)
	if err != nil {
		return err
	}
	return c.sync([]*torch.Tensor{out, in}, allToAll(rows.Out, rows.In))
}

// AllToAllAsync is [Group.AllToAll] on the group's own stream: see [Group.BroadcastAsync].
func (g *Group) AllToAllAsync(out, in *torch.Tensor, rows AllToAllRows) (*Work, error) {
	if err := g.rows(rows); err != nil {
		return nil, err
	}
	c, err := g.begin("AllToAll", "", in, out)
	if err != nil {
		return nil, err
	}
	return c.async([]*torch.Tensor{out, in}, allToAll(rows.Out, rows.In))
}

func send(to int) launch {
	return func(c *call, t []*capi.Tensor) (*capi.Work, error) {
		return capi.Send(c.backend(), c.on, c.gpu != nil, t[0], to, c.g.job.o.Timeout)
	}
}

func receive(from int) launch {
	return func(c *call, t []*capi.Tensor) (*capi.Work, error) {
		return capi.Receive(c.backend(), c.on, c.gpu != nil, t[0], from, c.g.job.o.Timeout)
	}
}

// Send sends t to a rank, which calls Receive with a tensor of the same size and dtype. Other ranks
// take no part. Sends to one rank arrive in order. See [Group.Broadcast] for streams and errors.
func (g *Group) Send(t *torch.Tensor, to int) error {
	c, err := g.beginPair("Send", g.rank, to, t)
	if err != nil {
		return err
	}
	return c.sync([]*torch.Tensor{t}, send(to))
}

// SendAsync is [Group.Send] on the group's own stream: see [Group.BroadcastAsync].
func (g *Group) SendAsync(t *torch.Tensor, to int) (*Work, error) {
	c, err := g.beginPair("Send", g.rank, to, t)
	if err != nil {
		return nil, err
	}
	return c.async([]*torch.Tensor{t}, send(to))
}

// Receive overwrites t with what the rank sends. See [Group.Send].
func (g *Group) Receive(t *torch.Tensor, from int) error {
	c, err := g.beginPair("Receive", from, g.rank, t)
	if err != nil {
		return err
	}
	return c.sync([]*torch.Tensor{t}, receive(from))
}

// ReceiveAsync is [Group.Receive] on the group's own stream: see [Group.BroadcastAsync].
func (g *Group) ReceiveAsync(t *torch.Tensor, from int) (*Work, error) {
	c, err := g.beginPair("Receive", from, g.rank, t)
	if err != nil {
		return nil, err
	}
	return c.async([]*torch.Tensor{t}, receive(from))
}

// Barrier blocks until all ranks of the group have called it. It waits for the ranks' hosts, not
// for their GPUs. Ranks that do not come within Options.Timeout are named in the error of all
// others.
func (g *Group) Barrier() error {
	if err := g.check("Barrier", nil); err != nil {
		return err
	}
	if err := g.lock(); err != nil {
		return err
	}
	defer g.mu.Unlock()
	g.seq++
	c := &call{g: g, key: g.name, of: g.ranks, call: control.Call{Seq: g.seq, Name: "Barrier", Line: caller()}}
	c.enter()
	return c.arrive()
}

// arrive waits for the hosts of all ranks.
func (c *call) arrive() error {
	if err := c.g.job.member.Arrive(c.key+"#barrier", c.of, c.call, false, c.g.job.o.Timeout); err != nil {
		return c.failed(err)
	}
	c.g.job.member.Leave(c.key, c.call.Seq)
	return nil
}

// BarrierBeside is [Group.Barrier] for a goroutine beside the one that calls the group's
// collectives, such as one that writes a file: it has no place in their order. Barriers of one name
// come one after the other, and equally often on all ranks.
func (g *Group) BarrierBeside(name string) error { return g.ReserveBeside(name)() }

// ReserveBeside takes the next place in the order of the barriers of the name now, and returns the
// barrier, which a goroutine calls once, later: where several goroutines write files, their
// barriers meet those of the same files on other ranks, whichever file is done first. The barrier
// waits for those of the name before it, on this rank too. Every rank reserves the same barriers in
// the same order.
func (g *Group) ReserveBeside(name string) (barrier func() error) {
	g.beside.Lock()
	defer g.beside.Unlock()
	done := make(chan struct{})
	before := g.besides[name]
	own := besidePlace{before.seq + 1, done}
	g.besides[name] = own
	c := &call{g: g, key: g.name + ", beside: " + name, of: g.ranks, call: control.Call{Seq: own.seq, Name: "BarrierBeside(" + name + ")", Line: caller()}}
	return func() error {
		defer close(done)
		if err := g.check("BarrierBeside", nil); err != nil {
			return err
		}
		if before.done != nil {
			select { // arrive says why the job has ended
			case <-before.done:
			case <-g.job.member.Failed():
			case <-g.job.ended:
			}
		}
		g.job.member.Enter(c.key, c.call)
		return c.arrive()
	}
}

// besidePlace is the place of a barrier beside the collectives.
type besidePlace struct {
	seq  uint64
	done chan struct{} // closed when the barrier has returned
}

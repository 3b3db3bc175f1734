package distributed

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/control"
	"github.com/torchstream/torchstream/torch"
)

// Op is the reduction that combines the values of the ranks.
type Op int32

const (
	Sum     Op = capi.ReduceSum
	Average Op = capi.ReduceAverage // floating-point tensors only
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

// call is one collective that this rank has entered.
type call struct {
	g    *Group
	key  string // the group's name, or a pair of its ranks; calls with the same key run in order
	of   []int  // the participating ranks, as ranks of the job
	call control.Call
	on   capi.Stream // GPU stream; zero on the CPU
	gpu  *capi.Group // nil on the CPU
}

// backend returns the library's group for the device of the call's tensors: the GPU's or the CPU's.
func (c *call) backend() *capi.Group {
	if c.gpu != nil {
		return c.gpu
	}
	return c.g.comms.cpu
}

// begin enters a collective on tensors, which are all on one device. It locks g.mu, and call.end
// unlocks it.
func (g *Group) begin(name string, detail any, tensors ...*torch.Tensor) (*call, error) {
	if err := g.check(name, tensors); err != nil {
		return nil, err
	}
	if err := g.lock(); err != nil {
		return nil, err
	}
	c := &call{g: g, key: g.name, of: g.ranks, call: control.Call{Seq: g.calls.next(), Name: name, Line: caller()}}
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

// beginPair enters a send or receive between two ranks of the group.
func (g *Group) beginPair(name string, from, to int, t *torch.Tensor) (*call, error) {
	if err := g.check(name, []*torch.Tensor{t}); err != nil {
		return nil, err
	}
	if from == to || min(from, to) < 0 || max(from, to) >= len(g.ranks) {
		return nil, fmt.Errorf("distributed: %s from rank %d to rank %d of a group of %d: they must be "+
			"two different ranks of the group: %w", name, from, to, len(g.ranks), cuda.ErrInvalidArgument)
	}
	if err := g.lock(); err != nil {
		return nil, err
	}
	key := fmt.Sprintf("%s from %d to %d", g.name, from, to)
	c := &call{g: g, key: key, of: []int{g.ranks[from], g.ranks[to]},
		call: control.Call{Seq: g.calls.nextOf(key), Name: name, Line: caller()}}
	c.enter()
	return c, nil
}

// check returns an error for wrong arguments, before the call can affect other ranks.
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
			return fmt.Errorf("distributed: %s: a tensor is on %v, and must be on this rank's device %v or the "+
				"CPU: %w", name, d, g.job.device, cuda.ErrInvalidArgument)
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

// enter records that this rank has entered the call.
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

// failed wraps an error of the job in an Error that names the call.
func (c *call) failed(err error) error {
	j := c.g.job
	var v *control.Verdict
	if errors.As(err, &v) {
		err = verdict{v}
	}
	j.tell(err)
	return &Error{Call: c.call.String(), Group: c.g.name, Rank: j.env.Rank, Culprit: culprit(err), Err: err}
}

// launch calls one of capi's functions with the arguments of a collective.
type launch func(c *call, t []*capi.Tensor) (*capi.Work, error)

// start launches the collective. On the CPU it returns the running collective as work. On a GPU it
// enqueues the collective on the current stream. If own is true, start uses the group's stream
// instead: that stream first waits for the work enqueued on the current stream so far, and start
// returns an event, done, recorded after the collective. The caller calls end, even after an error.
func (c *call) start(own bool, tensors []*torch.Tensor, run launch) (work *capi.Work, done *cuda.Event, err error) {
	if tensors[0].Device() == cuda.CPU {
		err = torch.CAPI(c.call.Name, tensors, func(t []*capi.Tensor) (err error) {
			work, err = run(c, t)
			return err
		})
		return work, nil, c.local(err)
	}
	c.gpu = c.g.comms.gpu
	current, err := cuda.GetCurrentCUDAStream(c.g.job.device)
	if err != nil {
		return nil, nil, err
	}
	on := current
	if own {
		on = c.g.comms.stream.Stream
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

// local adds the call's name to an error of the launch, which other ranks do not see. If the job
// has failed, local returns the job's failure instead.
func (c *call) local(err error) error {
	if err == nil {
		return nil
	}
	if v := c.g.job.member.Verdict(); v != nil {
		return c.failed(v)
	}
	return fmt.Errorf("distributed: %v: %w", c.call, err)
}

// end unlocks the group after the collective is launched.
func (c *call) end() { c.g.mu.Unlock() }

// finish waits until the collective on the CPU is done or the job has failed.
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

// explained waits for the job's verdict on a collective that failed on this rank. Often another
// rank has failed first, and the verdict names that rank. Without a verdict within Options.Silence,
// explained returns err.
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
			if j.open.isClosed() {
				return fmt.Errorf("%w: %v", ErrClosed, err)
			}
		case <-timer.C:
			return err
		}
	}
}

// sync runs a collective. When it returns, the collective is done on the CPU, or enqueued on the
// current stream of a GPU.
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

// async starts a collective and returns without waiting for it.
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

// Work is a collective that runs asynchronously.
type Work struct {
	call  *call
	done  chan struct{} // closed when err is final; on a GPU it is closed from the start
	err   error
	event *cuda.Event
}

// Wait orders later work after the collective. On the CPU it blocks until the collective is done
// and returns its error. On a GPU the host does not block: work that is later enqueued on the
// current stream starts after the collective. Wait may be called on any number of streams, before
// Close.
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

// Close frees the work. On the CPU it waits for the collective. On a GPU it does not wait: the
// collective continues, and the memory of its tensors is kept until the collective is done.
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
		return fmt.Errorf("distributed: %s from rank %d of a group of %d: ranks are 0 to %d: %w", name,
			root, len(g.ranks), len(g.ranks)-1, cuda.ErrInvalidArgument)
	}
	return nil
}

// Broadcast overwrites t on every rank with the root's values. t has the same shape and dtype on
// all ranks, is contiguous, and is on this rank's GPU or the CPU.
//
// All collectives without Async in their names behave the same way. On a GPU they are enqueued on
// the current stream of the tensors' device and return without waiting. On the CPU they return when
// they are done. If a collective on a GPU fails after it was enqueued, its results are undefined,
// and the next call and [Group.Err] return the error. An error on any rank ends the job.
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
// All collectives with Async in their names behave the same way. On a GPU the collective starts
// after the work enqueued on the current stream so far, and overlaps later work on that stream.
// [Work.Wait] makes a stream wait for the collective. On the CPU the collective runs on separate
// threads, and Wait blocks. Until Wait, nothing may read or write the tensors. Closing them is
// allowed.
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

// AllReduce overwrites t on every rank with the reduction of all ranks' tensors. The result is the
// same on all ranks, bit for bit. See [Group.Broadcast] for streams and errors.
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

// ReduceScatter reduces the inputs of all ranks, divides the result into Size() equal parts, and
// writes part r to the output of rank r. in has Size() times the elements of out, and is not
// changed. See [Group.Broadcast] for streams and errors.
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

// AllGather writes the inputs of all ranks, in rank order, to the output of every rank. out has
// Size() times the elements of in. See [Group.Broadcast] for streams and errors.
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

// AllToAllRows says how [Group.AllToAll] divides the first dimension of its tensors between the
// ranks. The zero value stands for equal parts. Otherwise both fields hold a number of rows for
// each rank.
type AllToAllRows struct {
	Out []int64 // rows received from each rank
	In  []int64 // rows sent to each rank
}

func (g *Group) rows(r AllToAllRows) error {
	if (r.Out == nil) != (r.In == nil) || r.Out != nil && (len(r.Out) != len(g.ranks) || len(r.In) != len(g.ranks)) {
		return fmt.Errorf("distributed: AllToAll: %d rows out and %d in for %d ranks: give a number for "+
			"each rank in both, or in neither: %w",
			len(r.Out), len(r.In), len(g.ranks), cuda.ErrInvalidArgument)
	}
	return nil
}

// AllToAll divides in by rows, sends part r to rank r, and writes the parts received from all ranks
// to out, in rank order. See [Group.Broadcast] for streams and errors.
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

// Send sends t to a rank. That rank must call Receive with a tensor of the same size and dtype.
// Other ranks take no part. Sends to one rank arrive in order. See [Group.Broadcast] for streams
// and errors.
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

// Receive overwrites t with the tensor that the rank sends. See [Group.Send].
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

// Barrier blocks until all ranks of the group have called it. It waits for the hosts, not for the
// GPUs. If some ranks do not call it within Options.Timeout, all others get an error that names
// them.
func (g *Group) Barrier() error {
	if err := g.check("Barrier", nil); err != nil {
		return err
	}
	if err := g.lock(); err != nil {
		return err
	}
	defer g.mu.Unlock()
	c := &call{g: g, key: g.name, of: g.ranks, call: control.Call{Seq: g.calls.next(), Name: "Barrier", Line: caller()}}
	c.enter()
	return c.arrive()
}

// arrive waits until the hosts of all ranks have arrived.
func (c *call) arrive() error {
	if err := c.g.job.member.Arrive(c.key+"#barrier", c.of, c.call, false, c.g.job.o.Timeout); err != nil {
		return c.failed(err)
	}
	c.g.job.member.Leave(c.key, c.call.Seq)
	return nil
}

// BarrierBeside is like [Group.Barrier], but another goroutine may call the group's collectives
// meanwhile. Use it in a goroutine that writes a file, for example. Such a barrier has no order
// relative to the collectives. Barriers with the same name run one after the other. All ranks must
// call BarrierBeside equally often with each name.
func (g *Group) BarrierBeside(name string) error { return g.ReserveBeside(name)() }

// ReserveBeside reserves the next barrier of [Group.BarrierBeside] with the name. It returns the
// barrier as a function, which a goroutine calls once, later. Every rank reserves the same barriers
// in the same order. A barrier waits for the barriers with the same name that were reserved before
// it, on this rank too. So if several goroutines write files, all ranks use the same barrier for a
// file, whichever file is finished first.
func (g *Group) ReserveBeside(name string) (barrier func() error) {
	before, own := g.besides.reserve(name)
	c := &call{g: g, key: g.name + ", beside: " + name, of: g.ranks,
		call: control.Call{Seq: own.seq, Name: "BarrierBeside(" + name + ")", Line: caller()}}
	return func() error {
		defer close(own.done)
		if err := g.check("BarrierBeside", nil); err != nil {
			return err
		}
		if before.done != nil {
			select { // arrive returns the reason for the job's end
			case <-before.done:
			case <-g.job.member.Failed():
			case <-g.job.ended:
			}
		}
		g.job.member.Enter(c.key, c.call)
		return c.arrive()
	}
}

// besideBarriers keeps the order of the barriers of BarrierBeside.
type besideBarriers struct {
	mu   sync.Mutex
	last map[string]besidePlace // the last reserved barrier, by name
}

// reserve reserves the next barrier with the name. It returns the places of the previous barrier
// with this name and of the new one.
func (b *besideBarriers) reserve(name string) (before, own besidePlace) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before = b.last[name]
	own = besidePlace{before.seq + 1, make(chan struct{})}
	b.last[name] = own
	return before, own
}

// besidePlace is a barrier's place in the order of the barriers with its name.
type besidePlace struct {
	seq  uint64
	done chan struct{} // closed when the barrier returns
}

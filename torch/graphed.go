package torch

import (
	"container/list"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// Graphed runs a function over tensors as CUDA graphs. The first call with a set of arguments runs
// and captures the function. Further calls with these arguments replay the graph: one call to the
// driver for all kernels of the function.
//
// A graph belongs to its arguments: to the device, address, shape, strides and dtype of each, and
// to whether the argument requires gradients or is marked NoGrad. A call with other arguments
// captures again, or is refused (GraphedOptions.FixedArguments). It never replays on memory other
// than the argument's. To reuse a graph, pass data at the same address: in a device slot of a
// prefetcher, or in a tensor that CopyFrom fills. Other tensors that the function uses, such as
// parameters, may change their values but not their addresses. If such a tensor has received other
// memory (SetData, nn.To, a dropped gradient), the call drops all graphs and captures again, or is
// refused with cuda.ErrStale. The other graphs would otherwise keep the old memory until their next
// calls.
//
// The function receives handles that end with the call, so tensors that it computes from them are
// freed with the call. Its results are kept, detached. The function must do the same work at every
// call, and follow the rules of cuda.Capture: it must not read values or wait. It may contain a
// whole training step, with Backward and an optimizer's Step (package optim; use Capturable for a
// learning rate that changes). Gradients that Step drops belong to the graph. Gradients that must
// stay need KeepGradients and are zeroed in place (ForeachZero_). Close losses and other earlier
// results before the call: their references to the parameters tie a backward pass to the stream of
// their computation.
//
// On the CPU there are no graphs and every call runs the function, so the same program works there.
//
// A Graphed runs its calls one at a time. Any goroutine may call it.
type Graphed struct {
	fn func([]*Tensor) ([]*Tensor, error)
	o  GraphedOptions
	on capturer

	mu      sync.Mutex
	entries map[string]*list.Element // guarded by mu, as are the following fields
	order   list.List                // of *graphedEntry, most recently used first
	eager   []*Tensor                // results of the last call without a graph
	warmed  map[string]bool          // kins (see graphedEntry) with a graph, for WarmOnce
	emptied int                      // captures before which the allocator's cache was emptied
	stats   GraphedStats
	closed  bool
	buf     []byte
}

// GraphedOptions are the options of [NewGraphed].
type GraphedOptions struct {
	// MaxGraphs is the maximum number of graphs to keep; 0 means 8. A new graph replaces the least
	// recently used graph. The graphs share their memory, since only one runs at a time.
	MaxGraphs int

	// Warmup is the number of calls with new arguments that run the function before it is captured;
	// 0 means 1. The first step of an optimizer, for example, does other work than later steps.
	Warmup int

	// WarmOnce is for arguments that differ only in their addresses, such as the slots of a
	// prefetcher. The function then runs before a capture only for the first of these arguments.
	// The first call with another of them captures and replays at once, so the memory of a run is
	// not needed together with the memory of the graphs. Set WarmOnce only if every call of the
	// function does the same work after its first call.
	WarmOnce bool

	// ReplayFirst replays the graph in the call that captured it, which then returns the graph's
	// results. The function's effects happen twice in that call, so use ReplayFirst only for
	// functions that compute results from their arguments.
	ReplayFirst bool

	// FixedArguments refuses, with cuda.ErrStale, arguments that differ from the first call's, and
	// any other reason for a new capture.
	FixedArguments bool

	// Fallback is for a function that cannot be captured, because it waits or reads a value. The
	// function then runs without a graph at every call. The call that tries to capture it returns
	// the results of the run that preceded the attempt. The attempt may run the function halfway.
	// Its work on the device is discarded, but the function itself must undo its effects on the
	// host.
	Fallback bool

	// Device is the device of the function's work if it has no arguments. 0 stands for
	// cuda.Default().
	Device cuda.Device
}

// GraphedStats counts the calls of a Graphed by kind.
type GraphedStats struct {
	Calls    int64
	Hits     int64 // replays of an existing graph
	Eager    int64 // calls that ran the function: to warm up, on the CPU, and of CallEager
	Captures int64
	Stale    int64 // graphs dropped because a tensor that is not an argument had moved
	Evicted  int64 // graphs dropped to make room for others
	Refused  error // with Fallback: the reason why the function could not be captured
	Graphs   int   // kept now
}

// capturer is the access of a Graphed to devices. Tests replace it.
type capturer interface {
	// captures reports whether the device supports graphs.
	captures(device cuda.Device) bool
	// begin runs fn on the side stream, after the caller's queued work, and then makes the caller's
	// stream wait for the side stream. It surrounds one call.
	begin(device cuda.Device, fn func() error) error
	// makeRoom returns the allocator's cached memory to the driver, and waits for the device. If
	// needed is false, it does so only if the driver has less memory left than the cache.
	makeRoom(device cuda.Device, needed bool) error
	capture(device cuda.Device, share replayer, fn func() error) (replayer, error)
	replay(r replayer, device cuda.Device) error
	// publish makes results that were allocated on the side stream usable on the caller's stream.
	publish(device cuda.Device, results []*Tensor) error
	close() error
}

type replayer interface{ Close() error }

type graphedEntry struct {
	key     string
	args    []argument // for messages
	warm    int
	kin     string   // key without the addresses
	graph   replayer // nil during warm-up
	refused bool     // it cannot be captured, and Fallback is set
	results []*Tensor
}

// NewGraphed returns fn as a Graphed. The caller must close it.
func NewGraphed(fn func(arguments []*Tensor) ([]*Tensor, error), o GraphedOptions) *Graphed {
	if o.MaxGraphs < 1 {
		o.MaxGraphs = 8
	}
	if o.Warmup < 1 {
		o.Warmup = 1
	}
	return &Graphed{fn: fn, o: o, on: &sideStreams{}, entries: map[string]*list.Element{}, warmed: map[string]bool{}}
}

// Call runs the function, or replays its graph, on the current stream, and returns its results. g
// owns the results: the caller must not close them, and the next call overwrites them. If an
// argument has a scope, the results are handles in the youngest scope of the arguments, so that
// tensors computed from them end with the scope. The host does not wait, except for some
// milliseconds during a capture.
func (g *Graphed) Call(arguments ...*Tensor) ([]*Tensor, error) {
	return g.results("Graphed.Call", arguments, g.call)
}

// CallEager runs the function without a graph for any arguments, and returns its results as Call
// does. Use it for arguments that will not occur again, such as a short last batch.
func (g *Graphed) CallEager(arguments ...*Tensor) ([]*Tensor, error) {
	return g.results("Graphed.CallEager", arguments, func(arguments []*Tensor) ([]*Tensor, error) {
		g.stats.Calls++
		g.stats.Eager++
		return g.keep(g.run(arguments))
	})
}

// results makes a call and gives its results to the arguments' youngest scope.
func (g *Graphed) results(op string, arguments []*Tensor, call func([]*Tensor) ([]*Tensor, error)) ([]*Tensor, error) {
	if g == nil || g.fn == nil {
		return nil, opError(op, arguments, invalid("the Graphed has no function: make a Graphed with NewGraphed"))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, opError(op, arguments, ErrClosed)
	}
	results, err := call(arguments)
	if err != nil {
		return nil, opErrorOnce(op, arguments, err)
	}
	var scope *Scope
	for _, a := range arguments {
		scope = youngest(scope, a.scope)
	}
	if scope == nil {
		return append([]*Tensor(nil), results...), nil
	}
	in := make([]*Tensor, len(results))
	for i, r := range results {
		if in[i] = r.within(scope); in[i].failure() != nil {
			return nil, in[i].failure()
		}
	}
	if len(results) > 0 && len(g.eager) > 0 && results[0] == g.eager[0] {
		g.keep(nil, nil) // the scope has them, so the next call need not keep them during its run
	}
	return in, nil
}

// opErrorOnce adds the operator to errors that have none.
func opErrorOnce(op string, in []*Tensor, err error) error {
	var e *Error
	if errors.As(err, &e) {
		return err
	}
	return opError(op, in, err)
}

func (g *Graphed) call(arguments []*Tensor) ([]*Tensor, error) {
	g.stats.Calls++
	args, err := g.describe(arguments)
	if err != nil {
		return nil, err
	}
	device := g.device(args)
	if !g.on.captures(device) {
		g.stats.Eager++
		return g.keep(g.run(arguments))
	}
	if at, ok := g.entries[string(g.buf)]; ok {
		e := at.Value.(*graphedEntry)
		g.order.MoveToFront(at)
		if e.graph == nil {
			return g.warm(e, device, arguments)
		}
		err := g.on.replay(e.graph, device)
		if err == nil {
			g.stats.Hits++
			return e.results, nil
		}
		if !errors.Is(err, cuda.ErrStale) || g.o.FixedArguments {
			return nil, err
		}
		g.dropStale()
	} else if g.o.FixedArguments && g.order.Len() > 0 {
		return nil, difference(g.order.Back().Value.(*graphedEntry).args, args)
	}
	return g.warm(g.add(string(g.buf), args), device, arguments)
}

// add makes an entry, which replaces the least recently used one if there are MaxGraphs.
func (g *Graphed) add(key string, args []argument) *graphedEntry {
	e := &graphedEntry{key: key, args: args, kin: kin(args)}
	for g.order.Len() >= g.o.MaxGraphs {
		g.drop(g.order.Back())
		g.stats.Evicted++
	}
	g.entries[e.key] = g.order.PushFront(e)
	return e
}

// dropStale drops all graphs, because one of them is stale. The others usually use the same tensors
// and would keep their old memory.
func (g *Graphed) dropStale() {
	for at := g.order.Front(); at != nil; {
		next := at.Next()
		if at.Value.(*graphedEntry).graph != nil {
			g.stats.Stale++
			g.drop(at)
		}
		at = next
	}
	// The function may do the work of a first call again: an optimizer makes new state for
	// parameters that moved.
	clear(g.warmed)
}

// warm runs the function for e, and captures it after the last warm-up call. After an error it
// drops e.
func (g *Graphed) warm(e *graphedEntry, device cuda.Device, arguments []*Tensor) (results []*Tensor, err error) {
	defer func() {
		if err != nil {
			g.drop(g.entries[e.key])
		}
	}()
	ran := false
	run := func() (err error) {
		g.stats.Eager++
		ran = true
		results, err = g.keep(g.run(arguments))
		return err
	}
	// One call of begin surrounds both runs, because libraries initialise themselves for an OS
	// thread at their first use.
	err = g.on.begin(device, func() error {
		if !g.o.WarmOnce || !g.warmed[e.kin] || e.refused {
			if err := run(); err != nil {
				return err
			}
			if e.warm++; e.warm < g.o.Warmup || e.refused {
				return nil
			}
		}
		if err := g.makeRoom(device, ran); err != nil {
			return err
		}
		e.graph, err = g.on.capture(device, g.pool(), func() (err error) {
			e.results, err = g.run(arguments)
			return err
		})
		switch {
		case err == nil:
			g.stats.Captures++
			g.noteWarm(e.kin)
		case g.o.Fallback && errors.Is(err, cuda.ErrCapture):
			g.stats.Refused, e.refused = err, true
			closeAll(e.results) // of a function that could be run, but not captured
			e.results = nil
			if ran {
				return nil
			}
			return run()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if e.graph == nil || ran && !g.o.ReplayFirst {
		return results, g.on.publish(device, results)
	}
	return g.firstReplay(e, device, arguments, ran, results)
}

// firstReplay replays a new graph in the call that captured it. results are those of the run, if
// the function ran before the capture. The graph may be stale already, for example because another
// goroutine has replaced a model's weights. firstReplay then returns the results of a run, and the
// next call captures again.
func (g *Graphed) firstReplay(e *graphedEntry, device cuda.Device, arguments []*Tensor, ran bool,
	results []*Tensor) ([]*Tensor, error) {
	err := g.on.replay(e.graph, device)
	switch {
	case err == nil:
		if !ran {
			g.stats.Hits++
		}
		return e.results, nil
	case !errors.Is(err, cuda.ErrStale) || g.o.FixedArguments:
		return nil, err
	}
	if g.dropStale(); !ran {
		return g.warm(g.add(e.key, e.args), device, arguments) // runs the function: no kin is warm
	}
	return results, g.on.publish(device, results)
}

// makeRoom prepares the device's memory for a capture. The memory of earlier runs is cached for
// their streams, and a graph cannot use it. Before the first captures, makeRoom releases this
// cache, so that the memory of a run and the graphs' memory are not held at once. A Graphed whose
// arguments keep changing captures more often. Before its later captures, makeRoom keeps the cache
// as long as the driver has room, because other work may use the cached memory.
func (g *Graphed) makeRoom(device cuda.Device, ran bool) error {
	needed := ran && g.emptied < g.o.MaxGraphs
	if needed {
		g.emptied++
	}
	return g.on.makeRoom(device, needed)
}

// maxWarmed is the maximum number of kins that WarmOnce remembers.
const maxWarmed = 1024

// noteWarm remembers that arguments of this kin need no run before a capture.
func (g *Graphed) noteWarm(kin string) {
	if !g.o.WarmOnce {
		return
	}
	if len(g.warmed) >= maxWarmed {
		clear(g.warmed) // each kin runs once more
	}
	g.warmed[kin] = true
}

// run calls the function with handles of a temporary scope, and returns its results without a
// scope.
func (g *Graphed) run(arguments []*Tensor) ([]*Tensor, error) {
	scope := NewScope("a call of a Graphed")
	defer scope.Close()
	in := make([]*Tensor, len(arguments))
	for i, a := range arguments {
		in[i] = a.within(scope)
	}
	out, err := g.fn(in)
	if err != nil {
		return nil, err
	}
	results := make([]*Tensor, len(out))
	for i, t := range out {
		// Detach the result: the data of backward belongs to this call.
		results[i] = unscoped(t.Detach())
		if err := results[i].Err(); err != nil {
			closeAll(results[:i])
			return nil, err
		}
	}
	return results, nil
}

// unscoped returns a handle to a new result that no scope owns. It closes the result's own handle,
// unless a scope does.
func unscoped(t *Tensor) *Tensor {
	own := t.reference("Keep", nil)
	if t.scope == nil {
		t.Close()
	}
	return own
}

// keep holds the results of a call without a graph until the next such call.
func (g *Graphed) keep(results []*Tensor, err error) ([]*Tensor, error) {
	closeAll(g.eager)
	g.eager = results
	return results, err
}

func closeAll(tensors []*Tensor) {
	for _, t := range tensors {
		t.Close()
	}
}

// pool returns a graph to share memory with, or nil.
func (g *Graphed) pool() replayer {
	for at := g.order.Front(); at != nil; at = at.Next() {
		if e := at.Value.(*graphedEntry); e.graph != nil {
			return e.graph
		}
	}
	return nil
}

func (g *Graphed) drop(at *list.Element) {
	if at == nil {
		return
	}
	e := g.order.Remove(at).(*graphedEntry)
	delete(g.entries, e.key)
	closeAll(e.results)
	if e.graph != nil {
		e.graph.Close()
	}
}

// Stats returns the counts so far.
func (g *Graphed) Stats() GraphedStats {
	if g == nil {
		return GraphedStats{}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.stats
	s.Graphs = g.graphs()
	return s
}

// graphs returns the number of graphs that are kept. The caller holds mu.
func (g *Graphed) graphs() (n int) {
	for at := g.order.Front(); at != nil; at = at.Next() {
		if at.Value.(*graphedEntry).graph != nil {
			n++
		}
	}
	return n
}

// String returns a name for messages: "graphed function with 3 graphs", "graphed function in a
// call", "closed graphed function". It does not wait for a call, which may be the caller's own.
func (g *Graphed) String() string {
	switch {
	case g == nil:
		return "closed graphed function"
	case !g.mu.TryLock():
		return "graphed function in a call"
	}
	defer g.mu.Unlock()
	if g.closed {
		return "closed graphed function"
	}
	return fmt.Sprintf("graphed function with %d graphs", g.graphs())
}

// Close frees the graphs and closes their results. Queued replays still run. Further calls do
// nothing. Call then returns ErrClosed.
func (g *Graphed) Close() error {
	if g == nil || g.fn == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	for g.order.Len() > 0 {
		g.drop(g.order.Back())
	}
	closeAll(g.eager)
	g.eager = nil
	return g.on.close()
}

// argument holds the properties of one argument that a graph depends on.
type argument struct {
	device       cuda.Device
	dtype        DType
	requiresGrad bool
	marks        marks
	address      uintptr
	shape        []int64
	strides      []int64
}

// describe returns the descriptions of the arguments, and leaves their key in g.buf.
func (g *Graphed) describe(arguments []*Tensor) ([]argument, error) {
	args, err := describeAll("Graphed.Call", arguments)
	g.buf = g.buf[:0]
	for i := range args {
		g.buf = args[i].appendKey(g.buf)
	}
	return args, err
}

func describeAll(op string, arguments []*Tensor) ([]argument, error) {
	args := make([]argument, len(arguments))
	for i, t := range arguments {
		a := &args[i]
		err := t.use(op, func(c *capi.Tensor) error {
			info, err := capi.DescribeTensor(c)
			if err != nil {
				return err
			}
			both := make([]int64, 2*info.Dims)
			a.shape, a.strides = both[:info.Dims], both[info.Dims:]
			if err := capi.TensorShape(c, a.shape, a.strides); err != nil {
				return err
			}
			a.device, a.dtype, a.requiresGrad, a.marks = cuda.Device(info.Device), DType(
				info.DType), info.RequiresGrad, t.marks
			a.address, err = capi.TensorData(c, info.Device)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("argument %d: %w", i+1, err)
		}
	}
	return args, nil
}

// kin returns the key of arguments without their addresses.
func kin(args []argument) string {
	var b []byte
	for _, a := range args {
		a.address = 0
		b = a.appendKey(b)
	}
	return string(b)
}

func (a *argument) appendKey(b []byte) []byte {
	flags := uint32(a.marks) << 1
	if a.requiresGrad {
		flags |= 1
	}
	b = append(binary.LittleEndian.AppendUint32(b, flags), byte(len(a.shape)))
	b = binary.AppendVarint(b, int64(a.device))
	b = binary.AppendVarint(b, int64(a.dtype))
	b = binary.AppendUvarint(b, uint64(a.address))
	for i := range a.shape {
		b = binary.AppendVarint(b, a.shape[i])
		b = binary.AppendVarint(b, a.strides[i])
	}
	return b
}

func (a *argument) String() string {
	return a.describe(fmt.Sprintf(" at %#x", a.address))
}

// kind describes the argument without its address.
func (a *argument) kind() string { return a.describe("") }

func (a *argument) describe(place string) string {
	s := fmt.Sprintf("%s%s with strides %v", header(a.dtype, a.shape, a.device), place, a.strides)
	if a.requiresGrad && a.marks&noGrad == 0 {
		s += " requiring gradients"
	}
	switch {
	case a.marks&autocastBFloat16 != 0:
		s += " under autocast to bfloat16"
	case a.marks&autocastFloat16 != 0:
		s += " under autocast to float16"
	}
	if n := a.marks & numericsMarks; n != 0 {
		s += fmt.Sprintf(" under %+v", numericsFrom(capi.NumericsOf(int32(n))))
	}
	return s
}

// difference returns an error that describes the first changed argument.
func difference(was, is []argument) error {
	if len(was) != len(is) {
		return stale("%d arguments, and the graph was captured with %d", len(is), len(was))
	}
	for i := range is {
		if a, b := was[i].String(), is[i].String(); a != b {
			return stale("argument %d is %s, and the graph was captured with %s: copy the data there "+
				"(CopyFrom), or do not set FixedArguments", i+1, b, a)
		}
	}
	return stale("the arguments are not those of the capture")
}

func stale(format string, args ...any) error {
	return &capi.Error{Code: capi.CodeStale, Origin: "torch", Message: fmt.Sprintf(format, args...)}
}

// device returns the device of the capture: the device of the first argument on a GPU.
func (g *Graphed) device(args []argument) cuda.Device {
	for i := range args {
		if args[i].device != cuda.CPU {
			return args[i].device
		}
	}
	if len(args) > 0 {
		return cuda.CPU
	}
	if g.o.Device == 0 {
		return cuda.Default()
	}
	return g.o.Device
}

// sideStreams captures with package cuda, on one exclusive stream per device. The stream has the
// priority of the stream that was current when the first graph was made, because a graph's kernels
// have the priority of the capture's stream, whatever stream it is replayed on.
type sideStreams struct {
	streams map[cuda.Device]*cuda.OwnedStream
}

func (s *sideStreams) on(device cuda.Device) (*cuda.OwnedStream, error) {
	if own := s.streams[device]; own != nil {
		return own, nil
	}
	caller, err := cuda.GetCurrentCUDAStream(device)
	if err != nil {
		return nil, err
	}
	own, err := cuda.NewSideStream(caller)
	if err != nil {
		return nil, err
	}
	if s.streams == nil {
		s.streams = map[cuda.Device]*cuda.OwnedStream{}
	}
	s.streams[device] = own
	return own, nil
}

func (s *sideStreams) captures(device cuda.Device) bool { return device != cuda.CPU }

func (s *sideStreams) begin(device cuda.Device, fn func() error) error {
	own, err := s.on(device)
	if err != nil {
		return err
	}
	caller, err := cuda.GetCurrentCUDAStream(device)
	if err != nil {
		return err
	}
	if err := cuda.Fork(caller, own.Stream); err != nil {
		return err
	}
	// Join even after an error, because the work that fn queued may still use the caller's memory.
	return errors.Join(cuda.WithStream(own.Stream, fn), cuda.Join(caller, own.Stream))
}

func (s *sideStreams) capture(device cuda.Device, share replayer, fn func() error) (replayer, error) {
	own, err := s.on(device)
	if err != nil {
		return nil, err
	}
	o := cuda.CaptureOptions{Stream: own.Stream}
	o.SharePool, _ = share.(*cuda.Graph)
	graph, err := cuda.Capture(o, fn)
	if err != nil {
		return nil, err
	}
	return graph, nil
}

func (s *sideStreams) makeRoom(device cuda.Device, needed bool) error {
	if !needed {
		m, err := device.Memory()
		if err != nil {
			return err
		}
		needed = m.Free < m.Reserved-m.Allocated
	}
	if !needed {
		return nil
	}
	if err := cuda.EmptyCache(); err != nil && !errors.Is(err, cuda.ErrBusy) {
		return err
	}
	return nil
}

func (s *sideStreams) replay(r replayer, device cuda.Device) error {
	stream, err := cuda.GetCurrentCUDAStream(device)
	if err != nil {
		return err
	}
	return r.(*cuda.Graph).Replay(stream)
}

func (s *sideStreams) publish(device cuda.Device, results []*Tensor) error {
	stream, err := cuda.GetCurrentCUDAStream(device)
	if err != nil {
		return err
	}
	for _, t := range results {
		if t.Device() != device {
			continue
		}
		if err := t.RecordStream(stream); err != nil {
			return err
		}
	}
	return nil
}

func (s *sideStreams) close() (err error) {
	for _, own := range s.streams {
		err = errors.Join(err, own.Close())
	}
	s.streams = nil
	return err
}

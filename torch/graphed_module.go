package torch

import (
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"sync"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// ErrPendingBackward is in the error of a [GraphedModule]'s Forward if the backward pass of its
// previous forward pass may still come. A second forward pass would overwrite data that this
// backward pass needs. First call Backward. If there is no backward pass, close the results (end
// the batch's scope). Evaluate under NoGrad. If one step needs several passes, use one
// GraphedModule for each.
var ErrPendingBackward = errors.New(
	"torch: the previous forward pass of the GraphedModule has not had its backward pass")

// ErrOverwritten is in the error of a backward pass through a [GraphedModule] if another pass has
// overwritten data that the backward pass needs. There are two such passes: a forward pass of the
// module after BackwardOptions.RetainGraph kept the graph, and a pass of a module of the same pool
// that was captured earlier. Call Backward of modules that share a pool in the reverse order of
// their forward passes, or call one Backward for all results.
var ErrOverwritten = errors.New(
	"torch: a later forward pass of the GraphedModule has overwritten what this backward pass needs")

// GraphedModule runs a differentiable function of tensors, such as the forward pass of a module, as
// two CUDA graphs inside otherwise eager training: one replay for the forward pass, and one for its
// part of Backward. PyTorch calls this make_graphed_callables. It pays if the host is the
// bottleneck, for parts of a model whose shapes do not change. [Graphed] and train.Stepper capture
// a whole step.
//
// The first calls run the function eagerly (Warmup), and the last of them then captures it and its
// backward. Nothing is computed twice, so running statistics and random numbers equal the eager
// function's. A replay copies the arguments to memory of the graph and the results from it. Results
// and gradients are ordinary tensors, which later calls do not change. Gradients of arguments and
// parameters reach Backward, Grad and the hooks of these tensors as usual.
//
// A call runs eagerly, and is counted in GraphedModuleStats, if
//   - nothing requires gradients, or an argument is marked NoGrad;
//   - an argument has another shape, dtype, device or mark (Autocast, Numerics) than at the
//     capture, or requires gradients where it did not, or the reverse;
//   - the tensors are on the CPU;
//   - the caller's stream is being captured: the work becomes part of that graph;
//   - a module of the same pool that was captured later waits for its backward pass;
//   - the function could not be captured, or a parameter's gradient accumulator has hooks, as
//     with c10d's own reducer (GraphedModuleStats.Refused). Hooks of distributed.DataParallel are
//     on the parameters and are called.
//
// The function must do the same work at every call and follow the rules of cuda.Capture: it must
// not read values or wait. Modes that it reads on the host, such as training or evaluation of an
// nn.Module, stay as they were at the capture: see nn.NewGraphed, which checks them. If a parameter
// or another tensor that the function uses has received other memory (SetData, nn.To), the function
// is captured again.
//
// A second forward pass before the backward pass of the first returns [ErrPendingBackward].
// Gradients of gradients are not possible through the graphs, and are an error of Grad.
//
// Calls may be made on any stream. A call on another stream than the previous one waits for the
// work of that stream. The backward pass runs on the stream of its forward pass, as all operators
// do. Several goroutines may use a GraphedModule, one pass after the other.
type GraphedModule struct {
	fn         func([]*Tensor) ([]*Tensor, error)
	parameters []*Tensor
	o          GraphedModuleOptions
	pool       *modulePool

	mu     sync.Mutex
	entry  *moduleEntry // nil until a capture; guarded by mu, as are the following fields
	calls  moduleCalls
	busy   bool // a goroutine is capturing
	stats  GraphedModuleStats
	closed bool

	pending pendingPass
	passes  uint64 // guarded by mu
}

// moduleCalls describes the calls before a capture.
type moduleCalls struct {
	kin  string     // of the arguments of the first call
	args []argument // of the first call, for messages
	warm int        // eager calls with these arguments
}

// note records the arguments of the first call.
func (c *moduleCalls) note(args []argument) {
	if c.kin == "" {
		c.kin, c.args = kin(args), args
	}
}

// differ reports whether the arguments are of another kind than the first call's.
func (c *moduleCalls) differ(args []argument) bool { return c.kin != "" && c.kin != kin(args) }

// pendingPass is the number of the forward pass whose backward pass may still run, or 0. It has a
// separate lock, because a node of the autograd graph may end in any call.
type pendingPass struct {
	mu   sync.Mutex
	pass uint64
}

// number returns the pass whose backward has not run yet, or 0.
func (p *pendingPass) number() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pass
}

// replace replaces the number from by the number to. It does nothing if the number is not from.
func (p *pendingPass) replace(from, to uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pass == from {
		p.pass = to
	}
}

// GraphedModuleOptions are the options of [NewGraphedModule].
type GraphedModuleOptions struct {
	// Warmup is the number of eager calls before the first replay; 0 means 3, as in PyTorch. The
	// last of these calls also captures the function. Each of the others should be followed by its
	// backward pass, which initialises LibTorch's thread.
	Warmup int

	// SharePool is another GraphedModule. Graphs of both modules then use the same memory for data
	// that a graph needs only while it runs. A module that was captured later keeps data for its
	// backward pass in this memory, and a pass of the earlier module may overwrite the data. The
	// modules should therefore run in the order of their first calls. A call that comes while a
	// later module waits for its backward pass runs eagerly. The library orders the replays on the
	// device.
	SharePool *GraphedModule
}

// GraphedModuleStats counts the passes of a [GraphedModule].
type GraphedModuleStats struct {
	Calls    int64 // of Forward
	Replays  int64 // calls that replayed the graph
	Backward int64 // backward passes that replayed the graph
	Eager    int64 // calls that ran the function: Calls - Replays, without failed calls
	Captures int64
	Stale    int64 // calls that dropped graphs, because a tensor that is not an argument had moved
	// Fallback is the reason why the latest eager call did not replay; nil for calls that warm up.
	Fallback error
	// Refused is the reason why the function could not be captured. It then always runs eagerly.
	Refused error
}

// modulePool is the memory that the graphs of several modules share, and the stream on which they
// are captured.
type modulePool struct {
	mu     sync.Mutex
	on     moduleDevice
	graphs []replayer // open graphs; each of them holds the memory
	used   bool       // whether there was a capture
	users  int        // modules that are not closed

	// order is held from the check that a pass overwrites nothing until the pass is enqueued. It
	// guards the following fields and the entries' times.
	order   sync.Mutex
	entries []*moduleEntry // in the order of their captures
	now     int64          // passes so far
}

// overwrites reports whether a pass of the entry may overwrite data that another entry keeps for
// its backward pass. A graph is captured with the memory that earlier graphs need only while they
// run, so only entries that were captured later are in danger. The caller holds order.
func (p *modulePool) overwrites(e *moduleEntry) bool {
	later := p.entries[slices.Index(p.entries, e)+1:]
	return slices.ContainsFunc(later, func(l *moduleEntry) bool { return l.module.pending.number() != 0 })
}

// overwritten reports whether another entry has had a pass since the entry's forward pass that may
// have overwritten data that its backward pass needs. The caller holds order.
func (p *modulePool) overwritten(e *moduleEntry) bool {
	earlier := p.entries[:max(0, slices.Index(p.entries, e))]
	return slices.ContainsFunc(earlier, func(l *moduleEntry) bool { return l.passedAt > e.forwardAt })
}

// tick returns the time of a pass. The caller holds order.
func (p *modulePool) tick() int64 {
	p.now++
	return p.now
}

// moduleEntry is a captured pair of graphs.
type moduleEntry struct {
	device            cuda.Device
	inputs            []*Tensor // of the graphs; leaves
	recorded          []*Tensor // the results of the captured function, with their history
	outputs           []*Tensor // the same memory without history
	given             []*Tensor // gradients of the outputs; nil for an output without one
	gradients         []*Tensor // of the arguments, then of the parameters; nil for none
	needs             []bool    // whether each of these required gradients at the capture
	forward, backward replayer
	last              *cuda.Stream // of the latest pass; nil before the first

	module              *GraphedModule
	forwardAt, passedAt int64 // times of the latest forward pass, and of the latest pass
}

// errOverwrites makes a call run eagerly.
var errOverwrites = invalid("a module of the pool that was captured later waits for its backward pass")

// NewGraphedModule returns fn as a GraphedModule, which the caller must close. fn receives handles
// that end with the call, as [NewGraphed]'s function does. parameters are the leaves that fn uses
// in addition to its arguments, with or without gradients.
//
//	block := torch.NewGraphedModule(func(in []*torch.Tensor) ([]*torch.Tensor, error) {
//		y := layer.Forward(in[0])
//		return []*torch.Tensor{y}, y.Err()
//	}, nn.Parameters(layer), torch.GraphedModuleOptions{})
//	y, err := block.Forward(x)
func NewGraphedModule(fn func(arguments []*Tensor) ([]*Tensor, error), parameters []*Tensor,
	o GraphedModuleOptions) *GraphedModule {
	if o.Warmup < 1 {
		o.Warmup = 3
	}
	m := &GraphedModule{fn: fn, parameters: parameters, o: o}
	if o.SharePool != nil {
		m.pool = o.SharePool.pool
	}
	if m.pool == nil {
		m.pool = &modulePool{on: &sideStreams{}}
	}
	m.pool.mu.Lock()
	m.pool.users++
	m.pool.mu.Unlock()
	return m
}

// Forward runs the function, or replays its graph, on the current stream, and returns the results
// like an operator on the arguments: in their youngest scope, with a history. The host does not
// wait, except for some milliseconds during a capture.
func (m *GraphedModule) Forward(arguments ...*Tensor) ([]*Tensor, error) {
	const op = "GraphedModule.Forward"
	if m == nil || m.fn == nil {
		return nil, opError(op, arguments, invalid("the GraphedModule has no function: make one with NewGraphedModule"))
	}
	run, err := m.begin(arguments)
	var out []*Tensor
	if err == nil && run == runReplay {
		if out, err = m.replay(arguments); err == errOverwrites || errors.Is(err, cuda.ErrStale) {
			run, err = runEager, nil
		}
	}
	switch {
	case err != nil:
	case run == runEager:
		out, err = m.fn(arguments)
	case run == runCapture:
		out, err = m.runAndCapture(arguments)
	}
	if err != nil {
		return nil, opErrorOnce(op, arguments, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if run == runReplay {
		m.stats.Replays++
	} else {
		m.stats.Eager++
	}
	return out, nil
}

// The kinds of a call.
const (
	runEager = iota
	runCapture
	runReplay
)

// begin chooses the kind of a call. For runCapture a call of runAndCapture must follow.
//
// The function and its capture, and all code that waits for a capture, run without the lock. A
// backward pass takes the lock on LibTorch's thread, and a capture needs that thread.
func (m *GraphedModule) begin(arguments []*Tensor) (run int, err error) {
	args, err := describeAll("GraphedModule.Forward", arguments)
	if err != nil {
		return 0, err
	}
	capi.ReleaseCallbacks() // of results that were closed since: they have no backward pass
	var dropped *moduleEntry
	defer func() { m.pool.free(dropped) }()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return 0, ErrClosed
	}
	m.stats.Calls++
	m.stats.Fallback, err = m.refusal(args)
	if err != nil || m.stats.Fallback != nil {
		return runEager, err
	}
	m.calls.note(args)
	switch {
	case m.pending.number() != 0:
		return 0, ErrPendingBackward
	case m.entry != nil && m.moved():
		dropped = m.drop()
		return runEager, nil
	case m.entry != nil:
		return runReplay, nil
	case m.calls.warm < m.o.Warmup-1:
		m.calls.warm++
		return runEager, nil
	}
	m.busy = true
	return runCapture, nil
}

// runAndCapture runs the function eagerly and then captures it for later calls. Both happen on one
// OS thread, because libraries initialise themselves for a thread at their first use.
func (m *GraphedModule) runAndCapture(arguments []*Tensor) (out []*Tensor, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var dropped *moduleEntry
	defer func() { m.pool.free(dropped) }()
	defer func() { // also if the function panics
		m.mu.Lock()
		defer m.mu.Unlock()
		m.busy = false
	}()
	if out, err = m.fn(arguments); err != nil {
		return nil, err
	}
	e, err := m.capture(arguments)
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case err == nil && m.closed:
		dropped = e
	case err == nil:
		m.entry = e
		m.stats.Captures++
	case errors.Is(err, cuda.ErrCapture):
		m.stats.Refused, m.stats.Fallback = err, err
	default:
		return nil, err
	}
	return out, nil
}

// refusal returns why a call must run eagerly, or nil.
func (m *GraphedModule) refusal(args []argument) (reason, err error) {
	if m.stats.Refused != nil {
		return m.stats.Refused, nil
	}
	if len(args) == 0 {
		return invalid("there are no arguments"), nil
	}
	device, recorded := args[0].device, false
	for i, a := range args {
		if a.marks&noGrad != 0 {
			return invalid("argument %d is marked NoGrad", i+1), nil
		}
		if a.device != device {
			return invalid("argument %d is on %v, and argument 1 on %v", i+1, a.device, device), nil
		}
		recorded = recorded || a.requiresGrad
	}
	if !m.pool.on.captures(device) {
		return invalid("argument 1 is on %v: graphs are for GPUs", device), nil
	}
	for i := 0; i < len(m.parameters) && !recorded; i++ {
		recorded = m.parameters[i].RequiresGrad()
	}
	if !recorded {
		return invalid("nothing requires gradients"), nil
	}
	if m.calls.differ(args) {
		return otherKind(m.calls.args, args), nil
	}
	if m.busy {
		return invalid("another goroutine captures the function"), nil
	}
	capturing, err := m.pool.on.capturing(device)
	if capturing {
		reason = invalid("the current stream is being captured")
	}
	return reason, err
}

// otherKind returns an error that describes the first argument of another kind.
func otherKind(was, is []argument) error {
	if len(was) != len(is) {
		return invalid("%d arguments, and the graph is for %d", len(is), len(was))
	}
	for i := range is {
		if a, b := was[i].kind(), is[i].kind(); a != b {
			return invalid("argument %d is %s, and the graph is for %s", i+1, b, a)
		}
	}
	return invalid("the arguments are not those of the graph")
}

// capture returns a new entry.
func (m *GraphedModule) capture(arguments []*Tensor) (e *moduleEntry, err error) {
	m.pool.mu.Lock()
	defer m.pool.mu.Unlock()
	e = &moduleEntry{device: arguments[0].Device(), module: m}
	defer func() {
		if err != nil {
			m.pool.close(e)
			e = nil
		}
	}()
	// For each leaf, LibTorch has one node that adds to the leaf's gradient. The node has a stream.
	// The captured passes must not use an eager pass's node, and later passes must not use the
	// capture's node.
	if err := forgetAccumulators(m.parameters); err != nil {
		return e, err
	}
	defer func() { err = errors.Join(err, forgetAccumulators(m.parameters)) }()
	return e, m.pool.on.begin(e.device, func() error {
		if err := e.makeInputs(arguments); err != nil {
			return err
		}
		if err := m.pool.on.makeRoom(e.device, !m.pool.used); err != nil {
			return err
		}
		m.pool.used = true
		e.forward, err = m.pool.capture(e.device, func() error { return e.captureForward(m.fn) })
		if err != nil {
			return err
		}
		outputs, given, err := e.makeGradients(m.parameters)
		if err != nil {
			return err
		}
		e.backward, err = m.pool.capture(e.device,
			func() error { return e.captureBackward(outputs, given, m.parameters) })
		if err == nil {
			m.pool.order.Lock()
			m.pool.entries = append(m.pool.entries, e)
			m.pool.order.Unlock()
		}
		return err
	})
}

// makeGradients makes, for the backward graph, a gradient for each output that has one. It returns
// these outputs and their gradients.
func (e *moduleEntry) makeGradients(parameters []*Tensor) (outputs, given []*Tensor, err error) {
	// A leaf that is neither an input nor a parameter would get no gradient.
	leaves := append(append([]*Tensor(nil), e.inputs...), parameters...)
	all := append(append([]*Tensor(nil), leaves...), e.recorded...)
	err = with("GraphedModule.Forward", all, func(c []*capi.Tensor) error {
		return capi.CheckLeaves(c[len(leaves):], c[:len(leaves)])
	})
	if err != nil {
		return nil, nil, err
	}
	for _, t := range e.recorded {
		var g *Tensor
		if t.RequiresGrad() {
			g = unscoped(t.NoGrad().EmptyLike())
			outputs, given = append(outputs, t), append(given, g)
			err = errors.Join(err, g.Err())
		}
		e.given = append(e.given, g)
	}
	if len(outputs) == 0 {
		err = &capi.Error{Code: capi.CodeCapture, Origin: "torch",
			Message: "no result depends on an argument or a parameter that requires gradients"}
	}
	return outputs, given, err
}

// makeInputs makes the inputs of the graphs, with the arguments' values.
func (e *moduleEntry) makeInputs(arguments []*Tensor) error {
	for _, a := range arguments {
		x := unscoped(a.NoGrad().Clone())
		x.marks = a.marks
		e.inputs = append(e.inputs, x)
		if err := x.Err(); err != nil {
			return err
		}
		if a.RequiresGrad() {
			if err := x.SetRequiresGrad(true); err != nil {
				return err
			}
		}
	}
	return nil
}

func (e *moduleEntry) captureForward(fn func([]*Tensor) ([]*Tensor, error)) error {
	scope := NewScope("a captured call of a GraphedModule")
	defer scope.Close()
	in := make([]*Tensor, len(e.inputs))
	for i, t := range e.inputs {
		in[i] = t.within(scope)
	}
	out, err := fn(in)
	if err != nil {
		return err
	}
	if len(out) == 0 {
		return invalid("the function returned no results")
	}
	for _, t := range out {
		// The history stays: it keeps the tensors that backward reads, so no graph that is captured
		// later gets their memory.
		e.recorded = append(e.recorded, t.reference("Keep", nil))
		e.outputs = append(e.outputs, unscoped(t.Detach()))
		if err := t.Err(); err != nil {
			return err
		}
	}
	return nil
}

func (e *moduleEntry) captureBackward(outputs, given, parameters []*Tensor) error {
	all := append(append([]*Tensor(nil), e.inputs...), parameters...)
	e.gradients, e.needs = make([]*Tensor, len(all)), make([]bool, len(all))
	var with []*Tensor
	var at []int
	for i, t := range all {
		if e.needs[i] = t.RequiresGrad(); e.needs[i] {
			with, at = append(with, t), append(at, i)
		}
	}
	// The hooks of leaves are called in the passes that replay the graph.
	found, err := Grad(outputs, with, GradOptions{Gradients: given, RetainGraph: true, AllowUnused: true,
		noLeafHooks: true})
	for i, g := range found {
		if g != nil {
			e.gradients[at[i]] = unscoped(g)
		}
	}
	return err
}

// moved reports whether parameters that required no gradients at the capture require some now. The
// caller holds mu.
func (m *GraphedModule) moved() bool {
	for i, p := range m.parameters {
		if !m.entry.needs[len(m.entry.inputs)+i] && p.RequiresGrad() {
			return true
		}
	}
	return false
}

// replay runs a call with the graphs.
func (m *GraphedModule) replay(arguments []*Tensor) ([]*Tensor, error) {
	var dropped *moduleEntry
	defer func() { m.pool.free(dropped) }()
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.entry
	switch { // other goroutines may have been faster
	case e == nil:
		return nil, ErrClosed
	case m.pending.number() != 0:
		return nil, ErrPendingBackward
	}
	m.pool.order.Lock()
	defer m.pool.order.Unlock()
	if m.pool.overwrites(e) {
		m.stats.Fallback = errOverwrites
		return nil, errOverwrites
	}
	// The previous pass may have run on another stream. There it reads the inputs and gradients of
	// the graphs, and copies their results.
	now, err := m.pool.on.follow(e.device, e.last)
	if err != nil {
		return nil, err
	}
	e.last = &now
	e.forwardAt = m.pool.tick()
	e.passedAt = e.forwardAt
	for i, x := range e.inputs {
		if err := x.CopyFrom(arguments[i], CopyOptions{NonBlocking: true}); err != nil {
			return nil, err
		}
	}
	if err := m.pool.on.replay(e.forward, e.device); err != nil {
		if errors.Is(err, cuda.ErrStale) {
			dropped = m.drop()
		}
		return nil, err
	}
	return m.attach(e, arguments)
}

// attach returns copies of the graph's outputs, with the backward graph as their history.
func (m *GraphedModule) attach(e *moduleEntry, arguments []*Tensor) ([]*Tensor, error) {
	const op = "GraphedModule.Forward"
	scope := NewScope("a call of a GraphedModule")
	defer scope.Close()
	var owner *Scope
	for _, a := range arguments {
		owner = youngest(owner, a.scope)
	}
	all := append(append([]*Tensor(nil), arguments...), m.parameters...)
	inputs := len(all)
	constant := make([]bool, len(e.outputs))
	for i, t := range e.outputs {
		constant[i] = e.given[i] == nil
		all = append(all, t.within(scope).Clone())
	}
	m.passes++
	pass := m.passes
	var found []*capi.Tensor
	err := with(op, all, func(c []*capi.Tensor) (err error) {
		found, err = capi.AttachFunction(capi.Function{
			Name: "GraphedModule", Inputs: c[:inputs], Outputs: c[inputs:], Constant: constant,
			Backward: callback(op, func(in []*Tensor) ([]*Tensor, error) { return m.backward(e, pass, in) }),
			Ended:    func() { m.pending.replace(pass, 0) },
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	m.pending.replace(m.pending.number(), pass)
	out := make([]*Tensor, len(found))
	for i, c := range found {
		out[i] = provenance{owner, e.recorded[i].marks}.result(c)
		err = errors.Join(err, out[i].failure())
	}
	return out, err
}

// backward runs in a backward pass, on the thread and stream that LibTorch chooses. gradients are
// the outputs' gradients, nil for an output without one.
func (m *GraphedModule) backward(e *moduleEntry, pass uint64, gradients []*Tensor) ([]*Tensor, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed:
		return nil, ErrClosed
	case m.entry != e || m.passes != pass:
		return nil, ErrOverwritten
	}
	m.pool.order.Lock()
	defer m.pool.order.Unlock()
	if m.pool.overwritten(e) {
		m.pending.replace(pass, 0)
		return nil, ErrOverwritten
	}
	e.passedAt = m.pool.tick()
	var scope *Scope
	for i, g := range gradients {
		if g == nil {
			continue
		}
		if g.marks&noGrad == 0 {
			return nil, invalid("a GraphedModule has no gradients of gradients (CreateGraph): run its function eagerly")
		}
		scope = g.scope
		if err := e.given[i].CopyFrom(g, CopyOptions{NonBlocking: true}); err != nil {
			return nil, err
		}
	}
	if err := m.pool.on.replay(e.backward, e.device); err != nil {
		return nil, err
	}
	results := make([]*Tensor, len(e.gradients))
	var to, from []*Tensor
	for i, g := range e.gradients {
		if g != nil {
			results[i] = g.within(scope).EmptyLike()
			to, from = append(to, results[i]), append(from, g)
		}
	}
	if len(to) > 0 {
		if err := ForeachCopy_(to, from); err != nil {
			return nil, err
		}
	}
	m.pending.replace(pass, 0)
	m.stats.Backward++
	return results, nil
}

// Stats returns the counts so far.
func (m *GraphedModule) Stats() GraphedModuleStats {
	if m == nil {
		return GraphedModuleStats{}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stats
}

// Close frees the graphs. Results and gradients stay, and queued replays still run. A backward pass
// that has not run yet returns ErrClosed, and so does Forward. Further calls do nothing.
func (m *GraphedModule) Close() error {
	if m == nil || m.fn == nil {
		return nil
	}
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	e := m.entry
	m.entry = nil
	m.mu.Unlock()
	m.pool.free(e)
	m.pool.mu.Lock()
	defer m.pool.mu.Unlock()
	if m.pool.users--; m.pool.users == 0 {
		return m.pool.on.close()
	}
	return nil
}

// drop removes the entry and returns it, after a tensor that is not an argument has moved. The
// caller frees the entry without the lock. The next call captures again.
func (m *GraphedModule) drop() *moduleEntry {
	e := m.entry
	m.entry = nil
	m.stats.Stale++
	m.calls.warm = m.o.Warmup - 1
	return e
}

// capture captures fn with the memory of the pool. The caller holds mu.
func (p *modulePool) capture(device cuda.Device, fn func() error) (replayer, error) {
	var share replayer
	if len(p.graphs) > 0 {
		share = p.graphs[0]
	}
	graph, err := p.on.capture(device, share, fn)
	if err == nil {
		p.graphs = append(p.graphs, graph)
	}
	return graph, err
}

// free frees the tensors and graphs of e, which may be nil.
func (p *modulePool) free(e *moduleEntry) {
	if e == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.close(e)
}

// close implements free. The caller holds mu.
func (p *modulePool) close(e *moduleEntry) {
	p.order.Lock()
	p.entries = slices.DeleteFunc(p.entries, func(x *moduleEntry) bool { return x == e })
	p.order.Unlock()
	for _, each := range [][]*Tensor{e.inputs, e.recorded, e.outputs, e.given, e.gradients} {
		for _, t := range each {
			if t == nil {
				continue
			}
			// The latest pass may still use the memory, on a stream that has not allocated it.
			if e.last != nil && t.Err() == nil {
				if err := p.on.release(t, *e.last); err != nil {
					slog.Debug("torch: memory of a GraphedModule is not marked as used", "error", err)
				}
			}
			t.Close()
		}
	}
	for _, graph := range []replayer{e.forward, e.backward} {
		if graph == nil {
			continue
		}
		p.graphs = slices.DeleteFunc(p.graphs, func(g replayer) bool { return g == graph })
		graph.Close()
	}
}

// moduleDevice is the access of a GraphedModule to devices. Tests replace it.
type moduleDevice interface {
	capturer
	// capturing reports whether the current stream is being captured.
	capturing(device cuda.Device) (bool, error)
	// follow returns the current stream. It first makes that stream wait for the work of last.
	follow(device cuda.Device, last *cuda.Stream) (cuda.Stream, error)
	// release delays the reuse of a tensor's memory, after the tensor is freed, until the work of
	// the stream is done.
	release(t *Tensor, last cuda.Stream) error
}

func (s *sideStreams) capturing(device cuda.Device) (bool, error) {
	stream, err := cuda.GetCurrentCUDAStream(device)
	if err != nil {
		return false, err
	}
	return stream.Capturing()
}

func (s *sideStreams) follow(device cuda.Device, last *cuda.Stream) (cuda.Stream, error) {
	now, err := cuda.GetCurrentCUDAStream(device)
	if err == nil && last != nil && *last != now {
		err = cuda.Join(now, *last)
	}
	return now, err
}

func (s *sideStreams) release(t *Tensor, last cuda.Stream) error { return t.RecordStream(last) }

// forgetAccumulators makes graphs recorded from now on add to the leaves' gradients with new nodes.
func forgetAccumulators(leaves []*Tensor) error {
	return with("GraphedModule.Forward", leaves, capi.ForgetAccumulators)
}

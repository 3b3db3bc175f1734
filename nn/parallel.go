package nn

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Parallel runs independent branches side by side: on a GPU each on a stream of its own, on the CPU
// one after the other. The numbers are those of running the branches in turn, forward and backward.
//
// The caller's stream is the first branch's; each other branch has one that waits for the caller's
// stream before it begins (a fork) and that the caller's stream waits for at the end (a join). So
// whoever calls Forward, Outputs and Backward on one stream sees nothing of the others: outputs are
// ready for what is queued next, gradients after Backward, and a tensor may be closed at any time.
// Inside cuda.Capture the fork and the join become edges of the graph.
//
// The streams are the Parallel's own (cuda.OwnedStream): nobody else's work delays a branch, or
// comes into a capture. They are taken once for each stream that Parallel is called on, one fewer
// than there are branches, and kept until Close. What is gained depends on what the GPU has room
// for: kernels that fill it alone still run one after the other, and kernels shorter than their
// launch wait for the host, which queues one branch after another; those belong into a graph.
//
// Branches must not change their input or a state that they share, such as one BatchNorm2d in two
// branches. Parallel may be called from several goroutines at once, as far as its branches may; on
// different streams they do not wait for each other. While one trains, the others are on other
// streams than it.
type Parallel struct {
	join     Join
	branches []Module

	mu     sync.Mutex
	side   map[cuda.Stream][]*cuda.OwnedStream // by the caller's stream: the other branches'
	closed bool
}

// Join makes one tensor of the branches' outputs. It is called on the caller's stream, after all
// branches, and may be any function.
type Join func(outputs []*torch.Tensor) *torch.Tensor

// Concat joins outputs along a dimension that they have.
func Concat(dim int) Join {
	return func(outputs []*torch.Tensor) *torch.Tensor { return torch.Cat(outputs, int64(dim)) }
}

// Sum joins outputs by adding them, in the order of the branches.
func Sum() Join { return fold((*torch.Tensor).Add) }

// Product joins outputs by multiplying them elementwise, in the order of the branches.
func Product() Join { return fold((*torch.Tensor).Mul) }

func fold(combine func(a, b *torch.Tensor) *torch.Tensor) Join {
	return func(outputs []*torch.Tensor) *torch.Tensor {
		y := outputs[0]
		for _, other := range outputs[1:] {
			y = combine(y, other)
		}
		return y
	}
}

// NewParallel returns the branches as one module. join may be nil if only Outputs is called. The
// branches' names are "0", "1", ..., as in PyTorch's ModuleList and Sequential.
func NewParallel(join Join, branches ...Module) *Parallel {
	return &Parallel{join: join, branches: branches, side: map[cuda.Stream][]*cuda.OwnedStream{}}
}

// Parts returns the branches.
func (p *Parallel) Parts() Parts {
	parts := Parts{Modules: make([]Child, len(p.branches))}
	for i, m := range p.branches {
		parts.Modules[i] = Child{fmt.Sprint(i), m}
	}
	return parts
}

var (
	errNoBranch = errors.New("there are no branches")
	errNoJoin   = errors.New("the Parallel was made without a Join: call Outputs, which returns the branches' outputs as they are")
	errNoOutput = errors.New("the module returned nil")
)

// Forward gives x to every branch and returns what the Join makes of their outputs.
func (p *Parallel) Forward(x *torch.Tensor) *torch.Tensor {
	const op = "nn.Parallel"
	switch {
	case len(p.branches) == 0:
		return torch.Fail(op, fmt.Errorf("%w: %w", errNoBranch, cuda.ErrInvalidArgument))
	case p.join == nil:
		return torch.Fail(op, fmt.Errorf("%w: %w", errNoJoin, cuda.ErrInvalidArgument))
	}
	y := p.join(p.Outputs(x))
	if y == nil {
		return torch.Fail(op, fmt.Errorf("the Join returned nil: %w", cuda.ErrInvalidArgument))
	}
	return y
}

// Outputs returns the output of every branch, in their order. There is one input, for all branches,
// or one for each. Like every operator's, outputs carry what went wrong; a branch that fails does
// not keep the others from running.
func (p *Parallel) Outputs(inputs ...*torch.Tensor) []*torch.Tensor {
	const op = "nn.Parallel"
	outputs := make([]*torch.Tensor, len(p.branches))
	failed := func(err error) []*torch.Tensor {
		for i := range outputs {
			if outputs[i] == nil {
				outputs[i] = torch.Fail(op, err)
			}
		}
		return outputs
	}
	switch len(inputs) {
	case len(p.branches):
	case 1:
		inputs = slices.Repeat(inputs, len(p.branches))
	default:
		return failed(fmt.Errorf("%d inputs for %d branches, need one or as many: %w", len(inputs), len(p.branches), cuda.ErrInvalidArgument))
	}
	lanes, err := p.lanes(inputs)
	if err != nil {
		return failed(err)
	}
	joined := false
	join := func() (err error) {
		if !joined {
			joined = true
			err = eachCaller(lanes, cuda.Join)
		}
		return err
	}
	defer join() // also when a branch panics: its stream would be left in a graph's capture
	if err := eachCaller(lanes, cuda.Fork); err != nil {
		return failed(err)
	}
	for i, m := range p.branches {
		if outputs[i] = lanes[i].run(m, inputs[i]); outputs[i].Err() != nil {
			outputs[i] = torch.Fail(op, fmt.Errorf("branch %d: %w", i, outputs[i].Err()))
		}
	}
	if err := join(); err != nil {
		clear(outputs) // nothing orders what the branches have queued: nobody may read it
		return failed(err)
	}
	return outputs
}

// lane is where a branch runs: on stream, which is forked from and joined into caller. Without a
// GPU both are nothing.
type lane struct {
	gpu            bool
	caller, stream cuda.Stream
}

// lanes gives every branch the streams of its input's device. The first branch on each device has
// the caller's stream: the host queues it first, and it costs no fork and no join.
func (p *Parallel) lanes(inputs []*torch.Tensor) ([]lane, error) {
	lanes := make([]lane, len(inputs))
	for i, x := range inputs {
		device := x.Device()
		if device == cuda.CPU { // or the input has failed, which the branch reports
			continue
		}
		caller, err := cuda.GetCurrentCUDAStream(device)
		if err != nil {
			return nil, err
		}
		before := 0 // branches on this device
		for _, l := range lanes[:i] {
			if l.gpu && l.caller == caller {
				before++
			}
		}
		stream, err := p.stream(caller, before)
		if err != nil {
			return nil, err
		}
		lanes[i] = lane{true, caller, stream}
	}
	return lanes, nil
}

// stream returns the n-th stream beside the caller's, whose number is 0. They are kept by the
// caller's stream and not only by its device: memory that a branch allocates is reused in the order
// of the branch's stream, which a fork has ordered after that caller alone.
func (p *Parallel) stream(caller cuda.Stream, n int) (cuda.Stream, error) {
	if n == 0 {
		return caller, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return cuda.Stream{}, cuda.ErrClosed
	}
	for len(p.side[caller]) < n {
		own, err := cuda.NewOwnedStream(caller.Device(), cuda.StreamOptions{})
		if err != nil {
			return cuda.Stream{}, err
		}
		p.side[caller] = append(p.side[caller], own)
	}
	return p.side[caller][n-1].Stream, nil
}

// Close gives the streams back; [Close] of a network does it for all that are in it. It waits for
// nothing, and work that is queued goes on, but nobody may call Forward any more, nor Backward on
// what it returned: backward works on the streams of its forward. On a GPU a later Forward is
// cuda.ErrClosed. Graphs that were captured through the Parallel need no streams and go on.
//
// While one of the streams is captured it is an error, and Close may be called again. Further calls
// do nothing. A Parallel that becomes unreachable before gives nothing back: cuda.Leaks counts its
// streams.
func (p *Parallel) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	var errs []error
	for _, streams := range p.side {
		for _, own := range streams {
			errs = append(errs, own.Close())
		}
	}
	return errors.Join(errs...)
}

// run runs the branch on its stream. Whoever holds the input or the output may free it at any time:
// the program, the end of a scope, the garbage collector, or backward, which drops what it has
// used. Its memory then goes back to the stream that it was allocated on, so the allocator is told
// of the other.
func (l lane) run(m Module, x *torch.Tensor) (y *torch.Tensor) {
	if m == nil {
		return torch.Fail("nn.Parallel", errNoModule)
	}
	if !l.gpu || l.stream == l.caller {
		return notNil(m.Forward(x))
	}
	if err := x.RecordStream(l.stream); err != nil {
		return torch.Fail("nn.Parallel", err)
	}
	err := cuda.WithStream(l.stream, func() error {
		y = notNil(m.Forward(x))
		return nil
	})
	if err == nil && y.Err() == nil && y.Device() == l.caller.Device() {
		err = y.RecordStream(l.caller)
	}
	if err != nil {
		return torch.Fail("nn.Parallel", err)
	}
	return y
}

func notNil(y *torch.Tensor) *torch.Tensor {
	if y == nil {
		return torch.Fail("nn.Parallel", errNoOutput)
	}
	return y
}

// eachCaller forks or joins the lanes of every caller's stream.
func eachCaller(lanes []lane, order func(caller cuda.Stream, side ...cuda.Stream) error) error {
	var errs []error
	side := make([]cuda.Stream, 0, len(lanes))
	for i, first := range lanes {
		if !first.gpu || slices.ContainsFunc(lanes[:i], func(l lane) bool { return l.gpu && l.caller == first.caller }) {
			continue
		}
		side = side[:0]
		for _, l := range lanes[i:] {
			if l.gpu && l.caller == first.caller {
				side = append(side, l.stream)
			}
		}
		errs = append(errs, order(first.caller, side...))
	}
	return errors.Join(errs...)
}

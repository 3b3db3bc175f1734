package nn

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Parallel runs independent branches concurrently: on a GPU each branch on its own stream, on the
// CPU one after another. Forward and backward compute the same numbers as running the branches
// sequentially.
//
// The first branch runs on the caller's stream. Every other branch has its own stream. That stream
// waits for the caller's stream before the branch starts (a fork), and at the end the caller's
// stream waits for that stream (a join). So a program that calls Forward, Outputs and Backward on
// one stream needs no further synchronisation: outputs are ready for work queued next, gradients
// are ready after Backward, and a tensor may be closed at any time. Inside cuda.Capture the fork
// and the join become edges of the graph.
//
// A Parallel owns its streams (cuda.OwnedStream): no other work delays a branch or enters a
// capture. For n branches, the first call on a stream creates n-1 streams with the caller's
// priority. The Parallel keeps them until Close. The gain depends on the GPU's free capacity:
// kernels that fill the GPU still run one after another. If kernels are shorter than their
// launches, the host limits the speed, because it queues one branch after another; capture such
// branches in a graph.
//
// Branches must not change their input or shared state, such as one BatchNorm2d in two branches.
// Several goroutines may call a Parallel at once if its branches allow it. Calls on different
// streams do not wait for each other. While one goroutine trains, the others must use other
// streams.
type Parallel struct {
	layer
	join     Join
	branches []Module

	mu     sync.Mutex
	side   map[cuda.Stream][]*cuda.OwnedStream // the side streams of each caller's stream
	closed bool
}

// Join combines the branches' outputs into one tensor. Forward calls it on the caller's stream,
// after all branches. It may be any function.
type Join func(outputs []*torch.Tensor) *torch.Tensor

// Concat joins outputs along an existing dimension.
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

// NewParallel returns the branches as one module. join may be nil if the program calls only
// Outputs. The branches' names are "0", "1", ..., as in PyTorch's ModuleList and Sequential.
func NewParallel(join Join, branches ...Module) *Parallel {
	p := &Parallel{join: join, branches: branches, side: map[cuda.Stream][]*cuda.OwnedStream{}}
	p.create("Parallel")
	return p
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
	errNoJoin   = errors.New(
		"the Parallel was made without a Join: call Outputs, which returns the branches' outputs as they are")
	errNoOutput = errors.New("the module returned nil")
)

// Forward passes x to every branch and returns the Join of their outputs.
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
	return p.result(y, x)
}

// Outputs returns the output of every branch, in order. Pass one input for all branches, or one per
// branch. Outputs hold errors, as an operator's do. A failed branch does not stop the others.
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
		return failed(fmt.Errorf("%d inputs for %d branches, need one input or one per branch: %w",
			len(inputs), len(p.branches), cuda.ErrInvalidArgument))
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
	// Join even if a branch panics: otherwise its stream would stay in a graph's capture.
	defer join()
	if err := eachCaller(lanes, cuda.Fork); err != nil {
		return failed(err)
	}
	for i, m := range p.branches {
		if outputs[i] = lanes[i].run(m, inputs[i]); outputs[i].Err() != nil {
			walk("", p, func(string, Module, Parts) {}) // the layers may not know their paths yet
			outputs[i] = p.report(outputs[i], fmt.Sprint(i), kindOf(m), inputs[i])
		}
	}
	if err := join(); err != nil {
		// The work queued by the branches has no order, so the outputs must not be read.
		clear(outputs)
		return failed(err)
	}
	return outputs
}

// lane is the stream that a branch runs on. It is forked from and joined into caller. Without a GPU
// both are zero.
type lane struct {
	gpu            bool
	caller, stream cuda.Stream
}

// lanes assigns each branch a stream on its input's device. The first branch on each device runs on
// the caller's stream: the host queues it first, and it needs no fork and no join.
func (p *Parallel) lanes(inputs []*torch.Tensor) ([]lane, error) {
	lanes := make([]lane, len(inputs))
	for i, x := range inputs {
		device := x.Device()
		if device == cuda.CPU { // on the CPU, or the input failed and the branch reports it
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

// stream returns stream n; the caller's stream is number 0. The map's key is the caller's stream,
// not its device: memory that a branch allocates is reused in the order of the branch's stream, and
// a fork orders that stream only after this caller's.
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
		own, err := cuda.NewSideStream(caller)
		if err != nil {
			return cuda.Stream{}, err
		}
		p.side[caller] = append(p.side[caller], own)
	}
	return p.side[caller][n-1].Stream, nil
}

// Close releases the streams. [Close] of a network calls it for every Parallel in the network.
// Close does not block, and queued work continues. After Close the program must not call Forward,
// nor Backward on an earlier output, because backward runs on the streams of its forward. On a GPU
// a later Forward fails with cuda.ErrClosed. Graphs captured through the Parallel need no streams
// and stay usable.
//
// While one of the streams is being captured, Close returns an error and may be called again.
// Further calls do nothing. If a Parallel becomes unreachable without Close, its streams leak:
// cuda.Leaks counts them.
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

// run runs the branch on its stream. The input or the output may be freed at any time: by the
// program, the end of a scope, the garbage collector, or backward, which drops tensors after use.
// The memory then returns to the stream that allocated it, so run records the use on the other
// stream with the allocator.
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
		if !first.gpu || slices.ContainsFunc(lanes[:i],
			func(l lane) bool { return l.gpu && l.caller == first.caller }) {
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

package nn

import (
	"fmt"
	"slices"
	"sync"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// RecurrentOptions are the options of NewLSTM and NewGRU.
type RecurrentOptions struct {
	Layers        int     // 0 stands for 1
	Dropout       float64 // the probability of dropping an output between layers, in training
	NoBias        bool
	BatchFirst    bool // sequences are [N L in] rather than PyTorch's default [L N in]
	Bidirectional bool // adds a second direction, from the end; the outputs are concatenated
}

// The options of NewLSTM and NewGRU.
type (
	LSTMOptions = RecurrentOptions
	GRUOptions  = RecurrentOptions
)

// RNNOptions are the options of NewRNN.
type RNNOptions struct {
	ReLU          bool    // max(x, 0) instead of tanh
	Layers        int     // 0 stands for 1
	Dropout       float64 // the probability of dropping an output between layers, in training
	NoBias        bool
	BatchFirst    bool // sequences are [N L in] rather than PyTorch's default [L N in]
	Bidirectional bool // adds a second direction, from the end; the outputs are concatenated
}

// kindOfRecurrent holds the properties in which LSTM, GRU and RNN differ.
type kindOfRecurrent struct {
	name  string
	gates int // the rows of a weight are gates*hidden
	cudnn int // cuDNN's number for the kind
}

// recurrent is the common part of LSTM, GRU and RNN.
type recurrent struct {
	layer
	switchable
	parameters   []torch.Named // in the operators' order
	in, hidden   int64
	layers, ways int64 // ways is the number of directions
	cudnn        int
	o            RecurrentOptions

	mu   sync.Mutex
	flat uintptr // address of the first weight after the last join; guarded by mu
}

func (r *recurrent) construct(kind kindOfRecurrent, in, hidden int, o RecurrentOptions) {
	op := "nn.New" + kind.name
	r.create(kind.name)
	r.in, r.hidden, r.layers, r.ways, r.o = int64(in), int64(hidden), int64(max(o.Layers, 1)), 1, o
	r.cudnn = kind.cudnn
	if o.Bidirectional {
		r.ways = 2
	}
	bad := positive(op, "in and hidden", in, hidden)
	if bad == nil && (o.Layers < 0 || o.Dropout < 0 || o.Dropout > 1) {
		bad = invalid(op, "options %+v: Layers must not be negative, and Dropout is from 0 to 1", o)
	}
	if bad != nil {
		r.parameters = []torch.Named{{Name: "weight_ih_l0", Tensor: bad}}
		return
	}
	fill, rows := uniform(hidden), int64(kind.gates)*r.hidden
	for l := range r.layers {
		width := int64(in)
		if l > 0 {
			width = r.hidden * r.ways
		}
		for _, suffix := range []string{"", "_reverse"}[:r.ways] {
			name := fmt.Sprintf("_l%d%s", l, suffix)
			r.parameters = append(r.parameters,
				torch.Named{Name: "weight_ih" + name, Tensor: parameter(op, fill, rows, width)},
				torch.Named{Name: "weight_hh" + name, Tensor: parameter(op, fill, rows, r.hidden)})
			if !o.NoBias {
				r.parameters = append(r.parameters,
					torch.Named{Name: "bias_ih" + name, Tensor: parameter(op, fill, rows)},
					torch.Named{Name: "bias_hh" + name, Tensor: parameter(op, fill, rows)})
			}
		}
	}
}

// Parts returns the weights and biases under PyTorch's names, such as "weight_ih_l0_reverse".
func (r *recurrent) Parts() Parts { return Parts{Parameters: r.parameters} }

func (r *recurrent) weights() []*torch.Tensor {
	list := make([]*torch.Tensor, len(r.parameters))
	for i, p := range r.parameters {
		list[i] = p.Tensor
	}
	return list
}

// join moves the weights on a GPU into one contiguous buffer. Without it cuDNN copies the weights
// in every call, and warns. The tensors stay the same. join does nothing if the weights have not
// moved since the last call.
func (r *recurrent) join(x *torch.Tensor) error {
	weights := r.weights()
	if x.Device() == cuda.CPU || weights[0].Err() != nil || weights[0].Device() != x.Device() {
		return nil // the operator reports what is wrong
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at, err := weights[0].Pointer()
	if err != nil || at == r.flat {
		return err
	}
	for i, w := range weights {
		weights[i] = w.NoGrad()
	}
	each := 4 // weights per layer and direction
	if r.o.NoBias {
		each = 2
	}
	buffer := torch.Call1("_cudnn_rnn_flatten_weight",
		weights, each, r.in, r.cudnn, r.hidden, 0, r.layers, r.o.BatchFirst, r.ways == 2)
	if err := buffer.Err(); err != nil {
		return err
	}
	buffer.Close() // the weights hold the memory
	r.flat, err = weights[0].Pointer()
	return err
}

// start returns the state if it is not nil, and zeros otherwise. The caller must close own, which
// may be nil. start also checks the shapes, as PyTorch's modules do: LibTorch's kernels do not
// check all of them.
func (r *recurrent) start(x, state *torch.Tensor) (s, own *torch.Tensor, err error) {
	shape := x.Shape()
	if err := x.Err(); err != nil {
		return nil, nil, err
	}
	if len(shape) != 3 || shape[2] != r.in {
		return nil, nil, fmt.Errorf("the input is %v, and it must have 3 dimensions, the last of size %d: %w",
			shape, r.in, cuda.ErrInvalidArgument)
	}
	batch := shape[1]
	if r.o.BatchFirst {
		batch = shape[0]
	}
	return stateOr(x, state, r.layers*r.ways, batch, r.hidden)
}

// stateOr returns the state, which must have the shape, or zeros like x if it is nil. The caller
// must close own, which may be nil.
func stateOr(x, state *torch.Tensor, shape ...int64) (s, own *torch.Tensor, err error) {
	if state == nil {
		zero, err := torch.Zeros(x.Device(), x.DType(), shape...)
		return zero, zero, err
	}
	if err := state.Err(); err != nil {
		return nil, nil, err
	}
	if !slices.Equal(state.Shape(), shape) {
		return nil, nil, fmt.Errorf("a state is %v, and it must be %v for this input: %w",
			state.Shape(), shape, cuda.ErrInvalidArgument)
	}
	return state, nil, nil
}

// operator computes a layer that has one state, such as a GRU.
type operator func(x, hidden *torch.Tensor, params []*torch.Tensor, hasBiases bool, layers int64,
	dropout float64, train, bidirectional, batchFirst bool) (y, lastHidden *torch.Tensor)

// run implements Run for layers with one state.
func (r *recurrent) run(f operator, x, hidden *torch.Tensor) (y, lastHidden *torch.Tensor) {
	h, own, err := r.start(x, hidden)
	defer own.Close()
	if err == nil {
		err = r.join(x)
	}
	if err != nil {
		bad := r.result(torch.Fail("nn."+r.kind, err), x, hidden)
		return bad, bad
	}
	y, lastHidden = f(x, h, r.weights(),
		!r.o.NoBias, r.layers, r.o.Dropout, r.training(), r.ways == 2, r.o.BatchFirst)
	return r.result(y, x, hidden), lastHidden
}

// LSTM is a long short-term memory layer.
type LSTM struct{ recurrent }

// NewLSTM returns a long short-term memory layer with inputs and hidden states of the given sizes.
func NewLSTM(in, hidden int, o LSTMOptions) *LSTM {
	l := &LSTM{}
	l.construct(kindOfRecurrent{"LSTM", 4, 2}, in, hidden, o)
	return l
}

// Forward returns the outputs for the sequences x, starting from zero states: [L N in] gives [L N
// directions*hidden]; with BatchFirst, N comes first.
func (l *LSTM) Forward(x *torch.Tensor) *torch.Tensor {
	y, h, c := l.Run(x, nil, nil)
	h.Close()
	c.Close()
	return y
}

// Run returns the outputs, and the hidden and cell states after the last step. hidden and cell are
// the states before the first step, each [layers*directions N hidden], or nil for zeros.
func (l *LSTM) Run(x, hidden, cell *torch.Tensor) (y, lastHidden, lastCell *torch.Tensor) {
	fail := func(err error) (y, h, c *torch.Tensor) {
		bad := l.result(torch.Fail("nn.LSTM", err), x, hidden, cell)
		return bad, bad, bad
	}
	if err := l.join(x); err != nil {
		return fail(err)
	}
	h, ownH, err := l.start(x, hidden)
	defer ownH.Close()
	if err != nil {
		return fail(err)
	}
	c, ownC, err := l.start(x, cell)
	defer ownC.Close()
	if err != nil {
		return fail(err)
	}
	y, lastHidden, lastCell = x.LSTM([]*torch.Tensor{h, c}, l.weights(),
		!l.o.NoBias, l.layers, l.o.Dropout, l.training(), l.ways == 2, l.o.BatchFirst)
	return l.result(y, x, hidden, cell), lastHidden, lastCell
}

// GRU is a layer of gated recurrent units.
type GRU struct{ recurrent }

// NewGRU returns a layer of gated recurrent units with inputs and hidden states of the given sizes.
func NewGRU(in, hidden int, o GRUOptions) *GRU {
	g := &GRU{}
	g.construct(kindOfRecurrent{"GRU", 3, 3}, in, hidden, o)
	return g
}

// Forward returns the outputs for the sequences x, starting from a zero state: [L N in] gives [L N
// directions*hidden]; with BatchFirst, N comes first.
func (g *GRU) Forward(x *torch.Tensor) *torch.Tensor {
	y, h := g.Run(x, nil)
	h.Close()
	return y
}

// Run returns the outputs, and the hidden state after the last step. hidden is the state before the
// first step, [layers*directions N hidden], or nil for zeros.
func (g *GRU) Run(x, hidden *torch.Tensor) (y, lastHidden *torch.Tensor) {
	return g.run((*torch.Tensor).GRU, x, hidden)
}

// RNN is a plain recurrent layer: h' = tanh(W_ih x + b_ih + W_hh h + b_hh). [RNNOptions].ReLU
// replaces tanh(...) with max(..., 0).
type RNN struct {
	recurrent
	relu bool
}

// NewRNN returns a plain recurrent layer with inputs and hidden states of the given sizes.
func NewRNN(in, hidden int, o RNNOptions) *RNN {
	r, cudnn := &RNN{relu: o.ReLU}, 1
	if o.ReLU {
		cudnn = 0
	}
	r.construct(kindOfRecurrent{"RNN", 1, cudnn}, in, hidden, RecurrentOptions{
		Layers: o.Layers, Dropout: o.Dropout, NoBias: o.NoBias, BatchFirst: o.BatchFirst,
		Bidirectional: o.Bidirectional,
	})
	return r
}

// Forward returns the outputs for the sequences x, starting from a zero state: [L N in] gives [L N
// directions*hidden]; with BatchFirst, N comes first.
func (r *RNN) Forward(x *torch.Tensor) *torch.Tensor {
	y, h := r.Run(x, nil)
	h.Close()
	return y
}

// Run returns the outputs, and the hidden state after the last step. hidden is the state before the
// first step, [layers*directions N hidden], or nil for zeros.
func (r *RNN) Run(x, hidden *torch.Tensor) (y, lastHidden *torch.Tensor) {
	if r.relu {
		return r.run((*torch.Tensor).RNNReLU, x, hidden)
	}
	return r.run((*torch.Tensor).RNNTanh, x, hidden)
}

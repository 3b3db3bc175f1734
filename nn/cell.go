package nn

import (
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Cell is the common part of LSTMCell, GRUCell and RNNCell, which have 4, 3 and 1 gates.
type Cell struct {
	layer
	WeightIH, WeightHH *torch.Tensor // [gates*hidden in] and [gates*hidden hidden]
	BiasIH, BiasHH     *torch.Tensor // [gates*hidden], nil with NoBias

	in, hidden int64
}

// CellOptions are the options of NewLSTMCell and NewGRUCell.
type CellOptions struct {
	NoBias bool
}

// The options of NewLSTMCell and NewGRUCell.
type (
	LSTMCellOptions = CellOptions
	GRUCellOptions  = CellOptions
)

func (c *Cell) construct(kind string, gates, in, hidden int, noBias bool) {
	op := "nn.New" + kind
	c.create(kind)
	c.in, c.hidden = int64(in), int64(hidden)
	if c.WeightIH = positive(op, "in and hidden", in, hidden); c.WeightIH != nil {
		return
	}
	fill, rows := uniform(hidden), int64(gates)*c.hidden
	c.WeightIH = parameter(op, fill, rows, int64(in))
	c.WeightHH = parameter(op, fill, rows, c.hidden)
	if !noBias {
		c.BiasIH = parameter(op, fill, rows)
		c.BiasHH = parameter(op, fill, rows)
	}
}

// Parts returns the weights and biases under PyTorch's names, such as "weight_ih".
func (c *Cell) Parts() Parts {
	return Parts{Parameters: named(torch.Named{Name: "weight_ih", Tensor: c.WeightIH},
		torch.Named{Name: "weight_hh", Tensor: c.WeightHH},
		torch.Named{Name: "bias_ih", Tensor: c.BiasIH}, torch.Named{Name: "bias_hh", Tensor: c.BiasHH})}
}

// start returns the state if it is not nil, and zeros otherwise. The caller must close own, which
// may be nil.
func (c *Cell) start(x, state *torch.Tensor) (s, own *torch.Tensor, err error) {
	shape := x.Shape()
	if err := x.Err(); err != nil {
		return nil, nil, err
	}
	if len(shape) != 2 || shape[1] != c.in {
		return nil, nil, fmt.Errorf("the input is %v, and it must have 2 dimensions, the last of size %d: %w",
			shape, c.in, cuda.ErrInvalidArgument)
	}
	return stateOr(x, state, shape[0], c.hidden)
}

// step implements Step for cells with a single state.
func (c *Cell) step(f func(h *torch.Tensor) *torch.Tensor, x, hidden *torch.Tensor) *torch.Tensor {
	h, own, err := c.start(x, hidden)
	defer own.Close()
	if err != nil {
		return c.result(torch.Fail("nn."+c.kind, err), x, hidden)
	}
	return c.result(f(h), x, hidden)
}

// LSTMCell is one step of a single-layer [LSTM].
type LSTMCell struct{ Cell }

// NewLSTMCell returns a cell with inputs and hidden states of the given sizes.
func NewLSTMCell(in, hidden int, o LSTMCellOptions) *LSTMCell {
	c := &LSTMCell{}
	c.construct("LSTMCell", 4, in, hidden, o.NoBias)
	return c
}

// Forward runs one step from zero states and returns the hidden state: [N in] gives [N hidden].
func (c *LSTMCell) Forward(x *torch.Tensor) *torch.Tensor {
	h, state := c.Step(x, nil, nil)
	state.Close()
	return h
}

// Step returns the hidden and cell states [N hidden] after the input x [N in]. hidden and cell are
// the previous states, each [N hidden], or nil for zeros.
func (c *LSTMCell) Step(x, hidden, cell *torch.Tensor) (nextHidden, nextCell *torch.Tensor) {
	fail := func(err error) (h, s *torch.Tensor) {
		bad := c.result(torch.Fail("nn.LSTMCell", err), x, hidden, cell)
		return bad, bad
	}
	h, ownH, err := c.start(x, hidden)
	defer ownH.Close()
	if err != nil {
		return fail(err)
	}
	s, ownS, err := c.start(x, cell)
	defer ownS.Close()
	if err != nil {
		return fail(err)
	}
	nextHidden, nextCell = x.LSTMCell([]*torch.Tensor{h, s}, c.WeightIH, c.WeightHH, c.BiasIH, c.BiasHH)
	return c.result(nextHidden, x, hidden, cell), nextCell
}

// GRUCell is one step of a single-layer [GRU].
type GRUCell struct{ Cell }

// NewGRUCell returns a cell with inputs and hidden states of the given sizes.
func NewGRUCell(in, hidden int, o GRUCellOptions) *GRUCell {
	c := &GRUCell{}
	c.construct("GRUCell", 3, in, hidden, o.NoBias)
	return c
}

// Forward runs one step from a zero state and returns the hidden state: [N in] gives [N hidden].
func (c *GRUCell) Forward(x *torch.Tensor) *torch.Tensor { return c.Step(x, nil) }

// Step returns the hidden state [N hidden] after the input x [N in]. hidden is the previous state,
// [N hidden], or nil for zeros.
func (c *GRUCell) Step(x, hidden *torch.Tensor) *torch.Tensor {
	return c.step(func(h *torch.Tensor) *torch.Tensor {
		return x.GRUCell(h, c.WeightIH, c.WeightHH, c.BiasIH, c.BiasHH)
	}, x, hidden)
}

// RNNCell is one step of a single-layer [RNN].
type RNNCell struct {
	Cell
	op string
}

// RNNCellOptions are the options of NewRNNCell.
type RNNCellOptions struct {
	ReLU   bool // max(x, 0) instead of tanh
	NoBias bool
}

// NewRNNCell returns a cell with inputs and hidden states of the given sizes.
func NewRNNCell(in, hidden int, o RNNCellOptions) *RNNCell {
	c := &RNNCell{op: "rnn_tanh_cell"}
	if o.ReLU {
		c.op = "rnn_relu_cell"
	}
	c.construct("RNNCell", 1, in, hidden, o.NoBias)
	return c
}

// Forward runs one step from a zero state and returns the hidden state: [N in] gives [N hidden].
func (c *RNNCell) Forward(x *torch.Tensor) *torch.Tensor { return c.Step(x, nil) }

// Step returns the hidden state [N hidden] after the input x [N in]. hidden is the previous state,
// [N hidden], or nil for zeros.
func (c *RNNCell) Step(x, hidden *torch.Tensor) *torch.Tensor {
	return c.step(func(h *torch.Tensor) *torch.Tensor {
		return torch.Call1(c.op, x, h, c.WeightIH, c.WeightHH, c.BiasIH, c.BiasHH)
	}, x, hidden)
}

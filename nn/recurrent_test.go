package nn_test

import (
	"errors"
	"math"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

func TestRecurrentLayersRefuseShapes(t *testing.T) {
	lstm, gru := nn.NewLSTM(4, 3, nn.LSTMOptions{}), nn.NewGRU(4, 3, nn.GRUOptions{BatchFirst: true})
	defer nn.Close(lstm)
	defer nn.Close(gru)
	rnn := nn.NewRNN(4, 3, nn.RNNOptions{})
	defer nn.Close(rnn)
	lstmCell, gruCell := nn.NewLSTMCell(4, 3, nn.LSTMCellOptions{}), nn.NewGRUCell(4, 3, nn.GRUCellOptions{})
	defer nn.Close(lstmCell)
	defer nn.Close(gruCell)
	rnnCell := nn.NewRNNCell(4, 3, nn.RNNCellOptions{})
	defer nn.Close(rnnCell)
	x, good := images(t, 5, 2, 4), images(t, 1, 2, 3)
	step := x.Select(0, 0)
	for name, run := range map[string]func() error{
		"input of an LSTM":   func() error { return lstm.Forward(images(t, 5, 2, 3)).Err() },
		"input of a GRU":     func() error { return gru.Forward(images(t, 5, 2, 3)).Err() },
		"hidden state":       func() error { y, _, _ := lstm.Run(x, images(t, 1, 7, 3), good); return y.Err() },
		"cell state":         func() error { y, _, _ := lstm.Run(x, good, images(t, 1, 2, 4)); return y.Err() },
		"state of the batch": func() error { y, _ := gru.Run(x, good); return y.Err() },
		"too few lengths":    func() error { y, _, _ := lstm.RunLengths(x, []int{5}, nil, nil); return y.Err() },
		"length of 0":        func() error { y, _ := gru.RunLengths(x, []int{2, 0, 1, 1, 1}, nil); return y.Err() },
		"length of 6":        func() error { y, _ := rnn.RunLengths(x, []int{6, 5}, nil); return y.Err() },
		"state of lengths": func() error {
			y,
				_ := rnn.RunLengths(x, []int{2, 5}, images(t, 1, 3, 3))
			return y.Err()
		},
		"state of an RNN":   func() error { y, _ := rnn.Run(x, images(t, 2, 2, 3)); return y.Err() },
		"LSTM cell's input": func() error { return lstmCell.Forward(x.Select(2, 0)).Err() },
		"LSTM cell's state": func() error {
			h, _ := lstmCell.Step(step, images(t, 2, 3), images(t, 3, 3))
			return h.Err()
		},
		"GRU cell's state": func() error { return gruCell.Step(step, images(t, 2, 4)).Err() },
		"RNN cell's state": func() error { return rnnCell.Step(step, good).Err() },
	} {
		t.Run(name, func(t *testing.T) {
			if err := run(); !errors.Is(err, cuda.ErrInvalidArgument) {
				t.Errorf("got %v, want ErrInvalidArgument", err)
			}
		})
	}
	if y, _, _ := lstm.Run(x, good, good); y.Err() != nil {
		t.Error(y.Err())
	}
	if y, _ := gru.Run(x, images(t, 1, 5, 3)); y.Err() != nil {
		t.Error(y.Err())
	}
}

// randn returns random numbers of the shape, which belong to the scope.
func randn(t *testing.T, s *torch.Scope, shape ...int64) *torch.Tensor {
	t.Helper()
	x, err := torch.Randn(cuda.CPU, torch.Float32, shape...)
	if err != nil {
		t.Fatal(err)
	}
	return s.Own(x)
}

// requireEqual fails if an element differs by more than a few roundings of float32.
func requireEqual(t *testing.T, what string, got, want *torch.Tensor) {
	t.Helper()
	g, err := got.Float64s()
	if err != nil {
		t.Fatalf("%s: %v, want no error", what, err)
	}
	w, err := want.Float64s()
	if err != nil {
		t.Fatalf("%s: %v, want no error", what, err)
	}
	if len(g) != len(w) || len(g) == 0 {
		t.Fatalf("%s: %d elements, want %d", what, len(g), len(w))
	}
	for i := range g {
		if !(math.Abs(g[i]-w[i]) <= 1e-6) {
			t.Fatalf("%s: element %d is %v, want %v", what, i, g[i], w[i])
		}
	}
}

// states are the states of a recurrent layer or cell: one tensor, or two for an LSTM.
type states [2]*torch.Tensor

// recurrentPairs are recurrent layers of one layer, and cells.
func recurrentPairs() map[string]func() (layer, cell nn.Module, run,
	step func(x *torch.Tensor, s states) (*torch.Tensor, states)) {
	type f = func(x *torch.Tensor, s states) (*torch.Tensor, states)
	return map[string]func() (layer, cell nn.Module, run, step f){
		"LSTM": func() (nn.Module, nn.Module, f, f) {
			l, c := nn.NewLSTM(4, 3, nn.LSTMOptions{}), nn.NewLSTMCell(4, 3, nn.LSTMCellOptions{})
			return l, c, func(x *torch.Tensor, s states) (*torch.Tensor, states) {
					y, h, c := l.Run(x, s[0], s[1])
					return y, states{h, c}
				}, func(x *torch.Tensor, s states) (*torch.Tensor, states) {
					h, c := c.Step(x, s[0], s[1])
					return h, states{h, c}
				}
		},
		"GRU": func() (nn.Module, nn.Module, f, f) {
			l, c := nn.NewGRU(4, 3, nn.GRUOptions{}), nn.NewGRUCell(4, 3, nn.GRUCellOptions{})
			return l, c, single(l.Run), stepped(c.Step)
		},
		"RNN": func() (nn.Module, nn.Module, f, f) {
			l, c := nn.NewRNN(4, 3, nn.RNNOptions{}), nn.NewRNNCell(4, 3, nn.RNNCellOptions{})
			return l, c, single(l.Run), stepped(c.Step)
		},
		"RNN with ReLU": func() (nn.Module, nn.Module, f, f) {
			l, c := nn.NewRNN(4, 3, nn.RNNOptions{ReLU: true}), nn.NewRNNCell(4, 3, nn.RNNCellOptions{ReLU: true})
			return l, c, single(l.Run), stepped(c.Step)
		},
	}
}

func single(run func(x, h *torch.Tensor) (*torch.Tensor, *torch.Tensor)) func(*torch.Tensor,
	states) (*torch.Tensor, states) {
	return func(x *torch.Tensor, s states) (*torch.Tensor, states) {
		y, h := run(x, s[0])
		return y, states{h}
	}
}

func stepped(step func(x, h *torch.Tensor) *torch.Tensor) func(*torch.Tensor, states) (*torch.Tensor, states) {
	return func(x *torch.Tensor, s states) (*torch.Tensor, states) {
		h := step(x, s[0])
		return h, states{h}
	}
}

// A layer continues from the states that it has returned. These equal the states after the steps of
// a cell.
func TestRecurrentLayersContinueFromTheirState(t *testing.T) {
	for name, build := range recurrentPairs() {
		t.Run(name, func(t *testing.T) {
			s := torch.NewScope(name)
			defer s.Close()
			if err := torch.ManualSeed(3); err != nil {
				t.Fatal(err)
			}
			layer, cell, run, step := build()
			defer nn.Close(layer)
			defer nn.Close(cell)
			for i, p := range nn.Parameters(cell) {
				if err := p.CopyFrom(nn.Parameters(layer)[i], torch.CopyOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			x := randn(t, s, 5, 2, 4)
			whole, last := run(x, states{})
			first, between := run(x.Narrow(0, 0, 3), states{})
			second, after := run(x.Narrow(0, 3, 2), between)
			requireEqual(t, "outputs of two parts", torch.Cat([]*torch.Tensor{first, second}, 0), whole)
			var now states
			var y *torch.Tensor
			for i := range int64(5) {
				y, now = step(x.Select(0, i), now)
				requireEqual(t, "output of a step", y, whole.Select(0, i))
			}
			for i, want := range last {
				if want != nil {
					requireEqual(t, "state after two parts", after[i], want)
					requireEqual(t, "state after steps", now[i], want.Select(0, 0))
				}
			}
		})
	}
}

// Each sequence of a padded batch has the same outputs and states as in a batch of one, starting
// from the sequence's state.
func TestRunLengthsEqualsRunOfEachSequence(t *testing.T) {
	s := torch.NewScope("lengths")
	defer s.Close()
	l := nn.NewLSTM(4, 3, nn.LSTMOptions{Bidirectional: true})
	defer nn.Close(l)
	x, h, c := randn(t, s, 5, 3, 4), randn(t, s, 2, 3, 3), randn(t, s, 2, 3, 3)
	lengths := []int{2, 5, 3}
	y, lastH, lastC := l.RunLengths(x, lengths, h, c)
	for i, n := range lengths {
		of := func(x *torch.Tensor) *torch.Tensor { return x.Narrow(1, int64(i), 1) }
		wantY, wantH, wantC := l.Run(of(x).Narrow(0, 0, int64(n)), of(h).Contiguous(torch.Contiguous),
			of(c).Contiguous(torch.Contiguous))
		requireEqual(t, "outputs", of(y).Narrow(0, 0, int64(n)), wantY)
		requireEqual(t, "hidden state", of(lastH), wantH)
		requireEqual(t, "cell state", of(lastC), wantC)
		if n < 5 {
			padding := of(y).Narrow(0, int64(n), int64(5-n))
			requireEqual(t, "outputs after the end", padding, padding.MulScalar(0))
		}
	}
}

func TestRunLengthsHoldsNoMemoryWithoutScopes(t *testing.T) {
	g := nn.NewGRU(4, 3, nn.GRUOptions{})
	defer nn.Close(g)
	x := noise(t, 5, 3, 4)
	before := torch.LiveTensors()
	y, h := g.RunLengths(x, []int{1, 5, 2}, nil)
	if err := y.Err(); err != nil {
		t.Fatal(err)
	}
	if n := torch.LiveTensors() - before; n != 2 {
		t.Errorf("%d tensors more, want the outputs and the state", n)
	}
	y.Close()
	h.Close()
}

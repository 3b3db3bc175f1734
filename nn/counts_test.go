package nn_test

import (
	"slices"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// normalisations returns three of them. The network uses the last one twice.
func normalisations() (net *nn.Sequential, norms []*nn.BatchNorm2d) {
	for range 3 {
		norms = append(norms, nn.NewBatchNorm2d(2, nn.BatchNorm2dOptions{}))
	}
	return nn.NewSequential(norms[0], norms[1], norms[2], norms[2]), norms
}

func countsOf(t *testing.T, norms []*nn.BatchNorm2d) []int64 {
	t.Helper()
	var all []int64
	for _, n := range norms {
		v, err := n.NumBatches.Int64()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, v)
	}
	return all
}

func TestEachForwardCountsABatch(t *testing.T) {
	net, norms := normalisations()
	defer nn.Close(net)
	counts := nn.NewBatchCounts(net)
	s := torch.NewScope("pass")
	defer s.Close()
	x, err := torch.Randn(cuda.CPU, torch.Float32, 2, 2, 3, 3)
	if err != nil {
		t.Fatal(err)
	}
	x = s.Own(x)
	forward := func(x *torch.Tensor) error { return net.Forward(x).Err() }
	check := func(when string, err error, want ...int64) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v, want no error", when, err)
		}
		if got := countsOf(t, norms); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", when, got, want)
		}
	}
	check("without a pass", forward(x), 1, 1, 2)
	counts.Begin(s)
	check("in a pass", forward(x), 1, 1, 3)
	check("at its end", counts.End(), 2, 2, 4)
	check("at an end without a pass", counts.End(), 2, 2, 4)
	check("behind the pass", forward(x), 3, 3, 6)

	other := torch.NewScope("another")
	defer other.Close()
	counts.Begin(s)
	check("an input of another scope", forward(x.In(other)), 4, 4, 8)
	check("at its end", counts.End(), 4, 4, 8)

	counts.Begin(s)
	nn.Train(net, false)
	check("in evaluation", forward(x), 4, 4, 8)
	check("at its end", counts.End(), 4, 4, 8)
	nn.Train(net, true)

	counts.Begin(s)
	tidy := func(in ...*torch.Tensor) *torch.Tensor { return net.Forward(in[0]) }
	check("in a Tidy of a Tidy",
		torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor { return torch.Tidy(tidy, in...) }, x).Err(), 4, 4, 9)
	check("at its end", counts.End(), 5, 5, 10)
	check("in a Tidy without a pass", torch.Tidy(tidy, x).Err(), 6, 6, 12)

	counts.Begin(s)
	if norms[1].Forward(norms[0].Forward(x).Flatten(1, -1)).Err() == nil {
		t.Error("a batch norm of an input with two dimensions: got no error, want one")
	}
	check("at the end of a pass that failed", counts.End(), 7, 6, 12)
}

package trace_test

import (
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/trace"
)

// A recording names each node of a backward pass, as LibTorch's engine does.
func TestRecordsNodesOfBackward(t *testing.T) {
	w, err := torch.Full(cuda.CPU, torch.Float32, 3, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	scope := torch.NewScope("graph")
	defer scope.Close()
	loss := w.In(scope).Tanh().Sum()
	r, err := trace.Start(trace.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := loss.Backward(); err != nil {
		t.Error(err)
	}
	tr, err := r.Stop()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range tr.Events {
		if strings.Contains(e.Name, "PassNode") {
			t.Errorf("event %+v surrounds those of the nodes", e)
		}
	}
	for _, node := range []string{"SumBackward0", "TanhBackward0", "torch::autograd::AccumulateGrad"} {
		events := 0
		for _, e := range tr.Events {
			if e.Kind == trace.Operator && strings.HasSuffix(e.Name, "evaluate_function: "+node) {
				events++
			}
		}
		if events != 1 {
			t.Errorf("%d events of evaluating %s, want 1", events, node)
		}
	}
}

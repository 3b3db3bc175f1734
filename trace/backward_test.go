package trace_test

import (
	"slices"
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
	loss := w.In(scope).Tanh().Add(w).Sum()
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
	// The addition of the leaf's two gradients belongs to the node of the second gradient.
	inside := func(e trace.Event) bool {
		return slices.ContainsFunc(tr.Events, func(node trace.Event) bool {
			return strings.Contains(node.Name, "evaluate_function") && node.Start <= e.Start && e.End() <= node.End()
		})
	}
	sums := 0
	for _, e := range tr.Events {
		if !strings.HasPrefix(e.Name, "aten::add") {
			continue
		}
		sums++
		if !inside(e) {
			t.Errorf("event %+v is in no node", e)
		}
	}
	if sums == 0 {
		t.Error("0 sums of gradients were recorded, want some")
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

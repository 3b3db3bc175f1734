package trace_test

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/trace"
)

func multiply(t *testing.T) {
	t.Helper()
	x, err := torch.Ones(cuda.CPU, torch.Float32, 8, 8)
	if err != nil {
		t.Error(err)
		return
	}
	defer x.Close()
	if err := x.MatMul(x).Close(); err != nil {
		t.Error(err)
	}
}

func TestRecordsOperatorsOfAllGoroutines(t *testing.T) {
	multiply(t)
	r, err := trace.Start(trace.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for range 3 {
		group.Go(func() { multiply(t) })
	}
	group.Wait()
	tr, err := r.Stop()
	if err != nil {
		t.Fatal(err)
	}
	multiply(t)
	products := 0
	for _, e := range tr.Events {
		if e.Name == "aten::matmul" && e.Kind == trace.Operator {
			products++
			if e.Device != trace.Host || e.Start < 0 || e.Duration <= 0 || e.End() > tr.Duration {
				t.Errorf("event %+v is not within the recording of %v", e, tr.Duration)
			}
		}
	}
	if products != 3 {
		t.Errorf("%d products were recorded, want 3", products)
	}
	if !slices.IsSortedFunc(tr.Events, func(a, b trace.Event) int { return int(a.Start - b.Start) }) {
		t.Error("the events are in another order, want them sorted by their start")
	}
	if d := time.Since(tr.Begin); d < tr.Duration || d > time.Hour {
		t.Errorf("the recording began %v ago and took %v", d, tr.Duration)
	}
	if _, err := r.Stop(); !errors.Is(err, trace.ErrStopped) {
		t.Errorf("a second Stop: got %v, want ErrStopped", err)
	}
}

func TestOneRecordingAtATime(t *testing.T) {
	r, err := trace.Start(trace.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := trace.Start(trace.Options{}); err == nil {
		t.Error("a second Start: got no error, want one")
	}
	if _, err := r.Stop(); err != nil {
		t.Fatal(err)
	}
}

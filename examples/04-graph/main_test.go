package main

import (
	"bytes"
	"context"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/torch"
)

// The sequences also run on the CPU, and clip computes the right norm.
func TestSequences(t *testing.T) {
	scope := torch.NewScope("test")
	defer scope.Close()
	all, err := sequences(cuda.CPU, scope)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		t.Run(s.Name, func(t *testing.T) {
			if err := s.fn(); err != nil {
				t.Error(err)
			}
			if !strings.Contains(peer, "('"+s.peer+"', ") {
				t.Errorf("peer.py has no %s, want every step of main.go", s.peer)
			}
		})
	}
	g, err := torch.FromFloat32s([]float32{3, 4})
	if err != nil {
		t.Fatal(err)
	}
	g = scope.Own(g)
	zero, err := torch.Zeros(cuda.CPU, torch.Float32)
	if err != nil {
		t.Fatal(err)
	}
	if err := clip(scope.Own(zero), []*torch.Tensor{g}); err != nil {
		t.Fatal(err)
	}
	if v, err := g.Norm().Float64(); err != nil || math.Abs(v-1) > 1e-5 {
		t.Errorf("the norm after clipping is %v, %v, want 1, nil", v, err)
	}
}

func TestRun(t *testing.T) {
	var out bytes.Buffer
	err := run(context.Background(), &lesson.Lesson{Out: &out}, 3)
	if cuda.DeviceCount() == 0 {
		if !errors.Is(err, cuda.ErrNoDevice) {
			t.Fatalf("without a GPU: %v, want cuda.ErrNoDevice", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	text := out.String()
	for _, want := range []string{"replayed: 9\n", "FixedArguments: refused: ", "tensor of 5: 25\n",
		"into the input: 25\n", "before the replay: 49\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

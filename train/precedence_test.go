package train_test

import (
	"errors"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

func TestPrecedenceOnTheCPUOnlyCalls(t *testing.T) {
	failure := errors.New("failure")
	if err := train.WithPrecedence(cuda.CPU, func() error { return failure }); err != failure {
		t.Errorf("%v, want %v", err, failure)
	}
}

// The stream of WithPrecedence has a higher priority than the default one. So has the stream on
// which graphs are captured.
func TestPrecedence(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	x, err := torch.Zeros(device, torch.Float32, 4)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	priority := func(of string) {
		t.Helper()
		stream, err := cuda.GetCurrentCUDAStream(device)
		if err != nil {
			t.Fatal(err)
		}
		if p, err := stream.Priority(); p != -1 || err != nil {
			t.Errorf("%s has the priority %d, want -1: %v", of, p, err)
		}
	}
	var graphed *torch.Graphed
	failure := errors.New("failure")
	err = train.WithPrecedence(device, func() error {
		priority("the stream")
		graphed = torch.NewGraphed(func(in []*torch.Tensor) ([]*torch.Tensor, error) {
			priority("the stream of a Graphed")
			return []*torch.Tensor{in[0].NoGrad().AddScalar(1)}, nil
		}, torch.GraphedOptions{})
		if _, err := graphed.Call(x); err != nil {
			return err
		}
		graph, err := cuda.Capture(cuda.CaptureOptions{Stream: cuda.DefaultStream(device)}, func() error {
			priority("the stream of a capture")
			return x.NoGrad().AddScalar_(1).Err()
		})
		if err != nil {
			return err
		}
		return errors.Join(graph.Close(), graphed.Close(), failure)
	})
	if !errors.Is(err, failure) {
		t.Errorf("%v, want the function's error", err)
	}
	after, err := cuda.GetCurrentCUDAStream(device)
	if err != nil || after != cuda.DefaultStream(device) {
		t.Errorf("the current stream is %v afterwards: %v", after, err)
	}
}

// The stream sanitizer finds no race between work before, in and after WithPrecedence. The test
// also runs on devices that compute nothing.
func TestPrecedenceIsOrdered(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	cudatest.NoFindings(t)
	x, err := torch.Zeros(device, torch.Float32, 4)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	err = errors.Join(
		x.Fill_(1).Err(),
		train.WithPrecedence(device, func() error { return x.MulScalar_(3).Err() }),
		x.AddScalar_(4).Err(),
		device.Synchronize(),
	)
	if err != nil {
		t.Fatal(err)
	}
}

// The values are correct even if delays slow down the work that must finish first.
func TestPrecedenceKeepsTheOrderOfValues(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	x, err := torch.Zeros(device, torch.Float32, 4)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	// In the first round the device waits while kernels are loaded, which may hide a missing wait.
	// So there are two rounds.
	for range 2 {
		err := errors.Join(x.Zero_().Err(), device.Synchronize())
		if err != nil {
			t.Fatal(err)
		}
		cudatest.Delay(t, cuda.DefaultStream(device), 200*time.Millisecond)
		if err := x.Fill_(1).Err(); err != nil {
			t.Fatal(err)
		}
		err = train.WithPrecedence(device, func() error {
			stream, err := cuda.GetCurrentCUDAStream(device)
			if err != nil {
				return err
			}
			if err := x.MulScalar_(3).Err(); err != nil {
				return err
			}
			cudatest.Delay(t, stream, 200*time.Millisecond)
			return x.AddScalar_(4).Err()
		})
		if err != nil {
			t.Fatal(err)
		}
		if values, err := x.Float32s(); err != nil || values[0] != 7 {
			t.Errorf("%v, want 7: %v", values, err)
		}
	}
}

package torch_test

import (
	"errors"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

func TestCopyPeerRefusesWrongArguments(t *testing.T) {
	x, err := torch.Ones(cuda.CPU, torch.Float32, 4)
	must(t, x, err)
	side := cuda.DefaultStream(0)
	one := []*torch.Tensor{x}
	if err := torch.CopyPeer(one, side, nil, side); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("different lengths: got %v, want ErrInvalidArgument", err)
	}
	want := cuda.ErrInvalidArgument // a tensor on the host
	if cuda.DeviceCount() == 0 {
		want = cuda.ErrNoDevice
	}
	if err := torch.CopyPeer(one, side, one, side); !errors.Is(err, want) {
		t.Errorf("host tensors: got %v, want %v", err, want)
	}
}

// CopyPeer between two streams, of two GPUs if the machine has them: the copy waits for the
// computation of its source, and reads of the result wait for the copy.
func TestCopyPeer(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	receiver := cuda.Device(cuda.DeviceCount() - 1)
	const n = 1 << 20
	src, err := torch.Zeros(gpu, torch.Float32, n)
	must(t, src, err)
	dst, err := torch.Zeros(receiver, torch.Float32, n)
	must(t, dst, err)
	from, err := cuda.NewOwnedStream(gpu, cuda.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	to, err := cuda.NewOwnedStream(receiver, cuda.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	compute := [2]cuda.Stream{cuda.DefaultStream(gpu), cuda.DefaultStream(receiver)}
	for round := range 20 {
		if err := src.Fill_(float64(round)).Err(); err != nil {
			t.Fatal(err)
		}
		for _, err := range []error{
			from.Wait(compute[0]),
			to.Wait(compute[1]),
			torch.CopyPeer([]*torch.Tensor{dst}, to.Stream, []*torch.Tensor{src}, from.Stream),
			compute[0].Wait(from.Stream),
			compute[1].Wait(to.Stream),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
		got, err := dst.Sum().Float64()
		if err != nil || got != float64(round)*n {
			t.Fatalf("round %d: the sum is %v, want %v (%v)", round, got, float64(round)*n, err)
		}
	}
}

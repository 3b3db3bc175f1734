package torch_test

import (
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// TestBoundedStreamLeavesMultiprocessors: a product on a stream that is bounded to 16
// multiprocessors takes several times as long as on all of them.
func TestBoundedStreamLeavesMultiprocessors(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	took := func(o cuda.StreamOptions) (best time.Duration) {
		s, err := cuda.NewOwnedStream(0, o)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		begun, ended := timedEvent(t), timedEvent(t)
		err = cuda.WithStream(s.Stream, func() error {
			scope := torch.NewScope("products")
			defer scope.Close()
			a, err := torch.TensorOptions{Device: 0, DType: torch.Float32, Scope: scope}.Zeros(4096, 4096)
			if err != nil {
				return err
			}
			for range 4 { // the first one chooses an algorithm
				if err := begun.Record(s.Stream); err != nil {
					return err
				}
				if product := a.MatMul(a); product.Err() != nil {
					return product.Err()
				}
				if err := ended.Record(s.Stream); err != nil {
					return err
				}
				if err := s.Synchronize(); err != nil {
					return err
				}
				d, err := cuda.Elapsed(begun, ended)
				if err != nil {
					return err
				}
				if best == 0 || d < best {
					best = d
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return best
	}
	all, some := took(cuda.StreamOptions{}), took(cuda.StreamOptions{MaxMultiprocessors: 16})
	if t.Logf("%v on all multiprocessors, %v on 16", all, some); some < 3*all {
		t.Errorf("a product takes %v on all multiprocessors, and %v on 16, want at least %v",
			all, some, 3*all)
	}
}

func timedEvent(t *testing.T) *cuda.Event {
	t.Helper()
	e, err := cuda.NewEvent(cuda.EventOptions{Timing: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

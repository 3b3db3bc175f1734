package torch_test

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Goroutines use a tensor while another goroutine closes it: each use returns the value or
// ErrClosed, and the reference is freed once. With -race and under the address sanitizer, this test
// proves the handle's counting.
func TestCloseRacesWithOperators(t *testing.T) {
	for _, scoped := range []bool{false, true} {
		t.Run(fmt.Sprintf("scoped=%v", scoped), func(t *testing.T) {
			before := settled(t)
			y := floats(t, []float32{1, 2, 3, 4})
			for range 50 {
				x, err := torch.Ones(cuda.CPU, torch.Float32, 4)
				if err != nil {
					t.Fatal(err)
				}
				stop := x.Close
				if scoped {
					s := torch.NewScope("race")
					x = s.Own(x)
					stop = s.Close
				}
				var wg sync.WaitGroup
				start := make(chan struct{})
				for range 4 {
					wg.Go(func() {
						<-start
						for {
							z := x.Add(y)
							if err := z.Err(); err != nil {
								if !errors.Is(err, torch.ErrClosed) {
									t.Error(err)
								}
								return
							}
							v, err := z.Float32s()
							if err != nil {
								// The scope may have ended meanwhile.
								if !errors.Is(err, torch.ErrClosed) {
									t.Error(err)
								}
							} else if v[3] != 5 {
								t.Errorf("got %v, want 5", v)
							}
							z.Close()
						}
					})
				}
				wg.Go(func() {
					<-start
					runtime.Gosched()
					stop()
				})
				close(start)
				wg.Wait()
			}
			y.Close()
			if live := torch.LiveTensors(); live != before {
				t.Errorf("%d more references than before, want 0", live-before)
			}
		})
	}
}

func TestGarbageCollectorFreesForgottenTensors(t *testing.T) {
	before, caught := settled(t), torch.Caught()
	func() {
		for range 10 {
			if _, err := torch.Ones(cuda.CPU, torch.Float32, 2); err != nil {
				t.Fatal(err)
			}
		}
		s := torch.NewScope("forgotten")
		x, err := torch.Ones(cuda.CPU, torch.Float32, 2)
		if err != nil {
			t.Fatal(err)
		}
		x = s.Own(x)
		for range 4 {
			x = x.Add(x)
		}
		x.Close()
	}()
	if !collect(func() bool { return torch.LiveTensors() == before }) {
		t.Errorf("%d references remain", torch.LiveTensors()-before)
	}
	if got := torch.Caught() - caught; got != 14 {
		t.Errorf("caught %d, want 14: 10 without a scope and 4 open tensors of the scope", got)
	}
}

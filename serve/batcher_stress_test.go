package serve_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

// TestEveryCallReturnsItsOwnRowOnce lets 64 goroutines send requests of both classes to three
// workers, and cancels a part of them at random points. Some runs fail, some have no memory. Every
// call must return its own row or the right error, and the counts must agree with the calls. A
// batch of the large rows is written by several goroutines.
func TestEveryCallReturnsItsOwnRowOnce(t *testing.T) {
	t.Run("small rows", func(t *testing.T) { eachCallReturnsItsOwnRowOnce(t, 2, 60) })
	t.Run("large rows", func(t *testing.T) { eachCallReturnsItsOwnRowOnce(t, 1<<17, 30) })
}

// eachCallReturnsItsOwnRowOnce sends rows of that many float32 numbers.
func eachCallReturnsItsOwnRowOnce(t *testing.T, columns int64, calls int) {
	cudatest.NoLeaks(t)
	const goroutines = 64
	failure := errors.New("a failure of the model")
	var runs atomic.Int64
	o := rowOptions(func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
		switch n := runs.Add(1); {
		case n > 30 && n%11 == 0:
			return nil, failure
		case n > 300 && x.Shape()[0] > 4:
			return nil, cuda.ErrOutOfMemory
		}
		ends := []*torch.Tensor{x.Narrow(1, 0, 1), x.Narrow(1, columns-1, 1)}
		return []*torch.Tensor{torch.Cat(ends, 1).MulScalar(2)}, nil
	})
	o.Input.Shape = []int64{columns}
	o.MaxBatch, o.Workers, o.Queue = 8, 3, 40
	b, err := serve.NewBatcher(o)
	if err != nil {
		t.Fatal(err)
	}
	var counts serve.BatcherStats // guarded by mu
	var mu sync.Mutex
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			for i := range calls {
				err := oneCall(t.Context(), b, rng, columns, float32(g*calls+i))
				if err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, serve.ErrQueueFull) &&
					!errors.Is(err, failure) {
					t.Error(err)
				}
				mu.Lock()
				switch {
				case err == nil:
					counts.Answered++
				case errors.Is(err, context.Canceled):
					counts.Cancelled++
				case errors.Is(err, serve.ErrQueueFull):
					counts.Refused++
				default:
					counts.Failed++
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	if err := b.Close(t.Context()); err != nil {
		t.Errorf("Close: %v, want no error", err)
	}
	st := b.Stats()
	got := fmt.Sprint(st.Answered, st.Cancelled, st.Refused, st.Failed, st.Faulty, st.Waiting, st.Running)
	want := fmt.Sprint(counts.Answered, counts.Cancelled, counts.Refused, counts.Failed, 0, 0, 0)
	if got != want {
		t.Errorf("answered, cancelled, refused, failed, faulty, waiting, running: %s, want %s", got, want)
	}
	if st.Answered == 0 || st.Cancelled == 0 || st.Failed == 0 || st.Took.Count != st.Answered {
		t.Errorf("%+v, want answered, cancelled and failed requests, and a duration of each answer", st)
	}
}

// oneCall sends a row with value first and -value last, which it overwrites when Do has returned.
// Every second call is cancelled at a random time.
func oneCall(ctx context.Context, b *serve.Batcher, rng *rand.Rand, columns int64, value float32) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	values := make([]float32, columns)
	values[0], values[columns-1] = value, -value
	if rng.IntN(2) == 0 {
		turns := rng.IntN(40)
		go func() {
			for range turns {
				runtime.Gosched()
			}
			cancel()
		}()
	}
	a, err := b.Do(ctx, serve.Request{Row: serve.RowOf(values), Priority: serve.Priority(rng.IntN(2))})
	values[0], values[columns-1] = -1, -1
	if err != nil {
		return err
	}
	if v := a.Outputs[0].Values; len(a.Outputs) != 1 || v[0] != 2*value || v[1] != -2*value {
		return fmt.Errorf("the answer to %v is %v, want its double", value, v)
	}
	return nil
}

package cudatest

import (
	"runtime"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/leaks"
	"github.com/torchstream/torchstream/torch"
)

func ones(t testing.TB, d cuda.Device) *torch.Tensor {
	t.Helper()
	x, err := torch.Ones(d, torch.Float32, 1000)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestNoLeaksFindsWhatIsLeft(t *testing.T) {
	// short is the waiting time of tests whose leaks stay.
	const short = 300 * time.Millisecond
	t.Run("nothing", func(t *testing.T) {
		inner(t, func(t testing.TB) {
			noLeaks(t, grace)
			x := ones(t, cuda.CPU)
			x.Close()
			end := make(chan struct{})
			go func() { <-end }()
			t.Cleanup(func() { close(end) })
		}).mustPass(t)
	})
	t.Run("tensor", func(t *testing.T) {
		var x *torch.Tensor
		r := inner(t, func(t testing.TB) { noLeaks(t, short); x = ones(t, cuda.CPU) })
		x.Close()
		r.mustFail(t, "1 open tensor(s)")
		if leaks.Enabled {
			r.mustFail(t, "cudatest.ones")
		}
	})
	t.Run("forgotten tensor", func(t *testing.T) {
		begin := time.Now()
		r := inner(t, func(t testing.TB) {
			noLeaks(t, grace)
			ones(t, cuda.CPU)
		})
		r.mustFail(t, "1 tensor(s) that the garbage collector had to free")
		if leaks.Enabled {
			r.mustFail(t, "1 x tensor that the garbage collector had to free, made by", "cudatest.ones",
				"leaks_test.go:")
		}
		// It does not wait for objects that cannot end. A slow collector may take a part of the
		// time.
		if took := time.Since(begin); took > grace/2 {
			t.Errorf("NoLeaks took %v, want less than %v", took, grace/2)
		}
	})
	t.Run("scope", func(t *testing.T) {
		var scope *torch.Scope
		r := inner(t, func(t testing.TB) {
			noLeaks(t, short)
			scope = torch.NewScope("left")
			scope.Own(ones(t, cuda.CPU))
		})
		scope.Close()
		r.mustFail(t, "1 open tensor(s)")
	})
	t.Run("goroutine", func(t *testing.T) {
		end := make(chan struct{})
		r := inner(t, func(t testing.TB) { noLeaks(t, short); go waitFor(end) })
		close(end)
		r.mustFail(t, "cudatest.waitFor")
	})
	t.Run("threads", func(t *testing.T) {
		end := make(chan struct{})
		locked := make(chan struct{})
		r := inner(t, func(t testing.TB) {
			noLeaks(t, short)
			for range 4*runtime.NumCPU() + 32 {
				go func() {
					runtime.LockOSThread()
					locked <- struct{}{}
					<-end
				}()
				<-locked
			}
		})
		close(end)
		r.mustFail(t, "OS threads")
	})
	t.Run("pinned memory", func(t *testing.T) {
		RequireGPUs(t, 1)
		var p *cuda.Pinned
		r := inner(t, func(t testing.TB) {
			noLeaks(t, short)
			var err error
			if p, err = cuda.NewPinned(4096); err != nil {
				t.Fatal(err)
			}
		})
		p.Close()
		r.mustFail(t, "bytes of pinned memory")
	})
	t.Run("device memory", func(t *testing.T) {
		gpu := RequireGPUs(t, 1)[0]
		var x *torch.Tensor
		r := inner(t, func(t testing.TB) { noLeaks(t, short); x = ones(t, gpu) })
		x.Close()
		r.mustFail(t, "bytes of memory on cuda:0", "1 open tensor(s)")
	})
	t.Run("event", func(t *testing.T) {
		RequireGPUs(t, 1)
		inner(t, func(t testing.TB) {
			noLeaks(t, short)
			if _, err := cuda.NewEvent(cuda.EventOptions{}); err != nil {
				t.Fatal(err)
			}
		}).mustFail(t, "1 event(s) that the garbage collector")
	})
	t.Run("forgotten pinned memory", func(t *testing.T) {
		RequireGPUs(t, 1)
		inner(t, func(t testing.TB) {
			noLeaks(t, short)
			if _, err := cuda.NewPinned(4096); err != nil {
				t.Fatal(err)
			}
		}).mustFail(t, "1 pinned buffer(s)")
	})
	t.Run("graph", func(t *testing.T) {
		gpu := RequireGPUs(t, 1)[0]
		x := ones(t, gpu)
		defer x.Close()
		inner(t, func(t testing.TB) {
			noLeaks(t, short)
			if _, err := cuda.Capture(cuda.CaptureOptions{}, func() error { return x.Fill_(1).Err() }); err != nil {
				t.Fatal(err)
			}
		}).mustFail(t, "1 graph(s) that the garbage collector")
	})
	t.Run("owned stream", func(t *testing.T) {
		gpu := RequireGPUs(t, 1)[0]
		inner(t, func(t testing.TB) {
			noLeaks(t, short)
			if _, err := cuda.NewOwnedStream(gpu, cuda.StreamOptions{}); err != nil {
				t.Fatal(err)
			}
		}).mustFail(t, "1 owned stream(s)")
	})
	t.Run("stream of the test", func(t *testing.T) {
		gpu := RequireGPUs(t, 1)[0]
		inner(t, func(t testing.TB) {
			noLeaks(t, grace)
			s := Stream(t, gpu)
			var x *torch.Tensor
			if err := cuda.WithStream(s, func() error { x = ones(t, gpu); return x.Close() }); err != nil {
				t.Fatal(err)
			}
		}).mustPass(t)
	})
}

func waitFor(end chan struct{}) { <-end }

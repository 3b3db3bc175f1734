package serve_test

import (
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

// TestSanitizerOfRequests checks that the stream sanitizer finds nothing in concurrent calls on
// separate streams. The images include some for the GPU, some for the host, and some that the GPU
// returns to the host. The test also runs on devices that compute nothing.
func TestSanitizerOfRequests(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	cudatest.NoFindings(t)
	images := append(photos(t)[:4], uploads(t)...)
	d := newDecoder(t, serve.Options{Device: device, OnDevice: true})
	var all sync.WaitGroup
	for g := range 3 {
		stream := cudatest.Stream(t, device)
		all.Go(func() {
			err := cuda.WithStream(stream, func() error {
				for i := range 8 {
					scope := torch.NewScope("request")
					defer scope.Close()
					x, _ := d.Batch(t.Context(), scope, images[(7*g+i)%len(images):][:4]...)
					if x != nil && x.MulScalar(2).Err() != nil {
						t.Error(x.Err())
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if err := device.Synchronize(); err != nil {
		t.Fatal(err)
	}
	d.Close()
	if d.Stats().Decoded == 0 {
		t.Error("the GPU has decoded 0 images, want at least 1")
	}
}

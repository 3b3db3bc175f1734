package serve_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// late is a Run on a GPU whose results come late, so that a missing edge shows: twice the input.
func late(t *testing.T, device cuda.Device, delay time.Duration) serve.Run {
	return func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
		s, err := cuda.GetCurrentCUDAStream(device)
		if err != nil {
			return nil, err
		}
		cudatest.Delay(t, s, delay)
		return []*torch.Tensor{x.MulScalar(2)}, nil
	}
}

// TestGPURowsAreReadAfterTheirBatch sends rows through workers on several streams whose results
// come late. Every request must get its own row, from graphs and without them.
func TestGPURowsAreReadAfterTheirBatch(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	o := serve.BatcherOptions{Model: always(late(t, device, 2*time.Millisecond)), Devices: []cuda.Device{device},
		Workers: 3, MaxBatch: 8, Queue: 64, Input: tensor.Spec{DType: torch.Float32, Shape: []int64{2}}}
	first, err := serve.NewBatcher(o) // the process's first capture leaves memory of LibTorch
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, noGraphs := range map[string]bool{"graphs": false, "no graphs": true} {
		t.Run(name, func(t *testing.T) {
			cudatest.NoLeaks(t)
			o := o
			o.NoGraphs = noGraphs
			b := newBatcher(t, o)
			var all sync.WaitGroup
			for g := range 32 {
				all.Go(func() {
					for i := range 12 {
						value := float32(100*g + i)
						a, err := b.Do(t.Context(), row(value))
						if err != nil || computes(device) {
							wantRow(t, result{a, err}, value, 2)
						}
					}
				})
			}
			all.Wait()
			st := b.Stats()
			batches := int64(0)
			for _, bucket := range st.Buckets {
				batches += bucket.Batches
			}
			if want := map[bool]int64{false: batches, true: 0}[noGraphs]; st.Replays != want || batches == 0 {
				t.Errorf("%d of %d batches were replays, want %d", st.Replays, batches, want)
			}
		})
	}
}

// TestGPUImagesEqualHost compares images in batches on a GPU with a Decoder's batches of one image
// on the CPU, decoded on the host and on the GPU. Some images are for the host only, and some are
// faulty.
func TestGPUImagesEqualHost(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	images := append(photos(t)[:12], uploads(t)...)
	o := serve.Options{Decode: decode.Options{Transform: transform.Eval(40, 32)}}
	o.Device = cuda.CPU
	host := newDecoder(t, o)
	want := make([][]float32, len(images)) // nil for faulty images
	for i, image := range images {
		if x, err := host.Batch(t.Context(), nil, image); err == nil {
			values, err := x.Float32s()
			if err != nil {
				t.Fatal(err)
			}
			want[i] = values
			x.Close()
		}
	}
	for name, onDevice := range map[string]bool{"host": false, "device": true} {
		t.Run(name, func(t *testing.T) {
			o := o
			o.OnDevice = onDevice
			b := newBatcher(t, serve.BatcherOptions{Images: o, Devices: []cuda.Device{device}, MaxBatch: 8, Queue: len(images),
				Model: always(late(t, device, time.Millisecond))})
			var all sync.WaitGroup
			for i, image := range images {
				all.Go(func() {
					for range 4 {
						a, err := b.Do(t.Context(), serve.Request{Image: image})
						if (err == nil) != (want[i] != nil) {
							t.Errorf("image %d: error %v, want one: %v", i, err, want[i] == nil)
							return
						}
						if err != nil || !computes(device) {
							continue
						}
						got := a.Outputs[0].Values
						for j := range got {
							got[j] /= 2
						}
						if !slices.Equal(got, want[i]) {
							t.Errorf("image %d has other values than on the host", i)
						}
					}
				})
			}
			all.Wait()
		})
	}
}

// TestSanitizerOfBatcher checks that the stream sanitizer finds nothing in batches of images on
// several workers, with graphs and without them. The test also runs on devices that compute
// nothing.
func TestSanitizerOfBatcher(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	images := append(photos(t)[:4], uploads(t)...)
	for name, noGraphs := range map[string]bool{"graphs": false, "no graphs": true} {
		t.Run(name, func(t *testing.T) {
			cudatest.NoFindings(t)
			b := newBatcher(t, serve.BatcherOptions{Images: serve.Options{OnDevice: true}, Queue: len(images),
				Devices: []cuda.Device{device}, MaxBatch: 4, NoGraphs: noGraphs, Workers: 3,
				Model: always(func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
					return []*torch.Tensor{x.MulScalar(2)}, nil
				})})
			var all sync.WaitGroup
			for _, image := range images {
				all.Go(func() {
					for range 8 {
						_, _ = b.Do(t.Context(), serve.Request{Image: image}) // other tests check the error
					}
				})
			}
			all.Wait()
		})
	}
}

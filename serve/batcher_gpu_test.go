package serve_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
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

// TestGPULargeRowsAreWhole sends rows of 512 KiB, of which several goroutines write a batch to the
// pinned memory of a worker, while the model of another one runs. The last element of each row must
// arrive as the first one does.
func TestGPULargeRowsAreWhole(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	const columns = 1 << 17
	b := newBatcher(t, serve.BatcherOptions{Model: always(late(t, device, time.Millisecond)), MaxBatch: 16,
		Devices: []cuda.Device{device}, Queue: 64, Input: tensor.Spec{DType: torch.Float32, Shape: []int64{columns}}})
	var all sync.WaitGroup
	for g := range 48 {
		all.Go(func() {
			values := make([]float32, columns)
			for i := range 8 {
				value := float32(100*g + i)
				values[0], values[columns-1] = value, -value
				a, err := b.Do(t.Context(), serve.Request{Row: serve.RowOf(values)})
				if err != nil {
					t.Error(err)
					return
				}
				got := a.Outputs[0].Values
				if computes(device) && (got[0] != 2*value || got[columns-1] != -2*value) {
					t.Errorf("a row from %g to %g: %g and %g, want their doubles", value, -value, got[0], got[columns-1])
				}
			}
		})
	}
	all.Wait()
}

// TestTwoGPUsServeOneQueue sends rows to two GPUs, each with its weight.
func TestTwoGPUsServeOneQueue(t *testing.T) {
	devices := cudatest.RequireGPUs(t, 2)
	var weights []*torch.Tensor
	for _, d := range devices {
		w, err := torch.Full(d, torch.Float32, 2, 1)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.Close() })
		weights = append(weights, w)
	}
	b := newBatcher(t, serve.BatcherOptions{Devices: devices, MaxBatch: 4, Queue: 64,
		Input: tensor.Spec{DType: torch.Float32, Shape: []int64{2}},
		Model: func(d cuda.Device) (serve.Run, error) {
			return func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
				s, err := cuda.GetCurrentCUDAStream(d)
				if err != nil {
					return nil, err
				}
				cudatest.Delay(t, s, 2*time.Millisecond)
				return []*torch.Tensor{x.Mul(weights[d])}, nil
			}, nil
		}})
	var mu sync.Mutex
	answers := map[cuda.Device]int{} // guarded by mu
	var all sync.WaitGroup
	for g := range 32 {
		all.Go(func() {
			for i := range 12 {
				value := float32(100*g + i)
				a, err := b.Do(t.Context(), row(value))
				if err != nil || computes(a.Device) {
					wantRow(t, result{a, err}, value, 2)
				}
				mu.Lock()
				answers[a.Device]++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	if computes(devices[0]) && (answers[devices[0]] == 0 || answers[devices[1]] == 0) {
		t.Errorf("the GPUs have answered %v requests, want some from each", answers)
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
// several workers, with graphs and without them. The model's weight is made on the default stream
// just before. The test also runs on devices that compute nothing.
func TestSanitizerOfBatcher(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	images := append(photos(t)[:4], uploads(t)...)
	for name, noGraphs := range map[string]bool{"graphs": false, "no graphs": true} {
		t.Run(name, func(t *testing.T) {
			cudatest.NoFindings(t)
			weight, err := torch.Full(device, torch.Float32, 2, 1)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { weight.Close() })
			b := newBatcher(t, serve.BatcherOptions{Images: serve.Options{OnDevice: true}, Queue: len(images),
				Devices: []cuda.Device{device}, MaxBatch: 4, NoGraphs: noGraphs, Workers: 3,
				Model: always(func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
					return []*torch.Tensor{x.Mul(weight)}, nil
				})})
			var all sync.WaitGroup
			for _, image := range images {
				all.Go(func() {
					for i := range 8 {
						ctx, cancel := context.WithCancel(t.Context())
						go func() {
							for range 1000 * i {
								runtime.Gosched()
							}
							cancel() // some requests wait then, some are being read, some run
						}()
						_, _ = b.Do(ctx, serve.Request{Image: image}) // other tests check the error
					}
				})
			}
			all.Wait()
		})
	}
}

// TestGPUOutOfMemoryHalvesBucket limits the device's memory so that the model runs with four rows
// and not with eight. A graph of four rows also needs room for the first run of two.
func TestGPUOutOfMemoryHalvesBucket(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	for name, c := range map[string]struct {
		noGraphs  bool
		rows      int64 // of which the device has memory
		wantBatch int
	}{
		"no graphs": {true, 6, 4}, "graphs": {false, 7, 4}, "graphs of half the size": {false, 6, 2},
	} {
		t.Run(name, func(t *testing.T) {
			const perRow = 256 << 20
			limitMemory(t, device, c.rows*perRow)
			log := slog.New(slog.NewTextHandler(writer(func(text []byte) { t.Logf("%s", text) }), nil))
			b := newBatcher(t, serve.BatcherOptions{Devices: []cuda.Device{device}, Workers: 1, NoGraphs: c.noGraphs,
				Logger: log, MaxBatch: 16, Input: tensor.Spec{DType: torch.Float32, Shape: []int64{2}},
				Model: always(func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
					large, err := torch.TensorOptions{Device: device, Scope: x.Scope()}.Empty(x.Shape()[0], perRow)
					if err != nil {
						return nil, err
					}
					defer large.Close()
					return []*torch.Tensor{x.MulScalar(2)}, nil
				})})
			var all sync.WaitGroup
			for i := range 12 {
				all.Go(func() {
					a, err := b.Do(t.Context(), row(float32(i)))
					if err != nil {
						t.Error(err)
					} else if computes(device) {
						wantRow(t, result{a, err}, float32(i), 2)
					}
				})
			}
			all.Wait()
			if n := b.Stats().Devices[0].MaxBatch; n != c.wantBatch {
				t.Errorf("the maximum batch is %d, want %d", n, c.wantBatch)
			}
		})
	}
}

// limitMemory lets the device allocate this number of bytes more during the test.
func limitMemory(t *testing.T, device cuda.Device, bytes int64) {
	t.Helper()
	if err := cuda.EmptyCache(); err != nil {
		t.Fatal(err)
	}
	properties, err := device.Properties()
	if err != nil {
		t.Fatal(err)
	}
	memory, err := device.Memory()
	if err != nil {
		t.Fatal(err)
	}
	if err := device.LimitMemory(float64(memory.Reserved+bytes) / float64(properties.TotalBytes)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := device.LimitMemory(1); err != nil {
			t.Error(err)
		}
	})
}

// inOwnProcess reports whether this is a process for the test alone. Otherwise it runs such a
// process, in which the test must pass.
func inOwnProcess(t *testing.T) bool {
	t.Helper()
	const variable = "TORCHSTREAM_TEST_LOSES_GPU"
	if os.Getenv(variable) != "" {
		return true
	}
	only := "^" + strings.ReplaceAll(t.Name(), "/", "$/^") + "$"
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run", only, "-test.v", "-test.timeout", "90s")
	child.Env = append(os.Environ(), variable+"=1")
	if text, err := child.CombinedOutput(); err != nil || !strings.Contains(string(text), "--- PASS: "+t.Name()+" ") {
		t.Errorf("the process that loses its GPU ended with %v, want a passed test:\n%s", err, text)
	}
	return false
}

// TestGPUFailureLosesTheDevice makes the GPU fail for good, in a process for this test alone. The
// batcher's other device, the CPU, must continue, and Close must return.
func TestGPUFailureLosesTheDevice(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	if !computes(device) {
		t.Skip("no kernel fails on a device that computes nothing")
	}
	if !inOwnProcess(t) {
		return
	}
	b, err := serve.NewBatcher(serve.BatcherOptions{Devices: []cuda.Device{device, cuda.CPU}, Workers: 2, MaxBatch: 4,
		Input: tensor.Spec{DType: torch.Float32, Shape: []int64{2}},
		Model: func(d cuda.Device) (serve.Run, error) {
			table, err := torch.Full(d, torch.Float32, 7, 16)
			return func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
				index := x.Narrow(1, 0, 1).Reshape(-1).ToDType(torch.Int64)
				return []*torch.Tensor{table.NoGrad().IndexSelect(0, index)}, nil
			}, err
		}})
	if err != nil {
		t.Fatal(err)
	}
	for range 200 { // the CPU takes some of them, and refuses the index
		if _, err = b.Do(t.Context(), row(1e6)); errors.Is(err, serve.ErrDeviceLost) {
			break
		}
	}
	if !errors.Is(err, serve.ErrDeviceLost) || !strings.Contains(err.Error(), device.String()) {
		t.Fatalf("rows that make a kernel fail: %v, want ErrDeviceLost with the GPU's name", err)
	}
	for range 20 {
		a, err := b.Do(t.Context(), row(3))
		if err != nil || a.Device != cuda.CPU || a.Outputs[0].Values[0] != 7 {
			t.Fatalf("after the loss: %v from %v, %v, want 7 from cpu", a.Outputs, a.Device, err)
		}
	}
	if st := b.Stats(); st.Devices[0].Lost == nil || st.Devices[1].Lost != nil || b.Err() != nil {
		t.Errorf("devices %+v, Err %v, want the GPU lost and the CPU not, nil", st.Devices, b.Err())
	}
	if err := b.Close(t.Context()); err != nil {
		t.Errorf("Close: %v, want no error", err)
	}
}

// TestGPUFailureOfTheFirstBatchIsAnError makes the GPU fail for good while a batcher warms up, each
// time in a process for this alone. NewBatcher must return the error.
func TestGPUFailureOfTheFirstBatchIsAnError(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	if !computes(device) {
		t.Skip("no kernel fails on a device that computes nothing")
	}
	for name, noGraphs := range map[string]bool{"graphs": false, "operators": true} {
		t.Run(name, func(t *testing.T) {
			if !inOwnProcess(t) {
				return
			}
			b, err := serve.NewBatcher(serve.BatcherOptions{Devices: []cuda.Device{device}, MaxBatch: 4, NoGraphs: noGraphs,
				Input: tensor.Spec{DType: torch.Float32, Shape: []int64{2}},
				Model: func(d cuda.Device) (serve.Run, error) {
					table, err := torch.Full(d, torch.Float32, 7, 16)
					return func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
						index := x.Narrow(1, 0, 1).Reshape(-1).AddScalar(1e6).ToDType(torch.Int64)
						return []*torch.Tensor{table.NoGrad().IndexSelect(0, index)}, nil
					}, err
				}})
			if b != nil || !errors.Is(err, cuda.ErrCUDA) || !strings.Contains(err.Error(), "the first batch of 4") {
				t.Errorf("%v, %v, want no batcher, cuda.ErrCUDA of the first batch of 4", b, err)
			}
		})
	}
}

package serve_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

const archive = "../examples/data/photos-test.tgz"

// photos returns the photographs of the archive, in its order.
func photos(t testing.TB) (images [][]byte) {
	t.Helper()
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return images
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			data, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			images = append(images, data)
		}
	}
}

func newDecoder(t testing.TB, o serve.Options) *serve.Decoder {
	t.Helper()
	d, err := serve.NewDecoder(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// contents returns the elements of a tensor, in logical order.
func contents(t testing.TB, x *torch.Tensor) []byte {
	t.Helper()
	n := x.Elements() * int64(x.DType().Size())
	b := make([]byte, n)
	if err := x.ReadBytes(b); err != nil {
		t.Fatal(err)
	}
	return b
}

// different counts the bytes of got that differ from want. Bytes that only one of them has count
// too.
func different(got, want []byte) int {
	n := max(len(got), len(want)) - min(len(got), len(want))
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			n++
		}
	}
	return n
}

// devices are the CPU, and the first GPU if there is one.
func devices() []cuda.Device {
	list := []cuda.Device{cuda.CPU}
	if cuda.DeviceCount() > 0 {
		list = append(list, 0)
	}
	return list
}

// TestBatchEqualsPrefetcher checks that a batch has the same bits, dtype and memory format as the
// prefetcher's batch of the same images.
func TestBatchEqualsPrefetcher(t *testing.T) {
	images := photos(t)
	half := transform.Train(48)
	half.DType, half.Contiguous = torch.BFloat16, true
	plain := transform.Transform{Resize: 40, Size: 32, Bytes: true}
	for name, c := range map[string]transform.Transform{"float32": transform.Eval(40, 32),
		"bfloat16, contiguous": half, "bytes": plain} {
		for _, device := range devices() {
			t.Run(name+" on "+device.String(), func(t *testing.T) {
				l, err := imageloader.Open(archive,
					imageloader.Options{Transform: c, Seed: 3, BatchSize: len(images), NoIndex: true})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				feed, err := prefetcher.New(l, prefetcher.Options{Device: device})
				if err != nil {
					t.Fatal(err)
				}
				defer feed.Close()
				d := newDecoder(t, serve.Options{Decode: decode.Options{Transform: c, Seed: 3}, Device: device})
				for b, err := range feed.Epoch(t.Context(), 0) {
					if err != nil {
						t.Fatal(err)
					}
					x, err := d.Batch(t.Context(), b.Images.Scope(), images...)
					if err != nil {
						t.Fatal(err)
					}
					format := torch.ChannelsLast
					if c.Contiguous {
						format = torch.Contiguous
					}
					if x.DType() != b.Images.DType() || !slices.Equal(x.Shape(), b.Images.Shape()) ||
						!x.IsContiguous(format) || x.Device() != device {
						t.Errorf("%v %v on %v, want %v %v", x.DType(), x.Shape(), x.Device(),
							b.Images.DType(), b.Images.Shape())
					}
					if n := different(contents(t, x), contents(t, b.Images)); n != 0 {
						t.Errorf("%d bytes of the batch differ from the prefetcher's, want 0", n)
					}
				}
			})
		}
	}
}

// TestFaultsLeaveTheOtherRows checks that good images keep their values. The error names the faulty
// images, whose pixels are 0.
func TestFaultsLeaveTheOtherRows(t *testing.T) {
	images := photos(t)[:3]
	for _, device := range devices() {
		scope := torch.NewScope("test")
		defer scope.Close()
		d := newDecoder(t, serve.Options{Decode: decode.Options{Transform: transform.Transform{Size: 16,
			Bytes: true}}, Device: device})
		want, err := d.Batch(t.Context(), scope, images...)
		if err != nil {
			t.Fatal(err)
		}
		got, err := d.Batch(t.Context(), scope, images[0], []byte("no image"), images[2])
		var faults decode.Errors
		if !errors.As(err, &faults) || len(faults) != 1 || faults[0].Image != 1 || got == nil {
			t.Fatalf("%v, %v, len(faults) %v, want an error of type decode.Errors, len(faults) = 1, "+
				"faults[0].Image = 1, got not nil", got, err, len(faults))
		}
		w, g, row := contents(t, want), contents(t, got), 3*16*16
		clear(w[row : 2*row])
		if n := different(g, w); n != 0 {
			t.Errorf("%d bytes of a batch with a bad image differ from good rows and zeros, want 0", n)
		}
		for _, uploads := range [][][]byte{{nil}, {[]byte("text"), images[0][:100]}} {
			if x, err := d.Batch(t.Context(), scope, uploads...); x != nil || !errors.As(err, &faults) ||
				len(faults) != len(uploads) {
				t.Errorf("%v, %v, len(faults) %v, want x = nil, an error of type decode.Errors, "+
					"len(faults) = %v", x, err, len(faults), len(uploads))
			}
		}
	}
}

// TestBatchFreesItsTensors checks that neither results in a scope nor failures leave a tensor
// behind.
func TestBatchFreesItsTensors(t *testing.T) {
	images := photos(t)[:2]
	for _, device := range devices() {
		d := newDecoder(t, serve.Options{Device: device})
		before := torch.LiveTensors()
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for range 3 {
			scope := torch.NewScope("request")
			for _, err := range []error{
				second(d.Batch(t.Context(), scope, images...)),
				second(d.Batch(t.Context(), scope, images[0], nil)),
				second(d.Batch(t.Context(), scope, nil, nil)),
				second(d.Batch(ended, scope, images...)),
				second(d.Batch(t.Context(), scope)),
			} {
				_ = err // other tests check it
			}
			if n := scope.Len(); n != 2 {
				t.Errorf("the scope has %d tensors, want 2", n)
			}
			scope.Close()
			x, err := d.Batch(t.Context(), nil, images...)
			if err != nil || x.Scope() != nil {
				t.Fatal(err)
			}
			x.Close()
		}
		if n := torch.LiveTensors(); n != before {
			t.Errorf("%v: %d tensors are open, %d before", device, n, before)
		}
	}
}

func second(_ *torch.Tensor, err error) error { return err }

func TestWrongOptionsAreNamed(t *testing.T) {
	for words, o := range map[string]serve.Options{
		"Planar":                         {Decode: decode.Options{Planar: true}},
		"Options.Device":                 {Device: 99},
		"Options.Workers":                {Decode: decode.Options{Workers: -1}},
		"Options.Transform: field Size ": {Decode: decode.Options{Transform: transform.Transform{Size: -1}}},
	} {
		if _, err := serve.NewDecoder(o); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", words, err)
		}
	}
}

// TestBatchesAreOrderedOnTheirStreams runs several goroutines on separate streams that have a
// backlog. Each gets the values of its own images, although all pinned memory is from one allocator
// and the host runs ahead of the copies.
func TestBatchesAreOrderedOnTheirStreams(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	images := photos(t)
	d := newDecoder(t, serve.Options{Device: device, Decode: decode.Options{Transform: transform.Eval(80, 64)}})
	batchesAreOrdered(t, d, images, valuesOf(t, d, images), 20*time.Millisecond)
}

// valuesOf returns the values of each image's own batch.
func valuesOf(t *testing.T, d *serve.Decoder, images [][]byte) (values [][]byte) {
	t.Helper()
	for _, image := range images {
		x, err := d.Batch(t.Context(), nil, image)
		if err != nil {
			t.Fatal(err)
		}
		values = append(values, contents(t, x))
		x.Close()
	}
	return values
}

// batchesAreOrdered makes 20 batches of one image on each of four delayed streams, and compares
// them.
func batchesAreOrdered(t *testing.T, d *serve.Decoder, images, want [][]byte, delay time.Duration) {
	t.Helper()
	var all sync.WaitGroup
	for g := range 4 {
		s := cudatest.Stream(t, d.Device())
		cudatest.Delay(t, s, delay)
		all.Go(func() {
			err := cuda.WithStream(s, func() error {
				scope := torch.NewScope("stream")
				defer scope.Close()
				var list []*torch.Tensor
				for i := range 20 {
					x, err := d.Batch(t.Context(), scope, images[(g+i)%len(images)])
					if err != nil {
						return err
					}
					list = append(list, x)
				}
				got := make([]byte, len(want[0]))
				for i, x := range list {
					if err := x.ReadBytes(got); err != nil {
						return err
					}
					if !bytes.Equal(got, want[(g+i)%len(images)]) {
						t.Errorf("goroutine %d, batch %d: other values", g, i)
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
}

// TestBatchDoesNotWaitForItsStream checks that Batch returns while the stream is delayed.
func TestBatchDoesNotWaitForItsStream(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	for name, onDevice := range map[string]bool{"host": false, "device": true} {
		t.Run(name, func(t *testing.T) {
			doesNotWait(t, newDecoder(t, serve.Options{Device: device, OnDevice: onDevice}))
		})
	}
}

func doesNotWait(t *testing.T, d *serve.Decoder) {
	images := photos(t)[:2]
	warm, err := d.Batch(t.Context(), nil, images...) // allocates
	if err != nil {
		t.Fatal(err)
	}
	defer warm.Close()
	s := cudatest.Stream(t, d.Device())
	err = cuda.WithStream(s, func() error {
		x, err := d.Batch(t.Context(), nil, images...) // allocates for this stream
		if err != nil {
			return err
		}
		defer x.Close()
		if err := s.Synchronize(); err != nil {
			return err
		}
		cudatest.Delay(t, s, 2*time.Second)
		y, err := d.Batch(t.Context(), nil, images...)
		if err != nil {
			return err
		}
		defer y.Close()
		if done, err := s.Query(); err != nil || done {
			t.Errorf("the stream is done (%v, %v), want Batch not to wait: no error, done = false",
				done, err)
		}
		if n := different(contents(t, y), contents(t, x)); n != 0 {
			t.Errorf("%d bytes of the batch on a busy stream differ from an idle stream's, want 0", n)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

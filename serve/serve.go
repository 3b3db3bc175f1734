// Package serve turns the encoded images of a request into a network's input on a device.
//
//	d, err := serve.NewDecoder(serve.Options{Decode: decode.Options{Transform: transform.Eval(256, 224)}})
//	...
//	scope := torch.NewScope("request")
//	defer scope.Close()
//	x, err := d.Batch(ctx, scope, upload) // float32 [1, 3, 224, 224], normalised
//	...
//	logits := net.Forward(x.NoGrad())
//
// Package decode does the work on the host, and documents limits and errors. The numbers are those
// that the prefetcher makes of a loader's batches.
//
// With Options.OnDevice a GPU decodes the baseline JPEGs, and the host everything else, into the
// same batch and with the same bits:
//
//	d, err := serve.NewDecoder(serve.Options{OnDevice: true, Decode: decode.Options{MaxBytes: 10 << 20}})
package serve

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// Options of a [Decoder]. The zero value suits networks that were trained on ImageNet, on the first
// GPU.
type Options struct {
	// Decode has the transform and the limits. Transform.Mean, Std and DType, or Bytes, are what
	// the device makes of the pixels; Contiguous is the order of the elements in memory. Planar
	// must not be set.
	Decode decode.Options
	// Device is the device of the batches. The zero value selects the first GPU, or the CPU on a
	// machine without GPUs; cuda.CPU always selects the CPU.
	Device cuda.Device
	// OnDevice leaves baseline JPEGs to the GPU, with the same pixels. Progressive JPEGs, other
	// formats, damaged images and operations that no GPU runs (package transform has which) stay
	// the host's, in the same batch. It needs a GPU.
	OnDevice bool
	// Concurrent bounds the calls of Batch whose images the GPU decodes at a time; further calls
	// wait. 0: 2. Each takes 32 MiB of pinned memory for compressed data, and 288 MiB of device
	// memory. Images that do not fit, and those of a call behind the 256th, are decoded on the
	// host.
	Concurrent int
}

// Decoder decodes images to batches on a device. Several goroutines may use it at once. Close it
// after use.
type Decoder struct {
	d       *decode.Decoder
	units   *units // nil: the host decodes
	cleanup runtime.Cleanup
	device  cuda.Device
	output  tensor.Spec
	mean    []float32 // nil for bytes
	std     []float32

	planned, again atomic.Int64 // images that the GPU was given, and those that it could not decode
}

// NewDecoder makes a decoder. It fails if an option is wrong, without the libraries, and with
// [cuda.ErrNoDevice] for a GPU that is not there.
func NewDecoder(o Options) (*Decoder, error) {
	if o.Decode.Planar {
		return nil, errors.New("serve: Options.Decode: Planar is for pixels on the host, and a tensor's layout is Transform.Contiguous: leave it out")
	}
	if o.Device == 0 && cuda.DeviceCount() == 0 {
		o.Device = cuda.CPU
	}
	if o.Concurrent == 0 {
		o.Concurrent = 2
	}
	switch {
	case o.Concurrent < 0 || o.Concurrent > maxConcurrent:
		return nil, fmt.Errorf("serve: Options.Concurrent is %d, not in 1 to %d", o.Concurrent, maxConcurrent)
	case o.OnDevice && o.Device == cuda.CPU:
		return nil, fmt.Errorf("serve: Options.OnDevice: the device is the CPU: leave OnDevice out, and the host decodes: %w", cuda.ErrNoDevice)
	}
	d, err := decode.New(o.Decode)
	if err != nil {
		return nil, fmt.Errorf("serve: %w", err)
	}
	t := d.Transform()
	size := int64(t.Size)
	s := &Decoder{d: d, device: o.Device, output: tensor.Spec{DType: t.DType, Shape: []int64{3, size, size}}}
	if !t.Contiguous {
		s.output.MemoryFormat = tensor.ChannelsLast
	}
	if !t.Bytes {
		s.mean, s.std = t.Mean[:], t.Std[:]
	}
	probe, err := torch.EmptySpec(s.device, s.output, 1)
	if err != nil {
		_ = d.Close() // never fails
		return nil, fmt.Errorf("serve: Options.Device: %w", err)
	}
	err = probe.Close()
	if err == nil && o.OnDevice {
		err = s.openUnits(o.Concurrent)
	}
	if err != nil {
		_ = d.Close()
		return nil, fmt.Errorf("serve: %w", err)
	}
	return s, nil
}

// maxConcurrent is the maximum of Options.Concurrent.
const maxConcurrent = 64

func (d *Decoder) openUnits(n int) (err error) {
	if d.units, err = newUnits(d.device, n); err != nil {
		return fmt.Errorf("memory of Options.OnDevice: %w", err)
	}
	d.cleanup = runtime.AddCleanup(d, (*units).close, d.units)
	return nil
}

// Close frees the memory for decoding. Batches stay valid. Calls in progress end as usual, or with
// [decode.ErrClosed] if they have not begun all of their images; later ones return that error.
// Close never fails, and further calls do nothing. Memory that a call uses is freed at its end.
func (d *Decoder) Close() error {
	d.cleanup.Stop()
	if d.units != nil {
		d.units.close()
	}
	return d.d.Close()
}

// Device returns the device of the batches: a GPU, or cuda.CPU.
func (d *Decoder) Device() cuda.Device { return d.device }

// Stats are what the GPU has done for a [Decoder] with Options.OnDevice, and the memory for it. All
// are 0 without.
type Stats struct {
	Decoded      int64 // images that the GPU was given
	DecodedAgain int64 // of Decoded: images that it could not decode, so that the host did
	DeviceBytes  int64 // memory on the GPU for decoding; 0 after Close, once the calls in progress end
	PinnedBytes  int64 // pinned memory for compressed data; likewise
}

// Stats returns the figures so far. It may be called at any time, also after Close.
func (d *Decoder) Stats() Stats {
	s := Stats{Decoded: d.planned.Load(), DecodedAgain: d.again.Load()}
	if d.units != nil {
		s.DeviceBytes, s.PinnedBytes = d.units.device.Load(), d.units.pinned.Load()
	}
	return s
}

// Batch decodes one image or several and returns them as [N, 3, Size, Size] of Transform.DType,
// normalised (or uint8 with Transform.Bytes), in channels-last memory unless Transform.Contiguous
// is set. The scope owns the tensor; with nil the caller does, who closes it.
//
// On a GPU the pixels are copied from pinned memory and normalised on the current stream: Batch
// returns when the work is queued, and waits for the decoding alone. The pinned memory, of
// LibTorch's allocator, is used again when the copy is done. Batch is not for functions that are
// captured as a graph, whose replays would not decode.
//
// With Options.OnDevice a stream of the Decoder decodes, without waiting for the current stream,
// which waits for it. Batch also waits for it, because only then is it known which images the GPU
// could not decode; ctx does not end that wait.
//
// If some of several images are at fault, Batch returns the tensor, in which their pixels are zero
// before the normalisation, and a [decode.Errors] that names them. After every other error, and if
// all images are at fault, the tensor is nil.
func (d *Decoder) Batch(ctx context.Context, scope *torch.Scope, images ...[]byte) (*torch.Tensor, error) {
	if len(images) == 0 {
		return nil, errors.New("serve: Batch: no images")
	}
	defer runtime.KeepAlive(d) // its cleanup would end the units
	if d.units != nil {
		return d.batchOnDevice(ctx, scope, images)
	}
	return d.batchOnHost(ctx, scope, images)
}

// batchOnHost is Batch without a unit.
func (d *Decoder) batchOnHost(ctx context.Context, scope *torch.Scope, images [][]byte) (*torch.Tensor, error) {
	host, faults, err := d.pixels(ctx, images)
	if err != nil {
		return nil, err
	}
	defer host.Close()
	out, err := d.uploaded(scope, host)
	if err != nil {
		return nil, fmt.Errorf("serve: %w", err)
	}
	return out, faults
}

// hostPixels returns a tensor on the host for the pixels of n images, uint8 [n Size Size 3]. It is
// pinned if the device is a GPU.
func (d *Decoder) hostPixels(n int) (*torch.Tensor, error) {
	size := d.output.Shape[1]
	o := torch.TensorOptions{Device: cuda.CPU, DType: torch.Uint8, Pinned: d.device != cuda.CPU}
	return o.Empty(int64(n), size, size, 3)
}

// pixels decodes to a tensor on the host. faults are those of a part of the images.
func (d *Decoder) pixels(ctx context.Context, images [][]byte) (host *torch.Tensor, faults, err error) {
	if host, err = d.hostPixels(len(images)); err != nil {
		return nil, nil, fmt.Errorf("serve: %w", err)
	}
	memory, err := host.Bytes()
	if err == nil {
		err = d.d.Decode(ctx, memory, images...)
	}
	var list decode.Errors
	if errors.As(err, &list) && len(list) < len(images) {
		return host, err, nil
	}
	if err != nil {
		host.Close()
		return nil, nil, err
	}
	return host, nil, nil
}

// uploaded queues the copy to the device and the finish on the current stream.
func (d *Decoder) uploaded(scope *torch.Scope, host *torch.Tensor) (_ *torch.Tensor, err error) {
	if d.device == cuda.CPU {
		return d.finish(scope, host)
	}
	src, err := torch.Empty(d.device, torch.Uint8, host.Shape()...)
	if err != nil {
		return nil, err
	}
	defer src.Close() // in the stream's order
	if err := copyPixels(src, host); err != nil {
		return nil, err
	}
	return d.finish(scope, src)
}

// finish queues the way from pixels to a batch on the current stream.
func (d *Decoder) finish(scope *torch.Scope, src *torch.Tensor) (*torch.Tensor, error) {
	o := torch.TensorOptions{Device: d.device, DType: d.output.DType, Scope: scope, MemoryFormat: d.output.MemoryFormat}
	out, err := o.Empty(append([]int64{src.Shape()[0]}, d.output.Shape...)...)
	if err == nil {
		err = d.normalise(out, src)
	}
	return closeOnError(out, err)
}

// normalise queues the way from pixels to a batch's numbers, or to bytes in the batch's layout.
func (d *Decoder) normalise(out, src *torch.Tensor) error {
	if d.mean != nil {
		return torch.NormalizeImages(out, src, d.mean, d.std)
	}
	channelsFirst := src.Permute(0, 3, 1, 2)
	defer channelsFirst.Close()
	return copyPixels(out, channelsFirst)
}

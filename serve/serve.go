// Package serve converts the encoded images of requests to a network's input on a device, and makes
// batches of requests.
//
//	d, err := serve.NewDecoder(serve.Options{Decode: decode.Options{Transform: transform.Eval(256, 224)}})
//	...
//	scope := torch.NewScope("request")
//	defer scope.Close()
//	x, err := d.Batch(ctx, scope, upload) // float32 [1, 3, 224, 224], normalised
//	...
//	logits := net.Forward(x.NoGrad())
//
// Package decode does the work on the host, and documents limits and errors. The values equal a
// prefetcher's batches of the same images.
//
// With Options.OnDevice a GPU decodes the baseline JPEGs, and the host everything else, into the
// same batch and with the same bits:
//
//	d, err := serve.NewDecoder(serve.Options{OnDevice: true, Decode: decode.Options{MaxBytes: 10 << 20}})
//
// A [Batcher] makes batches of the requests of many goroutines, runs a model on them, and gives
// each request its row of the outputs. It bounds its queue, cancels requests by context, and
// drains.
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
	// Decode sets the transform and the limits. Transform.Mean, Std, DType and Bytes select the
	// values that the device computes from the pixels. Contiguous selects the memory format. Planar
	// must not be set.
	Decode decode.Options
	// Device is the device of the batches. The zero value selects the first GPU, or the CPU on a
	// machine without GPUs; cuda.CPU always selects the CPU.
	Device cuda.Device
	// OnDevice decodes baseline JPEGs on the GPU, to the same pixels. The host still decodes
	// progressive JPEGs, other formats and damaged images, and it runs operations that no GPU
	// supports (listed in package transform). All images share one batch. OnDevice needs a GPU.
	OnDevice bool
	// Concurrent is the maximum number of Batch calls whose images the GPU decodes at a time.
	// Further calls wait. 0 means 2. Each call uses 32 MiB of pinned memory for compressed data and
	// 288 MiB of device memory. The host decodes images that do not fit, and all images of a call
	// after the 256th.
	Concurrent int
}

// Decoder decodes images to batches on a device. Several goroutines may use it at once. The caller
// must close it.
type Decoder struct {
	d       *decode.Decoder
	units   *units // nil: the host decodes
	cleanup runtime.Cleanup
	device  cuda.Device
	output  tensor.Spec
	mean    []float32 // nil for bytes
	std     []float32

	planned, again atomic.Int64 // images sent to the GPU, and how many of them the host decoded again
}

// NewDecoder makes a decoder. It fails if an option is invalid or the libraries are missing. If the
// GPU does not exist, the error is [cuda.ErrNoDevice].
func NewDecoder(o Options) (*Decoder, error) {
	if o.Decode.Planar {
		return nil, errors.New("serve: Options.Decode: Planar is for pixels on the host, and a tensor's " +
			"layout is Transform.Contiguous: leave it out")
	}
	if o.Device == 0 {
		o.Device = cuda.Default()
	}
	if o.Concurrent == 0 {
		o.Concurrent = 2
	}
	switch {
	case o.Concurrent < 0 || o.Concurrent > maxConcurrent:
		return nil, fmt.Errorf("serve: Options.Concurrent is %d, not in 1 to %d", o.Concurrent, maxConcurrent)
	case o.OnDevice && o.Device == cuda.CPU:
		return nil, fmt.Errorf("serve: Options.OnDevice: the device is the CPU: leave OnDevice out, and "+
			"the host decodes: %w", cuda.ErrNoDevice)
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

// Close frees the memory for decoding. Batches stay valid. Calls in progress finish normally, or
// return [decode.ErrClosed] if some of their images have not been started. Later calls return that
// error. Close never fails, and further calls do nothing. Memory in use by a call is freed when the
// call ends.
func (d *Decoder) Close() error {
	d.cleanup.Stop()
	if d.units != nil {
		d.units.close()
	}
	return d.d.Close()
}

// Device returns the device of the batches: a GPU, or cuda.CPU.
func (d *Decoder) Device() cuda.Device { return d.device }

// Stats counts the GPU's work for a [Decoder], and the memory for that work. Without
// Options.OnDevice all fields are 0.
type Stats struct {
	Decoded      int64 // images sent to the GPU
	DecodedAgain int64 // images in Decoded that the GPU could not decode and the host decoded
	DeviceBytes  int64 // GPU memory for decoding; 0 after Close, once the calls in progress end
	PinnedBytes  int64 // pinned memory for compressed data; also 0 after Close
}

// Stats returns the current figures. It may be called at any time, also after Close.
func (d *Decoder) Stats() Stats {
	s := Stats{Decoded: d.planned.Load(), DecodedAgain: d.again.Load()}
	if d.units != nil {
		s.DeviceBytes, s.PinnedBytes = d.units.device.Load(), d.units.pinned.Load()
	}
	return s
}

// Batch decodes one or more images and returns them as [N, 3, Size, Size] of Transform.DType,
// normalised (or uint8 with Transform.Bytes). The memory format is channels-last unless
// Transform.Contiguous is set. The scope owns the tensor. If scope is nil, the caller owns it and
// must close it.
//
// On a GPU the pixels are copied from pinned memory and normalised on the current stream. Batch
// returns when this work is queued; it waits only for the decoding. LibTorch's allocator reuses the
// pinned memory when the copy is done. Do not call Batch in a function that is captured as a graph:
// replays would not decode.
//
// With Options.OnDevice the GPU decodes on a stream of the Decoder, which does not wait for the
// current stream. The current stream waits for the decoding. Batch waits for it too, because only
// then does it know which images the GPU could not decode. Cancelling ctx does not end that wait.
//
// If some but not all of several images are faulty, Batch returns the tensor and a [decode.Errors]
// that names them. The pixels of faulty images are zero before the normalisation. After any other
// error, and if all images are faulty, the tensor is nil.
func (d *Decoder) Batch(ctx context.Context, scope *torch.Scope, images ...[]byte) (*torch.Tensor, error) {
	if len(images) == 0 {
		return nil, errors.New("serve: Batch: no images")
	}
	return d.batch(ctx, images, func(pixels *torch.Tensor) (*torch.Tensor, error) { return d.finish(scope, pixels) })
}

// finisher queues the conversion of pixels on the device to a batch, on the current stream.
type finisher func(pixels *torch.Tensor) (*torch.Tensor, error)

// into is Batch that writes the rows of out. The error names faulty images. If all are faulty, out
// is unchanged and ok is false, as after any other error.
func (d *Decoder) into(ctx context.Context, out *torch.Tensor, images [][]byte) (ok bool, err error) {
	x, err := d.batch(ctx, images, func(pixels *torch.Tensor) (*torch.Tensor, error) {
		return out, d.normalise(out, pixels)
	})
	return x != nil, err
}

// batch is Batch with the given finish. It closes the tensor of finish if an error follows.
func (d *Decoder) batch(ctx context.Context, images [][]byte, finish finisher) (*torch.Tensor, error) {
	defer runtime.KeepAlive(d) // otherwise d's cleanup could close the units during the call
	if d.units != nil {
		return d.batchOnDevice(ctx, finish, images)
	}
	return d.batchOnHost(ctx, finish, images)
}

// batchOnHost is Batch without a unit.
func (d *Decoder) batchOnHost(ctx context.Context, finish finisher, images [][]byte) (*torch.Tensor, error) {
	host, faults, err := d.pixels(ctx, images)
	if err != nil {
		return nil, err
	}
	defer host.Close()
	out, err := d.uploaded(finish, host)
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

// pixels decodes to a tensor on the host. faults names the faulty images if the others were
// decoded.
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

// uploaded queues the copy to the device and the normalisation on the current stream.
func (d *Decoder) uploaded(finish finisher, host *torch.Tensor) (_ *torch.Tensor, err error) {
	if d.device == cuda.CPU {
		return finish(host)
	}
	src, err := torch.Empty(d.device, torch.Uint8, host.Shape()...)
	if err != nil {
		return nil, err
	}
	defer src.Close() // queued work may still use the memory: it is reused in stream order
	if err := copyPixels(src, host); err != nil {
		return nil, err
	}
	return finish(src)
}

// finish queues the conversion of pixels to a batch on the current stream.
func (d *Decoder) finish(scope *torch.Scope, src *torch.Tensor) (*torch.Tensor, error) {
	o := torch.TensorOptions{Device: d.device, DType: d.output.DType, Scope: scope, MemoryFormat: d.output.MemoryFormat}
	out, err := o.Empty(append([]int64{src.Shape()[0]}, d.output.Shape...)...)
	if err == nil {
		err = d.normalise(out, src)
	}
	return closeOnError(out, err)
}

// normalise queues the conversion of pixels to normalised values, or to bytes in the batch's
// layout.
func (d *Decoder) normalise(out, src *torch.Tensor) error {
	if d.mean != nil {
		return torch.NormalizeImages(out, src, d.mean, d.std)
	}
	channelsFirst := src.Permute(0, 3, 1, 2)
	defer channelsFirst.Close()
	return copyPixels(out, channelsFirst)
}

// Package decode decodes single images to pixels on the host, for example the photographs in a
// server's requests, or any image that is in memory and not in an archive. It decodes the formats
// of package imageloader, applies the same transforms, and gives the same pixels. It needs the
// image library but not LibTorch.
//
//	d, err := decode.New(decode.Options{Transform: transform.Eval(256, 224)})
//	...
//	pixels := make([]byte, d.Bytes())
//	err = d.Decode(ctx, pixels, upload)
//
// A Decoder may serve all requests of a program at once. Its options limit the bytes, the pixels
// and the memory of requests, whatever the requests contain. If images are at fault, the error is
// an [Errors]. Each fault in it has a kind, so that a server can choose its answer. All other
// errors are faults of the machine or of the program.
package decode

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/order"
	"github.com/torchstream/torchstream/internal/origin"
)

// Options of a [Decoder]. The zero value resizes and centre-crops images to 224. Each limit has a
// default.
type Options struct {
	// Transform defines the pixels of an image; zero value: Eval(256, 224). Mix, which mixes the
	// samples of a batch, must be empty. Mean, Std, DType and Contiguous describe work on a device
	// and are ignored.
	Transform transform.Transform
	// Seed is the seed of random transforms. Image i of a call uses the random numbers of sample i
	// in epoch 0 of a loader with this seed, so the same call always gives the same pixels.
	Seed uint64
	// Planar writes the image as three planes, of red, green and blue [3, Size, Size]. The default
	// is pixels of three bytes [Size, Size, 3].
	Planar bool
	// Damaged selects the damaged JPEGs and PNGs that are decoded; zero value: Warned.
	Damaged DamagePolicy

	// MaxBytes is the maximum compressed size of an image; 0: 64 MiB.
	MaxBytes int64
	// MaxPixels is the maximum width * height of an image; 0: 178,956,970, as in Pillow. The limit
	// is half of it for a HEIC, and a quarter for an AVIF.
	MaxPixels int64
	// MaxMemory is the maximum memory in bytes that all calls together use for decoding at a time,
	// as estimated from the images' headers; 0: 1 GiB. An image that alone needs more fails with
	// [ErrTooLarge]. Any other image waits until enough memory is free. The limit does not include
	// the compressed bytes, the caller's pixels, or up to 16 MiB that each worker keeps for its
	// next image.
	MaxMemory int64
	// Workers is the maximum number of images that are decoded at a time, over all calls; 0:
	// GOMAXPROCS.
	Workers int
}

// DamagePolicy selects the damaged images that are decoded. It is package imageloader's type.
type DamagePolicy = codec.DamagePolicy

// The policies.
const (
	Warned  = codec.Warned  // decodes the damaged images that Pillow and torchvision decode
	Partial = codec.Partial // also decodes images that are cut off
	Refuse  = codec.Refuse  // decodes no damaged image
)

// Decoder decodes images. It is safe for concurrent use; all callers share its limits. Close it
// after use.
type Decoder struct {
	*pool
	cleanup runtime.Cleanup
}

// pool holds the resources of a Decoder. It does not refer to the Decoder, so that the cleanup of a
// Decoder that was not closed can close its pool.
type pool struct {
	made     origin.Origin
	o        Options
	compiled *transform.Compiled
	slots    *semaphore.Weighted // Workers
	memory   *semaphore.Weighted // MaxMemory
	row      int                 // bytes of a transformed image
	workers  int

	mu     sync.Mutex
	idle   []*worker
	closed bool
}

// worker decodes one image at a time.
type worker struct {
	d         *codec.Decoder
	augmenter *transform.Augmenter // nil without Transform.Ops
	source    rand.PCG
	rng       *rand.Rand
	info      imagecapi.Info
	geometry  imagecapi.Geometry
	scratch   []byte // buffer for Options.Planar
	planned   []byte // buffer for the plan of an image, aligned
}

// New makes a decoder. It fails if an option is wrong, and with [ErrNoLibrary] without the image
// library.
func New(o Options) (*Decoder, error) {
	compiled, err := transform.Compile(o.Transform)
	if err != nil {
		return nil, fmt.Errorf("decode: Options.Transform: %w", err)
	}
	if len(o.Transform.Mix) > 0 {
		return nil, errors.New("decode: Options.Transform: field Mix mixes the samples of a batch: leave it out")
	}
	o.Transform = compiled.Transform()
	if err := o.setLimits(); err != nil {
		return nil, err
	}
	if err := imagecapi.Check(); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	size := o.Transform.Size
	p := &pool{
		made: origin.New("image decoder"), o: o, compiled: compiled, row: 3 * size * size, workers: o.Workers,
		slots: semaphore.NewWeighted(int64(o.Workers)), memory: semaphore.NewWeighted(o.MaxMemory),
	}
	d := &Decoder{pool: p}
	d.cleanup = runtime.AddCleanup(d, func(p *pool) {
		p.made.Leaked()
		slog.Debug("decode: a Decoder became unreachable before Close; freed")
		p.close()
	}, p)
	return d, nil
}

// setLimits replaces limits that are 0 by their defaults, and checks them.
func (o *Options) setLimits() error {
	if o.Damaged < Warned || o.Damaged > Refuse {
		return fmt.Errorf("decode: Options.Damaged is %v, not Warned, Partial or Refuse", o.Damaged)
	}
	workers := int64(o.Workers)
	for _, limit := range []struct {
		name          string
		value         *int64
		fallback, max int64
	}{
		{"MaxBytes", &o.MaxBytes, 64 << 20, math.MaxInt32},
		{"MaxPixels", &o.MaxPixels, 178_956_970, 1 << 31},
		{"MaxMemory", &o.MaxMemory, 1 << 30, math.MaxInt64},
		{"Workers", &workers, int64(runtime.GOMAXPROCS(0)), 1 << 12},
	} {
		if *limit.value == 0 {
			*limit.value = limit.fallback
		}
		if *limit.value < 0 || *limit.value > limit.max {
			return fmt.Errorf("decode: Options.%s is %d, not in 1 to %d", limit.name, *limit.value, limit.max)
		}
	}
	o.Workers = int(workers)
	return nil
}

// Close frees the decoder's memory. A running call finishes the images that it is decoding. All
// later calls return [ErrClosed]. Close never fails, and further calls do nothing.
func (d *Decoder) Close() error {
	d.cleanup.Stop()
	d.close()
	return nil
}

func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.closed = true
	p.made.Closed()
	for _, w := range p.idle {
		w.close()
	}
	p.idle = nil
}

// Bytes returns the size of one transformed image: 3 * Size * Size.
func (d *Decoder) Bytes() int { return d.row }

// Transform returns the transform with its defaults filled in.
func (d *Decoder) Transform() transform.Transform { return d.compiled.Transform() }

// Decode decodes and transforms images. It writes the result of images[i] to dst[i*Bytes() :
// (i+1)*Bytes()], as uint8 [Size, Size, 3], or [3, Size, Size] with Options.Planar. len(dst) must
// be exactly len(images) * Bytes().
//
// If images are at fault, Decode returns [Errors], which names each of them. The pixels of these
// images are zero, and the other images are decoded. After any other error, and when ctx ends, dst
// is undefined.
//
// Before each image, Decode waits until the limits Workers and MaxMemory, which all calls share,
// allow another image. When ctx ends, Decode stops waiting, finishes the images that it has started
// to decode, and returns. Decoding one image allocates nothing in the steady state.
func (d *Decoder) Decode(ctx context.Context, dst []byte, images ...[]byte) error {
	defer runtime.KeepAlive(d) // or d's cleanup could close the pool between two images
	if err := d.room(dst, len(images)); err != nil {
		return err
	}
	p := d.pool
	if len(images) == 1 {
		return together([]error{p.decode(ctx, 0, images[0], dst)})
	}
	all := slices.Clone(images) // so that the caller's slice need not escape to the heap
	return p.each(ctx, len(all),
		func(ctx context.Context, i int) error { return p.decode(ctx, i, all[i], dst[i*p.row:][:p.row]) })
}

// room returns an error unless dst is exactly large enough for n images.
func (p *pool) room(dst []byte, n int) error {
	if len(dst) != n*p.row {
		return fmt.Errorf("decode: dst has %d bytes, and %d images of %d x %d pixels need %d",
			len(dst), n, p.o.Transform.Size, p.o.Transform.Size, n*p.row)
	}
	return nil
}

// each calls fn for the numbers 0 to n-1, several at a time. An error that is not an image's fault
// cancels the context of fn.
func (p *pool) each(ctx context.Context, n int, fn func(ctx context.Context, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	failed := make([]error, n)
	var next counter
	var running sync.WaitGroup
	for range min(n, p.workers) {
		running.Go(func() {
			for i := next.take(); i < n; i = next.take() {
				failed[i] = fn(ctx, i)
				if failed[i] != nil && faultOf(failed[i]) == nil {
					cancel(failed[i])
					return
				}
			}
		})
	}
	running.Wait()
	return together(failed)
}

// decode decodes image i of a call into its row.
func (p *pool) decode(ctx context.Context, i int, data, row []byte) error {
	err := p.with(ctx, data, math.MaxInt, func(w *worker) error {
		if err := w.draw(p, i); err != nil {
			return err
		}
		return w.pixels(p, data, row)
	})
	if f := faultOf(err); f != nil {
		f.Image = i
		clear(row)
	}
	return err
}

// draw draws the geometry and the operations of image i of a call.
func (w *worker) draw(p *pool, i int) error {
	order.Seed(&w.source, p.o.Seed, order.OfSample, 0, i)
	if err := p.compiled.Geometry(w.rng, &w.info, &w.geometry); err != nil {
		return fault(ErrUnsupported, err)
	}
	w.augmenter.Draw(w.rng)
	return nil
}

// pixels decodes with the worker's geometry, and runs the operations that its augmenter has drawn.
func (w *worker) pixels(p *pool, data, row []byte) error {
	to := row
	if p.o.Planar {
		w.scratch = grown(w.scratch, len(row))
		to = w.scratch
	}
	if err := w.d.Decode(data, &w.geometry, to, 3*p.o.Transform.Size); err != nil {
		return imageFault(err)
	}
	if w.augmenter != nil {
		if err := w.augment(to); err != nil {
			return err
		}
	}
	if p.o.Planar {
		planar(row, to)
	}
	return nil
}

// augment runs the drawn operations of Transform.Ops.
func (w *worker) augment(pixels []byte) error {
	err := w.augmenter.Run(w.rng, pixels)
	if err == nil {
		return nil
	}
	var rejected transform.FuncError
	if errors.As(err, &rejected) {
		return fault(ErrRejected, rejected.Err)
	}
	return fmt.Errorf("decode: %w", err)
}

// planar copies pixels of three bytes into three planes.
func planar(dst, src []byte) {
	n := len(src) / 3
	red, green, blue := dst[:n], dst[n:2*n], dst[2*n:3*n]
	for i := range n {
		red[i], green[i], blue[i] = src[3*i], src[3*i+1], src[3*i+2]
	}
}

// Whole decodes one image at its own size. Of the transform, it applies only ApplyEXIFOrientation.
// The pixels are in buffer if its capacity suffices. Otherwise they are in new memory, which counts
// for Options.MaxMemory while Whole runs. Pixels always have three bytes, and the caller owns them.
// Errors and waiting are the same as for [Decoder.Decode]. After an error the content of buffer is
// undefined. A side has at most 65,535 pixels.
func (d *Decoder) Whole(ctx context.Context, data, buffer []byte) (transform.Pixels, error) {
	defer runtime.KeepAlive(d)
	p := d.pool
	var image transform.Pixels
	err := p.with(ctx, data, cap(buffer), func(w *worker) error {
		info := &w.info
		if max(info.Width, info.Height) > maxSide {
			return tooLarge("side", int64(max(info.Width, info.Height)), maxSide, "pixels a side")
		}
		g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height}
		if p.o.Transform.ApplyEXIFOrientation && info.Orientation > 1 {
			// the image is stored on its side
			if g.Orientation = info.Orientation; g.Orientation >= 5 {
				g.CropWidth, g.CropHeight = info.Height, info.Width
			}
		}
		g.ResizeWidth, g.ResizeHeight = g.CropWidth, g.CropHeight
		g.WindowWidth, g.WindowHeight = g.CropWidth, g.CropHeight
		stride := 3 * int(g.CropWidth)
		pixels := grown(buffer, stride*int(g.CropHeight))
		if err := w.d.Decode(data, &g, pixels, stride); err != nil {
			return imageFault(err)
		}
		image = transform.Pixels{Pix: pixels, Width: int(g.CropWidth), Height: int(g.CropHeight), Stride: stride}
		return nil
	})
	return image, together([]error{err})
}

// maxSide is the maximum side of the image library's results.
const maxSide = 1<<16 - 1

// grown returns n bytes, in b if they fit.
func grown(b []byte, n int) []byte {
	if cap(b) < n {
		return make([]byte, n)
	}
	return b[:n]
}

// with checks an image against the limits and calls fn with a worker that has read the image's
// header. The caller has a buffer of room bytes for pixels. If the pixels need more, they count for
// MaxMemory.
func (p *pool) with(ctx context.Context, data []byte, room int, fn func(*worker) error) error {
	return p.open(ctx, data, func(w *worker) (int64, error) {
		need, err := p.need(&w.info, room)
		if err != nil {
			return 0, err
		}
		if err := acquire(ctx, p.memory, need); err != nil {
			return need, err
		}
		defer p.memory.Release(need)
		return need, fn(w)
	})
}

// open calls fn with a worker that has read an image's header. fn returns the maximum memory in
// bytes that the worker has needed.
func (p *pool) open(ctx context.Context, data []byte, fn func(*worker) (int64, error)) error {
	switch {
	case len(data) == 0:
		return fault(ErrNotImage, errors.New("it has no bytes"))
	case int64(len(data)) > p.o.MaxBytes:
		return tooLarge("MaxBytes", int64(len(data)), p.o.MaxBytes, "bytes")
	case codec.Sniff(data) == "":
		image, err := codec.NotDecoded(data)
		if image {
			return fault(ErrUnsupported, err)
		}
		return fault(ErrNotImage, err)
	}
	if err := acquire(ctx, p.slots, 1); err != nil {
		return err
	}
	defer p.slots.Release(1)
	w, err := p.take()
	if err != nil {
		return err
	}
	need := int64(0)
	defer func() { p.put(w, need) }()
	if w.info, err = codec.Header(data); err != nil {
		return imageFault(err)
	}
	need, err = fn(w)
	return err
}

// need returns the memory in bytes that decoding an image needs, or an error if the image exceeds a
// limit.
func (p *pool) need(info *imagecapi.Info, room int) (int64, error) {
	n := int64(info.Width) * int64(info.Height)
	if n > p.o.MaxPixels {
		return 0, tooLarge("MaxPixels", n, p.o.MaxPixels, "pixels")
	}
	need := memoryOf(info)
	if int64(room) < 3*n {
		need += 3 * n
	}
	if need > p.o.MaxMemory {
		return 0, tooLarge("MaxMemory", need, p.o.MaxMemory, "bytes of memory to decode it")
	}
	return need, nil
}

// acquire waits for n units of a limit. If ctx ends first, the error is its cause.
func acquire(ctx context.Context, s *semaphore.Weighted, n int64) error {
	if ctx.Err() != nil || s.Acquire(ctx, n) != nil {
		return context.Cause(ctx)
	}
	return nil
}

// take returns a worker. The caller must hold a slot.
func (p *pool) take() (*worker, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrClosed
	}
	if n := len(p.idle); n > 0 {
		w := p.idle[n-1]
		p.idle = p.idle[:n-1]
		return w, nil
	}
	w := &worker{}
	w.rng = rand.New(&w.source)
	var err error
	if w.d, err = codec.New(p.o.MaxPixels); err == nil {
		err = w.d.SetDamaged(p.o.Damaged)
	}
	if err == nil {
		w.augmenter, err = p.compiled.NewAugmenter()
	}
	if err != nil {
		w.close()
		return nil, fmt.Errorf("decode: %w", err)
	}
	return w, nil
}

// keptMemory limits the memory in bytes of an idle worker. A worker keeps the memory of its last
// image for the next one. The pool frees a worker whose last image needed more.
const keptMemory = 16 << 20

// put returns a worker to the pool. need is the memory that its last image needed.
func (p *pool) put(w *worker, need int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || need > keptMemory {
		w.close()
		return
	}
	p.idle = append(p.idle, w)
}

func (w *worker) close() {
	w.augmenter.Close()
	if w.d != nil {
		w.d.Close()
	}
}

// memoryOf estimates, from an image's header, the maximum memory in bytes that decoding the image
// needs. The figures are in docs/imageloader.md, and TestDecodingMemory of package imageloader
// measures them.
func memoryOf(i *imagecapi.Info) int64 {
	pixels, rows := int64(i.Width)*int64(i.Height), 256*int64(i.Width)
	perPixel := int64(0)
	switch i.Format {
	case imagecapi.JPEG:
		if i.Progressive {
			perPixel = 2 * int64(i.Components)
		}
	case imagecapi.PNG:
		if i.Progressive {
			perPixel = 3
		}
	case imagecapi.WebP:
		perPixel = 8
	case imagecapi.HEIC:
		perPixel = 16
	case imagecapi.AVIF:
		perPixel = 32
	default:
		perPixel = 3 // GIF, BMP and TIFF
	}
	return perPixel*pixels + rows
}

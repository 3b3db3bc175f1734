package prefetcher

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"runtime"
	"sync"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/origin"
	"github.com/torchstream/torchstream/prefetcher/internal/ring"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/trace"
)

// Source fills host memory with the samples of an epoch.
type Source interface {
	// Fields describes the tensors of one sample in host memory, for example {"images", Uint8, [224
	// 224 3]} and {"labels", Int64, []}.
	Fields() []torch.Spec
	// BatchSize returns the number of samples in a full batch.
	BatchSize() int
	// Fill produces the epoch's batches in order. It returns nil at the end of the epoch, or the
	// first error. It runs in a separate goroutine.
	//
	// lend blocks until a slot is free and returns its memory: for each field BatchSize() samples,
	// one after another. This is C memory. It starts at a multiple of 64 bytes, and still contains
	// the bytes of an earlier batch. It belongs to the source until deliver. The batches are in the
	// order of the calls of lend. Any number of goroutines may fill several lent slots at once.
	//
	// deliver hands over the slot that was lent first, with n samples (1 to BatchSize). info
	// becomes Batch.Info. deliver does not block.
	//
	// When ctx is done, or lend or deliver fails, Fill must stop its goroutines, wait for them and
	// return. The epoch ends only when Fill has returned.
	Fill(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, error),
		deliver func(n int, info any) error) error
}

// Describer is a Source whose fields need work on the device before the consumer gets them. It
// leaves this work to the prefetcher, so only bytes cross the bus, and the GPU converts them. A
// Describer does not need LibTorch.
type Describer interface {
	// Outputs describes the results of the work, one for each field, for example {"images",
	// Float32, [3 224 224], ChannelsLast}. A field needs no work if its output has the same dtype,
	// shape and memory format.
	Outputs() []tensor.Spec
	// Finishes describes the work, with one value for each field. The value for a field that needs
	// no work is ignored.
	Finishes() []tensor.Finish
}

// Finisher is a Source whose fields need work that a [Describer] cannot describe. It does the work
// itself.
type Finisher interface {
	// Outputs describes the results of the work, one for each field, for example {"images",
	// Float32, [3 224 224], ChannelsLast}. A field needs no work if its output has the same dtype,
	// shape and memory format.
	Outputs() []torch.Spec
	// Finish queues the work on the current stream and returns. The prefetcher calls it in its own
	// goroutine, always on the same OS thread, with a batch of n rows. src has the copied fields,
	// and dst the consumer's fields. dst[i] and src[i] are the same tensor if field i needs no
	// work. Finish must not wait for the device, and should not allocate on it. The tensors belong
	// to the prefetcher: Finish must neither close nor keep them.
	Finish(dst, src []*torch.Tensor) error
}

// Options are the options of [New]. The zero value suits most programs.
type Options struct {
	// Device is the device on which the batches are delivered. The zero value selects the first
	// GPU, or the CPU on a machine without GPUs. cuda.CPU always selects the CPU.
	Device cuda.Device
	// Depth is the number of device slots, at least 1. They hold batches that are in use, ready, or
	// being copied or decoded. 0 selects 2, so that the next batch is copied while the consumer
	// works on one. If the device decodes, 0 selects 3, so that two batches can be decoded while
	// the consumer works on one.
	Depth int
	// HostSlots is the number of pinned slots that the source can fill, at least 2. 0 selects Depth
	// + 1, so that the source can fill one slot while the others are being copied.
	HostSlots int
	// Decode selects where images are decoded. The zero value is Host: the source's workers decode
	// them. The comment of type [Decode] lists the images that a GPU decodes and the memory that it
	// needs.
	//
	// Use Auto if the loader's Stats.Bottleneck is imageloader.Decoding. It takes load off the
	// workers, and uses time on the GPU. Device uses more time on the GPU, and less on the host.
	// Decoding on the GPU has the lowest priority. It yields to compute on a stream whose
	// cuda.StreamOptions.Priority is -1, but not to compute on the default stream.
	Decode Decode
	// DecodeMultiprocessors limits how many of the GPU's multiprocessors decode, so that training
	// always has the others. It becomes MaxMultiprocessors in the cuda.StreamOptions of the
	// decoders' streams. 0 means no limit: the decoders' streams then only have the lowest
	// priority, which does not interrupt a kernel that is already running. A value below the
	// driver's minimum is a cuda.ErrInvalidArgument. It has no effect if the device does not
	// decode.
	DecodeMultiprocessors int
	// MaxMappedBytes is the maximum size in bytes of the parts of local archives that this
	// prefetcher pins in the page cache, so that a GPU that decodes reads them itself. 0: half of
	// the memory that is available to the machine and to the cgroup, divided by the environment's
	// LOCAL_WORLD_SIZE or by the number of GPUs. Negative: none.
	MaxMappedBytes int64
	// Priority is the priority of the stream P, as in cuda.StreamOptions. With -1 or lower, the
	// finish runs before compute that is already queued.
	Priority int
	// Trace records some batches of an epoch to a file, as a timeline of the whole process. The
	// loop pauses at the start and the end of the recording, while the profiler is set up and read
	// out. If the file can't be written, New returns an error. Close returns later errors of the
	// recording. The zero value records nothing, unless the environment requests a recording: see
	// trace.FromEnvironment.
	Trace trace.Window
	// Logger receives the prefetcher's sizes (Debug), the message that a recording was written
	// (Info), and a warning if a Prefetcher is never closed (Warn). nil discards all messages.
	Logger *slog.Logger
}

var (
	// ErrClosed means that a prefetcher was used after Close, or a batch after its turn. It is the
	// same value as cuda.ErrClosed.
	ErrClosed = cuda.ErrClosed
	// ErrRunning means that Epoch or Close was called while an epoch was running.
	ErrRunning = errors.New("an epoch is running")
	// ErrRetained means that the consumer retains so many batches that no device slot is left for
	// the next copy. It ends the epoch.
	ErrRetained = errors.New("every device slot is held by a retained batch")
)

// Prefetcher delivers a source's batches on a device, ahead of their use. It is safe for concurrent
// use, but only one epoch can run at a time.
//
// A Prefetcher must be closed. If it becomes unreachable without Close, the garbage collector
// closes it at some later time, and logs a warning to Options.Logger.
type Prefetcher struct {
	handle  handle
	source  Source
	device  cuda.Device
	slots   *slots
	starved *starved // nil on the CPU
	tracer  *tracer  // nil if nothing is to be recorded
	ring    *ring.Ring[cuda.Stream, *cuda.Event]
}

// handle records that a Prefetcher is open. Its cleanup runs if the Prefetcher is never closed.
type handle struct {
	made    origin.Origin
	cleanup runtime.Cleanup
	closed  sync.Once
}

// close records that the Prefetcher is closed. It may be called more than once.
func (h *handle) close() {
	h.cleanup.Stop()
	h.closed.Do(h.made.Closed)
}

// New allocates the slots and starts the goroutine that drives the copies. It blocks while it pins
// host memory, which takes about 0.1 s per gigabyte.
//
// The source serves one epoch at a time. The caller still owns the source: Close does not close it.
func New(source Source, o Options) (*Prefetcher, error) {
	p, err := open(source, o, func(d ringDevice) ringDevice { return d })
	if err != nil {
		return nil, fmt.Errorf("prefetcher: %w", public(err))
	}
	return p, nil
}

type ringDevice = ring.Device[cuda.Stream, *cuda.Event]

// open implements New. Tests remove an edge with wrap.
func open(source Source, o Options, wrap func(ringDevice) ringDevice) (*Prefetcher, error) {
	if source == nil {
		return nil, errors.New("the source is nil")
	}
	if o.Device == 0 {
		o.Device = cuda.Default()
	}
	s, err := newSlots(source)
	if err != nil {
		return nil, err
	}
	if s.decode, err = o.decoding(source, s); err != nil {
		return nil, err
	}
	if o.Depth == 0 {
		o.Depth = 2
		if s.decode != nil {
			o.Depth = 1 + decoders
		}
	}
	if o.HostSlots == 0 {
		o.HostSlots = max(2, o.Depth+1)
	}
	if o.Depth < 1 || o.HostSlots < 2 {
		return nil, fmt.Errorf("Options.Depth is %d and Options.HostSlots %d: they must be at least 1 and 2", o.Depth, o.HostSlots)
	}
	cfg := ring.Config{Slots: o.Depth, Hosts: o.HostSlots, Batch: int(s.batch),
		Direct: o.Device == cuda.CPU && !s.anyWork(), Range: cuda.Range}
	s.depth, s.hosts = cfg.Slots, cfg.HostSlots()
	logger := o.Logger
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	tracer, err := newTracer(o.Trace, logger)
	if err != nil {
		return nil, err
	}
	var device ringDevice
	var idle *starved
	if o.Device == cuda.CPU {
		device = &cpuDevice{slots: s}
	} else {
		idle = &starved{device: o.Device}
		s.near = o.Device
		gpu := &gpuDevice{slots: s, options: o, starved: idle}
		device = gpu
		tracer.name(gpu.streams)
	}
	device = wrap(device)
	cfg.Checked = s.decode != nil
	r, err := ring.New(device, cfg)
	if err != nil {
		return nil, err
	}
	p := &Prefetcher{handle: handle{made: origin.New("prefetcher")}, source: source, device: o.Device,
		slots: s, starved: idle, tracer: tracer, ring: r}
	logger.Debug("prefetcher: open", "device", o.Device, "device_slots", s.depth, "host_slots", s.hosts,
		"batch", s.batch)
	made := p.handle.made
	p.handle.cleanup = runtime.AddCleanup(p, func(r *ring.Ring[cuda.Stream, *cuda.Event]) {
		made.Leaked()
		made.Closed()
		logger.Warn("prefetcher: a Prefetcher became unreachable before Close; closed", "error", r.Close())
	}, r)
	return p, nil
}

// decoding returns nil if the source decodes all images.
func (o *Options) decoding(source Source, s *slots) (*decoding, error) {
	if o.Decode < Host || o.Decode > Device {
		return nil, fmt.Errorf("Options.Decode is %v: it must be Host, Auto or Device", o.Decode)
	}
	if o.DecodeMultiprocessors < 0 {
		return nil, fmt.Errorf("Options.DecodeMultiprocessors is %d: it must be at least 0", o.DecodeMultiprocessors)
	}
	if o.Decode == Host {
		return nil, nil
	}
	d, err := newDecoding(source, s)
	if err == nil && o.Device == cuda.CPU {
		d, err = nil, errors.New("the device is the CPU")
	}
	switch {
	case err != nil && o.Decode == Device:
		return nil, fmt.Errorf("Options.Decode is Device: %w", err)
	case err == nil && o.Decode == Auto && !d.source.StepsOnDevice():
		return nil, nil
	}
	if d != nil && o.Decode == Auto {
		d.mix = newMixture(int(s.batch))
	}
	return d, nil
}

// public converts the ring's errors to this package's.
func public(err error) error {
	switch {
	case errors.Is(err, ring.ErrClosed):
		return ErrClosed
	case errors.Is(err, ring.ErrRunning):
		return ErrRunning
	case errors.Is(err, ring.ErrRetained):
		return fmt.Errorf("%w: Release one before the next turn, or raise Options.Depth", ErrRetained)
	}
	return err
}

// Device returns the device of the batches: a GPU, or cuda.CPU.
func (p *Prefetcher) Device() cuda.Device { return p.device }

// Source returns the source of the batches.
func (p *Prefetcher) Source() Source { return p.source }

// Epoch returns the batches of an epoch in order. The source gets the epoch's number and uses it
// for shuffling. Every range over the sequence runs the epoch again.
//
// The sequence yields at most one error, as its last pair, with a nil batch. The error is one of
// these:
//
//   - the source's error, after all good batches before it (a panic in the source becomes an error)
//   - ctx's cause, shortly after ctx is done, whatever is in progress
//   - [ErrRunning] if another epoch is running
//   - [ErrRetained] or [ErrClosed]
//   - a failure of the device, after which the prefetcher is unusable
//
// Leaving the loop, by break, return, panic or runtime.Goexit, stops the source, waits until its
// Fill has returned, and releases everything in progress. The next epoch can start at once. A
// source that does not stop when its context is done delays the end of the loop.
//
// The loop's body runs on the current stream of its goroutine. Batches are ready on that stream,
// and their release is recorded on it.
func (p *Prefetcher) Epoch(ctx context.Context, epoch int) iter.Seq2[*Batch, error] {
	return func(yield func(*Batch, error) bool) {
		if err := p.run(ctx, epoch, yield); err != nil {
			yield(nil, err)
		}
	}
}

// run runs one epoch. It returns nil if the consumer has left the loop, because the loop then
// accepts no more pairs.
func (p *Prefetcher) run(ctx context.Context, epoch int, yield func(*Batch, error) bool) error {
	var failed error
	left := false
	fill := func(ctx context.Context, lend ring.Lend, deliver ring.Deliver) error {
		if p.slots.decode != nil {
			return p.slots.decode.fill(ctx, epoch, p.slots, lend, deliver)
		}
		return p.source.Fill(ctx, epoch, func(ctx context.Context) ([][]byte, error) {
			k, err := lend(ctx)
			if err != nil {
				return nil, public(err)
			}
			return p.slots.host[k].bytes, nil
		}, deliver)
	}
	idle := starvedEpoch{starved: p.starved}
	if p.starved != nil {
		defer idle.leave()
	}
	// Only the epoch that runs may end the recording. A second epoch is refused and must not end
	// it.
	recording := false
	turn := func() {} // ends the trace range of the current batch
	defer func() {
		turn() // the consumer may have panicked
		if recording {
			p.tracer.leave()
		}
	}()
	err := p.ring.Run(ctx, fill, func(lease *lease) bool {
		var b *Batch
		if b, failed = p.newBatch(lease, epoch); failed == nil && p.starved != nil {
			failed = idle.begin(lease.Slot)
		}
		if failed != nil {
			return false
		}
		turn = p.tracer.turn(epoch, b.Index)
		recording = p.tracer.recording()
		left = !yield(b, nil)
		turn()
		if left {
			return false
		}
		if p.starved != nil {
			failed = idle.end()
		}
		return failed == nil
	})
	runtime.KeepAlive(p)
	switch {
	case left:
		// The next call returns any later failure.
		return nil
	case failed != nil:
		return failed
	case errors.Is(err, ring.ErrClosed), errors.Is(err, ring.ErrRunning), errors.Is(err, ring.ErrRetained):
		return fmt.Errorf("prefetcher: epoch %d: %w", epoch, public(err))
	}
	return err
}

// Close releases batches that are still retained, waits until the device has finished with the
// slots, frees them, and ends the prefetcher's goroutine and its thread. While an epoch is running,
// Close does nothing and returns [ErrRunning]: first leave the loop, or cancel its context. If the
// device has failed and no epoch has returned its error, Close returns it. A second Close does
// nothing.
func (p *Prefetcher) Close() error {
	err := p.ring.Close()
	if !errors.Is(err, ring.ErrRunning) {
		p.handle.close()
		err = errors.Join(err, p.tracer.close())
	}
	runtime.KeepAlive(p)
	if err != nil {
		return fmt.Errorf("prefetcher: close: %w", public(err))
	}
	return nil
}

// String returns a description for messages, for example "prefetcher on cuda:0 with 2 slots of 256
// samples".
func (p *Prefetcher) String() string {
	if p == nil || p.slots == nil {
		return "no prefetcher"
	}
	return fmt.Sprintf("prefetcher on %v with %d slots of %d samples", p.device, p.slots.depth, p.slots.batch)
}

// Stats has counts and times since New.
type Stats struct {
	Batches, Images int64 // delivered to the consumer; Images counts samples
	Bytes           int64 // copied to the GPU; 0 on the CPU
	// CopyTime is the device time of the copies for which the source has waited so far; 0 on the
	// CPU. If the device decodes (Options.Decode), it includes the decoding.
	CopyTime time.Duration
	// Decoded is the number of images that the device was asked to decode (Options.Decode).
	// DecodedAgain is the number of these images that the device returned, because their bytes were
	// damaged or did not end where their entry points say. The host has decoded the returned
	// images.
	Decoded, DecodedAgain int64
	// Inflated is the number of the Decoded images that the device has also inflated, from members
	// of a .tgz or a zip. If the checksum of an inflated image differs from the checksum that the
	// host has read, the image also counts in DecodedAgain.
	Inflated int64
	// Mapped is the number of the Decoded images whose compressed bytes the device has read from
	// the mapping of a local archive. The host has read the bytes of all other images.
	Mapped       int64
	DecoderBytes int64 // device memory of the decoders, including their results
	// DecodeMultiprocessors is the number of the GPU's multiprocessors that may decode, according
	// to Options.DecodeMultiprocessors; 0: all.
	DecodeMultiprocessors int
	// FinishTime is the host time for queueing the finish. On the CPU it is the time for executing
	// the finish.
	FinishTime time.Duration
	Elapsed    time.Duration // in epochs

	// ConsumerWait is the time during which the consumer was idle because the next batch was not
	// ready. It should be close to zero. It includes FirstWait, the wait for the first batch of
	// each epoch.
	//
	// On a GPU, ConsumerWait is measured on the GPU. It is the time from the end of the work on one
	// batch, on the stream that is current when the turn ends, until the next batch is ready. It is
	// up to date once that work is complete. On the CPU it is the time that the loop waits.
	ConsumerWait, FirstWait time.Duration
	// HostWait is the time that the loop's goroutine has waited in Epoch. On a GPU most of it is
	// harmless: a loop that queues work faster than the GPU executes it waits here.
	HostWait time.Duration
	// SourceWait is the time that the source has waited for a free slot. A high value means that
	// the loader is faster than necessary.
	SourceWait time.Duration
}

// String returns the counts and times in one line, for example "40 batches of 10240 samples, 1470
// MiB copied in 31ms, consumer waited 2ms, loop 1.2s, source 30ms".
func (s Stats) String() string {
	return fmt.Sprintf("%d batches of %d samples, %d MiB copied in %v, consumer waited %v, loop %v, source %v",
		s.Batches, s.Images, s.Bytes>>20, s.CopyTime.Round(time.Microsecond), s.ConsumerWait.Round(time.Microsecond),
		s.HostWait.Round(time.Microsecond), s.SourceWait.Round(time.Microsecond))
}

// Stats returns the counts so far, including a running epoch.
func (p *Prefetcher) Stats() Stats {
	r := p.ring.Stats()
	s := Stats{
		Batches: r.Batches, Images: r.Samples, Elapsed: r.Elapsed,
		ConsumerWait: r.ConsumerWait, FirstWait: r.FirstWait, HostWait: r.ConsumerWait, SourceWait: r.SourceWait,
	}
	p.slots.count.addTo(&s)
	if d := p.slots.decode; d != nil {
		d.count.addTo(&s)
	}
	if p.starved != nil {
		s.ConsumerWait = r.FirstWait + p.starved.time()
	}
	runtime.KeepAlive(p)
	return s
}

// WaitShare returns the consumer's wait for data as a share of the time in epochs, from 0 to 1. It
// does not count the wait for the first batch of each epoch.
func (s Stats) WaitShare() float64 {
	if s.Elapsed <= s.FirstWait {
		return 0
	}
	return float64(s.ConsumerWait-s.FirstWait) / float64(s.Elapsed-s.FirstWait)
}

// Stall describes the bottleneck in a sentence.
func (s Stats) Stall() string {
	switch wait := s.WaitShare(); {
	case s.Batches < 2:
		return "too few batches to say what the bottleneck is"
	case wait > 0.02 && s.SourceWait > s.Elapsed/2:
		return fmt.Sprintf("the copies are the bottleneck: the consumer waits for data %.0f %% of the "+
			"time, and the loader for free slots: raise Options.Depth, or "+
			"copy fewer bytes", 100*wait)
	case wait > 0.02:
		return fmt.Sprintf("the loader is the bottleneck: the consumer waits for data %.0f %% of the time", 100*wait)
	default:
		return fmt.Sprintf("the consumer is the bottleneck, as it should be: it waits for data %.1f %% "+
			"of the time", 100*wait)
	}
}

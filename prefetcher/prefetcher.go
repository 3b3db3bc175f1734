package prefetcher

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"runtime"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/prefetcher/internal/ring"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/trace"
)

// Source fills host memory with the samples of an epoch.
type Source interface {
	// Fields describes one sample: its tensors as they lie in host memory, for example {"images",
	// Uint8, [224 224 3]} and {"labels", Int64, []}.
	Fields() []torch.Spec
	// BatchSize is how many samples a full batch has.
	BatchSize() int
	// Fill produces the epoch's batches in order, and returns nil at the end of the epoch or the
	// first error. It runs in a goroutine of its own.
	//
	// lend blocks until a slot is free and returns its memory: for each field BatchSize() samples,
	// one after the other. The memory is C memory, starts at a multiple of 64 bytes, holds what an
	// earlier batch left there, and is the source's until deliver. The order of the lend calls is
	// the order of the batches; several slots may be lent and filled at once, by any goroutines.
	//
	// deliver hands over the oldest lent slot, whose first n samples (1 to BatchSize) are filled.
	// info travels with the batch. It does not block.
	//
	// When ctx ends, or lend or deliver fail, Fill stops its goroutines, waits for them and
	// returns: the end of an epoch waits for it.
	Fill(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, error), deliver func(n int, info any) error) error
}

// Describer is a Source whose fields need work on the device before the consumer sees them, which
// the prefetcher does: the bus carries bytes, the GPU makes numbers of them. A Describer needs no
// LibTorch.
type Describer interface {
	// Outputs describes what the fields become, one for one, for example {"images", Float32, [3 224
	// 224], ChannelsLast}. A field whose output has the same dtype, shape and memory format needs
	// no work.
	Outputs() []tensor.Spec
	// Finishes describes the work, one value for each field; that of a field without work is
	// ignored.
	Finishes() []tensor.Finish
}

// Finisher is a Source whose fields need other work than a [Describer] can describe: it does the
// work itself.
type Finisher interface {
	// Outputs describes what the fields become, one for one, for example {"images", Float32, [3 224
	// 224], ChannelsLast}. A field whose output has the same dtype, shape and memory format needs
	// no work.
	Outputs() []torch.Spec
	// Finish queues the work on the current stream and returns. It is called in the prefetcher's
	// own goroutine, always on the same OS thread, with a batch of n rows: src is what was copied,
	// dst what the consumer will see. dst[i] and src[i] are one tensor where field i needs no work.
	// It must not wait for the device, and should not allocate on it. The tensors are the
	// prefetcher's: Finish neither closes nor keeps them.
	Finish(dst, src []*torch.Tensor) error
}

// Options are the options of [New]. The zero value is right for most programs.
type Options struct {
	// Device is where the batches are wanted. The zero value is the first GPU, or the CPU on a
	// machine without GPUs; cuda.CPU is always the CPU.
	Device cuda.Device
	// Depth is the number of device slots: batches that are in use or ready. 0 means 2: one that
	// the consumer works on, one that is copied meanwhile.
	Depth int
	// HostSlots is the number of pinned slots that the source can fill, at least 2. 0 means Depth +
	// 1: while copies are in flight there is one to fill.
	HostSlots int
	// Priority of the stream P, as in cuda.StreamOptions: -1 and lower lets the finish go before
	// compute that is queued already.
	Priority int
	// Trace records some batches of an epoch to a file: a timeline, of the whole process. The loop
	// stands still where the recording starts and ends, while the profiler is set up and read out.
	// A file that cannot be written is an error of New; Close returns what went wrong later. The
	// zero value records nothing, unless the environment asks for it: see trace.FromEnvironment.
	Trace trace.Window
	// Logger gets what the prefetcher has to say: its sizes (Debug), that a recording was written
	// (Info), and a Prefetcher that was never closed (Warn). nil: nothing.
	Logger *slog.Logger
}

var (
	// ErrClosed is in the error of every use of a prefetcher after Close, or of a batch after its
	// turn. It is the same value as cuda.ErrClosed.
	ErrClosed = cuda.ErrClosed
	// ErrRunning is in the error of Epoch and Close while an epoch runs.
	ErrRunning = errors.New("an epoch is running")
	// ErrRetained ends an epoch whose consumer retains so many batches that none of the device
	// slots is left to copy the next batch into.
	ErrRetained = errors.New("every device slot is held by a retained batch")
)

// Prefetcher keeps a source busy and a device fed. Its methods may be called from any goroutine,
// but there is one epoch at a time.
//
// A Prefetcher must be closed. One that becomes unreachable before is closed by the garbage
// collector, some time, and a warning goes to Options.Logger.
type Prefetcher struct {
	source  Source
	device  cuda.Device
	slots   *slots
	starved *starved // nil on the CPU
	tracer  *tracer  // nil: there is nothing to record
	ring    *ring.Ring[cuda.Stream, *cuda.Event]
	images  int // index of the field; -1: there is none
	labels  int
	cleanup runtime.Cleanup
}

// New allocates the slots and starts the goroutine that drives the copies. It blocks while host
// memory is pinned: about 0.1 s a gigabyte.
//
// The source is used by one epoch at a time, and stays the caller's: Close does not close it.
func New(source Source, o Options) (*Prefetcher, error) {
	p, err := open(source, o, func(d ringDevice) ringDevice { return d })
	if err != nil {
		return nil, fmt.Errorf("prefetcher: %w", public(err))
	}
	return p, nil
}

type ringDevice = ring.Device[cuda.Stream, *cuda.Event]

// open is New; wrap lets the tests leave out an edge.
func open(source Source, o Options, wrap func(ringDevice) ringDevice) (*Prefetcher, error) {
	if source == nil {
		return nil, errors.New("the source is nil")
	}
	if o.Device == 0 && cuda.DeviceCount() == 0 {
		o.Device = cuda.CPU
	}
	if o.Depth == 0 {
		o.Depth = 2
	}
	if o.HostSlots == 0 {
		o.HostSlots = max(2, o.Depth+1)
	}
	if o.Depth < 1 || o.HostSlots < 2 {
		return nil, fmt.Errorf("Options.Depth is %d and Options.HostSlots %d: at least 1 and 2 are needed", o.Depth, o.HostSlots)
	}
	s, err := newSlots(source)
	if err != nil {
		return nil, err
	}
	cfg := ring.Config{Slots: o.Depth, Hosts: o.HostSlots, Batch: int(s.batch), Direct: o.Device == cuda.CPU && !s.anyWork}
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
		gpu := &gpuDevice{slots: s, device: o.Device, priority: o.Priority, starved: idle}
		device = gpu
		tracer.copiesOn(&gpu.p)
	}
	r, err := ring.New(wrap(device), cfg)
	if err != nil {
		return nil, err
	}
	p := &Prefetcher{source: source, device: o.Device, slots: s, starved: idle, tracer: tracer, ring: r, images: s.field("images"), labels: s.field("labels")}
	logger.Debug("prefetcher: open", "device", o.Device, "device_slots", s.depth, "host_slots", s.hosts, "batch", s.batch)
	p.cleanup = runtime.AddCleanup(p, func(r *ring.Ring[cuda.Stream, *cuda.Event]) {
		logger.Warn("prefetcher: a Prefetcher became unreachable before Close; closed", "error", r.Close())
	}, r)
	return p, nil
}

// public turns the ring's errors into this package's.
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

// Device returns where the batches are: a GPU, or cuda.CPU.
func (p *Prefetcher) Device() cuda.Device { return p.device }

// Epoch returns the batches of an epoch in order. The number is handed to the source, which
// shuffles by it. Every range over the sequence runs the epoch anew.
//
// At most one error comes, as the last pair, with a nil batch: the source's, after all good batches
// before it (a panic in the source becomes an error); ctx's cause, at most a moment after ctx ends,
// whatever is in flight; [ErrRunning] if another epoch runs; [ErrRetained]; [ErrClosed]; or a
// failure of the device, after which the prefetcher does nothing more.
//
// Leaving the loop, by break, return, panic or runtime.Goexit, stops the source, waits until its
// Fill has returned, and releases what is in flight; the next epoch can start at once. A source
// that does not stop when its context ends holds up the end of the loop.
//
// The loop's body runs on the current stream of its goroutine: batches are ready on it, and their
// release is recorded on it.
func (p *Prefetcher) Epoch(ctx context.Context, epoch int) iter.Seq2[*Batch, error] {
	return func(yield func(*Batch, error) bool) {
		if err := p.run(ctx, epoch, yield); err != nil {
			yield(nil, err)
		}
	}
}

// run returns nil if the consumer has left: it wants no further pair.
func (p *Prefetcher) run(ctx context.Context, epoch int, yield func(*Batch, error) bool) error {
	var failed error
	left := false
	fill := func(ctx context.Context, lend ring.Lend, deliver ring.Deliver) error {
		return p.source.Fill(ctx, epoch, func(ctx context.Context) ([][]byte, error) {
			k, err := lend(ctx)
			if err != nil {
				return nil, public(err)
			}
			return p.slots.host[k].bytes, nil
		}, deliver)
	}
	if p.starved != nil {
		defer p.starved.leave()
	}
	recording := false // by this epoch: another that is refused leaves the recording alone
	turn := func() {}  // ends the range of the batch that the consumer has
	defer func() {
		turn() // the consumer may have panicked
		if recording {
			p.tracer.leave()
		}
	}()
	err := p.ring.Run(ctx, fill, func(lease *lease) bool {
		var b *Batch
		if b, failed = p.newBatch(lease, epoch); failed == nil && p.starved != nil {
			failed = p.starved.begin(lease.Slot)
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
			failed = p.starved.end()
		}
		return failed == nil
	})
	runtime.KeepAlive(p)
	switch {
	case left:
		return nil // what failed since, if anything, is returned by the next call
	case failed != nil:
		return failed
	case errors.Is(err, ring.ErrClosed), errors.Is(err, ring.ErrRunning), errors.Is(err, ring.ErrRetained):
		return fmt.Errorf("prefetcher: epoch %d: %w", epoch, public(err))
	}
	return err
}

// Close releases batches that are still retained, waits until the device is done with the slots,
// frees them, and ends the prefetcher's goroutine and its thread. While an epoch runs it does
// nothing and returns [ErrRunning]: leave the loop, or cancel its context, first. It returns the
// device's failure if no epoch has done so. Closing again does nothing.
func (p *Prefetcher) Close() error {
	err := p.ring.Close()
	if !errors.Is(err, ring.ErrRunning) {
		p.cleanup.Stop()
		err = errors.Join(err, p.tracer.close())
	}
	runtime.KeepAlive(p)
	if err != nil {
		return fmt.Errorf("prefetcher: close: %w", public(err))
	}
	return nil
}

// Stats counts since New.
type Stats struct {
	Batches, Images int64         // handed to the consumer; Images counts samples
	Bytes           int64         // copied to the GPU; 0 on the CPU
	CopyTime        time.Duration // the copies took on the device: those that the source has since waited for; 0 on the CPU
	FinishTime      time.Duration // of the host, on queueing the finish; on the CPU, on doing it
	Elapsed         time.Duration // in epochs

	// ConsumerWait is the time that the consumer had nothing to do because the next batch was not
	// there: the figure to keep near zero. On a GPU it is measured on the GPU, from the end of the
	// work on one batch (on the stream that is current when the turn ends) to the next batch's
	// readiness, and complete when that work is done; on the CPU it is the loop's wait. The loop's
	// wait before the first batch of each epoch is part of it, and FirstWait alone.
	ConsumerWait, FirstWait time.Duration
	// HostWait is the time that the loop's goroutine waited in Epoch. On a GPU most of it is no
	// loss: a loop that queues work faster than the GPU does it waits here.
	HostWait time.Duration
	// SourceWait is the time that the source waited for a free slot: much of it says that the
	// loader is faster than needed.
	SourceWait time.Duration
}

// Stats returns the counts so far, those of a running epoch included.
func (p *Prefetcher) Stats() Stats {
	r := p.ring.Stats()
	s := Stats{
		Batches: r.Batches, Images: r.Samples, Bytes: p.slots.bytes.Load(), CopyTime: time.Duration(p.slots.copyTime.Load()),
		FinishTime: time.Duration(p.slots.finishes.Load()),
		Elapsed:    r.Elapsed, ConsumerWait: r.ConsumerWait, FirstWait: r.FirstWait, HostWait: r.ConsumerWait, SourceWait: r.SourceWait,
	}
	if p.starved != nil {
		s.ConsumerWait = r.FirstWait + p.starved.time()
	}
	runtime.KeepAlive(p)
	return s
}

// WaitShare returns the share of the time in epochs, 0 to 1, that the consumer waited for data
// after the first batch of each epoch.
func (s Stats) WaitShare() float64 {
	if s.Elapsed <= s.FirstWait {
		return 0
	}
	return float64(s.ConsumerWait-s.FirstWait) / float64(s.Elapsed-s.FirstWait)
}

// Stall says in words what limits the speed.
func (s Stats) Stall() string {
	switch wait := s.WaitShare(); {
	case s.Batches < 2:
		return "too few batches to say what the bottleneck is"
	case wait > 0.02 && s.SourceWait > s.Elapsed/2:
		return fmt.Sprintf("the copies are the bottleneck: the consumer waits for data %.0f %% of the time, and the loader for free slots: raise Options.Depth, or "+
			"copy fewer bytes", 100*wait)
	case wait > 0.02:
		return fmt.Sprintf("the loader is the bottleneck: the consumer waits for data %.0f %% of the time", 100*wait)
	default:
		return fmt.Sprintf("the consumer is the bottleneck, as it should be: it waits for data %.1f %% of the time", 100*wait)
	}
}

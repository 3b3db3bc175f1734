package trace

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
)

// ErrStopped is the error of a second Stop.
var ErrStopped = errors.New("trace: the recording is already stopped")

// Options are the options of [Start]. The zero value records everything.
type Options struct {
	// NoOperators omits LibTorch's operators, each of which costs the host about a microsecond to
	// record. The recording still contains work on the GPU and CUDA calls. Without a GPU the
	// recording would be empty, so the option is ignored.
	NoOperators bool
}

// Recorder is a recording in progress.
type Recorder struct {
	mu      sync.Mutex
	begin   time.Time
	streams map[Stream]string
	stopped bool
}

// Start starts a recording of all threads and all devices. A process can run one recording at a
// time: during a recording, Start returns an error. Start blocks while the profiler sets up: about
// 0.2 s in the first call on a machine with a GPU, and a millisecond in later calls. The caller
// must stop the returned Recorder; any goroutine may do so, on any thread.
//
// The recording omits work that was queued on a device before Start, even if the work runs later.
func Start(o Options) (*Recorder, error) {
	var flags int32
	if o.NoOperators {
		flags |= capi.TraceNoOperators
	}
	begin := time.Now()
	if err := capi.StartTrace(flags); err != nil {
		return nil, fmt.Errorf("trace: start: %w", err)
	}
	return &Recorder{begin: begin}, nil
}

// NameStream names the row of a stream (a cuda.Stream) in pictures and in files for Perfetto. Two
// aliases of one pool stream share a row.
func (r *Recorder) NameStream(stream interface{ CAPI() capi.Stream }, name string) error {
	s := stream.CAPI()
	lane, err := capi.TraceLane(s)
	if err != nil {
		return fmt.Errorf("trace: name stream %q: %w", name, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.streams == nil {
		r.streams = map[Stream]string{}
	}
	r.streams[Stream{int(s.Device), lane}] = name
	return nil
}

// Stop ends the recording and returns it. Stop first waits for the work that is queued on all
// devices, so that the recording is complete, and then for the profiler, which takes some
// microseconds per event. The recording omits ranges (cuda.Range) that have not ended. A second
// Stop returns [ErrStopped].
func (r *Recorder) Stop() (*Trace, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return nil, ErrStopped
	}
	var errs []error
	for device := range capi.DeviceCount() {
		errs = append(errs, capi.SynchronizeDevice(int32(device)))
	}
	end := time.Now()
	raw, err := capi.StopTrace()
	if err = errors.Join(append(errs, err)...); err != nil {
		r.stopped = true
		return nil, fmt.Errorf("trace: stop: %w", err)
	}
	r.stopped = true
	t := &Trace{Begin: r.begin, Duration: end.Sub(r.begin), Streams: r.streams}
	launches := raw.Launches
	for _, e := range raw.Events {
		event := Event{
			Kind: Kind(e.Kind), Name: raw.Names[e.Name], Start: time.Duration(e.Start - r.begin.UnixNano()),
			Duration: time.Duration(e.Duration),
			Device:   int(e.Device), Lane: e.Lane, Bytes: max(0, e.Bytes), Correlation: e.Correlation,
		}
		if event.Kind == Kernel {
			l := launches[0]
			launches = launches[1:]
			event.Launch = Launch{l.Blocks, int(l.Threads), int(l.Registers), int(l.SharedBytes), l.Occupancy}
		}
		t.Events = append(t.Events, event)
	}
	t.sort()
	return t, nil
}

// Trace is a finished recording. It is plain data: any number of goroutines may read it, and
// programs may change, cut or construct it.
type Trace struct {
	Begin    time.Time
	Duration time.Duration
	Events   []Event           // sorted by Start
	Streams  map[Stream]string // names of streams; unnamed streams have no entry
}

// Stream identifies a stream as the profiler does: by Device and Lane of its events.
type Stream struct {
	Device int
	Lane   int64
}

// name returns the label of the stream's row.
func (t *Trace) name(s Stream) string {
	if name := t.Streams[s]; name != "" {
		return name
	}
	if s.Lane == defaultStream {
		return "default stream"
	}
	return fmt.Sprintf("stream %d", s.Lane)
}

// defaultStream is CUPTI's number of the default stream of a device's first context.
const defaultStream = 7

func (t *Trace) sort() {
	slices.SortStableFunc(t.Events, func(a, b Event) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(b.Duration, a.Duration))
	})
}

// Kind is the type of an event.
type Kind int

const (
	// Kernel is a kernel on a device.
	Kernel Kind = capi.TraceKernel
	// Copy is a copy on a device: between host and device, or between devices.
	Copy Kind = capi.TraceMemcpy
	// Set is a fill of memory on a device.
	Set Kind = capi.TraceMemset
	// Runtime is a CUDA call on the host.
	Runtime Kind = capi.TraceRuntime
	// Operator is one of LibTorch's operators on the host. It contains the operators that it calls.
	Operator Kind = capi.TraceOperator
	// Range is a named range of the program on the host.
	Range Kind = capi.TraceRange
)

func (k Kind) String() string {
	switch k {
	case Kernel:
		return "kernel"
	case Copy:
		return "copy"
	case Set:
		return "memset"
	case Runtime:
		return "runtime"
	case Operator:
		return "operator"
	case Range:
		return "range"
	case late:
		return "wait"
	}
	return fmt.Sprintf("kind %d", int(k))
}

// Host is the Device of events on the host.
const Host = capi.DeviceCPU

// Event is a recorded interval. All events use one clock.
type Event struct {
	Kind     Kind
	Name     string
	Start    time.Duration // since the start of the recording
	Duration time.Duration
	Device   int // index of the GPU, or Host
	// Lane on a device is the profiler's number of the stream, 7 for the default stream. On the
	// host it is the OS thread; for a range, the thread that started the range.
	Lane  int64
	Bytes int64 // of copies and memsets
	// Correlation is the same non-zero number in a Runtime event and in the device work that the
	// call enqueued.
	Correlation int64
	Launch      Launch // of a Kernel
}

// Launch describes the launch of a kernel. The zero value is unknown.
type Launch struct {
	Blocks      int64 // number in the grid
	Threads     int   // number in a block
	Registers   int   // number for each thread
	SharedBytes int   // shared memory of a block, static and dynamic
	// Occupancy is the theoretical occupancy, as in NVIDIA's profilers: the maximum share of a
	// multiprocessor's threads that the kernel's blocks can occupy at once. CUDA's occupancy
	// calculator (cuda_occupancy.h) computes it from the other fields.
	Occupancy float64
}

// End returns the time at which the event ended, since the start of the recording.
func (e Event) End() time.Duration { return e.Start + e.Duration }

// OnDevice reports whether the event ran on a GPU.
func (e Event) OnDevice() bool { return e.Kind == Kernel || e.Kind == Copy || e.Kind == Set }

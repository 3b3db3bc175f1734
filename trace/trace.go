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

// ErrStopped is in the error of a second Stop.
var ErrStopped = errors.New("trace: the recording was stopped before")

// Options are the options of [Start]. The zero value records everything.
type Options struct {
	// NoOperators leaves out LibTorch's operators: their observation costs the host about a
	// microsecond each. Work on the GPU and calls of CUDA are recorded all the same. Without a GPU
	// there is nothing else to record, and the option is ignored.
	NoOperators bool
}

// Recorder is a recording that runs.
type Recorder struct {
	mu      sync.Mutex
	begin   time.Time
	streams map[Stream]string
	stopped bool
}

// Start begins to record, in all threads and on all devices. There is one recording at a time in a
// process: while one runs, Start returns an error. It blocks for the set-up of the profiler: about
// 0.2 s in the first call on a machine with a GPU, and a millisecond after that. The returned
// Recorder must be stopped; any goroutine may do it, on any thread.
//
// Work that was queued on a device before Start is not recorded, even if it runs later.
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

// NameStream gives the row of a stream (a cuda.Stream) a name in pictures and in files for
// Perfetto. Two streams that the pool aliases are one row.
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

// Stop ends the recording and returns it. It first waits for the work that is queued on all
// devices, so that none of it is missing, and then, for some microseconds an event, for the
// profiler. Ranges (cuda.Range) that have not ended are left out. A second Stop is [ErrStopped].
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
	raw, names, err := capi.StopTrace()
	if err = errors.Join(append(errs, err)...); err != nil {
		r.stopped = true
		return nil, fmt.Errorf("trace: stop: %w", err)
	}
	r.stopped = true
	t := &Trace{Begin: r.begin, Duration: end.Sub(r.begin), Streams: r.streams}
	for _, e := range raw {
		t.Events = append(t.Events, Event{
			Kind: Kind(e.Kind), Name: names[e.Name], Start: time.Duration(e.Start - r.begin.UnixNano()), Duration: time.Duration(e.Duration),
			Device: int(e.Device), Lane: e.Lane, Bytes: max(0, e.Bytes), Correlation: e.Correlation,
		})
	}
	t.sort()
	return t, nil
}

// Trace is a finished recording. It is plain data: it may be read by any number of goroutines,
// changed, cut, and made up.
type Trace struct {
	Begin    time.Time
	Duration time.Duration
	Events   []Event           // by Start
	Streams  map[Stream]string // names of streams, where they have one
}

// Stream is a stream as the profiler names it: Device and Lane of its events.
type Stream struct {
	Device int
	Lane   int64
}

// name returns what a row of the stream is called.
func (t *Trace) name(s Stream) string {
	if name := t.Streams[s]; name != "" {
		return name
	}
	if s.Lane == defaultStream {
		return "default stream"
	}
	return fmt.Sprintf("stream %d", s.Lane)
}

// defaultStream is the number that CUPTI gives to the default stream of a device's first context.
const defaultStream = 7

func (t *Trace) sort() {
	slices.SortStableFunc(t.Events, func(a, b Event) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(b.Duration, a.Duration))
	})
}

// Kind says what an event is.
type Kind int

const (
	Kernel   Kind = capi.TraceKernel   // on a device
	Copy     Kind = capi.TraceMemcpy   // on a device: between host and device, or between devices
	Set      Kind = capi.TraceMemset   // on a device: memory is filled
	Runtime  Kind = capi.TraceRuntime  // on the host: a call of CUDA
	Operator Kind = capi.TraceOperator // on the host: one of LibTorch's operators; those that it calls are within it
	Range    Kind = capi.TraceRange    // on the host: a named range of the program
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
	}
	return fmt.Sprintf("kind %d", int(k))
}

// Host is the Device of events on the host.
const Host = capi.DeviceCPU

// Event is something that took time. All times are on one clock.
type Event struct {
	Kind     Kind
	Name     string
	Start    time.Duration // since the recording began
	Duration time.Duration
	Device   int   // index of the GPU, or Host
	Lane     int64 // on a device: the profiler's number of the stream, 7 for the default stream; on the host: the OS thread, for a range the one that began it
	Bytes    int64 // of copies and memsets
	// Correlation is the same number, not 0, in a Runtime event and in the device work that the
	// call enqueued.
	Correlation int64
}

// End is when the event was over.
func (e Event) End() time.Duration { return e.Start + e.Duration }

// OnDevice reports whether the event ran on a GPU.
func (e Event) OnDevice() bool { return e.Kind == Kernel || e.Kind == Copy || e.Kind == Set }

//go:build !notorch

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/torch"
)

// streamsReport is what bench streams prints. Times are host nanoseconds a call; what was not
// measured is null.
type streamsReport struct {
	Device     string                  `json:"device"`
	LibTorch   string                  `json:"libtorch"`
	CUDA       string                  `json:"cuda"`
	Go         string                  `json:"go"`
	CPUs       int                     `json:"cpus"`
	Method     streamsMethod           `json:"method"`
	Calls      map[string]*callRow     `json:"calls"`                 // by callNames
	Operators  map[string]*operatorRow `json:"operators"`             // operatorNames, on one element
	PythonNote string                  `json:"python_note,omitempty"` // why Python's figures are null, or cannot be compared
}

type streamsMethod struct {
	Statistic     string `json:"statistic"`
	Repeats       int    `json:"repeats"`
	Calls         int    `json:"calls"`          // in a repeat, of what stays on the host
	EnqueuedCalls int    `json:"enqueued_calls"` // in a repeat, of what gives the device work: fewer than its queue holds, so that the host is never held up
}

// figure is the median and the least of the repeats' means.
type figure struct {
	Median float64 `json:"ns"`
	Least  float64 `json:"min_ns"`
}

var callNames = []string{
	"empty_cgo_call", // a C function that does nothing
	"lock_unlock",    // runtime.LockOSThread and UnlockOSThread
	"get",            // cuda.GetCurrentCUDAStream
	"set",            // ts_set_cuda_stream alone
	"set_restore",    // cuda.SetCUDAStream and its restore
	"with_stream",    // cuda.WithStream of a function that does nothing; Python: with torch.cuda.stream
	"wait",           // cuda.WaitCUDAStream; Python: wait_stream
	"event_record",   // Event.Record
	"event_wait",     // Stream.WaitEvent
}

type callRow struct {
	Go        *figure  `json:"go"`
	OverEmpty *float64 `json:"over_empty_ns"` // Go's median, less that of an empty cgo call
	Python    *figure  `json:"python"`
}

var operatorNames = []string{
	"add_",
	"add",      // each result freed at once
	"add_held", // 400 results held, as a training step holds its activations, and freed together
}

type operatorRow struct {
	Call   *figure `json:"call"`   // the generic operator call from Go, of internal/capi
	Tensor *figure `json:"tensor"` // torch.Tensor's method
	CPP    *figure `json:"cpp"`    // at:: in C++
	Python *figure `json:"python"`
}

// benchStreams measures what the stream calls cost, and a small operator from Go, C++ and Python,
// all in one run.
func benchStreams(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := flags("bench streams", "Measures the host time of the stream calls, and of a one-element add from Go, from C++ and from Python. Without a GPU the stream\n"+
		"calls are left out and the operator runs on the CPU. Python's figures need a python3 that can import torch.", stderr)
	asJSON := set.Bool("json", false, "print one JSON object")
	python := set.String("python", "python3", "the Python whose torch is the peer; empty for none")
	repeats := set.Int("repeats", 31, "how often everything is measured")
	if err := parse(set, args, 0); err != nil {
		return err
	}
	if *repeats < 1 {
		return usageError{fmt.Sprintf("bench streams: -repeats %d: at least 1 is needed", *repeats)}
	}
	device := cuda.Device(0)
	if cuda.DeviceCount() == 0 {
		device = cuda.CPU
		fmt.Fprintln(stderr, "bench streams: no GPU can be used here: the stream calls are left out, and the operator runs on the CPU (torchstream doctor says more)")
	}
	report := streamsReport{
		Device: device.String(), LibTorch: capi.LibTorchVersion(), CUDA: capi.CUDAVersion(), Go: runtime.Version(), CPUs: runtime.NumCPU(),
		Method: streamsMethod{"median of the repeats' means; min_ns is the least", *repeats, 10_000, 400},
	}
	if device != cuda.CPU {
		properties, err := device.Properties()
		if err != nil {
			return err
		}
		report.Device = properties.Name
	}
	if err := report.measure(ctx, device); err != nil {
		return err
	}
	if *python == "" {
		report.PythonNote = "not asked for"
	} else if err := report.measurePython(ctx, *python, device); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		report.PythonNote = err.Error()
	}
	if *asJSON {
		return writeJSON(stdout, report)
	}
	return report.table(stdout)
}

// timed is one thing to measure: the mean nanoseconds of that many calls.
type timed struct {
	calls int
	run   func(calls int) error
	to    **figure
	means []float64
}

func (r *streamsReport) measure(ctx context.Context, device cuda.Device) error {
	var all []*timed
	// add measures calls of which the device hears nothing; enqueue those that give it work.
	add := func(to **figure, run func(calls int) error) {
		all = append(all, &timed{calls: r.Method.Calls, run: run, to: to})
	}
	enqueue := func(to **figure, run func(calls int) error) {
		all = append(all, &timed{calls: r.Method.EnqueuedCalls, run: run, to: to})
	}
	r.Calls = map[string]*callRow{}
	for _, name := range callNames {
		r.Calls[name] = &callRow{}
	}
	row := func(name string) **figure { return &r.Calls[name].Go }
	add(row("empty_cgo_call"), repeat(func() error { capi.Noop(); return nil }))
	add(row("lock_unlock"), repeat(func() error {
		runtime.LockOSThread()
		runtime.UnlockOSThread()
		return nil
	}))
	if device != cuda.CPU {
		side, err := cuda.NewStream(device, cuda.StreamOptions{})
		if err != nil {
			return err
		}
		other, err := cuda.NewStream(device, cuda.StreamOptions{})
		if err != nil {
			return err
		}
		event, err := cuda.NewEvent(cuda.EventOptions{})
		if err != nil {
			return err
		}
		defer event.Close()
		nothing := func() error { return nil }
		add(row("get"), repeat(func() error { _, err := cuda.GetCurrentCUDAStream(device); return err }))
		add(row("set"), func(calls int) error { // the bare call, on a thread that is held and put back
			return cuda.WithStream(side, func() error {
				return repeat(func() error { return capi.SetCUDAStream(side.CAPI()) })(calls)
			})
		})
		add(row("set_restore"), repeat(func() error {
			restore, err := cuda.SetCUDAStream(side)
			if err != nil {
				return err
			}
			return restore()
		}))
		add(row("with_stream"), repeat(func() error { return cuda.WithStream(side, nothing) }))
		enqueue(row("wait"), repeat(func() error { return cuda.WaitCUDAStream(side, other) }))
		enqueue(row("event_record"), repeat(func() error { return event.Record(other) }))
		enqueue(row("event_wait"), repeat(func() error { return side.WaitEvent(event) }))
	}

	x, err := torch.Ones(device, torch.Float32, 1)
	if err != nil {
		return err
	}
	defer x.Close()
	y, err := torch.Ones(device, torch.Float32, 1)
	if err != nil {
		return err
	}
	defer y.Close()
	inPlace, outOfPlace, held := &operatorRow{}, &operatorRow{}, &operatorRow{}
	r.Operators = map[string]*operatorRow{"add_": inPlace, "add": outOfPlace, "add_held": held}
	a, err := capi.EmptyTensor([]int64{1}, capi.Float32, int32(device), capi.Contiguous)
	if err != nil {
		return err
	}
	defer capi.FreeTensor(a)
	b, err := capi.EmptyTensor([]int64{1}, capi.Float32, int32(device), capi.Contiguous)
	if err != nil {
		return err
	}
	defer capi.FreeTensor(b)
	addInPlace, err := capi.FindOperator("aten::add_", "Tensor")
	if err != nil {
		return err
	}
	addOutOfPlace, err := capi.FindOperator("aten::add", "Tensor")
	if err != nil {
		return err
	}
	operands := []capi.Arg{{Kind: capi.ArgTensor, Value: 0}, {Kind: capi.ArgTensor, Value: 1}}
	tensors := []*capi.Tensor{a, b}
	enqueue(&inPlace.Call, repeat(func() error { _, err := capi.CallOperator(addInPlace, operands, tensors, nil, nil, 0, nil); return err }))
	enqueue(&inPlace.Tensor, repeat(func() error { return x.Add_(y).Err() }))
	enqueue(&outOfPlace.Call, repeat(func() error {
		var out [1]*capi.Tensor
		_, err := capi.CallOperator(addOutOfPlace, operands, tensors, nil, nil, 0, out[:])
		capi.FreeTensors(out[:])
		return err
	}))
	results := make([]*capi.Tensor, r.Method.EnqueuedCalls)
	enqueue(&held.Call, func(calls int) error {
		for i := range calls {
			if _, err := capi.CallOperator(addOutOfPlace, operands, tensors, nil, nil, 0, results[i:i+1]); err != nil {
				capi.FreeTensors(results[:i])
				return err
			}
		}
		capi.FreeTensors(results[:calls])
		return nil
	})
	// Both in a scope, as what is computed from a batch is; making it and its end are part of the
	// cost.
	scoped := func(calls int, then func(*torch.Tensor) error) error {
		scope := torch.NewScope("bench streams")
		defer scope.Close()
		in := x.In(scope)
		for range calls {
			if err := then(in.Add(y)); err != nil {
				return err
			}
		}
		return nil
	}
	enqueue(&outOfPlace.Tensor, func(calls int) error {
		return scoped(calls, func(sum *torch.Tensor) error { return errors.Join(sum.Err(), sum.Close()) })
	})
	enqueue(&held.Tensor, func(calls int) error { return scoped(calls, (*torch.Tensor).Err) })

	// One after the other, again and again: what changes in time, as the clock of the cores,
	// changes for all.
	var cppInPlace, cppOutOfPlace, cppHeld []float64
	for round := range r.Method.Repeats + 1 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		for _, t := range all {
			mean, err := t.mean(device)
			if err != nil {
				return err
			}
			if round > 0 { // the first warms up
				t.means = append(t.means, mean)
			}
		}
		in, out, hold, err := capi.BenchAdd(int32(device), r.Method.EnqueuedCalls)
		if err != nil {
			return err
		}
		if round > 0 {
			cppInPlace, cppOutOfPlace, cppHeld = append(cppInPlace, in), append(cppOutOfPlace, out), append(cppHeld, hold)
		}
	}
	for _, t := range all {
		*t.to = summary(t.means)
	}
	inPlace.CPP, outOfPlace.CPP, held.CPP = summary(cppInPlace), summary(cppOutOfPlace), summary(cppHeld)
	for name, c := range r.Calls {
		if c.Go != nil && name != "lock_unlock" {
			over := c.Go.Median - r.Calls["empty_cgo_call"].Go.Median
			c.OverEmpty = &over
		}
	}
	return nil
}

// repeat runs one call that many times, until it fails.
func repeat(call func() error) func(calls int) error {
	return func(calls int) error {
		for range calls {
			if err := call(); err != nil {
				return err
			}
		}
		return nil
	}
}

// mean starts with an idle device and does not wait for it at the end.
func (t *timed) mean(device cuda.Device) (float64, error) {
	if err := idle(device); err != nil {
		return 0, err
	}
	start := time.Now()
	err := t.run(t.calls)
	mean := float64(time.Since(start).Nanoseconds()) / float64(t.calls)
	return mean, errors.Join(err, idle(device))
}

func idle(device cuda.Device) error {
	if device == cuda.CPU {
		return nil
	}
	return device.Synchronize()
}

func summary(means []float64) *figure {
	slices.Sort(means)
	n := len(means)
	return &figure{Median: (means[(n-1)/2] + means[n/2]) / 2, Least: means[0]}
}

// pythonPeer prints one JSON object of name to means, measured as here.
const pythonPeer = `
import json, sys, time
try:
    import torch
    torch.ones  # a folder of that name would be imported as well
except (ImportError, AttributeError) as e:
    sys.exit("no torch for this Python: %s" % e)
device, repeats, calls, enqueued = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
gpu = device != "cpu"
x, y = torch.ones(1, device=device), torch.ones(1, device=device)
def sync():
    if gpu: torch.cuda.synchronize()
def add_(n):
    for _ in range(n): x.add_(y)
def add(n):
    for _ in range(n): z = x + y
def add_held(n): held = [x + y for _ in range(n)]
rows = {"add_": (add_, enqueued), "add": (add, enqueued), "add_held": (add_held, enqueued)}
if gpu:
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    event = torch.cuda.Event()
    def get(n):
        for _ in range(n): torch.cuda.current_stream()
    def with_stream(n):
        for _ in range(n):
            with torch.cuda.stream(side): pass
    def wait(n):
        for _ in range(n): side.wait_stream(other)
    def record(n):
        for _ in range(n): event.record(other)
    def event_wait(n):
        for _ in range(n): side.wait_event(event)
    rows.update(get=(get, calls), with_stream=(with_stream, calls), wait=(wait, enqueued), event_record=(record, enqueued), event_wait=(event_wait, enqueued))
means = {name: [] for name in rows}
for round in range(repeats + 1):
    for name, (run, n) in rows.items():
        sync()
        start = time.perf_counter_ns()
        run(n)
        took = time.perf_counter_ns() - start
        sync()
        if round: means[name].append(took / n)
print(json.dumps({"torch": torch.__version__, "means": means}))
`

func (r *streamsReport) measurePython(ctx context.Context, python string, device cuda.Device) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	m := r.Method
	// Run elsewhere: in a clone of this project Python would take the folder torch/ for its module.
	python, err := exec.LookPath(python)
	if err != nil {
		return err
	}
	if python, err = filepath.Abs(python); err != nil {
		return err
	}
	command := exec.CommandContext(ctx, python, "-c", pythonPeer, device.String(), strconv.Itoa(m.Repeats), strconv.Itoa(m.Calls), strconv.Itoa(m.EnqueuedCalls))
	command.Dir = os.TempDir()
	var complaint bytes.Buffer
	command.Stderr = &complaint
	out, err := command.Output()
	if err != nil {
		lines := bytes.Split(bytes.TrimSpace(complaint.Bytes()), []byte("\n"))
		return fmt.Errorf("%s: %w: %s", python, err, lines[len(lines)-1])
	}
	var peer struct {
		Torch string               `json:"torch"`
		Means map[string][]float64 `json:"means"`
	}
	if err := json.Unmarshal(out, &peer); err != nil {
		return fmt.Errorf("%s: cannot read what it printed: %w", python, err)
	}
	for name, means := range peer.Means {
		if len(means) != m.Repeats {
			return fmt.Errorf("%s: %d repeats of %s, not %d", python, len(means), name, m.Repeats)
		}
	}
	find := func(name string) *figure {
		if means, ok := peer.Means[name]; ok {
			return summary(means)
		}
		return nil
	}
	for name, c := range r.Calls {
		c.Python = find(name)
	}
	for name, o := range r.Operators {
		o.Python = find(name)
	}
	if !strings.HasPrefix(peer.Torch, r.LibTorch) {
		r.PythonNote = "another LibTorch: torch " + peer.Torch
	}
	return nil
}

func (r *streamsReport) table(w io.Writer) error {
	fmt.Fprintf(w, "%s, LibTorch %s, CUDA %s, %s, %d CPUs; host ns a call: median (least) of %d repeats of %d calls, %d where the device gets work\n\n",
		r.Device, r.LibTorch, r.CUDA, r.Go, r.CPUs, r.Method.Repeats, r.Method.Calls, r.Method.EnqueuedCalls)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "call\tns\tover an empty call\tPython\t")
	for _, name := range callNames {
		c, over := r.Calls[name], "-"
		if c.OverEmpty != nil {
			over = fmt.Sprintf("%.0f", *c.OverEmpty)
		}
		fmt.Fprintf(table, "%s\t%v\t%s\t%v\t\n", name, c.Go, over, c.Python)
	}
	fmt.Fprintln(table, "\t\t\t\t")
	fmt.Fprintln(table, "operator\tcall from Go\tTensor method\tat:: in C++\tPython\t")
	for _, name := range operatorNames {
		o := r.Operators[name]
		fmt.Fprintf(table, "%s\t%v\t%v\t%v\t%v\t\n", name, o.Call, o.Tensor, o.CPP, o.Python)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if r.PythonNote != "" {
		_, err := fmt.Fprintf(w, "\nPython: %s\n", r.PythonNote)
		return err
	}
	return nil
}

func (f *figure) String() string {
	if f == nil {
		return "-"
	}
	return fmt.Sprintf("%.0f (%.0f)", f.Median, f.Least)
}

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
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/lab/internal/labcapi"
	"github.com/torchstream/torchstream/torch"
)

// streamsReport is the output of streams. Times are host nanoseconds per call; null means not
// measured.
type streamsReport struct {
	Device    string                  `json:"device"`
	LibTorch  string                  `json:"libtorch"`
	CUDA      string                  `json:"cuda"`
	Go        string                  `json:"go"`
	CPUs      int                     `json:"cpus"`
	Method    streamsMethod           `json:"method"`
	Calls     map[string]*callRow     `json:"calls"`     // by callNames
	Operators map[string]*operatorRow `json:"operators"` // by operatorNames, on one element
	// PythonNote says why Python's figures are null or not comparable.
	PythonNote string `json:"python_note,omitempty"`
}

type streamsMethod struct {
	Statistic string `json:"statistic"`
	Repeats   int    `json:"repeats"`
	Calls     int    `json:"calls"` // per repeat, for calls that stay on the host
	// EnqueuedCalls is the number of calls per repeat that queue device work. It is below the
	// capacity of the device's queue, so the host never waits for space.
	EnqueuedCalls int `json:"enqueued_calls"`
}

// figure holds the median and the minimum of the repeats' means.
type figure struct {
	Median float64 `json:"ns"`
	Min    float64 `json:"min_ns"`
}

var callNames = []string{
	"empty_cgo_call", // a C function that does nothing
	"lock_unlock",    // runtime.LockOSThread and UnlockOSThread
	"get",            // cuda.GetCurrentCUDAStream
	"set",            // ts_set_cuda_stream alone
	"set_restore",    // cuda.SetCUDAStream and its restore
	"with_stream",    // cuda.WithStream of an empty function; Python: with torch.cuda.stream
	"wait",           // cuda.WaitCUDAStream; Python: wait_stream
	"event_record",   // Event.Record
	"event_wait",     // Stream.WaitEvent
}

type callRow struct {
	Go        *figure  `json:"go"`
	OverEmpty *float64 `json:"over_empty_ns"` // Go's median minus the median of an empty cgo call
	Python    *figure  `json:"python"`
}

var operatorNames = []string{
	"add_",
	"add", // each result is freed immediately
	// 400 results are held, as a training step holds its activations, and then freed together.
	"add_held",
}

type operatorRow struct {
	Call   *figure `json:"call"`   // internal/capi's generic operator call
	Tensor *figure `json:"tensor"` // torch.Tensor's method
	CPP    *figure `json:"cpp"`    // at:: in C++
	Python *figure `json:"python"`
}

// benchStreams measures the host time of the stream calls, and of a small operator from Go, C++ and
// Python, all in one run.
func benchStreams(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream-lab streams", "Measures the host time of the stream calls, and of a "+
		"one-element add from Go, from C++ and from Python. Without a GPU the stream\n"+
		"calls are omitted and the operator runs on the CPU. Python's figures need a python3 that can "+
		"import torch.", stderr)
	asJSON := set.Bool("json", false, "print one JSON object")
	python := set.String("python", "python3", "the Python whose torch is the peer; empty for none")
	repeats := set.Int("repeats", 31, "number of repeats of every measurement")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	if *repeats < 1 {
		return cli.Usagef("streams: -repeats %d: at least 1 is needed", *repeats)
	}
	device := cuda.Device(0)
	if cuda.DeviceCount() == 0 {
		device = cuda.CPU
		fmt.Fprintln(stderr, "streams: no usable GPU: the stream calls are omitted, and the operator "+
			"runs on the CPU (torchstream doctor says why)")
	}
	name, err := cli.DeviceName(device)
	if err != nil {
		return err
	}
	report := streamsReport{
		Device: name, LibTorch: capi.LibTorchVersion(), CUDA: capi.CUDAVersion(), Go: runtime.Version(),
		CPUs:   runtime.NumCPU(),
		Method: streamsMethod{"median of the repeats' means; min_ns is the minimum", *repeats, 10_000, 400},
	}
	if err := report.measure(ctx, device); err != nil {
		return err
	}
	if *python == "" {
		report.PythonNote = "not requested"
	} else if err := report.measurePython(ctx, *python, device); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		report.PythonNote = err.Error()
	}
	if *asJSON {
		return cli.WriteJSON(stdout, report)
	}
	return report.table(stdout)
}

// timed is one measurement: the mean time over the given number of calls.
type timed struct {
	calls int
	run   func(calls int) error
	to    **figure
	means []float64
}

// streamsBench collects the measurements of a report and runs them.
type streamsBench struct {
	*streamsReport
	device  cuda.Device
	timed   []*timed
	cpp     struct{ inPlace, outOfPlace, held []float64 }
	closers []func() // called after the last measurement
}

func (r *streamsReport) measure(ctx context.Context, device cuda.Device) error {
	if err := labcapi.Check(); err != nil {
		return err
	}
	b := &streamsBench{streamsReport: r, device: device}
	defer func() {
		for _, f := range b.closers {
			f()
		}
	}()
	r.Calls = map[string]*callRow{}
	for _, name := range callNames {
		r.Calls[name] = &callRow{}
	}
	r.Operators = map[string]*operatorRow{}
	for _, name := range operatorNames {
		r.Operators[name] = &operatorRow{}
	}
	b.addHostCalls()
	if device != cuda.CPU {
		if err := b.addStreamCalls(); err != nil {
			return err
		}
	}
	if err := b.addOperators(); err != nil {
		return err
	}
	// Measure everything once per round, so that drifts, for example of the clock frequency, affect
	// all figures.
	for round := range r.Method.Repeats + 1 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := b.round(round == 0); err != nil {
			return err
		}
	}
	b.summarize()
	return nil
}

// add adds a measurement of calls that queue no device work.
func (b *streamsBench) add(name string, run func(calls int) error) {
	b.timed = append(b.timed, &timed{calls: b.Method.Calls, run: run, to: &b.Calls[name].Go})
}

// enqueue adds a measurement of calls that queue device work.
func (b *streamsBench) enqueue(to **figure, run func(calls int) error) {
	b.timed = append(b.timed, &timed{calls: b.Method.EnqueuedCalls, run: run, to: to})
}

func (b *streamsBench) addHostCalls() {
	b.add("empty_cgo_call", repeat(func() error { labcapi.Noop(); return nil }))
	b.add("lock_unlock", repeat(func() error {
		runtime.LockOSThread()
		runtime.UnlockOSThread()
		return nil
	}))
}

func (b *streamsBench) addStreamCalls() error {
	side, err := cuda.NewStream(b.device, cuda.StreamOptions{})
	if err != nil {
		return err
	}
	other, err := cuda.NewStream(b.device, cuda.StreamOptions{})
	if err != nil {
		return err
	}
	event, err := cuda.NewEvent(cuda.EventOptions{})
	if err != nil {
		return err
	}
	b.closers = append(b.closers, func() { event.Close() })
	nothing := func() error { return nil }
	b.add("get", repeat(func() error { _, err := cuda.GetCurrentCUDAStream(b.device); return err }))
	// This is the bare call, on a locked thread whose stream is restored afterwards.
	b.add("set", func(calls int) error {
		return cuda.WithStream(side, func() error {
			return repeat(func() error { return capi.SetCUDAStream(side.CAPI()) })(calls)
		})
	})
	b.add("set_restore", repeat(func() error {
		restore, err := cuda.SetCUDAStream(side)
		if err != nil {
			return err
		}
		return restore()
	}))
	b.add("with_stream", repeat(func() error { return cuda.WithStream(side, nothing) }))
	b.enqueue(&b.Calls["wait"].Go, repeat(func() error { return cuda.WaitCUDAStream(side, other) }))
	b.enqueue(&b.Calls["event_record"].Go, repeat(func() error { return event.Record(other) }))
	b.enqueue(&b.Calls["event_wait"].Go, repeat(func() error { return side.WaitEvent(event) }))
	return nil
}

// addOperators adds the operators, each called in two ways. Both ways run one after the other, so
// that each finds the caches as the same operator left them.
func (b *streamsBench) addOperators() error {
	calls, err := b.operatorCalls()
	if err != nil {
		return err
	}
	methods, err := b.tensorMethods()
	if err != nil {
		return err
	}
	for _, name := range operatorNames {
		b.enqueue(&b.Operators[name].Call, calls[name])
		b.enqueue(&b.Operators[name].Tensor, methods[name])
	}
	return nil
}

// operatorCalls returns the operators, called through internal/capi's generic operator call.
func (b *streamsBench) operatorCalls() (map[string]func(calls int) error, error) {
	tensors := make([]*capi.Tensor, 2)
	for i := range tensors {
		t, err := capi.EmptyTensor([]int64{1}, capi.Float32, int32(b.device), capi.Contiguous)
		if err != nil {
			return nil, err
		}
		b.closers = append(b.closers, func() { capi.FreeTensor(t) })
		tensors[i] = t
	}
	addInPlace, err := capi.FindOperator("aten::add_", "Tensor")
	if err != nil {
		return nil, err
	}
	addOutOfPlace, err := capi.FindOperator("aten::add", "Tensor")
	if err != nil {
		return nil, err
	}
	operands := []capi.Arg{{Kind: capi.ArgTensor, Value: 0}, {Kind: capi.ArgTensor, Value: 1}}
	results := make([]*capi.Tensor, b.Method.EnqueuedCalls)
	return map[string]func(calls int) error{
		"add_": repeat(func() error {
			err := capi.CallOperator(addInPlace, operands, tensors, nil, 0, nil)
			return err
		}),
		"add": repeat(func() error {
			var out [1]*capi.Tensor
			err := capi.CallOperator(addOutOfPlace, operands, tensors, nil, 0, out[:])
			capi.FreeTensors(out[:])
			return err
		}),
		"add_held": func(calls int) error {
			for i := range calls {
				if err := capi.CallOperator(addOutOfPlace, operands, tensors, nil, 0, results[i:i+1]); err != nil {
					capi.FreeTensors(results[:i])
					return err
				}
			}
			capi.FreeTensors(results[:calls])
			return nil
		},
	}, nil
}

// tensorMethods returns the operators as methods of torch.Tensor. Results are in a scope, as a
// batch's results are. The figures include creating and closing the scope.
func (b *streamsBench) tensorMethods() (map[string]func(calls int) error, error) {
	x, err := torch.Ones(b.device, torch.Float32, 1)
	if err != nil {
		return nil, err
	}
	b.closers = append(b.closers, func() { x.Close() })
	y, err := torch.Ones(b.device, torch.Float32, 1)
	if err != nil {
		return nil, err
	}
	b.closers = append(b.closers, func() { y.Close() })
	scoped := func(calls int, then func(*torch.Tensor) error) error {
		scope := torch.NewScope("streams")
		defer scope.Close()
		in := x.In(scope)
		for range calls {
			if err := then(in.Add(y)); err != nil {
				return err
			}
		}
		return nil
	}
	return map[string]func(calls int) error{
		"add_": repeat(func() error { return x.Add_(y).Err() }),
		"add": func(calls int) error {
			return scoped(calls, func(sum *torch.Tensor) error { return errors.Join(sum.Err(), sum.Close()) })
		},
		"add_held": func(calls int) error { return scoped(calls, (*torch.Tensor).Err) },
	}, nil
}

// round runs every measurement once. It discards the results of the warm-up.
func (b *streamsBench) round(warmUp bool) error {
	for _, t := range b.timed {
		mean, err := t.mean(b.device)
		if err != nil {
			return err
		}
		if !warmUp {
			t.means = append(t.means, mean)
		}
	}
	inPlace, outOfPlace, held, err := labcapi.Add(int32(b.device), b.Method.EnqueuedCalls)
	if err != nil {
		return err
	}
	if !warmUp {
		b.cpp.inPlace = append(b.cpp.inPlace, inPlace)
		b.cpp.outOfPlace = append(b.cpp.outOfPlace, outOfPlace)
		b.cpp.held = append(b.cpp.held, held)
	}
	return nil
}

// summarize computes the report's figures from the means.
func (b *streamsBench) summarize() {
	for _, t := range b.timed {
		*t.to = summary(t.means)
	}
	b.Operators["add_"].CPP = summary(b.cpp.inPlace)
	b.Operators["add"].CPP = summary(b.cpp.outOfPlace)
	b.Operators["add_held"].CPP = summary(b.cpp.held)
	for name, c := range b.Calls {
		if c.Go != nil && name != "lock_unlock" {
			over := c.Go.Median - b.Calls["empty_cgo_call"].Go.Median
			c.OverEmpty = &over
		}
	}
}

// repeat returns a function that repeats call the given number of times, or until it fails.
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

// mean starts with an idle device. It stops the clock before it waits for the device.
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
	return &figure{Median: (means[(n-1)/2] + means[n/2]) / 2, Min: means[0]}
}

// pythonPeer takes the same measurements and prints one JSON object with the means by name.
const pythonPeer = `
import json, sys, time
try:
    import torch
    torch.ones  # a folder named torch can be imported too
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
    rows.update(get=(get, calls), with_stream=(with_stream, calls), wait=(wait, enqueued), event_record=(record, enqueued),
                event_wait=(event_wait, enqueued))
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

// runPython runs a Python program and parses the JSON object that it prints.
func runPython(ctx context.Context, python, program string, result any, arguments ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	python, err := absolutePython(python)
	if err != nil {
		return err
	}
	command := exec.CommandContext(ctx, python, append([]string{"-c", program}, arguments...)...)
	command.Dir = os.TempDir() // in a clone of this project Python would import the folder torch
	var complaint bytes.Buffer
	command.Stderr = &complaint
	out, err := command.Output()
	if err != nil {
		return pythonFailure(python, err, complaint.Bytes())
	}
	if err := json.Unmarshal(out, result); err != nil {
		return fmt.Errorf("%s: cannot read what it printed: %w", python, err)
	}
	return nil
}

// absolutePython returns the absolute path of an interpreter, for a command that runs in another
// folder.
func absolutePython(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", err
	}
	return filepath.Abs(path)
}

// pythonFailure adds the last line of a failed program's output to its error.
func pythonFailure(python string, err error, complaint []byte) error {
	lines := bytes.Split(bytes.TrimSpace(complaint), []byte("\n"))
	if last := lines[len(lines)-1]; len(last) > 0 {
		return fmt.Errorf("%s: %w: %s", python, err, last)
	}
	return fmt.Errorf("%s: %w, without a message", python, err)
}

func (r *streamsReport) measurePython(ctx context.Context, python string, device cuda.Device) error {
	m := r.Method
	var peer struct {
		Torch string               `json:"torch"`
		Means map[string][]float64 `json:"means"`
	}
	if err := runPython(ctx, python, pythonPeer, &peer, device.String(), strconv.Itoa(m.Repeats),
		strconv.Itoa(m.Calls), strconv.Itoa(m.EnqueuedCalls)); err != nil {
		return err
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
	fmt.Fprintf(w, "%s, LibTorch %s, CUDA %s, %s, %d CPUs; host ns per call: median (minimum) of %d "+
		"repeats of %d calls, %d where the device gets work\n\n",
		r.Device, r.LibTorch, r.CUDA, r.Go, r.CPUs, r.Method.Repeats, r.Method.Calls, r.Method.EnqueuedCalls)
	table := printable.NewTable(w, tabwriter.AlignRight)
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
	return fmt.Sprintf("%.0f (%.0f)", f.Median, f.Min)
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/lab/internal/labcapi"
	"github.com/torchstream/torchstream/torch"
)

// operatorReport is the output of operators.
type operatorReport struct {
	Device   string          `json:"device"`
	LibTorch string          `json:"libtorch"`
	Go       string          `json:"go"`
	Repeats  int             `json:"repeats"`
	Calls    int             `json:"calls"` // per repeat
	Rows     []*operatorPair `json:"rows"`
	// Over counts the rows with a difference above 0.5 µs.
	Over int `json:"over_500_ns"`
}

// operatorPair compares an operator called from Go with the same operator called from C++, measured
// in turn. All values are host nanoseconds per call and medians over the repeats. The difference is
// the median of the pairwise differences.
type operatorPair struct {
	Operator   string  `json:"operator"`
	Generic    bool    `json:"generic,omitempty"` // called by torch.Call1 instead of the typed method
	CPP        float64 `json:"cpp_ns"`
	Go         float64 `json:"go_ns"`
	Difference float64 `json:"difference_ns"`
}

// maxDifference is the goal for the difference, in nanoseconds.
const maxDifference = 500

// operands holds the operators' tensors, the same as in lab/cshim/src/lab/operators.cc.
type operands struct {
	a, b          *torch.Tensor // [4]
	m, n          *torch.Tensor // [4 4]
	batch         *torch.Tensor // [2 4 4]
	image, kernel *torch.Tensor // [1 2 4 4], [2 2 3 3]
	pair          *torch.Tensor // [2], for the channels of image
	heads         *torch.Tensor // [1 2 4 8]
	index         *torch.Tensor // [4] of int64
	mask          *torch.Tensor // [4] of bool
	target        *torch.Tensor // [4], written by operators in place
}

func (o *operands) all() []**torch.Tensor {
	return []**torch.Tensor{&o.a, &o.b, &o.m, &o.n, &o.batch, &o.image, &o.kernel, &o.pair, &o.heads,
		&o.index, &o.mask, &o.target}
}

// newOperands makes the operands, filled with ones.
func newOperands(d cuda.Device, scope *torch.Scope) (*operands, error) {
	var o operands
	var errs []error
	make := func(dtype torch.DType, shape ...int64) *torch.Tensor {
		t, err := torch.Ones(d, dtype, shape...)
		if err != nil {
			errs = append(errs, err)
			return nil
		}
		return scope.Own(t)
	}
	o.a, o.b, o.target = make(torch.Float32, 4), make(torch.Float32, 4), make(torch.Float32, 4)
	o.m, o.n, o.batch = make(torch.Float32, 4, 4), make(torch.Float32, 4, 4), make(torch.Float32, 2, 4, 4)
	o.image, o.kernel, o.pair = make(torch.Float32, 1, 2, 4, 4), make(torch.Float32, 2, 2, 3, 3), make(torch.Float32, 2)
	o.heads, o.index, o.mask = make(torch.Float32, 1, 2, 4, 8), make(torch.Int64, 4), make(torch.Bool, 4)
	return &o, errors.Join(errs...)
}

// in returns handles whose results join the scope.
func (o operands) in(scope *torch.Scope) *operands {
	for _, t := range o.all() {
		*t = (*t).In(scope)
	}
	return &o
}

// operatorEntry is an operator called from Go.
type operatorEntry struct {
	name    string // of the peer in lab/cshim/src/lab/operators.cc
	generic bool
	run     func(o *operands) *torch.Tensor
}

// typed returns an entry for an operator with one result.
func typed(name string, f func(o *operands) *torch.Tensor) operatorEntry {
	return operatorEntry{name, false, f}
}

// lastOf returns the last of several results.
func lastOf(results []*torch.Tensor, err error) *torch.Tensor {
	if err != nil {
		return torch.Fail("operators", err)
	}
	return results[len(results)-1]
}

// generic returns an entry for an operator called by its LibTorch name. f must list the arguments
// in the call, as programs do: a list returned by a function would be allocated.
func generic(name string, f func(o *operands) *torch.Tensor) operatorEntry {
	return operatorEntry{name, true, f}
}

// operatorTable lists the operators. Names and operands match kPeers in
// lab/cshim/src/lab/operators.cc.
func operatorTable() []operatorEntry {
	type T = *torch.Tensor
	rows := []int64{1}
	two := []int64{2, 2}
	return []operatorEntry{
		typed("Abs", func(o *operands) T { return o.a.Abs() }),
		typed("Exp", func(o *operands) T { return o.a.Exp() }),
		typed("Log", func(o *operands) T { return o.a.Log() }),
		typed("Neg", func(o *operands) T { return o.a.Neg() }),
		typed("Sqrt", func(o *operands) T { return o.a.Sqrt() }),
		typed("Square", func(o *operands) T { return o.a.Square() }),
		typed("ReLU", func(o *operands) T { return o.a.ReLU() }),
		typed("Sigmoid", func(o *operands) T { return o.a.Sigmoid() }),
		typed("Tanh", func(o *operands) T { return o.a.Tanh() }),
		typed("GELU", func(o *operands) T { return o.a.GELU() }),
		typed("SiLU", func(o *operands) T { return o.a.SiLU() }),
		typed("Add", func(o *operands) T { return o.a.Add(o.b) }),
		typed("Sub", func(o *operands) T { return o.a.Sub(o.b) }),
		typed("Mul", func(o *operands) T { return o.a.Mul(o.b) }),
		typed("Div", func(o *operands) T { return o.a.Div(o.b) }),
		typed("AddScalar", func(o *operands) T { return o.a.AddScalar(2) }),
		typed("MulScalar", func(o *operands) T { return o.a.MulScalar(2) }),
		typed("Maximum", func(o *operands) T { return o.a.Maximum(o.b) }),
		typed("Minimum", func(o *operands) T { return o.a.Minimum(o.b) }),
		typed("Eq", func(o *operands) T { return o.a.Eq(o.b) }),
		typed("Gt", func(o *operands) T { return o.a.Gt(o.b) }),
		typed("Where", func(o *operands) T { return torch.Where(o.mask, o.a, o.b) }),
		typed("MatMul", func(o *operands) T { return o.m.MatMul(o.n) }),
		typed("MM", func(o *operands) T { return o.m.MM(o.n) }),
		typed("BMM", func(o *operands) T { return o.batch.BMM(o.batch) }),
		typed("Linear", func(o *operands) T { return o.m.Linear(o.n, o.a) }),
		typed("Sum", func(o *operands) T { return o.a.Sum() }),
		typed("Mean", func(o *operands) T { return o.a.Mean() }),
		typed("SumDim", func(o *operands) T { return o.m.SumDim(rows, false) }),
		typed("MeanDim", func(o *operands) T { return o.m.MeanDim(rows, false) }),
		typed("AMax", func(o *operands) T { return o.m.AMax(rows, false) }),
		typed("ArgMax", func(o *operands) T { return o.m.ArgMax(1, false) }),
		typed("CumSum", func(o *operands) T { return o.m.CumSum(1) }),
		typed("Softmax", func(o *operands) T { return o.m.Softmax(1) }),
		typed("LogSoftmax", func(o *operands) T { return o.m.LogSoftmax(1) }),
		typed("View", func(o *operands) T { return o.m.View(2, 8) }),
		typed("Reshape", func(o *operands) T { return o.m.Reshape(2, 8) }),
		typed("Flatten", func(o *operands) T { return o.batch.Flatten(1, 2) }),
		typed("Permute", func(o *operands) T { return o.batch.Permute(0, 2, 1) }),
		typed("Transpose", func(o *operands) T { return o.m.Transpose(0, 1) }),
		typed("Squeeze", func(o *operands) T { return o.image.Squeeze() }),
		typed("Unsqueeze", func(o *operands) T { return o.a.Unsqueeze(0) }),
		typed("Expand", func(o *operands) T { return o.a.Expand(3, 4) }),
		typed("Narrow", func(o *operands) T { return o.m.Narrow(0, 1, 2) }),
		typed("Select", func(o *operands) T { return o.m.Select(0, 1) }),
		typed("Chunk", func(o *operands) T { return lastOf(o.m.Chunk(2, 1)) }),
		typed("Split", func(o *operands) T { return lastOf(o.m.Split(2, 1)) }),
		typed("Unbind", func(o *operands) T { return lastOf(o.m.Unbind(0)) }),
		typed("Cat", func(o *operands) T { return torch.Cat([]T{o.a, o.b}, 0) }),
		typed("Stack", func(o *operands) T { return torch.Stack([]T{o.a, o.b}, 0) }),
		typed("IndexSelect", func(o *operands) T { return o.m.IndexSelect(0, o.index) }),
		typed("Clone", func(o *operands) T { return o.a.Clone() }),
		typed("Embedding", func(o *operands) T { return torch.Embedding(o.m, o.index) }),
		typed("Conv2d", func(o *operands) T {
			return o.image.Conv2d(o.kernel, o.pair, torch.Conv2dOptions{Padding: rows})
		}),
		typed("BatchNorm", func(o *operands) T {
			return o.image.BatchNorm(o.pair, o.pair, o.pair, o.pair, false, 0.1, 1e-5)
		}),
		typed("LayerNorm", func(o *operands) T { return o.m.LayerNorm([]int64{4}, o.a, o.b, 1e-5) }),
		typed("MaxPool2d", func(o *operands) T { return o.image.MaxPool2d(two, torch.MaxPool2dOptions{}) }),
		typed("AvgPool2d", func(o *operands) T { return o.image.AvgPool2d(two, torch.AvgPool2dOptions{}) }),
		typed("AdaptiveAvgPool2d", func(o *operands) T { return o.image.AdaptiveAvgPool2d(1, 1) }),
		typed("CrossEntropy", func(o *operands) T { return o.m.CrossEntropy(o.index) }),
		typed("MSELoss", func(o *operands) T { return o.a.MSELoss(o.b) }),
		typed("ScaledDotProductAttention", func(o *operands) T {
			return o.heads.ScaledDotProductAttention(o.heads, o.heads, torch.ScaledDotProductAttentionOptions{})
		}),
		typed("Add_", func(o *operands) T { return o.target.Add_(o.b) }),
		typed("Mul_", func(o *operands) T { return o.target.Mul_(o.b) }),
		typed("ReLU_", func(o *operands) T { return o.target.ReLU_() }),
		typed("Zero_", func(o *operands) T { return o.target.Zero_() }),
		generic("Add", func(o *operands) T { return torch.Call1("add.Tensor", o.a, o.b) }),
		generic("ReLU", func(o *operands) T { return torch.Call1("relu", o.a) }),
		generic("MM", func(o *operands) T { return torch.Call1("mm", o.m, o.n) }),
		generic("SumDim", func(o *operands) T { return torch.Call1("sum.dim_IntList", o.m, rows, false) }),
		generic("Transpose", func(o *operands) T { return torch.Call1("transpose.int", o.m, 0, 1) }),
		generic("LayerNorm", func(o *operands) T { return torch.Call1("layer_norm", o.m, []int64{4}, o.a, o.b, 1e-5) }),
		generic("Add_", func(o *operands) T { return torch.Call1("add_.Tensor", o.target, o.b) }),
	}
}

// benchOperators measures the host time of operators on tiny tensors, called from Go and from C++.
func benchOperators(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream-lab operators", "Measures the host time of operators on tiny tensors, "+
		"called from Go and, in turn, from C++: what the way through Go costs. Results are\n"+
		"freed 400 calls at a time, by a scope in Go, as those of a training step are.", stderr)
	asJSON := set.Bool("json", false, "print one JSON object")
	device := set.String("device", "", "cpu, cuda, cuda:1, ... (default: the first GPU, else the CPU)")
	repeats := set.Int("repeats", 45, "pairs of each operator")
	rounds := set.Int("rounds", 1, "rounds of 400 calls of a repeat")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	if *repeats < 1 || *rounds < 1 {
		return cli.UsageError{Message: "operators: -repeats and -rounds are at least 1"}
	}
	d, err := cli.PickDevice(*device)
	if err != nil {
		return err
	}
	name, err := cli.DeviceName(d)
	if err != nil {
		return err
	}
	report := operatorReport{Device: name, LibTorch: capi.LibTorchVersion(), Go: runtime.Version(),
		Repeats: *repeats, Calls: *rounds * heldCalls}
	if err := report.measure(ctx, d); err != nil {
		return err
	}
	if *asJSON {
		return cli.WriteJSON(stdout, report)
	}
	return report.table(stdout)
}

func (r *operatorReport) measure(ctx context.Context, d cuda.Device) (err error) {
	// Both sides use the same thread, so that they share its LibTorch caches. Other computing
	// threads are excluded, since waking one would take longer than the call.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	threads := torch.NumThreads()
	if err := torch.SetNumThreads(1); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, torch.SetNumThreads(threads)) }()
	scope := torch.NewScope("operators")
	defer func() { err = errors.Join(err, scope.Close()) }()
	o, err := newOperands(d, scope)
	if err != nil {
		return err
	}
	for _, entry := range operatorTable() {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		row := &operatorPair{Operator: entry.name, Generic: entry.generic}
		cpp, ours, differences := make([]float64, r.Repeats), make([]float64, r.Repeats), make([]float64, r.Repeats)
		for i := range r.Repeats {
			if cpp[i], err = labcapi.Operator(int32(d), entry.name, r.Calls/heldCalls); err != nil {
				return err
			}
			if ours[i], err = hostNanoseconds(d, entry, o, r.Calls/heldCalls); err != nil {
				return fmt.Errorf("%s: %w", entry.name, err)
			}
			differences[i] = ours[i] - cpp[i]
		}
		row.CPP, row.Go, row.Difference = median(cpp), median(ours), median(differences)
		if row.Difference > maxDifference {
			r.Over++
		}
		r.Rows = append(r.Rows, row)
	}
	return nil
}

// heldCalls is the number of calls in a round, as in lab/cshim/src/lab/operators.cc.
const heldCalls = 400

// hostNanoseconds measures an operator's calls like ts_bench_operator: in rounds, with the results
// freed by a scope at the end of each.
func hostNanoseconds(d cuda.Device, entry operatorEntry, o *operands, rounds int) (float64, error) {
	var took time.Duration
	for i := range rounds + 1 {
		if d != cuda.CPU {
			if err := d.Synchronize(); err != nil {
				return 0, err
			}
		}
		turn := torch.NewScope("turn")
		mine := o.in(turn)
		var last *torch.Tensor
		start := time.Now()
		for range heldCalls {
			last = entry.run(mine)
		}
		err := last.Err()
		turn.Close()
		if i > 0 { // the first round is the warm-up
			took += time.Since(start)
		}
		if err != nil {
			return 0, err
		}
	}
	return float64(took.Nanoseconds()) / float64(rounds*heldCalls), nil
}

func (r *operatorReport) table(w io.Writer) error {
	fmt.Fprintf(w, "%s, LibTorch %s, %s: host nanoseconds a call, medians of %d repeats of %d calls\n\n",
		r.Device, r.LibTorch, r.Go, r.Repeats, r.Calls)
	table := printable.NewTable(w, tabwriter.AlignRight)
	fmt.Fprintln(table, "operator\tcall\tC++\tGo\tdifference\t")
	for _, row := range r.Rows {
		call := "method"
		if row.Generic {
			call = "torch.Call1"
		}
		fmt.Fprintf(table, "%s\t%s\t%.0f\t%.0f\t%.0f\t\n", row.Operator, call, row.CPP, row.Go, row.Difference)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	differences := make([]float64, len(r.Rows))
	for i, row := range r.Rows {
		differences[i] = row.Difference
	}
	_, err := fmt.Fprintf(w, "\ndifference: median %.0f, maximum %.0f; over %d ns in %d of %d\n",
		median(differences), slices.Max(differences), maxDifference, r.Over, len(r.Rows))
	return err
}

package nn_test

import (
	"errors"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/settle"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

func names(ns []torch.Named) []string {
	var s []string
	for _, n := range ns {
		s = append(s, n.Name)
	}
	return s
}

// residual is a module as a program would write it.
type residual struct {
	conv *nn.Conv2d
	norm *nn.BatchNorm2d
}

func (r *residual) Forward(x *torch.Tensor) *torch.Tensor {
	return x.Add(r.norm.Forward(r.conv.Forward(x)).ReLU())
}

func (r *residual) Parts() nn.Parts {
	return nn.Parts{Modules: []nn.Child{{Name: "conv", Module: r.conv}, {Name: "norm", Module: r.norm}}}
}

func TestNamesMatchStateDict(t *testing.T) {
	net := nn.NewSequential(
		&residual{nn.NewConv2d(2, 2, 3, nn.Conv2dOptions{Padding: 1}), nn.NewBatchNorm2d(2, nn.BatchNorm2dOptions{})},
		nn.NewSequential(nn.NewFlatten(), nn.NewDropout(0.5), nn.NewLinear(8, 3, nn.LinearOptions{NoBias: true})),
	)
	defer nn.Close(net)
	want := []string{"0.conv.weight", "0.conv.bias", "0.norm.weight", "0.norm.bias", "0.norm.running_mean",
		"0.norm.running_var", "0.norm.num_batches_tracked", "1.2.weight"}
	if got := names(nn.State(net)); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := names(nn.NamedParameters(net)); !reflect.DeepEqual(got,
		[]string{"0.conv.weight", "0.conv.bias", "0.norm.weight", "0.norm.bias", "1.2.weight"}) {
		t.Errorf("got %v,"+
			" want [\"0.conv.weight\" \"0.conv.bias\" \"0.norm.weight\" \"0.norm.bias\" \"1.2.weight\"]", got)
	}
	if got := names(nn.NamedBuffers(net)); !reflect.DeepEqual(got,
		[]string{"0.norm.running_mean", "0.norm.running_var", "0.norm.num_batches_tracked"}) {
		t.Errorf("got %v,"+
			" want [\"0.norm.running_mean\" \"0.norm.running_var\" \"0.norm.num_batches_tracked\"]", got)
	}
	for _, n := range nn.NamedBuffers(net) {
		if n.Tensor.RequiresGrad() {
			t.Errorf("%s requires gradients", n.Name)
		}
	}
	x, err := torch.Ones(cuda.CPU, torch.Float32, 4, 2, 2, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	y := net.Forward(x)
	if err := y.Err(); err != nil || !reflect.DeepEqual(y.Shape(), []int64{4, 3}) {
		t.Errorf("got %v, want [4 3], nil", y)
	}
}

func TestTrainingAndEvaluation(t *testing.T) {
	norm, drop := nn.NewBatchNorm2d(1, nn.BatchNorm2dOptions{Momentum: 0.5}), nn.NewDropout(1)
	net := nn.NewSequential(norm, nn.NewSequential(drop))
	defer nn.Close(net)
	data, err := torch.FromFloat32s([]float32{1, 3}, 2, 1, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	values := func(x *torch.Tensor) []float32 {
		t.Helper()
		v, err := x.Float32s()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	x := data.In(torch.NewScope("test"))
	defer x.Scope().Close()
	if got := values(net.Forward(x)); !reflect.DeepEqual(got, []float32{0, 0}) {
		t.Errorf("training: %v, want [0 0]", got)
	}
	if got := values(norm.RunningMean); got[0] != 1 {
		t.Errorf("running mean %v, want 1", got)
	}
	if got := values(norm.RunningVar); got[0] != 1.5 { // halfway from 1 to 2, the variance with n-1
		t.Errorf("running variance %v, want 1.5", got)
	}
	if n, err := norm.NumBatches.Int64(); n != 1 || err != nil {
		t.Errorf("%d batches, %v, want 1, nil", n, err)
	}
	nn.Train(net, false)
	got := values(net.Forward(x))
	if d := got[1] - got[0]; got[0] != 0 || d < 1.63 || d > 1.64 { // 2 / sqrt(1.5)
		t.Errorf("evaluation: %v, want 0 and from 1.63 to 1.64", got)
	}
	if n, err := norm.NumBatches.Int64(); n != 1 || err != nil {
		t.Errorf("evaluation counted: %d batches, %v, want 1, nil", n, err)
	}
	nn.Train(net, true)
	one := x.Narrow(0, 0, 1)
	if err := net.Forward(one).Err(); !errors.Is(err, cuda.ErrInvalidArgument) ||
		!strings.Contains(err.Error(), "more than one value") {
		t.Errorf("a batch without a variance: %v,"+
			" want cuda.ErrInvalidArgument with \"more than one value\"", err)
	}
}

func TestModulesReportErrors(t *testing.T) {
	x, err := torch.Ones(cuda.CPU, torch.Float32, 1, 3, 4, 4)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	for name, m := range map[string]nn.Module{
		"no features":       nn.NewLinear(0, 3, nn.LinearOptions{}),
		"no channels":       nn.NewConv2d(3, 0, 3, nn.Conv2dOptions{}),
		"no kernel":         nn.NewConv2d(3, 3, 0, nn.Conv2dOptions{}),
		"stride":            nn.NewConv2d(3, 3, 1, nn.Conv2dOptions{Stride: -1}),
		"groups":            nn.NewConv2d(3, 4, 1, nn.Conv2dOptions{Groups: 3}),
		"negative channels": nn.NewBatchNorm2d(-1, nn.BatchNorm2dOptions{}),
	} {
		t.Run(name, func(t *testing.T) {
			net := nn.NewSequential(nn.NewReLU(), m)
			_, file, _, _ := runtime.Caller(0)
			out := net.Forward(x)
			var e *torch.Error
			if !errors.As(out.Err(), &e) || !errors.Is(out.Err(), cuda.ErrInvalidArgument) ||
				filepath.Base(e.File) != filepath.Base(file) {
				t.Error(out.Err())
			}
			if err := nn.Err(net); err == nil || !strings.HasPrefix(err.Error(), "nn: 1.") {
				t.Errorf("Err %v, want an error that begins with \"nn: 1.\"", err)
			}
			if _, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{}); err == nil {
				t.Error("NewSGD of the failed module: got no error, want one")
			}
			if err := nn.To(net, cuda.CPU); err == nil {
				t.Error("To of the failed module: got no error, want one")
			}
		})
	}
	// An error of an operator inside a module reports the program's line, not the module's.
	net := nn.NewSequential(nn.NewConv2d(5, 3, 1, nn.Conv2dOptions{}))
	defer nn.Close(net)
	_, _, line, _ := runtime.Caller(0)
	out := net.Forward(x) // the line after
	var e *torch.Error
	if !errors.As(out.Err(), &e) || e.Op != "Conv2d" || filepath.Base(e.File) != "module_test.go" || e.Line != line+1 {
		t.Errorf("got %v", out.Err())
	}
	for name, m := range map[string]nn.Module{"nil in a sequence": nn.NewSequential(nil),
		"nil function": nn.Func(nil)} {
		t.Run(name, func(t *testing.T) {
			if m.Forward(x).Err() == nil {
				t.Error("Forward: got no error, want one")
			}
		})
	}
	if nn.To(net, 99) == nil {
		t.Error("To a device that does not exist: got no error, want one")
	}
}

func TestTrainingHoldsNoMoreMemoryOverTime(t *testing.T) {
	before := settle.Wait(t, torch.LiveTensors)
	net := nn.NewSequential(nn.NewConv2d(3, 4, 3, nn.Conv2dOptions{}),
		nn.NewBatchNorm2d(4, nn.BatchNorm2dOptions{}), nn.NewReLU(), nn.NewAdaptiveAvgPool2d(1), nn.NewFlatten(),
		nn.NewLinear(4, 2, nn.LinearOptions{}))
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.1, Momentum: 0.9, WeightDecay: 0.01})
	if err != nil {
		t.Fatal(err)
	}
	x, err := torch.Randn(cuda.CPU, torch.Float32, 2, 3, 5, 5)
	if err != nil {
		t.Fatal(err)
	}
	y, err := torch.FromInt64s([]int64{0, 1})
	if err != nil {
		t.Fatal(err)
	}
	caught, after := torch.Caught(), int64(0)
	for turn := range 1000 {
		scope := torch.NewScope("turn")
		if err := net.Forward(x.In(scope)).CrossEntropy(y).Backward(); err != nil {
			t.Fatal(err)
		}
		if err := opt.Step(); err != nil {
			t.Fatal(err)
		}
		scope.Close()
		if turn == 0 {
			after = torch.LiveTensors()
		}
	}
	if live := torch.LiveTensors(); live != after {
		t.Errorf("%d references after one turn of training, %d after 1000", after, live)
	}
	runtime.GC()
	if got := torch.Caught(); got != caught {
		t.Errorf("%d tensors were left to the garbage collector, want 0", got-caught)
	}
	for _, c := range []interface{ Close() error }{opt, x, y} {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := nn.Close(net); err != nil {
		t.Error(err)
	}
	if live := torch.LiveTensors(); live != before {
		t.Errorf("%d references left at the end, want 0", live-before)
	}
}

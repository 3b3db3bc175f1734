package optim_test

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// ones returns parameters of the given shapes that have gradients.
func ones(t *testing.T, shapes ...[]int64) []*torch.Tensor {
	t.Helper()
	var params []*torch.Tensor
	for _, shape := range shapes {
		w, err := torch.Ones(cuda.CPU, torch.Float32, shape...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.Close() })
		w.SetRequiresGrad(true)
		params = append(params, w)
	}
	return params
}

func step(t *testing.T, opt optim.Optimizer, params []*torch.Tensor) {
	t.Helper()
	for _, w := range params {
		if err := w.Mul(w).Sum().Backward(); err != nil {
			t.Fatal(err)
		}
	}
	if err := opt.Step(); err != nil {
		t.Fatal(err)
	}
}

// Every optimizer's state survives a PyTorch file, alone and in a checkpoint.
func TestResumeFromPyTorchFiles(t *testing.T) {
	f := openFile(t, "parity.safetensors")
	for name, make := range makers {
		t.Run(name, func(t *testing.T) {
			p := newProblem(t, f, "float32")
			opt, err := make(p.params, false)
			if err != nil {
				t.Fatal(err)
			}
			defer opt.Close()
			p.train(t, opt, 0, 5)
			if err := opt.SetLR(0.000123); err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			if err := optim.Save(filepath.Join(dir, "state.pt"), opt); err != nil {
				t.Fatal(err)
			}
			s, err := opt.State()
			if err != nil {
				t.Fatal(err)
			}
			dict, err := s.PyTorch()
			if err != nil {
				t.Fatal(err)
			}
			if err := checkpoint.SavePyTorch(filepath.Join(dir, "checkpoint.pt"),
				map[string]any{"optimizer": dict, "epoch": 3}); err != nil {
				t.Fatal(err)
			}
			for _, file := range []string{"state.pt", "checkpoint.pt"} {
				q := p.continued(t, f, "float32")
				resumed, err := make(q.params, false)
				if err != nil {
					t.Fatal(err)
				}
				defer resumed.Close()
				if err := optim.Load(filepath.Join(dir, file), resumed); err != nil {
					t.Fatal(err)
				}
				if got, want := stateOf(t, resumed), stateOf(t, opt); !reflect.DeepEqual(got, want) {
					t.Errorf("%s: the state is %v, want %v", file, got, want)
				}
			}
		})
	}
}

// stateOf returns the values of an optimizer's state, with its rates.
func stateOf(t *testing.T, o optim.Optimizer) map[string][]float64 {
	t.Helper()
	s, err := o.State()
	if err != nil {
		t.Fatal(err)
	}
	m := map[string][]float64{"lr": o.LRs()}
	for _, n := range s.Tensors {
		m[n.Name] = values(t, n.Tensor)
	}
	return m
}

// checkpoint.pt has the state of PyTorch's Adam after two steps: see make_fixtures.py there.
func TestLoadFromACheckpointOfPyTorch(t *testing.T) {
	params := ones(t, []int64{2, 1, 3, 3}, []int64{2}, []int64{2})
	opt, err := optim.NewAdam(params, optim.AdamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	const path = "../checkpoint/internal/ptfile/testdata/checkpoint.pt"
	if err := optim.Load(path, opt); err != nil {
		t.Fatal(err)
	}
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	got := stateOf(t, opt)
	if got["lr"][0] != 0.01 || len(got) != 1+3*3 {
		t.Errorf("the state is %v, want the rate 0.01 and %d entries", got, 1+3*3)
	}
	for i := range params {
		for _, name := range []string{"step", "exp_avg", "exp_avg_sq"} {
			v, err := c.Value("optimizer", "state", i, name)
			if err != nil {
				t.Fatal(err)
			}
			x, err := v.(*checkpoint.StoredTensor).Read()
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			key := fmt.Sprintf("state.%d.%s", i, name)
			if want := values(t, x); !reflect.DeepEqual(got[key], want) {
				t.Errorf("%s is %v, want %v", key, got[key], want)
			}
		}
	}
}

// PyTorch before 1.12 counted steps with an int; its graphs keep rates in tensors.
func TestLoadOlderStates(t *testing.T) {
	params := ones(t, []int64{2})
	average, rate := ones(t, []int64{2})[0], ones(t, nil)[0]
	state := map[string]any{"step": 3, "exp_avg": average, "exp_avg_sq": average, "max_exp_avg_sq": nil}
	path := filepath.Join(t.TempDir(), "x.pt")
	save := func(dict any) {
		t.Helper()
		if err := checkpoint.SavePyTorch(path, dict); err != nil {
			t.Fatal(err)
		}
	}
	group := map[string]any{"lr": rate, "params": []any{0}}
	opt, err := optim.NewAdam(params, optim.AdamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	save(map[string]any{"state": map[any]any{int64(0): state}, "param_groups": []any{group}})
	if err := optim.Load(path, opt); err != nil {
		t.Fatal(err)
	}
	want := map[string][]float64{"lr": {1}, "state.0.step": {3}, "state.0.exp_avg": {1, 1},
		"state.0.exp_avg_sq": {1, 1}}
	if got := stateOf(t, opt); !reflect.DeepEqual(got, want) {
		t.Errorf("the state is %v, want %v", got, want)
	}
	for text, dict := range map[string]any{
		"no state of an optimizer": map[string]any{"epoch": 1},
		"2 elements is no number": map[string]any{"state": map[any]any{},
			"param_groups": []any{map[string]any{"lr": average, "params": []any{0}}}},
		"is no number": map[string]any{"state": map[any]any{},
			"param_groups": []any{map[string]any{"params": []any{0}}}},
		"a parameter is x": map[string]any{"state": map[any]any{},
			"param_groups": []any{map[string]any{"lr": 1, "params": []any{"x"}}}},
		"is no dict": map[string]any{"state": map[any]any{int64(0): 1}, "param_groups": []any{group}},
		"is no tensor": map[string]any{"state": map[any]any{int64(
			0): map[string]any{"step": "x"}}, "param_groups": []any{group}},
		"of no parameter": map[string]any{"state": map[any]any{int64(7): state}, "param_groups": []any{group}},
	} {
		save(dict)
		if err := optim.Load(path, opt); err == nil || !strings.Contains(err.Error(), text) ||
			strings.Count(err.Error(), path) != 1 {
			t.Errorf("%v does not say %q", err, text)
		}
	}
	save([]any{})
	if err := optim.Load(path, opt); err == nil {
		t.Error("Load of a list in place of a state: got no error, want one")
	}
	// The file is small, but reading every reference to the tensor needs 800 MB.
	large, err := torch.Zeros(cuda.CPU, torch.Float32, 1<<18)
	if err != nil {
		t.Fatal(err)
	}
	defer large.Close()
	shared := map[string]any{}
	for i := range 800 {
		shared[fmt.Sprint("exp_avg", i)] = large
	}
	save(map[string]any{"state": map[any]any{int64(0): shared}, "param_groups": []any{group}})
	before := settled(t)
	if err := optim.Load(path, opt); err == nil || !strings.Contains(err.Error(), "share memory") ||
		torch.LiveTensors() != before {
		t.Errorf("tensors that share memory: %v, %d tensors, want an error with \"share memory\", %d",
			err, torch.LiveTensors(), before)
	}
	if got := stateOf(t, opt); !reflect.DeepEqual(got, want) {
		t.Errorf("refused files changed the state to %v, want %v", got, want)
	}
}

// python returns the Python for tests: TORCHSTREAM_PYTHON, or python3.
func python() string { return cmp.Or(os.Getenv("TORCHSTREAM_PYTHON"), "python3") }

// TestPyTorchLoadsOptimizers lets PyTorch load each state and take a step.
func TestPyTorchLoadsOptimizers(t *testing.T) {
	program := python()
	if out, err := exec.Command(program, "-c", "import torch").CombinedOutput(); err != nil {
		t.Skipf("%s cannot import torch: set TORCHSTREAM_PYTHON to a Python that can: %v %.200s", program, err, out)
	}
	dir := t.TempDir()
	params := ones(t, []int64{3}, []int64{2})
	opt, err := optim.NewAdamW(params, optim.AdamWOptions{LR: 0.125})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	momentum, err := optim.NewSGD(params, optim.SGDOptions{LR: 0.5, Momentum: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	defer momentum.Close()
	for range 2 {
		step(t, opt, params)
		step(t, momentum, params)
	}
	for name, o := range map[string]optim.Optimizer{"adamw.pt": opt, "sgd.pt": momentum} {
		if err := optim.Save(filepath.Join(dir, name), o); err != nil {
			t.Fatal(err)
		}
	}
	const script = `
import sys, torch
w = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
for name, o in (("adamw", torch.optim.AdamW(w)), ("sgd", torch.optim.SGD(w, momentum=0.1))):
    o.load_state_dict(torch.load(f"{sys.argv[1]}/{name}.pt", weights_only=True))
    print(o.param_groups[0]["lr"], sorted(o.state[w[1]]))
    for x in w:
        x.grad = torch.ones_like(x)
    o.step()
    if name == "adamw":
        print(o.state[w[0]]["step"].item())
    else:
        print(o.param_groups[0]["momentum"])
`
	out, err := exec.Command(program, "-c", script, dir).Output()
	if want := "0.125 ['exp_avg', 'exp_avg_sq', 'step']\n3.0\n0.5 ['momentum_buffer']\n0.5\n"; err != nil ||
		string(out) != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, out, want)
	}
}

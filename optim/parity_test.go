package optim_test

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

const paritySteps = 20

var nan = math.NaN()

// makers are the optimizers that testdata/make_parity.py calls by the same names.
var makers = map[string]func(p []*torch.Tensor, capturable bool) (optim.Optimizer, error){
	"sgd": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewSGD(p, optim.SGDOptions{LR: 0.1, Capturable: c})
	},
	"sgd-nesterov": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewSGD(p, optim.SGDOptions{LR: 0.05, Momentum: 0.9, WeightDecay: 5e-2, Nesterov: true,
			Capturable: c})
	},
	"sgd-maximize": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewSGD(p, optim.SGDOptions{LR: 0.0005, Momentum: 0.9, Dampening: 0.5,
			WeightDecay: 5e-2, Maximize: true, Capturable: c})
	},
	"adam": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewAdam(p, optim.AdamOptions{LR: 0.01, Capturable: c})
	},
	"adam-decay": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewAdam(p, optim.AdamOptions{LR: 0.01, Betas: &[2]float64{0.5, 0.9}, Eps: 1e-6,
			WeightDecay: 0.1, Capturable: c})
	},
	"adam-amsgrad": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewAdam(p, optim.AdamOptions{LR: 0.05, Betas: &[2]float64{0.8, 0.7}, AMSGrad: true, Capturable: c})
	},
	"adam-maximize": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewAdam(p, optim.AdamOptions{LR: 0.01, WeightDecay: 0.1, Maximize: true, Capturable: c})
	},
	"adamw": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewAdamW(p, optim.AdamWOptions{LR: 0.01, Capturable: c})
	},
	"adamw-amsgrad": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewAdamW(p, optim.AdamWOptions{LR: 0.05, Betas: &[2]float64{0, 0.7}, WeightDecay: 0.2,
			AMSGrad: true, Capturable: c})
	},
	"adamw-maximize": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewAdamW(p, optim.AdamWOptions{LR: 0.01, NoWeightDecay: true, Maximize: true, Capturable: c})
	},
	"adamw-groups": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewAdamW(nil, optim.AdamWOptions{LR: 0.01, WeightDecay: 0.1, Capturable: c,
			Groups: []optim.Group{{Params: p[:2], LR: 0.02}, {Params: p[2:], NoWeightDecay: true}}})
	},
	"rmsprop": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewRMSprop(p, optim.RMSpropOptions{LR: 0.01, Capturable: c})
	},
	"rmsprop-centered": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewRMSprop(p,
			optim.RMSpropOptions{LR: 0.01, Alpha: 0.9, Centered: true, WeightDecay: 0.1, Capturable: c})
	},
	"rmsprop-momentum": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewRMSprop(p,
			optim.RMSpropOptions{LR: 0.0005, Momentum: 0.9, Eps: 1e-4, Maximize: true, Capturable: c})
	},
	"rmsprop-both": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewRMSprop(p,
			optim.RMSpropOptions{LR: 0.005, Alpha: 0.9, Momentum: 0.5, Centered: true, Capturable: c})
	},
	"adagrad": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewAdagrad(p, optim.AdagradOptions{LR: 0.1, Capturable: c})
	},
	"adagrad-decay": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewAdagrad(p, optim.AdagradOptions{LR: 0.1, LRDecay: 0.1, WeightDecay: 0.1,
			InitialAccumulator: 0.5, Eps: 1e-6, Capturable: c})
	},
	"adagrad-maximize": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewAdagrad(p, optim.AdagradOptions{LR: 0.01, Maximize: true, Capturable: c})
	},
	"lamb": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewLAMB(p, optim.LAMBOptions{LR: 0.02, Capturable: c})
	},
	"lamb-plain": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewLAMB(p, optim.LAMBOptions{LR: 0.02, Betas: &[2]float64{0.8, 0.9}, Eps: 1e-4,
			NoWeightDecay: true, Capturable: c})
	},
	"muon": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewMuon(p, optim.MuonOptions{LR: 0.02, AdamW: optim.AdamWOptions{LR: 0.01}, Capturable: c})
	},
	"muon-match": func(p []*torch.Tensor, c bool) (optim.Optimizer, error) {
		return optim.NewMuon(p, optim.MuonOptions{LR: 0.02, Momentum: 0.8, WeightDecay: 0.01,
			NoNesterov: true, NSSteps: 3, MatchAdamW: true,
			AdamW: optim.AdamWOptions{LR: 0.01, NoWeightDecay: true}, Capturable: c})
	},
}

// file is an open file of testdata. newer has the values that another LibTorch release computes
// differently; nil if there are none.
type file struct{ c, newer *checkpoint.File }

func openFile(t *testing.T, name string) file {
	t.Helper()
	c, err := checkpoint.Open(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	f := file{c: c}
	// Values that a newer PyTorch computes differently, such as bfloat16 rounding.
	version := capi.LibTorchVersion()
	release := version[:max(strings.LastIndexByte(version, '.'), 0)]
	newer, err := checkpoint.Open(filepath.Join("testdata",
		strings.TrimSuffix(name, ".safetensors")+"-"+release+".safetensors"))
	switch {
	case err == nil:
		t.Cleanup(func() { newer.Close() })
		f.newer = newer
	case !errors.Is(err, fs.ErrNotExist):
		t.Fatal(err)
	}
	return f
}

func (f file) read(t *testing.T, name string) *torch.Tensor {
	t.Helper()
	c := f.c
	if f.newer != nil && slices.ContainsFunc(f.newer.Tensors(), func(s torch.Spec) bool { return s.Name == name }) {
		c = f.newer
	}
	x, err := c.Read(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

func (f file) values(t *testing.T, name string) []float64 {
	t.Helper()
	return values(t, f.read(t, name))
}

func values(t *testing.T, x *torch.Tensor) []float64 {
	t.Helper()
	v, err := x.Float64s()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// near fails if a value differs from PyTorch's value v by more than tolerance * (1+|v|). It returns
// the largest difference.
func near(t *testing.T, what string, got, want []float64, tolerance float64) difference {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d values, PyTorch has %d", what, len(got), len(want))
	}
	var largest difference
	for i := range got {
		share := 0.0 // of any tolerance, if the values are equal
		if d := math.Abs(got[i] - want[i]); math.IsNaN(d) {
			share = math.Inf(1)
		} else if d != 0 {
			share = d / (tolerance * (1 + math.Abs(want[i])))
		}
		if share >= largest.share {
			largest = difference{fmt.Sprintf("%s[%d]", what, i), got[i], want[i], share}
		}
	}
	if largest.share > 1 {
		t.Errorf("%s: got %v, want %v, as PyTorch has", largest.what, largest.got, largest.want)
	}
	return largest
}

// difference is a value that differs from PyTorch's by a share of the tolerance.
type difference struct {
	what      string
	got, want float64
	share     float64
}

// problem is the network of make_parity.py.
type problem struct {
	params      []*torch.Tensor
	x, y        *torch.Tensor
	elementwise bool // whether the loss has no matrix products
}

func newProblem(t *testing.T, f file, dtype string) problem {
	t.Helper()
	return newProblemOn(t, f, dtype, cuda.CPU)
}

func newProblemOn(t *testing.T, f file, dtype string, device cuda.Device) problem {
	t.Helper()
	read := func(name string) *torch.Tensor {
		t.Helper()
		moved := f.read(t, dtype+"/"+name).To(device)
		x := moved.Keep() // for several scopes
		if err := x.Err(); err != nil {
			t.Fatal(err)
		}
		moved.Close()
		t.Cleanup(func() { x.Close() })
		return x
	}
	p := problem{x: read("x"), y: read("y"), elementwise: dtype == "bfloat16"}
	for i := range 7 {
		w := read(fmt.Sprint("init/", i))
		if err := w.SetRequiresGrad(true); err != nil {
			t.Fatal(err)
		}
		p.params = append(p.params, w)
	}
	return p
}

// loss computes the function forward of make_parity.py.
func (p problem) loss(s *torch.Scope, step int) *torch.Tensor {
	w1, b1, w2, w3, scale, late := p.params[0], p.params[1], p.params[2], p.params[3], p.params[4], p.params[5]
	if p.elementwise {
		loss := w1.In(s).Square().Sum()
		for _, w := range []*torch.Tensor{b1, w2, w3, scale} {
			loss = loss.Add(w.In(s).Square().Sum())
		}
		if step >= 5 {
			loss = loss.Add(late.In(s).Square().Sum())
		}
		return loss
	}
	p.x = s.Own(p.x.Keep())
	return p.lossIn(step)
}

// lossIn computes the loss of matrices, in the scope of x.
func (p problem) lossIn(step int) *torch.Tensor {
	w1, b1, w2, w3, scale, late := p.params[0], p.params[1], p.params[2], p.params[3], p.params[4], p.params[5]
	out := p.x.Linear(w1, b1).Tanh().Linear(w2.In(p.x.Scope()).MatMul(w3), nil).Mul(scale)
	if step >= 5 {
		out = out.Add(late)
	}
	return out.MSELoss(p.y)
}

// train runs the steps from first to before last and returns their losses.
func (p problem) train(t *testing.T, opt optim.Optimizer, first, last int) []float64 {
	t.Helper()
	var losses []float64
	for step := first; step < last; step++ {
		s := torch.NewScope("step")
		loss := p.loss(s, step)
		if err := loss.Backward(); err != nil {
			t.Fatal(err)
		}
		if err := opt.Step(); err != nil {
			t.Fatal(err)
		}
		v, err := loss.Float64()
		if err != nil {
			t.Fatal(err)
		}
		losses = append(losses, v)
		s.Close()
	}
	return losses
}

// tolerance is the bound for an optimizer and dtype. Muon's iteration always runs in bfloat16, and
// its matrix products may round differently on another processor. otherwise means that the
// operators differ from make_parity.py's.
func tolerance(name, dtype string, otherwise bool) float64 {
	switch {
	case dtype == "bfloat16" && (otherwise || strings.HasPrefix(name, "lamb")):
		return 6e-2 // roundings in other places, over 20 steps
	case dtype == "bfloat16":
		return 8e-3 // one or two roundings
	case strings.HasPrefix(name, "muon"):
		return 5e-3
	case dtype == "float32" || otherwise: // the rate in device memory is float32
		return 1e-5
	}
	return 1e-10
}

// After 20 steps every optimizer has PyTorch's losses, parameters and state.
func TestTwentyStepsMatchPyTorch(t *testing.T) {
	f := openFile(t, "parity.safetensors")
	for _, c := range parityCases() {
		t.Run(c.String(), func(t *testing.T) {
			p := newProblem(t, f, c.dtype)
			c.compare(t, f, p, c.dtype+"/"+c.name+"/", tolerance(c.name, c.dtype, c.capturable))
		})
	}
}

// parityCase is an optimizer of makers, with or without Capturable.
type parityCase struct {
	name, dtype string
	capturable  bool
}

func parityCases() []parityCase {
	var cases []parityCase
	for _, name := range slices.Sorted(maps.Keys(makers)) {
		for _, dtype := range []string{"float64", "float32", "bfloat16"} {
			cases = append(cases, parityCase{name, dtype, false}, parityCase{name, dtype, true})
		}
	}
	return cases
}

func (c parityCase) String() string {
	return fmt.Sprintf("%s/%s/capturable=%v", c.name, c.dtype, c.capturable)
}

// compare runs the steps, compares losses, parameters and state with PyTorch's, which the file
// holds under prefix, and returns the largest difference.
func (c parityCase) compare(t *testing.T, f file, p problem, prefix string, bound float64) difference {
	t.Helper()
	opt, err := makers[c.name](p.params, c.capturable)
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	losses := p.train(t, opt, 0, paritySteps)
	differences := []difference{near(t, "losses", losses, f.values(t, prefix+"losses"), bound)}
	for i, w := range p.params {
		differences = append(differences,
			near(t, fmt.Sprint("parameter ", i), values(t, w), f.values(t, fmt.Sprint(prefix, i)), bound))
	}
	// Without Nesterov, PyTorch divides a bfloat16 velocity by its norm in place, which changes its
	// state. So that state is not compared.
	if c.name != "muon-match" || c.dtype != "bfloat16" {
		differences = append(differences, compareState(t, f, opt, prefix, p.params, bound)...)
	}
	return slices.MaxFunc(differences, bySize)
}

func bySize(a, b difference) int { return cmp.Compare(a.share, b.share) }

// compareState compares the state. It has the same indexes as in make_parity.py, except that Muon
// has matrices first. compareState returns the largest difference of each tensor.
func compareState(t *testing.T, f file, opt optim.Optimizer, prefix string, params []*torch.Tensor,
	bound float64) []difference {
	t.Helper()
	index := map[int]int{}
	n := 0
	for _, g := range opt.Groups() {
		for _, p := range g.Params {
			for i, q := range params {
				if p == q {
					index[n] = i
				}
			}
			n++
		}
	}
	state, err := opt.State()
	if err != nil {
		t.Fatal(err)
	}
	var differences []difference
	got := map[string]bool{}
	for _, s := range state.Tensors {
		var i int
		var name string
		if _, err := fmt.Sscanf(s.Name, "state.%d.%s", &i, &name); err != nil {
			t.Fatal(s.Name, err)
		}
		theirs := fmt.Sprintf("%sstate.%d.%s", prefix, index[i], name)
		got[theirs] = true
		differences = append(differences, near(t, strings.TrimPrefix(theirs, prefix), values(t, s.Tensor),
			f.values(t, theirs), bound))
	}
	for _, s := range f.c.Tensors() {
		// PyTorch's Adagrad starts the state of parameter 6, which never has a gradient.
		if strings.HasPrefix(s.Name, prefix+"state.") && !strings.HasPrefix(s.Name, prefix+"state.6.") && !got[s.Name] {
			t.Errorf("PyTorch has %s", s.Name)
		}
	}
	return differences
}

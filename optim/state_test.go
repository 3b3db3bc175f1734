package optim_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// continued returns a problem whose parameters have the values of another's.
func (p problem) continued(t *testing.T, f file, dtype string) problem {
	t.Helper()
	q := newProblem(t, f, dtype)
	for i, w := range q.params {
		if err := w.CopyFrom(p.params[i], torch.CopyOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	return q
}

// Ten steps, a file and ten more give the bits of twenty steps, for every optimizer.
func TestResumeIsExact(t *testing.T) {
	f := openFile(t, "parity.safetensors")
	for name, make := range makers {
		for _, capturable := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/capturable=%v", name, capturable), func(t *testing.T) {
				whole, half := newProblem(t, f, "float32"), newProblem(t, f, "float32")
				path := filepath.Join(t.TempDir(), "state.safetensors")
				opts := map[string]optim.Optimizer{}
				for _, part := range []struct {
					name string
					p    problem
				}{{"whole", whole}, {"half", half}} {
					opt, err := make(part.p.params, capturable)
					if err != nil {
						t.Fatal(err)
					}
					defer opt.Close()
					part.p.train(t, opt, 0, 7)
					if err := opt.SetLR(0.000123); err != nil {
						t.Fatal(err)
					}
					part.p.train(t, opt, 7, 10)
					opts[part.name] = opt
				}
				if err := optim.Save(path, opts["half"]); err != nil {
					t.Fatal(err)
				}
				resumed := half.continued(t, f, "float32")
				opt, err := make(resumed.params, capturable)
				if err != nil {
					t.Fatal(err)
				}
				defer opt.Close()
				if err := optim.Load(path, opt); err != nil {
					t.Fatal(err)
				}
				if opt.LRs()[0] != 0.000123 {
					t.Errorf("the learning rate is %v, want 0.000123", opt.LRs()[0])
				}
				a, b := whole.train(t, opts["whole"], 10, 20), resumed.train(t, opt, 10, 20)
				if !reflect.DeepEqual(a, b) {
					t.Errorf("losses %v, and %v after resuming", a, b)
				}
				for i := range whole.params {
					if a, b := values(t, whole.params[i]), values(t, resumed.params[i]); !reflect.DeepEqual(a, b) {
						t.Errorf("parameter %d is %v, and %v after resuming", i, a, b)
					}
				}
			})
		}
	}
}

// Training resumed from a state that PyTorch saved continues as in PyTorch. A state saved here has
// the same names.
func TestStateOfPyTorch(t *testing.T) {
	f := openFile(t, "parity.safetensors")
	p := newProblem(t, f, "float64")
	for i, w := range p.params {
		if err := w.CopyFrom(f.read(t, fmt.Sprintf("resume/%d", i)), torch.CopyOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	opt, err := makers["adamw"](p.params, false)
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	theirs := filepath.Join("testdata", "adamw_state.safetensors")
	if err := optim.Load(theirs, opt); err != nil {
		t.Fatal(err)
	}
	ours := filepath.Join(t.TempDir(), "state.safetensors")
	if err := optim.Save(ours, opt); err != nil {
		t.Fatal(err)
	}
	var names [2][]string
	var keys [2]map[string]any
	for i, path := range []string{theirs, ours} {
		c, err := checkpoint.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for _, s := range c.Tensors() {
			names[i] = append(names[i], fmt.Sprint(s))
		}
		slices.Sort(names[i])
		var groups []map[string]any
		if err := json.Unmarshal([]byte(c.Metadata()["param_groups"]), &groups); err != nil || len(groups) != 1 {
			t.Fatal(groups, err)
		}
		keys[i] = groups[0]
	}
	if !reflect.DeepEqual(names[0], names[1]) {
		t.Errorf("PyTorch has\n%v\nwe have\n%v", names[0], names[1])
	}
	delete(keys[1], "initial_lr") // PyTorch adds it when there is a scheduler
	if !reflect.DeepEqual(keys[0], keys[1]) {
		t.Errorf("PyTorch has\n%v\nwe have\n%v", keys[0], keys[1])
	}
	p.train(t, opt, 10, 20)
	for i, w := range p.params {
		near(t, fmt.Sprint("parameter ", i), values(t, w), f.values(t, fmt.Sprintf("float64/adamw/%d", i)), 1e-10)
	}
}

func TestLoadStateRefusesOtherStates(t *testing.T) {
	trained := func(o optim.AdamWOptions, w ...*torch.Tensor) (*optim.AdamW, optim.State) {
		opt, err := optim.NewAdamW(w, o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { opt.Close() })
		for _, p := range w {
			turn(t, p)
		}
		if err := opt.Step(); err != nil {
			t.Fatal(err)
		}
		s, err := opt.State()
		if err != nil {
			t.Fatal(err)
		}
		return opt, s
	}
	opt, good := trained(optim.AdamWOptions{LR: 0.5}, leaf(t, 1, 2), leaf(t, 3))
	before := values(t, good.Tensors[1].Tensor)
	change := func(f func(s *optim.State)) optim.State {
		s := optim.State{Tensors: slices.Clone(good.Tensors),
			Metadata: map[string]string{"param_groups": good.Metadata["param_groups"]}}
		f(&s)
		return s
	}
	_, amsgrad := trained(optim.AdamWOptions{AMSGrad: true}, leaf(t, 1, 2), leaf(t, 3))
	for _, c := range []struct {
		name string
		s    optim.State
		text string
	}{
		{"nothing", optim.State{}, `no "param_groups"`},
		{"another optimizer", change(func(s *optim.State) { s.Metadata["optimizer"] = "SGD" }), "the state is of SGD"},
		{"no JSON", change(func(s *optim.State) { s.Metadata["param_groups"] = "{" }), "param_groups"},
		{"groups", change(func(s *optim.State) { s.Metadata["param_groups"] = "[]" }), "0 groups"},
		{"parameters", change(func(
			s *optim.State) {
			s.Metadata["param_groups"] = `[{"lr":1,"params":[0]}]`
		}), "1 parameters in the state, and 2"},
		{"order", change(func(s *optim.State) { s.Metadata["param_groups"] = `[{"lr":1,"params":[1,0]}]` }),
			"parameter 0 is 1"},
		{"no rate", change(func(s *optim.State) { s.Metadata["param_groups"] = `[{"params":[0,1]}]` }),
			"lr is missing"},
		{"negative rate", change(
			func(s *optim.State) { s.Metadata["param_groups"] = `[{"lr":-1,"params":[0,1]}]` }), "negative"},
		{"missing", change(func(s *optim.State) { s.Tensors = s.Tensors[1:] }), `"state.0.step" is missing`},
		{"shape", change(func(s *optim.State) { s.Tensors[4].Tensor = s.Tensors[1].Tensor }),
			`"state.1.exp_avg" has shape [2], and should have [1]`},
		{"step of another shape",
			change(func(s *optim.State) { s.Tensors[0].Tensor = s.Tensors[1].Tensor }), `"state.0.step" has shape [2]`},
		{"other name", change(func(s *optim.State) { s.Tensors[0].Name = "exp_avg" }),
			`"exp_avg" is the state of no parameter`},
		{"other index", change(func(s *optim.State) { s.Tensors[0].Name = "state.2.step" }),
			`"state.2.step" is the state of no parameter`},
		{"failed", change(func(s *optim.State) { s.Tensors[0].Tensor = nil }), "nil"},
		{"option", amsgrad, `"state.0.max_exp_avg_sq" is no state of this optimizer`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := opt.LoadState(c.s); err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v does not say %q", err, c.text)
			}
			if after := values(t, good.Tensors[1].Tensor); !reflect.DeepEqual(after, before) || opt.LR() != 0.5 {
				t.Errorf("after a refused state: exp_avg %v, rate %v, want %v, 0.5 as before", after, opt.LR(), before)
			}
		})
	}
	// A parameter without state in s restarts without state.
	if err := opt.LoadState(change(func(s *optim.State) { s.Tensors = s.Tensors[:3] })); err != nil {
		t.Fatal(err)
	}
	if s, err := opt.State(); err != nil || len(s.Tensors) != 3 {
		t.Errorf("%d tensors, %v, want 3, nil", len(s.Tensors), err)
	}
}

func TestGroups(t *testing.T) {
	body, head, bias, frozen := leaf(t, 1), leaf(t, 1), leaf(t, 1), leaf(t, 1)
	if err := frozen.SetRequiresGrad(false); err != nil {
		t.Fatal(err)
	}
	opt, err := optim.NewSGD([]*torch.Tensor{body, frozen},
		optim.SGDOptions{LR: 0.25, WeightDecay: 1, Groups: []optim.Group{
			{Params: []*torch.Tensor{head}, LR: 0.5, WeightDecay: 2},
			{Params: []*torch.Tensor{bias}, NoWeightDecay: true},
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	step := func(params ...*torch.Tensor) {
		t.Helper()
		for _, p := range params {
			turn(t, p)
		}
		if err := opt.Step(); err != nil {
			t.Fatal(err)
		}
	}
	step(body, head, bias)
	want(t, body, 0.25) // 1 - 0.25*(2+1)
	want(t, head, -1)   // 1 - 0.5*(2+2)
	want(t, bias, 0.5)  // 1 - 0.25*2
	want(t, frozen, 1)
	if err := frozen.SetRequiresGrad(true); err != nil { // unfrozen in the middle of training
		t.Fatal(err)
	}
	step(frozen)
	want(t, frozen, 0.25)
	if err := opt.SetLR(0, 0.25, 0.125); err != nil ||
		!reflect.DeepEqual(opt.LRs(), []float64{0, 0.25, 0.125}) || opt.LR() != 0 {
		t.Errorf("got %v, %v, want [0 0.25 0.125], nil", opt.LRs(), err)
	}
	if err := opt.SetLR(1, 2); !errors.Is(err, cuda.ErrInvalidArgument) ||
		!strings.Contains(err.Error(), "2 rates for 3 groups") {
		t.Error(err)
	}
	if err := opt.SetLR(0.125); err != nil || !reflect.DeepEqual(opt.LRs(), []float64{0.125, 0.125, 0.125}) {
		t.Errorf("got %v, %v, want [0.125 0.125 0.125], nil", opt.LRs(), err)
	}
	groups := opt.Groups()
	if len(groups) != 3 || groups[0].LR != 0.25 || groups[1].LR != 0.5 || groups[1].WeightDecay != 2 ||
		!groups[2].NoWeightDecay || len(groups[0].Params) != 2 {
		t.Errorf("%+v", groups)
	}
}

// One Step updates parameters of several dtypes.
func TestMixedDTypes(t *testing.T) {
	for _, capturable := range []bool{false, true} {
		t.Run(fmt.Sprintf("capturable=%v", capturable), func(t *testing.T) {
			var params []*torch.Tensor
			for _, d := range []torch.DType{torch.Float32, torch.Float64, torch.BFloat16, torch.Float32} {
				p, err := torch.Full(cuda.CPU, d, 4, 3)
				if err != nil {
					t.Fatal(err)
				}
				defer p.Close()
				if err := p.SetRequiresGrad(true); err != nil {
					t.Fatal(err)
				}
				params = append(params, p)
			}
			opt, err := optim.NewAdamW(params, optim.AdamWOptions{LR: 1, NoWeightDecay: true, Capturable: capturable})
			if err != nil {
				t.Fatal(err)
			}
			defer opt.Close()
			for _, p := range params {
				turn(t, p)
			}
			if err := opt.Step(); err != nil {
				t.Fatal(err)
			}
			for i, p := range params {
				near(t, fmt.Sprint("parameter ", i), values(t, p), []float64{3, 3, 3}, 1e-6)
			}
		})
	}
}

func TestOptionsOutOfRange(t *testing.T) {
	p := []*torch.Tensor{leaf(t, 1)}
	betas := func(a, b float64) *[2]float64 { return &[2]float64{a, b} }
	for text, make := range map[string]func() (optim.Optimizer, error){
		"NewAdam: LR is -1": func() (optim.Optimizer,
			error) {
			return optim.NewAdam(p, optim.AdamOptions{LR: -1})
		},
		"NewAdam: Betas[0] is 1": func() (optim.Optimizer,
			error) {
			return optim.NewAdam(p, optim.AdamOptions{Betas: betas(1, 0)})
		},
		"NewAdam: Betas[1] is -0.5": func() (optim.Optimizer,
			error) {
			return optim.NewAdam(p, optim.AdamOptions{Betas: betas(0, -0.5)})
		},
		"NewAdamW: Eps is -1": func() (optim.Optimizer,
			error) {
			return optim.NewAdamW(p, optim.AdamWOptions{Eps: -1})
		},
		"NewAdamW: WeightDecay is -1": func() (optim.Optimizer,
			error) {
			return optim.NewAdamW(p, optim.AdamWOptions{WeightDecay: -1})
		},
		"NewAdamW: WeightDecay is 1 beside No": func() (optim.Optimizer, error) {
			return optim.NewAdamW(p, optim.AdamWOptions{WeightDecay: 1, NoWeightDecay: true})
		},
		"NewRMSprop: Alpha is -1": func() (optim.Optimizer,
			error) {
			return optim.NewRMSprop(p, optim.RMSpropOptions{Alpha: -1})
		},
		"NewRMSprop: Momentum is -1": func() (optim.Optimizer,
			error) {
			return optim.NewRMSprop(p, optim.RMSpropOptions{Momentum: -1})
		},
		"NewAdagrad: LRDecay is -1": func() (optim.Optimizer,
			error) {
			return optim.NewAdagrad(p, optim.AdagradOptions{LRDecay: -1})
		},
		"NewAdagrad: InitialAccumulator is -1": func() (optim.Optimizer, error) {
			return optim.NewAdagrad(p, optim.AdagradOptions{InitialAccumulator: -1})
		},
		"NewLAMB: Betas[0] is 2": func() (optim.Optimizer,
			error) {
			return optim.NewLAMB(p, optim.LAMBOptions{Betas: betas(2, 0)})
		},
		"NewMuon: NSSteps is 100": func() (optim.Optimizer,
			error) {
			return optim.NewMuon(p, optim.MuonOptions{NSSteps: 100})
		},
		"NewMuon: AdamW: Betas[0] is 2": func() (optim.Optimizer, error) {
			return optim.NewMuon(p, optim.MuonOptions{AdamW: optim.AdamWOptions{Betas: betas(2, 0)}})
		},
		"NewMuon: Groups: parameter 0 of group 0 has shape [1]": func() (optim.Optimizer, error) {
			return optim.NewMuon(nil, optim.MuonOptions{Groups: []optim.Group{{Params: p}}})
		},
		"NewSGD: group 1: LR is -1": func() (optim.Optimizer, error) {
			return optim.NewSGD(p, optim.SGDOptions{Groups: []optim.Group{{LR: -1}}})
		},
		"NewSGD: Dampening is NaN": func() (optim.Optimizer,
			error) {
			return optim.NewSGD(p, optim.SGDOptions{Dampening: nan})
		},
	} {
		t.Run(text, func(t *testing.T) {
			if o, err := make(); !errors.Is(err, cuda.ErrInvalidArgument) ||
				!strings.Contains(err.Error(), text) || !reflect.ValueOf(o).IsNil() {
				t.Errorf("%v, %v", o, err)
			}
		})
	}
}

// Every optimizer frees its tensors, and keeps only state between steps.
func TestOptimizersLeaveNothingBehind(t *testing.T) {
	f := openFile(t, "parity.safetensors")
	for name, make := range makers {
		for _, capturable := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/capturable=%v", name, capturable), func(t *testing.T) {
				p := newProblem(t, f, "float32")
				before, caught := settled(t), torch.Caught()
				opt, err := make(p.params, capturable)
				if err != nil {
					t.Fatal(err)
				}
				p.train(t, opt, 0, 6)
				after := torch.LiveTensors()
				p.train(t, opt, 6, 20)
				if live := torch.LiveTensors(); live != after {
					t.Errorf("%d references after 20 steps, want %d, as after 6", live-before, after-before)
				}
				opt.Close()
				if live := torch.LiveTensors(); live != before || torch.Caught() != caught {
					t.Errorf("%d references after Close, %d caught, want 0, 0",
						live-before, torch.Caught()-caught)
				}
			})
		}
	}
}

// The state follows a parameter whose dtype changes.
func TestStateFollowsDType(t *testing.T) {
	for _, name := range []string{"sgd-nesterov", "adamw", "rmsprop-both"} {
		for _, capturable := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/capturable=%v", name, capturable), func(t *testing.T) {
				var results [2][]float64
				for i, converted := range []bool{false, true} {
					w := leaf(t, 8, -4)
					before := settled(t)
					opt, err := makers[name]([]*torch.Tensor{w}, capturable)
					if err != nil {
						t.Fatal(err)
					}
					for step := range 6 {
						if converted && step == 3 {
							wide := w.NoGrad().ToDType(torch.Float64)
							if err := w.SetData(wide); err != nil {
								t.Fatal(err)
							}
							wide.Close()
						}
						turn(t, w)
						if err := opt.Step(); err != nil {
							t.Fatal(err)
						}
					}
					results[i] = values(t, w)
					opt.Close()
					if live := torch.LiveTensors(); live != before {
						t.Errorf("%d references left behind, want 0", live-before)
					}
				}
				near(t, "parameter", results[1], results[0], 1e-5)
			})
		}
	}
}

// Captured graphs hold the addresses of the state, so loading must not change the addresses.
func TestLoadStateKeepsMemory(t *testing.T) {
	w := leaf(t, 1, 2)
	opt, err := optim.NewAdamW([]*torch.Tensor{w}, optim.AdamWOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	path := filepath.Join(t.TempDir(), "state.safetensors")
	addresses := func() (list []uintptr) {
		turn(t, w)
		if err := opt.Step(); err != nil {
			t.Fatal(err)
		}
		s, err := opt.State()
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range s.Tensors {
			p, err := n.Tensor.Pointer()
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, p)
		}
		return list
	}
	before := addresses()
	if err := errors.Join(optim.Save(path, opt), optim.Load(path, opt)); err != nil {
		t.Fatal(err)
	}
	if after := addresses(); !reflect.DeepEqual(before, after) {
		t.Errorf("the state was at %x and is at %x", before, after)
	}
}

// Muon leaves parameters that are not matrices, and the groups of AdamW, to AdamW.
func TestMuonGroups(t *testing.T) {
	f := openFile(t, "parity.safetensors")
	p := newProblem(t, f, "float32").params // 0, 2 and 3 are matrices
	lr := optim.AdamWOptions{LR: 0.5, Groups: []optim.Group{{Params: []*torch.Tensor{p[3]}, LR: 0.25}}}
	opt, err := optim.NewMuon(p[:3], optim.MuonOptions{LR: 2, AdamW: lr})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	want := [][]*torch.Tensor{{p[0], p[2]}, {p[1]}, {p[3]}}
	var got [][]*torch.Tensor
	for _, g := range opt.Groups() {
		got = append(got, g.Params)
	}
	if !reflect.DeepEqual(got, want) || !reflect.DeepEqual(opt.LRs(), []float64{2, 0.5, 0.25}) {
		t.Errorf("rates %v of groups %v, want groups %v", opt.LRs(), got, want)
	}
	for _, w := range p[:4] {
		turn(t, w)
	}
	if err := opt.Step(); err != nil {
		t.Fatal(err)
	}
	s, err := opt.State()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, n := range s.Tensors {
		names = append(names, strings.TrimPrefix(n.Name, "state."))
	}
	if text := strings.Join(names,
		" "); text != "0.momentum_buffer 1.momentum_buffer 2.step 2.exp_avg 2.exp_avg_sq 3.step "+
		"3.exp_avg 3.exp_avg_sq" {
		t.Error(text)
	}
	if _, err := optim.NewMuon(nil, optim.MuonOptions{}); !errors.Is(err, cuda.ErrInvalidArgument) ||
		!strings.Contains(err.Error(), "no parameters") {
		t.Error(err)
	}
}

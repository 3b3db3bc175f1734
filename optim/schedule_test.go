package optim_test

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

const scheduleBase = 0.3 // of make_parity.py

func schedules() map[string]optim.Schedule {
	return map[string]optim.Schedule{
		"step":          optim.StepLR{Size: 7, Gamma: 0.3},
		"multistep":     optim.MultiStepLR{Milestones: []int{5, 5, 12, 30}, Gamma: 0.5},
		"exponential":   optim.ExponentialLR{Gamma: 0.9},
		"cosine":        optim.CosineLR{Steps: 30, Min: 0.01},
		"cosine-long":   optim.CosineLR{Steps: 9, Min: 0.02},
		"restarts":      optim.CosineRestarts{Steps: 5, Multiply: 2, Min: 0.01},
		"restarts-even": optim.CosineRestarts{Steps: 6},
		"onecycle":      optim.OneCycleLR{Steps: 40},
		"onecycle-three": optim.OneCycleLR{Steps: 45, RiseShare: 0.25, Linear: true, DivFactor: 10,
			FinalDivFactor: 100, ThreePhase: true},
		"warmup":         optim.LinearWarmup{Steps: 10},
		"warmup-options": optim.LinearWarmup{Steps: 8, Start: 0.01, End: 0.5},
		"sequential": optim.Sequential{{Steps: 6, Schedule: optim.LinearWarmup{Steps: 6, Start: 0.1}},
			{Steps: 20, Schedule: optim.CosineLR{Steps: 20, Min: 0.001}},
			{Schedule: optim.StepLR{Size: 3, Gamma: 0.5}}},
		"chained": optim.Chained{optim.LinearWarmup{Steps: 4, Start: 0.5},
			optim.StepLR{Size: 10, Gamma: 0.2}, optim.ExponentialLR{Gamma: 0.95}},
	}
}

// relative fails if a value differs from PyTorch's by more than 1e-10 of PyTorch's value.
func relative(t *testing.T, got, want []float64) {
	t.Helper()
	for i := range want {
		if d := math.Abs(got[i] - want[i]); !(d <= 1e-10*math.Abs(want[i])) {
			t.Errorf("step %d: %v, PyTorch has %v", i, got[i], want[i])
		}
	}
}

func TestSchedulesMatchPyTorch(t *testing.T) {
	f := openFile(t, "parity.safetensors")
	for name, s := range schedules() {
		t.Run(name, func(t *testing.T) {
			want := f.values(t, "schedule/"+name)
			opt, err := optim.NewSGD([]*torch.Tensor{leaf(t, 1)}, optim.SGDOptions{LR: scheduleBase})
			if err != nil {
				t.Fatal(err)
			}
			scheduler, err := optim.NewScheduler(opt, s)
			if err != nil {
				t.Fatal(err)
			}
			var got []float64
			for range want {
				got = append(got, opt.LR())
				if err := scheduler.Step(); err != nil {
					t.Fatal(err)
				}
			}
			relative(t, got, want)
			if scheduler.Count() != len(want) {
				t.Errorf("%d steps, want %d", scheduler.Count(), len(want))
			}
		})
	}
}

// The values are of PyTorch 2.11's ChainedScheduler of CosineAnnealingLR(T_max=10) and
// MultiStepLR([3, 6], 0.5), from lr=0.1 on.
func TestChainedCosineMatchesPyTorch(t *testing.T) {
	want := []float64{0.1,
		0.09755282581475769, 0.09045084971874738, 0.03969463130731184, 0.03272542485937369,
		0.025000000000000005, 0.00863728757031316, 0.005152684346344088, 0.0023872875703131588, 0.000611793546310581}
	schedule := optim.Chained{optim.CosineLR{Steps: 10}, optim.MultiStepLR{Milestones: []int{3, 6}, Gamma: 0.5}}
	var got []float64
	for step := range want {
		got = append(got, schedule.LR(0.1, step))
	}
	relative(t, got, want)
}

// cycled are the optimizers that testdata/make_onecycle.py calls by the same names.
var cycled = map[string]func(p []*torch.Tensor) (optim.Optimizer, error){
	"sgd": func(p []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewSGD(p, optim.SGDOptions{LR: 0.05, Momentum: 0.9, WeightDecay: 0.05})
	},
	"sgd-nesterov": func(p []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewSGD(p, optim.SGDOptions{LR: 0.05, Momentum: 0.9, Nesterov: true})
	},
	"adam": func(p []*torch.Tensor) (optim.Optimizer, error) { return optim.NewAdam(p, optim.AdamOptions{LR: 0.05}) },
	"adamw": func(p []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewAdamW(p, optim.AdamWOptions{LR: 0.05})
	},
}

func TestOneCycleMomentaMatchPyTorch(t *testing.T) {
	f := openFile(t, "onecycle.safetensors")
	for name, s := range map[string]optim.OneCycleLR{
		"default": {Steps: 40, CycleMomentum: true},
		"three": {Steps: 45, RiseShare: 0.25, Linear: true, DivFactor: 10, FinalDivFactor: 100, ThreePhase: true,
			CycleMomentum: true, BaseMomentum: 0.5, MaxMomentum: 0.9},
	} {
		opt, err := optim.NewAdam([]*torch.Tensor{leaf(t, 1)}, optim.AdamOptions{LR: scheduleBase})
		if err != nil {
			t.Fatal(err)
		}
		scheduler, err := optim.NewScheduler(opt, s)
		if err != nil {
			t.Fatal(err)
		}
		var rates, momenta []float64
		for range 40 {
			rates, momenta = append(rates, opt.LR()), append(momenta, opt.Momentum())
			if err := scheduler.Step(); err != nil {
				t.Fatal(err)
			}
		}
		relative(t, rates, f.values(t, name+"/rates"))
		relative(t, momenta, f.values(t, name+"/momenta"))
	}
}

// Twenty steps with a cycled momentum match PyTorch's, even if a new Scheduler takes over in
// between.
func TestOneCycleTrainingMatchesPyTorch(t *testing.T) {
	cycle := optim.OneCycleLR{Steps: paritySteps, CycleMomentum: true, BaseMomentum: 0.7}
	f, problems := openFile(t, "onecycle.safetensors"), openFile(t, "parity.safetensors")
	for name, make := range cycled {
		for dtype, bound := range map[string]float64{"float64": 1e-10, "float32": 1e-5} {
			t.Run(name+"/"+dtype, func(t *testing.T) {
				p := newProblem(t, problems, dtype)
				opt, err := make(p.params)
				if err != nil {
					t.Fatal(err)
				}
				defer opt.Close()
				var losses []float64
				var scheduler *optim.Scheduler
				for step := range paritySteps {
					if step%8 == 0 {
						if scheduler, err = optim.NewScheduler(opt, cycle); err != nil {
							t.Fatal(err)
						}
						if err := scheduler.SetCount(step); err != nil {
							t.Fatal(err)
						}
					}
					losses = append(losses, p.train(t, opt, step, step+1)...)
					if err := scheduler.Step(); err != nil {
						t.Fatal(err)
					}
				}
				prefix := dtype + "/" + name + "/"
				near(t, "losses", losses, f.values(t, prefix+"losses"), bound)
				for i, w := range p.params {
					near(t, fmt.Sprint("parameter ", i), values(t, w), f.values(t, fmt.Sprint(prefix, i)), bound)
				}
				compareState(t, f, opt, prefix, p.params, bound)
			})
		}
	}
}

func TestSetMomentumRefuses(t *testing.T) {
	p := []*torch.Tensor{leaf(t, 1)}
	made := func(opt optim.Optimizer, err error) optim.Optimizer {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return opt
	}
	plain := made(optim.NewSGD(p, optim.SGDOptions{}))
	fast, err := optim.NewSGD(p, optim.SGDOptions{Momentum: 0.9})
	if err != nil {
		t.Fatal(err)
	}
	adam, err := optim.NewAdam(p, optim.AdamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cycle := optim.OneCycleLR{Steps: 10, CycleMomentum: true}
	schedule := func(opt optim.Optimizer, s optim.Schedule) error {
		_, err := optim.NewScheduler(opt, s)
		return err
	}
	for says, err := range map[string]error{
		"optim.SGD.SetMomentum: 0.95: 0 is an optimizer without velocities": schedule(plain, cycle),
		"*optim.RMSprop has no SetMomentum: use SGD, Adam or AdamW": schedule(
			made(optim.NewRMSprop(p, optim.RMSpropOptions{Momentum: 0.9})), cycle),
		"*optim.LAMB has no SetMomentum": schedule(made(optim.NewLAMB(p,
			optim.LAMBOptions{})), cycle),
		"optim.AdamW.SetMomentum: 0.95: with Capturable": schedule(made(optim.NewAdamW(p,
			optim.AdamWOptions{Capturable: true})), cycle),
		"Sequential: phase 0: CycleMomentum is for a schedule by itself": schedule(fast,
			optim.Sequential{{Steps: 10, Schedule: cycle}}),
		"Chained: schedule 0: CycleMomentum is for a schedule by itself": schedule(fast, optim.Chained{cycle}),
		"OneCycleLR: BaseMomentum is 0.5 without CycleMomentum": schedule(fast,
			optim.OneCycleLR{Steps: 10, BaseMomentum: 0.5}),
		"OneCycleLR: MaxMomentum is 1: it must be from 0 to below 1": schedule(fast,
			optim.OneCycleLR{Steps: 10, CycleMomentum: true, MaxMomentum: 1}),
		"optim.SGD.SetMomentum: 0: 0 is an optimizer without velocities": fast.SetMomentum(0),
		"optim.SGD.SetMomentum: NaN: a momentum must be finite":          fast.SetMomentum(nan),
		"optim.Adam.SetMomentum: 1: β1 must be below 1":                  adam.SetMomentum(1),
		"optim.Adam.SetMomentum: -1: a momentum must be finite":          adam.SetMomentum(-1),
	} {
		if err == nil || !errors.Is(err, cuda.ErrInvalidArgument) || !strings.Contains(err.Error(), says) {
			t.Errorf("want %q, got %v", says, err)
		}
	}
	if fast.Momentum() != 0.9 || adam.Momentum() != 0.9 || fast.LR() != 0.001 {
		t.Errorf("refused calls left %v, %v and the rate %v, want 0.9, 0.9, 0.001",
			fast.Momentum(), adam.Momentum(), fast.LR())
	}
	if err := adam.SetMomentum(0.5); err != nil || adam.Momentum() != 0.5 {
		t.Error(adam.Momentum(), err)
	}
	state, err := adam.State()
	if err != nil || !strings.Contains(state.Metadata["param_groups"], `"betas":[0.5,0.999]`) {
		t.Error(state.Metadata, err)
	}
}

func TestPlateauMatchesPyTorch(t *testing.T) {
	f := openFile(t, "parity.safetensors")
	metrics := f.values(t, "schedule/metrics")
	for name, o := range map[string]optim.PlateauOptions{
		"plateau": {Patience: 2, Factor: 0.5},
		"plateau-max": {Maximize: true, Patience: -1, Factor: 0.3, Threshold: 0.1, Absolute: true,
			Cooldown: 3, Min: 0.001},
	} {
		t.Run(name, func(t *testing.T) {
			opt, err := optim.NewSGD([]*torch.Tensor{leaf(t, 1)}, optim.SGDOptions{LR: scheduleBase})
			if err != nil {
				t.Fatal(err)
			}
			plateau, err := optim.NewPlateau(opt, o)
			if err != nil {
				t.Fatal(err)
			}
			var got []float64
			for i, m := range metrics {
				got = append(got, opt.LR())
				if i == 7 { // resumes in another one
					state := plateau.State()
					if plateau, err = optim.NewPlateau(opt, o); err != nil {
						t.Fatal(err)
					}
					if err := plateau.LoadState(state); err != nil {
						t.Fatal(err)
					}
				}
				if err := plateau.Step(m); err != nil {
					t.Fatal(err)
				}
			}
			relative(t, got, f.values(t, "schedule/"+name))
		})
	}
}

// A schedule scales each group's rate, and continues after a load.
func TestSchedulerOfGroups(t *testing.T) {
	opt, err := optim.NewSGD([]*torch.Tensor{leaf(t, 1)},
		optim.SGDOptions{LR: 1, Groups: []optim.Group{{Params: []*torch.Tensor{leaf(t, 1)}, LR: 4}}})
	if err != nil {
		t.Fatal(err)
	}
	half := optim.ScheduleFunc(func(base float64, step int) float64 { return base / float64(step+1) })
	s, err := optim.NewScheduler(opt, half)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Step(); err != nil || !reflect.DeepEqual(opt.LRs(), []float64{0.5, 2}) {
		t.Errorf("got %v, %v, want [0.5 2], nil", opt.LRs(), err)
	}
	if s, err = optim.NewScheduler(opt, half); err != nil || !reflect.DeepEqual(opt.LRs(), []float64{1, 4}) {
		t.Errorf("got %v, %v, want [1 4], nil", opt.LRs(), err)
	}
	if err := s.SetCount(3); err != nil || !reflect.DeepEqual(opt.LRs(), []float64{0.25, 1}) {
		t.Errorf("got %v, %v, want [0.25 1], nil", opt.LRs(), err)
	}
	if err := s.SetCount(-1); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Error(err)
	}
}

func TestSchedulesOutOfRange(t *testing.T) {
	opt, err := optim.NewSGD([]*torch.Tensor{leaf(t, 1)}, optim.SGDOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for text, s := range map[string]optim.Schedule{
		"the schedule is nil":               nil,
		"StepLR: Size is 0":                 optim.StepLR{},
		"StepLR: Gamma is -1":               optim.StepLR{Size: 1, Gamma: -1},
		"MultiStepLR: Gamma is NaN":         optim.MultiStepLR{Gamma: nan},
		"ExponentialLR: Gamma is 0":         optim.ExponentialLR{},
		"LinearWarmup: Steps is 0":          optim.LinearWarmup{},
		"LinearWarmup: Start is 2":          optim.LinearWarmup{Steps: 1, Start: 2},
		"LinearWarmup: End is 2":            optim.LinearWarmup{Steps: 1, End: 2},
		"CosineLR: Steps is 0":              optim.CosineLR{},
		"CosineLR: Min is -1":               optim.CosineLR{Steps: 1, Min: -1},
		"CosineRestarts: Multiply is -1":    optim.CosineRestarts{Steps: 1, Multiply: -1},
		"OneCycleLR: Steps is 0":            optim.OneCycleLR{},
		"OneCycleLR: RiseShare is 2":        optim.OneCycleLR{Steps: 10, RiseShare: 2},
		"OneCycleLR: RiseShare is 0.3 of 3": optim.OneCycleLR{Steps: 3},
		"OneCycleLR: DivFactor is -1":       optim.OneCycleLR{Steps: 10, DivFactor: -1},
		"Sequential: no phases":             optim.Sequential{},
		"Sequential: phase 0: Steps is 0":   optim.Sequential{{}, {}},
		"Sequential: phase 1: CosineLR: Steps is 0": optim.Sequential{{1, optim.StepLR{Size: 1}},
			{0, optim.CosineLR{}}},
		"Chained: no schedules":                        optim.Chained{},
		"Chained: schedule 0: LinearWarmup: Steps is ": optim.Chained{optim.LinearWarmup{}},
	} {
		t.Run(text, func(t *testing.T) {
			if _, err := optim.NewScheduler(opt, s); !errors.Is(err, cuda.ErrInvalidArgument) ||
				!strings.Contains(err.Error(), text) {
				t.Error(err)
			}
		})
	}
	for text, o := range map[string]optim.PlateauOptions{
		"Factor is 1": {Factor: 1}, "Threshold is -1": {Threshold: -1}, "Min is -1": {Min: -1},
		"Cooldown is -1": {Cooldown: -1},
	} {
		t.Run(text, func(t *testing.T) {
			if _, err := optim.NewPlateau(opt, o); !errors.Is(err, cuda.ErrInvalidArgument) ||
				!strings.Contains(err.Error(), text) {
				t.Error(err)
			}
		})
	}
}

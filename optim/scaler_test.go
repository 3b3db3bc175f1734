package optim_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// scalerMakers are the optimizers that testdata/make_scaler.py calls by the same names.
var scalerMakers = map[string]func(p []*torch.Tensor) (optim.Optimizer, error){
	"sgd": func(p []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewSGD(p, optim.SGDOptions{LR: 0.05, Momentum: 0.9, WeightDecay: 0.01, Nesterov: true})
	},
	"sgd-plain": func(p []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewSGD(p, optim.SGDOptions{LR: 0.05, Capturable: true})
	},
	"adam": func(p []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewAdam(p, optim.AdamOptions{LR: 0.01, AMSGrad: true})
	},
	"adamw": func(p []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewAdamW(p, optim.AdamWOptions{LR: 0.01, Capturable: true})
	},
	"rmsprop": func(p []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewRMSprop(p, optim.RMSpropOptions{LR: 0.01})
	},
	"clipped": func(p []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewAdamW(p, optim.AdamWOptions{LR: 0.01})
	},
}

// planted are the gradients that make_scaler.py overwrites: each by parameter and backward pass.
var planted = map[int]struct {
	index int
	value float64
}{0: {2, math.Inf(1)}, 2: {0, math.Inf(1)}, 3: {3, math.Inf(-1)}, 9: {1, nan}, 16: {0, math.Inf(1)}}

// scaledSteps runs the steps from first to before last, as make_scaler.py does, and returns scale
// and good steps after each.
func (p problem) scaledSteps(t *testing.T, opt optim.Optimizer, scaler *optim.GradScaler, first, last int,
	clip bool) (scales, good []float64) {
	t.Helper()
	for step := first; step < last; step++ {
		s := torch.NewScope("step")
		defer s.Close()
		if err := scaler.Backward(p.loss(s, step)); err != nil {
			t.Fatal(err)
		}
		if plant, ok := planted[step]; ok {
			g := p.params[plant.index].NoGrad().In(s).Grad()
			if err := g.Reshape(-1).Narrow(0, 0, 1).Fill_(plant.value).Err(); err != nil {
				t.Fatal(err)
			}
		}
		if clip {
			err := scaler.Unscale(opt)
			if err == nil {
				var norm *torch.Tensor
				norm, err = optim.ClipGradNorm(p.params, 1, optim.ClipOptions{})
				norm.Close()
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(scaler.Step(opt), scaler.Update()); err != nil {
			t.Fatal(err)
		}
		state, err := scaler.State()
		if err != nil {
			t.Fatal(err)
		}
		scales, good = append(scales, state.Scale), append(good, float64(state.GrowthTracker))
	}
	return scales, good
}

var scalerOptions = optim.GradScalerOptions{InitScale: 1024, GrowthInterval: 4}

func newScaler(t *testing.T, device cuda.Device, o optim.GradScalerOptions) *optim.GradScaler {
	t.Helper()
	s, err := optim.NewGradScaler(device, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// Scales, skipped steps, parameters and state match PyTorch's, on the CPU and, if there is one, on
// a GPU.
func TestGradScalerMatchesPyTorch(t *testing.T) {
	data, f := openFile(t, "parity.safetensors"), openFile(t, "scaler.safetensors")
	for device := cuda.CPU; int(device) < min(1, cuda.DeviceCount()); device++ {
		for name, newOptimizer := range scalerMakers {
			t.Run(fmt.Sprint(name, " on ", device), func(t *testing.T) {
				p := newProblemOn(t, data, "float32", device)
				p.elementwise = true
				opt, err := newOptimizer(p.params)
				if err != nil {
					t.Fatal(err)
				}
				defer opt.Close()
				bound := 1e-5
				if device != cuda.CPU {
					bound = 1e-4 // see make_parity.py for the fused operators of a GPU
				}
				scales, good := p.scaledSteps(t, opt, newScaler(t, device, scalerOptions), 0, paritySteps,
					name == "clipped")
				near(t, "scales", scales, f.values(t, name+"/scales"), 1e-15)
				near(t, "good steps", good, f.values(t, name+"/tracker"), 1e-15)
				for i, w := range p.params {
					near(t, fmt.Sprint("parameter ", i), values(t, w), f.values(t, fmt.Sprint(name, "/", i)), bound)
				}
				compareState(t, f, opt, name+"/", p.params, bound)
			})
		}
	}
}

// A scaler and an optimizer resumed from saved states compute the same bits.
func TestGradScalerState(t *testing.T) {
	data := openFile(t, "parity.safetensors")
	run := func(stop int) [][]float64 {
		p := newProblem(t, data, "float32")
		opt, err := scalerMakers["adamw"](p.params)
		if err != nil {
			t.Fatal(err)
		}
		defer opt.Close()
		scaler := newScaler(t, cuda.CPU, scalerOptions)
		p.scaledSteps(t, opt, scaler, 0, stop, false)
		if stop < paritySteps {
			state, err := scaler.State()
			if err != nil {
				t.Fatal(err)
			}
			scaler = newScaler(t, cuda.CPU, scalerOptions)
			if err := scaler.LoadState(state); err != nil {
				t.Fatal(err)
			}
			p.scaledSteps(t, opt, scaler, stop, paritySteps, false)
		}
		var bits [][]float64
		for _, w := range p.params {
			bits = append(bits, values(t, w))
		}
		return bits
	}
	want := fmt.Sprint(run(paritySteps))
	for _, stop := range []int{1, 4, 17} {
		if got := fmt.Sprint(run(stop)); got != want {
			t.Errorf("saved after step %d: %s\nwant %s", stop, got, want)
		}
	}
}

// A captured step skips infinite gradients and adapts the scale, without the host.
func TestGradScalerInAGraph(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for name, newOptimizer := range map[string]func(p []*torch.Tensor) (optim.Optimizer, error){
		"AdamW": func(p []*torch.Tensor) (optim.Optimizer, error) {
			return optim.NewAdamW(p, optim.AdamWOptions{LR: 0.1, Capturable: true})
		},
		"SGD": func(p []*torch.Tensor) (optim.Optimizer, error) {
			return optim.NewSGD(p, optim.SGDOptions{LR: 0.1, Momentum: 0.9, Capturable: true})
		},
	} {
		t.Run(name, func(t *testing.T) {
			run := func(graph bool) (weights []float64, scales []float64) {
				w := full(t, cuda.Device(0), 1, 4)
				x := full(t, cuda.Device(0), 1, 4)
				opt, err := newOptimizer([]*torch.Tensor{w})
				if err != nil {
					t.Fatal(err)
				}
				defer opt.Close()
				scaler := newScaler(t, cuda.Device(0), optim.GradScalerOptions{InitScale: 8, GrowthInterval: 2})
				step := func(in []*torch.Tensor) ([]*torch.Tensor, error) {
					return nil, errors.Join(scaler.Backward(in[0].Mul(w).Square().Sum()), scaler.Step(opt),
						scaler.Update())
				}
				g := torch.NewGraphed(step, torch.GraphedOptions{})
				defer g.Close()
				for i := range 12 {
					value := 1.0
					if i == 5 || i == 6 {
						value = math.Inf(1)
					}
					if err := x.NoGrad().Fill_(value).Err(); err != nil {
						t.Fatal(err)
					}
					in := x.Detach()
					if graph {
						_, err = g.Call(in)
					} else {
						_, err = step([]*torch.Tensor{in})
					}
					in.Close()
					if err != nil {
						t.Fatal(err)
					}
					scale, err := scaler.Scale()
					if err != nil {
						t.Fatal(err)
					}
					scales = append(scales, scale)
				}
				if s := g.Stats(); graph && s.Captures != 1 {
					t.Errorf("%+v", s)
				}
				return values(t, w), scales
			}
			weights, scales := run(true)
			wantWeights, wantScales := run(false)
			near(t, "scales", scales, wantScales, 1e-15)
			near(t, "parameters", weights, wantWeights, 1e-6)
		})
	}
}

// full returns a parameter of ones.
func full(t *testing.T, device cuda.Device, value float64, shape ...int64) *torch.Tensor {
	t.Helper()
	w, err := torch.Full(device, torch.Float32, value, shape...)
	if err == nil {
		err = w.SetRequiresGrad(true)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

// converted returns a parameter of another dtype with the values of p.
func converted(t *testing.T, p *torch.Tensor, dtype torch.DType) *torch.Tensor {
	t.Helper()
	c := p.ToDType(dtype)
	defer c.Close()
	w := c.Detach()
	t.Cleanup(func() { w.Close() })
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	return w
}

func TestGradScalerRefuses(t *testing.T) {
	for _, o := range []optim.GradScalerOptions{{InitScale: -1}, {InitScale: nan}, {GrowthFactor: 1},
		{BackoffFactor: 1}, {BackoffFactor: -1}, {GrowthInterval: -1}} {
		if _, err := optim.NewGradScaler(cuda.CPU, o); !errors.Is(err, cuda.ErrInvalidArgument) {
			t.Errorf("%+v: %v, want cuda.ErrInvalidArgument", o, err)
		}
	}
	w := full(t, cuda.CPU, 1)
	opt, err := optim.NewSGD([]*torch.Tensor{w}, optim.SGDOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s := newScaler(t, cuda.CPU, optim.GradScalerOptions{})
	if err := s.Update(); err == nil || !strings.Contains(err.Error(), "no optimizer stepped") {
		t.Error(err)
	}
	if err := s.Step(opt); !errors.Is(err, optim.ErrNoGradients) {
		t.Error(err)
	}
	if err := errors.Join(s.Backward(w), s.Unscale(opt)); err != nil {
		t.Fatal(err)
	}
	if err := s.Unscale(opt); err == nil || !strings.Contains(err.Error(), "unscaled already") {
		t.Error(err)
	}
	if err := s.LoadState(optim.GradScalerState{}); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Error(err)
	}
	half := converted(t, w, torch.Float16)
	if err := half.Sum().Backward(); err != nil {
		t.Fatal(err)
	}
	narrow, err := optim.NewSGD([]*torch.Tensor{half}, optim.SGDOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Step(narrow); err == nil || !strings.Contains(err.Error(), "float16") {
		t.Error(err)
	}
	s.Close()
	for name, err := range map[string]error{
		"Backward": s.Backward(w), "Step": s.Step(opt), "Unscale": s.Unscale(opt), "Update": s.Update(),
		"LoadState": s.LoadState(optim.GradScalerState{Scale: 1}),
	} {
		if !errors.Is(err, torch.ErrClosed) {
			t.Errorf("%s: %v, want torch.ErrClosed", name, err)
		}
	}
}

// Parameters may be on several devices. A gradient that is not finite on one device skips the step
// on all.
func TestGradScalerOverSeveralDevices(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	devices := []cuda.Device{cuda.CPU, 0}
	if cuda.DeviceCount() > 1 {
		devices = append(devices, 1)
	}
	for _, name := range []string{"sgd", "adam", "rmsprop"} { // the others are capturable, which needs one device
		make := scalerMakers[name]
		for bad := range len(devices) + 1 { // in the last round, no gradient is bad
			t.Run(fmt.Sprint(name, ", not finite on device ", bad, " of ", len(devices)), func(t *testing.T) {
				var params []*torch.Tensor
				for _, d := range devices {
					params = append(params, full(t, d, 1, 2))
				}
				opt, err := make(params)
				if err != nil {
					t.Fatal(err)
				}
				defer opt.Close()
				scaler := newScaler(t, gpu, optim.GradScalerOptions{InitScale: 1024})
				turn := torch.NewScope("step")
				defer turn.Close()
				var loss *torch.Tensor
				for i, p := range params {
					factor := 1.0
					if i == bad {
						factor = math.Inf(1)
					}
					part := p.In(turn).MulScalar(factor).Sum().To(gpu)
					if loss == nil {
						loss = part
					} else {
						loss = loss.Add(part)
					}
				}
				if err := errors.Join(scaler.Backward(loss), scaler.Step(opt), scaler.Update()); err != nil {
					t.Fatal(err)
				}
				want := 1024.0
				if bad < len(devices) {
					want = 512
				}
				if scale, err := scaler.Scale(); err != nil || scale != want {
					t.Errorf("the scale is %v (%v), want %v", scale, err, want)
				}
				var first []float32
				for i, p := range params {
					got, err := p.Float32s()
					if err != nil {
						t.Fatal(err)
					}
					if stepped := got[0] != 1; stepped != (bad == len(devices)) {
						t.Errorf("the parameter of device %d is %v", i, got)
					}
					if first == nil {
						first = got
					}
					if math.Abs(float64(got[0]-first[0])) > 1e-5 {
						t.Errorf("the parameter of device %d is %v, that of the first one %v", i, got, first)
					}
				}
			})
		}
	}
}

// failing is a custom optimizer whose Step fails once.
type failing struct {
	optim.Optimizer
	err error
}

func (f *failing) Step() error {
	if err := f.err; err != nil {
		f.err = nil
		return err
	}
	return f.Optimizer.Step()
}

// After a Step that failed, such as an attempt to capture it, the next Step unscales its gradients.
func TestGradScalerAfterAFailedStep(t *testing.T) {
	p := full(t, cuda.CPU, 1, 2)
	sgd, err := optim.NewSGD([]*torch.Tensor{p}, optim.SGDOptions{LR: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	defer sgd.Close()
	opt := &failing{sgd, cuda.ErrCapture}
	scaler := newScaler(t, cuda.CPU, optim.GradScalerOptions{InitScale: 1024})
	for _, want := range []error{cuda.ErrCapture, nil} {
		s := torch.NewScope("step")
		defer s.Close()
		if err := errors.Join(sgd.ZeroGrad(), scaler.Backward(p.In(s).Sum())); err != nil {
			t.Fatal(err)
		}
		if err := scaler.Step(opt); !errors.Is(err, want) {
			t.Fatalf("Step: %v, want %v", err, want)
		}
	}
	got, err := p.Float32s()
	if err != nil || got[0] != 0.5 || got[1] != 0.5 {
		t.Errorf("%v, %v: want 0.5, a step of one unscaled gradient", got, err)
	}
}

// bfloat16 parameters with masters equal float32 parameters after the same steps, rounded. Their
// state is saved and loaded.
func TestMasterWeights(t *testing.T) {
	data := openFile(t, "parity.safetensors")
	for name, newOptimizer := range map[string]func(p []*torch.Tensor, masters bool) (optim.Optimizer, error){
		"AdamW": func(p []*torch.Tensor, m bool) (optim.Optimizer, error) {
			return optim.NewAdamW(p, optim.AdamWOptions{LR: 1e-4, MasterWeights: m})
		},
		"SGD": func(p []*torch.Tensor, m bool) (optim.Optimizer, error) {
			return optim.NewSGD(p, optim.SGDOptions{LR: 1e-4, Momentum: 0.9, MasterWeights: m, KeepGradients: true})
		},
		"SGD, capturable": func(p []*torch.Tensor, m bool) (optim.Optimizer, error) {
			return optim.NewSGD(p, optim.SGDOptions{LR: 1e-4, Momentum: 0.9, MasterWeights: m,
				Capturable: true, WeightDecay: 0.1})
		},
		"LAMB": func(p []*torch.Tensor, m bool) (optim.Optimizer, error) {
			return optim.NewLAMB(p, optim.LAMBOptions{LR: 1e-4, MasterWeights: m})
		},
		"Muon": func(p []*torch.Tensor, m bool) (optim.Optimizer, error) {
			return optim.NewMuon(p, optim.MuonOptions{LR: 1e-4, MasterWeights: m})
		},
		"RMSprop": func(p []*torch.Tensor, m bool) (optim.Optimizer, error) {
			return optim.NewRMSprop(p, optim.RMSpropOptions{LR: 1e-4, MasterWeights: m})
		},
		"Adagrad": func(p []*torch.Tensor, m bool) (optim.Optimizer, error) {
			return optim.NewAdagrad(p, optim.AdagradOptions{LR: 1e-4, MasterWeights: m})
		},
	} {
		t.Run(name, func(t *testing.T) {
			narrow := newProblem(t, data, "bfloat16")
			var wide []*torch.Tensor
			for _, p := range narrow.params {
				wide = append(wide, converted(t, p, torch.Float32))
			}
			opt, err := newOptimizer(narrow.params, true)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { opt.Close() }()
			peer, err := newOptimizer(wide, false)
			if err != nil {
				t.Fatal(err)
			}
			defer peer.Close()
			for step := range paritySteps {
				s := torch.NewScope("step")
				if err := narrow.loss(s, step).Backward(); err != nil {
					t.Fatal(err)
				}
				// The same gradients, in float32.
				for i, p := range narrow.params {
					if g := p.In(s).Grad(); g != nil {
						if err := wide[i].SetGrad(g.ToDType(torch.Float32)); err != nil {
							t.Fatal(err)
						}
					}
				}
				if step == paritySteps/2 { // resumes from a saved state
					state, err := opt.State()
					if err != nil {
						t.Fatal(err)
					}
					again, err := newOptimizer(narrow.params, true)
					if err == nil {
						err = again.LoadState(state)
					}
					if err != nil {
						t.Fatal(err)
					}
					opt.Close()
					opt = again
				}
				if err := errors.Join(opt.Step(), peer.Step(), opt.ZeroGrad()); err != nil {
					t.Fatal(err)
				}
				s.Close()
			}
			masters := map[string][]float64{}
			state, err := opt.State()
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range state.Tensors {
				if n.Tensor.DType() != torch.Float32 {
					t.Errorf("%s is %v, want float32", n.Name, n.Tensor.DType())
				}
				if strings.HasSuffix(n.Name, ".master_param") {
					masters[n.Name] = values(t, n.Tensor)
				}
			}
			if len(masters) != 6 {
				t.Errorf("%d masters, want 6", len(masters))
			}
			index := 0
			for _, g := range opt.Groups() {
				for _, p := range g.Params {
					if m := masters[fmt.Sprintf("state.%d.master_param", index)]; m != nil {
						at := indexOf(narrow.params, p)
						near(t, fmt.Sprint("master ", at), m, values(t, wide[at]), 1e-6)
						rounded := wide[at].NoGrad().ToDType(torch.BFloat16)
						near(t, fmt.Sprint("parameter ", at), values(t, p), values(t, rounded), 1e-2)
						rounded.Close()
					}
					index++
				}
			}
		})
	}
}

func indexOf(list []*torch.Tensor, p *torch.Tensor) int {
	for i, q := range list {
		if q == p {
			return i
		}
	}
	return -1
}

// Masters are saved to and loaded from files. If a file has none, they are copied from the
// parameters. Parameters that become float32 lose them.
func TestMasterWeightsOfOtherFiles(t *testing.T) {
	w := converted(t, full(t, cuda.CPU, 1), torch.BFloat16)
	step := func(o optim.Optimizer) error {
		loss := w.Sum()
		defer loss.Close()
		return errors.Join(loss.Backward(), o.Step())
	}
	path := t.TempDir() + "/opt.pt"
	opt, err := optim.NewSGD([]*torch.Tensor{w}, optim.SGDOptions{LR: 1e-3, MasterWeights: true})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	for range 3 { // each is below the rounding of bfloat16
		if err := step(opt); err != nil {
			t.Fatal(err)
		}
	}
	if err := optim.Save(path, opt); err != nil {
		t.Fatal(err)
	}
	plain, err := optim.NewSGD([]*torch.Tensor{w}, optim.SGDOptions{LR: 1e-3})
	if err != nil {
		t.Fatal(err)
	}
	if err := optim.Load(path, plain); err == nil || !strings.Contains(err.Error(), "master_param") {
		t.Errorf("an optimizer without masters: %v, want an error with \"master_param\"", err)
	}
	again, err := optim.NewSGD([]*torch.Tensor{w}, optim.SGDOptions{LR: 1e-3, MasterWeights: true})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := errors.Join(optim.Load(path, again), step(again)); err != nil {
		t.Fatal(err)
	}
	master := func(o optim.Optimizer) []torch.Named {
		s, err := o.State()
		if err != nil {
			t.Fatal(err)
		}
		return s.Tensors
	}
	near(t, "the master after four steps", values(t, master(again)[0].Tensor), []float64{0.996}, 1e-6)
	none, err := plain.State()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(again.LoadState(none), step(again)); err != nil {
		t.Fatal(err)
	}
	near(t, "the master after a state without", values(t, master(again)[0].Tensor),
		[]float64{values(t, w)[0] - 1e-3}, 1e-6)
	wide := w.NoGrad().ToDType(torch.Float32)
	defer wide.Close()
	if err := errors.Join(w.SetData(wide), step(again)); err != nil {
		t.Fatal(err)
	}
	if left := master(again); len(left) != 0 {
		t.Errorf("a float32 parameter has %v, want none", left)
	}
}

package optim_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

const gpu = cuda.Device(0)

// With changing rates, every optimizer's captured step gives the losses and parameters of eager
// steps. Each replay reads rates and step counts from device memory.
func TestCapturedStepsEqualEagerSteps(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	f := openFile(t, "parity.safetensors")
	for name, make := range makers {
		t.Run(name, func(t *testing.T) {
			train := func(graphed bool) (losses []float64, p problem, stats torch.GraphedStats) {
				p = newProblemOn(t, f, "float32", gpu)
				opt, err := make(p.params, true)
				if err != nil {
					t.Fatal(err)
				}
				defer opt.Close()
				halving := optim.ScheduleFunc(func(base float64, step int) float64 { return base / float64(1+step/5) })
				scheduler, err := optim.NewScheduler(opt, halving)
				if err != nil {
					t.Fatal(err)
				}
				step := func(in []*torch.Tensor) ([]*torch.Tensor, error) {
					q := p
					q.x = in[0]
					loss := q.lossIn(paritySteps)
					if err := loss.Backward(); err != nil {
						return nil, err
					}
					norm, err := optim.ClipGradNorm(p.params, 5, optim.ClipOptions{})
					if err != nil {
						return nil, err
					}
					norm.Close()
					if err := optim.ClipGradValue(p.params, 1); err != nil {
						return nil, err
					}
					return []*torch.Tensor{loss}, opt.Step()
				}
				g := torch.NewGraphed(step, torch.GraphedOptions{})
				defer g.Close()
				for range paritySteps {
					s := torch.NewScope("step")
					var out []*torch.Tensor
					if graphed {
						out, err = g.Call(p.x.In(s))
					} else {
						out, err = step([]*torch.Tensor{p.x.In(s)})
					}
					if err != nil {
						t.Fatal(err)
					}
					losses = append(losses, values(t, out[0])...)
					s.Close()
					if err := scheduler.Step(); err != nil {
						t.Fatal(err)
					}
				}
				return losses, p, g.Stats()
			}
			eager, want, _ := train(false)
			captured, got, stats := train(true)
			bound := tolerance(name, "float32", true)
			near(t, "losses", captured, eager, bound)
			for i := range want.params {
				near(t, fmt.Sprint("parameter ", i), values(t, got.params[i]), values(t, want.params[i]), bound)
			}
			if stats.Captures != 1 || stats.Hits != paritySteps-1 {
				t.Errorf("%+v, want Captures 1, Hits %v", stats, paritySteps-1)
			}
		})
	}
}

// State saved on the CPU resumes on the GPU, and the other way round.
func TestStateMovesBetweenDevices(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	f := openFile(t, "parity.safetensors")
	for _, devices := range [][2]cuda.Device{{cuda.CPU, gpu}, {gpu, cuda.CPU}} {
		t.Run(fmt.Sprint(devices), func(t *testing.T) {
			first := newProblemOn(t, f, "float64", devices[0])
			opt, err := makers["adamw"](first.params, false)
			if err != nil {
				t.Fatal(err)
			}
			defer opt.Close()
			first.train(t, opt, 0, 10)
			state, err := opt.State()
			if err != nil {
				t.Fatal(err)
			}
			second := newProblemOn(t, f, "float64", devices[1])
			for i, p := range second.params {
				if err := p.CopyFrom(first.params[i], torch.CopyOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			other, err := makers["adamw"](second.params, false)
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			if err := other.LoadState(state); err != nil {
				t.Fatal(err)
			}
			second.train(t, other, 10, paritySteps)
			for i, p := range second.params {
				near(t, fmt.Sprint("parameter ", i), values(t, p),
					f.values(t, fmt.Sprintf("float64/adamw/%d", i)), 1e-9)
			}
		})
	}
}

// Muon's weight decay is exact with a learning rate in device memory. In bfloat16, 1.5*0.998 is
// 1.5. With a factor that was rounded to bfloat16 first, the product is 1.4921875.
func TestCapturableDoesNotRoundWeightDecay(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for _, capturable := range []bool{false, true} {
		p, err := torch.Full(gpu, torch.BFloat16, 1.5, 4, 4)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		grad, err := torch.Zeros(gpu, torch.BFloat16, 4, 4)
		if err != nil {
			t.Fatal(err)
		}
		defer grad.Close()
		if err := p.SetRequiresGrad(true); err != nil {
			t.Fatal(err)
		}
		opt, err := optim.NewMuon([]*torch.Tensor{p},
			optim.MuonOptions{LR: 0.02, WeightDecay: 0.1, Capturable: capturable})
		if err != nil {
			t.Fatal(err)
		}
		defer opt.Close()
		if err := errors.Join(p.SetGrad(grad), opt.Step()); err != nil {
			t.Fatal(err)
		}
		if v := values(t, p); v[0] != 1.5 {
			t.Errorf("Capturable %v: %v, want 1.5", capturable, v[0])
		}
	}
}

// With every optimizer, a step launches fewer kernels than there are parameters.
func TestStepTakesFewKernels(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	const parameters = 128
	stream, err := cuda.NewOwnedStream(gpu, cuda.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	for name, make := range makers {
		t.Run(name, func(t *testing.T) {
			scope := torch.NewScope("test")
			defer scope.Close()
			ones := func() *torch.Tensor {
				x, err := torch.Ones(gpu, torch.Float32, 32, 16)
				if err != nil {
					t.Fatal(err)
				}
				return scope.Own(x)
			}
			var params, grads []*torch.Tensor
			for range parameters {
				p := ones()
				if err := p.SetRequiresGrad(true); err != nil {
					t.Fatal(err)
				}
				params, grads = append(params, p), append(grads, ones())
			}
			opt, err := make(params, true)
			if err != nil {
				t.Fatal(err)
			}
			defer opt.Close()
			withGrads := func() error {
				for i, p := range params {
					if err := p.SetGrad(grads[i]); err != nil {
						return err
					}
				}
				return nil
			}
			if err := stream.Wait(cuda.DefaultStream(gpu)); err != nil {
				t.Fatal(err)
			}
			err = cuda.WithStream(stream.Stream, func() error {
				for range 2 {
					if err := errors.Join(withGrads(), opt.Step()); err != nil {
						return err
					}
				}
				if err := withGrads(); err != nil {
					return err
				}
				graph, err := cuda.Capture(cuda.CaptureOptions{Stream: stream.Stream}, opt.Step)
				if err != nil {
					return err
				}
				defer graph.Close()
				if n := graph.Nodes(); n == 0 || n >= parameters {
					t.Errorf("%d kernels for %d parameters", n, parameters)
				}
				return nil
			})
			if err := errors.Join(err, gpu.Synchronize()); err != nil { // before the scope frees the tensors
				t.Fatal(err)
			}
		})
	}
}

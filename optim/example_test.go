package optim_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

func ExampleSGD() {
	w, err := torch.Full(cuda.CPU, torch.Float32, 10, 1)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer w.Close()
	if err := w.SetRequiresGrad(true); err != nil {
		fmt.Println(err)
		return
	}
	opt, err := optim.NewSGD([]*torch.Tensor{w}, optim.SGDOptions{LR: 0.25})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer opt.Close()
	for range 3 {
		turn := torch.NewScope("turn")
		if err := w.In(turn).Square().Sum().Backward(); err != nil { // the gradient is 2w
			fmt.Println(err)
			return
		}
		if err := opt.Step(); err != nil {
			fmt.Println(err)
			return
		}
		turn.Close()
		fmt.Println(w)
	}
	// Output:
	// float32[1] cpu: [5.]
	// float32[1] cpu: [2.5000]
	// float32[1] cpu: [1.2500]
}

// Fine-tuning: the head learns faster than the trunk, biases do not decay, the rate warms up and
// falls along a cosine, gradients are clipped, and averages of the parameters are kept.
func Example() {
	if err := fineTune(); err != nil {
		fmt.Println(err)
	}
	// Output:
	// step 0: rates 0.001 0.01
	// step 10: rates 0.01 0.1
	// step 39: rates 2.8388e-05 0.0002749
	// the loss fell: true
	// resumed at 1e-06 after 40 steps
}

func fineTune() error {
	if err := torch.ManualSeed(1); err != nil {
		return err
	}
	trunk, head := nn.NewLinear(4, 8, nn.LinearOptions{}), nn.NewLinear(8, 1, nn.LinearOptions{})
	net := nn.NewSequential(trunk, nn.NewReLU(), head)
	defer nn.Close(net)
	weight, bias := nn.Parameters(trunk)[0], nn.Parameters(trunk)[1]
	opt, err := optim.NewAdamW([]*torch.Tensor{weight}, optim.AdamWOptions{LR: 0.01, Groups: []optim.Group{
		{Params: []*torch.Tensor{bias}, NoWeightDecay: true},
		{Params: nn.Parameters(head), LR: 0.1},
	}})
	if err != nil {
		return err
	}
	defer opt.Close()
	const steps = 40
	scheduler, err := optim.NewScheduler(opt, optim.Sequential{
		{Steps: 10, Schedule: optim.LinearWarmup{Steps: 10, Start: 0.1}},
		{Schedule: optim.CosineLR{Steps: steps - 10, Min: 1e-6}},
	})
	if err != nil {
		return err
	}
	ema, err := optim.NewEMA(nn.State(net), optim.EMAOptions{Decay: 0.99})
	if err != nil {
		return err
	}
	defer ema.Close()
	x, err := torch.Randn(cuda.CPU, torch.Float32, 32, 4)
	if err != nil {
		return err
	}
	defer x.Close()
	var first, last float64
	for step := range steps {
		turn := torch.NewScope("step")
		in := x.In(turn)
		loss := net.Forward(in).MSELoss(in.SumDim([]int64{1}, true))
		if err := loss.Backward(); err != nil {
			return err
		}
		norm, err := optim.ClipGradNorm(nn.Parameters(net), 5, optim.ClipOptions{})
		if err != nil {
			return err
		}
		norm.Close()
		if step == 0 || step == 10 || step == steps-1 {
			fmt.Printf("step %d: rates %.5g %.5g\n", step, opt.LRs()[0], opt.LRs()[2])
		}
		for _, f := range []func() error{opt.Step, ema.Update, scheduler.Step} {
			if err := f(); err != nil {
				return err
			}
		}
		if last, err = loss.Float64(); err != nil {
			return err
		}
		if step == 0 {
			first = last
		}
		turn.Close()
	}
	fmt.Println("the loss fell:", last < first/4)

	folder, err := os.MkdirTemp("", "optim")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	path := filepath.Join(folder, "adamw.safetensors")
	if err := errors.Join(optim.Save(path, opt), optim.Load(path, opt),
		scheduler.SetCount(scheduler.Count())); err != nil {
		return err
	}
	fmt.Println("resumed at", opt.LR(), "after", scheduler.Count(), "steps")
	return nil
}

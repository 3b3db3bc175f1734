package train_test

import (
	"runtime"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// BenchmarkStep measures the host time of a step, for the ResNet-50 and the GPT-2 of
// torchstream-lab train. It measures the host alone with simulated devices that compute nothing
// (tools/null-device.sh).
func BenchmarkStep(b *testing.B) {
	for _, model := range []string{"resnet50", "gpt2"} {
		b.Run(model, func(b *testing.B) { benchmarkStep(b, model) })
	}
}

func benchmarkStep(b *testing.B, model string) {
	runtime.LockOSThread() // LibTorch plans convolutions for each thread anew
	defer runtime.UnlockOSThread()
	device, autocast := cuda.CPU, torch.DType(0)
	if cuda.DeviceCount() > 0 {
		device, autocast = 0, torch.BFloat16
	} else if err := torch.SetNumThreads(1); err != nil {
		b.Fatal(err)
	}
	check := func(err error) {
		if err != nil {
			b.Helper()
			b.Fatal(err)
		}
	}
	net, err := models.ByName(model, models.Options{})
	check(err)
	defer nn.Close(net)
	check(nn.To(net, device))
	scope := torch.NewScope("data")
	defer scope.Close()
	o := train.StepperOptions{Model: net, Autocast: autocast}
	var input, target *torch.Tensor
	if model == "gpt2" {
		numbers, err := torch.FromInt64s(make([]int64, 2*128))
		check(err)
		input = scope.Own(scope.Own(numbers).View(2, 128).To(device))
		target = input
		opt, err := optim.NewAdamW(nn.Parameters(net), optim.AdamWOptions{LR: 1e-4, Capturable: true})
		check(err)
		defer opt.Close()
		o.Optimizer = opt
		o.Loss = func(logits *torch.Tensor, targets []*torch.Tensor) *torch.Tensor {
			return logits.Flatten(0, 1).CrossEntropy(targets[0].Flatten(0, 1))
		}
	} else {
		check(nn.ToMemoryFormat(net, torch.ChannelsLast))
		random, err := torch.Randn(device, torch.Float32, 2, 3, 64, 64)
		check(err)
		input = scope.Own(random).Contiguous(torch.ChannelsLast)
		numbers, err := torch.FromInt64s([]int64{1, 2})
		check(err)
		target = scope.Own(numbers).To(device)
		opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.01, Momentum: 0.9, Capturable: true})
		check(err)
		defer opt.Close()
		o.Optimizer = opt
	}
	stepper, err := train.NewStepper(o)
	check(err)
	defer stepper.Close()
	step := func() {
		turn := torch.NewScope("step")
		defer turn.Close()
		_, _, err := stepper.Step(input.In(turn), target.In(turn))
		check(err)
	}
	for range 3 {
		step()
	}
	for b.Loop() {
		step()
	}
}

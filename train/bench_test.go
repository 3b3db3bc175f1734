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

// BenchmarkStep measures what a step costs the host: a ResNet-50, as torchstream bench train makes
// it, and two small images. On devices that compute nothing (tools/null-device.sh) all of that is
// the host's.
func BenchmarkStep(b *testing.B) {
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
	net, err := models.ByName("resnet50", models.Options{})
	check(err)
	defer nn.Close(net)
	check(nn.To(net, device))
	check(nn.ToMemoryFormat(net, torch.ChannelsLast))
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.01, Momentum: 0.9, Capturable: true})
	check(err)
	defer opt.Close()
	stepper, err := train.NewStepper(train.StepperOptions{Model: net, Optimizer: opt, Autocast: autocast})
	check(err)
	defer stepper.Close()
	scope := torch.NewScope("data")
	defer scope.Close()
	random, err := torch.Randn(device, torch.Float32, 2, 3, 64, 64)
	check(err)
	images := scope.Own(random).Contiguous(torch.ChannelsLast)
	numbers, err := torch.FromInt64s([]int64{1, 2})
	check(err)
	labels := scope.Own(numbers).To(device)
	step := func() {
		turn := torch.NewScope("step")
		defer turn.Close()
		_, _, err := stepper.Step(images.In(turn), labels.In(turn))
		check(err)
	}
	for range 3 {
		step()
	}
	for b.Loop() {
		step()
	}
}

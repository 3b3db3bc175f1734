package optim_test

import (
	"fmt"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// BenchmarkStep measures the host time of a step, with as many parameters as ResNet-50, all small.
func BenchmarkStep(b *testing.B) {
	const parameters = 161
	if err := torch.SetNumThreads(1); err != nil { // the tensors are tiny
		b.Fatal(err)
	}
	device := cuda.CPU
	if cuda.DeviceCount() > 0 {
		device = 0
	}
	for _, name := range []string{"sgd-nesterov", "adamw", "rmsprop", "adagrad", "lamb", "muon"} {
		for _, capturable := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/capturable=%v", name, capturable), func(b *testing.B) {
				params := make([]*torch.Tensor, parameters)
				grads := make([]*torch.Tensor, parameters)
				for i := range params {
					for _, at := range []*[]*torch.Tensor{&params, &grads} {
						t, err := torch.Ones(device, torch.Float32, int64(4+i%20), 8)
						if err != nil {
							b.Fatal(err)
						}
						defer t.Close()
						(*at)[i] = t
					}
					if err := params[i].SetRequiresGrad(true); err != nil {
						b.Fatal(err)
					}
				}
				opt, err := makers[name](params, capturable)
				if err != nil {
					b.Fatal(err)
				}
				defer opt.Close()
				step := func() {
					b.StopTimer()
					for i, p := range params {
						if err := p.SetGrad(grads[i]); err != nil {
							b.Fatal(err)
						}
					}
					b.StartTimer()
					if err := opt.Step(); err != nil {
						b.Fatal(err)
					}
				}
				step()
				for b.Loop() {
					step()
				}
			})
		}
	}
}

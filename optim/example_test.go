package optim_test

import (
	"fmt"

	"github.com/torchstream/torchstream/cuda"
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
	// float32[1] cpu: 5
	// float32[1] cpu: 2.5
	// float32[1] cpu: 1.25
}

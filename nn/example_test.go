package nn_test

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// This example trains a network on XOR, saves it, and loads it into another network.
func Example() {
	if err := train(); err != nil {
		fmt.Println(err)
	}
	// Output:
	// [0 1 1 0]
	// [0.weight 0.bias 2.weight 2.bias]
	// xor
	// [0 1 1 0]
}

func xorNet() *nn.Sequential {
	return nn.NewSequential(nn.NewLinear(2, 8, nn.LinearOptions{}), nn.NewReLU(), nn.NewLinear(8, 2, nn.LinearOptions{}))
}

func train() error {
	if err := torch.ManualSeed(1); err != nil {
		return err
	}
	net := xorNet()
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.5, Momentum: 0.9})
	if err != nil {
		return err
	}
	defer opt.Close()
	x, err := torch.FromFloat32s([]float32{0, 0, 0, 1, 1, 0, 1, 1}, 4, 2)
	if err != nil {
		return err
	}
	defer x.Close()
	y, err := torch.FromInt64s([]int64{0, 1, 1, 0})
	if err != nil {
		return err
	}
	defer y.Close()
	for range 200 {
		batch := torch.NewScope("batch")
		loss := net.Forward(x.In(batch)).CrossEntropy(y)
		if err := loss.Backward(); err != nil {
			return err
		}
		if err := opt.Step(); err != nil {
			return err
		}
		batch.Close()
	}
	predict := func(net nn.Module) error {
		scope := torch.NewScope("predict")
		defer scope.Close()
		nn.Train(net, false)
		classes, err := net.Forward(x.In(scope).NoGrad()).ArgMax(1, false).Int64s()
		fmt.Println(classes)
		return err
	}
	if err := predict(net); err != nil {
		return err
	}

	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "xor.safetensors")
	if err := nn.Save(path, net, map[string]string{"task": "xor"}); err != nil {
		return err
	}
	file, err := nn.OpenCheckpoint(path)
	if err != nil {
		return err
	}
	defer file.Close()
	var names []string
	for _, n := range nn.State(net) {
		names = append(names, n.Name)
	}
	fmt.Println(names)
	other := xorNet()
	meta, err := nn.Load(path, other)
	if err != nil {
		return err
	}
	fmt.Println(meta["task"])
	if err := nn.To(other, cuda.CPU); err != nil {
		return err
	}
	return predict(other)
}

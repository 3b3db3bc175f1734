package nn_test

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/torchstream/torchstream/checkpoint"
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
	return nn.NewSequential(nn.NewLinear(2, 8, nn.LinearOptions{}), nn.NewReLU(),
		nn.NewLinear(8, 2, nn.LinearOptions{}))
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
	file, err := checkpoint.Open(path)
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

// This example prints a model as a table.
func ExampleSummary() {
	net := nn.NewSequential(
		nn.NewConv2d(3, 16, 3, nn.Conv2dOptions{Padding: 1, NoBias: true}),
		nn.NewBatchNorm2d(16, nn.BatchNorm2dOptions{}),
		nn.NewReLU(),
		nn.NewAdaptiveAvgPool2d(1),
		nn.NewFlatten(),
		nn.NewLinear(16, 10, nn.LinearOptions{}),
	)
	defer nn.Close(net)
	x, err := torch.Zeros(cuda.CPU, torch.Float32, 8, 3, 32, 32)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer x.Close()
	table, err := nn.Summary(net, x)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(table)
	// Output:
	// layer    type               output        parameters
	// (model)  Sequential         [8 10]        -
	// 0        Conv2d             [8 16 32 32]  432
	// 1        BatchNorm2d        [8 16 32 32]  32
	// 2        ReLU               [8 16 32 32]  -
	// 3        AdaptiveAvgPool2d  [8 16 1 1]    -
	// 4        Flatten            [8 16]        -
	// 5        Linear             [8 10]        170
	// 634 parameters, 634 of them trainable; 0.0 MiB with buffers
}

// This example loads the trunk of a trained model into a model with another head.
func ExampleLoadWith() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "pretrained.safetensors")
	model := func(classes int) nn.Module {
		return nn.NewSequential(nn.NewLinear(4, 8, nn.LinearOptions{}), nn.NewReLU(),
			nn.NewLinear(8, classes, nn.LinearOptions{}))
	}
	trained, net := model(1000), model(2)
	defer nn.Close(trained)
	defer nn.Close(net)
	if err := nn.Save(path, trained, nil); err != nil {
		fmt.Println(err)
		return
	}
	report, err := nn.LoadWith(path, net, nn.LoadOptions{Partial: true})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(report)
	// Output:
	// 2 tensors loaded: 2 of 4 parameters, 68.9 % of the numbers
	// is this the same network? The other numbers stay as they were before
	// tensor 2.weight is float32[1000 8] in the file and float32[2 8] in the module
	// tensor 2.bias is float32[1000] in the file and float32[2] in the module
}

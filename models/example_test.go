package models_test

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// This example fine-tunes a network of 1000 classes for 3: it loads everything except the head,
// freezes that, and trains the new head.
func Example() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	checkpoint := filepath.Join(dir, "resnet18.safetensors")
	if err := pretrain(checkpoint); err != nil {
		fmt.Println(err)
		return
	}
	if err := fineTune(checkpoint); err != nil {
		fmt.Println(err)
	}
	// Output:
	// [fc.weight fc.bias]
	// the head learns: true
	// the trunk changed: false
}

// pretrain stands for the download of published weights.
func pretrain(checkpoint string) error {
	net, err := models.ByName("resnet18", models.Options{})
	if err != nil {
		return err
	}
	defer nn.Close(net)
	return nn.Save(checkpoint, net, nil)
}

func fineTune(checkpoint string) error {
	if err := torch.ManualSeed(1); err != nil {
		return err
	}
	net, err := models.NewResNet18(models.ResNetOptions{NumClasses: 3})
	if err != nil {
		return err
	}
	defer nn.Close(net)
	report, err := nn.LoadWith(checkpoint, net, nn.LoadOptions{Partial: true})
	if err != nil {
		return err
	}
	var other []string
	for _, m := range report.Mismatched {
		other = append(other, m.Name)
	}
	fmt.Println(other) // only the new head has another shape

	// The trunk is constant, and its BatchNorms keep their statistics.
	if err := nn.Freeze(net); err != nil {
		return err
	}
	nn.Train(net, false)
	if err := nn.Unfreeze(net.FC); err != nil {
		return err
	}
	opt, err := optim.NewSGD(nn.Parameters(net.FC), optim.SGDOptions{LR: 0.001})
	if err != nil {
		return err
	}
	defer opt.Close()

	images, err := torch.Randn(cuda.CPU, torch.Float32, 3, 3, 64, 64)
	if err != nil {
		return err
	}
	defer images.Close()
	labels, err := torch.Arange(3)
	if err != nil {
		return err
	}
	defer labels.Close()
	before, err := nn.NamedParameters(net)[0].Tensor.Float32s()
	if err != nil {
		return err
	}
	var losses []float64
	for range 5 {
		batch := torch.NewScope("batch")
		loss := net.Forward(images.In(batch)).CrossEntropy(labels)
		if err := loss.Backward(); err != nil {
			return err
		}
		if err := opt.Step(); err != nil {
			return err
		}
		value, err := loss.Float64()
		if err != nil {
			return err
		}
		losses = append(losses, value)
		batch.Close()
	}
	after, err := nn.NamedParameters(net)[0].Tensor.Float32s()
	if err != nil {
		return err
	}
	fmt.Println("the head learns:", losses[4] < losses[0])
	fmt.Println("the trunk changed:", before[0] != after[0])
	return nil
}

package checkpoint_test

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/nn"
)

// Save a network with other values, and read both again. In Python, torch.load(path,
// weights_only=True) returns the same dict.
func ExampleSavePyTorch() {
	if err := saveAndResume(); err != nil {
		fmt.Println(err)
	}
	// Output:
	// epoch 3, classes [cat dog], 2 tensors
}

func saveAndResume() error {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "checkpoint.pt")
	net := nn.NewLinear(4, 2, nn.LinearOptions{})
	defer nn.Close(net)
	err = checkpoint.SavePyTorch(path,
		map[string]any{"state_dict": nn.State(net), "epoch": 3, "classes": []any{"cat", "dog"}})
	if err != nil {
		return err
	}
	if _, err := nn.Load(path, net); err != nil {
		return err
	}
	file, err := checkpoint.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	epoch, err := file.Value("epoch")
	if err != nil {
		return err
	}
	classes, err := file.Value("classes")
	if err != nil {
		return err
	}
	fmt.Printf("epoch %d, classes %v, %d tensors\n", epoch, classes, len(file.Tensors()))
	return nil
}

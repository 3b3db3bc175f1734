package torch

import (
	"testing"

	"github.com/torchstream/torchstream/cuda"
)

// The zero Device of options is cuda.Default. An argument 0 is the first GPU.
func TestZeroDeviceInOptionsIsTheDefault(t *testing.T) {
	x, err := TensorOptions{DType: Float32}.Zeros(2)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if got := x.Device(); got != cuda.Default() {
		t.Errorf("options: got device %v, want %v", got, cuda.Default())
	}
	if cuda.DeviceCount() > 0 {
		return
	}
	if y, err := Zeros(0, Float32, 2); err == nil {
		t.Errorf("an argument: got %v, want an error without a GPU", y.Device())
		y.Close()
	}
}

func TestZeroDTypeIsUint8(t *testing.T) {
	x, err := TensorOptions{}.Zeros(2)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if x.DType() != Uint8 {
		t.Errorf("got %v, want %v", x.DType(), Uint8)
	}
}

package serve_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

// One request: an encoded photograph to logits.
func ExampleDecoder_Batch() {
	d, err := serve.NewDecoder(serve.Options{
		Decode: decode.Options{Transform: transform.Eval(256, 224), MaxBytes: 10 << 20},
		Device: cuda.CPU, // the zero value would select the first GPU, if there is one
	})
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close()
	net := nn.NewSequential(nn.NewConv2d(3, 8, 7, nn.Conv2dOptions{Stride: 4}), nn.NewAdaptiveAvgPool2d(1),
		nn.NewFlatten(),
		nn.NewLinear(8, 10, nn.LinearOptions{}))
	upload, err := os.ReadFile("../cshim/test/data/420.jpg")
	if err != nil {
		log.Fatal(err)
	}

	scope := torch.NewScope("request")
	defer scope.Close() // frees the batch and everything computed from it
	x, err := d.Batch(context.Background(), scope, upload)
	if err != nil {
		log.Fatal(err)
	}
	logits := net.Forward(x.NoGrad())
	fmt.Println(x.Shape(), logits.Shape(), logits.Err())
	// Output: [1 3 224 224] [1 10] <nil>
}

// A request of several files, one of which is not a photograph. A GPU decodes them if there is one.
func ExampleOptions() {
	gpu := cuda.DeviceCount() > 0
	d, err := serve.NewDecoder(serve.Options{Decode: decode.Options{Transform: transform.Eval(256, 224)},
		OnDevice: gpu})
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close()
	upload, err := os.ReadFile("../cshim/test/data/420.jpg")
	if err != nil {
		log.Fatal(err)
	}

	scope := torch.NewScope("request")
	defer scope.Close()
	x, err := d.Batch(context.Background(), scope, upload, []byte("not a photograph"), upload)
	var faults decode.Errors
	if err != nil && !errors.As(err, &faults) {
		log.Fatal(err) // an error of the machine, not of an image
	}
	for _, f := range faults {
		fmt.Println(f.Image, f.Kind) // the client's answer; the other images have their rows
	}
	fmt.Println(x.Shape(), gpu == (d.Stats().Decoded == 2))
	// Output:
	// 1 not an image
	// [3 3 224 224] true
}

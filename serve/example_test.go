package serve_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"sync"

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

// A server's requests share batches. A network of package nn computes them.
func ExampleBatcher() {
	net := nn.NewSequential(nn.NewConv2d(3, 8, 7, nn.Conv2dOptions{Stride: 4}), nn.NewAdaptiveAvgPool2d(1),
		nn.NewFlatten(),
		nn.NewLinear(8, 10, nn.LinearOptions{}))
	b, err := serve.NewBatcher(serve.BatcherOptions{
		Model: func(cuda.Device) (serve.Run, error) { // the network is on the CPU
			return func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
				return []*torch.Tensor{net.Forward(x).Softmax(1)}, nil
			}, nil
		},
		Images:   serve.Options{Decode: decode.Options{Transform: transform.Eval(256, 224), MaxBytes: 10 << 20}},
		Devices:  []cuda.Device{cuda.CPU},
		MaxBatch: 8,
	})
	if err != nil {
		log.Fatal(err)
	}
	upload, err := os.ReadFile("../cshim/test/data/420.jpg")
	if err != nil {
		log.Fatal(err)
	}

	var requests sync.WaitGroup
	for range 8 {
		requests.Go(func() {
			answer, err := b.Do(context.Background(), serve.Request{Image: upload})
			switch {
			case errors.Is(err, serve.ErrQueueFull):
				log.Print("503: try again later")
			case err != nil:
				log.Print(err) // decode.Errors if the upload is at fault
			case len(answer.Outputs[0].Values) != 10:
				log.Print(answer.Outputs[0].Shape)
			}
		})
	}
	requests.Wait()
	if err := b.Close(context.Background()); err != nil { // answers all requests first
		log.Fatal(err)
	}
	fmt.Println(b.Stats().Answered)
	// Output: 8
}

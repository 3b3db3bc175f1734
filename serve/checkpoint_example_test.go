package serve_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

// classifier is a network trained by torchstream train. Several goroutines may use it at once.
type classifier struct {
	*models.Classifier
	decoder *serve.Decoder
}

// newClassifier opens a checkpoint of torchstream train, "run1/best.pt" for example.
func newClassifier(path string) (*classifier, error) {
	net, err := models.Open(path, cuda.Default())
	if err != nil {
		return nil, err
	}
	d, err := serve.NewDecoder(serve.Options{Decode: decode.Options{Transform: net.Transform(), MaxBytes: 10 << 20}})
	if err != nil {
		return nil, errors.Join(err, net.Close())
	}
	return &classifier{net, d}, nil
}

func (c *classifier) close() error { return errors.Join(c.decoder.Close(), c.Close()) }

// classify returns the most probable class of an encoded photograph, and its probability.
func (c *classifier) classify(ctx context.Context, upload []byte) (string, float32, error) {
	scope := torch.NewScope("request")
	defer scope.Close() // frees the batch and everything computed from it
	x, err := c.decoder.Batch(ctx, scope, upload)
	if err != nil {
		return "", 0, err // decode.Errors if the upload is at fault
	}
	p, err := c.Probabilities(c.Net.Forward(x.NoGrad())).To(cuda.CPU).Float32s()
	if err != nil {
		return "", 0, err
	}
	best := 0
	for i := range p {
		if p[i] > p[best] {
			best = i
		}
	}
	return c.Classes[best], p[best], nil
}

// Photographs are classified by a network that torchstream train has made.
func Example_checkpoint() {
	c, err := newClassifier("run1/best.pt")
	if err != nil {
		log.Fatal(err)
	}
	defer c.close()
	upload, err := os.ReadFile("photo.jpg")
	if err != nil {
		log.Fatal(err)
	}
	class, probability, err := c.classify(context.Background(), upload)
	var faults decode.Errors
	switch {
	case errors.As(err, &faults):
		log.Fatalf("the photograph: %v", faults)
	case err != nil:
		log.Fatal(err)
	}
	fmt.Printf("%s %.1f %%\n", class, 100*probability)
}

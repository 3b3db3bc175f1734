package serve_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"strconv"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

// classifier is a network trained by torchstream train. Several goroutines may use it at once.
type classifier struct {
	net     nn.Module
	decoder *serve.Decoder
	classes []string
}

// newClassifier opens a checkpoint of torchstream train, "run1/best.pt" for example.
func newClassifier(path string) (*classifier, error) {
	file, err := checkpoint.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	about := file.Metadata()
	c := &classifier{}
	if err := json.Unmarshal([]byte(about["classes"]), &c.classes); err != nil {
		return nil, fmt.Errorf("%s: no classes of torchstream train: %w", path, err)
	}
	size, err := strconv.Atoi(about["size"])
	if err != nil {
		return nil, fmt.Errorf("%s: no size of torchstream train: %w", path, err)
	}
	c.net, err = models.ByName(about["model"], models.Options{NumClasses: len(c.classes)}) // a ViT also takes ImageSize
	if err != nil {
		return nil, err
	}
	if _, err := nn.LoadFrom(file, c.net, nn.LoadOptions{}); err != nil {
		return nil, err
	}
	nn.Train(c.net, false)
	// The same transform as torchstream train -test.
	eval := transform.Eval(size*8/7, size)
	eval.ApplyEXIFOrientation = about["upright"] == "true" // of train -upright
	c.decoder, err = serve.NewDecoder(serve.Options{Decode: decode.Options{Transform: eval, MaxBytes: 10 << 20}})
	if err != nil {
		return nil, err
	}
	return c, nn.To(c.net, c.decoder.Device())
}

// classify returns the most probable class of an encoded photograph, and its probability.
func (c *classifier) classify(ctx context.Context, upload []byte) (string, float32, error) {
	scope := torch.NewScope("request")
	defer scope.Close() // frees the batch and everything computed from it
	x, err := c.decoder.Batch(ctx, scope, upload)
	if err != nil {
		return "", 0, err // decode.Errors if the upload is at fault
	}
	p, err := c.net.Forward(x.NoGrad()).Softmax(1).To(cuda.CPU).Float32s()
	if err != nil {
		return "", 0, err
	}
	best := 0
	for i := range p {
		if p[i] > p[best] {
			best = i
		}
	}
	return c.classes[best], p[best], nil
}

// Photographs are classified by a network that torchstream train has made.
func Example_checkpoint() {
	c, err := newClassifier("run1/best.pt")
	if err != nil {
		log.Fatal(err)
	}
	defer c.decoder.Close()
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

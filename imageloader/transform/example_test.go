package transform_test

import (
	"context"
	"fmt"
	"log"
	"math/rand/v2"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// A transform for training: torchvision's operations, a custom step, and MixUp.
func Example() {
	t := transform.Train(64)
	t.Ops = []transform.Op{
		transform.ColorJitter{Brightness: 0.4, Contrast: 0.4, Saturation: 0.4},
		transform.RandomApply{Ops: []transform.Op{transform.GaussianBlur{KernelSize: [2]int{5, 5}}}, P: 0.2},
		transform.Func(func(rng *rand.Rand, image *transform.Pixels) error {
			// A scan line of noise. Its position is the same in every run, because rng belongs to
			// the sample.
			row := image.Pix[rng.IntN(image.Height)*image.Stride:][:3*image.Width]
			for i := range row {
				row[i] = byte(rng.Uint32())
			}
			return nil
		}),
	}
	t.Mix = []transform.BatchOp{transform.MixUp{Alpha: 0.2}}

	loader, err := imageloader.Open("../../examples/data/photos-test.tgz", imageloader.Options{
		BatchSize: 4, Transform: t, Shuffle: true, Seed: 1, NoIndex: true,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = loader.Close() }() // only read
	for batch, err := range loader.Epoch(context.Background(), 0) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(batch.N, "images of", len(batch.Images)/batch.N, "bytes,", len(batch.Soft)/batch.N,
			"soft labels each")
		break
	}
	// Output: 4 images of 12288 bytes, 12 soft labels each
}

// A transform that cannot work is an error that names the field. Open returns the same error.
func ExampleCompile() {
	t := transform.Eval(256, 224)
	t.Ops = []transform.Op{transform.Pad{Padding: [4]int{4, 4, 4, 4}}}
	_, err := transform.Compile(t)
	fmt.Println(err)
	// Output: field Ops makes 232 x 232 pixels of 224 x 224: a crop to the old size is missing
}

package imageloader_test

import (
	"context"
	"fmt"
	"log"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// Batches in ordinary memory, without a prefetcher. A training program gives the loader to
// prefetcher.New instead.
func ExampleLoader_Epoch() {
	loader, err := imageloader.Open("train.tgz", imageloader.Options{
		BatchSize:  64,
		Transform:  imageloader.Train(224),
		Shuffle:    true,
		Seed:       1,
		BadSamples: imageloader.Skip,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer loader.Close()
	for epoch := range 3 {
		for batch, err := range loader.Epoch(context.Background(), epoch) {
			if err != nil {
				log.Fatal(err)
			}
			fmt.Println(batch.N, loader.Classes()[batch.Labels[0]], batch.Samples[0].Name)
		}
	}
	for _, bad := range loader.Stats().BadNamed {
		fmt.Println(bad)
	}
}

// Several labels for each image: 1 for each class that the image has.
func ExampleOptions_target() {
	classes := map[string][]int{"train/0001.jpg": {3, 17}, "train/0002.jpg": {5}} // from a table, for example
	loader, err := imageloader.Open("coco.tar", imageloader.Options{
		BatchSize: 64,
		Transform: imageloader.Train(224),
		Shuffle:   true,
		Target: func(s imageloader.Sample, target []float32) error {
			list, known := classes[s.Name]
			if !known {
				return fmt.Errorf("the table has no line for it")
			}
			for _, class := range list {
				target[class] = 1
			}
			return nil
		},
		TargetWidth: 80,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer loader.Close()
	for batch, err := range loader.Epoch(context.Background(), 0) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(batch.N, len(batch.Soft) == 80*batch.N) // the prefetcher's field "labels": float32 [80]
	}
}

// Images and their masks, for segmentation.
func ExampleMasks() {
	train := imageloader.Train(512)
	train.Ops = []transform.Op{transform.RandomAffine{Degrees: [2]float64{-10, 10}}} // applied to images and masks
	loader, err := imageloader.Open("ade20k.tar", imageloader.Options{
		BatchSize: 16,
		Transform: train,
		Shuffle:   true,
		Masks:     imageloader.Masks{Image: "images/*.jpg", Mask: "masks/*.png", Fill: 255},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer loader.Close()
	for batch, err := range loader.Epoch(context.Background(), 0) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(batch.N, len(batch.Masks) == batch.N*512*512) // the prefetcher's fields: images, masks
	}
}

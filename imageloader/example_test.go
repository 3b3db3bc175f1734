package imageloader_test

import (
	"context"
	"fmt"
	"log"

	"github.com/torchstream/torchstream/imageloader"
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

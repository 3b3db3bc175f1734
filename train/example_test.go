package train_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imagefeed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/train"
)

// A custom loop saves its state after every step. If the program is started again, the loop resumes
// from the saved state.
func ExampleCheckpoint() {
	run := func(ctx context.Context) error {
		feed, err := imagefeed.Open(ctx, "train.tgz", imagefeed.Options{Loader: imageloader.Options{
			BatchSize: 64, Transform: imageloader.Train(224), Shuffle: true, Seed: 1}})
		if err != nil {
			return err
		}
		defer feed.Close()
		net, err := models.ByName("resnet18", models.Options{NumClasses: len(feed.Loader.Classes())})
		if err != nil {
			return err
		}
		defer nn.Close(net)
		if err := nn.To(net, feed.Device()); err != nil {
			return err
		}
		opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.01, Momentum: 0.9})
		if err != nil {
			return err
		}
		defer opt.Close()

		c := train.Checkpoint{Model: net, Optimizer: opt, Device: feed.Device()}
		if err := c.Load("last.pt"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		first := 0
		if c.Loader != nil { // nil in the first run, which finds no file
			if err := feed.Loader.Restore(ctx, *c.Loader); err != nil {
				return err
			}
			first = c.Loader.Epoch()
		}
		for epoch := first; epoch < 10; epoch++ {
			for batch, err := range feed.Epoch(ctx, epoch) {
				if err != nil {
					return err
				}
				if err := net.Forward(batch.Images).CrossEntropy(batch.Labels).Backward(); err != nil {
					return err
				}
				if err := opt.Step(); err != nil {
					return err
				}
				c.Loader = &batch.Info.State
				if err := c.Save("last.pt"); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

// This example predicts the classes of an archive's images with a best.pt that torchstream train
// wrote.
func Example_predict() {
	predict := func(ctx context.Context, path, archive string) error {
		c, err := models.Open(path, cuda.Default())
		if err != nil {
			return err
		}
		defer c.Close()
		feed, err := imagefeed.Open(ctx, archive, imagefeed.Options{Loader: imageloader.Options{
			BatchSize: 64, Transform: c.Transform()}})
		if err != nil {
			return err
		}
		defer feed.Close()
		for batch, err := range feed.Epoch(ctx, 0) {
			if err != nil {
				return err
			}
			best, err := c.Net.Forward(batch.Images.NoGrad()).ArgMax(1, false).Int64s()
			if err != nil {
				return err
			}
			for i, sample := range batch.Info.Samples {
				fmt.Println(sample.Name, c.Classes[best[i]])
			}
		}
		return nil
	}
	if err := predict(context.Background(), "trained/best.pt", "photos.tgz"); err != nil {
		log.Fatal(err)
	}
}

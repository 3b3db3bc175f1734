package train_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// newNormalised returns a job whose second normalisation layer gets one value per channel if a
// batch has one sample. An epoch of the archive is 4 batches of 8 samples and one of a single
// sample.
func newNormalised(t *testing.T, path string, dropLast bool, c train.Config) *job {
	t.Helper()
	loader, err := imageloader.Open(path,
		imageloader.Options{BatchSize: batch, Transform: imageloader.Train(side), Shuffle: true, Seed: 3,
			DropLast: dropLast})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { loader.Close() })
	if err := torch.ManualSeed(5); err != nil {
		t.Fatal(err)
	}
	c.Feed, c.Epochs = feed(t, loader), 2
	c.Model = nn.NewSequential(
		nn.NewConv2d(3, 4, 3, nn.Conv2dOptions{Padding: 1}), nn.NewBatchNorm2d(4, nn.BatchNorm2dOptions{}),
		nn.NewReLU(), nn.NewFlatten(),
		nn.NewLinear(4*side*side, 6, nn.LinearOptions{}), nn.NewBatchNorm1d(6, nn.BatchNorm1dOptions{}),
		nn.NewLinear(6, classes, nn.LinearOptions{}),
	)
	if c.Optimizer, err = optim.NewSGD(nn.Parameters(c.Model), optim.SGDOptions{LR: 0.01, Momentum: 0.9}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Optimizer.Close(); nn.Close(c.Model) })
	return &job{Config: c}
}

// If a normalisation layer cannot compute statistics for a last batch of one sample, the run ends
// with the same bits as a run whose loader drops the last batch. This also holds if the run is
// interrupted before that batch.
func TestLastBatchOfOneSampleIsDropped(t *testing.T) {
	path := archive(t)
	dropped := newNormalised(t, path, true, train.Config{})
	want := dropped.run(t)

	var log bytes.Buffer
	left := newNormalised(t, path, false, train.Config{Log: slog.New(slog.NewTextHandler(&log, nil))})
	got := left.run(t)
	if !reflect.DeepEqual(figures(got), figures(want)) {
		t.Errorf("epochs are\n%+v, want\n%+v", figures(got), figures(want))
	}
	if !reflect.DeepEqual(left.bits(t), dropped.bits(t)) {
		t.Error("the model has other parameters, want the bits from a loader that drops the last batch")
	}
	if text := log.String(); strings.Count(text, "level=WARN") != 1 ||
		!strings.Contains(text, "the last batch of an epoch is one sample and is left out") ||
		!strings.Contains(text, "epoch=1") {
		t.Errorf("the log is %q, want one warning about the batch that is left out in epoch 1", text)
	}

	dir := t.TempDir()
	stopped := newNormalised(t, path, false, train.Config{Dir: dir, OnStep: func(s train.Step) error {
		if s.Step == perE-1 {
			return train.ErrStop
		}
		return nil
	}})
	stopped.run(t)
	resumed := newNormalised(t, path, false, train.Config{Dir: dir, Resume: true})
	got = resumed.run(t)
	if !reflect.DeepEqual(figures(got), figures(want)) || !reflect.DeepEqual(resumed.bits(t), dropped.bits(t)) {
		t.Errorf("a run that is resumed before the last batch has the epochs\n%+v, want\n%+v", figures(got),
			figures(want))
	}
}

// uneven is a source of batches with given numbers of rows.
type uneven struct {
	fixed
	sizes []int
}

func (u *uneven) Fill(ctx context.Context, _ int, lend func(context.Context) ([][]byte, error),
	deliver func(int, any) error) error {
	for _, n := range u.sizes {
		slot, err := lend(ctx)
		if err != nil {
			return err
		}
		clear(slot[0])
		clear(slot[1])
		if err := deliver(n, nil); err != nil {
			return err
		}
	}
	return nil
}

// If a batch of one sample is the first batch of its epoch, or not the last one, the run ends with
// BatchNorm's error.
func TestOneSampleBatchBeforeTheLastIsAnError(t *testing.T) {
	for name, sizes := range map[string][]int{"first": {1, 2}, "in between": {2, 1, 2}, "alone": {1}} {
		t.Run(name, func(t *testing.T) {
			model := nn.NewSequential(nn.NewBatchNorm1d(classes+4, nn.BatchNorm1dOptions{}))
			opt, err := optim.NewSGD(nn.Parameters(model), optim.SGDOptions{LR: 0.01})
			if err != nil {
				t.Fatal(err)
			}
			defer opt.Close()
			defer nn.Close(model)
			_, err = train.Run(t.Context(),
				train.Config{Model: model, Optimizer: opt, Epochs: 1, Feed: feed(t, &uneven{sizes: sizes})})
			if !errors.Is(err, nn.ErrOneValue) {
				t.Errorf("batches of %v: error %v, want %v", sizes, err, nn.ErrOneValue)
			}
		})
	}
}

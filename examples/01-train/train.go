package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// train is the whole job from top to bottom: it opens the images, builds the network, and trains it
// for some epochs. The training loop is in [trainer.epoch] below.
func train(ctx context.Context, o trainOptions, stdout, stderr io.Writer) (result trainResult, err error) {
	result.Options = o
	device, err := pickDevice(o.Device)
	if err != nil {
		return result, err
	}
	result.Device = device.String()
	// The weights depend on this seed. The order of the images and their crops depend on
	// Options.Seed below.
	if err := torch.ManualSeed(o.Seed); err != nil {
		return result, err
	}

	// The loader reads the training archive and turns its images into batches: random crops, in a
	// different order each epoch.
	loader, err := imageloader.OpenContext(ctx, o.Archive, imageloader.Options{
		BatchSize: o.Batch, Transform: imageloader.Train(o.Size), Shuffle: true,
		ShuffleBytes: o.MemoryMB << 20, Seed: o.Seed, Workers: o.Workers,
	})
	if err != nil {
		return result, lesson.ExplainMissing(err, "01-train", "-archive", o.Archive)
	}
	defer loader.Close()
	result.Classes, result.Samples = loader.Classes(), loader.Len()

	// The prefetcher copies the loader's batches to the device while the device computes.
	feed, err := prefetcher.New(loader, prefetcher.Options{Device: device})
	if err != nil {
		return result, err
	}
	defer feed.Close()

	// The held-out images, if any, must have the same classes.
	var testFeed *prefetcher.Prefetcher
	if o.Test != "" {
		testLoader, err := imageloader.OpenContext(ctx, o.Test, imageloader.Options{
			BatchSize: o.Batch, Transform: evalTransform(o.Size), Workers: o.Workers, Classes: loader.Classes(),
		})
		if err != nil {
			return result, err
		}
		defer testLoader.Close()
		if testFeed, err = prefetcher.New(testLoader, prefetcher.Options{Device: device}); err != nil {
			return result, err
		}
		defer testFeed.Close()
	}

	// A network is built on the CPU and then moved. The optimizer updates its parameters.
	net := newNet(len(result.Classes), o.Width)
	if err := nn.To(net, device); err != nil {
		return result, err
	}
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: o.LR, Momentum: 0.9, WeightDecay: 5e-4})
	if err != nil {
		return result, err
	}
	for _, p := range nn.Parameters(net) {
		result.Parameters += p.Elements()
	}
	describe(stdout, o, result, device)

	// Loss and accuracy are added up on the device.
	score, err := newTotals(device)
	if err != nil {
		return result, err
	}
	defer score.close()

	t := &trainer{net: net, opt: opt, score: score, feed: feed, testFeed: testFeed, device: device,
		options: o, samples: result.Samples, stderr: stderr}
	begin := time.Now()
	printHeader(stdout, testFeed != nil)
	for epoch := range o.Epochs {
		e, err := t.epoch(ctx, epoch)
		if err != nil {
			return result, err
		}
		e.print(stdout)
		result.Epochs = append(result.Epochs, e)
	}
	result.Seconds = time.Since(begin).Seconds()
	return result, finish(o, result, net, stdout)
}

// trainer holds the parts that every epoch needs.
type trainer struct {
	net            nn.Module
	opt            *optim.SGD
	score          *totals
	feed, testFeed *prefetcher.Prefetcher // testFeed is nil without held-out images
	device         cuda.Device
	options        trainOptions
	samples        int // in an epoch
	step           int // training steps so far
	stderr         io.Writer
}

// epoch trains on every image once, tests the network, and returns the epoch's figures.
func (t *trainer) epoch(ctx context.Context, epoch int) (e epochResult, err error) {
	e.Epoch = epoch + 1
	begin, before := time.Now(), t.feed.Stats()
	bar := newProgress(t.stderr, fmt.Sprintf("epoch %d of %d", e.Epoch, t.options.Epochs), t.samples)
	nn.Train(t.net, true)

	// This is the training loop. The batch is already on the device. All tensors computed from it
	// are freed at the end of the iteration, so the loop closes none.
	for batch, err := range t.feed.Epoch(ctx, epoch) {
		if err != nil {
			bar.done()
			return e, err
		}
		if err := t.opt.SetLR(t.learningRate()); err != nil {
			return e, err
		}
		logits := t.net.Forward(batch.Images)
		loss := logits.CrossEntropy(batch.Labels)
		if err := loss.Backward(); err != nil {
			return e, err
		}
		if err := t.opt.Step(); err != nil {
			return e, err
		}
		if err := t.score.add(logits, loss, batch.Labels, batch.N); err != nil {
			return e, err
		}
		t.step++
		bar.add(batch.N)
	}

	// Reading the totals waits for the device. It happens once per epoch, so steps never wait.
	samples := t.score.samples
	if e.Loss, e.TrainAccuracy, err = t.score.read(); err != nil {
		return e, err
	}
	e.setTimes(time.Since(begin), samples, before, t.feed.Stats())
	bar.done()
	if t.testFeed != nil {
		accuracy, err := evaluate(ctx, t.net, t.testFeed, t.score)
		if err != nil {
			return e, err
		}
		e.TestAccuracy = &accuracy
	}
	if t.device != cuda.CPU {
		memory, err := t.device.Memory()
		if err != nil {
			return e, err
		}
		e.AllocatedBytes, e.ReservedBytes = memory.Allocated, memory.Reserved
	}
	e.LiveTensors = torch.LiveTensors()
	return e, nil
}

// learningRate falls from the option's value to 0 along a cosine.
func (t *trainer) learningRate() float64 {
	o := t.options
	steps := o.Epochs * ((t.samples + o.Batch - 1) / o.Batch)
	return o.LR * (1 + math.Cos(math.Pi*float64(t.step)/float64(steps))) / 2
}

// evaluate returns the network's accuracy on an archive. NoGrad on the images keeps the operators
// from recording a backward pass.
func evaluate(ctx context.Context, net nn.Module, feed *prefetcher.Prefetcher,
	score *totals) (accuracy float64, err error) {
	nn.Train(net, false)
	for batch, err := range feed.Epoch(ctx, 0) {
		if err != nil {
			return 0, err
		}
		logits := net.Forward(batch.Images.NoGrad())
		if err := score.add(logits, logits.CrossEntropy(batch.Labels), batch.Labels, batch.N); err != nil {
			return 0, err
		}
	}
	_, accuracy, err = score.read()
	return accuracy, err
}

// totals adds up the loss and the correct answers on the device, so that no step waits for a
// result.
type totals struct {
	loss, right *torch.Tensor
	samples     int
}

func newTotals(device cuda.Device) (*totals, error) {
	loss, err := torch.Zeros(device, torch.Float32)
	if err != nil {
		return nil, err
	}
	right, err := torch.Zeros(device, torch.Int64)
	if err != nil {
		loss.Close()
		return nil, err
	}
	return &totals{loss: loss, right: right}, nil
}

// add adds the mean loss and the logits of n samples.
func (t *totals) add(logits, loss, labels *torch.Tensor, n int) error {
	t.samples += n
	if err := t.loss.AddScaled_(loss.NoGrad(), float64(n)).Err(); err != nil {
		return err
	}
	return t.right.Add_(logits.NoGrad().ArgMax(1, false).Eq(labels).Sum()).Err()
}

// read returns the mean loss and the accuracy since its last call, and sets both totals to 0. It
// waits for the device.
func (t *totals) read() (loss, accuracy float64, err error) {
	if t.samples == 0 {
		return 0, 0, fmt.Errorf("the archive gave no samples")
	}
	if loss, err = t.loss.Float64(); err != nil {
		return 0, 0, err
	}
	right, err := t.right.Int64()
	if err != nil {
		return 0, 0, err
	}
	n := float64(t.samples)
	t.samples = 0
	if err := t.loss.Zero_().Err(); err != nil {
		return 0, 0, err
	}
	return loss / n, float64(right) / n, t.right.Zero_().Err()
}

func (t *totals) close() {
	t.loss.Close()
	t.right.Close()
}

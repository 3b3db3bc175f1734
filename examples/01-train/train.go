package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math"
	"runtime"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

const (
	defaultArchive = "examples/data/photos-train.tgz"
	defaultTest    = "examples/data/photos-test.tgz"
)

type trainOptions struct {
	Archive    string  `json:"archive"`
	Test       string  `json:"test"`
	Device     string  `json:"device"`
	Epochs     int     `json:"epochs"`
	Batch      int     `json:"batch"`
	Size       int     `json:"size"`
	Width      int     `json:"width"`
	LR         float64 `json:"lr"`
	Workers    int     `json:"workers"`
	MemoryMB   int64   `json:"memory_mb"`
	Seed       uint64  `json:"seed"`
	Checkpoint string  `json:"checkpoint"`
	jsonFile   string
}

// epochResult is a line of the table.
type epochResult struct {
	Epoch            int      `json:"epoch"`
	Loss             float64  `json:"loss"`
	TrainAccuracy    float64  `json:"train_accuracy"`
	TestAccuracy     *float64 `json:"test_accuracy,omitempty"`
	ImagesPerSecond  float64  `json:"images_per_second"`
	Seconds          float64  `json:"seconds"`
	WaitSeconds      float64  `json:"wait_seconds"`
	WaitPercent      float64  `json:"wait_percent"`
	FirstWaitSeconds float64  `json:"first_wait_seconds"` // of WaitSeconds, before the epoch's first batch
	AllocatedBytes   int64    `json:"device_allocated_bytes"`
	ReservedBytes    int64    `json:"device_reserved_bytes"`
	LiveTensors      int64    `json:"live_tensors"`
}

type trainResult struct {
	Options    trainOptions  `json:"options"`
	Device     string        `json:"device"`
	Classes    []string      `json:"classes"`
	Samples    int           `json:"samples"`
	Parameters int64         `json:"parameters"`
	Epochs     []epochResult `json:"epochs"`
	Seconds    float64       `json:"seconds"`
}

func trainCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o trainOptions
	set := flag.NewFlagSet("01-train train", flag.ContinueOnError)
	set.StringVar(&o.Archive, "archive", "", "`FILE` of labelled images, .tgz or .tar, directory = class (default "+defaultArchive+")")
	set.StringVar(&o.Test, "test", "", "`FILE` of held-back images of the same classes (default "+defaultTest+" if -archive is not given, else none)")
	set.StringVar(&o.Device, "device", "", "cpu, cuda or cuda:N (default: a GPU if there is one)")
	set.IntVar(&o.Epochs, "epochs", 20, "passes over the archive")
	set.IntVar(&o.Batch, "batch", 32, "images a step")
	set.IntVar(&o.Size, "size", 96, "pixels of an image's side in the network")
	set.IntVar(&o.Width, "width", 16, "channels of the network's first layer; the others follow")
	set.Float64Var(&o.LR, "lr", 0.02, "learning rate at the start; it falls to 0 along a cosine")
	set.IntVar(&o.Workers, "workers", 0, "goroutines that decode (default: the CPUs that there are)")
	set.Int64Var(&o.MemoryMB, "memory", 256, "`MB` of compressed images: an archive that fits in is read once, a larger one is shuffled through that much")
	set.Uint64Var(&o.Seed, "seed", 1, "of the weights, the order and the crops")
	set.StringVar(&o.Checkpoint, "checkpoint", "01-train.safetensors", "`FILE` that the network is written to")
	set.StringVar(&o.jsonFile, "json", "", "`FILE` that all figures are written to as one JSON object")
	if err := parse(set, args, stderr); err != nil {
		return err
	}
	switch {
	case set.NArg() > 0:
		return usageError{fmt.Sprintf("train takes options only, not %q", set.Args())}
	case o.Epochs < 1 || o.Batch < 1 || o.Size < 16 || o.Width < 1 || o.MemoryMB < 1:
		return usageError{"-epochs, -batch, -width and -memory are at least 1, -size at least 16"}
	}
	if o.Archive == "" {
		o.Archive = defaultArchive
		if o.Test == "" {
			o.Test = defaultTest
		}
	}
	// An epoch is too late to find out that the results have no place.
	if o.Checkpoint != "" {
		if err := safefile.Check(o.Checkpoint, safefile.Safetensors); err != nil {
			return err
		}
	}
	if o.jsonFile != "" {
		if err := safefile.CheckWrite(o.jsonFile, figures); err != nil {
			return err
		}
	}
	result, err := train(ctx, o, stdout, stderr)
	if err != nil || o.jsonFile == "" {
		return err
	}
	text, err := json.MarshalIndent(result, "", "  ")
	if err != nil {
		return err
	}
	file, err := safefile.Create(o.jsonFile, figures)
	if err != nil {
		return err
	}
	_, err = file.Write(append(text, '\n'))
	return errors.Join(err, file.Close())
}

// figures is the file of -json.
var figures = safefile.Prefix("a file that -json wrote", "{\n  \"options\": {")

// train is the whole job.
func train(ctx context.Context, o trainOptions, stdout, stderr io.Writer) (result trainResult, err error) {
	result.Options = o
	device, err := pickDevice(o.Device)
	if err != nil {
		return result, err
	}
	result.Device = device.String()
	// On a GPU every OS thread that multiplies matrices gets a cuBLAS workspace of its own (32 MiB
	// on an H200), which LibTorch keeps. Staying on one thread keeps it at one.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := torch.ManualSeed(o.Seed); err != nil {
		return result, err
	}

	// The training archive: random crops, in another order each epoch.
	loader, err := imageloader.OpenContext(ctx, o.Archive, imageloader.Options{
		BatchSize: o.Batch, Transform: imageloader.Train(o.Size), Shuffle: true, ShuffleBytes: o.MemoryMB << 20, Seed: o.Seed, Workers: o.Workers,
	})
	if errors.Is(err, fs.ErrNotExist) && o.Archive == defaultArchive {
		err = fmt.Errorf("%w: the archive that comes with the repository is found from its root: run 01-train there, or name another with -archive FILE", err)
	}
	if err != nil {
		return result, err
	}
	defer loader.Close()
	feed, err := prefetcher.New(loader, prefetcher.Options{Device: device})
	if err != nil {
		return result, err
	}
	defer feed.Close()
	result.Classes, result.Samples = loader.Classes(), loader.Len()

	// The held-back archive, if there is one, with the same classes.
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

	score, err := newTotals(device)
	if err != nil {
		return result, err
	}
	defer score.close()
	step, steps := 0, o.Epochs*((result.Samples+o.Batch-1)/o.Batch)
	begin := time.Now()
	printHeader(stdout, testFeed != nil)
	for epoch := range o.Epochs {
		epochBegin := time.Now()
		bar := newProgress(stderr, fmt.Sprintf("epoch %d of %d", epoch+1, o.Epochs), result.Samples)
		nn.Train(net, true)
		before := feed.Stats()

		// This is the loop. The batch is on the device already, and everything that is computed
		// from it is freed when the turn ends.
		for batch, err := range feed.Epoch(ctx, epoch) {
			if err != nil {
				bar.done()
				return result, err
			}
			if err := opt.SetLR(o.LR * (1 + math.Cos(math.Pi*float64(step)/float64(steps))) / 2); err != nil {
				return result, err
			}
			logits := net.Forward(batch.Images)
			loss := logits.CrossEntropy(batch.Labels)
			if err := loss.Backward(); err != nil {
				return result, err
			}
			if err := opt.Step(); err != nil {
				return result, err
			}
			if err := score.add(logits, loss, batch.Labels, batch.N); err != nil {
				return result, err
			}
			step++
			bar.add(batch.N)
		}

		// Reading the totals waits for the device, once an epoch.
		e := epochResult{Epoch: epoch + 1}
		samples := score.samples
		if e.Loss, e.TrainAccuracy, err = score.read(); err != nil {
			return result, err
		}
		e.Seconds = time.Since(epochBegin).Seconds()
		e.ImagesPerSecond = float64(samples) / e.Seconds
		after := feed.Stats()
		e.WaitSeconds, e.FirstWaitSeconds = (after.ConsumerWait - before.ConsumerWait).Seconds(), (after.FirstWait - before.FirstWait).Seconds()
		e.WaitPercent = 100 * e.WaitSeconds / e.Seconds
		bar.done()
		if testFeed != nil {
			_, accuracy, err := evaluate(ctx, net, testFeed, score)
			if err != nil {
				return result, err
			}
			e.TestAccuracy = &accuracy
		}
		if device != cuda.CPU {
			memory, err := device.Memory()
			if err != nil {
				return result, err
			}
			e.AllocatedBytes, e.ReservedBytes = memory.Allocated, memory.Reserved
		}
		e.LiveTensors = torch.LiveTensors()
		e.print(stdout)
		result.Epochs = append(result.Epochs, e)
	}
	result.Seconds = time.Since(begin).Seconds()
	return result, finish(o, result, net, stdout)
}

// evaluate runs the network over an archive without learning from it.
func evaluate(ctx context.Context, net nn.Module, feed *prefetcher.Prefetcher, score *totals) (loss, accuracy float64, err error) {
	nn.Train(net, false)
	for batch, err := range feed.Epoch(ctx, 0) {
		if err != nil {
			return 0, 0, err
		}
		logits := net.Forward(batch.Images.NoGrad())
		if err := score.add(logits, logits.CrossEntropy(batch.Labels), batch.Labels, batch.N); err != nil {
			return 0, 0, err
		}
	}
	return score.read()
}

// totals adds up loss and right answers on the device, so that no step waits for a number.
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

// add takes the mean loss and the logits of n samples.
func (t *totals) add(logits, loss, labels *torch.Tensor, n int) error {
	t.samples += n
	if err := t.loss.AddScaled_(loss.NoGrad(), float64(n)).Err(); err != nil {
		return err
	}
	return t.right.Add_(logits.NoGrad().ArgMax(1, false).Eq(labels).Sum()).Err()
}

// read returns the mean loss and the share of right answers since the last read, and starts again.
// It waits for the device.
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

func describe(w io.Writer, o trainOptions, r trainResult, device cuda.Device) {
	fmt.Fprintf(w, "data     %s: %d images of %d classes\n", o.Archive, r.Samples, len(r.Classes))
	if len(r.Classes) == 1 {
		fmt.Fprintf(w, "note     there is one class, %q, and nothing to tell apart: is the directory right above the images the class?\n", r.Classes[0])
	}
	if o.Test != "" {
		fmt.Fprintf(w, "test     %s\n", o.Test)
	} else {
		fmt.Fprintln(w, "test     none: accuracy is on the training images alone; give held-back images of the same classes with -test FILE")
	}
	name := fmt.Sprintf("%s, %d threads", device, torch.NumThreads())
	if p, err := device.Properties(); err == nil && device != cuda.CPU {
		name = fmt.Sprintf("%s, %s", device, p.Name)
	}
	fmt.Fprintf(w, "device   %s (%d CPUs for Go)\n", name, runtime.GOMAXPROCS(0))
	fmt.Fprintf(w, "network  %d parameters, images %d x %d, batches of %d\n\n", r.Parameters, o.Size, o.Size, o.Batch)
}

// finish writes the checkpoint and says what came out.
func finish(o trainOptions, r trainResult, net nn.Module, w io.Writer) error {
	last := r.Epochs[len(r.Epochs)-1]
	fmt.Fprintf(w, "\ntrained in %.1f s", r.Seconds)
	if last.TestAccuracy != nil {
		fmt.Fprintf(w, "; right on %s of the held-back images (guessing: %s)", percent(*last.TestAccuracy), percent(1/float64(len(r.Classes))))
	}
	fmt.Fprintln(w)
	if o.Checkpoint == "" {
		return nil
	}
	if err := saveCheckpoint(o.Checkpoint, net, settings{Classes: r.Classes, Size: o.Size, Width: o.Width}); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "checkpoint in %s\n", o.Checkpoint)
	return err
}

// Command 08-finetune trains a network on twelve photographs. It then trains the checkpoint, with a
// head of another size, for a new task: to name the kind of subject. The trunk stays frozen, so
// only the head learns. For comparison, an untrained network gets the same number of steps.
//
//	08-finetune                            both archives are in examples/data
//	08-finetune -checkpoint resnet.pth     start from another checkpoint of this network
//	08-finetune -picture finetune.svg      draw the accuracy after each epoch
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/examples/internal/study"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// kinds holds the labels of the new task, keyed by photograph.
var kinds = map[string]int64{
	"astronaut": 0, "cameraman": 0, "cat": 0, "raccoon": 0, // persons and animals
	"brick": 1, "grass": 1, "gravel": 1, // textures
	"clock": 2, "coffee": 2, "rocket": 2, // objects
	"galaxies": 3, "retina": 3, // science
}

type options struct {
	train, test, device, checkpoint, picture string
	size, width, pretrain, epochs            int
	seed                                     uint64
}

func main() {
	var o options
	flag.StringVar(&o.train, "archive", lesson.TrainArchive, "photographs to learn from")
	flag.StringVar(&o.test, "test", lesson.TestArchive, "photographs to test with")
	flag.StringVar(&o.device, "device", "", "cpu or cuda:N (default: the first GPU, or the CPU)")
	flag.StringVar(&o.checkpoint, "checkpoint", "", "begin with this `file` instead of training one")
	flag.StringVar(&o.picture, "picture", "", "draw the accuracies to this SVG `file`")
	flag.IntVar(&o.size, "size", 32, "pixels per side of an image")
	flag.IntVar(&o.width, "width", 16, "channels of the first layer")
	flag.IntVar(&o.pretrain, "pretrain", 8, "epochs of the first task")
	flag.IntVar(&o.epochs, "epochs", 6, "epochs of the second task")
	flag.Uint64Var(&o.seed, "seed", 1, "of parameters and batches")
	lesson.Usage(flag.CommandLine, "08-finetune [options]", "Trains a network on photographs, gives it a "+
		"new task with the trunk frozen, and compares with a network that begins anew.")
	flag.Parse()
	lesson.Run("08-finetune", func(ctx context.Context) error {
		_, err := run(ctx, o, os.Stdout)
		return err
	})
}

// model is a trunk that extracts features, and a head that classifies them. In checkpoints the
// tensors' names start with "trunk." and "head.".
type model struct{ trunk, head nn.Module }

func newModel(classes, width int) *model {
	block := func(in, out, stride int) nn.Module {
		return nn.NewSequential(nn.NewConv2d(in, out, 3, nn.Conv2dOptions{Stride: stride, Padding: 1, NoBias: true}),
			nn.NewBatchNorm2d(out, nn.BatchNorm2dOptions{}), nn.NewReLU())
	}
	return &model{
		trunk: nn.NewSequential(block(3, width, 1), block(width, 2*width, 2), block(2*width, 4*width, 2),
			block(4*width, 4*width, 2),
			nn.NewAdaptiveAvgPool2d(1), nn.NewFlatten()),
		head: nn.NewLinear(4*width, classes, nn.LinearOptions{}),
	}
}

func (m *model) Forward(x *torch.Tensor) *torch.Tensor { return m.head.Forward(m.trunk.Forward(x)) }

func (m *model) Parts() nn.Parts {
	return nn.Parts{Modules: []nn.Child{{Name: "trunk", Module: m.trunk}, {Name: "head", Module: m.head}}}
}

// result holds the accuracies on the test images, for each epoch of the second task.
type result struct {
	report         *nn.LoadReport
	tuned, scratch []float64
}

// task is one set of labels.
type task struct {
	device     cuda.Device
	feed, test *prefetcher.Prefetcher
	labels     *torch.Tensor // indexed by the loader's labels; nil for the loader's own labels
	epochs     int
	rate       float64
	frozen     nn.Module // the part that does not learn, or nil
	first      int       // number of the first epoch
}

func run(ctx context.Context, o options, out io.Writer) (_ *result, err error) {
	device, err := study.Device(o.device)
	if err == nil {
		err = study.Positive(map[string]int{"size": o.size, "width": o.width, "pretrain": o.pretrain,
			"epochs": o.epochs})
	}
	if err != nil {
		return nil, err
	}
	if err := torch.ManualSeed(o.seed); err != nil {
		return nil, err
	}
	loader, feed, err := open(ctx, o.train, device,
		imageloader.Options{BatchSize: 32, Transform: imageloader.Train(o.size), Shuffle: true, Seed: o.seed})
	if err != nil {
		return nil, lesson.ExplainMissing(err, "08-finetune", "-archive", o.train)
	}
	defer loader.Close()
	defer feed.Close()
	tests, test, err := open(ctx, o.test, device,
		imageloader.Options{BatchSize: 64, Transform: imageloader.Eval(o.size*8/7, o.size), Classes: loader.Classes()})
	if err != nil {
		return nil, lesson.ExplainMissing(err, "08-finetune", "-test", o.test)
	}
	defer tests.Close()
	defer test.Close()
	t := task{device: device, feed: feed, test: test}

	if o.checkpoint == "" {
		dir, err := os.MkdirTemp("", "finetune")
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		o.checkpoint = filepath.Join(dir, "photographs.safetensors")
		t.epochs, t.rate = o.pretrain, 3e-3
		if err := pretrain(ctx, o, t, len(loader.Classes()), out); err != nil {
			return nil, err
		}
	}

	table := make([]int64, len(loader.Classes()))
	for i, class := range loader.Classes() {
		kind, ok := kinds[class]
		if !ok {
			return nil, fmt.Errorf("%s has the class %s, which has no kind", o.train, class)
		}
		table[i] = kind
	}
	program := torch.NewScope("program")
	defer program.Close()
	labels, err := torch.FromInt64s(table)
	if err != nil {
		return nil, err
	}
	t.labels = program.Own(program.Own(labels).To(device)) // many batches use it, so it needs an owner
	r := &result{}
	t.epochs, t.first = o.epochs, o.pretrain
	return r, second(ctx, o, t, r, out)
}

// open opens an archive and a prefetcher for it.
func open(ctx context.Context, path string, device cuda.Device, o imageloader.Options) (*imageloader.Loader,
	*prefetcher.Prefetcher, error) {
	loader, err := imageloader.OpenContext(ctx, path, o)
	if err != nil {
		return nil, nil, err
	}
	feed, err := prefetcher.New(loader, prefetcher.Options{Device: device})
	if err != nil {
		loader.Close()
		return nil, nil, err
	}
	return loader, feed, nil
}

// pretrain trains on the photographs and writes a checkpoint.
func pretrain(ctx context.Context, o options, t task, classes int, out io.Writer) error {
	net := newModel(classes, o.width)
	defer nn.Close(net)
	accuracies, err := t.learn(ctx, net)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "first task, %d photographs: %.0f %% right after epoch %d\n", classes,
		100*accuracies[len(accuracies)-1], t.epochs)
	return nn.Save(o.checkpoint, net, nil)
}

// second trains on the kinds twice: with the checkpoint's trunk, and from scratch.
func second(ctx context.Context, o options, t task, r *result, out io.Writer) (err error) {
	tuned := newModel(4, o.width)
	defer nn.Close(tuned)
	// The head's shape differs from the checkpoint's, so the head keeps its initial values.
	if r.report, err = nn.LoadWith(o.checkpoint, tuned, nn.LoadOptions{Partial: true}); err != nil {
		return err
	}
	fmt.Fprintln(out, r.report)
	if err := nn.Freeze(tuned.trunk); err != nil {
		return err
	}
	t.rate, t.frozen = 1e-2, tuned.trunk
	if r.tuned, err = t.learn(ctx, tuned); err != nil {
		return err
	}
	scratch := newModel(4, o.width)
	defer nn.Close(scratch)
	t.rate, t.frozen = 3e-3, nil
	if r.scratch, err = t.learn(ctx, scratch); err != nil {
		return err
	}
	for i := range r.tuned {
		fmt.Fprintf(out, "second task, after epoch %d: %.0f %% right with the frozen trunk, %.0f %% from "+
			"nothing\n", i, 100*r.tuned[i], 100*r.scratch[i])
	}
	if o.picture == "" {
		return nil
	}
	return study.Curves(o.picture, "08-finetune: share of test photographs named right", "epochs of the second task",
		[]study.Curve{{Name: "frozen trunk", Values: r.tuned}, {Name: "from nothing", Values: r.scratch}},
		strings.Split(r.report.String(), "\n"))
}

// learn trains the network and returns its accuracies before the first epoch and after each epoch.
func (t task) learn(ctx context.Context, net nn.Module) ([]float64, error) {
	if err := nn.To(net, t.device); err != nil {
		return nil, err
	}
	opt, err := optim.NewAdamW(nn.Parameters(net), optim.AdamWOptions{LR: t.rate})
	if err != nil {
		return nil, err
	}
	defer opt.Close()
	first, err := t.accuracy(ctx, net)
	if err != nil {
		return nil, err
	}
	accuracies := []float64{first}
	for epoch := range t.epochs {
		nn.Train(net, true)
		if t.frozen != nil {
			nn.Train(t.frozen, false) // its normalisations keep their statistics
		}
		for batch, err := range t.feed.Epoch(ctx, t.first+epoch) {
			if err != nil {
				return nil, err
			}
			if err := net.Forward(batch.Images).CrossEntropy(t.labelsOf(batch)).Backward(); err != nil {
				return nil, err
			}
			if err := opt.Step(); err != nil {
				return nil, err
			}
		}
		a, err := t.accuracy(ctx, net)
		if err != nil {
			return nil, err
		}
		accuracies = append(accuracies, a)
	}
	return accuracies, nil
}

// labelsOf returns the batch's labels for this task.
func (t task) labelsOf(batch *prefetcher.Batch) *torch.Tensor {
	if t.labels == nil {
		return batch.Labels
	}
	return t.labels.Index(batch.Labels)
}

func (t task) accuracy(ctx context.Context, net nn.Module) (float64, error) {
	nn.Train(net, false)
	right, err := torch.Zeros(t.device, torch.Int64)
	if err != nil {
		return 0, err
	}
	defer right.Close()
	n := 0
	for batch, err := range t.test.Epoch(ctx, 0) {
		if err != nil {
			return 0, err
		}
		found := net.Forward(batch.Images.NoGrad()).ArgMax(1, false).Eq(t.labelsOf(batch)).Sum()
		if err := right.Add_(found).Err(); err != nil {
			return 0, err
		}
		n += batch.N
	}
	sum, err := right.Int64()
	return float64(sum) / float64(max(n, 1)), err
}

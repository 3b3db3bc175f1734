// Command 13-tabular trains a small network on a CSV file: its numeric columns are the features,
// and one column names the class. It shows a source made from a function that writes one row, and
// train.Run without images.
//
//	13-tabular                               draw a table of three kinds of seeds, and learn them
//	13-tabular -csv FILE -label species      learn another table
//	13-tabular -dir runs/seeds -resume       keep checkpoints, and continue
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/examples/internal/study"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

type options struct {
	csv, label, device, dir string
	resume                  bool
	epochs, batch, width    int
	val                     float64
	seed                    uint64
}

func main() {
	var o options
	flag.StringVar(&o.csv, "csv", "", "learn from this CSV `file` (default: a table that is drawn)")
	flag.StringVar(&o.label, "label", "species", "`column` of the classes")
	flag.StringVar(&o.device, "device", "", "cpu or cuda:N (default: the first GPU, or the CPU)")
	flag.StringVar(&o.dir, "dir", "", "keep checkpoints in this `folder`")
	flag.BoolVar(&o.resume, "resume", false, "continue from the checkpoint in -dir")
	flag.IntVar(&o.epochs, "epochs", 20, "passes over the table")
	flag.IntVar(&o.batch, "batch", 64, "rows in a batch")
	flag.IntVar(&o.width, "width", 64, "units of a hidden layer")
	flag.Float64Var(&o.val, "val", 0.2, "share of the rows that is held out")
	flag.Uint64Var(&o.seed, "seed", 1, "of parameters, order and held-out rows")
	lesson.Usage(flag.CommandLine, "13-tabular [options]", "Trains a small network on the rows of a CSV file.")
	flag.Parse()
	lesson.Run("13-tabular", func(ctx context.Context) error {
		_, err := run(ctx, o, os.Stdout)
		return err
	})
}

// run returns the best share of held-out rows whose class was predicted.
func run(ctx context.Context, o options, out io.Writer) (float64, error) {
	device, err := study.Device(o.device)
	if err == nil {
		err = study.Positive(map[string]int{"epochs": o.epochs, "batch": o.batch, "width": o.width})
	}
	if err != nil {
		return 0, err
	}
	rows, err := openTable(o)
	if err != nil {
		return 0, err
	}
	learned, held, err := rows.split(o.val, o.seed)
	if err != nil {
		return 0, err
	}
	rows.normalise(learned)
	fmt.Fprintf(out, "%d rows of %d features, %d classes; %d rows are held out\n", len(rows.cells), len(rows.features),
		len(rows.classes), len(held))
	feed, err := rows.open(learned, device, prefetcher.SamplesOptions{BatchSize: o.batch, Shuffle: true, Seed: o.seed})
	if err != nil {
		return 0, err
	}
	defer feed.Close()
	test, err := rows.open(held, device, prefetcher.SamplesOptions{BatchSize: o.batch})
	if err != nil {
		return 0, err
	}
	defer test.Close()

	if err := torch.ManualSeed(o.seed); err != nil {
		return 0, err
	}
	net := nn.NewSequential(
		nn.NewLinear(len(rows.features), o.width, nn.LinearOptions{}), nn.NewReLU(),
		nn.NewLinear(o.width, o.width, nn.LinearOptions{}), nn.NewReLU(),
		nn.NewLinear(o.width, len(rows.classes), nn.LinearOptions{}))
	defer nn.Close(net)
	if err := nn.To(net, device); err != nil {
		return 0, err
	}
	opt, err := optim.NewAdamW(nn.Parameters(net), optim.AdamWOptions{LR: 3e-3})
	if err != nil {
		return 0, err
	}
	defer opt.Close()
	report, err := train.Run(ctx, train.Config{Model: net, Optimizer: opt, Feed: feed, Eval: test, Epochs: o.epochs,
		Dir: o.dir, Resume: o.resume, Progress: out})
	if err != nil {
		return 0, err
	}
	best := report.Best()
	fmt.Fprintf(out, "best: %.1f %% of the held-out rows, after epoch %d\n", 100*best.Eval.Top1, best.Epoch)
	return best.Eval.Top1, nil
}

// open returns a feed of some rows.
func (t *table) open(rows []int, device cuda.Device, o prefetcher.SamplesOptions) (*prefetcher.Prefetcher, error) {
	source, err := prefetcher.Samples(len(rows), []torch.Spec{
		{Name: "features", DType: torch.Float32, Shape: []int64{int64(len(t.features))}},
		{Name: "labels", DType: torch.Int64},
	}, func(i int, s *prefetcher.Sample) error { // several goroutines call it; all of them only read the table
		row := rows[i]
		features := s.Float32("features")
		for k, v := range t.cells[row] {
			features[k] = float32((v - t.mean[k]) / t.deviation[k])
		}
		s.Int64("labels")[0] = t.labels[row]
		return nil
	}, o)
	if err != nil {
		return nil, err
	}
	return prefetcher.New(source, prefetcher.Options{Device: device})
}

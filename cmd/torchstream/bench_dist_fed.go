package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/dist"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// distFedRow is a training of all ranks whose batches come from one archive.
type distFedRow struct {
	Archive string `json:"archive"`
	Model   string `json:"model"`
	Batch   int    `json:"batch"`   // of a rank
	Decode  string `json:"decode"`  // where images are decoded
	Workers int    `json:"workers"` // of a rank
	// The rates are those of a rank: fed, and of the same steps on data that lie on the device, in
	// turn with the fed ones. Each round counts as its slowest rank.
	ImagesPerSecond float64 `json:"images_s_each"`
	Resident        float64 `json:"resident_images_s_each"`
	// Share is the median of the rounds.
	Share float64 `json:"share_of_resident"`
}

// fed trains on batches of the archive, of which each rank gets its share.
func (b *distBench) fed(ctx context.Context, model string, batch int) (*distFedRow, error) {
	row := &distFedRow{Archive: b.archive, Model: model, Batch: batch, Decode: strings.ToLower(b.decode.String())}
	err := withPrecedence(b.device, func() error {
		return b.withTrainee(model, "eager", true, func(t *trainee, scope *torch.Scope) error { return b.measureFed(ctx, row, t, scope) })
	})
	return row, err
}

// measureFed measures rounds of as many steps on every rank.
func (b *distBench) measureFed(ctx context.Context, row *distFedRow, t *trainee, scope *torch.Scope) (err error) {
	// An epoch of many passes, so that its beginning does not count.
	loader, err := imageloader.OpenContext(ctx, b.archive, imageloader.Options{BatchSize: row.Batch, Transform: imageloader.Train(b.size), Shuffle: true,
		Seed: 1, Repeat: 1 << 20, ShuffleBytes: 4 << 30, Workers: b.workers, DropLast: true, Rank: b.world.Rank(), World: b.world.Size()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, loader.Close()) }()
	feed, err := prefetcher.New(loader, prefetcher.Options{Device: b.device, Decode: b.decode})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, feed.Close()) }()
	row.Workers = loader.Stats().Workers
	input, target, err := t.data(scope, row.Batch, b.size, b.context)
	if err != nil {
		return err
	}
	resident := t.call(input, target)
	rounds, settle, warm := fedRounds, fedSettle, loader.Len()/row.Batch+fedSettle
	if b.device == cuda.CPU {
		rounds, settle, warm = 1, 0, 1
	}
	all, err := dist.AllGatherObject(b.world, warm)
	if err != nil {
		return err
	}
	skip, steps := slices.Max(all), 0
	var fed, still time.Duration
	var shares []float64
	var begun time.Time
	for batch, err := range feed.Epoch(ctx, 0) {
		if err != nil {
			return err
		}
		if skip == 0 && steps == 0 {
			if err := b.together(); err != nil {
				return err
			}
			begun = time.Now()
		}
		if _, _, err := t.step.Step(batch.Images, batch.Labels); err != nil {
			return err
		}
		if skip > 0 {
			skip--
			continue
		}
		if steps++; steps < b.steps {
			continue
		}
		if err := b.wait(); err != nil {
			return err
		}
		took, err := b.slowest(time.Since(begun))
		if err != nil {
			return err
		}
		if err := b.together(); err != nil {
			return err
		}
		idle, err := b.repeat(b.steps, resident)
		if err == nil {
			idle, err = b.slowest(idle)
		}
		if err != nil {
			return err
		}
		fed, still = fed+took, still+idle
		if shares = append(shares, idle.Seconds()/took.Seconds()); len(shares) == rounds {
			break
		}
		skip, steps = settle, 0
	}
	if len(shares) < rounds {
		return errors.New("the epoch ended before the measurement")
	}
	images := float64(rounds * b.steps * row.Batch)
	row.ImagesPerSecond, row.Resident, row.Share = images/fed.Seconds(), images/still.Seconds(), median(shares)
	return nil
}

// slowest returns the longest time of a rank.
func (b *distBench) slowest(took time.Duration) (time.Duration, error) {
	all, err := dist.AllGatherObject(b.world, took)
	if err != nil {
		return 0, err
	}
	return slices.Max(all), nil
}

func (r *distReport) fedTable(out io.Writer) error {
	if len(r.Fed) == 0 {
		return nil
	}
	fmt.Fprintf(out, "\nfed from %s\n", printable.Name(r.Fed[0].Archive))
	w := printable.NewTable(out, tabwriter.AlignRight)
	fmt.Fprintln(w, "model\tbatch\tdecoded by\tworkers\timages/s\tresident\tshare\t")
	for _, row := range r.Fed {
		fmt.Fprintf(w, "%s\t%d\t%s\t%d\t%.0f\t%.0f\t%.3f\t\n", row.Model, row.Batch, row.Decode, row.Workers, row.ImagesPerSecond, row.Resident, row.Share)
	}
	return w.Flush()
}

package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// distFedRow is a training of all ranks with batches from one archive.
type distFedRow struct {
	Archive string `json:"archive"`
	Model   string `json:"model"`
	Batch   int    `json:"batch"`   // per rank
	Decode  string `json:"decode"`  // where images are decoded
	Workers int    `json:"workers"` // per rank
	// The rates are per rank: for fed steps, and for the same steps on resident data, measured in
	// turn. The slowest rank determines the rate of a round.
	ImagesPerSecond float64 `json:"images_s_each"`
	Resident        float64 `json:"resident_images_s_each"`
	// Share is the median over the rounds.
	Share float64 `json:"share_of_resident"`
}

// fed trains on batches of the archive. Each rank gets its share.
func (b *distBench) fed(ctx context.Context, model string, batch int) (*distFedRow, error) {
	row := &distFedRow{Archive: printable.Archive(b.archive), Model: model, Batch: batch,
		Decode: strings.ToLower(b.decode.String())}
	err := train.WithPrecedence(b.device, func() error {
		return b.withTrainee(model, "eager", true,
			func(t *trainee, scope *torch.Scope) error { return b.measureFed(ctx, row, t, scope) })
	})
	return row, err
}

// measureFed measures rounds with the same number of steps on every rank.
func (b *distBench) measureFed(ctx context.Context, row *distFedRow, t *trainee, scope *torch.Scope) error {
	m := fedMeasurement{b: &b.trainBench, begin: b.Together, maximum: b.maximum,
		over: func(steps int, _ time.Duration) bool { return steps == b.steps }}
	if err := m.run(ctx, t, scope, row.Batch,
		imageloader.Options{Rank: b.World.Rank(), World: b.World.Size(), ShareOnHost: b.share}); err != nil {
		return err
	}
	images := float64(m.steps * row.Batch)
	row.Workers, row.Share = m.workers, median(m.shares)
	row.ImagesPerSecond, row.Resident = images/m.fed.took.Seconds(), images/m.still.took.Seconds()
	return nil
}

// maximum returns the maximum value over all ranks.
func (b *distBench) maximum(value int64) (int64, error) {
	all, err := distributed.AllGatherObject(b.World, value)
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
		fmt.Fprintf(w, "%s\t%d\t%s\t%d\t%.0f\t%.0f\t%.3f\t\n", row.Model, row.Batch, row.Decode,
			row.Workers, row.ImagesPerSecond, row.Resident, row.Share)
	}
	return w.Flush()
}

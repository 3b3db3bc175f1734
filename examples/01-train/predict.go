package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imagefeed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

// shownClasses is the number of classes printed for an image, the most probable first.
const shownClasses = 3

func predictCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := flags("predict [options] FILE...", "Predicts photographs, and archives (.tgz, .tar) or "+
		"folders of them (directory = class). It names files at fault, and goes on with the others.", stderr)
	checkpoint := set.String("checkpoint", "01-train.safetensors", "checkpoint `FILE` that train wrote")
	deviceName := set.String("device", "", "cpu, cuda or cuda:N (default: a GPU if there is one)")
	batch := set.Int("batch", 32, "images per step")
	limit := set.Int("show", 20, "number of images of an archive to print; all are counted")
	if err := parse(set, args); err != nil {
		return err
	}
	if set.NArg() == 0 || *batch < 1 {
		return usageError{"predict needs photographs, or archives (.tgz, .tar) or folders of them, and a " +
			"-batch of at least 1"}
	}
	p, err := newPredictor(*checkpoint, *deviceName)
	if err != nil {
		return err
	}
	p.batch, p.out, p.errs = *batch, stdout, stderr

	var files []string
	bad := 0
	for _, path := range set.Args() {
		if !isArchive(path) {
			files = append(files, path)
			continue
		}
		n, err := p.archive(ctx, path, *limit)
		if err != nil {
			return err
		}
		bad += n
	}
	if len(files) > 0 {
		n, err := p.files(ctx, files)
		if err != nil {
			return err
		}
		bad += n
	}
	if bad > 0 {
		return fmt.Errorf("%d of the photographs could not be predicted: see above", bad)
	}
	return nil
}

// isArchive reports whether a path is an archive, judging by its name, or a folder.
func isArchive(path string) bool {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return true
	}
	return slices.ContainsFunc([]string{".tgz", ".tar", ".tar.gz"},
		func(end string) bool { return strings.HasSuffix(strings.ToLower(path), end) })
}

type predictor struct {
	net      nn.Module
	settings settings
	device   cuda.Device
	batch    int
	out      io.Writer
	errs     io.Writer // receives the names of bad files
}

// newPredictor loads a checkpoint's network onto a device.
func newPredictor(checkpoint, deviceName string) (p predictor, err error) {
	if p.device, err = pickDevice(deviceName); err != nil {
		return p, err
	}
	if p.net, p.settings, err = loadCheckpoint(checkpoint); err != nil {
		return p, err
	}
	nn.Train(p.net, false)
	return p, nn.To(p.net, p.device)
}

// archive predicts every image and prints the first ones. It also prints how many predictions are
// correct among images whose directory is a class of the network. It returns the number of bad
// images, which the loader skips and logs.
func (p predictor) archive(ctx context.Context, path string, limit int) (bad int, err error) {
	feed, err := imagefeed.Open(ctx, path, imagefeed.Options{
		Loader: imageloader.Options{BatchSize: p.batch, Transform: evalTransform(p.settings.Size),
			BadSamples: imageloader.Skip,
			Logger:     slog.New(slog.NewTextHandler(p.errs, &slog.HandlerOptions{Level: slog.LevelWarn}))},
		Prefetcher: prefetcher.Options{Device: p.device}})
	if err != nil {
		return 0, err
	}
	defer feed.Close()
	loader := feed.Loader
	labels := make([]int, len(loader.Classes())) // from the archive's class to the network's
	for i, class := range loader.Classes() {
		labels[i] = slices.Index(p.settings.Classes, class)
	}
	shown, known, right := 0, 0, 0
	table := printable.NewTable(p.out, 0)
	err = p.each(ctx, feed, func(sample imageloader.Sample, best []guess) {
		mark := ""
		if label := labels[sample.Label]; label >= 0 {
			known++
			if label == best[0].class {
				right++
			} else {
				mark = "wrong"
			}
		}
		if shown < limit {
			shown++
			p.row(table, sample.Name, best, mark)
		}
	})
	if err != nil {
		return 0, err
	}
	if err := table.Flush(); err != nil {
		return 0, err
	}
	bad = int(loader.Stats().Bad)
	if n := loader.Len() - bad; n > shown {
		fmt.Fprintf(p.out, "... and %d more (-show %d prints all)\n", n-shown, n)
	}
	if known > 0 {
		fmt.Fprintf(p.out, "%s: %d of %d right, %s (guessing: %s)\n", path, right, known,
			percent(float64(right)/float64(known)), percent(1/float64(len(p.settings.Classes))))
	}
	return bad, nil
}

// files predicts single photographs in batches. It returns the number of photographs that cannot be
// read or decoded.
func (p predictor) files(ctx context.Context, paths []string) (bad int, err error) {
	decoder, err := serve.NewDecoder(
		serve.Options{Decode: decode.Options{Transform: evalTransform(p.settings.Size)}, Device: p.device})
	if err != nil {
		return 0, err
	}
	defer decoder.Close()
	table := printable.NewTable(p.out, 0)
	for some := range slices.Chunk(paths, p.batch) {
		n, err := p.some(ctx, decoder, some, table)
		if err != nil {
			return 0, err
		}
		bad += n
	}
	return bad, table.Flush()
}

// some predicts the photographs of one batch, and names the bad ones.
func (p predictor) some(ctx context.Context, decoder *serve.Decoder, paths []string,
	table io.Writer) (bad int, err error) {
	var images [][]byte
	var read []string
	for _, path := range paths {
		data, err := safefile.ReadFile(path)
		if err != nil {
			fmt.Fprintf(p.errs, "01-train: %v\n", err)
			continue
		}
		images, read = append(images, data), append(read, path)
	}
	if len(images) == 0 {
		return len(paths), nil
	}
	scope := torch.NewScope("files")
	defer scope.Close()
	x, err := decoder.Batch(ctx, scope, images...)
	var faults decode.Errors
	if err != nil && !errors.As(err, &faults) {
		return 0, err
	}
	for _, fault := range faults {
		fmt.Fprintf(p.errs, "01-train: %s: %v: %v\n", read[fault.Image], fault.Kind, fault.Err)
		read[fault.Image] = "" // its pixels are zero
	}
	bad = len(paths) - len(images) + len(faults)
	if x == nil { // all are bad
		return bad, nil
	}
	best, err := p.best(x)
	if err != nil {
		return 0, err
	}
	for i, path := range read {
		if path != "" {
			p.row(table, path, best[i], "")
		}
	}
	return bad, nil
}

// guess is a class and its probability, from 0 to 1.
type guess struct {
	class       int
	probability float64
}

// each calls report with the most probable classes of every image.
func (p predictor) each(ctx context.Context, feed *imagefeed.Feed, report func(imageloader.Sample, []guess)) error {
	for batch, err := range feed.Epoch(ctx, 0) {
		if err != nil {
			return err
		}
		best, err := p.best(batch.Images)
		if err != nil {
			return err
		}
		for i, sample := range batch.Info.Samples {
			report(sample, best[i])
		}
	}
	return nil
}

// best returns the most probable classes of every image of a batch.
func (p predictor) best(images *torch.Tensor) (best [][]guess, err error) {
	k := min(shownClasses, len(p.settings.Classes))
	values, indices := p.net.Forward(images.NoGrad()).Softmax(1).TopK(int64(k), 1)
	probabilities, err := values.Float64s()
	if err != nil {
		return nil, err
	}
	classes, err := indices.Int64s()
	if err != nil {
		return nil, err
	}
	for i := 0; i < len(classes); i += k {
		row := make([]guess, k)
		for j := range row {
			row[j] = guess{int(classes[i+j]), probabilities[i+j]}
		}
		best = append(best, row)
	}
	return best, nil
}

func (p predictor) row(w io.Writer, name string, best []guess, mark string) {
	fmt.Fprint(w, printable.Name(name))
	for _, g := range best {
		fmt.Fprintf(w, "\t%s\t%5.1f %%", printable.Name(p.settings.Classes[g.class]), 100*g.probability)
	}
	fmt.Fprintf(w, "\t%s\n", mark)
}

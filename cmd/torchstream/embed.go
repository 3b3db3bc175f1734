//go:build linux && cgo

package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"iter"
	"math"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/trace"
	"github.com/torchstream/torchstream/train"
)

// embedOptions is the command line of embed.
type embedOptions struct {
	feeding
	network             networkOptions
	archive, out, names string
	saveSteps, logEvery int
}

// embedCommand writes the vectors of an archive's images.
func embedCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o := embedOptions{network: networkOptions{features: true, instances: 1}}
	set := cli.Flags("torchstream embed -archive FILE -o FILE",
		"Writes a vector for each image of an archive, in the archive's order: the output of a package (.pt2) of\n"+
			"tools/export.py, or the input of the last layer of a checkpoint of torchstream train. Row i of the vectors\n"+
			"belongs to row i of the names. Images need no class; -list, -webdataset and -label-column leave those\n"+
			"without a label out. The name of a Parquet row is FILE/ROW/PATH, with rows from 0. The same command\n"+
			"continues an interrupted one, and writes the same bytes.", stderr)
	set.StringVar(&o.archive, "archive", "", cli.ArchiveHelp)
	o.images.Register(set, cli.LabelOptions|cli.UprightOption)
	o.network.register(set)
	set.StringVar(&o.out, "o", "vectors.safetensors", "`FILE` of the vectors: .safetensors with the tensor vectors, float32 "+
		"[images width], or .npy")
	cli.Alias(set, "out", "o")
	set.StringVar(&o.names, "names", "", "`FILE` of the names: .csv with the columns name and class, or a text with a name "+
		"a line (default: that of -o with .csv)")
	set.IntVar(&o.batch, "batch", 64, "images per step; at most what a package takes")
	o.feeding.register(set)
	o.registerFailOrSkip(set, "command") // a substitute would have the name of another image
	set.IntVar(&o.saveSteps, "save-steps", 0, "steps after which the vectors are safe on the disk (default: every 10 s)")
	set.IntVar(&o.logEvery, "log-every", 0, "print a line every so many steps, for logs (default: none)")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	if err := o.checkOptions(set); err != nil {
		return err
	}
	err := o.run(ctx, set, stdout, stderr)
	if errors.Is(err, cuda.ErrOutOfMemory) {
		err = fmt.Errorf("%w (-batch %d: a smaller one needs less memory)", err, o.batch)
	}
	if err != nil && o.badSamples == imageloader.Fail {
		err = cli.SkippableError{Err: err}
	}
	return err
}

// checkOptions refuses options that make no sense.
func (o *embedOptions) checkOptions(set *flag.FlagSet) error {
	switch {
	case o.archive == "":
		return cli.UsageError{Message: "embed needs -archive FILE"}
	case o.out == "":
		return cli.UsageError{Message: "embed needs -o FILE"}
	case o.batch < 1:
		return cli.Usagef("-batch %d: must be at least 1", o.batch)
	case min(o.workers, o.saveSteps, o.logEvery) < 0:
		return cli.UsageError{Message: "-workers, -save-steps and -log-every are at least 0"}
	}
	if o.names == "" {
		o.names = strings.TrimSuffix(o.out, filepath.Ext(o.out)) + ".csv"
	}
	if o.names == o.out {
		return cli.UsageError{Message: "-names and -o are the same file"}
	}
	return cmp.Or(o.check(), o.images.Check())
}

// run computes all vectors.
func (o *embedOptions) run(ctx context.Context, set *flag.FlagSet, stdout, stderr io.Writer) (err error) {
	if err := cmp.Or(cli.SpinBriefly(), cli.SetThreads(*o.threads)); err != nil {
		return err
	}
	n, err := o.network.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	if err := cmp.Or(o.checkDevice(n.device, ""), o.fit(set, n)); err != nil {
		return err
	}
	options := imageloader.Options{Transform: n.transform, BadSamples: o.badSamples}
	o.images.SetLabels(&options)
	options.Columns.RowNames = o.images.List == ""
	var read func()
	options.Progress, read = cli.ReadingProgress(stderr)
	loader, feed, err := o.openImages(ctx, n.device, options)
	read()
	if err != nil {
		return err
	}
	defer loader.Close()
	defer feed.Close()
	settings, about, err := o.settings(n)
	if err != nil {
		return err
	}
	file, err := openVectors(o.out, o.names, classOf(loader), about, settings)
	if err != nil {
		return err
	}
	defer file.close()
	e := &embedder{embedOptions: o, net: n, loader: loader, file: file, begin: time.Now(), stdout: stdout}
	if !file.journal.Complete {
		if err := e.all(ctx, feed, stderr); err != nil {
			return err
		}
	}
	return e.print(loader)
}

// openImages opens the archive. If no option says where labels come from, and labels are missing or
// impossible, it opens the archive again, without labels. All images are then samples.
func (o *embedOptions) openImages(ctx context.Context, device cuda.Device, options imageloader.Options) (
	loader *imageloader.Loader, feed *prefetcher.Prefetcher, err error) {
	loader, feed, err = o.open(ctx, device, o.archive, math.MaxInt, options, trace.Window{})
	if !o.images.ByDirectory() || len(o.images.Columns.Labels) > 0 {
		return loader, feed, err
	}
	switch {
	case errors.Is(err, imageloader.ErrNoSamples), errors.Is(err, imageloader.ErrLabels):
	case err != nil || loader.Stats().Orphans == 0:
		return loader, feed, err
	default:
		if err = errors.Join(feed.Close(), loader.Close()); err != nil {
			return nil, nil, err
		}
		// The index file has the labels, which train needs. One pass uses no entry points.
		options.NoIndex, options.NoEntryPoints = true, true
	}
	options.Unlabelled = true
	return o.open(ctx, device, o.archive, math.MaxInt, options, trace.Window{})
}

// classOf returns a function that returns the class of a sample. Without labels, this is the name
// of the image's directory, or "".
func classOf(loader *imageloader.Loader) func(imageloader.Sample) string {
	classes, rows := loader.Classes(), loader.Format() == imageloader.FormatParquet
	return func(s imageloader.Sample) string {
		if len(classes) > 0 {
			return classes[s.Label]
		}
		folder := path.Base(path.Dir(s.Name))
		if rows || folder == "." || folder == ".." {
			return ""
		}
		return folder
	}
}

// fit adapts the batch and -upright to the network.
func (o *embedOptions) fit(set *flag.FlagSet, n *network) error {
	least, most := int(n.batch.Min), int(n.batch.Max)
	if given(set, "batch") && most > 0 && o.batch > most {
		return cli.Usagef("-batch %d: %s takes at most %d images", o.batch, printable.Name(n.path), most)
	}
	o.batch = max(o.batch, least)
	if most > 0 {
		o.batch = min(o.batch, most)
	}
	return n.setUpright(set, o.images.Upright)
}

// settings returns the settings on which the bytes of the vectors depend, to compare them with an
// interrupted run's. The archive and the loader's options are not among them, because the loader
// compares these itself. about is the metadata for a .safetensors file.
func (o *embedOptions) settings(n *network) (settings, about map[string]string, err error) {
	hash, err := hashOf(n.path)
	if err != nil {
		return nil, nil, err
	}
	device, err := cli.DeviceName(n.device)
	if err != nil {
		return nil, nil, err
	}
	t := n.transform
	about = map[string]string{"format": "pt", "model": filepath.Base(n.path), "model_sha256": hash}
	if o.network.output != "" {
		about["output"] = o.network.output
	}
	return map[string]string{"-model with the SHA-256": hash, "-output": o.network.output, "-device": device,
		"-batch": fmt.Sprint(o.batch), "-resize": fmt.Sprint(t.Resize), "-mean": fmt.Sprint(t.Mean),
		"-std": fmt.Sprint(t.Std), "-names": o.names}, about, nil
}

// hashOf returns a file's SHA-256.
func hashOf(path string) (string, error) {
	f, err := safefile.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), err
}

// embedder computes vectors and writes them.
type embedder struct {
	*embedOptions
	net    *network
	loader *imageloader.Loader
	file   *vectorFile
	begin  time.Time
	stdout io.Writer

	steps  int
	hosts  [2]*torch.Tensor  // two buffers [batch width] for results, used alternately; pinned for a GPU
	queued *imageloader.Info // of the batch whose vectors are not written; nil: none
	state  imageloader.State // the loader's position after the written rows
	saved  time.Time
	before int64 // rows of earlier runs
}

// all computes the vectors that the files lack.
func (e *embedder) all(ctx context.Context, feed *prefetcher.Prefetcher, stderr io.Writer) error {
	if j := e.file.journal; j.State != nil {
		if err := e.loader.Restore(ctx, *j.State); err != nil {
			return fmt.Errorf("%s is unfinished: %w: give the archive and the options of the interrupted run, or remove %s "+
				"to start anew", printable.Name(e.file.out+part), err, printable.Name(e.file.journalPath()))
		}
		e.before, e.state = j.Rows, *j.State
		fmt.Fprintf(e.stdout, "%s: continues after %s\n", printable.Name(e.out), printable.Counted(j.Rows, "image", "images"))
	}
	draw, done := cli.ImageProgress(stderr)
	e.saved = time.Now()
	err := train.WithPrecedence(e.net.device, func() error { return e.epoch(ctx, feed.Epoch(ctx, 0), draw) })
	done()
	closed := e.closeHosts()
	if err == nil && closed == nil {
		err = e.file.finish()
	}
	if err == nil && closed == nil || closed == nil && errors.As(err, &cli.InterruptedError{}) {
		return err
	}
	err = errors.Join(err, closed)
	if ctx.Err() != nil { // the exit status shows only the interruption
		fmt.Fprintf(stderr, "torchstream: %s\n", printable.Text(cli.Advised(err, "embed")))
	}
	return err
}

func (e *embedder) closeHosts() (err error) {
	for _, host := range e.hosts {
		if host != nil {
			err = errors.Join(err, host.Close())
		}
	}
	return err
}

// epoch runs the network on all batches. The device computes a batch while the host writes the
// vectors of the previous batch.
func (e *embedder) epoch(ctx context.Context, batches iter.Seq2[*prefetcher.Batch, error],
	draw func(have, total int64)) error {
	for batch, err := range batches {
		if err != nil {
			return e.stop(ctx, err)
		}
		if err := e.step(ctx, batch); err != nil {
			if ended(ctx, err) {
				return e.stop(ctx, err)
			}
			return err
		}
		if draw != nil {
			draw(e.file.journal.Rows, int64(e.loader.Len()))
		}
	}
	return e.write()
}

// ended reports whether an error says that ctx has ended.
func ended(ctx context.Context, err error) bool {
	return ctx.Err() != nil && (errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx)))
}

// stop writes and saves the vectors of the queued batch after err has ended the epoch. It saves
// nothing if it cannot write them. It returns a cli.InterruptedError if ctx has ended and all rows
// are saved.
func (e *embedder) stop(ctx context.Context, err error) error {
	if failed := e.write(); failed != nil {
		return errors.Join(err, failed)
	}
	if failed := e.saveRows(); failed != nil {
		return errors.Join(err, failed)
	}
	if !ended(ctx, err) {
		return err
	}
	return cli.InterruptedError{Message: fmt.Sprintf("interrupted after %s: the same command continues",
		printable.Counted(e.file.saved, "image", "images"))}
}

// step queues a batch, and writes the vectors of the previous batch.
func (e *embedder) step(ctx context.Context, batch *prefetcher.Batch) error {
	y, err := e.net.forward(ctx, batch.Images, int64(batch.N))
	if err != nil {
		return err
	}
	y = y.Flatten(1, -1).ToDType(torch.Float32).Contiguous(torch.Contiguous)
	if err := y.Err(); err != nil {
		return err
	}
	shape := y.Shape()
	if len(shape) != 2 || shape[0] != int64(batch.N) {
		return fmt.Errorf("%s returns %v for %d images, and not a row for each: choose another -output",
			printable.Name(e.net.path), shape, batch.N)
	}
	host := &e.hosts[e.steps%2]
	if *host == nil {
		o := torch.TensorOptions{Device: cuda.CPU, DType: torch.Float32, Pinned: e.net.device != cuda.CPU}
		if *host, err = o.Empty(max(int64(e.batch), shape[0]), shape[1]); err != nil {
			return err
		}
	}
	rows := (*host).Narrow(0, 0, shape[0])
	defer rows.Close()
	if err := rows.CopyFrom(y, torch.CopyOptions{NonBlocking: true}); err != nil {
		return err
	}
	if err := e.write(); err != nil {
		return err
	}
	info := batch.Info.(imageloader.Info)
	e.queued = &info
	e.steps++
	return nil
}

// write waits for the vectors of the queued batch and writes them.
func (e *embedder) write() error {
	if e.queued == nil {
		return nil
	}
	bytes, err := e.hosts[(e.steps-1)%2].Bytes()
	if err != nil {
		return err
	}
	n := len(e.queued.Samples)
	width := int(e.hosts[(e.steps-1)%2].Shape()[1])
	if err := e.file.append(bytes[:4*n*width], e.queued.Samples); err != nil {
		return err
	}
	e.state, e.queued = e.queued.State, nil
	due := time.Since(e.saved) >= 10*time.Second
	if e.saveSteps > 0 {
		due = e.steps%e.saveSteps == 0
	}
	if due {
		if err := e.saveRows(); err != nil {
			return err
		}
	}
	if e.logEvery > 0 && e.steps%e.logEvery == 0 {
		fmt.Fprintf(e.stdout, "%d of %d images\n", e.file.journal.Rows, e.loader.Len())
	}
	return nil
}

// saveRows saves the written rows, if there are any.
func (e *embedder) saveRows() error {
	e.saved = time.Now()
	if e.file.journal.Rows == 0 {
		return nil
	}
	return e.file.save(e.state)
}

// print reports the files that are complete, and their numbers of vectors.
func (e *embedder) print(loader *imageloader.Loader) error {
	j, s := e.file.journal, loader.Stats()
	rate := ""
	if now := j.Rows - e.before; now > 0 && e.steps > 0 {
		rate = fmt.Sprintf(", %.1f images/s", float64(now)/time.Since(e.begin).Seconds())
	}
	_, err := fmt.Fprintf(e.stdout, "%s: %s of %d numbers%s; names in %s\n", printable.Name(e.out),
		printable.Counted(j.Rows, "vector", "vectors"), j.Width, rate, printable.Name(e.names))
	printList(e.stdout, e.archive, loader.ListReport())
	printBad(e.stdout, e.archive, s, e.badSamples, "")
	if s.Orphans > 0 {
		fmt.Fprintf(e.stdout, "%s: %s in no folder or without a label, and left out\n", printable.ArchiveName(e.archive),
			printable.Counted(s.Orphans, "image", "images"))
	}
	return err
}

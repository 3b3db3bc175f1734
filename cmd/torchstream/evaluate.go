//go:build linux && cgo

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/normalform"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// evaluateOptions is the command line of evaluate.
type evaluateOptions struct {
	feeding
	archive, checkpoint, device, amp, out string
	confusions                            int
	subset, asJSON                        bool
}

// evaluateCommand measures a classifier on an archive.
func evaluateCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o evaluateOptions
	set := cli.Flags("torchstream evaluate -archive FILE",
		"Measures a checkpoint of torchstream train on an archive of images: loss, top-1, top-5, and which\n"+
			"classes it takes for which. The classes are known by their names, and must be those of the "+
			"checkpoint.", stderr)
	set.StringVar(&o.archive, "archive", "", cli.ArchiveHelp+". Take images that the training has not seen")
	o.images.Register(set, cli.LabelOptions|cli.MultiLabelOptions|cli.CheckpointUpright)
	set.StringVar(&o.checkpoint, "checkpoint", filepath.Join("trained", "best.pt"),
		"checkpoint `FILE` of torchstream train")
	set.BoolVar(&o.subset, "subset", false,
		"accept an archive without images of some of the checkpoint's classes; the figures say nothing about those")
	set.IntVar(&o.confusions, "confusions", 10, "number of confused pairs of classes to print, the most frequent first; with "+
		"-multi-label number of classes, the least precise first")
	set.StringVar(&o.out, "o", "", "`DIR` that gets confusion.csv and confusion.png (default: none)")
	cli.Alias(set, "out", "o")
	set.StringVar(&o.device, "device", "", "cpu, cuda or cuda:N (default: a GPU if there is one)")
	set.IntVar(&o.batch, "batch", 64, "images per step")
	o.feeding.register(set)
	o.registerFailOrSkip(set, "evaluation") // counting an image twice would falsify the result
	set.StringVar(&o.amp, "amp", "", "bf16 or fp16: the network in 16 bits, as a training with -amp "+
		"evaluates; fp16 on a GPU only (default: float32)")
	set.BoolVar(&o.asJSON, "json", false, "print one JSON object, with all classes and all confusions")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	switch {
	case o.archive == "":
		return cli.UsageError{Message: "evaluate needs -archive FILE"}
	case o.batch < 1:
		return cli.Usagef("-batch %d: must be at least 1", o.batch)
	case o.workers < 0 || o.confusions < 0:
		return cli.UsageError{Message: "-workers and -confusions are at least 0"}
	}
	if err := cmp.Or(o.check(), o.images.Check()); err != nil {
		return err
	}
	dtype, err := parseAMP(o.amp)
	if err != nil {
		return err
	}
	err = o.run(ctx, set, dtype, stdout, stderr)
	if errors.Is(err, cuda.ErrOutOfMemory) {
		err = fmt.Errorf("%w (-batch %d: a smaller one needs less memory)", err, o.batch)
	}
	if err != nil && o.badSamples == imageloader.Fail {
		err = cli.SkippableError{Err: err}
	}
	return err
}

// run evaluates, and prints and saves the result.
func (o *evaluateOptions) run(ctx context.Context, set *flag.FlagSet, dtype torch.DType, stdout,
	stderr io.Writer) error {
	if err := cli.SetThreads(*o.threads); err != nil {
		return err
	}
	device, err := cli.PickDevice(o.device)
	if err != nil {
		return err
	}
	if err := o.checkDevice(device, o.amp); err != nil {
		return err
	}
	if o.out != "" {
		if err := checkWritable(o.out); err != nil {
			return fmt.Errorf("-o %s: %w", printable.Name(o.out), err)
		}
	}
	file, err := openTrained(o.checkpoint)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := cmp.Or(file.matchUpright(set, o.images.Upright), file.matchMultiLabel(o.images.MultiLabel)); err != nil {
		return err
	}
	o.images.Upright, o.images.MultiLabel = file.about.Upright, file.about.MultiLabel
	if o.out != "" && o.images.MultiLabel {
		return fmt.Errorf("-o is for the confusions of classes, and %s has several labels for an image: leave it out",
			printable.Name(file.path))
	}
	images, err := o.checkClasses(ctx, file, stderr)
	if err != nil {
		return err
	}
	// openHeldBack checks the image size before net allocates the network.
	loader, feed, err := o.openHeldBack(ctx, device, o.archive, images, file.about.Size, file.about.Classes)
	if err != nil {
		return err
	}
	defer loader.Close()
	defer feed.Close()
	net, err := file.about.Load(file.File, device)
	if err != nil {
		return err
	}
	defer nn.Close(net)
	m, err := train.Evaluate(ctx, net, feed, train.EvaluateOptions{Loader: loader, Autocast: dtype,
		MultiLabel: file.about.MultiLabel})
	if err != nil {
		return err
	}
	if o.asJSON {
		err = cli.WriteJSON(stdout, o.evaluation(file, m, loader))
	} else {
		printList(stdout, o.archive, loader.ListReport())
		err = o.print(stdout, file, m)
		printBad(stdout, o.archive, loader.Stats(), o.badSamples, "")
	}
	if err != nil || o.out == "" {
		return err
	}
	return m.SaveConfusion(o.out, file.about.Classes)
}

// checkClasses refuses an archive whose classes differ from the checkpoint's, and counts its
// images.
func (o *evaluateOptions) checkClasses(ctx context.Context, file *trained, stderr io.Writer) (images int, err error) {
	images, unknown, without, err := compareClasses(ctx, o.archive, &o.images, file.about.Classes, stderr)
	archive, checkpoint := printable.ArchiveName(o.archive), printable.Name(file.path)
	switch {
	case err != nil:
		return 0, err
	case len(unknown) > 0:
		return 0, fmt.Errorf("%s has %s that %s does not know: %s: rename the folders, leave them out, "+
			"or choose the labels with -label-column or -list%s",
			archive, printable.Counted(len(unknown), "class", "classes"), checkpoint, listed(unknown),
			normalform.Hint(unknown, file.about.Classes))
	case len(without) > 0 && !o.subset:
		return 0, fmt.Errorf("%s has no image of %d of the %d classes of %s: %s: -subset evaluates the others",
			archive, len(without), len(file.about.Classes), checkpoint, listed(without))
	}
	return images, nil
}

// evaluation is the JSON form of the result.
type evaluation struct {
	Checkpoint string  `json:"checkpoint"`
	Model      string  `json:"model"`
	Size       int     `json:"size"` // pixels of an image's side
	Archive    string  `json:"archive"`
	Images     int64   `json:"images"`
	BadImages  int64   `json:"bad_images"` // left out, by -bad-samples skip
	Loss       float64 `json:"loss"`       // mean cross-entropy
	Top1       float64 `json:"top1"`       // share, from 0 to 1
	Top5       float64 `json:"top5"`
	// MAP is the mean average precision of a checkpoint trained with -multi-label, which has no
	// top-1, top-5 and confusions.
	MAP        float64           `json:"map,omitempty"`
	Classes    []evaluatedClass  `json:"classes"`    // by label
	Confusions []namedConfusions `json:"confusions"` // all, the most frequent first
}

// evaluatedClass is a class of the checkpoint.
type evaluatedClass struct {
	Class  string `json:"class"`
	Images int64  `json:"images"` // in the archive
	Right  int64  `json:"right"`  // classified correctly
	// AveragePrecision is null without -multi-label, and for a class without an image.
	AveragePrecision *float64 `json:"average_precision,omitempty"`
}

// namedConfusions counts the images of a class that were classified as another one.
type namedConfusions struct {
	Class    string  `json:"class"`
	TakenFor string  `json:"taken_for"`
	Images   int64   `json:"images"`
	Share    float64 `json:"share"` // of the class's images, from 0 to 1
}

func (o *evaluateOptions) evaluation(file *trained, m *train.Metrics, l *imageloader.Loader) evaluation {
	e := evaluation{Checkpoint: file.path, Model: file.about.Model, Size: file.about.Size,
		Archive: printable.Archive(o.archive), Images: m.Samples, BadImages: l.Stats().Bad,
		Loss: m.Loss, Top1: m.Top1, Top5: m.Top5, MAP: m.MAP,
		Confusions: []namedConfusions{}}
	for label, row := range m.Confusion {
		c := evaluatedClass{Class: file.about.Classes[label], Right: row[label]}
		for _, count := range row {
			c.Images += count
		}
		e.Classes = append(e.Classes, c)
	}
	for label, precision := range m.AveragePrecision {
		c := evaluatedClass{Class: file.about.Classes[label], Images: int64(l.ClassCounts()[label])}
		if !math.IsNaN(precision) {
			c.AveragePrecision = &precision
		}
		e.Classes = append(e.Classes, c)
	}
	for _, c := range m.Confusions() {
		e.Confusions = append(e.Confusions,
			namedConfusions{file.about.Classes[c.Label], file.about.Classes[c.Predicted], c.Count, c.Share})
	}
	return e
}

// print prints the result as text.
func (o *evaluateOptions) print(w io.Writer, file *trained, m *train.Metrics) error {
	fmt.Fprintf(w, "%s: %s, %s, images of %d x %d\n", printable.Name(file.path), file.about.Model,
		printable.Counted(len(file.about.Classes), "class", "classes"), file.about.Size, file.about.Size)
	if m.AveragePrecision != nil {
		return o.printPrecision(w, file.about.Classes, m)
	}
	text := fmt.Sprintf("%s: %s, loss %.4f, top-1 %.1f %%", printable.ArchiveName(o.archive),
		printable.Counted(m.Samples, "image", "images"), m.Loss, 100*m.Top1)
	if m.Classes > 5 {
		text += fmt.Sprintf(", top-5 %.1f %%", 100*m.Top5)
	}
	fmt.Fprintln(w, text)
	return printConfusions(w, m, file.about.Classes, o.confusions, "-confusions N prints more, -o DIR writes all")
}

// printPrecision prints the result of a checkpoint with several labels for an image: the classes of
// the lowest average precision, at most -confusions of them.
func (o *evaluateOptions) printPrecision(w io.Writer, classes []string, m *train.Metrics) error {
	fmt.Fprintf(w, "%s: %s, loss %.4f, mean average precision %.4f\n", printable.ArchiveName(o.archive),
		printable.Counted(m.Samples, "image", "images"), m.Loss, m.MAP)
	var order []int
	for label, precision := range m.AveragePrecision {
		if !math.IsNaN(precision) {
			order = append(order, label)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Compare(m.AveragePrecision[a], m.AveragePrecision[b])
	})
	if len(order) == 0 || o.confusions == 0 {
		return nil
	}
	table := printable.NewTable(w, 0)
	fmt.Fprintln(table, "\nclass\taverage precision\t")
	for _, label := range order[:min(o.confusions, len(order))] {
		fmt.Fprintf(table, "%s\t%17.4f\t\n", printable.Name(classes[label]), m.AveragePrecision[label])
	}
	return table.Flush()
}

// printConfusions prints the most frequent confusions of an evaluation, at most the given number.
// If there are more, it then prints the text all, which says how to list all of them.
func printConfusions(w io.Writer, m *train.Metrics, classes []string, most int, all string) error {
	confusions := m.Confusions()
	if len(confusions) == 0 || most == 0 {
		return nil
	}
	fmt.Fprintln(w)
	name := func(label int) string {
		if label < len(classes) {
			return printable.Name(classes[label])
		}
		return fmt.Sprint(label) // the model has more outputs than there are class names
	}
	table := printable.NewTable(w, 0)
	fmt.Fprintln(table, "true class\ttaken for\timages\tshare of class\t")
	for _, c := range confusions[:min(most, len(confusions))] {
		fmt.Fprintf(table, "%s\t%s\t%6d\t%12.1f %%\t\n", name(c.Label), name(c.Predicted), c.Count, 100*c.Share)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if left := len(confusions) - most; left > 0 {
		_, err := fmt.Fprintf(w, "and %s: %s\n", printable.Counted(left, "more pair", "more pairs"), all)
		return err
	}
	return nil
}

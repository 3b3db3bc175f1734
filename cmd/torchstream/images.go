//go:build linux && cgo

package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// checkImages checks the options about images and labels. It sets -test to -archive if
// -test-list or -val chooses held-back images of -archive.
func (o *trainOptions) checkImages() error {
	if err := o.images.Check(); err != nil {
		return err
	}
	if o.smoothing < 0 || o.smoothing >= 1 {
		return cli.Usagef("-label-smoothing %v: must be from 0 to below 1", o.smoothing)
	}
	if o.smoothing > 0 && o.images.MultiLabel {
		return cli.UsageError{Message: "-label-smoothing and -multi-label exclude each other: it spreads a label over " +
			"all classes"}
	}
	if err := o.checkTest(); err != nil {
		return err
	}
	if o.test == "" && (o.testList != "" || o.images.Part.HeldOut > 0) {
		o.test = o.archive
	}
	return nil
}

// checkTest refuses options about held-back images that contradict each other.
func (o *trainOptions) checkTest() error {
	switch {
	case o.testList != "" && o.images.WebDataset:
		return cli.UsageError{Message: "-test-list and -webdataset exclude each other: both give the labels of -test"}
	case o.testList != "" && o.testList == o.images.List:
		return cli.Usagef("-test-list %s is -list: the held-back images need a list of their own",
			printable.Name(o.testList))
	case o.testList != "" && o.test == "" && o.images.List == "":
		return cli.UsageError{Message: "-test-list needs -test FILE or -list FILE: without a list all " +
			"images of -archive are trained on, also those of -test-list"}
	case o.images.Part.HeldOut > 0 && (o.test != "" || o.testList != ""):
		return cli.UsageError{Message: "-val takes held-back images from -archive, and -test or " +
			"-test-list name others: leave one of them out"}
	case o.testList == "" && o.test != "" && o.images.List != "":
		return cli.UsageError{Message: "-list has the labels of -archive alone: -test-list FILE gives those of -test"}
	}
	return nil
}

// testLabels returns the options about images for -test.
func (o *trainOptions) testLabels() cli.Images {
	labels := o.images
	switch {
	case o.testFolder != "":
		labels.Part = imageloader.Part{Folder: o.testFolder}
	case labels.Part.HeldOut > 0:
		labels.Part.Test = true
	default:
		labels.List, labels.Part = o.testList, imageloader.Part{}
		labels.ListFormat.GroupColumn = ""
	}
	return labels
}

// splits are the folders of an archive that hold the splits of a dataset, such as "photos/train".
type splits struct {
	train string
	held  []string // folders of held-back images: validation folders first, then final test folders
	other string   // another folder in the same place, or ""
}

// findSplits looks for the splits of a dataset among the parents of the class directories. The
// splits may have a common parent. A folder is a split only if it contains class directories.
func findSplits(classes []imageloader.ClassReport) (s splits) {
	var dirs []string
	for _, c := range classes {
		dirs = append(dirs, c.Directories...)
	}
	prefix := ""
	for {
		top := map[string]bool{} // folders directly below prefix: do they have subfolders?
		for _, dir := range dirs {
			name, below, deeper := strings.Cut(strings.TrimPrefix(dir, prefix), "/")
			top[name] = top[name] || deeper && below != ""
		}
		names := slices.Sorted(maps.Keys(top))
		if len(names) == 1 && top[names[0]] && !slices.Contains(trainNames(), strings.ToLower(names[0])) {
			prefix += names[0] + "/"
			continue
		}
		for _, held := range heldNames() {
			for _, name := range names {
				if top[name] && strings.ToLower(name) == held {
					s.held = append(s.held, prefix+name)
				}
			}
		}
		for _, name := range names {
			switch lower := strings.ToLower(name); {
			case top[name] && slices.Contains(trainNames(), lower):
				s.train = prefix + name
			case !top[name] || !slices.Contains(heldNames(), lower):
				s.other = prefix + name
			}
		}
		return s
	}
}

// trainNames and heldNames are the usual names of a dataset's splits.
func trainNames() []string { return []string{"train", "training"} }
func heldNames() []string {
	return []string{"val", "valid", "validation", "dev", "test", "testing"}
}

// findFolders chooses the folder to train on and the folder to evaluate if the archive has the
// splits of a dataset, such as train and test. It refuses an archive whose folders leave the choice
// unclear.
func (o *trainOptions) findFolders(ctx context.Context, stdout, stderr io.Writer) error {
	if !o.images.ByDirectory() {
		return nil
	}
	found, err := countClasses(ctx, o.archive, &cli.Images{Columns: o.images.Columns}, stderr)
	if err != nil {
		return err
	}
	s := findSplits(found.classes)
	if s.train == "" || len(s.held) == 0 {
		return nil
	}
	archive := printable.ArchiveName(o.archive)
	if s.other != "" {
		return fmt.Errorf("%s has the folders %s, %s and %s: a training would mix the parts of a set: "+
			"move the folders of classes into one of the first two, or make an archive of each part",
			archive, printable.Name(s.train), printable.Name(s.held[0]), printable.Name(s.other))
	}
	o.images.Part.Folder = s.train
	if found, err = countClasses(ctx, o.archive, &o.images, stderr); err != nil {
		return err
	}
	for _, c := range found.classes {
		if c.Samples == 0 {
			return fmt.Errorf("%s has no image of the class %s in %s, where the training takes its "+
				"images: add some, or remove the class from %s",
				archive, printable.Name(c.Name), printable.Name(s.train), strings.Join(printable.Names(s.held), ", "))
		}
	}
	says := fmt.Sprintf("%s has the parts of a set: training on %s", archive, printable.Name(s.train))
	if o.test == "" {
		o.test, o.testFolder = o.archive, s.held[0]
		says += ", evaluating on " + printable.Name(o.testFolder)
		s.held = s.held[1:]
	}
	if len(s.held) > 0 {
		says += "; not used: " + strings.Join(printable.Names(s.held), ", ")
	}
	_, err = fmt.Fprintln(stdout, says)
	return err
}

// countImages chooses the images to train on, prints their classes and returns their number.
func (o *trainOptions) countImages(ctx context.Context, stdout, stderr io.Writer) (int, error) {
	if err := o.findFolders(ctx, stdout, stderr); err != nil {
		return 0, err
	}
	return printClasses(ctx, o.archive, &o.images, stdout, stderr)
}

// printTurned prints how many images are not stored upright, or how to find out.
func (c *census) printTurned(path string, images int, upright bool, stdout io.Writer) {
	switch {
	case !c.headers && !upright:
		fmt.Fprintf(stdout, "do photographs lie on their side? `torchstream inspect %s` counts them by "+
			"their EXIF orientation, and -upright turns them\n", printable.ArchiveName(path))
	case c.turned > 0 && upright:
		fmt.Fprintf(stdout, "%d of %s lie on their side by their EXIF orientation, and are turned upright\n", c.turned,
			printable.Counted(images, "image", "images"))
	case c.turned > 0:
		fmt.Fprintf(stdout, "%d of %s lie on their side by their EXIF orientation: -upright turns them\n",
			c.turned, printable.Counted(images, "image", "images"))
	}
}

// printList prints how a list was read, and which rows and images have no counterpart. It prints
// nothing without a list.
func printList(w io.Writer, archive string, r *imageloader.ListReport) {
	if r == nil {
		return
	}
	archive, list := printable.ArchiveName(archive), printable.Name(r.File)
	fmt.Fprintf(w, "%s: %s\n", list, printable.Text(r.Columns))
	if r.WithoutImage > 0 {
		fmt.Fprintf(w, "%s: %d of %s without an image in %s, and left out; the first is in line %d: %s\n", list,
			r.WithoutImage, printable.Counted(r.Rows, "row", "rows"), archive, r.FirstWithoutLine,
			printable.Name(r.FirstWithout))
	}
	if r.Duplicates > 0 {
		fmt.Fprintf(w, "%s: %s\n", list, printable.Counted(r.Duplicates, "row repeats another", "rows repeat others"))
	}
	if r.Unlisted > 0 {
		fmt.Fprintf(w, "%s: %s without a row in %s, and left out; the first is %s\n", archive,
			printable.Counted(r.Unlisted, "image", "images"), list, printable.Name(r.FirstUnlisted))
	}
}

// oneClass returns the error for an archive with a single class.
func (o *trainOptions) oneClass(class string) error {
	archive := printable.ArchiveName(o.archive)
	if o.images.ByDirectory() {
		return fmt.Errorf("%s has %s (%s)", archive, oneClass, printable.Name(class))
	}
	return fmt.Errorf("%s has one class: nothing to tell apart: all labels are %s", archive, printable.Name(class))
}

// smoothedLoss is the cross-entropy with -label-smoothing. In an evaluation, where gradients are
// not recorded, it is the plain cross-entropy. The evaluations during training thus give the same
// loss as torchstream evaluate.
func (o *trainOptions) smoothedLoss(output *torch.Tensor, batch *prefetcher.Batch) *torch.Tensor {
	if !output.RequiresGrad() {
		return output.CrossEntropy(batch.Labels)
	}
	return output.CrossEntropyWith(batch.Labels, torch.CrossEntropyOptions{LabelSmoothing: o.smoothing})
}

// given reports whether the command line sets an option.
func given(set *flag.FlagSet, name string) bool {
	found := false
	set.Visit(func(f *flag.Flag) { found = found || f.Name == name })
	return found
}

// matchUpright refuses a value of -upright that differs from the one with which the checkpoint was
// trained.
func (t *trained) matchUpright(set *flag.FlagSet, upright bool) error {
	switch {
	case !given(set, "upright") || upright == t.about.Upright:
		return nil
	case t.about.Upright:
		return fmt.Errorf("%s was trained on images turned upright (-upright), and -upright=false leaves "+
			"them as stored: leave the option out", printable.Name(t.path))
	}
	return fmt.Errorf("%s was trained on images as stored, without -upright: leave the option out, or "+
		"train with -upright", printable.Name(t.path))
}

// matchMultiLabel refuses -multi-label for a checkpoint of one label for each image.
func (t *trained) matchMultiLabel(multi bool) error {
	if multi && !t.about.MultiLabel {
		return fmt.Errorf("%s was trained with one label for each image: leave -multi-label out, or train with "+
			"-multi-label", printable.Name(t.path))
	}
	return nil
}

//go:build cgo

package main

import (
	"flag"
	"fmt"

	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// checkImages checks the options about images and labels. It sets -test to -archive if only
// -test-list names the held-back images.
func (o *trainOptions) checkImages() error {
	if err := o.images.Check(); err != nil {
		return err
	}
	switch {
	case o.smoothing < 0 || o.smoothing >= 1:
		return cli.Usagef("-label-smoothing %v: must be from 0 to below 1", o.smoothing)
	case o.testList != "" && o.images.WebDataset:
		return cli.UsageError{Message: "-test-list and -webdataset exclude each other: both give the labels of -test"}
	case o.testList != "" && o.testList == o.images.List:
		return cli.Usagef("-test-list %s is -list: the held-back images need a list of their own", printable.Name(o.testList))
	case o.testList != "" && o.test == "" && o.images.List == "":
		return cli.UsageError{Message: "-test-list needs -test FILE or -list FILE: without a list all images of -archive are trained on, also those of -test-list"}
	case o.testList == "" && o.test != "" && o.images.List != "":
		return cli.UsageError{Message: "-list has the labels of -archive alone: -test-list FILE gives those of -test"}
	}
	if o.testList != "" && o.test == "" {
		o.test = o.archive
	}
	return nil
}

// testLabels returns the options about images for -test.
func (o *trainOptions) testLabels() cli.Images {
	labels := o.images
	labels.List = o.testList
	return labels
}

// oneClass returns the error for an archive with a single class.
func (o *trainOptions) oneClass(class string) error {
	archive := printable.ArchiveName(o.archive)
	if o.images.ByDirectory() {
		return fmt.Errorf("%s has %s (%s)", archive, oneClass, printable.Name(class))
	}
	return fmt.Errorf("%s has one class: nothing to tell apart: all labels are %s", archive, printable.Name(class))
}

// smoothedLoss is the loss with -label-smoothing. The evaluation, which records no gradients, has
// the plain cross-entropy, so that torchstream evaluate prints the same loss.
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

// matchUpright refuses a -upright that differs from the training of the checkpoint.
func (t *trained) matchUpright(set *flag.FlagSet, upright bool) error {
	switch {
	case !given(set, "upright") || upright == t.upright:
		return nil
	case t.upright:
		return fmt.Errorf("%s was trained on images turned upright (-upright), and -upright=false leaves them as stored: leave the option out", printable.Name(t.path))
	}
	return fmt.Errorf("%s was trained on images as stored, without -upright: leave the option out, or train with -upright", printable.Name(t.path))
}

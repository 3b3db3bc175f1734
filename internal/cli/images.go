package cli

import (
	"flag"
	"fmt"
	"strings"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// Images holds the options that are common to the commands that read images.
type Images struct {
	List          string // file of -list or -labels
	Policy        string // "": none
	WebDataset    bool
	Columns       imageloader.Columns // of -image-column and -label-column
	Upright       bool
	Balanced      bool
	MixUp, CutMix float64
	Part          imageloader.Part // set by -val and -val-seed, or by the command itself
}

// ImageOptions selects the options of [Images] that a command has.
type ImageOptions uint

const (
	LabelOptions      ImageOptions = 1 << iota // -list, -labels and -webdataset
	UprightOption                              // -upright
	CheckpointUpright                          // -upright of a command that reads a checkpoint
	AugmentOptions                             // -policy, -balanced, -mixup and -cutmix
	SplitOptions                               // -val and -val-seed
)

// Register adds the selected options to a command.
func (i *Images) Register(set *flag.FlagSet, which ImageOptions) {
	for _, f := range i.flags() {
		if which&f.of != 0 {
			f.add(set, f.name, f.help)
		}
	}
}

// imageFlag is one option.
type imageFlag struct {
	of         ImageOptions
	name, help string
	add        func(set *flag.FlagSet, name, help string)
}

// flags returns all options. Only flags knows the options' names and texts.
func (i *Images) flags() []imageFlag {
	toggle := func(to *bool) func(*flag.FlagSet, string, string) {
		return func(set *flag.FlagSet, name, help string) { set.BoolVar(to, name, false, help) }
	}
	number := func(to *float64) func(*flag.FlagSet, string, string) {
		return func(set *flag.FlagSet, name, help string) { set.Float64Var(to, name, 0, help) }
	}
	list := func(set *flag.FlagSet, name, help string) { set.Func(name, help, i.setList) }
	policy := func(set *flag.FlagSet, name, help string) { set.StringVar(&i.Policy, name, "none", help) }
	return []imageFlag{
		{LabelOptions, "list", "CSV or TSV `FILE` with the path and the label of each image. A header " +
			"may name the columns (path, label), or the first two count. Images that it does not name " +
			"are left out", list},
		{LabelOptions, "labels", "the same `FILE` as -list", list},
		{LabelOptions, "webdataset",
			"take labels from WebDataset's .cls and .json members, not from directories", toggle(&i.WebDataset)},
		{LabelOptions, "image-column", "`COLUMN` of a Parquet file with the images (default: its only column of bytes)",
			func(set *flag.FlagSet, name, help string) { set.StringVar(&i.Columns.Image, name, "", help) }},
		{LabelOptions, "label-column", "`COLUMN` of a Parquet file with the labels (default: the only one that is " +
			"described as ClassLabel, or the one called label)", i.labelColumn},
		{UprightOption, "upright", "turn images upright, as the orientation in their EXIF data says",
			toggle(&i.Upright)},
		{CheckpointUpright, "upright", "turn images upright, as the orientation in their EXIF data says; " +
			"the default is what the checkpoint was trained with, and another value is an error", toggle(&i.Upright)},
		{AugmentOptions, "policy", "augmentation after the crop and the flip: " + policies, policy},
		{AugmentOptions, "balanced",
			"draw each class equally often, with replacement; an epoch keeps its number of images",
			toggle(&i.Balanced)},
		{AugmentOptions, "mixup", "blend each image and its label with another of the batch; `ALPHA` of " +
			"the Beta distribution of the weights, such as 0.2 (default: off)", number(&i.MixUp)},
		{AugmentOptions, "cutmix", "replace a box of each image by another image's, and mix the labels; " +
			"`ALPHA` as for -mixup, such as 1. With both options each batch gets one of the two " +
			"(default: off)", number(&i.CutMix)},
		{SplitOptions, "val", "`SHARE` of each class's images to hold out from training, such as 0.1, " +
			"chosen by a hash of their names: images that are added later move no others (default: none)",
			number(&i.Part.HeldOut)},
		{SplitOptions, "val-seed", "another `NUMBER` holds out other images",
			func(set *flag.FlagSet, name, help string) { set.Uint64Var(&i.Part.Seed, name, 0, help) }},
	}
}

// labelColumn adds -label-column.
func (i *Images) labelColumn(set *flag.FlagSet, name, help string) {
	set.Func(name, help, func(column string) error {
		i.Columns.Labels = []string{column}
		return nil
	})
}

// setList sets the value of -list or -labels.
func (i *Images) setList(file string) error {
	switch {
	case file == "":
		return fmt.Errorf("want the name of a file")
	case i.List != "" && i.List != file:
		return fmt.Errorf("the list is %s already: name one file", i.List)
	}
	i.List = file
	return nil
}

// Check refuses options that contradict each other or have impossible values.
func (i *Images) Check() error {
	if i.List != "" && i.WebDataset {
		return UsageError{Message: "-list and -webdataset exclude each other: both give the labels"}
	}
	if i.Part.HeldOut < 0 || i.Part.HeldOut >= 1 {
		return Usagef("-val %v: must be from 0 to below 1", i.Part.HeldOut)
	}
	if i.Part.Seed != 0 && i.Part.HeldOut == 0 {
		return UsageError{Message: "-val-seed needs -val SHARE"}
	}
	for _, mix := range []struct {
		name  string
		alpha float64
	}{{"mixup", i.MixUp}, {"cutmix", i.CutMix}} {
		if mix.alpha != 0 && (mix.alpha < 1e-3 || mix.alpha > 1e3) {
			return Usagef("-%s %v: must be 0 (off), or from 0.001 to 1000", mix.name, mix.alpha)
		}
	}
	_, err := ParsePolicy(i.policy())
	return err
}

// policy returns the value of -policy, or its default.
func (i *Images) policy() string {
	if i.Policy == "" {
		return "none"
	}
	return i.Policy
}

// ByDirectory reports whether directories are the classes.
func (i *Images) ByDirectory() bool { return i.List == "" && !i.WebDataset }

// SetLabels sets the options of a loader that say which images are samples, and where labels come
// from.
func (i *Images) SetLabels(o *imageloader.Options) {
	o.List, o.WebDataset, o.Columns, o.Part = i.List, i.WebDataset, i.Columns, i.Part
}

// Set sets all options of a loader. The caller has set the transform's crop and flip.
func (i *Images) Set(o *imageloader.Options) error {
	ops, err := ParsePolicy(i.policy())
	if err != nil {
		return err
	}
	i.SetLabels(o)
	o.Balanced = i.Balanced
	o.Transform.ApplyEXIFOrientation = i.Upright
	o.Transform.Ops = ops
	if i.MixUp > 0 {
		o.Transform.Mix = append(o.Transform.Mix, transform.MixUp{Alpha: i.MixUp})
	}
	if i.CutMix > 0 {
		o.Transform.Mix = append(o.Transform.Mix, transform.CutMix{Alpha: i.CutMix})
	}
	return nil
}

// Settings returns the options that change the results of a training, by name. Options with their
// default values have no entry.
func (i *Images) Settings() map[string]string {
	settings := map[string]string{}
	for _, s := range []struct {
		name string
		set  bool
		text string
	}{
		{"labels", i.List != "", "list"}, {"labels", i.WebDataset, "webdataset"},
		{"image-column", i.Columns.Image != "", i.Columns.Image},
		{"label-column", len(i.Columns.Labels) > 0, strings.Join(i.Columns.Labels, ",")},
		{UprightSetting, i.Upright, "true"}, {"policy", i.policy() != "none", i.policy()},
		{"balanced", i.Balanced, "true"}, {"mixup", i.MixUp != 0, fmt.Sprint(i.MixUp)},
		{"cutmix", i.CutMix != 0, fmt.Sprint(i.CutMix)},
		{"val", i.Part.HeldOut > 0, fmt.Sprint(i.Part.HeldOut)},
		{"val-seed", i.Part.Seed > 0, fmt.Sprint(i.Part.Seed)}, {"folder", i.Part.Folder != "", i.Part.Folder},
	} {
		if s.set {
			settings[s.name] = s.text
		}
	}
	return settings
}

// UprightSetting is a key of a checkpoint's metadata. Its value is "true" if the network was
// trained on images turned upright.
const UprightSetting = "upright"

package cli

import (
	"flag"
	"fmt"
	"strings"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// Images holds the options that several commands share because they read images.
type Images struct {
	List          string                 // file of -list or -labels
	ListFormat    imageloader.ListFormat // format of the list; Columns has the columns of images and labels
	MultiLabel    bool
	Policy        string // "": none
	WebDataset    bool
	Columns       imageloader.Columns // set by -image-column and -label-column, also for a list
	Upright       bool
	Balanced      bool
	MixUp, CutMix float64
	Part          imageloader.Part // set by -val and -val-seed, or by the command itself
}

// ImageOptions selects the options of [Images] that a command has.
type ImageOptions uint

const (
	LabelOptions      ImageOptions = 1 << iota // -list, -labels and their columns, and -webdataset
	MultiLabelOptions                          // -multi-label and -label-separator
	UprightOption                              // -upright
	CheckpointUpright                          // -upright of a command that reads a checkpoint
	AugmentOptions                             // -policy, -balanced, -mixup and -cutmix
	SplitOptions                               // -val, -val-seed and -group-column
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
	text := func(to *string) func(*flag.FlagSet, string, string) {
		return func(set *flag.FlagSet, name, help string) { set.StringVar(to, name, "", help) }
	}
	list := func(set *flag.FlagSet, name, help string) { set.Func(name, help, i.setList) }
	policy := func(set *flag.FlagSet, name, help string) { set.StringVar(&i.Policy, name, "none", help) }
	return []imageFlag{
		{LabelOptions, "list", "CSV or TSV `FILE` with the name and the label of each image, or a member of the " +
			"archive with this name. If the first line names the columns, those with usual names count (path, image, " +
			"id, ...; label, class, target, ...), otherwise the first two. A name may lack its folder or its " +
			"extension. Images that it does not name are left out", list},
		{LabelOptions, "labels", "another name of -list `FILE`", list},
		{LabelOptions, "list-folder", "`FOLDER` of the archive that the names in -list start from, such as train, or . for " +
			"the whole archive (default: any)", text(&i.ListFormat.Folder)},
		{MultiLabelOptions, "multi-label", "an image has any number of labels: in several columns of -list, in one with words " +
			"(cat dog, cat|dog), or in WebDataset's members", toggle(&i.MultiLabel)},
		{MultiLabelOptions, "label-separator", "with -multi-label: `TEXT` between the labels in a column (default: the first of " +
			"| ; , and white space that the column has)", text(&i.ListFormat.Separator)},
		{LabelOptions, "webdataset",
			"take labels from WebDataset's .cls and .json members, not from directories", toggle(&i.WebDataset)},
		{LabelOptions, "image-column", "`COLUMN` of -list with the names of the images, or of a Parquet file with the images " +
			"(default: a usual name; the only column of bytes). In a list: its name in the first line, or its position from 1",
			text(&i.Columns.Image)},
		{LabelOptions, "label-column", "`COLUMN` of -list or of a Parquet file with the labels (default: a usual name; the only " +
			"one that is described as ClassLabel). In a list, given several times, or '*' for all other columns: columns of 0 " +
			"and 1, each for the class that it is named after", i.labelColumn},
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
		{SplitOptions, "val", "about this `SHARE` of each class's images is held out from training, such as 0.1, " +
			"chosen by a hash of their names: images that are added later move no others. The share of a small class " +
			"differs; of two images and more, at least one is on each side (default: none)",
			number(&i.Part.HeldOut)},
		{SplitOptions, "val-seed", "with -val: `NUMBER` that selects the held-out images; another one holds out others (default 0)",
			func(set *flag.FlagSet, name, help string) { set.Uint64Var(&i.Part.Seed, name, 0, help) }},
		{SplitOptions, "group-column", "with -val: `COLUMN` of -list with the group of each image, such as a patient. No " +
			"group is both in the training and held out, and each class has about its share", text(&i.ListFormat.GroupColumn)},
	}
}

// labelColumn adds -label-column.
func (i *Images) labelColumn(set *flag.FlagSet, name, help string) {
	set.Func(name, help, func(column string) error {
		if column == "" {
			return fmt.Errorf("want the name of a column")
		}
		i.Columns.Labels = append(i.Columns.Labels, column)
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

// checkLabels refuses options about labels that contradict each other.
func (i *Images) checkLabels() error {
	switch {
	case i.List != "" && i.WebDataset:
		return UsageError{Message: "-list and -webdataset exclude each other: both give the labels"}
	case i.List == "" && !i.ListFormat.IsZero():
		return UsageError{Message: "-group-column, -list-folder and -label-separator need -list FILE: they say how it is " +
			"read"}
	case i.ListFormat.GroupColumn != "" && i.Part.HeldOut == 0:
		return UsageError{Message: "-group-column needs -val SHARE: it says which images are held out together"}
	case i.ListFormat.Separator != "" && !i.MultiLabel:
		return UsageError{Message: "-label-separator needs -multi-label"}
	case i.MultiLabel && i.Balanced:
		return UsageError{Message: "-multi-label and -balanced exclude each other: an image of several classes has no one " +
			"share"}
	}
	return nil
}

// Check refuses options that contradict each other or have impossible values.
func (i *Images) Check() error {
	if err := i.checkLabels(); err != nil {
		return err
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
func (i *Images) ByDirectory() bool { return i.List == "" && !i.WebDataset && !i.MultiLabel }

// SetLabels sets the options of a loader that say which images are samples, and where labels come
// from.
func (i *Images) SetLabels(o *imageloader.Options) {
	o.List, o.WebDataset, o.Part, o.MultiLabel = i.List, i.WebDataset, i.Part, i.MultiLabel
	if i.List == "" {
		o.Columns = i.Columns
		return
	}
	o.ListFormat = i.ListFormat
	o.ListFormat.NameColumn, o.ListFormat.LabelColumns = i.Columns.Image, i.Columns.Labels
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

// Settings returns the options that change the results of training, by name. Options with their
// default values have no entry.
func (i *Images) Settings() map[string]string {
	settings := map[string]string{}
	for _, s := range []struct {
		name string
		set  bool
		text string
	}{
		{"labels", i.List != "", "list"}, {"labels", i.WebDataset, "webdataset"},
		{"multi-label", i.MultiLabel, "true"}, {"label-separator", i.ListFormat.Separator != "", i.ListFormat.Separator},
		{"image-column", i.Columns.Image != "", i.Columns.Image},
		{"label-column", len(i.Columns.Labels) > 0, strings.Join(i.Columns.Labels, ",")},
		{"group-column", i.ListFormat.GroupColumn != "", i.ListFormat.GroupColumn},
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

//go:build linux && cgo

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
)

// indexResult is the output of `index`.
type indexResult struct {
	File        string `json:"file"`
	Index       string `json:"index"`
	IndexBytes  int64  `json:"index_bytes"`
	Samples     int    `json:"samples"`
	Classes     int    `json:"classes"`
	Checkpoints int    `json:"checkpoints"`
	Random      bool   `json:"random_access"`
	// Work is the cost of reading samples in random order: the average number of bytes to read or
	// inflate for each byte of a sample.
	Work    float64 `json:"work"`
	Seconds float64 `json:"seconds"`
}

// masksHelp is the help text of a flag.
const masksHelp = "the archive has images and masks, whose names match `IMAGE,MASK`, for example " +
	"'images/*.jpg,masks/*.png': the index is for loaders with\n" +
	"Options.Masks, which use no other"

// boxesHelp is the help text of a flag.
const boxesHelp = "the archive has images and files of bounding boxes, whose names match `IMAGE,FILE`, for example " +
	"'images/*.jpg,labels/*.txt',\nor one COCO file has the boxes, or a column of Parquet files, such as objects"

// cutPatterns splits the value of a flag into two name patterns, for images and for their partner
// files.
func cutPatterns(flag, value, example string, image, partner *string) error {
	if value == "" {
		return nil
	}
	var found bool
	if *image, *partner, found = strings.Cut(value, ","); !found {
		return cli.Usagef("-%s %s: two patterns with a comma between them are wanted, %q", flag, value, example)
	}
	return nil
}

// setBoxes applies -boxes.
func setBoxes(o *imageloader.Options, boxes string) error {
	if !strings.ContainsAny(boxes, ",*") { // a file or a column for all images
		o.Boxes.File = boxes
		return nil
	}
	return cutPatterns("boxes", boxes, "images/*.jpg,labels/*.txt", &o.Boxes.Image, &o.Boxes.File)
}

// index writes an archive's sidecar index.
func index(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream index FILE", "Reads an archive of images through and writes its index "+
		"(FILE.tsidx), with which loaders open it at once and read its samples in any order, also of\n"+
		"a .tgz. The first epoch over an archive does the same by itself. FILE may be "+cli.ArchiveKinds+
		", but a folder or a .zip needs no index.", stderr)
	asJSON := set.Bool("json", false, "print one JSON object")
	out := set.String("o", "",
		"`FILE` to write the index to (default: beside the archive, or in the cache folder if that can't be written)")
	var labels cli.Images
	labels.Register(set, cli.LabelOptions|cli.MultiLabelOptions)
	masks := set.String("masks", "", masksHelp)
	boxes := set.String("boxes", "", boxesHelp+": the index is for\nloaders with Options.Boxes")
	if err := cli.Parse(set, args, 1); err != nil {
		return err
	}
	if err := labels.Check(); err != nil {
		return err
	}
	o := imageloader.Options{IndexFile: *out}
	labels.SetLabels(&o)
	if err := cmp.Or(cutPatterns("masks", *masks, "images/*.jpg,masks/*.png", &o.Masks.Image, &o.Masks.Mask),
		setBoxes(&o, *boxes)); err != nil {
		return err
	}
	progress, done := cli.ReadingProgress(stderr)
	began := time.Now()
	r, err := imageloader.MakeIndex(ctx, set.Arg(0), o, progress)
	done()
	if err != nil {
		return err
	}
	result := indexResult{printable.Archive(set.Arg(0)), r.File, r.Bytes, r.Samples, r.Classes,
		r.Checkpoints, r.Random, r.Work, time.Since(began).Seconds()}
	if *asJSON {
		return cli.WriteJSON(stdout, result)
	}
	printList(stdout, set.Arg(0), r.List)
	_, err = fmt.Fprintf(stdout, "%s: %s, %s of %s, in %.1f s\n%s\n", r.File, byteSize(r.Bytes),
		printable.Counted(r.Samples, "sample", "samples"),
		printable.Counted(r.Classes, "class", "classes"), result.Seconds, result.access())
	return err
}

func (r indexResult) access() string {
	switch {
	case !r.Random && r.Work > 0:
		return fmt.Sprintf("the archive is read in its own order: reading one sample alone would inflate "+
			"%.0f times its size. Loaders that can hold it in memory (Options.ShuffleBytes) have any "+
			"order all the same", r.Work)
	case !r.Random:
		return "the archive is read in its own order: a stream of this kind can't be entered in the middle"
	case r.Checkpoints > 0:
		return fmt.Sprintf("samples can be read in any order, each from one of %s, inflating %.2f times "+
			"its size", printable.Counted(r.Checkpoints, "checkpoint", "checkpoints"), r.Work)
	}
	return "samples can be read in any order"
}

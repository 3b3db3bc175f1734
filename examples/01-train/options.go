package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/internal/safefile"
)

// trainOptions is the command line of train.
type trainOptions struct {
	Archive    string  `json:"archive"`
	Test       string  `json:"test"`
	Device     string  `json:"device"`
	Epochs     int     `json:"epochs"`
	Batch      int     `json:"batch"`
	Size       int     `json:"size"`
	Width      int     `json:"width"`
	LR         float64 `json:"lr"`
	Workers    int     `json:"workers"`
	MemoryMB   int64   `json:"memory_mb"`
	Seed       uint64  `json:"seed"`
	Checkpoint string  `json:"checkpoint"`
	jsonFile   string
}

func trainCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o trainOptions
	set := flags("train [options]", "Trains a small network on labelled photographs, tests it on others "+
		"after every epoch, and writes a checkpoint.", stderr)
	set.StringVar(&o.Archive, "archive", "",
		"`FILE` of labelled images, .tgz or .tar, directory = class (default "+lesson.TrainArchive+")")
	set.StringVar(&o.Test, "test", "",
		"`FILE` of held-back images of the same classes (default "+lesson.TestArchive+
			" if -archive is not given, else none)")
	set.StringVar(&o.Device, "device", "", "cpu, cuda or cuda:N (default: a GPU if there is one)")
	set.IntVar(&o.Epochs, "epochs", 20, "passes over the archive")
	set.IntVar(&o.Batch, "batch", 32, "images per step")
	set.IntVar(&o.Size, "size", 96, "pixels of an image's side in the network")
	set.IntVar(&o.Width, "width", 16, "channels of the network's first layer; the others follow")
	set.Float64Var(&o.LR, "lr", 0.02, "learning rate at the start; it falls to 0 along a cosine")
	set.IntVar(&o.Workers, "workers", 0, "goroutines that decode (default: the number of CPUs)")
	set.Int64Var(&o.MemoryMB, "memory", 256, "`MB` of compressed images: a smaller archive is read once, "+
		"a larger one is shuffled through a buffer of this size")
	set.Uint64Var(&o.Seed, "seed", 1, "seed of the weights, the order and the crops")
	set.StringVar(&o.Checkpoint, "checkpoint", "01-train.safetensors", "`FILE` to write the network to")
	set.StringVar(&o.jsonFile, "json", "", "`FILE` to write all figures to, as one JSON object")
	if err := parse(set, args); err != nil {
		return err
	}
	switch {
	case set.NArg() > 0:
		return usageError{fmt.Sprintf("train takes options only, not %q", set.Args())}
	case o.Epochs < 1 || o.Batch < 1 || o.Size < 16 || o.Width < 1 || o.MemoryMB < 1:
		return usageError{"-epochs, -batch, -width and -memory are at least 1, -size at least 16"}
	}
	if o.Archive == "" {
		o.Archive = lesson.TrainArchive
		if o.Test == "" {
			o.Test = lesson.TestArchive
		}
	}
	// Check the output files now. After the training it would be too late.
	if o.Checkpoint != "" {
		if err := safefile.Check(o.Checkpoint, safefile.Safetensors); err != nil {
			return err
		}
	}
	if o.jsonFile != "" {
		if err := safefile.CheckWrite(o.jsonFile, figures); err != nil {
			return err
		}
	}
	result, err := train(ctx, o, stdout, stderr)
	if err != nil || o.jsonFile == "" {
		return err
	}
	text, err := json.MarshalIndent(result, "", "  ")
	if err != nil {
		return err
	}
	file, err := safefile.Create(o.jsonFile, figures)
	if err != nil {
		return err
	}
	_, err = file.Write(append(text, '\n'))
	return errors.Join(err, file.Close())
}

// figures recognises the files that -json writes.
var figures = safefile.Prefix("a file that -json wrote", "{\n  \"options\": {")

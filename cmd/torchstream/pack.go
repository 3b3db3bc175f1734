//go:build cgo

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/pack"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
)

const packHelp = `Writes the samples of an archive, in a random order, into shards of one size with their index: train-000000.tar, ...
Images keep their bytes, unless -side resizes them, and their class. The folders train, val and test of an archive become
parts. An interrupted pack continues with the same command.`

// packOptions are the options of pack.
type packOptions struct {
	archive, out string
	images       cli.Images
	badSamples   imageloader.BadSamplePolicy
	shards       pack.Options
	workers      int
	seed         uint64
	show         int
	asJSON       bool
}

// packCommand packs an archive into shards.
func packCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o packOptions
	set := cli.Flags("torchstream pack -archive FILE -o DIR", packHelp, stderr)
	set.StringVar(&o.archive, "archive", "", cli.ArchiveHelp)
	set.StringVar(&o.out, "o", "", "`DIR` of the shards: a new or empty folder, or one with an interrupted pack")
	o.images.Register(set, cli.LabelOptions|cli.UprightOption|cli.SplitOptions)
	format := set.String("format", "", "`FORM` of the shards: tar or tgz (directory = class), or webdataset (.cls = class; "+
		"the default with -webdataset, which keeps all members of a sample) (default tar)")
	set.Func("shard-size", "maximum `SIZE` of a shard, such as 256M or 1G (default 256M)", func(text string) (err error) {
		o.shards.ShardBytes, err = parseBytes(text)
		return err
	})
	set.IntVar(&o.shards.Shards, "shards", 0, "`NUMBER` of shards of train, of which val has proportionally many (default: by -shard-size)")
	set.IntVar(&o.shards.Side, "side", 0, "resize images whose shorter side has more than `PIXELS` to that, as JPEGs "+
		"(default: copy them)")
	set.IntVar(&o.shards.Quality, "quality", 90, "of resized JPEGs, 1 to 100")
	set.BoolVar(&o.shards.Check, "check", false, "decode all images, also those that are copied, to find damaged ones; "+
		"otherwise only their headers are examined")
	set.Func("bad-samples", "`POLICY` for bad images: fail ends the pack, skip leaves them out and names them (default fail)",
		func(name string) (err error) {
			if o.badSamples, err = parseBadSamples(name); err == nil && o.badSamples == imageloader.Substitute {
				err = fmt.Errorf("want fail or skip")
			}
			return err
		})
	set.BoolVar(&o.shards.DropClasses, "drop-classes", false,
		"allow that a class loses all its images as bad ones, which changes the labels of later classes")
	set.Uint64Var(&o.seed, "seed", 1, "of the order")
	set.IntVar(&o.workers, "workers", 0, "goroutines that read, decode and encode (default: the number of CPUs)")
	set.IntVar(&o.show, "show", 20, "how many bad images are named; the file "+pack.JournalFile+" in DIR has all")
	set.BoolVar(&o.asJSON, "json", false, "print one JSON object")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	o.shards.Format = pack.Format(*format)
	if err := cmp.Or(o.images.Check(), o.check()); err != nil {
		return err
	}
	err := o.run(ctx, stdout, stderr)
	if err != nil && ctx.Err() != nil {
		return cli.InterruptedError{Message: "interrupted: the same command continues"}
	}
	if err != nil && o.badSamples == imageloader.Fail {
		err = cli.SkippableError{Err: err}
	}
	return err
}

// parseBytes parses a size such as 256M.
func parseBytes(text string) (int64, error) {
	number := strings.TrimRight(text, "KMGTkmgtiB")
	unit, known := map[string]int64{"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}[strings.ToUpper(
		strings.TrimSuffix(strings.TrimSuffix(text[len(number):], "B"), "i"))]
	n, err := strconv.ParseFloat(number, 64)
	if err != nil || !known || !(n*float64(unit) >= 1 && n*float64(unit) < 1<<50) {
		return 0, fmt.Errorf("want a size such as 256M or 1G")
	}
	return int64(n * float64(unit)), nil
}

// check returns an error for a wrong command line.
func (o *packOptions) check() error {
	s := &o.shards
	switch {
	case o.archive == "" || o.out == "":
		return cli.UsageError{Message: "pack needs -archive FILE and -o DIR"}
	case s.Format != "" && s.Format != pack.Tar && s.Format != pack.TarGzip && s.Format != pack.WebDataset:
		return cli.Usagef("-format %q: want tar, tgz or webdataset", s.Format)
	case s.Shards < 0 || s.Shards > 0 && s.ShardBytes > 0:
		return cli.UsageError{Message: "-shards is at least 1, and excludes -shard-size"}
	case s.Side < 0 || s.Side > cli.MaxSize:
		return cli.Usagef("-side %d: must be from 1 to %d, the pixels of an image's shorter side", s.Side, cli.MaxSize)
	case s.Quality < 1 || s.Quality > 100:
		return cli.Usagef("-quality %d: must be from 1 to 100", s.Quality)
	case o.workers < 0 || o.show < 0:
		return cli.UsageError{Message: "-workers and -show are at least 0"}
	case o.images.Upright && s.Side == 0:
		return cli.UsageError{Message: "-upright needs -side: images that are copied keep their EXIF orientation, " +
			"and train -upright turns them"}
	}
	return nil
}

// run packs and prints the result.
func (o *packOptions) run(ctx context.Context, stdout, stderr io.Writer) error {
	in := imageloader.Options{Seed: o.seed, BadSamples: o.badSamples, Workers: o.workers}
	o.images.SetLabels(&in)
	o.shards.Upright = o.images.Upright
	o.shards.Parts, o.shards.Divide = o.parts(""), o.divide
	progress, done := cli.ReadingProgress(stderr)
	o.shards.Progress = progress
	began := time.Now()
	r, err := pack.Write(ctx, o.archive, o.out, in, o.shards)
	done()
	if err != nil {
		return err
	}
	seconds := time.Since(began).Seconds()
	if o.asJSON {
		return cli.WriteJSON(stdout, packResultOf(r, seconds))
	}
	return o.print(r, seconds, stdout)
}

// parts returns the parts into which the output divides a folder's images: train and, with -val,
// val.
func (o *packOptions) parts(folder string) []pack.Part {
	train := o.images.Part
	train.Folder = folder
	list := []pack.Part{{Name: "train", Part: train}}
	if train.HeldOut > 0 {
		val := train
		val.Test = true
		list = append(list, pack.Part{Name: "val", Part: val})
	}
	return list
}

// divide returns a part for each of the folders train, val and test.
func (o *packOptions) divide(directories []string) ([]pack.Part, error) {
	s := findSplits([]imageloader.ClassReport{{Directories: directories}})
	if s.train == "" || len(s.held) == 0 {
		return nil, nil
	}
	archive := printable.ArchiveName(o.archive)
	if s.other != "" {
		return nil, fmt.Errorf("%s has the folders %s, %s and %s, which is in no part: move it into one of the first two, or "+
			"pack each alone", archive, printable.Name(s.train), printable.Name(s.held[0]), printable.Name(s.other))
	}
	parts := o.parts(s.train)
	for _, held := range s.held {
		name := strings.ToLower(path.Base(held))
		if name == "val" && o.images.Part.HeldOut > 0 {
			return nil, fmt.Errorf("%s has a folder %s already: leave out -val", archive, printable.Name(held))
		}
		parts = append(parts, pack.Part{Name: name, Part: imageloader.Part{Folder: held}})
	}
	return parts, nil
}

// packResult is the output of `pack -json`.
type packResult struct {
	Input     string       `json:"input"`
	Format    string       `json:"format"`
	Samples   int          `json:"samples"`
	Classes   []string     `json:"classes"`
	Numbered  bool         `json:"numbered"`
	Others    int          `json:"other_members"`
	Orphans   int          `json:"orphans"`
	Outside   int          `json:"in_no_part"`
	Parts     []packedPart `json:"parts"`
	LeftOut   []badPacked  `json:"left_out"`
	Dropped   []string     `json:"dropped_classes"`
	Continued int          `json:"continued_shards"`
	Seconds   float64      `json:"seconds"`
}

type packedPart struct {
	Name    string `json:"name"`
	Shards  string `json:"shards"`
	Files   int    `json:"files"`
	Bytes   int64  `json:"bytes"`
	Input   int    `json:"input_samples"`
	Samples int    `json:"samples"`
	Resized int    `json:"resized"`
	LeftOut int    `json:"left_out"`
	Index   string `json:"index"`
}

type badPacked struct {
	Part   string `json:"part"`
	Name   string `json:"name"`
	Reason string `json:"reason"`
	Detail string `json:"detail,omitempty"`
}

func packResultOf(r *pack.Report, seconds float64) packResult {
	out := packResult{r.Input, string(r.Format), r.Samples, r.Classes, r.Numbered, r.Others, r.Orphans, r.Outside, nil,
		[]badPacked{}, append([]string{}, r.Dropped...), r.Continued, seconds}
	for _, p := range r.Parts {
		out.Parts = append(out.Parts, packedPart(p))
	}
	for _, l := range r.LeftOut {
		out.LeftOut = append(out.LeftOut, badPacked{l.Part, l.Name, string(l.Reason), l.Detail})
	}
	return out
}

// print writes how many samples were read, written and left out, and the names of bad samples.
func (o *packOptions) print(r *pack.Report, seconds float64, w io.Writer) error {
	table := printable.NewTable(w, 0)
	fmt.Fprintf(table, "%s:\t%s in %s; %s no part of a sample, %d images among them\n", printable.Name(r.Input),
		printable.Counted(r.Samples, "sample", "samples"), printable.Counted(len(r.Classes), "class", "classes"),
		printable.Counted(r.Others, "member is", "members are"), r.Orphans)
	for _, p := range r.Parts {
		fmt.Fprintf(table, "%s\t%d of %s in %s, %s, %d resized, %d left out\n", printable.Name(p.Shards), p.Samples,
			printable.Counted(p.Input, "sample", "samples"), printable.Counted(p.Files, "shard", "shards"),
			byteSize(p.Bytes), p.Resized, p.LeftOut)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if r.Continued > 0 {
		fmt.Fprintf(w, "%s there already\n", printable.Counted(r.Continued, "shard was", "shards were"))
	}
	if r.Numbered {
		fmt.Fprintln(w, "labels are the numbers of the classes, whose names are in .json members: by their names "+
			"they would have another order")
	}
	if r.Outside > 0 {
		fmt.Fprintf(w, "%s in no part\n", printable.Counted(r.Outside, "sample is", "samples are"))
	}
	for _, class := range r.Dropped {
		fmt.Fprintf(w, "class %s has no image left\n", printable.Name(class))
	}
	for i, l := range r.LeftOut {
		if i == o.show {
			fmt.Fprintf(w, "... %d more in %s\n", len(r.LeftOut)-i, printable.Name(path.Join(o.out, pack.JournalFile)))
			break
		}
		fmt.Fprintf(w, "left out: %s: %s %s\n", printable.Name(l.Name), l.Reason, printable.Text(l.Detail))
	}
	_, err := fmt.Fprintf(w, "in %.1f s\n", seconds)
	return err
}

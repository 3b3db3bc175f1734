// Package pack writes the samples of an image archive, in a random order, into shards with an
// index. The input is anything that package imageloader reads, such as a folder, a zip, or a folder
// with a CSV file of labels. The shards are tar files of about the same size. Package pack can also
// resize the images, and divide the samples into parts for training and validation.
//
// A loader finds the same labels in the shards as in the input. Images keep their bytes unless
// Options.Side resizes them.
//
// Write continues an interrupted or killed pack if it gets the same input and options. The shards
// have the same bytes as without the interruption.
package pack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Format is the form of the shards.
type Format string

// The formats.
const (
	Tar        Format = "tar"        // .tar; the directory of an image is its class
	TarGzip    Format = "tgz"        // the same, compressed: each sample is a gzip member
	WebDataset Format = "webdataset" // .tar; groups of members with a common key, with the class in .cls
)

// Options say how to write shards. The zero value copies all samples into shards of 256 MiB.
type Options struct {
	// Format is the form of the shards. If it is "", Write uses WebDataset if the input's option
	// WebDataset is set, and Tar otherwise.
	Format Format
	// ShardBytes is the maximum size of a shard in bytes; 0: 256 MiB. A shard with a single sample
	// may be larger.
	ShardBytes int64
	// Shards, if not 0, is the number of shards of the first part. Another part has a number of
	// shards in proportion to its samples. Only one of Shards and ShardBytes may be set.
	Shards int
	// Parts are the sets of shards; nil: one part "train" that has all samples. A sample is in at
	// most one part. A sample in no part is not written, and Report.Outside counts it.
	Parts []Part
	// If Divide is not nil and the classes are directories, Write calls it with the directories of
	// the samples. Its result, if not nil, replaces Parts.
	Divide func(directories []string) ([]Part, error)

	// Side, if not 0, is the maximum length in pixels of an image's shorter side. Write resizes
	// larger images to this length, with the loader's antialiased filter, and writes them as JPEGs
	// (4:2:0). They keep their EXIF orientation, but no colour profile or other metadata. Other
	// images are copied. It is an error if a WebDataset sample has a second image, such as a mask.
	Side    int
	Quality int // of resized JPEGs, 1 to 100; 0: 90
	// Upright rotates and flips images as their EXIF orientation says, and drops the orientation.
	// It needs Side.
	Upright bool
	// Check decodes all images, so that damaged ones are bad samples. Without it, Write examines
	// only the header of an image that it copies.
	Check bool
	// DropClasses allows a class to disappear because all its samples are bad. This changes the
	// labels of later classes.
	DropClasses bool
	// Progress, if not nil, is called often while the input is indexed, and then while samples are
	// written. Its Bytes are bytes of the input.
	Progress func(imageloader.Progress)
}

// Part is a named set of shards. The names of its files start with Name.
type Part struct {
	Name string
	imageloader.Part
}

// Report describes the shards that Write has written.
type Report struct {
	Input   string
	Format  Format
	Samples int // in the input
	Classes []string
	// Numbered means that a loader of the shards reads the numbers of the classes instead of their
	// names, because it would sort the names into another order. The names are in .json members.
	Numbered bool
	Others   int // members of the input that belong to no sample
	Orphans  int // images among Others that have no class
	// Outside counts the samples that are in no part.
	Outside   int
	Parts     []PartReport
	LeftOut   []LeftOut
	Dropped   []string // classes without a good sample in the first part
	Continued int      // shards that an earlier run had completed
}

// PartReport describes a part.
type PartReport struct {
	Name    string
	Shards  string // pattern of the shards' paths, for a loader: "photos/train-{000000..000015}.tar"
	Files   int    // number of shards
	Bytes   int64  // of all shards
	Input   int    // number of the part's samples in the input
	Samples int    // number of samples in the shards
	Resized int    // number of images among them that were resized
	LeftOut int    // number of bad samples
	Index   string // path of the index file; "" if an earlier run has made it
}

// LeftOut is a bad sample.
type LeftOut struct {
	Part   string
	Name   string // of the member
	Reason imageloader.Reason
	Detail string
}

// Write packs the archive at path into the folder dir, which it creates if necessary. The folder
// must be empty, or contain a pack of the same input with the same options. Write then continues
// that pack. The folder must not be inside a folder of the input. A file of a pack is complete when
// it has its final name.
//
// Write uses the options List, ListFormat, Columns, WebDataset, Seed, BadSamples, Workers, Damaged,
// MaxSampleBytes, MaxPixels, IndexFile, NoIndex, OpenSource and Logger of in. Seed decides the
// order of the samples. BadSamples is Fail or Skip. The workers read, decode and encode. Like a
// loader, Write makes the index of an input that has none.
//
// Up to 256 MiB of samples are in memory. Write first copies two kinds of content to a temporary
// file in dir: all samples of an input without random access, and the further members of WebDataset
// samples in compressed shards.
//
// Under Fail, Write returns a bad sample as an *imageloader.SampleError. A later call with Skip
// continues the pack.
func Write(ctx context.Context, path, dir string, in imageloader.Options, o Options) (*Report, error) {
	if err := o.setDefaults(&in); err != nil {
		return nil, err
	}
	if err := checkFolder(path, dir); err != nil {
		return nil, err
	}
	p := packing{path: path, dir: dir, o: o, reading: in}
	r, err := p.run(ctx)
	return r, archive.StopCause(ctx, err)
}

var partName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]*$`)

// setDefaults replaces zero values, and returns an error for options that cannot be used.
func (o *Options) setDefaults(in *imageloader.Options) error {
	if o.Format == "" {
		o.Format = Tar
		if in.WebDataset {
			o.Format = WebDataset
		}
	}
	if o.Parts == nil {
		o.Parts = []Part{{Name: "train"}}
	}
	if o.Shards != 0 && o.ShardBytes != 0 {
		return errors.New("pack: Options.Shards and Options.ShardBytes exclude each other")
	}
	o.ShardBytes = cmp.Or(o.ShardBytes, 256<<20)
	o.Quality = cmp.Or(o.Quality, 90)
	in.Workers = cmp.Or(in.Workers, runtime.GOMAXPROCS(0))
	return cmp.Or(o.check(), checkParts(o.Parts), checkInput(in))
}

// checkParts returns an error for parts that cannot be written.
func checkParts(parts []Part) error {
	names := map[string]bool{}
	for _, part := range parts {
		if err := part.Check(); err != nil {
			return fmt.Errorf("pack: part %q: %w", part.Name, err)
		}
		if !partName.MatchString(part.Name) || names[part.Name] {
			return fmt.Errorf("pack: part %q: a name has letters, digits, - and _, and each part has another", part.Name)
		}
		names[part.Name] = true
	}
	return nil
}

// check returns an error for numbers and formats out of range.
func (o *Options) check() error {
	switch {
	case o.Format != Tar && o.Format != TarGzip && o.Format != WebDataset:
		return fmt.Errorf("pack: there is no format %q: want tar, tgz or webdataset", o.Format)
	case o.Side < 0 || o.Side > maxSide:
		return fmt.Errorf("pack: Options.Side is %d, not in 0 to %d", o.Side, maxSide)
	case o.Quality < 1 || o.Quality > 100:
		return fmt.Errorf("pack: Options.Quality is %d, not in 1 to 100", o.Quality)
	case o.Shards < 0 || o.Shards > archive.MaxShards:
		return fmt.Errorf("pack: Options.Shards is %d, not in 0 to %d", o.Shards, archive.MaxShards)
	case o.ShardBytes < 0:
		return fmt.Errorf("pack: Options.ShardBytes is %d", o.ShardBytes)
	case o.Upright && o.Side == 0:
		return errors.New("pack: Options.Upright needs Options.Side: copied images keep their orientation, " +
			"and loaders turn them (Options.Transform.ApplyEXIFOrientation)")
	}
	return nil
}

// checkInput returns an error for options of the input that a pack cannot use.
func checkInput(in *imageloader.Options) error {
	switch {
	case in.List != "" && in.WebDataset:
		return errors.New("pack: the options List and WebDataset exclude each other")
	case in.MultiLabel || len(in.Classes) > 0 || in.Masks != (imageloader.Masks{}):
		return errors.New("pack: the options MultiLabel, Classes and Masks are not for packing")
	case in.Workers < 0 || in.Workers > 1<<12:
		return fmt.Errorf("pack: the option Workers is %d, not in 0 to %d", in.Workers, 1<<12)
	case in.BadSamples != imageloader.Fail && in.BadSamples != imageloader.Skip:
		return fmt.Errorf("pack: the option BadSamples is %v, not Fail or Skip", in.BadSamples)
	}
	return nil
}

// checkFolder returns an error if the output folder is inside a folder of the input, or if its path
// has a character that is special in a pattern.
func checkFolder(path, dir string) error {
	if strings.ContainsAny(dir, "{}*?[") {
		return fmt.Errorf("pack: %s: the shards' path would be a pattern: give a folder without {, }, *, ? and [", dir)
	}
	paths, err := archive.ShardPaths(path, nil)
	if err != nil {
		return err
	}
	at, err := filepath.Abs(dir)
	if err != nil {
		return fmt.Errorf("pack: %w", err)
	}
	for {
		if real, err := filepath.EvalSymlinks(at); err == nil {
			at = real
			break
		}
		at = filepath.Dir(at) // dir does not exist yet
	}
	for _, input := range paths {
		info, err := os.Stat(input)
		if err != nil || !info.IsDir() {
			continue // opening the input returns a better error
		}
		for folder := at; ; folder = filepath.Dir(folder) {
			if there, err := os.Stat(folder); err == nil && os.SameFile(info, there) {
				return fmt.Errorf("pack: %s is in %s, which is read: give a folder elsewhere", dir, input)
			}
			if folder == filepath.Dir(folder) {
				break
			}
		}
	}
	return nil
}

// packing is a running Write.
type packing struct {
	path, dir string
	o         Options
	reading   imageloader.Options // of the input
	in        *input
	names     *namer
	parts     []partPlan
	journal   *journal
	progress  imageloader.Progress
}

// partPlan is a part with its samples.
type partPlan struct {
	Part
	samples []int32
}

func (p *packing) run(ctx context.Context) (_ *Report, err error) {
	in := &p.reading
	if p.in, err = openInput(ctx, p.path, in, p.o.Progress, p.spool); err != nil {
		return nil, err
	}
	defer p.in.close()
	if err := p.chooseParts(); err != nil {
		return nil, err
	}
	outside, err := p.divide()
	if err != nil {
		return nil, err
	}
	classes := p.in.x.Classes()
	l := layout{web: p.o.Format == WebDataset, fromWeb: in.WebDataset, stems: p.o.Side > 0,
		listed: in.List != "" || p.in.inParquet()}
	l.number(classes)
	if err := l.checkClasses(classes, p.counts()); err != nil {
		return nil, fmt.Errorf("pack: %s: %w", p.in.rules.File, err)
	}
	p.names = newNamer(l, p.in.x, classes)
	if p.journal, err = openJournal(p.dir, p.header(in)); err != nil {
		return nil, err
	}
	defer p.journal.close()
	continued := len(p.journal.shards)
	for i := range p.parts {
		if err := p.writePart(ctx, &p.parts[i]); err != nil {
			return nil, err
		}
	}
	r := p.report(outside)
	r.Numbered = l.numbered
	r.Continued = continued
	if len(r.Dropped) > 0 && !p.o.DropClasses {
		return r, fmt.Errorf("pack: %s: all samples of the class %q are bad, and without it the labels of later "+
			"classes change: mend them, or set Options.DropClasses", p.in.rules.File, r.Dropped[0])
	}
	if !p.journal.done {
		if err := p.index(ctx, r, l); err != nil {
			return r, err
		}
	}
	return r, p.journal.finish()
}

// spool creates a temporary file in the output folder. The file has no name.
func (p *packing) spool() (*os.File, error) {
	if err := os.MkdirAll(p.dir, 0o777); err != nil {
		return nil, fmt.Errorf("pack: %w", err)
	}
	f, err := os.CreateTemp(p.dir, "pack.spool.*.tmp")
	if err != nil {
		return nil, fmt.Errorf("pack: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		_ = f.Close() // err is the more useful error
		return nil, fmt.Errorf("pack: %w", err)
	}
	return f, nil
}

// chooseParts calls Options.Divide, if directories are the classes.
func (p *packing) chooseParts() error {
	if p.o.Divide == nil || p.reading.WebDataset || p.reading.List != "" || p.in.inParquet() {
		return nil
	}
	var list []string
	seen := map[string]bool{}
	for i := range p.in.x.Len() {
		if dir, _ := split(p.in.x.Name(i)); !seen[dir] {
			seen[dir] = true
			list = append(list, strings.TrimSuffix(dir, "/"))
		}
	}
	parts, err := p.o.Divide(list)
	if err != nil || parts == nil {
		return err
	}
	p.o.Parts = parts
	return checkParts(parts)
}

// divide divides the samples into parts, and returns the number of samples in no part.
func (p *packing) divide() (outside int, err error) {
	x := p.in.x
	part := make([]int, x.Len())
	for number, of := range p.o.Parts {
		plan := partPlan{Part: of}
		for i, in := range x.In(of.Part) {
			switch {
			case !in:
			case part[i] != 0:
				return 0, fmt.Errorf("pack: %q is in the parts %q and %q", x.Name(i), p.o.Parts[part[i]-1].Name, of.Name)
			default:
				part[i] = number + 1
				plan.samples = append(plan.samples, int32(i))
				p.progress.TotalBytes += p.in.bytes(i)
			}
		}
		if len(plan.samples) == 0 {
			return 0, fmt.Errorf("%w in %s for the part %q", imageloader.ErrNoSamples, p.in.rules.File, of.Name)
		}
		p.parts = append(p.parts, plan)
	}
	for _, number := range part {
		if number == 0 {
			outside++
		}
	}
	return outside, nil
}

// counts returns the number of samples of each class in the first part.
func (p *packing) counts() []int {
	counts := make([]int, len(p.in.x.Classes()))
	for _, i := range p.parts[0].samples {
		counts[p.in.x.Label(int(i))]++
	}
	return counts
}

// header returns everything on which the bytes of the shards depend. BadSamples is not included:
// under Fail and Skip, complete shards have the same bytes.
func (p *packing) header(in *imageloader.Options) header {
	o := map[string]string{
		"-format": string(p.o.Format), "-shard-size": strconv.FormatInt(p.o.ShardBytes, 10),
		"-shards": strconv.Itoa(p.o.Shards), "-seed": strconv.FormatUint(in.Seed, 10),
		"-side": strconv.Itoa(p.o.Side), "-damaged": in.Damaged.String(),
		"-check": strconv.FormatBool(p.o.Check), "-webdataset": strconv.FormatBool(in.WebDataset),
		"-list": strconv.FormatBool(in.List != ""), "limits": fmt.Sprint(p.in.rules.MaxBytes, p.in.rules.MaxPixels),
	}
	f := in.ListFormat // the columns of a Parquet file are in in.Columns
	for name, value := range map[string]string{
		"-image-column": cmp.Or(f.NameColumn, in.Columns.Image),
		"-label-column": strings.Join(append(slices.Clone(f.LabelColumns), in.Columns.Labels...), ","),
		"-group-column": f.GroupColumn, "-list-folder": f.Folder, "-label-separator": f.Separator,
	} {
		if value != "" {
			o[name] = value
		}
	}
	if p.o.Side > 0 {
		o["-quality"], o["-upright"] = strconv.Itoa(p.o.Quality), strconv.FormatBool(p.o.Upright)
		o["the encoder"] = imagecapi.JPEGVersion()
	}
	if p.o.Shards > 0 {
		delete(o, "-shard-size")
	}
	for i, part := range p.o.Parts {
		o[fmt.Sprintf("part %d", i+1)] = fmt.Sprintf("%+v", part)
	}
	return header{journalVersion, p.in.digests(), o}
}

// report makes the Report from the journal.
func (p *packing) report(outside int) *Report {
	x := p.in.x
	r := &Report{Input: p.in.rules.File, Format: p.o.Format, Samples: x.Len(), Classes: x.Classes(),
		Others: x.Ignored(), Orphans: x.Orphans(), Outside: outside}
	for _, m := range p.in.groups.members {
		if !index.IsWebLabel(m.name) { // labels do not count as ignored
			r.Others--
		}
	}
	good := p.counts()
	had := p.counts()
	for _, part := range p.parts {
		of := PartReport{Name: part.Name, Input: len(part.samples)}
		for _, s := range p.journal.shards {
			if s.Part != part.Name {
				continue
			}
			of.Files++
			of.Bytes += s.Bytes
			of.Samples += s.Samples
			of.Resized += s.Resized
			of.LeftOut += len(s.LeftOut)
			for _, l := range s.LeftOut {
				r.LeftOut = append(r.LeftOut, LeftOut{part.Name, l.Name, imageloader.Reason(l.Reason), l.Detail})
				if part.Name == p.parts[0].Name {
					good[x.Label(l.Sample)]--
				}
			}
		}
		of.Shards = p.pattern(part.Name, of.Files)
		r.Parts = append(r.Parts, of)
	}
	for label, n := range good {
		if n == 0 && had[label] > 0 {
			r.Dropped = append(r.Dropped, r.Classes[label])
		}
	}
	return r
}

// pattern returns the path of a part's shards.
func (p *packing) pattern(part string, files int) string {
	first := filepath.Join(p.dir, shardName(part, 0, p.o.Format))
	if files == 1 {
		return first
	}
	return strings.Replace(first, "-000000.", fmt.Sprintf("-{000000..%06d}.", files-1), 1)
}

// index makes the indexes of the parts, and checks that a loader finds the samples and the classes.
func (p *packing) index(ctx context.Context, r *Report, l layout) error {
	for i := range r.Parts {
		part := &r.Parts[i]
		o := imageloader.Options{WebDataset: l.web, ShuffleBytes: 1}
		made, err := imageloader.MakeIndex(ctx, part.Shards, o, nil)
		if err != nil {
			return err
		}
		part.Index = made.File
		if made.Samples != part.Samples {
			return fmt.Errorf("pack: %s: a loader finds %d samples, and %d were written: do not use it, and report this",
				part.Shards, made.Samples, part.Samples)
		}
		if i > 0 || len(r.Dropped) > 0 {
			continue
		}
		loader, err := imageloader.OpenContext(ctx, part.Shards, o)
		if err != nil {
			return err
		}
		classes := loader.Classes()
		if err := loader.Close(); err != nil {
			return err
		}
		if !slices.Equal(classes, l.classesOf(r.Classes)) {
			return fmt.Errorf("pack: %s: a loader finds other classes than in the input (%d, not %d): do not use it, "+
				"and report this", part.Shards, len(classes), len(r.Classes))
		}
	}
	return nil
}

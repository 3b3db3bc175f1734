//go:build linux && cgo

package main

import (
	"bufio"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

// predictCommand classifies images.
func predictCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream predict IMAGE|FOLDER...", "Classifies images with a checkpoint of "+
		"torchstream train. A FOLDER stands for the images in it and in its folders, - for the names on\n"+
		"standard input, one a line. A file that is no image, or a damaged one, is named on standard "+
		"error, the others are classified, and the exit status is 1.\n"+
		"In folders, files that are no images are only counted.", stderr)
	checkpoint := set.String("checkpoint", filepath.Join("trained", "best.pt"),
		"checkpoint `FILE` of torchstream train")
	name := set.String("device", "", "cpu, cuda or cuda:N (default: a GPU if there is one)")
	batch := set.Int("batch", 32, "images per step")
	threads := cli.ThreadsOption(set)
	var shared cli.Images
	shared.Register(set, cli.CheckpointUpright)
	top := set.Int("top", 3, "number of classes to print for an image, the most probable first")
	asJSON := set.Bool("json", false, "print one JSON object a line for each file")
	table := set.String("csv", "", "CSV `FILE` to write too: file, class, probability; -top rows for each image")
	if err := cli.Parse(set, args, cli.OneOrMore); err != nil {
		return err
	}
	if *batch < 1 || *top < 1 {
		return cli.UsageError{Message: "-batch and -top are at least 1"}
	}
	for _, arg := range set.Args() {
		if len(arg) > 1 && arg[0] == '-' && !fileExists(arg) {
			return cli.UsageError{Message: "options come before the images: " + printable.Name(arg)}
		}
	}
	if err := cli.SetThreads(*threads); err != nil {
		return err
	}
	device, err := cli.PickDevice(*name)
	if err != nil {
		return err
	}
	file, err := openTrained(*checkpoint)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := file.matchUpright(set, shared.Upright); err != nil {
		return err
	}
	c, err := newClassifier(file, device)
	if err != nil {
		return err
	}
	defer c.decoder.Close()
	defer nn.Close(c.net)
	p := predictor{classifier: c, top: min(*top, len(c.classes)), asJSON: *asJSON, stdout: stdout, stderr: stderr}
	images, err := p.images(ctx, set.Args(), os.Stdin)
	if err != nil {
		return err
	}
	for _, image := range images {
		p.nameWidth = max(p.nameWidth, width(image.path))
	}
	for _, class := range c.classes {
		p.classWidth = max(p.classWidth, width(class))
	}
	return p.all(ctx, images, *batch, *table)
}

// all classifies all images, at most batch in each step, and then writes the file of -csv.
func (p *predictor) all(ctx context.Context, images []imageFile, batch int, table string) error {
	if p.keep = table != ""; p.keep {
		if err := safefile.Check(table, predictionsCSV); err != nil {
			return fmt.Errorf("-csv: %w", err)
		}
	}
	for some := range slices.Chunk(images, batch) {
		if err := p.predict(ctx, some); err != nil {
			return err
		}
	}
	if p.keep {
		if err := p.writeCSV(table); err != nil {
			return fmt.Errorf("-csv: %w", err)
		}
	}
	return p.finish()
}

// predictionsCSV is the output of predict -csv.
var predictionsCSV = safefile.Prefix("a table of predict -csv", "file,class,probability\n")

// writeCSV writes the file of -csv: the classes of all classified files.
func (p *predictor) writeCSV(path string) error {
	f, err := safefile.Replace(path, predictionsCSV, 0o644, func(f *os.File) error {
		w := csv.NewWriter(f)
		w.Write([]string{"file", "class", "probability"}) // Error returns its error
		for _, row := range p.table {
			for _, g := range row.Classes {
				w.Write([]string{row.File, g.Class, strconv.FormatFloat(g.Probability, 'g', 6, 64)})
			}
		}
		w.Flush()
		return w.Error()
	})
	if err != nil {
		return err
	}
	return f.Close()
}

// classifier is a network from a checkpoint of torchstream train.
type classifier struct {
	net     nn.Module
	decoder *serve.Decoder
	about   models.Metadata
	classes []string
}

// checkpointFolder returns an error if the path of a checkpoint is a folder. The error names the
// folder's torchstream train checkpoint, if there is one.
func checkpointFolder(option, path string) error {
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		return nil
	}
	for _, name := range []string{"best.pt", "last.pt"} {
		if inside := filepath.Join(path, name); fileExists(inside) {
			return fmt.Errorf("%s %s is a folder: name the checkpoint in it: %s %s", option,
				printable.Name(path), option, printable.Name(inside))
		}
	}
	return fmt.Errorf("%s %s is a folder, without a checkpoint of torchstream train (best.pt, last.pt): "+
		"name a file", option, printable.Name(path))
}

// trained is a checkpoint of torchstream train.
type trained struct {
	*checkpoint.File
	about models.Metadata
	path  string
}

// demoFormat starts the value of "format" in the metadata of checkpoints of examples/01-train.
const demoFormat = "torchstream 01-train "

// openTrained opens a checkpoint of torchstream train. It does not check the image size in the
// checkpoint.
func openTrained(path string) (*trained, error) {
	if err := checkpointFolder("-checkpoint", path); err != nil {
		return nil, err
	}
	file, err := checkpoint.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		last := filepath.Join(filepath.Dir(path), "last.pt")
		if _, err := os.Stat(last); err == nil {
			return nil, fmt.Errorf("%s: no such checkpoint, but the same folder has the last one of a "+
				"run: -checkpoint %s", printable.Name(path), printable.Name(last))
		}
		return nil, fmt.Errorf("%s: no such checkpoint: torchstream train writes best.pt to its "+
			"output folder (-o): pass that file with -checkpoint FILE", printable.Name(path))
	}
	if err != nil {
		return nil, err
	}
	if made := file.Metadata()["format"]; strings.HasPrefix(made, demoFormat) {
		return nil, errors.Join(fmt.Errorf("%s is a checkpoint of the demo: `go run ./examples/01-train predict "+
			"-checkpoint %[1]s FILE...` reads it; this command reads those of torchstream train",
			printable.Name(path)), file.Close())
	}
	about, err := models.ParseMetadata(file.Metadata())
	var lacks *models.MetadataError
	if errors.As(err, &lacks) {
		return nil, errors.Join(fmt.Errorf("%s was not written by torchstream train: its metadata "+
			"has no valid %s: choose another with -checkpoint FILE, for instance trained/best.pt; if your "+
			"own program trained the model, set train.Config.Metadata there",
			printable.Name(path), strings.Join(lacks.Missing, ", ")), file.Close())
	}
	return &trained{file, about, path}, nil
}

// newClassifier loads a checkpoint of torchstream train onto a device.
func newClassifier(file *trained, device cuda.Device) (*classifier, error) {
	c := &classifier{about: file.about, classes: file.about.Classes}
	var err error
	// NewDecoder checks the image size before Load makes the network: a ViT's memory grows with the
	// square of the size.
	c.decoder, err = serve.NewDecoder(serve.Options{Device: device, Decode: decode.Options{Transform: file.about.Transform()}})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", printable.Name(file.path), err)
	}
	if c.net, err = file.about.Load(file.File, device); err != nil {
		return nil, errors.Join(err, c.decoder.Close())
	}
	return c, nil
}

// guess is a class and its probability, from 0 to 1.
type guess struct {
	Class       string  `json:"class"`
	Label       int     `json:"label"` // the class's number in the network
	Probability float64 `json:"probability"`
}

// classify returns the most probable classes of encoded images, most probable first. For a bad
// image, guesses has no classes and faults has the error.
func (c *classifier) classify(ctx context.Context, images [][]byte, top int) (guesses [][]guess,
	faults decode.Errors, err error) {
	scope := torch.NewScope("images")
	defer scope.Close()
	guesses = make([][]guess, len(images))
	x, err := c.decoder.Batch(ctx, scope, images...)
	if errors.As(err, &faults) && x == nil {
		return guesses, faults, nil // all are bad
	}
	if err != nil && faults == nil {
		return nil, nil, err
	}
	values, indices := c.about.Probabilities(c.net.Forward(x.NoGrad())).TopK(int64(top), 1)
	probabilities, err := values.Float64s()
	if err != nil {
		return nil, nil, err
	}
	labels, err := indices.Int64s()
	if err != nil {
		return nil, nil, err
	}
	for i := range images {
		if slices.ContainsFunc(faults, func(e *decode.Error) bool { return e.Image == i }) {
			continue // its pixels are zero
		}
		for j := i * top; j < (i+1)*top; j++ {
			guesses[i] = append(guesses[i], guess{c.classes[labels[j]], int(labels[j]), probabilities[j]})
		}
	}
	return guesses, faults, nil
}

// predictor classifies files and prints the results.
type predictor struct {
	*classifier
	top            int
	asJSON         bool
	nameWidth      int // characters of the longest name
	classWidth     int // characters of the longest class name
	stdout, stderr io.Writer

	files, bad int // files: classified; bad: could not be classified
	leftOut    int // files found in folders that are not images

	keep  bool            // for -csv
	table []predictedFile // all classified files, if keep
}

// imageFile is a file to classify.
type imageFile struct {
	path   string
	walked bool // found in a folder, which may contain other kinds of files
}

// predictedFile is a row of the output.
type predictedFile struct {
	File    string  `json:"file"`
	Classes []guess `json:"classes,omitempty"`
	Error   string  `json:"error,omitempty"`
}

// images returns the files for the arguments, in argument order. A folder's files are sorted by
// name. A path that does not exist is returned too: reading it reports the error.
func (p *predictor) images(ctx context.Context, args []string, stdin io.Reader) (images []imageFile, err error) {
	var paths []string
	for _, arg := range args {
		if arg != "-" {
			paths = append(paths, arg)
			continue
		}
		lines := bufio.NewScanner(stdin)
		for lines.Scan() {
			if lines.Text() != "" {
				paths = append(paths, lines.Text())
			}
		}
		if err := lines.Err(); err != nil {
			return nil, fmt.Errorf("the names on standard input: %w", err)
		}
	}
	for _, path := range paths {
		if info, err := os.Stat(path); err != nil || !info.IsDir() {
			images = append(images, imageFile{path: path}) // reading it will report the error
			continue
		}
		found, err := p.walk(ctx, path)
		if err != nil {
			return nil, err
		}
		images = append(images, found...)
	}
	return images, nil
}

// walk returns the files of a folder and its subfolders. It follows links to files, and follows
// folder itself if it is a link.
func (p *predictor) walk(ctx context.Context, folder string) (images []imageFile, err error) {
	root := folder + string(filepath.Separator) // with the separator WalkDir follows a link
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		path = filepath.Clean(path)
		if err != nil {
			if err := p.refuse(path, err); err != nil {
				return err
			}
			if entry != nil && entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if entry.IsDir() {
			return ctx.Err()
		}
		if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() { // describes a link's target
			p.leftOut++
			return nil
		}
		images = append(images, imageFile{path, true})
		return nil
	})
	return images, err
}

// predict classifies the images of one step and prints a row for each.
func (p *predictor) predict(ctx context.Context, images []imageFile) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var data [][]byte
	read := make([]error, len(images))
	for i, image := range images {
		var bytes []byte
		if bytes, read[i] = readImage(image.path); read[i] == nil {
			data = append(data, bytes)
		}
	}
	var guesses [][]guess
	var faults decode.Errors
	if len(data) > 0 {
		var err error
		if guesses, faults, err = p.classify(ctx, data, p.top); err != nil {
			return err
		}
	}
	next := 0 // index into data
	for i, image := range images {
		err := read[i]
		var found []guess
		if err == nil {
			if at := slices.IndexFunc(faults, func(e *decode.Error) bool { return e.Image == next }); at >= 0 {
				err = faults[at]
			}
			found = guesses[next]
			next++
		}
		if err := p.row(image, found, err); err != nil {
			return err
		}
	}
	return nil
}

// maxImageBytes is the maximum file size, and the default of decode.Options.MaxBytes.
const maxImageBytes = 64 << 20

// readImage reads a file. It refuses a file over maxImageBytes, of which it reads no more than
// that.
func readImage(path string) ([]byte, error) {
	f, err := safefile.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() // read only
	data, err := io.ReadAll(io.LimitReader(f, maxImageBytes+1))
	if err == nil && len(data) > maxImageBytes {
		err = &decode.Error{Kind: decode.ErrTooLarge,
			Err: fmt.Errorf("more than %d MiB", maxImageBytes>>20), Offset: -1}
	}
	return data, err
}

// row prints a file's classes, or its error.
func (p *predictor) row(image imageFile, found []guess, err error) error {
	switch {
	case errors.Is(err, decode.ErrNotImage) && image.walked:
		p.leftOut++
		return nil
	case err != nil:
		return p.refuse(image.path, err)
	}
	p.files++
	if p.keep {
		p.table = append(p.table, predictedFile{File: image.path, Classes: found})
	}
	if p.asJSON {
		return cli.WriteJSON(p.stdout, predictedFile{File: image.path, Classes: found})
	}
	var line strings.Builder
	pad(&line, image.path, p.nameWidth)
	for _, g := range found {
		line.WriteString("  ")
		pad(&line, g.Class, p.classWidth)
		fmt.Fprintf(&line, "  %5.1f %%", 100*g.Probability)
	}
	_, err = fmt.Fprintln(p.stdout, line.String())
	return err
}

// width returns the number of characters of a name when printed.
func width(name string) int { return utf8.RuneCountInString(printable.Name(name)) }

func pad(line *strings.Builder, name string, to int) {
	line.WriteString(printable.Name(name))
	line.WriteString(strings.Repeat(" ", max(0, to-width(name))))
}

// refuse reports a file that cannot be classified.
func (p *predictor) refuse(path string, err error) error {
	p.bad++
	says := err.Error()
	var fault *decode.Error
	var read *fs.PathError
	switch {
	case errors.Is(err, decode.ErrNotImage) && isArchive(path):
		says = "an archive, not an image: unpack it (tar -xf ARCHIVE -C FOLDER) and name the FOLDER"
	case errors.Is(err, decode.ErrNotImage) && strings.HasSuffix(path, ".parquet"):
		says = "a Parquet file, not an image: torchstream evaluate -archive reads it"
	case errors.As(err, &fault):
		says = fmt.Sprintf("%v: %v", fault.Kind, fault.Err)
	case errors.As(err, &read):
		says = read.Err.Error()
	}
	if _, err := fmt.Fprintf(p.stderr, "torchstream: %s: %s\n", printable.Name(path),
		printable.Text(says)); err != nil || !p.asJSON {
		return err
	}
	return cli.WriteJSON(p.stdout, predictedFile{File: path, Error: says})
}

// isArchive reports whether a file name has an archive's extension.
func isArchive(path string) bool {
	return slices.ContainsFunc([]string{".tar", ".tgz", ".tar.gz", ".tar.zst", ".zip"},
		func(end string) bool { return strings.HasSuffix(strings.ToLower(path), end) })
}

// finish reports the number of skipped and bad files.
func (p *predictor) finish() error {
	left := ""
	if p.leftOut > 0 {
		left = fmt.Sprintf("%s left out: no images", printable.Counted(p.leftOut, "file", "files"))
	}
	switch {
	case p.bad > 0:
		fmt.Fprintf(p.stderr, "torchstream: %d of %s could not be classified\n", p.bad,
			printable.Counted(p.files+p.bad, "file", "files"))
		if left != "" {
			fmt.Fprintln(p.stderr, "torchstream: "+left)
		}
		return cli.ErrFound
	case p.files == 0 && left != "":
		return fmt.Errorf("nothing to classify: %s", left)
	case p.files == 0:
		return errors.New("nothing to classify: no files in the folders, and no names on standard input")
	case left != "":
		fmt.Fprintln(p.stderr, "torchstream: "+left)
	}
	return nil
}

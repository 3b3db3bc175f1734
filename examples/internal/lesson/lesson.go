// Package lesson holds the common parts of the numbered examples: flags, the Python peer, the
// table, and the timeline.
package lesson

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/interrupt"
	"github.com/torchstream/torchstream/trace"
)

// Lesson is one run of an example.
type Lesson struct {
	JSON     bool        // print one JSON object instead of the text
	Device   cuda.Device // the first GPU to use
	Timeline string      // file for the timeline: .svg, .png or .json; "" for none
	Python   string      // the peer's interpreter; "" means no peer
	Out      io.Writer
	Streams  map[cuda.Stream]string // names for the rows of the timeline; set before Record
}

// Usage makes -h print how to call an example, and a description, before the list of flags.
func Usage(flags *flag.FlagSet, call, about string) {
	flags.Usage = func() {
		fmt.Fprintf(flags.Output(), "usage: %s\n%s\n", call, about)
		flags.PrintDefaults()
	}
}

// Main runs an example. It parses the flags (also the flags that more, if not nil, adds) and calls
// run with a context that an interrupt cancels. If run fails, Main prints one line and exits with
// status 1. about is the sentence for -h, and gpus is the number of GPUs that the example needs.
func Main(name, about string, gpus int, more func(*flag.FlagSet), run func(context.Context, *Lesson) error) {
	l := &Lesson{Out: os.Stdout}
	flags := flag.NewFlagSet(name, flag.ExitOnError)
	Usage(flags, name+" [options]", about)
	flags.BoolVar(&l.JSON, "json", false, "print the figures as one JSON object")
	device := flags.Int("device", 0, "the first GPU to use")
	flags.StringVar(&l.Timeline, "timeline", "",
		"draw the timeline to this `file`: .svg, .png, or .json for ui.perfetto.dev")
	flags.StringVar(&l.Python, "python", "python3", "interpreter with PyTorch for the peer's figures; empty for none")
	if more != nil {
		more(flags)
	}
	flags.Parse(os.Args[1:]) // exits on an error
	l.Device = cuda.Device(*device)
	Run(name, func(ctx context.Context) error {
		if err := errors.Join(trace.Window{File: l.Timeline}.Check(), l.needs(gpus)); err != nil {
			return err
		}
		return run(ctx, l)
	})
}

// Run runs an example whose flags have been parsed, with a context that an interrupt cancels. If
// the function fails, Run prints one line and exits: with interrupt.Status after an interrupt,
// otherwise with status 1.
func Run(name string, run func(context.Context) error) {
	ctx, stop := interrupt.Context(interrupt.Grace)
	status := Status(ctx, name, run(ctx), os.Stderr)
	stop()
	if status != 0 {
		os.Exit(status)
	}
}

// Status returns the exit status of an example, and prints its error on one line. After ctx has
// ended, the line says instead that the example was interrupted.
func Status(ctx context.Context, name string, err error, stderr io.Writer) int {
	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil:
		fmt.Fprintf(stderr, "%s: interrupted\n", name)
		return interrupt.Status
	}
	fmt.Fprintf(stderr, "%s: %v\n", name, err)
	return 1
}

// Paths of the repository's archives, relative to its root.
const (
	TrainArchive = "examples/data/photos-train.tgz"
	TestArchive  = "examples/data/photos-test.tgz"
)

// ExplainMissing adds advice to the error of opening the archive at path if the file does not
// exist. It advises to name another archive with the option. For an archive of the repository it
// also advises to run the example in the repository's root. It returns other errors unchanged.
func ExplainMissing(err error, example, option, path string) error {
	switch {
	case !errors.Is(err, fs.ErrNotExist):
		return err
	case path == TrainArchive || path == TestArchive:
		return fmt.Errorf("%w: the archive that comes with the repository is found from its root: run %s "+
			"there, or name another with %s FILE", err, example, option)
	}
	return fmt.Errorf("%w: name another archive with %s FILE", err, option)
}

func (l *Lesson) needs(gpus int) error {
	have := max(0, cuda.DeviceCount()-int(l.Device))
	switch {
	case l.Device < 0 || have >= gpus:
		return nil
	case gpus == 1:
		return fmt.Errorf("needs a GPU, and there is no %v (torchstream doctor says more)", l.Device)
	default:
		return fmt.Errorf("needs %d GPUs from %v on, and there are %d (torchstream doctor says more)", gpus,
			l.Device, have)
	}
}

// ErrNoPeer is wrapped by Peer's error if there is no Python or no PyTorch.
var ErrNoPeer = errors.New("no PyTorch to compare with")

// Peer runs the Python program (the embedded text of peer.py) with the arguments. It decodes the
// last line of the output, one JSON object, into figures.
func (l *Lesson) Peer(ctx context.Context, program string, figures any, arguments ...string) error {
	if l.Python == "" {
		return fmt.Errorf("%w: -python is empty", ErrNoPeer)
	}
	python, err := exec.LookPath(l.Python)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoPeer, err)
	}
	command := exec.CommandContext(ctx, python, append([]string{"-c", program}, arguments...)...)
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		text := strings.TrimSpace(stderr.String())
		last := text[strings.LastIndexByte(text, '\n')+1:]
		if strings.HasPrefix(last, "ModuleNotFoundError") {
			return fmt.Errorf("%w: %s: %s", ErrNoPeer, python, last)
		}
		return fmt.Errorf("peer.py: %w: %s", err, last)
	}
	text := strings.TrimSpace(stdout.String())
	if err := json.Unmarshal([]byte(text[strings.LastIndexByte(text, '\n')+1:]), figures); err != nil {
		return fmt.Errorf("peer.py printed no JSON object as its last line: %w", err)
	}
	return nil
}

// Table prints rows of cells in columns. The first column is aligned left, the others right. The
// first row is the header.
func (l *Lesson) Table(rows [][]string) error {
	if len(rows) == 0 {
		return nil
	}
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], len([]rune(cell)))
		}
	}
	var text strings.Builder
	for _, row := range rows {
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-len([]rune(cell)))
			if i == 0 {
				text.WriteString(cell + pad)
			} else {
				text.WriteString("  " + pad + cell)
			}
		}
		text.WriteByte('\n')
	}
	_, err := io.WriteString(l.Out, text.String())
	return err
}

// Result prints the figures as one JSON object with -json. Otherwise it calls text.
func (l *Lesson) Result(figures any, text func() error) error {
	if !l.JSON {
		return text()
	}
	return json.NewEncoder(l.Out).Encode(figures)
}

// Record runs fn under a recording, draws its timeline and returns the recording. If -timeline
// names no file, it returns nil and does not run fn. Recording takes time, so measure speed in
// other runs of fn.
func (l *Lesson) Record(title string, fn func() error) (*trace.Trace, error) {
	if l.Timeline == "" {
		return nil, nil
	}
	recorder, err := trace.Start(trace.Options{})
	if err != nil {
		return nil, err
	}
	for stream, name := range l.Streams {
		err = errors.Join(err, recorder.NameStream(stream, name))
	}
	failed := errors.Join(err, fn())
	recorded, err := recorder.Stop()
	if err = errors.Join(failed, err); err != nil {
		return nil, err
	}
	if err := recorded.WriteFile(l.Timeline, trace.PictureOptions{Title: title}); err != nil {
		return nil, err
	}
	if !l.JSON {
		fmt.Fprintf(l.Out, "timeline: %s\n", l.Timeline)
	}
	return recorded, nil
}

// Median returns the middle value, or the lower of the two middle values if their number is even.
// It returns 0 if there are no values.
func Median[T ~int64 | ~float64](values []T) T {
	if len(values) == 0 {
		var none T
		return none
	}
	sorted := slices.Clone(values)
	slices.Sort(sorted)
	return sorted[(len(sorted)-1)/2]
}

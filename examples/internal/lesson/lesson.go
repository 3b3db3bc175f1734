// Package lesson is what the numbered examples share: their flags, the peer in Python, a table, the
// timeline.
package lesson

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
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
	Timeline string      // file to draw the timeline to: .svg, .png or .json; "" is none
	Python   string      // interpreter of the peer; "" is no peer
	Out      io.Writer
	Streams  map[cuda.Stream]string // names for the rows of the timeline; set before Record
}

// Main runs an example: it parses the flags (those of more, if not nil, as well), runs the function
// with a context that ends with an interrupt, and exits with status 1 and one line if that fails.
// gpus is how many GPUs the example needs.
func Main(name string, gpus int, more func(*flag.FlagSet), run func(context.Context, *Lesson) error) {
	l := &Lesson{Out: os.Stdout}
	flags := flag.NewFlagSet(name, flag.ExitOnError)
	flags.BoolVar(&l.JSON, "json", false, "print the figures as one JSON object")
	device := flags.Int("device", 0, "the first GPU to use")
	flags.StringVar(&l.Timeline, "timeline", "", "draw the timeline to this `file`: .svg, .png, or .json for ui.perfetto.dev")
	flags.StringVar(&l.Python, "python", "python3", "interpreter with PyTorch for the peer's figures; empty for none")
	if more != nil {
		more(flags)
	}
	flags.Parse(os.Args[1:]) // exits by itself
	l.Device = cuda.Device(*device)
	ctx, stop := interrupt.Context(interrupt.Grace)
	err := errors.Join(trace.Window{File: l.Timeline}.Check(), l.needs(gpus))
	if err == nil {
		err = run(ctx, l)
	}
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
}

func (l *Lesson) needs(gpus int) error {
	have := max(0, cuda.DeviceCount()-int(l.Device))
	switch {
	case l.Device < 0 || have >= gpus:
		return nil
	case gpus == 1:
		return fmt.Errorf("needs a GPU, and there is no %v (torchstream doctor says more)", l.Device)
	default:
		return fmt.Errorf("needs %d GPUs from %v on, and there are %d (torchstream doctor says more)", gpus, l.Device, have)
	}
}

// ErrNoPeer is in the error of Peer where there is no Python or no PyTorch.
var ErrNoPeer = errors.New("no PyTorch to compare with")

// Peer runs the Python program (the text of peer.py, by go:embed) with the arguments and reads the
// last line of its output, one JSON object, into figures.
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

// Table prints rows of cells in columns, the first aligned left and the others right; the first row
// is the header.
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

// Result prints the figures as one JSON object under -json, and calls text otherwise.
func (l *Lesson) Result(figures any, text func() error) error {
	if !l.JSON {
		return text()
	}
	return json.NewEncoder(l.Out).Encode(figures)
}

// Record runs fn under a recording and draws its timeline, if -timeline asks for one. It returns
// the recording, or nil without -timeline; fn is then not run. Figures of speed are to be taken in
// other runs of fn: a recording costs time.
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

// Median returns the middle of the values; of an even number the lower of the two. It is 0 for
// none.
func Median[T ~int64 | ~float64](values []T) T {
	if len(values) == 0 {
		var none T
		return none
	}
	sorted := slices.Clone(values)
	slices.Sort(sorted)
	return sorted[(len(sorted)-1)/2]
}

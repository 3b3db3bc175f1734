package trace

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/safefile"
)

// Window selects batches of a training loop to record to a file. It is one of the prefetcher's
// options, so a program that uses the prefetcher can be recorded without a change of its loop. The
// zero value records nothing.
type Window struct {
	File  string // .svg, .png or .json; "" records nothing
	Epoch int    // in the program's own numbering
	// First is the first batch of the epoch to record. 0 means 2, because the first batches load
	// kernels and fill caches; -1 means batch 0.
	First   int
	Batches int // number of batches; 0 means 4
	Picture PictureOptions
}

// Environment is the variable that [FromEnvironment] reads.
const Environment = "TORCHSTREAM_TRACE"

// taken reports whether a caller in this process has taken the variable's window. The variable and
// its file belong to the whole process.
var taken atomic.Bool

// FromEnvironment returns the window that the variable TORCHSTREAM_TRACE describes. Only the first
// caller in the process gets it. Later callers, and callers without the variable, get a zero
// Window. The variable is the name of the file, optionally followed by fields of Window, separated
// by commas:
//
//	TORCHSTREAM_TRACE=step.svg
//	TORCHSTREAM_TRACE=step.json,epoch=1,first=100,batches=8
func FromEnvironment() (Window, error) {
	value := os.Getenv(Environment)
	if value == "" || taken.Swap(true) {
		return Window{}, nil
	}
	w, err := parseWindow(value)
	if err != nil {
		return Window{}, fmt.Errorf("%s=%s: %w", Environment, value, err)
	}
	return w, nil
}

func parseWindow(text string) (Window, error) {
	parts := strings.Split(text, ",")
	w := Window{File: parts[0]}
	for _, part := range parts[1:] {
		name, value, _ := strings.Cut(part, "=")
		field := map[string]*int{"epoch": &w.Epoch, "first": &w.First, "batches": &w.Batches}[name]
		if field == nil {
			return w, fmt.Errorf("%q is none of epoch=N, first=N and batches=N", part)
		}
		n, err := strconv.Atoi(value)
		if err != nil {
			return w, fmt.Errorf("%s: %q is not a number", name, value)
		}
		if *field = n; name == "first" && n == 0 {
			*field = -1
		}
	}
	return w, w.Check()
}

// Check returns an error if the window is invalid, or if the file exists and is not a recording in
// the format that its name selects. The error thus comes before the recording.
func (w Window) Check() error {
	kind, known := kinds[strings.ToLower(filepath.Ext(w.File))]
	switch {
	case w == Window{}:
		return nil
	case !known:
		return badName(w.File)
	case w.First < -1 || w.Batches < 0:
		return fmt.Errorf("trace: First is %d and Batches is %d: First must be at least -1, and Batches "+
			"at least 0", w.First, w.Batches)
	}
	if err := safefile.CheckWrite(w.File, kind); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	return nil
}

// Turns returns the number of the first batch to record, and of the first batch after the
// recording.
func (w Window) Turns() (first, end int) {
	first, end = w.First, w.Batches
	switch first {
	case 0:
		first = 2
	case -1:
		first = 0
	}
	if end == 0 {
		end = 4
	}
	return first, first + end
}

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

// Window is a bounded part of a training loop to record: some batches of an epoch, to a file. The
// prefetcher takes one as an option, so that any program that uses it can be looked at without a
// change of its loop. The zero value is no recording.
type Window struct {
	File    string // .svg, .png or .json; "" is no recording
	Epoch   int    // as the program numbers them
	First   int    // the first batch of the epoch to record. 0 means 2, since the first batches load kernels and fill caches; -1 means the very first
	Batches int    // how many; 0 means 4
	Picture PictureOptions
}

// Environment is the variable that [FromEnvironment] reads.
const Environment = "TORCHSTREAM_TRACE"

// The variable and the file that it names are the process's: so is who has taken them.
var taken atomic.Bool

// FromEnvironment returns the window that the variable TORCHSTREAM_TRACE asks for, to the first
// caller in the process; to others, and where it is not set, no window. The variable is the file's
// name, after which may follow, with commas, what Window says:
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

// Check returns what is wrong with the window, before anything is recorded: also that its file
// exists and is of another kind.
func (w Window) Check() error {
	kind, known := kinds[strings.ToLower(filepath.Ext(w.File))]
	switch {
	case w == Window{}:
		return nil
	case !known:
		return badName(w.File)
	case w.First < -1 || w.Batches < 0:
		return fmt.Errorf("trace: First is %d and Batches %d", w.First, w.Batches)
	}
	if err := safefile.CheckWrite(w.File, kind); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	return nil
}

// Turns returns the numbers of the first batch to record, and of the first one after it not to.
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

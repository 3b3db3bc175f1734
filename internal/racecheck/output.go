package racecheck

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
)

// Environment variables that FromEnvironment reads.
const (
	// EnvSanitize starts the sanitizer if it is "1". Its findings go to standard error. Empty and
	// "0" do not start it; "notes" also writes the findings that are notes.
	EnvSanitize = "TORCHSTREAM_SANITIZE"
	// EnvSanitizeDir is a folder for the process's findings, in addition to standard error. Each
	// finding gets a text, a JSON file and a picture; notes do not. The folder is created if it
	// does not exist.
	EnvSanitizeDir = "TORCHSTREAM_SANITIZE_DIR"
	// EnvSanitizeIgnore is a regular expression. A finding is dropped if a function or a file:line
	// of either stack matches.
	EnvSanitizeIgnore = "TORCHSTREAM_SANITIZE_IGNORE"
)

// FromEnvironment returns the Checker that the environment requests, or nil. fingerprint becomes
// Options.Fingerprint.
func FromEnvironment(fingerprint func(begin, n uintptr) uint64) (*Checker, error) {
	notes := false
	switch mode := os.Getenv(EnvSanitize); mode {
	case "", "0":
		return nil, nil
	case "1":
	case "notes":
		notes = true
	default:
		return nil, fmt.Errorf("%s=%q: set it to 1, or to notes for the findings that are no errors too",
			EnvSanitize, mode)
	}
	o := Options{Fingerprint: fingerprint}
	if ignore := os.Getenv(EnvSanitizeIgnore); ignore != "" {
		var err error
		if o.Ignore, err = regexp.Compile(ignore); err != nil {
			return nil, fmt.Errorf("%s: %w", EnvSanitizeIgnore, err)
		}
	}
	out := &Output{Text: os.Stderr, Dir: os.Getenv(EnvSanitizeDir), Notes: notes}
	if out.Dir != "" {
		if err := os.MkdirAll(out.Dir, 0o777); err != nil {
			return nil, fmt.Errorf("%s: %w", EnvSanitizeDir, err)
		}
	}
	o.Report = out.Write
	return New(o), nil
}

// Output writes findings. A finding that cannot be written does not stop the program: the error
// goes to Text.
type Output struct {
	Text  io.Writer // nil: no text
	Dir   string    // "": no files
	Notes bool      // also notes, in Text

	written int
}

// Write writes one finding. Calls must not be concurrent.
func (o *Output) Write(f *Finding) {
	if f.Kind.Note() && !o.Notes {
		return
	}
	if o.Text != nil {
		io.WriteString(o.Text, "==================\n"+f.String()+"==================\n")
	}
	if o.Dir == "" || f.Kind.Note() {
		return
	}
	o.written++
	if err := o.files(f); err != nil && o.Text != nil {
		fmt.Fprintf(o.Text, "stream sanitizer: %v\n", err)
	}
}

func (o *Output) files(f *Finding) error {
	name := filepath.Join(o.Dir, fmt.Sprintf("%s-%d-%d", f.Kind, os.Getpid(), o.written))
	data, err := json.MarshalIndent(f, "", "  ")
	var drawn bytes.Buffer
	return errors.Join(err, f.WriteSVG(&drawn),
		os.WriteFile(name+".svg", drawn.Bytes(), 0o666),
		os.WriteFile(name+".txt", []byte(f.String()), 0o666),
		os.WriteFile(name+".json", append(data, '\n'), 0o666))
}

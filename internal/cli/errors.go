package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/printable"
)

// ErrFound is the error of a command that did its work and found something bad. The command has
// reported what it found.
var ErrFound = errors.New("something bad was found")

// InterruptedError is the error of an interrupted command that says how to continue.
type InterruptedError struct{ Message string }

func (e InterruptedError) Error() string { return e.Message }

// UsageError is the error of a wrong command line.
type UsageError struct{ Message string }

func (e UsageError) Error() string { return e.Message }

// Usagef returns a [UsageError] with a formatted message.
func Usagef(format string, args ...any) error {
	return UsageError{Message: fmt.Sprintf(format, args...)}
}

// SkippableError is the error of a command whose option -bad-samples would leave the bad sample
// out.
type SkippableError struct{ Err error }

func (e SkippableError) Error() string { return e.Err.Error() }

func (e SkippableError) Unwrap() error { return e.Err }

// Advised returns the text of an error of a command. That of a bad sample names the command that
// removes it, in place of the options of package imageloader; that of an archive that is cut off
// names the one that lists what is readable, unless that command has the error.
func Advised(err error, command string) string {
	text := err.Error()
	var damage *imageloader.ArchiveError
	if command != "inspect" && errors.As(err, &damage) && errors.Is(damage, io.ErrUnexpectedEOF) {
		text = strings.Replace(text, damage.Error(), fmt.Sprintf("%v (`torchstream inspect %s` lists what is readable)", damage, printable.Name(damage.File)), 1)
	}
	var bad *imageloader.SampleError
	if !errors.As(err, &bad) {
		return text
	}
	before, after, found := strings.Cut(text, bad.Error())
	if !found {
		return text
	}
	_, more, joined := strings.Cut(after, "\n") // the texts of errors.Join
	if joined {
		more = "\n" + more
	}
	skip := ""
	if errors.As(err, &SkippableError{}) {
		skip = ", -bad-samples skip leaves them out"
	}
	return fmt.Sprintf("%s%v (`torchstream inspect -fix OUT %s` writes an archive without the bad members%s)%s", before, bad, printable.Name(bad.File), skip, more)
}

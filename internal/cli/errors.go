package cli

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/printable"
)

// helpError is returned by a command that was asked for its help. [Program.Run] prints the text.
type helpError struct{ text string }

func (helpError) Error() string { return flag.ErrHelp.Error() }

func (helpError) Unwrap() error { return flag.ErrHelp }

// ErrFound is returned by a command that completed and found a problem. The command has already
// reported it.
var ErrFound = errors.New("something bad was found")

// InterruptedError is returned by an interrupted command. Message says how to continue. It is empty
// if another process has printed that.
type InterruptedError struct{ Message string }

func (e InterruptedError) Error() string { return e.Message }

// UsageError reports a wrong command line.
type UsageError struct{ Message string }

func (e UsageError) Error() string { return e.Message }

// Usagef returns a [UsageError] with a formatted message.
func Usagef(format string, args ...any) error {
	return UsageError{Message: fmt.Sprintf(format, args...)}
}

// SkippableError reports a bad sample that the command's option -bad-samples would leave out.
type SkippableError struct{ Err error }

func (e SkippableError) Error() string { return e.Err.Error() }

func (e SkippableError) Unwrap() error { return e.Err }

// Advised returns the text of a command's error, with advice for a command's user. For a bad
// sample, the text names the command that removes the sample instead of options of package
// imageloader. For a truncated archive, it names the command that lists the readable part, unless
// command is that command.
func Advised(err error, command string) string { return InFlags(advised(err, command)) }

// goOption matches a Go option in a text, with the parentheses around it.
var goOption = regexp.MustCompile(`( \()?\b(?:Load|Fix)?Options\.([A-Z]\w*(?:\.[A-Z]\w*)?)(\))?`)

// InFlags replaces the names of Go options in a text by the flags of commands. If no command has a
// flag for an option in parentheses, such as " (Options.MaxPixels)", InFlags removes the option
// with its parentheses.
func InFlags(text string) string {
	return goOption.ReplaceAllStringFunc(text, func(match string) string {
		m := goOption.FindStringSubmatch(match)
		switch flag := flagOf(m[2]); {
		case flag != "":
			return m[1] + flag + m[3]
		case m[1] != "" && m[3] != "":
			return ""
		}
		return match
	})
}

// flagOf returns the flag for a field of imageloader.Options, imageloader.FixOptions, pack.Options
// or nn.LoadOptions. It returns "" if no command has a flag for the field.
func flagOf(option string) string {
	return map[string]string{
		"BadSamples":                     "-bad-samples",
		"Balanced":                       "-balanced",
		"BatchSize":                      "-batch",
		"Boxes":                          "-boxes",
		"Boxes.File":                     "-boxes",
		"Boxes.Image":                    "-boxes",
		"Columns":                        "-image-column or -label-column",
		"Columns.Image":                  "-image-column",
		"Columns.Labels":                 "-label-column",
		"Damaged":                        "-damaged",
		"Dict":                           "-pretrained-dict",
		"DropClasses":                    "-drop-classes",
		"List":                           "-list",
		"ListFormat.Folder":              "-list-folder",
		"ListFormat.GroupColumn":         "-group-column",
		"ListFormat.LabelColumns":        "-label-column",
		"ListFormat.NameColumn":          "-image-column",
		"Masks":                          "-masks",
		"MultiLabel":                     "-multi-label",
		"Part":                           "-val",
		"Quality":                        "-quality",
		"ShardBytes":                     "-shard-size",
		"Shards":                         "-shards",
		"Side":                           "-side",
		"Transform.ApplyEXIFOrientation": "-upright",
		"Upright":                        "-upright",
		"WebDataset":                     "-webdataset",
		"Workers":                        "-workers",
	}[option]
}

func advised(err error, command string) string {
	text := err.Error()
	var damage *imageloader.ArchiveError
	if command != "inspect" && errors.As(err, &damage) && errors.Is(damage, io.ErrUnexpectedEOF) {
		text = strings.Replace(text, damage.Error(),
			fmt.Sprintf("%v (`torchstream inspect %s` lists what is readable)", damage, printable.Name(damage.File)), 1)
	}
	var bad *imageloader.SampleError
	if !errors.As(err, &bad) {
		return text
	}
	before, after, found := strings.Cut(text, bad.Error())
	if !found {
		return text
	}
	_, more, joined := strings.Cut(after, "\n") // separator of errors.Join
	if joined {
		more = "\n" + more
	}
	skip := ""
	if errors.As(err, &SkippableError{}) {
		skip = ", -bad-samples skip leaves them out"
	}
	return fmt.Sprintf("%s%v (`torchstream inspect -fix OUT.tgz %s` writes an archive without the bad "+
		"members%s)%s", before, bad, printable.Name(bad.File), skip, more)
}

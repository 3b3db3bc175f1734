package imageloader

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

var (
	// ErrClosed is returned by a Loader after Close, and by what was running when it was closed.
	ErrClosed = errors.New("imageloader: the loader is closed")
	// ErrNoSamples means that an archive or an epoch has no sample to deliver.
	ErrNoSamples = errors.New("imageloader: no samples")
)

// BadSamplePolicy says what happens to a sample that can't be decoded. Whatever it is, the sample is counted and named in Stats and in the log, and all batches but the
// last have Options.BatchSize samples.
type BadSamplePolicy int

const (
	// Fail ends the epoch with a *SampleError, after the samples before it were delivered.
	Fail BadSamplePolicy = iota
	// Skip leaves the sample out: batches are what they would be if it were not in the archive.
	Skip
	// Substitute puts the previous good sample of the same batch in its place (the next one if there is none before), label included. An epoch so has the same
	// number of batches whatever is damaged. A batch without a single good sample is an error.
	Substitute
)

func (p BadSamplePolicy) String() string {
	switch p {
	case Fail:
		return "fail"
	case Skip:
		return "skip"
	case Substitute:
		return "substitute"
	}
	return "BadSamplePolicy(" + strconv.Itoa(int(p)) + ")"
}

// Reason says why a sample is bad.
type Reason string

// The reasons. Stats counts by them.
const (
	Damaged     Reason = "damaged"        // the image's bytes are cut off or corrupt
	Unsupported Reason = "unsupported"    // an image, but of a kind that is not handled
	NotImage    Reason = "not an image"   // none of the formats by its first bytes
	Empty       Reason = "empty"          // no bytes at all
	TooLarge    Reason = "too large"      // over Options.MaxSampleBytes or Options.MaxPixels
	NotRegular  Reason = "not a file"     // a link, device or pipe in the place of an image
	Sparse      Reason = "sparse storage" // stored by tar as a sparse file
	Rejected    Reason = "rejected"       // a Func of Transform.Ops returned an error
)

// SampleError is a bad sample: a member of the archive, in the directory of a class, that does not become an image.
type SampleError struct {
	File   string // the archive
	Name   string // the member
	Index  int    // the sample's index
	Reason Reason
	Err    error // details; may be nil
}

func (e *SampleError) Error() string {
	s := fmt.Sprintf("imageloader: %s: sample %d, %q: %s", e.File, e.Index, e.Name, e.Reason)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

func (e *SampleError) Unwrap() error { return e.Err }

// advice is added to the error of the policy Fail.
const advice = "(remove the member from the archive, or set Options.BadSamples to Skip or Substitute)"

// failedSample is a *SampleError under the policy Fail: it also says what to do.
type failedSample struct{ *SampleError }

func (e failedSample) Error() string { return e.SampleError.Error() + " " + advice }
func (e failedSample) Unwrap() error { return e.SampleError }

// ArchiveError is damage to the archive itself: what follows can't be read. Samples before it were delivered.
type ArchiveError struct {
	File     string
	Member   string // the last member whose header was read; "" if none was
	Position int    // how many members that is
	Offset   int64  // in the (uncompressed) tar stream
	Err      error
}

func (e *ArchiveError) Error() string {
	if e.Position == 0 {
		return fmt.Sprintf("imageloader: %s: %v", e.File, e.Err)
	}
	return fmt.Sprintf("imageloader: %s: at or after member %d, %q, byte %d of the tar stream: %v", e.File, e.Position, e.Member, e.Offset, e.Err)
}

func (e *ArchiveError) Unwrap() error { return e.Err }

// UnknownClassError is an image in a directory that is none of Options.Classes.
type UnknownClassError struct {
	File  string
	Name  string // the member
	Class string // the directory
	Known []string
}

func (e *UnknownClassError) Error() string {
	const show = 10
	known := strings.Join(e.Known[:min(show, len(e.Known))], ", ")
	if len(e.Known) > show {
		known += fmt.Sprintf(", ... (%d in all)", len(e.Known))
	}
	return fmt.Sprintf("imageloader: %s: %q is of class %q, which is not one of the expected classes: %s", e.File, e.Name, e.Class, known)
}

package cuda

import (
	"io"
	"os"
	"regexp"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/racecheck"
)

// Finding is a defect that a [Sanitizer] has found, at one pair of places in the program. Its
// String is a report of several lines, and it marshals to JSON.
type Finding = racecheck.Finding

// FindingKind is the kind of a Finding.
type FindingKind = racecheck.Kind

// Kinds of findings.
const (
	// FindingRace is an access that nothing orders after an earlier access to the same bytes. At
	// least one of the two accesses is a write.
	FindingRace = racecheck.KindRace
	// FindingFreed is memory that is freed while a stream may still use it. The owner's stream is
	// not ordered after that use, and no RecordStream names the stream.
	FindingFreed = racecheck.KindFreed

	// The following kinds are notes: the program computes as written, but perhaps not as its author
	// intended.

	// FindingNotRecorded is a wait for an event that was never recorded. The wait returned
	// ErrNotRecorded.
	FindingNotRecorded = racecheck.KindNotRecorded
	// FindingEventNotAwaited is an event that was recorded and then closed, although nothing had
	// waited for it.
	FindingEventNotAwaited = racecheck.KindEventNotAwaited
	// FindingSharedStream is a stream that NewStream returned a second time.
	FindingSharedStream = racecheck.KindSharedStream
	// FindingPageable is a non-blocking copy that waits, because its host memory is not pinned.
	FindingPageable = racecheck.KindPageable
)

// SanitizerOptions are the options of [StartSanitizer]. The zero value writes nothing: see
// [Sanitizer.Findings].
type SanitizerOptions struct {
	// Output receives the text of each finding when it is found. Its Write must not use this
	// module.
	Output io.Writer
	// Dir is a folder that receives a text, a JSON file and a picture of each finding that is not a
	// note. StartSanitizer makes it if it does not exist.
	Dir string
	// Notes also writes notes to Output.
	Notes bool
	// MaxFindings is the maximum number of findings to report; 0 means 100.
	MaxFindings int
	// Ignore drops a finding if a function or a file:line of either stack matches. Use it, for
	// example, for tests that race on purpose. In the environment it is
	// TORCHSTREAM_SANITIZE_IGNORE.
	Ignore *regexp.Regexp
}

// Sanitizer checks a running program for missing order between streams: events, waits or the host
// must order conflicting accesses to the same memory, on all streams of all devices.
// docs/sanitizer.md describes its coverage. There is one per process, for all goroutines. If the
// environment variable TORCHSTREAM_SANITIZE is 1, a sanitizer starts with the program and writes
// its findings to standard error.
type Sanitizer struct {
	check   *racecheck.Checker
	running *capi.Sanitizer // nil: the environment started it
}

// StartSanitizer starts the process's sanitizer. It sees work that is queued from now on, so start
// it before the first use of a GPU. It returns [ErrInvalidArgument] while a sanitizer runs. Without
// a GPU there is nothing to find, and StartSanitizer returns no error.
func StartSanitizer(o SanitizerOptions) (*Sanitizer, error) {
	out := &racecheck.Output{Text: o.Output, Dir: o.Dir, Notes: o.Notes}
	if o.Dir != "" {
		if err := os.MkdirAll(o.Dir, 0o777); err != nil {
			return nil, err
		}
	}
	running, check, err := capi.StartSanitizer(racecheck.Options{Report: out.Write,
		MaxFindings: o.MaxFindings, Ignore: o.Ignore})
	if err != nil {
		return nil, checked(err)
	}
	return &Sanitizer{check, running}, nil
}

// RunningSanitizer returns the sanitizer that the environment, or StartSanitizer, has started, and
// nil if none runs. A test program can use it to fail on findings:
//
//	func TestMain(m *testing.M) {
//		code := m.Run()
//		if s := cuda.RunningSanitizer(); s != nil && s.Errors() > 0 {
//			code = 66
//		}
//		os.Exit(code)
//	}
func RunningSanitizer() *Sanitizer {
	check := capi.CurrentSanitizer()
	if check == nil {
		return nil
	}
	return &Sanitizer{check: check}
}

// Findings returns the findings so far, in the order in which they were found.
func (s *Sanitizer) Findings() []Finding {
	if s == nil {
		return nil
	}
	return s.check.Findings()
}

// Errors returns the number of findings that are not notes.
func (s *Sanitizer) Errors() (n int) {
	for _, f := range s.Findings() {
		if !f.Kind.Note() {
			n++
		}
	}
	return n
}

// Stop ends a sanitizer that StartSanitizer returned. Its findings stay. It does nothing for
// others.
func (s *Sanitizer) Stop() {
	if s != nil && s.running != nil {
		s.running.Stop()
	}
}

package distributed

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/control"
)

// Kinds of failure, for errors.Is.
var (
	// A rank's process has ended or no longer responds.
	ErrRankLost = errors.New("distributed: a rank is lost")
	// A collective did not end in time, or some ranks did not reach a barrier in time.
	ErrTimeout = errors.New("distributed: a collective did not end in time")
	// The ranks of a group called different collectives, or the same collective with different
	// operands.
	ErrMismatch = errors.New("distributed: ranks disagree")
	// A rank closed its group or cancelled its context while other ranks were still running.
	ErrLeft = errors.New("distributed: a rank has left")
	// The process is not a member of the group.
	ErrNotMember = errors.New("distributed: this rank is no member of the group")
	// The group is closed.
	ErrClosed = cuda.ErrClosed
)

// Error reports a call that failed because of the job, not because of its arguments. The job has
// then ended: every later call of a group fails on all ranks with the same reason.
type Error struct {
	Call  string // "AllReduce #18 at train.go:88", on this rank; "" before the first call
	Group string // "world", or a subgroup's name
	Rank  int    // this process's rank in the job
	// Culprit is the rank at fault, or -1 if unknown.
	Culprit int
	Err     error // the reason; errors.Is and errors.As unwrap it
}

func (e *Error) Error() string {
	call := e.Call
	if call == "" {
		call = "distributed.Init"
	}
	return fmt.Sprintf("distributed: rank %d: %s: %v", e.Rank, call, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

// verdict is the reason for the end of the job, as rank 0 sent it to all ranks.
type verdict struct{ *control.Verdict }

func (v verdict) Is(target error) bool {
	switch v.Kind {
	case control.Lost, control.Silent:
		return target == ErrRankLost
	case control.Timeout:
		return target == ErrTimeout
	case control.Mismatch:
		return target == ErrMismatch
	case control.Left, control.Aborted:
		return target == ErrLeft
	}
	return false
}

// known wraps the reason for the job's end in later errors, after one call has returned it. Its
// text is short, and leaves the reason out.
type known struct{ error }

func (known) Error() string { return "the job had failed before" }

func (k known) Unwrap() error { return k.error }

package distributed

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed/internal/control"
)

// Kinds of failure, for errors.Is.
var (
	// A rank's process has ended or no longer responds.
	ErrRankLost = errors.New("distributed: a rank is lost")
	// A collective did not end, or a barrier was not reached by all ranks, in time.
	ErrTimeout = errors.New("distributed: a collective did not end in time")
	// The ranks of a group called different things, or the same with other operands.
	ErrMismatch = errors.New("distributed: ranks disagree")
	// A rank closed its group or cancelled its context while other ranks were still running.
	ErrLeft = errors.New("distributed: a rank has left")
	// The process is not a member of the group.
	ErrNotMember = errors.New("distributed: this rank is no member of the group")
	// The group is closed.
	ErrClosed = cuda.ErrClosed
)

// Error reports a call that failed because of the job, not because of its arguments. It ends the
// job: every later call of a group fails on all ranks with the same reason.
type Error struct {
	Call  string // "AllReduce #18 at train.go:88", on this rank; "" before the first one
	Group string // "world", or a subgroup's name
	Rank  int    // of this process in the job
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

// verdict is the reason that rank 0 gave to all ranks.
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

// known is a reason that an earlier call has already returned.
type known struct{ error }

func (known) Error() string { return "the job had failed before" }

func (k known) Unwrap() error { return k.error }

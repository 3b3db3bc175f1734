package controlsim

import (
	"fmt"
	"slices"
	"time"

	"github.com/torchstream/torchstream/internal/control"
)

// This file is the model: how a job may end after a fault. It follows the failure rules in
// docs/distributed.md.

// FaultKind is a kind of fault.
type FaultKind int

// The kinds of faults. The first ones leave the job as it is.
const (
	None      FaultKind = iota
	Stranger            // another program connects to the hub, without the token or silent
	Kill                // the process ends
	Power               // the host loses power
	Stop                // the process is stopped for a while
	Freeze              // the host is, with its clock, as a virtual machine that migrates
	Cut                 // nothing passes between the host and rank 0's host for a while
	CutTo               // nothing reaches the host from rank 0's host
	CutFrom             // nothing reaches rank 0's host from the host
	Hang                // the program does not come to a collective
	Mismatch            // the program calls something else
	Leave               // the program closes its group early
	Abort               // the program ends the job
	Late                // the process starts late
	Duplicate           // another process has the same rank
	Stay                // the program does not close its group
	Break               // a collective of the program fails at once
	faultKinds
)

// Fault is a fault of a rank.
type Fault struct {
	Kind     FaultKind
	Rank     int
	At       time.Duration // since the start of the job
	For      time.Duration // of Stop, Freeze, Stranger and the cuts; of Late: how late; of Leave: the others compute
	Step     int           // of Hang, Mismatch, Leave, Abort and Break
	Phase    Phase         // of the rank when the fault happened
	Left     bool          // the hub knew before that the rank had left
	Needed   bool          // of Leave: the others wait for the rank
	Served   bool          // of Late: the hub was open for a while after the rank had connected
	Happened bool
}

// Phase is a part of a rank's life.
type Phase int

// The phases.
const (
	Joining Phase = iota
	Running
	Leaving // it has called Part
	Ended
)

// Limits are the options of a job.
type Limits struct {
	control.Options
	Timeout time.Duration
}

// End is how a rank's job ends: Kind is "" if it ends well.
type End struct {
	Kind control.Kind
	Rank int // -1: any
}

func (e End) matches(other End) bool {
	return e.Kind == other.Kind && (e.Kind == "" || e.Rank < 0 || e.Rank == other.Rank)
}

// unreachable is the end of a rank that found no hub.
const unreachable control.Kind = "unreachable"

// tooLate are the ends of a rank if the job has ended before the rank has found the hub, or before
// the hub has read its first message.
var tooLate = []End{{unreachable, -1}, {control.Lost, 0}}

// slack is the inaccuracy of clocks and messages.
const slack = 4 * time.Second

// Ends returns how the job of a rank may end, if f is the only fault.
func (l *Limits) Ends(f *Fault, rank int) []End {
	if !f.Happened {
		return []End{{}}
	}
	r := f.Rank
	if f.Left && rank != r && f.Kind <= CutFrom { // nobody needs the rank any more
		return []End{{}}
	}
	switch f.Kind {
	case Kill:
		return f.gone(control.Lost)
	case Power:
		return f.gone(control.Silent)
	case Stop, Freeze, Cut, CutTo, CutFrom:
		return l.away(f, rank)
	case Hang:
		return []End{{control.Timeout, r}}
	case Mismatch:
		return []End{{control.Mismatch, -1}}
	case Leave:
		return l.early(f)
	case Abort:
		return []End{{control.Aborted, r}}
	case Late:
		switch {
		case f.For < l.Timeout-2*slack:
			return []End{{}}
		case r == 0:
			return append([]End{{}, {control.Timeout, -1}}, tooLate...)
		case f.Served:
			return []End{{}, {control.Timeout, r}}
		}
		return append([]End{{}, {control.Timeout, r}}, tooLate...)
	case Stay, Break:
		return []End{{control.Timeout, r}}
	case Duplicate:
		ends := []End{{}}
		if f.Phase == Joining {
			ends = append(append(ends, tooLate...), End{control.Mismatch, r})
			ends = append(ends, End{control.Timeout, r}, End{control.Lost, r}) // the other process has the place
		}
		return ends
	}
	return []End{{}}
}

// early returns the ends after a rank has closed its group early. The others notice it when they
// wait for the rank, unless they compute for too long before.
func (l *Limits) early(f *Fault) (ends []End) {
	ends = []End{{}}
	if f.Needed {
		ends = []End{{control.Left, f.Rank}}
	}
	if f.For+2*slack > l.Timeout {
		ends = append(ends, End{control.Timeout, -1})
	}
	return ends
}

// joining returns more ends if not all ranks have joined.
func (f *Fault) joining() []End { return append([]End{{control.Timeout, f.Rank}}, tooLate...) }

// gone returns the ends after a rank has gone forever.
func (f *Fault) gone(kind control.Kind) []End {
	ends := []End{{kind, f.Rank}}
	switch f.Phase {
	case Joining:
		ends = append(ends, f.joining()...)
	case Leaving:
		ends = append(ends, End{})
	case Ended:
		ends = []End{{}}
	}
	return ends
}

// away returns the ends after a rank could not be heard for a while.
func (l *Limits) away(f *Fault, rank int) (ends []End) {
	short, long := l.Silence/3, l.Silence+2*slack
	if f.For < long || f.Phase != Running {
		ends = append(ends, End{})
	}
	if f.For < short && f.Phase != Ended {
		return []End{{}}
	}
	silent := End{control.Silent, f.Rank}
	cut := f.Kind == Cut || f.Kind == CutTo || f.Kind == CutFrom
	switch {
	case cut && rank == f.Rank: // it cannot know whether the fault is its own
		ends = append(ends, silent, End{control.Silent, 0}, End{control.Lost, 0})
	case f.Kind == CutTo: // the rank gives up, and its connection ends
		ends = append(ends, End{control.Lost, f.Rank}, silent)
	case cut:
		ends = append(ends, silent, End{control.Lost, f.Rank})
	case f.Kind == Freeze && rank == f.Rank: // it does not know that it was away
		ends = append(ends, End{}, silent, End{control.Lost, -1}, End{control.Silent, 0})
	default:
		ends = append(ends, silent)
	}
	ends = append(ends, l.expired(f, rank)...)
	if f.Phase == Joining {
		ends = append(ends, f.joining()...)
	}
	if f.Rank == 0 && (f.For < l.Silence*5/4+slack/2 || f.Kind == Freeze) { // a rank may give up shortly before the hub continues
		ends = append(ends, End{control.Lost, -1})
	}
	return ends
}

// expired returns more ends of rank 0 if the deadline of a message to itself may have passed while
// it was stopped.
func (l *Limits) expired(f *Fault, rank int) []End {
	if f.Kind == Stop && f.Rank == 0 && rank == 0 && f.For > l.Silence*7/8 {
		return []End{{control.Lost, 0}}
	}
	return nil
}

// overlap reports whether two ranks were away at the same time, so that perhaps nobody has noticed.
func overlap(faults []*Fault) bool {
	away := func(f *Fault) bool { return f.Happened && (f.Kind == Stop || f.Kind == Freeze) }
	return len(faults) == 2 && away(faults[0]) && away(faults[1]) && faults[0].Rank != faults[1].Rank &&
		faults[0].At < faults[1].At+faults[1].For && faults[1].At < faults[0].At+faults[0].For
}

// disturbs reports whether a fault may give a rank another end than the others.
func (f *Fault) disturbs(rank int) bool {
	return f.Kind > Stranger && f.Rank == rank && !f.Served
}

// Check compares the ends of the ranks that live with the faults.
func (l *Limits) Check(faults []*Fault, ends map[int]End, texts map[int]string) error {
	hub := slices.ContainsFunc(faults, func(f *Fault) bool { return f.Kind < Hang && f.disturbs(0) || f.Kind == Late && f.Rank == 0 })
	var first *int
	for rank, end := range sorted(ends) {
		var allowed []End
		for _, f := range faults {
			allowed = append(allowed, l.Ends(f, rank)...)
			if f.Kind == Late && f.Rank == rank && len(faults) > 1 && !f.Served { // the job may have ended
				allowed = append(allowed, tooLate...)
			}
		}
		if hub {
			allowed = append(allowed, silentAfterGivingUp(ends)...)
		}
		if overlap(faults) {
			allowed = append(allowed, End{})
		} else if len(faults) > 1 && slices.ContainsFunc(faults, func(f *Fault) bool {
			return !slices.Contains(l.Ends(f, rank), End{})
		}) {
			allowed = slices.DeleteFunc(allowed, func(e End) bool { return e.Kind == "" })
		}
		if !slices.ContainsFunc(allowed, func(e End) bool { return e.matches(end) }) {
			return fmt.Errorf("rank %d ends with %+v (%s), want one of %+v", rank, end, texts[rank], allowed)
		}
		if hub || slices.Contains(tooLate, end) ||
			slices.ContainsFunc(faults, func(f *Fault) bool { return f.disturbs(rank) }) {
			continue
		}
		if first == nil {
			first = &rank
		} else if texts[rank] != texts[*first] {
			return fmt.Errorf("rank %d ends with %q, want %q, as rank %d has it", rank, texts[rank], texts[*first], *first)
		}
	}
	return nil
}

// silentAfterGivingUp returns more ends if ranks have given rank 0 up shortly before it continued:
// they say nothing more.
func silentAfterGivingUp(ends map[int]End) (more []End) {
	for rank, end := range sorted(ends) {
		if end == (End{control.Silent, 0}) {
			more = append(more, End{control.Silent, rank})
		}
	}
	return more
}

// sorted iterates over a map by rank.
func sorted(ends map[int]End) func(yield func(int, End) bool) {
	return func(yield func(int, End) bool) {
		for rank := range 16 {
			if e, ok := ends[rank]; ok && !yield(rank, e) {
				return
			}
		}
	}
}

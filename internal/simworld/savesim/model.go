package savesim

import "slices"

// This file is the model: which checkpoint may be at a path. It follows the documentation of
// package checkpoint, and does not call it.

// Version numbers the checkpoints of a run from 1. 0 stands for no checkpoint.
type Version int

// Outcome is the end of a save.
type Outcome int

// The outcomes.
const (
	Pending Outcome = iota
	Saved           // the save returned no error: the checkpoint is on the disk
	Failed          // the save returned an error: the old checkpoint stays
	Unknown         // the process was killed, or the folder could not be synced
)

// save is one call that saves a checkpoint.
type save struct {
	version      Version
	began, ended int // numbers of events
	outcome      Outcome
	gone         bool // another version was seen afterwards, and the power has not failed since
}

// Model knows the saves to one path.
type Model struct {
	events int
	saves  []*save
}

// NewModel returns a model of a path without a file.
func NewModel() *Model { return &Model{saves: []*save{{outcome: Saved}}} }

func (m *Model) event() int {
	m.events++
	return m.events
}

// Start returns the version of a new save.
func (m *Model) Start() Version {
	v := Version(len(m.saves))
	m.saves = append(m.saves, &save{version: v, began: m.event()})
	return v
}

// End notes the end of a save.
func (m *Model) End(v Version, o Outcome) {
	s := m.saves[v]
	s.ended, s.outcome = m.event(), o
}

// PowerFails notes that the machine has lost power: a save whose success nobody was told may be
// undone or done now.
func (m *Model) PowerFails() {
	for _, s := range m.saves {
		s.gone = false
	}
}

// superseded reports whether a later save has succeeded.
func (m *Model) superseded(s *save) bool {
	return slices.ContainsFunc(m.saves, func(o *save) bool {
		return o.outcome == Saved && s.outcome != Pending && o.began > s.ended
	})
}

// Possible returns the versions that may be at the path now.
func (m *Model) Possible() (versions []Version) {
	for _, s := range m.saves {
		if s.outcome != Failed && !s.gone && !m.superseded(s) {
			versions = append(versions, s.version)
		}
	}
	return versions
}

// See notes that a version was read while nobody saved.
func (m *Model) See(v Version) {
	for _, s := range m.saves {
		s.gone = s.version != v
	}
}

// content returns the bytes first to first+n-1 of a tensor in a version.
func content(v Version, tensor, first, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		at := first + i
		b[i] = byte(int(v)*31 + tensor*7 + at*13 + at>>8)
	}
	return b
}

// divide returns the first element of each rank's part of n elements, and n.
func divide(n, ranks int) []int64 {
	first := make([]int64, ranks+1)
	for r := range ranks + 1 {
		first[r] = int64(n * r / ranks)
	}
	return first
}

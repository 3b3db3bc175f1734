package devplan

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/torchstream/torchstream/internal/decodeplan"
)

// Draw identifies one occurrence of a sample in an epoch. Together with the sample's index it seeds
// the sample's random choices.
type Draw struct {
	Epoch int    // round over the archive: the epoch, unless Options.Repeat is set
	Again uint64 // differs between the occurrences of a sample in an epoch
}

// Redo holds the data that decoding a row again needs, in addition to the row's Sample.
type Redo struct {
	Size     int64 // size of the file in bytes
	Draw     Draw
	Inflated bool    // the consumer has inflated the image
	Read     bool    // the consumer has read the image's part of its file
	Searched bool    // the consumer has searched the image for entry points
	Search   *Search // for KeepFound; nil if nothing is to be stored
	// File is the file's content if the archive has no random access, and otherwise "". It is in
	// Go's heap, because it may outlive the epoch.
	File string

	Substitute bool // the row replaces a bad sample and is a copy of another row
}

// Placed describes the source of a row's pixels.
type Placed struct {
	decodeplan.Row // empty if the host decodes the pixels
	Redo           Redo
	// Lost says that the sample was moved to a slot without room for its plan. The host then has to
	// decode the image again.
	Lost bool
}

// Staging is a slot's memory for plans. Workers write to it concurrently, each to a different row.
type Staging struct {
	Rows  []Placed
	plans *decodeplan.Plans
	used  atomic.Uint64
	rooms atomic.Uint64 // device memory of all inflated members, in bytes
}

// NewStaging returns the staging for a batch of size rows, in the memory that a consumer has lent.
// It returns nil if the consumer lends none.
func NewStaging(plans *decodeplan.Plans, size int) (*Staging, error) {
	if plans == nil {
		return nil, nil
	}
	if len(plans.Rows) < size || uintptr(unsafe.Pointer(unsafe.SliceData(plans.Memory)))%decodeplan.Align != 0 {
		return nil, fmt.Errorf("imageloader: the lent memory for plans has %d rows, not %d, or is not "+
			"aligned to %d bytes", len(plans.Rows), size, decodeplan.Align)
	}
	return &Staging{plans: plans, Rows: make([]Placed, size)}, nil
}

// Of returns the staging for a row's plan. It returns nil if the host has to decode the row.
func (s *Staging) Of(row int) *Staging {
	if s == nil || row%decodeplan.Group < s.plans.HostRows {
		return nil
	}
	return s
}

// Inflates reports whether the consumer inflates members.
func (s *Staging) Inflates() bool { return s != nil && s.plans.Rooms > 0 }

// reserve reserves memory for a row's data. It returns the memory, and the row with its position in
// the memory. fits is false if there is no room.
func (s *Staging) reserve(row decodeplan.Row) (to []byte, at decodeplan.Row, fits bool) {
	begin, fits := reserve(&s.used, decodeplan.Aligned(row.Span()), len(s.plans.Memory))
	if fits && row.Member.InputBytes > 0 {
		_, fits = reserve(&s.rooms, row.Member.Room(), s.plans.Rooms)
	}
	if !fits {
		return nil, decodeplan.Row{}, false
	}
	row.At = begin
	return s.plans.Memory[begin:][:row.Span()], row, true
}

// reserve adds bytes to used, unless the sum would exceed the maximum. It returns the previous
// value of used.
func reserve(used *atomic.Uint64, bytes, maximum int) (before int, fits bool) {
	for {
		at := used.Load()
		if at+uint64(bytes) > uint64(maximum) {
			return 0, false
		}
		if used.CompareAndSwap(at, at+uint64(bytes)) {
			return int(at), true
		}
	}
}

// move copies the data of another slot's row to s. It returns false if there is no room.
func (s *Staging) move(from *Staging, row decodeplan.Row) (decodeplan.Row, bool) {
	to, moved, fits := s.reserve(row)
	copy(to, from.plans.Memory[row.At:][:row.Span()])
	return moved, fits
}

// Take copies the plan of from.Rows[fromRow] to s.Rows[row].
func (s *Staging) Take(row int, from *Staging, fromRow int) {
	r := from.Rows[fromRow]
	// Rows may share a plan. They cannot share a member or a part of a file, because each of these
	// is read and checked for one image.
	if r.Bytes > 0 && (from != s || r.Member.InputBytes > 0 || r.File.From != nil) {
		var fits bool
		r.Row, fits = s.move(from, r.Row)
		r.Lost = !fits
	}
	s.Rows[row] = r
}

// Exchange copies the plan of from.Rows[fromRow] to to.Rows[row]. If both is set, it swaps the two
// plans instead. It does nothing if the slots have no staging.
func Exchange(to *Staging, row int, from *Staging, fromRow int, both bool) {
	if to == nil {
		return
	}
	before := to.Rows[row]
	if both && to == from {
		to.Rows[row], to.Rows[fromRow] = to.Rows[fromRow], before
		return
	}
	to.Take(row, from, fromRow)
	if !both {
		return
	}
	if before.Bytes > 0 { // its memory in to is unchanged
		var fits bool
		before.Row, fits = from.move(to, before.Row)
		before.Lost = !fits
	}
	from.Rows[fromRow] = before
}

// Publish writes the first n rows to the consumer's plans. It returns the data needed to decode the
// rows again.
func (s *Staging) Publish(n int) []Redo {
	clear(s.plans.Rows)
	redos := make([]Redo, n)
	for row := range s.Rows[:n] {
		s.plans.Rows[row] = s.Rows[row].Row
		redos[row] = s.Rows[row].Redo
	}
	s.plans.Used = int(s.used.Load())
	return redos
}

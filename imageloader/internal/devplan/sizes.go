package devplan

import (
	"math"

	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
)

// Sizes for PlanBytes and MemberBytes, in bytes. A plan contains the crop's share of the file, a
// few kilobytes of tables, and the entry points.
const (
	typicalBytes  = 128 << 10 // assumed size of a file while the sizes are unknown
	typicalWindow = 48 << 10  // assumed size of a window and the data from a checkpoint to its member
	planTables    = 8 << 10
	minPlanBytes  = 1 << 20
	maxPlanBytes  = 256 << 20
)

// spread sums up sizes in bytes: their number, their sum, and the sum of their squares.
type spread struct {
	n, sum  int64
	squares float64
}

func (s *spread) add(bytes int64) {
	s.n++
	s.sum += bytes
	s.squares += float64(bytes) * float64(bytes)
}

// ofBatch returns the memory for a batch of samples whose sizes have this spread. It is the mean
// size of a random batch plus four standard deviations, within the limits of a slot's memory.
func (s *spread) ofBatch(size int) int {
	batch, mean := float64(size), float64(s.sum)/float64(s.n)
	deviation := math.Sqrt(batch * max(0, s.squares/float64(s.n)-mean*mean))
	return decodeplan.Aligned(int(min(max(batch*mean+4*deviation, minPlanBytes), maxPlanBytes)))
}

// PlanBytes returns the memory for the plans of one batch of an index's samples. The index may be
// nil. scans says that images without entry points are planned too.
func PlanBytes(x *index.Index, batch int, scans bool) int {
	// A plan has at most the whole file, and with scans room for the entry points that a GPU finds.
	size := func(file int64) int64 {
		if !scans {
			return file + planTables
		}
		return file + file/2 + planTables
	}
	var sizes spread
	if x == nil || x.Len() == 0 {
		sizes.add(size(typicalBytes))
		return sizes.ofBatch(batch)
	}
	for i := 0; i < x.Len(); i += 1 + x.Len()/1000 {
		sizes.add(size(x.Size(i)))
	}
	return sizes.ofBatch(batch)
}

// MemberBytes returns two sizes for a batch whose members the device inflates: the memory for the
// plans, and the device memory for the inflated members. Both are 0 if the host inflates all
// members, because none is in a .tgz or deflated in a zip, or because they are kept in memory. If x
// is nil, the kind of the archive is not known yet, and MemberBytes assumes a .tgz of typical
// images.
func MemberBytes(x *index.Index, batch int) (staging, rooms int) {
	if x == nil {
		in, out := spread{}, spread{}
		in.add(typicalBytes + planTables)
		out.add(typicalBytes + typicalWindow)
		return in.ofBatch(batch), out.ofBatch(batch)
	}
	var inputs, outputs spread
	members := 0
	for i := 0; i < x.Len(); i += 1 + x.Len()/1000 {
		size := x.Size(i)
		at, ok := packed(x, i, index.Inflated{End: math.MaxInt64})
		if !ok {
			inputs.add(size + planTables) // the plan contains the data
			outputs.add(0)
			continue
		}
		members++
		// The end of the compressed bytes is unknown. Compressed data is no larger than the
		// inflated data, except for a few block headers.
		m := decodeplan.Member{Skip: at.Skip, Bytes: at.Lead + int(size)}
		inputs.add(int64(min(at.Input, m.Skip+m.Bytes)+at.Window) + planTables)
		outputs.add(int64(m.Room()))
	}
	if members == 0 {
		return 0, 0
	}
	return inputs.ofBatch(batch), outputs.ofBatch(batch)
}

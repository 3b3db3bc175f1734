package devplan

import (
	"math"

	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
)

// Sizes for PlanBytes and MemberBytes, in bytes. A plan has the crop's share of the file, a few
// kilobytes of tables, and the entry points.
const (
	typicalBytes  = 128 << 10 // of a file, while they are not known
	typicalWindow = 48 << 10  // a window, and the bytes from a checkpoint to its member
	planTables    = 8 << 10
	minPlanBytes  = 1 << 20
	maxPlanBytes  = 256 << 20
)

// spread has the sums of numbers of bytes, and of their squares.
type spread struct {
	n, sum  int64
	squares float64
}

func (s *spread) add(bytes int64) {
	s.n++
	s.sum += bytes
	s.squares += float64(bytes) * float64(bytes)
}

// ofBatch returns the memory for a batch of samples with this spread: the mean sum of a random
// batch, and four standard deviations, within the bounds of a slot's memory.
func (s *spread) ofBatch(size int) int {
	batch, mean := float64(size), float64(s.sum)/float64(s.n)
	deviation := math.Sqrt(batch * max(0, s.squares/float64(s.n)-mean*mean))
	return decodeplan.Aligned(int(min(max(batch*mean+4*deviation, minPlanBytes), maxPlanBytes)))
}

// PlanBytes returns the memory for the plans of a batch of an index's samples. The index may be
// nil. scans says that images without entry points are planned too.
func PlanBytes(x *index.Index, batch int, scans bool) int {
	// A plan has about a crop's share of the file, or all of it, with the entry points that a GPU
	// finds.
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

// MemberBytes returns the memory for the plans of a batch whose members the device inflates, and
// the device memory that the members are inflated into. Both are 0 if the host inflates all
// members: those of an archive that is not a .tgz or that is kept in memory. A nil index may become
// a .tgz's.
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
		at, ok := packed(x, i, math.MaxInt64)
		if !ok {
			inputs.add(size + planTables) // the plan has its data
			outputs.add(0)
			continue
		}
		members++
		// The place where the compressed bytes end is not known. Compressors make no more of them
		// than of output, except for a few headers of blocks.
		m := decodeplan.Member{Skip: at.Skip, Bytes: at.Lead + int(size)}
		inputs.add(int64(min(at.Input, m.Skip+m.Bytes)+at.Window) + planTables)
		outputs.add(int64(m.Room()))
	}
	if members == 0 {
		return 0, 0
	}
	return inputs.ofBatch(batch), outputs.ofBatch(batch)
}

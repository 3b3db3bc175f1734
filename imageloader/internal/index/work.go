package index

import "github.com/torchstream/torchstream/imageloader/internal/archive"

// workMeter measures the cost of reading samples in any order. Samples and marks must be passed in
// the archive's order.
type workMeter struct {
	shards []shard
	next   func() (shard int, output int64, ok bool) // the next mark

	begun     bool
	shard     int // shard of the next mark
	output    int64
	left      bool  // there is a next mark
	from      int64 // output offset of the last mark before the current sample
	fromShard int
	stream    bool // a sample has no mark before it

	inflated, wanted float64 // bytes
	samples          float64
}

func (w *workMeter) sample(r *record) {
	if r.kind != archive.Regular || r.size == 0 {
		return
	}
	w.samples++
	w.wanted += float64(r.size)
	w.inflated += float64(r.size)
	begin := max(0, r.offset-archive.BlockBytes) // includes the sample's header, which is read too
	switch w.shards[r.shard].format {
	case archive.TarGzip, archive.TarZstd:
	case archive.Parquet:
		if r.flags&recordStored != 0 {
			return
		}
		begin = r.offset
	default:
		return
	}
	if !w.begun {
		w.begun, w.fromShard = true, -1
		w.shard, w.output, w.left = w.next()
	}
	for w.left && (w.shard < int(r.shard) || w.shard == int(r.shard) && w.output <= begin) {
		w.fromShard, w.from = w.shard, w.output
		w.shard, w.output, w.left = w.next()
	}
	if w.fromShard != int(r.shard) {
		w.stream = true
		return
	}
	w.inflated += float64(max(0, r.offset-w.from))
}

// work returns the average number of bytes to read or inflate for each byte of a sample, or 0 if
// the archive can only be read in its own order.
func (w *workMeter) work() float64 {
	switch {
	case w.stream:
		return 0
	case w.wanted == 0:
		return 1
	}
	return w.inflated / w.wanted
}

// cost returns the cost of reading the samples in any order.
func (w *workMeter) cost() readCost {
	return readCost{work: w.work(), reach: w.inflated / max(1, w.samples)}
}

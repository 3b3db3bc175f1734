package imageloader

import (
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// A consumer decodes no progressive JPEG: its coefficients are spread over scans that depend on
// each other. So the first worker that meets one writes it as a baseline JPEG with the same
// coefficients, and notes entry points into that. Both stay in memory, and every later plan of the
// image is made from them, without a read of the archive.
//
// Neither is ever stored outside of the process, so no index can forge them. A worker has made them
// from bytes that have passed the checks of every sample that is read, and only for an image that
// libjpeg-turbo decodes without a warning. The proof of the entry points covers both each time that
// they are used.

// transcodedSpacing is the number of MCUs between two entry points of a baseline copy. They take
// about 1 % of a photograph's size.
const transcodedSpacing = 8

// transcoded is the baseline copy of a progressive JPEG.
type transcoded struct {
	info  imagecapi.Info // of the file
	data  []byte
	blob  []byte // the entry points of data
	proof uint64
}

// transcodes has the baseline copies of an index's progressive JPEGs. Several goroutines use it.
type transcodes struct {
	kept    []atomic.Pointer[transcoded]
	refused sampleBits // images that have no copy
	max     int64
	used    atomic.Int64 // bytes of all copies

	mu     sync.Mutex
	memory *arena.Arena
	freed  bool
}

func newTranscodes(samples int, maxBytes int64) *transcodes {
	return &transcodes{kept: make([]atomic.Pointer[transcoded], samples), refused: newSampleBits(samples), max: maxBytes, memory: arena.New()}
}

// wants reports whether a copy of sample i, whose file has so many bytes, can be made and kept.
func (t *transcodes) wants(i, bytes int) bool {
	return bytes <= maxPlanned && !t.refused.has(i) && t.used.Load()+int64(bytes) <= t.max
}

// keep keeps the copy of sample i in memory of its own, unless there is one already. It returns the
// copy that is kept, or nil if there is no room: none is wanted again then.
func (t *transcodes) keep(i int, made *transcoded) *transcoded {
	t.mu.Lock()
	defer t.mu.Unlock()
	if before := t.kept[i].Load(); before != nil {
		return before
	}
	bytes := int64(len(made.data) + len(made.blob))
	if t.freed || t.used.Load()+bytes > t.max {
		t.refused.set(i)
		return nil
	}
	t.used.Add(bytes)
	made.data, made.blob = t.memory.Clone(made.data), t.memory.Clone(made.blob)
	t.kept[i].Store(made)
	return made
}

// transcodesOf returns the baseline copies of the index's images.
func (p *entryPoints) transcodesOf(maxBytes int64) *transcodes {
	if t := p.transcodes.Load(); t != nil {
		return t
	}
	p.transcodes.CompareAndSwap(nil, newTranscodes(len(p.proofs), maxBytes))
	return p.transcodes.Load()
}

// transcodedBytes returns the memory of all baseline copies.
func (p *entryPoints) transcodedBytes() int64 {
	if t := p.transcodes.Load(); t != nil {
		return t.used.Load()
	}
	return 0
}

// freeTranscodes frees the memory of all baseline copies, which no pass may be using.
func (p *entryPoints) freeTranscodes() {
	t := p.transcodes.Load()
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.freed = true
	for i := range t.kept {
		t.kept[i].Store(nil)
	}
	t.memory.Free()
	t.used.Store(0)
}

// transcoded returns the baseline copy of sample i, or nil if there is none.
func (b *workerEntryPoints) transcoded(i int) *transcoded {
	if b == nil {
		return nil
	}
	t := b.points.transcodes.Load()
	if t == nil {
		return nil
	}
	return t.kept[i].Load()
}

// transcode makes the baseline copy of a job's progressive JPEG. It returns nil if the image has
// none, or no room, or if only the host decodes it.
func (w *worker) transcode(j *job, info *imagecapi.Info) *transcoded {
	b, maxBytes, i := w.points, w.p.l.o.MaxTranscodedBytes, j.sample.Index
	d, ok := b.d.(planDecoder)
	if !ok || w.geometry.DCTScaling || int64(len(j.data)) > maxBytes {
		return nil
	}
	all := b.points.transcodesOf(maxBytes)
	if !all.wants(i, len(j.data)) {
		return nil
	}
	// A copy that is much larger than its file is not worth its memory.
	if need := len(j.data) + len(j.data)/2 + 4<<10; len(b.baseline) < need {
		b.baseline = make([]byte, need)
	}
	n, err := d.Transcode(j.data, b.baseline)
	if err != nil || n == 0 { // the host says what is wrong with the image
		all.refused.set(i)
		return nil
	}
	made := &transcoded{info: *info, data: b.baseline[:n]}
	n, made.proof, err = d.MakeEntryPoints(made.data, transcodedSpacing, b.buffer)
	if err == nil && n > len(b.buffer) {
		b.buffer = make([]byte, 2*n)
		n, made.proof, err = d.MakeEntryPoints(made.data, transcodedSpacing, b.buffer)
	}
	if err != nil || n == 0 {
		all.refused.set(i)
		return nil
	}
	w.counted.EntriesMade++ // Stats counts those that go into the index
	made.blob = b.buffer[:n]
	return all.keep(i, made)
}

// planTranscoded writes the plan of an image from its baseline copy, as plan does from a file.
func (b *workerEntryPoints) planTranscoded(t *transcoded, g *imagecapi.Geometry, ops []imagecapi.AugmentOp, to *staging) decodeplan.Row {
	d, ok := b.d.(planDecoder)
	if !ok {
		return decodeplan.Row{}
	}
	b.blob = nil                                        // a later pass needs no head of the file
	defer runtime.KeepAlive(b.points.transcodes.Load()) // in whose memory the copy lies
	b.proof = t.proof
	return b.append(d, t.data, g, t.blob, &b.proof, ops, to)
}

// planProgressive writes the plan of a job's progressive JPEG. The row has no bytes if the host has
// to decode it.
func (w *worker) planProgressive(j *job, info *imagecapi.Info, ops []imagecapi.AugmentOp) decodeplan.Row {
	t := w.points.transcoded(j.sample.Index)
	if t == nil {
		t = w.transcode(j, info)
	}
	if t == nil {
		return decodeplan.Row{}
	}
	return w.points.planTranscoded(t, &w.geometry, ops, j.staging)
}

// planTranscoded plans a job's image from its baseline copy, which stands for the file. It returns
// false if there is none, or the workers have to decode the image.
func (q *planner) planTranscoded(j *job) bool {
	t := q.w.points.transcoded(j.sample.Index)
	if t == nil || q.w.p.l.judge.header(&j.sample, &t.info) != nil || q.w.draw(j, &t.info) != nil {
		return false
	}
	ops, ok := q.w.operations()
	if !ok {
		return false
	}
	row := q.w.points.planTranscoded(t, &q.w.geometry, ops, j.staging)
	if row.Bytes == 0 {
		return false
	}
	j.staging.rows[j.row] = rowPlan{Row: row, repeat: repeat{size: j.size, epoch: j.epoch, again: j.again}}
	if q.w.crops(&t.info) {
		q.cropped++
	}
	return true
}

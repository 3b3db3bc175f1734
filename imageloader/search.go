package imageloader

import (
	"bytes"
	"sync"

	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// A consumer that decodes images from plans also takes an image whose entry points are not known,
// or were not compared with it: its plan has the whole scan, in which the consumer finds the entry
// points. It hands them back (KeepEntryPoints), so that later epochs, and later processes, plan
// from them. A batch is composed before the consumer has seen the image, so only an image gets such
// a plan that is good whatever its scan has (imagecapi.PlanScan). What the consumer flags is
// damaged, or odd: DecodeRow decodes it, and the workers have it from then on.

// search is what it takes to keep the entry points that a consumer finds in a file.
type search struct {
	imagecapi.Search
	head *jpegHead // nil: none is kept
}

// searches has the images of an index that the consumer does not search for entry points. Several
// goroutines use it.
type searches struct {
	of      *index.Index
	refused sampleBits
}

func newSearches(of *index.Index, samples int) *searches {
	return &searches{of: of, refused: newSampleBits(samples)}
}

// refuse leaves sample i to the workers, unless its entry points are known.
func (s *searches) refuse(i int) { s.refused.set(i) }

// allowed reports whether sample i may be searched.
func (s *searches) allowed(i int) bool {
	return s != nil && !s.refused.has(i)
}

// searches returns what the consumer searches of an index, or nil: under Refuse damage in the scan
// makes an image bad, which the loader has to know before it composes a batch.
func (l *Loader) searches(x *index.Index) *searches {
	if x == nil || l.o.Damaged == Refuse {
		return nil
	}
	for {
		s := l.searched.Load()
		if s != nil && s.of == x {
			return s
		}
		if l.searched.CompareAndSwap(s, newSearches(x, x.Len())) {
			return l.searched.Load()
		}
	}
}

// EntryBytes implements decodeplan.Planner.
func (p *devicePlanner) EntryBytes() int {
	l := (*Loader)(p)
	bytes, err := p.PlanBytes()
	if err != nil || l.o.Damaged == Refuse || !l.keepsEntryPoints() {
		return 0
	}
	return decodeplan.Aligned(bytes / 4)
}

// KeepEntryPoints keeps what a consumer of FillPlans has found in the images of some rows of a
// batch, whose info it has and which it has not flagged: for each row Found bytes
// (decodeplan.Row). From then on the images are planned by their entry points. They go into the
// index, unless that has others already, and are those that Fill would have made. Several
// goroutines may call it. A closed loader ignores it.
func (p *devicePlanner) KeepEntryPoints(info any, rows []int, found [][]byte) {
	l := (*Loader)(p)
	batch, ok := info.(Info)
	if !ok || len(found) != len(rows) {
		return
	}
	if !l.begin() {
		return
	}
	defer l.running.Done()
	points := l.entryPoints(batch.known)
	if points == nil {
		return
	}
	// The consumer waits, and has more to do. 7 us an image are 2 ms of a batch.
	var all sync.WaitGroup
	for first := 0; first < len(rows); first += keptAtOnce {
		end := min(first+keptAtOnce, len(rows))
		all.Go(func() {
			for k := first; k < end; k++ {
				l.keepRow(points, &batch, rows[k], found[k])
			}
		})
	}
	all.Wait()
}

// keptAtOnce is the number of rows whose entry points one goroutine keeps.
const keptAtOnce = 32

// keepRow keeps what a consumer has found in the image of a row.
func (l *Loader) keepRow(points *entryPoints, batch *Info, row int, found []byte) {
	if row < 0 || row >= len(batch.repeats) || batch.repeats[row].search == nil {
		return
	}
	i := batch.Samples[row].Index
	made, others := points.keepFound(i, batch.repeats[row].search, found)
	if made {
		l.counters.entriesMade.Add(1)
	}
	if others { // a worker compares them with the image, as in a pass without plans
		l.searches(batch.known).refuse(i)
	}
}

// packing has the memory that entry points are packed in.
type packing struct{ blob, before []byte }

// keepFound keeps the entry points that were found in sample i. made reports that they are new,
// others that there are different ones.
func (p *entryPoints) keepFound(i int, search *search, found []byte) (made, others bool) {
	f, _ := p.packings.Get().(*packing)
	if f == nil {
		f = new(packing)
	}
	defer p.packings.Put(f)
	n, proof, err := imagecapi.PackEntries(&search.Search, found, f.blob)
	if err == nil && n > len(f.blob) {
		f.blob = make([]byte, 2*n)
		n, proof, err = imagecapi.PackEntries(&search.Search, found, f.blob)
	}
	if err != nil || n == 0 || n > len(f.blob) { // the image has none
		return false, false
	}
	before := p.blob(i, f.before)
	f.before = before[:cap(before)]
	if len(before) == 0 {
		if !p.store.KeepEntryPoints(i, f.blob[:n]) { // they are found again in a later epoch
			return false, false
		}
	} else if !bytes.Equal(before, f.blob[:n]) {
		return false, true
	}
	// A batch may have a sample twice.
	made = p.proofs[i].Swap(proof) == 0 && len(before) == 0
	if search.head != nil {
		p.headsOf().put(i, search.head, f.blob[:n])
	}
	return made, false
}

// planScan writes the plan of a job's image whose entry points are not known, and returns false if
// the workers have to decode it.
func (w *worker) planScan(j *job, info *imagecapi.Info) bool {
	d, ok := w.d.(planDecoder)
	if !ok || info.Format != imagecapi.JPEG || info.Progressive {
		return false
	}
	ops, ok := w.operations()
	if !ok {
		return false
	}
	again := repeat{size: j.size, epoch: j.epoch, again: j.again, searched: true}
	var wanted *imagecapi.Search
	if w.points != nil {
		again.search = new(search)
		wanted = &again.search.Search
	}
	s := j.staging
	var row decodeplan.Row
	if len(ops) > 0 {
		row = w.planScanAugmented(d, j.data, ops, wanted, s)
	} else if at, n, err := d.AppendScan(j.data, &w.geometry, s.plans.Memory, &s.used, wanted); err == nil {
		row = decodeplan.Row{At: at, Bytes: n}
	}
	if row.Bytes == 0 { // the host says what is wrong with the image, if anything is
		return false
	}
	if wanted != nil && wanted.Wanted != 0 {
		row.Found = wanted.FoundBytes()
		if h := w.headsFor(j); h != nil && j.inflated.End > 0 {
			again.search.head = h.make(j.data, info, j.inflated)
		}
	}
	s.rows[j.row] = rowPlan{Row: row, repeat: again}
	return true
}

// planScanAugmented is planScan for a sample with operations.
func (w *worker) planScanAugmented(d planDecoder, data []byte, ops []imagecapi.AugmentOp, search *imagecapi.Search, to *staging) decodeplan.Row {
	for {
		n, err := d.PlanScan(data, &w.geometry, ops, search, w.plans)
		if err != nil || n == 0 {
			return decodeplan.Row{}
		}
		if n <= len(w.plans) {
			memory, row, _ := to.reserve(decodeplan.Row{Bytes: n})
			copy(memory, w.plans)
			return row
		}
		w.plans = alignedBytes(2 * n)
	}
}

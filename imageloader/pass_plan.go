package imageloader

import (
	"fmt"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/index"
)

// maxPlanned is the maximum size of a file that fetch plans, in bytes. Its memory is not counted by
// the pass's budget: each goroutine has so much for its current file, and no more.
const maxPlanned = 1 << 20

// planner reads samples and plans their images, in the goroutine that fetches: a file stays in the
// cache of one core from the copy of its bytes to that of the crop's segments, and no other
// goroutine is woken for it. It leaves every image that it can't plan to the workers, who judge
// images. One goroutine uses it.
type planner struct {
	w worker
	// searches has what the consumer searches for entry points; nil: nothing.
	searches *searches
	r        *index.Reader
	good     []int         // positions of the samples that are planned since begin
	bytes    int64         // of these samples
	cropped  int64         // of these images
	read     time.Duration // in the present group
	waited   time.Duration // of r, before the present group
	idle     time.Time     // when the last group ended
	began    time.Time     // when the present group began
	pieces   []uint64      // digests of a part that was read; reused
}

// fetchPlans reports whether fetch plans images. Masks, and what takes the place of a label, are
// the workers'.
func (p *pass) fetchPlans() bool {
	o := &p.l.o
	return p.plans && p.known != nil && p.known.Random() && o.Target == nil && !o.MultiLabel && !o.Masks.masked()
}

// newPlanner returns nil if fetch does not plan.
func (p *pass) newPlanner(r *index.Reader) (*planner, error) {
	o := &p.l.o
	if !p.fetchPlans() {
		return nil, nil
	}
	d, err := newDecoder(p.l.codec, o.MaxPixels, o.Damaged)
	if err != nil {
		return nil, fmt.Errorf("imageloader: no decoder: %w", err)
	}
	points := p.l.entryPoints(p.known).forWorker(d)
	searches := p.l.searches(p.known)
	if points == nil && searches == nil {
		d.Close()
		return nil, nil
	}
	plan := &planner{w: worker{p: p, d: d, points: points}, searches: searches, r: r, good: make([]int, 0, maxGroup), idle: time.Now()}
	plan.w.reset()
	if plan.w.augmenter, err = p.l.plan.NewAugmenter(); err != nil {
		d.Close()
		return nil, fmt.Errorf("imageloader: no augmenter: %w", err)
	}
	return plan, nil
}

// close frees the planner's memory outside of Go.
func (q *planner) close() {
	if q != nil {
		q.w.augmenter.Close()
		q.w.d.Close()
	}
}

// begin begins a group of jobs.
func (q *planner) begin() {
	if q != nil {
		q.began, q.waited = time.Now(), q.r.FileTime()
		q.w.p.l.counters.waitData.Add(int64(q.began.Sub(q.idle)))
	}
}

// try reads a job's sample and plans its image. It returns false if the job is to be fetched and
// decoded.
func (q *planner) try(j *job) bool {
	if q == nil {
		return false
	}
	if q.plan(j) {
		q.good = append(q.good, j.position)
		q.bytes += j.size
		return true
	}
	// Handing the job on may wait for a worker.
	q.resolve()
	return false
}

func (q *planner) plan(j *job) bool {
	if j.bad != nil || j.staging == nil || j.size > maxPlanned {
		return false
	}
	if q.planTranscoded(j) {
		return true
	}
	search := !q.w.points.plannable(j.sample.Index)
	if search && !q.searches.allowed(j.sample.Index) {
		return false
	}
	if !search && (q.planMember(j) || q.planPart(j)) {
		return true
	}
	began := time.Now()
	data, err := q.r.Content(j.sample.Index)
	q.read += time.Since(began)
	if err != nil || codec.Sniff(data) == "" {
		return false
	}
	info, err := q.w.d.Header(data)
	if err != nil || q.w.p.l.judge.header(&j.sample, &info) != nil || q.w.draw(j, &info) != nil {
		return false
	}
	j.data, j.inflated = data, q.r.Inflated(j.sample.Index)
	planned := false
	if search {
		planned = q.w.planScan(j, &info)
	} else if planned = q.w.plan(j, &info); planned {
		q.w.keepHead(j, &info)
		q.w.keepPieces(j, &info)
	}
	j.data = nil
	if planned && q.w.crops(&info) {
		q.cropped++
	}
	return planned
}

// end ends a group of jobs.
func (q *planner) end() {
	if q == nil {
		return
	}
	q.resolve()
	c := &q.w.p.l.counters
	q.idle = time.Now()
	c.fetched(q.read, q.r.FileTime()-q.waited)
	c.decode.Add(int64(q.idle.Sub(q.began) - q.read))
	q.read = 0
}

// resolve counts the samples that are planned since it was last called, and resolves them.
func (q *planner) resolve() {
	n := int64(len(q.good))
	if n == 0 {
		return
	}
	p, c := q.w.p, &q.w.p.l.counters
	p.queue(-n)
	c.bytes.Add(q.bytes)
	c.cropped.Add(q.cropped)
	c.planned(n)
	p.asm.resolveGood(q.good)
	q.good, q.bytes, q.cropped = q.good[:0], 0, 0
}

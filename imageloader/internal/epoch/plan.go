package epoch

import (
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/count"
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// stream describes a pass without random access, whose workers plan the images. A sample can't be
// read again, so an image that the device could not decode is decoded from a copy of its file.
type stream struct {
	first    bool              // there is no index yet
	searches *devplan.Searches // nil without an index, and if the consumer searches for no entry points
	refuses  bool              // damage in a scan makes an image bad
}

// newStream returns nil if an index gives random access.
func newStream(c *Config, known *index.Index, searches *devplan.Searches) *stream {
	if known != nil && known.Random() {
		return nil
	}
	return &stream{first: known == nil, searches: searches, refuses: c.Policy.Damaged == codec.Refuse}
}

// planner plans images for one goroutine.
type planner struct {
	stream *stream // nil if the samples can be read again
	*devplan.Planner
}

// plan plans an image whose bytes are on the host.
func (p *planner) plan(m *devplan.Image, to *devplan.Staging) (placed devplan.Placed, planned bool) {
	s := p.stream
	if s != nil && m.Size > devplan.MaxFile {
		return devplan.Placed{}, false
	}
	placed, planned = p.Plan(m, to)
	if s == nil {
		return placed, planned
	}
	if !planned && (s.first && !s.refuses || s.searches.Allowed(m.Index)) {
		placed, planned = p.PlanScan(m, to)
	}
	if planned {
		placed.Redo.File = string(m.Data)
	}
	return placed, planned
}

// fetchPlanner reads samples and plans their images in the goroutine that fetches. A file thus
// stays in the cache of one core from the reading of its bytes until the crop's segments are
// copied, and no other goroutine has to wake up. Images that it cannot plan go to the workers,
// which also report errors. It is not safe for concurrent use.
type fetchPlanner struct {
	p       *pass
	d       *Decoder
	r       timedReader
	good    []int         // positions of the samples planned since startGroup or the last resolve
	bytes   int64         // size of these samples
	cropped int64         // number of these samples that are cropped
	waited  time.Duration // r.FileTime() at the start of the current group, without other jobs
	file    time.Duration // r.FileTime() when try returned false
	idle    time.Time     // when the last group ended
	began   time.Time     // when the current group started
	left    time.Time     // when try returned false; zero after the next call
}

// timedReader measures the time spent reading.
type timedReader struct {
	*index.Reader
	spent time.Duration // in the current group
}

func (r *timedReader) time() func() {
	began := time.Now()
	return func() { r.spent += time.Since(began) }
}

// Content reads a sample.
func (r *timedReader) Content(i int) ([]byte, error) {
	defer r.time()()
	return r.Reader.Content(i)
}

// ReadPacked is a method of devplan.PackedReader.
func (r *timedReader) ReadPacked(p *index.Packed, window, input []byte) error {
	defer r.time()()
	return r.Reader.ReadPacked(p, window, input)
}

// ReadPart is a method of devplan.PartReader.
func (r *timedReader) ReadPart(i int, p *index.ContentPart) error {
	defer r.time()()
	return r.Reader.ReadPart(i, p)
}

// fetchPlans reports whether fetch plans images. It does not if workers write the samples' targets,
// masks or boxes.
func (p *pass) fetchPlans() bool { return p.to.Plans() && p.random() && !p.config.Labels.ByWorkers() }

// newFetchPlanner returns nil if fetch does not plan.
func (p *pass) newFetchPlanner(r *index.Reader) (*fetchPlanner, error) {
	if !p.fetchPlans() {
		return nil, nil
	}
	d, err := NewDecoder(p.config, p.env, p.source.Known, p.source.Plans, true)
	if err != nil {
		return nil, err
	}
	if d.plans.Entries == nil && p.source.Plans.Searches == nil {
		d.Close()
		return nil, nil
	}
	return &fetchPlanner{p: p, d: d, r: timedReader{Reader: r}, good: make([]int, 0, maxGroup), idle: time.Now()}, nil
}

// close frees the planner's C memory.
func (q *fetchPlanner) close() {
	if q != nil {
		q.d.Close()
	}
}

// startGroup starts the clocks of a group of jobs.
func (q *fetchPlanner) startGroup() {
	if q != nil {
		q.began, q.waited = time.Now(), q.r.FileTime()
		q.p.env.Counters.Times.WaitData.Add(int64(q.began.Sub(q.idle)))
	}
}

// try reads a job's sample and plans its image. It returns false if the job has to be fetched and
// decoded by workers.
func (q *fetchPlanner) try(j *job) bool {
	if q == nil {
		return false
	}
	q.back()
	if q.plan(j) {
		q.good = append(q.good, j.position)
		q.bytes += j.Size
		return true
	}
	// Sending the job to the workers may block, so resolve the planned samples first.
	q.resolve()
	q.left, q.file = time.Now(), q.r.FileTime()
	return false
}

// back is called after a job for the workers was fetched and sent. That takes its own time, which
// may include waiting for a worker, so back leaves it out of the group's times.
func (q *fetchPlanner) back() {
	if q.left.IsZero() {
		return
	}
	q.began = q.began.Add(time.Since(q.left))
	q.waited += q.r.FileTime() - q.file
	q.left = time.Time{}
}

// plan plans a job's image in the way that reads the least of its file.
func (q *fetchPlanner) plan(j *job) bool {
	if j.bad != nil || j.row.Staging == nil || j.Size > devplan.MaxFile {
		return false
	}
	i, plans, to := j.Sample.Index, q.d.plans, j.row.Staging
	if c := plans.Copy(i); c != nil &&
		q.planFrom(j, &c.Info, func(m *devplan.Image) (devplan.Placed, bool) { return plans.PlanCopy(c, m, to) }) {
		return true
	}
	if !plans.Entries.Plannable(i) {
		return q.p.source.Plans.Searches.Allowed(i) && q.planFile(j, true)
	}
	if h := plans.MemberHead(i, to); h != nil {
		if q.planFrom(j, &h.Info,
			func(m *devplan.Image) (devplan.Placed, bool) { return plans.PlanMember(h, m, &q.r, to) }) {
			return true
		}
	}
	if h := plans.PartHead(i, to); h != nil {
		if q.planFrom(j, &h.Info,
			func(m *devplan.Image) (devplan.Placed, bool) { return plans.PlanPart(h, m, &q.r, to) }) {
			return true
		}
	}
	return q.planFile(j, false)
}

// planFile reads a job's file and plans its image. The plan uses entry points, or lets the device
// search for them if search is set.
func (q *fetchPlanner) planFile(j *job, search bool) bool {
	data, err := q.r.Content(j.Sample.Index)
	if err != nil || codec.Sniff(data) == "" { // the workers report the error
		return false
	}
	info, err := q.d.images.Header(data)
	if err != nil {
		return false
	}
	j.Data, j.inflated = data, q.r.Inflated(j.Sample.Index)
	defer func() { j.Data = nil }()
	q.d.current.info = info
	plans, to := q.d.plans, j.row.Staging
	return q.planFrom(j, &q.d.current.info, func(m *devplan.Image) (devplan.Placed, bool) {
		if search {
			return plans.PlanScan(m, to)
		}
		placed, ok := plans.Plan(m, to)
		if ok {
			plans.KeepMemberHead(m, to)
			plans.KeepPartHead(m, to)
		}
		return placed, ok
	})
}

// planFrom draws the random choices for a job's image and calls plan. info is the image's header.
func (q *fetchPlanner) planFrom(j *job, info *imagecapi.Info, plan func(m *devplan.Image) (devplan.Placed, bool)) bool {
	if q.p.env.Rules.Header(&j.Sample, info) != nil || q.d.draw(&j.Item, info) != nil {
		return false
	}
	image, ok := q.d.image(&j.Item, info, j.inflated)
	if !ok {
		return false
	}
	placed, ok := plan(image)
	if !ok {
		return false
	}
	j.row.Staging.Rows[j.row.Number] = placed
	if q.d.crops(info) {
		q.cropped++
	}
	return true
}

// endGroup calls resolve for the samples of a group, and counts the group's times.
func (q *fetchPlanner) endGroup() {
	if q == nil {
		return
	}
	q.resolve()
	q.back()
	t := &q.p.env.Counters.Times
	q.idle = time.Now()
	t.Fetched(q.r.spent, q.r.FileTime()-q.waited)
	t.Plan.Add(int64(q.idle.Sub(q.began) - q.r.spent))
	q.r.spent = 0
}

// resolve counts the samples planned since its last call, and reports them to the assembly as good.
func (q *fetchPlanner) resolve() {
	n := int64(len(q.good))
	if n == 0 {
		return
	}
	c := &q.p.env.Counters.Decoded
	q.p.queue.add(-n)
	c.Bytes.Add(q.bytes)
	c.Cropped.Add(q.cropped)
	c.By(count.ByPlan, n)
	q.p.asm.ResolveGood(q.good)
	q.good, q.bytes, q.cropped = q.good[:0], 0, 0
}

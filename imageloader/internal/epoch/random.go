package epoch

import (
	"errors"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/order"
)

// maxGroup is the maximum number of samples that list sends at once.
const maxGroup = 16

// groupSize returns the number of samples that list sends at once. Waking a goroutine takes nearly
// as long as planning an image, so samples to be planned are sent in groups. Decoding takes far
// longer, so samples to be decoded are sent one by one, to any free goroutine.
func (p *pass) groupSize() int {
	if !p.fetchPlans() {
		return 1
	}
	return max(1, min(maxGroup, p.config.Batch.Size()/p.config.Threads.Workers))
}

// list assigns rows to the samples of an archive with random access, and sends the samples to
// fetch.
func (p *pass) list() {
	defer close(p.flow.fetches)
	n, o := p.source.Known.Len(), &p.config.Order
	s := order.Sequence{Kind: o.Kind, Seed: o.Seed, Epoch: p.start.Epoch, Rounds: o.Repeat,
		PerRound: o.PerRound, Weights: o.Weights}
	s.Shuffled = func(epoch int) []int32 {
		if o.Kind == order.Buffered {
			return order.Through(newShuffler[int32](p, epoch), n,
				func(i int) int64 { it := p.item(i); return it.weight() })
		}
		return order.Permutation(n, o.Seed, epoch)
	}
	size := p.groupSize()
	group := make([]job, 0, size)
	hand := func() bool {
		p.queue.add(int64(len(group)))
		select {
		case p.flow.fetches <- group:
		case <-p.ctx.Done():
			return false
		}
		select {
		case group = <-p.flow.groups:
		default:
			group = make([]job, 0, size)
		}
		return true
	}
	for turn := p.start.Turn; turn < p.end(); turn++ {
		position, before := p.deal.At(turn)
		i, epoch, again := s.At(position)
		it := p.item(i)
		it.Draw.Epoch, it.Draw.Again = epoch, again+uint64(before)*repeated
		j, ok := p.rowFor(&it, len(group) == 0)
		if !ok && len(group) > 0 { // rows may become free only after the samples of this group are decoded
			if !hand() {
				return
			}
			j, ok = p.rowFor(&it, true)
		}
		if !ok {
			return
		}
		if group = append(group, j); len(group) == size && !hand() {
			return
		}
	}
	if len(group) == 0 || hand() {
		p.asm.End(nil)
	}
}

// fetch reads samples from an archive with random access, and plans the images that it can.
func (p *pass) fetch() {
	r := index.NewReader(p.source.Known, p.archive)
	defer r.Close()
	plan, err := p.newFetchPlanner(r)
	if err != nil {
		p.stop(err)
		return
	}
	defer plan.close()
	for {
		var group []job
		var more bool
		select {
		case group, more = <-p.flow.fetches:
		case <-p.ctx.Done():
			return
		}
		if !more {
			return
		}
		plan.startGroup()
		for i := range group {
			if j := &group[i]; !plan.try(j) && !p.fetchJob(j, r) {
				return
			}
		}
		plan.endGroup()
		select {
		case p.flow.groups <- group[:0]:
		default:
		}
	}
}

// fetchJob reads the contents of a job and sends the job to work. It returns false if the pass has
// ended.
func (p *pass) fetchJob(j *job, r *index.Reader) bool {
	if info, known := p.source.Known.Oversize(j.Sample.Index); known && j.bad == nil {
		j.bad = p.env.Rules.Header(&j.Sample, &info)
	}
	if j.bad == nil {
		ok, err := p.readContents(j, r)
		if !ok {
			return false
		}
		if err != nil {
			p.recycle(j)
			j.bad = p.badContent(j, err)
		}
		if err != nil && j.bad == nil {
			p.asm.Resolve(j.position, Fatal, err)
			return true
		}
	}
	select {
	case p.flow.jobs <- *j:
		return true
	case <-p.ctx.Done():
		return false
	}
}

// badContent returns the reason why a job is bad if err reports damage of its content or of its
// partner. Otherwise it returns nil.
func (p *pass) badContent(j *job, err error) *sample.Error {
	name := j.Sample.Name
	var at *archive.Error
	if errors.As(err, &at) {
		name = at.Member
	}
	return p.env.Rules.Content(&j.Sample, name, err)
}

// readContents reads the contents of a job and of its partner. It acquires the memory for both at
// once, because two fetches that each hold a part and wait for the rest could wait forever. ok is
// false if the pass has ended. The caller recycles the job even after an error.
func (p *pass) readContents(j *job, r *index.Reader) (ok bool, err error) {
	known := p.source.Known
	i, partner := j.Sample.Index, known.Partner(j.Sample.Index)
	j.Data = known.InMemory(i)
	j.borrowed = j.Data != nil
	need := int64(0)
	if !j.borrowed {
		need = j.Size
	}
	if j.partner.size > 0 {
		j.partner.data = known.InMemory(partner)
		if j.partner.borrowed = j.partner.data != nil; !j.partner.borrowed {
			need += j.partner.size
		}
	}
	if need == 0 {
		return true, nil
	}
	if !p.queue.budget.Acquire(int(need)) {
		return false, nil
	}
	began, spent := time.Now(), r.FileTime()
	if !j.borrowed {
		j.Data = p.queue.buffers.Get(int(j.Size))
	}
	if j.partner.size > 0 && !j.partner.borrowed {
		j.partner.data = p.queue.buffers.Get(int(j.partner.size))
	}
	if !j.borrowed {
		err = r.Read(i, j.Data)
		j.inflated = r.Inflated(i)
	}
	if err == nil && j.partner.size > 0 && !j.partner.borrowed {
		err = r.Read(partner, j.partner.data)
	}
	p.env.Counters.Times.Fetched(time.Since(began), r.FileTime()-spent)
	return true, err
}

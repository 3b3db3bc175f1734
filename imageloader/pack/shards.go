package pack

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/internal/order"
	"github.com/torchstream/torchstream/internal/safefile"
)

// aheadBytes is the maximum number of bytes of samples that are read and not yet written. A single
// sample may be larger.
const aheadBytes = 256 << 20

// tarEnd is the number of bytes in the two blocks of zeros that end a tar.
const tarEnd = 1024

// task is a sample that a worker packs.
type task struct {
	position int // in the part
	bytes    int // taken from the budget
	done     chan struct{}
	packed
	err error
}

// stream packs the samples of a part with several workers, and returns them in order.
type stream struct {
	ctx    context.Context
	stop   context.CancelFunc
	queue  chan *task // in order
	budget *arena.Budget
	group  sync.WaitGroup
	ahead  *task // the next task, if the last shard had no room for it
	failed error // of the last task that next returned
}

// startStream starts the workers at a position of the part.
func (p *packing) startStream(ctx context.Context, samples []int32, from int) *stream {
	const perWorker = 64
	s := &stream{queue: make(chan *task, perWorker*p.reading.Workers), budget: arena.NewBudget(aheadBytes, nil)}
	s.ctx, s.stop = context.WithCancel(ctx)
	context.AfterFunc(s.ctx, s.budget.Stop)
	tasks := make(chan *task)
	s.group.Go(func() {
		defer close(tasks)
		defer close(s.queue)
		for position := from; position < len(samples); position++ {
			i := int(samples[position])
			t := &task{position: position, bytes: int(p.in.bytes(i)), done: make(chan struct{}), packed: packed{sample: i}}
			if !s.budget.Acquire(t.bytes) {
				return
			}
			select {
			case s.queue <- t:
			case <-s.ctx.Done():
				return
			}
			select {
			case tasks <- t:
			case <-s.ctx.Done():
				return
			}
		}
	})
	for range p.reading.Workers {
		s.group.Go(func() { p.work(tasks) })
	}
	return s
}

// work packs samples until there are no more.
func (p *packing) work(tasks <-chan *task) {
	w, err := newWorker(p)
	if err == nil {
		defer w.close()
	}
	for t := range tasks {
		if t.err = err; err == nil {
			t.packed, t.err = w.pack(t.sample)
		}
		close(t.done)
	}
}

// next returns the next sample, or nil after the last one. The caller must release it.
func (s *stream) next() (*task, error) {
	if t := s.ahead; t != nil {
		s.ahead = nil
		return t, nil
	}
	select {
	case t, more := <-s.queue:
		if !more {
			return nil, context.Cause(s.ctx)
		}
		select {
		case <-t.done:
			s.failed = t.err
			return t, t.err
		case <-s.ctx.Done():
		}
	case <-s.ctx.Done():
	}
	return nil, context.Cause(s.ctx)
}

func (s *stream) release(t *task) { s.budget.Release(t.bytes) }

// end stops the workers and waits for them.
func (s *stream) end() {
	s.stop()
	s.group.Wait()
}

// writePart writes the missing shards of a part.
func (p *packing) writePart(ctx context.Context, part *partPlan) error {
	from, number := 0, 0
	for _, s := range p.journal.shards {
		if s.Part == part.Name {
			from, number = s.End, number+1
		}
	}
	samples := make([]int32, len(part.samples))
	for to, at := range order.Permutation(len(samples), p.reading.Seed, 0) {
		samples[to] = part.samples[at]
	}
	for _, i := range samples[:from] {
		p.note(int(i))
	}
	s := p.startStream(ctx, samples, from)
	defer s.end()
	for from < len(samples) {
		done, err := p.writeShard(s, part, number, len(samples))
		if err != nil {
			return err
		}
		from, number = done.End, number+1
	}
	return nil
}

// writeShard writes one shard.
func (p *packing) writeShard(s *stream, part *partPlan, number, samples int) (shard, error) {
	done := shard{Name: shardName(part.Name, number, p.o.Format), Part: part.Name, End: samples}
	path, kind, err := p.journal.start(done.Name)
	if err != nil {
		return done, err
	}
	full := func(position int, bytes int64) bool { return bytes+tarEnd > p.o.ShardBytes }
	if p.o.Shards > 0 {
		last := (number + 1) * samples / p.shardsOf(samples)
		full = func(position int, bytes int64) bool { return position >= last }
	}
	file, err := safefile.Replace(path, kind, 0o644, func(f *os.File) error {
		return p.fill(s, bufio.NewWriterSize(f, 1<<20), &done, full)
	})
	var bad *imageloader.SampleError
	switch {
	case errors.As(err, &bad), err != nil && s.ctx.Err() != nil, s.failed != nil: // not a fault of the shard
		return done, err
	case err != nil:
		return done, fmt.Errorf("pack: %s: %w", path, err)
	}
	if err := file.Close(); err != nil {
		return done, fmt.Errorf("pack: %s: %w", path, err)
	}
	return done, p.journal.end(done)
}

// fill writes samples into a shard until it is full.
func (p *packing) fill(s *stream, w *bufio.Writer, done *shard, full func(position int, bytes int64) bool) error {
	for {
		t, err := s.next()
		if err != nil {
			return err
		}
		if t == nil {
			break
		}
		if t.bad == nil && done.Samples > 0 && full(t.position, done.Bytes+int64(len(t.data))) {
			s.ahead, done.End = t, t.position
			break
		}
		if err := p.put(w, done, t); err != nil {
			return err
		}
		s.release(t)
		p.note(t.sample)
	}
	if done.Samples == 0 {
		return fmt.Errorf("%w: none of the part %s is good", imageloader.ErrNoSamples, done.Part)
	}
	end, err := p.end()
	if err != nil {
		return err
	}
	if _, err := w.Write(end); err != nil {
		return err
	}
	done.Bytes += int64(len(end))
	return w.Flush()
}

// put writes a sample to a shard. If the sample is bad, put records it as left out, or returns an
// error under Fail.
func (p *packing) put(w *bufio.Writer, done *shard, t *task) error {
	if t.bad != nil {
		if p.reading.BadSamples == imageloader.Fail {
			return fmt.Errorf("%w (remove the member, or set Options.BadSamples to Skip)", t.bad)
		}
		l := leftOut{Sample: t.sample, Name: t.bad.Name, Reason: string(t.bad.Reason)}
		if t.bad.Err != nil {
			l.Detail = t.bad.Err.Error()
		}
		done.LeftOut = append(done.LeftOut, l)
		return nil
	}
	done.Samples++
	if t.resized {
		done.Resized++
	}
	n, err := w.Write(t.data)
	done.Bytes += int64(n)
	return err
}

// end returns the two blocks of zeros that end a shard.
func (p *packing) end() ([]byte, error) {
	w := worker{o: &p.o}
	if p.o.Format == TarGzip {
		w.gzip = newGzip()
	}
	return w.compress(make([]byte, tarEnd))
}

// shardsOf returns the number of shards of a part with this number of samples.
func (p *packing) shardsOf(samples int) int {
	first := len(p.parts[0].samples)
	return min(max((p.o.Shards*samples+first/2)/first, 1), samples)
}

// shardName returns the name of a shard's file.
func shardName(part string, number int, f Format) string {
	extension := ".tar"
	if f == TarGzip {
		extension = ".tgz"
	}
	return fmt.Sprintf("%s-%06d%s", part, number, extension)
}

// note reports progress after sample i.
func (p *packing) note(i int) {
	p.progress.Members++
	p.progress.Bytes += p.in.bytes(i)
	if p.o.Progress != nil {
		p.o.Progress(p.progress)
	}
}

// bytes returns the bytes of sample i, with its further members.
func (in *input) bytes(i int) int64 {
	n := in.x.Size(i)
	for _, m := range in.groups.of(i) {
		n += m.size
	}
	return n
}

package prefetcher

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/torchstream/torchstream/internal/assembly"
	"github.com/torchstream/torchstream/internal/order"
)

// SampleInfo is the Batch.Info of the batches of a [SampleSource].
type SampleInfo struct {
	Indices []int       // the number of each row's sample; the program may keep them
	State   SampleState // position after the batch, for SampleSource.Restore
}

// sampleJob is a sample that has a row and has not been written yet.
type sampleJob struct {
	index    int
	draw     draw
	memory   *sampleRows
	row      int
	position int
}

// sampleRows is the lent memory of a batch.
type sampleRows struct {
	fields  [][]byte
	bytes   []int // size of a row, for each field
	scratch []byte
}

// row returns the memory of a row of a field.
func (r *sampleRows) row(field, row int) []byte {
	n := r.bytes[field]
	return r.fields[field][row*n : (row+1)*n : (row+1)*n]
}

// Exchange implements assembly.Memory.
func (r *sampleRows) Exchange(row int, from *sampleRows, fromRow int, both bool) {
	for i := range r.fields {
		to, source := r.row(i, row), from.row(i, fromRow)
		r.scratch = append(r.scratch[:0], to...)
		copy(to, source)
		if both {
			copy(source, r.scratch)
		}
	}
}

// Substitute implements assembly.Memory.
func (r *sampleRows) Substitute(row, good int) {
	for i := range r.fields {
		copy(r.row(i, row), r.row(i, good))
	}
}

type sampleAssembly = assembly.Assembly[int, *sampleRows]

// samplePass is one run over an epoch. Its goroutines share it.
type samplePass struct {
	source *SampleSource
	epoch  int
	start  order.Start
	deal   order.Deal
	asm    *sampleAssembly
	bytes  []int // size of a sample, for each field
	ctx    context.Context
	stop   context.CancelCauseFunc

	jobs   chan []sampleJob
	groups chan []sampleJob // slices that work has emptied, for reuse
}

// Fill implements [Source].
func (s *SampleSource) Fill(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, error),
	deliver func(n int, info any) error) error {
	o := &s.options
	p := &samplePass{source: s, epoch: epoch, start: s.startOf(epoch), jobs: make(chan []sampleJob, o.Workers),
		groups: make(chan []sampleJob, 2*o.Workers+1)}
	for _, f := range s.fields {
		p.bytes = append(p.bytes, int(f.Bytes()))
	}
	p.deal = order.NewDeal(o.share(), s.n, p.start.Done)
	wanted := 0
	if o.BadSamples == Skip && p.deal.Fixed {
		wanted = p.deal.Remaining(&p.start)
	}
	p.asm = assembly.New[int, *sampleRows](assembly.Config{Size: o.BatchSize, DropLast: o.DropLast,
		Policy: o.BadSamples, Name: "prefetcher", Fatal: fatalSample}, wanted)
	p.ctx, p.stop = context.WithCancelCause(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer p.stop(nil)
	all.Go(func() {
		<-p.ctx.Done()
		p.asm.Stop()
	})
	all.Go(func() { p.lend(lend) })
	all.Go(p.list)
	for range o.Workers {
		all.Go(p.work)
	}
	return p.deliver(deliver)
}

// fatalSample returns the error that ends an epoch under the policy Fail. It suggests another
// policy, except after a panic, which a policy should not hide.
func fatalSample(bad error) error {
	if bad.(*SampleError).Stack != nil {
		return bad
	}
	return fmt.Errorf("%w (correct it, or set SamplesOptions.BadSamples to Skip or Substitute)", bad)
}

// lend adds a slot whenever the assembly needs one.
func (p *samplePass) lend(lend func(context.Context) ([][]byte, error)) {
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.asm.Asked():
		}
		fields, err := lend(p.ctx)
		if err == nil {
			err = p.checkSlot(fields)
		}
		if err != nil {
			p.stop(err) // no effect if the pass has ended already
			return
		}
		p.asm.Add(&sampleRows{fields: fields, bytes: p.bytes})
	}
}

// checkSlot returns an error if a lent slot has no room for a batch.
func (p *samplePass) checkSlot(fields [][]byte) error {
	for i, n := range p.bytes {
		if need := n * p.source.options.BatchSize; i >= len(fields) || len(fields[i]) < need {
			return fmt.Errorf("prefetcher: the lent slot has no %d bytes for the field %q", need, p.source.fields[i].Name)
		}
	}
	return nil
}

// repeated is added to the occurrence number (draw.repeat) of a sample that is repeated as padding.
// Otherwise the repetition would get the random numbers of another occurrence, because weighted
// draws count occurrences too.
const repeated = 1 << 32

// list assigns rows to the samples of the pass, in order.
func (p *samplePass) list() {
	defer close(p.jobs)
	s := p.source
	sequence := order.Sequence{Kind: s.kind, Seed: s.options.Seed, Epoch: p.epoch, Rounds: 1, PerRound: s.n,
		Weights:  s.weights,
		Shuffled: func(epoch int) []int32 { return order.Permutation(s.n, s.options.Seed, epoch) }}
	size := p.groupSize()
	group := make([]sampleJob, 0, size)
	for turn := p.start.Turn; turn < p.deal.End(&p.start, s.options.BadSamples == Skip); turn++ {
		position, before := p.deal.At(turn)
		index, round, repeat := sequence.At(position)
		at, slot, row, ok := p.asm.Place(index, len(group) == 0)
		if !ok && len(group) > 0 { // rows may become free only after this group is written
			if group, ok = p.hand(group); !ok {
				return
			}
			at, slot, row, ok = p.asm.Place(index, true)
		}
		if !ok {
			return
		}
		group = append(group, sampleJob{index: index, memory: slot.Memory, row: row, position: at,
			draw: draw{epoch: p.epoch, round: round, repeat: repeat + uint64(before)*repeated}})
		if len(group) == size {
			if group, ok = p.hand(group); !ok {
				return
			}
		}
	}
	if len(group) > 0 {
		if _, ok := p.hand(group); !ok {
			return
		}
	}
	p.asm.End(nil)
}

// groupSize returns the number of samples that a worker gets at once. Sending a sample to a worker
// takes longer than writing a row of a table.
func (p *samplePass) groupSize() int {
	o := &p.source.options
	return max(1, min(64, o.BatchSize/(4*o.Workers)))
}

// hand sends a group to a worker and returns an empty one. ok is false if the pass has ended.
func (p *samplePass) hand(group []sampleJob) (empty []sampleJob, ok bool) {
	select {
	case p.jobs <- group:
	case <-p.ctx.Done():
		return nil, false
	}
	select {
	case empty = <-p.groups:
		return empty, true
	default:
		return make([]sampleJob, 0, cap(group)), true
	}
}

// work writes samples to their rows.
func (p *samplePass) work() {
	s := Sample{source: p.source, ctx: p.ctx}
	s.rng = rand.New(&s.pcg)
	ended := false
	defer func() { // a panic is recovered in call
		if !ended {
			p.stop(fmt.Errorf("prefetcher: sample %d: the function ended its goroutine (runtime.Goexit)", s.index))
		}
	}()
	var good []int
	for {
		var group []sampleJob
		var more bool
		select {
		case group, more = <-p.jobs:
		case <-p.ctx.Done():
		}
		if !more {
			ended = true
			return
		}
		good = good[:0]
		for i := range group {
			if p.ctx.Err() != nil {
				break
			}
			j := &group[i]
			if result, err := s.call(j); result == assembly.Good {
				good = append(good, j.position)
			} else {
				p.asm.Resolve(j.position, result, err)
			}
		}
		p.asm.ResolveGood(good)
		select {
		case p.groups <- group[:0]:
		default:
		}
	}
}

// deliver delivers the batches and returns the reason why the pass ended.
func (p *samplePass) deliver(deliver func(n int, info any) error) error {
	run := p.source.runOf(&p.start, p.epoch)
	state := SampleState{run: run, batches: p.start.Batches, turns: p.start.Turn}
	samples, bad, size := 0, 0, p.source.options.BatchSize
	var lastBad error
	for {
		r, err := p.asm.Next()
		if errors.Is(err, assembly.ErrStopped) {
			return context.Cause(p.ctx)
		}
		for _, e := range r.Bad {
			p.source.met(e)
			lastBad = e
		}
		if bad += len(r.Bad); r.Partial {
			continue
		}
		n := len(r.Samples)
		if n == size || n > 0 && !p.source.options.DropLast {
			if p.ctx.Err() != nil {
				return context.Cause(p.ctx)
			}
			if err == nil || n == size { // otherwise an error cut the batch short
				state.batches++
				state.turns = p.start.Turn + r.Judged
			}
			if err := deliver(n, SampleInfo{Indices: r.Samples, State: state}); err != nil {
				return err
			}
			samples += n
		}
		switch {
		case err != nil:
			return err
		case n == size:
		case p.ctx.Err() != nil: // the context ended before the first sample was written
			return context.Cause(p.ctx)
		default:
			return p.end(samples, bad, lastBad)
		}
	}
}

// met counts and logs a bad sample.
func (s *SampleSource) met(bad error) {
	s.bad.Add(1)
	s.options.Logger.Warn("prefetcher: bad sample", "policy", s.options.BadSamples, "error", bad)
}

// end returns the result of a pass that has reached the end of its sequence. It returns nil if the
// epoch delivered anything. Otherwise the error explains why there are no samples. lastBad is the
// error of the last bad sample, or nil.
func (p *samplePass) end(samples, bad int, lastBad error) error {
	o := &p.source.options
	switch {
	case samples < p.asm.Wanted():
		return fmt.Errorf("prefetcher: %w in epoch %d: %d samples are bad, so that rank %d of %d can't fill its "+
			"batches; the last one: %w", ErrNoSamples, p.epoch, bad, o.Rank, o.World, lastBad)
	case samples > 0 || p.start.Before+p.start.Batches > 0:
		return nil
	case lastBad != nil:
		return fmt.Errorf("prefetcher: %w in epoch %d: %d samples are bad; the last one: %w", ErrNoSamples, p.epoch,
			bad, lastBad)
	}
	return fmt.Errorf("prefetcher: %w in epoch %d: %d samples are less than a batch of %d for each of %d ranks, and "+
		"SamplesOptions.DropLast is set", ErrNoSamples, p.epoch, p.source.n, o.BatchSize, o.World)
}

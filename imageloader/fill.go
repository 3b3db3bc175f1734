package imageloader

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/epoch"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/order"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/tensor"
)

// Fill produces the batches of one epoch, in order. A prefetcher calls it.
//
// Fill calls lend from one goroutine at a time. lend returns the memory of the next batch's fields:
// BatchSize * Size * Size * 3 bytes for images (uint8, NHWC, RGB) and BatchSize * 8 for labels
// (int64), or with Transform.Mix BatchSize * classes * 4 (float32), or with Options.Masks or Target
// for those instead: see Loader.Fields. It may block until memory is free, but not longer than its
// context. At the end of an epoch one slot more than needed may have been lent.
//
// Fill calls deliver from its own goroutine, with the number of samples n in the oldest lent slot
// and an [Info]. n is BatchSize, or less in the last batch, whose other rows are undefined. From
// then on Fill does not touch the slot's memory.
//
// Damage ends the epoch with an error, after all samples before it were delivered: in a batch that
// may be short, and those of a shuffle buffer out of their order. A batch that is only delivered
// because of the damage has the State of the last batch before it, so that the epoch can be
// continued when the archive is repaired.
//
// When ctx ends, the loader is closed, or lend or deliver fails, Fill stops its goroutines, waits
// for them, and returns the cause: within the time that one image takes to decode.
func (l *Loader) Fill(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, error), deliver func(n int, info any) error) error {
	return l.fill(ctx, epoch, filler{lend: lend, deliver: deliver})
}

// filler is the consumer of Fill.
type filler struct {
	lend    func(context.Context) ([][]byte, error)
	deliver func(n int, info any) error
}

// Lend is a method of decodeplan.Consumer.
func (f filler) Lend(ctx context.Context) (decodeplan.Slot, error) {
	fields, err := f.lend(ctx)
	if err != nil {
		return decodeplan.Slot{}, err
	}
	if len(fields) != 2 {
		return decodeplan.Slot{}, fmt.Errorf("imageloader: the lent slot has %d fields, not 2: see Loader.Fields", len(fields))
	}
	return decodeplan.Slot{Images: fields[0], Labels: fields[1]}, nil
}

// Deliver is a method of decodeplan.Consumer.
func (f filler) Deliver(n int, info any) error { return f.deliver(n, info) }

// fill runs an epoch for a consumer. The consumer decodes from plans if it is a *planFiller.
func (l *Loader) fill(ctx context.Context, number int, to decodeplan.Consumer) error {
	if !l.startCall() {
		return ErrClosed
	}
	defer l.running.Done()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		select {
		case <-l.closed:
			stop(ErrClosed)
		case <-ctx.Done():
		}
	}()
	known := l.index.Load()
	at, kind := l.startOf(number)
	config, err := l.epochConfig(known, kind)
	if err != nil {
		return err
	}
	opening := l.archiveConfig()
	opening.Again = true
	source := epoch.Source{
		Open:     func(ctx context.Context) (*archive.Archive, error) { return archive.Open(ctx, l.path, opening) },
		Requests: opening.Requests,
		Known:    known,
		First:    epoch.First{Index: l.indexConfig(), Keep: l.keepIndex},
		Plans:    l.plansOf(known),
	}
	if l.o.StatsEvery > 0 {
		defer l.report(ctx, number)()
	}
	return epoch.Run(ctx, source, at, config, l.env(), &consumer{to: to, known: known, run: l.runOf(at, kind, known)})
}

// consumer makes the Info of the batches of an epoch.
type consumer struct {
	to    decodeplan.Consumer
	known *index.Index
	run   *run
}

// Plans is a method of epoch.Consumer.
func (c *consumer) Plans() bool { _, plans := c.to.(planFiller); return plans }

// Lend is a method of epoch.Consumer.
func (c *consumer) Lend(ctx context.Context) (decodeplan.Slot, error) { return c.to.Lend(ctx) }

// Deliver is a method of epoch.Consumer.
func (c *consumer) Deliver(d epoch.Delivery) error {
	info := Info{Samples: d.Samples, State: State{run: c.run, batches: d.Batches, turns: d.Turns}}
	if d.Redos != nil {
		info.known, info.redos = c.known, d.Redos
	}
	return c.to.Deliver(len(d.Samples), info)
}

// startOf returns the place where an epoch starts, and its order.
func (l *Loader) startOf(number int) (epoch.Start, order.Kind) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.resume != nil && l.resume.Epoch == number {
		return *l.resume, l.order
	}
	return epoch.Start{Epoch: number}, l.order
}

// runOf returns what the states of an epoch share.
func (l *Loader) runOf(at epoch.Start, kind order.Kind, known *index.Index) *run {
	return &run{epoch: at.Epoch, order: kind, rank: l.o.Rank, world: l.o.World, done: at.Done, before: at.Before,
		classes: l.classesDigest(), options: l.fingerprint(kind), identify: func() archiveIdentity { return l.identity(known) }}
}

// keepIndex takes the index that a first pass has made, unless there is one already.
func (l *Loader) keepIndex(finish func() (*index.Index, error)) error {
	if l.index.Load() != nil {
		return nil
	}
	x, err := finish()
	if err != nil { // every sample was delivered nevertheless
		l.o.Logger.Warn("no index", "archive", archive.Shown(l.path), "error", err)
		return nil
	}
	if !l.index.CompareAndSwap(nil, x) {
		return x.Close()
	}
	return nil
}

// env returns what the epochs share.
func (l *Loader) env() *epoch.Env {
	return &epoch.Env{Rules: &l.rules, Counters: &l.counters, Log: l.o.Logger, Codecs: l.codec}
}

// epochConfig compiles the options for an epoch over an index, which may be nil.
func (l *Loader) epochConfig(x *index.Index, kind order.Kind) (*epoch.Config, error) {
	labels := l.labels(x)
	if labels.Kind == epoch.Soft && labels.Width == 0 {
		return nil, errors.New("imageloader: Transform.Mix needs classes, and there are none")
	}
	o := &l.o
	c := &epoch.Config{
		Batch:   epoch.Batch{Share: o.share(), Transform: l.plan, Side: o.Transform.Size},
		Order:   epoch.Order{Kind: kind, Seed: o.Seed, Repeat: o.Repeat, Weights: l.weights, Buffer: epoch.Buffer{Samples: o.ShuffleBuffer, Bytes: o.ShuffleBytes}},
		Labels:  labels,
		Policy:  epoch.Policy{BadSamples: o.BadSamples, Damaged: o.Damaged},
		Threads: o.threads(),
	}
	if x != nil {
		c.Order.PerRound = l.perRound(x)
	}
	c.Threads.QueueBytes = l.queueBytes
	return c, nil
}

// labels describes what a network learns from a sample of an index, which may be nil.
func (l *Loader) labels(x *index.Index) epoch.Labels {
	o, size := &l.o, l.o.Transform.Size
	switch {
	case o.Masks.masked():
		return epoch.Labels{Kind: epoch.Mask, Width: size * size, DType: o.Masks.DType, Fill: o.Masks.Fill}
	case o.MultiLabel:
		return epoch.Labels{Kind: epoch.Target, Width: len(l.Classes()), DType: tensor.Float32, Target: func(s Sample, target []float32) error {
			for _, class := range x.Labels(s.Index) {
				target[class] = 1
			}
			return nil
		}}
	case o.Target != nil:
		return epoch.Labels{Kind: epoch.Target, Width: o.TargetWidth, DType: tensor.Float32, Target: o.Target}
	case len(o.Transform.Mix) > 0:
		return epoch.Labels{Kind: epoch.Soft, Width: len(l.Classes()), DType: tensor.Float32}
	}
	return epoch.Labels{Kind: epoch.Index, Width: 1, DType: tensor.Int64}
}

// report logs the Stats since its last report, every Options.StatsEvery until ctx ends. The caller
// calls wait, after ctx has ended.
func (l *Loader) report(ctx context.Context, number int) (wait func()) {
	ctx, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(l.o.StatsEvery)
		defer ticker.Stop()
		before := l.Stats()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			now := l.Stats()
			l.o.Logger.Info("loader", "archive", archive.Shown(l.path), "epoch", number, "stats", now.Since(before))
			before = now
		}
	}()
	return func() {
		stop()
		<-done
	}
}

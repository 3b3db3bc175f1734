package imageloader

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/box"
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/epoch"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/order"
	"github.com/torchstream/torchstream/tensor"
)

// Fill produces the batches of one epoch, in order. A prefetcher calls it.
//
// Fill calls lend from one goroutine at a time. lend returns the memory for the next batch's
// fields: BatchSize * Size * Size * 3 bytes for images (uint8, NHWC, RGB) and BatchSize * 8 for
// labels (int64). The second field has BatchSize * classes * 4 bytes (float32) with Transform.Mix
// or Options.MultiLabel, and another size with Options.Masks, Boxes or Target: see Loader.Fields.
// lend may block until memory is free or its context ends. At the end of an epoch, Fill may have
// called lend once more than there are batches.
//
// Fill calls deliver from the goroutine that called Fill, once for each batch. The batch is in the
// slot that was lent first among those not yet delivered. n is its number of samples: BatchSize, or
// fewer in the last batch, whose other rows are undefined. info is an [Info]. Once Fill has called
// deliver, it does not use the slot's memory.
//
// If the archive is damaged, the epoch ends with an error after all samples before the damage have
// been delivered. The damage may make the last batch short. If a shuffle buffer is in use, damage
// empties the buffer early. Its samples then form other batches than those of an undamaged archive.
// Each of these batches has the State of the last batch before the damage took effect. After the
// archive is repaired, the epoch can continue from that State.
//
// When ctx ends, the loader is closed, or lend or deliver fails, Fill stops its goroutines, waits
// for them, and returns the cause. This takes no longer than decoding one image.
func (l *Loader) Fill(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, error),
	deliver func(n int, info any) error) error {
	return l.fill(ctx, epoch, filler{lend: lend, deliver: deliver})
}

// filler adapts the functions that are passed to Fill to decodeplan.Consumer.
type filler struct {
	lend    func(context.Context) ([][]byte, error)
	deliver func(n int, info any) error
}

// Lend implements decodeplan.Consumer.
func (f filler) Lend(ctx context.Context) (decodeplan.Slot, error) {
	fields, err := f.lend(ctx)
	if err != nil {
		return decodeplan.Slot{}, err
	}
	if len(fields) != 2 {
		return decodeplan.Slot{},
			fmt.Errorf("imageloader: the lent slot has %d fields, not 2: see Loader.Fields", len(fields))
	}
	return decodeplan.Slot{Images: fields[0], Labels: fields[1]}, nil
}

// Deliver implements decodeplan.Consumer.
func (f filler) Deliver(n int, info any) error { return f.deliver(n, info) }

// fill runs an epoch for a consumer. A consumer of type planFiller decodes the images from plans.
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
	opening.Mappings = l.mappings
	batches := &consumer{to: to, known: known, run: l.runOf(at, kind, known)}
	if !batches.Plans() {
		opening.Inflaters = l.inflaters()
	}
	first := l.indexConfig(l.format)
	source := epoch.Source{
		Open:     func(ctx context.Context) (*archive.Archive, error) { return l.openAgain(ctx, opening) },
		Requests: opening.Requests,
		Known:    known,
		First:    epoch.First{Index: first, Keep: l.keepIndex},
		Plans:    l.plansOf(known),
	}
	if l.o.StatsEvery > 0 {
		defer l.report(ctx, number)()
	}
	return epoch.Run(ctx, source, at, config, l.env(), batches)
}

// inflaters returns the number of goroutines that inflate a .tar.gz during an epoch whose images
// the workers decode. One keeps up with four workers, and takes the least CPU from them.
func (l *Loader) inflaters() int {
	if l.o.Workers <= 4 {
		return 1
	}
	return 1 + (l.o.Workers+3)/4
}

// plansOf returns the entry points and the searches of an index, for a consumer that decodes from
// plans.
func (l *Loader) plansOf(x *index.Index) epoch.Plans {
	return epoch.Plans{Points: l.entryPoints(x), Searches: l.searches(x), MaxCopyBytes: l.o.MaxTranscodedBytes}
}

// consumer adds an Info to each batch of an epoch and passes the batch on.
type consumer struct {
	to    decodeplan.Consumer
	known *index.Index
	run   *run
}

// Plans implements epoch.Consumer.
func (c *consumer) Plans() bool { _, plans := c.to.(planFiller); return plans }

// Lend implements epoch.Consumer.
func (c *consumer) Lend(ctx context.Context) (decodeplan.Slot, error) { return c.to.Lend(ctx) }

// Deliver implements epoch.Consumer.
func (c *consumer) Deliver(d epoch.Delivery) error {
	info := Info{Samples: d.Samples, State: State{run: c.run, batches: d.Batches, turns: d.Turns}}
	if d.Redos != nil {
		info.known, info.redos = c.known, d.Redos
	}
	return c.to.Deliver(len(d.Samples), info)
}

// startOf returns the start position of an epoch, and its order.
func (l *Loader) startOf(number int) (order.Start, order.Kind) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.resume != nil && l.resume.Epoch == number {
		return *l.resume, l.order
	}
	return order.Start{Epoch: number}, l.order
}

// runOf returns the data that all states of an epoch share.
func (l *Loader) runOf(at order.Start, kind order.Kind, known *index.Index) *run {
	return &run{epoch: at.Epoch, order: kind, rank: l.o.Rank, world: l.o.World, done: at.Done, before: at.Before,
		classes: l.classesDigest(), options: l.fingerprint(kind),
		identify: func() archiveIdentity { return l.identity(known) }}
}

// keepIndex keeps the index that the first pass over the archive has made, unless the loader
// already has one.
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

// env returns the environment that all epochs share.
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
		Batch: epoch.Batch{Share: o.share(), Transform: l.compiled, Side: o.Transform.Size},
		Order: epoch.Order{Kind: kind, Seed: o.Seed, Repeat: o.Repeat, Weights: l.weights,
			Buffer: epoch.Buffer{Samples: o.ShuffleBuffer, Bytes: o.ShuffleBytes}},
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

// labels describes the second field for samples of an index. The index may be nil.
func (l *Loader) labels(x *index.Index) epoch.Labels {
	o, size := &l.o, l.o.Transform.Size
	switch {
	case o.Masks.masked():
		return epoch.Labels{Kind: epoch.Mask, Width: size * size, DType: o.Masks.DType, Fill: o.Masks.Fill}
	case o.Boxes.used():
		labels := epoch.Labels{Kind: epoch.Boxes, Width: o.Boxes.Max * box.Numbers, DType: tensor.Float32,
			Boxes: o.Boxes.config(o.Classes)}
		if l.boxes != nil {
			labels.BoxSet = epoch.BoxSet{Set: l.boxes, ImageOf: x.Label}
		}
		return labels
	case o.MultiLabel:
		return epoch.Labels{Kind: epoch.Target, Width: len(l.Classes()), DType: tensor.Float32,
			Target: func(s Sample, target []float32) error {
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

// report starts a goroutine that logs Stats at intervals of Options.StatsEvery until ctx ends. Each
// log line covers the time since the line before it. wait ends the goroutine, and waits for it.
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

// Planner returns the interface through which a prefetcher decodes images on a GPU
// (prefetcher.Options.Decode). It has no use outside of this module.
//
// A type that embeds a Loader also has this method. A prefetcher that decodes on a GPU then does
// not call the type's own Fill. Such a type can override Planner and return nil: the prefetcher
// then calls its Fill, and the loader's workers decode.
func (l *Loader) Planner() decodeplan.Planner { return l.devicePlanner() }

// devicePlanner implements decodeplan.Planner for a Loader.
type devicePlanner Loader

func (l *Loader) devicePlanner() *devicePlanner { return (*devicePlanner)(l) }

// PlanBytes implements decodeplan.Planner.
func (p *devicePlanner) PlanBytes() (int, error) {
	l := (*Loader)(p)
	t := &l.o.Transform
	switch {
	case len(t.Mix) > 0:
		return 0, errors.New("imageloader: Transform.Mix runs on the host, which needs the pixels: leave " +
			"it out, or decode on the host")
	case l.o.Damaged == Refuse && l.o.NoEntryPoints:
		return 0, errors.New("imageloader: under Options.Damaged Refuse a GPU decodes by entry points " +
			"alone, and Options.NoEntryPoints is set")
	}
	return devplan.PlanBytes(l.index.Load(), l.o.BatchSize, l.o.Damaged != Refuse), nil
}

// MemberBytes implements decodeplan.Planner.
func (p *devicePlanner) MemberBytes() (staging, rooms int) {
	l := (*Loader)(p)
	x := l.index.Load()
	labels := l.labels(x)
	if _, err := p.PlanBytes(); err != nil || l.o.NoEntryPoints || labels.ByWorkers() {
		return 0, 0
	}
	return devplan.MemberBytes(x, l.o.BatchSize)
}

// EntryBytes implements decodeplan.Planner.
func (p *devicePlanner) EntryBytes() int {
	l := (*Loader)(p)
	bytes, err := p.PlanBytes()
	if err != nil || l.o.Damaged == Refuse || l.o.NoEntryPoints {
		return 0
	}
	return decodeplan.Aligned(bytes / 4)
}

// Hold implements decodeplan.Planner.
func (p *devicePlanner) Hold() (release func()) { return p.mappings.Hold() }

// StepsOnDevice reports whether a decoding GPU can run every step of Transform.Ops, for all values
// of its random parameters.
func (p *devicePlanner) StepsOnDevice() bool { return p.compiled.StepsOnDevice() }

// planFiller is the consumer of FillPlans.
type planFiller struct{ decodeplan.Consumer }

// FillPlans is Fill for a consumer that decodes images itself. to.Lend also lends memory for the
// plans of a slot (Slot.Plans, which may be nil). The pixels of a row with a plan are undefined in
// the slot. All other rows, and the second field, are the same as with Fill. The plans describe
// exactly the pixels that Fill would write. Which samples are bad does not depend on where images
// are decoded.
//
// Only JPEGs get a plan. The plan of a baseline JPEG uses entry points (positions in the scan where
// decoding can start), if they were made from the image's present bytes or Options.TrustIndex is
// set. Without such entry points, the plan covers the whole scan, and the consumer finds the entry
// points. The plan of a whole scan is made only if damage in the scan would not make the sample
// bad. If Options.Damaged is Refuse, damage always would, so there is no such plan. A progressive
// JPEG gets the plan of a baseline copy with the same pixels, as long as Options.MaxTranscodedBytes
// has room for the copy. The loader also decodes the rows that Plans.HostRows assigns to the host.
//
// An image of an archive without random access cannot be read again. A batch therefore keeps the
// files of such images that have a plan, until Checked.
//
// FillPlans passes an info to to.Deliver. The consumer passes the same info to DecodeRow,
// KeepEntryPoints and Checked.
func (p *devicePlanner) FillPlans(ctx context.Context, epoch int, to decodeplan.Consumer) error {
	if _, err := p.PlanBytes(); err != nil {
		return err
	}
	return (*Loader)(p).fill(ctx, epoch, planFiller{to})
}

// DecodeRow decodes a row of a batch of FillPlans on the host, as Fill does, and writes its Size *
// Size * 3 bytes to dst. A consumer calls it for rows whose plan it could not decode. info is the
// value with which the batch was delivered.
//
// DecodeRow decodes the file that the batch has kept, if there is one. Otherwise it reads the image
// from the archive again, and leaves the archive open for further calls with the same ctx, until
// Close, an error, or a call with another ctx. Calls run one at a time, and before Checked.
//
// DecodeRow fails if ctx ends, or if the loader is closed. If it reads the archive, it also fails
// if the archive has changed, or if reading fails. It fails for an image that proves to be bad.
// That happens only if Options.TrustIndex trusts deliberately forged entry points, or if the
// archive was written to while a device read it.
func (p *devicePlanner) DecodeRow(ctx context.Context, info any, row int, dst []byte) error {
	l := (*Loader)(p)
	batch, ok := info.(Info)
	if !ok || row < 0 || row >= len(batch.redos) {
		return fmt.Errorf("imageloader: DecodeRow of row %d: the batch is not one of FillPlans, or has "+
			"no such row", row)
	}
	if size := 3 * l.o.Transform.Size * l.o.Transform.Size; len(dst) < size {
		return fmt.Errorf("imageloader: DecodeRow needs %d bytes for the pixels, not %d", size, len(dst))
	}
	if !l.startCall() {
		return ErrClosed
	}
	defer l.running.Done()
	l.repeated.mu.Lock()
	defer l.repeated.mu.Unlock()
	var err error
	if batch.redos[row].File == "" {
		err = l.repeated.open(ctx, l, batch.known)
	}
	if err == nil {
		err = l.decodeRow(&batch, row, dst)
	}
	if err != nil {
		l.repeated.close()
	}
	return archive.StopCause(ctx, err)
}

// decodeRow decodes a row from the open archive. The device has failed to inflate the row's image
// or to find its entry points, so decodeRow also leaves this work to the host from now on.
func (l *Loader) decodeRow(batch *Info, row int, dst []byte) error {
	s, redo := batch.Samples[row], batch.redos[row]
	if redo.Inflated {
		l.entryPoints(batch.known).RefuseMember(s.Index)
	}
	if redo.Read {
		l.entryPoints(batch.known).RefusePart(s.Index)
	}
	if redo.Searched && batch.known != nil {
		l.searches(batch.known).Refuse(s.Index)
	}
	config, err := l.epochConfig(batch.known, l.opened)
	if err != nil {
		return err
	}
	return epoch.DecodeAgain(config, l.env(), batch.known, l.repeated.reader, s, redo, dst)
}

// rereader keeps the archive open between the calls of DecodeRow in one epoch.
type rereader struct {
	mu     sync.Mutex      // held while a row is decoded
	ends   <-chan struct{} // Done channel of the epoch's context; closing it also ends reads of the archive
	known  *index.Index
	a      *archive.Archive // nil if none is open
	reader *index.Reader
}

// open opens the archive, unless it is already open for this index and for a context that ends
// together with ctx.
func (r *rereader) open(ctx context.Context, l *Loader, known *index.Index) error {
	if r.a != nil && r.ends == ctx.Done() && r.known == known {
		return nil
	}
	r.close()
	if known == nil {
		return fmt.Errorf("imageloader: %s: %w", archive.Shown(l.path), archive.ErrSourceChanged)
	}
	a, err := l.openAgain(ctx, l.archiveConfig())
	if err != nil {
		return err
	}
	r.ends, r.known, r.a, r.reader = ctx.Done(), known, a, index.NewReader(known, a)
	return nil
}

// close closes the archive, if it is open.
func (r *rereader) close() {
	if r.a != nil {
		r.reader.Close()
		_ = r.a.Close() // nothing was written
	}
	r.ends, r.known, r.a, r.reader = nil, nil, nil, nil
}

// KeepEntryPoints stores the entry points that a consumer of FillPlans has found in the images of
// some rows of a batch. info is the value with which the batch was delivered. The consumer must
// have decoded the rows without an error. Each element of found has as many bytes as
// decodeplan.Row.Found says. Later plans of the images use these entry points, which equal those
// that Fill would have made. They are written to the index, unless the index already has entry
// points of these images. KeepEntryPoints is safe for concurrent use. A closed loader ignores it.
func (p *devicePlanner) KeepEntryPoints(info any, rows []int, found [][]byte) {
	l := (*Loader)(p)
	batch, ok := info.(Info)
	if !ok || len(found) != len(rows) {
		return
	}
	if !l.startCall() {
		return
	}
	defer l.running.Done()
	points := l.entryPoints(batch.known)
	if points == nil {
		return
	}
	// The consumer waits for this call. An image takes 7 us, so one goroutine would need 2 ms for a
	// batch.
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

// Checked frees the files that a batch of FillPlans has kept for DecodeRow, which is not called for
// the batch afterwards. info is the value with which the batch was delivered.
func (p *devicePlanner) Checked(info any) {
	batch, _ := info.(Info)
	for row := range batch.redos {
		batch.redos[row].File = ""
	}
}

// keptAtOnce is the number of rows whose entry points one goroutine stores.
const keptAtOnce = 32

// keepRow stores the entry points that a consumer has found in the image of a row.
func (l *Loader) keepRow(points *devplan.EntryPoints, batch *Info, row int, found []byte) {
	if row < 0 || row >= len(batch.redos) || batch.redos[row].Search == nil {
		return
	}
	i := batch.Samples[row].Index
	made, others := points.KeepFound(i, batch.redos[row].Search, found)
	if made {
		l.counters.Decoded.EntriesMade.Add(1)
	}
	if others { // the index already has other entry points: a worker compares them with the image
		l.searches(batch.known).Refuse(i)
	}
}

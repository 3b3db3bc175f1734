package imageloader

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Planner is what a prefetcher asks for to decode images on a GPU (prefetcher.Options.Decode). What
// it returns has no use outside of this module.
//
// A type that embeds a Loader has this method too: a prefetcher that decodes on a GPU then does not
// call the type's own Fill. Such a type overrides Planner, and returns nil, with which the loader's
// workers decode.
func (l *Loader) Planner() any { return l.devicePlanner() }

// devicePlanner is a Loader as a decodeplan.Planner.
type devicePlanner Loader

var _ decodeplan.Planner = (*devicePlanner)(nil)

func (l *Loader) devicePlanner() *devicePlanner { return (*devicePlanner)(l) }

// PlanBytes implements decodeplan.Planner.
func (p *devicePlanner) PlanBytes() (int, error) {
	l := (*Loader)(p)
	t := &l.o.Transform
	switch {
	case len(t.Mix) > 0:
		return 0, errors.New("imageloader: Transform.Mix runs on the host, which needs the pixels: leave it out, or decode on the host")
	case l.o.Damaged == Refuse && l.o.NoEntryPoints:
		return 0, errors.New("imageloader: under Options.Damaged Refuse a GPU decodes by entry points alone, and Options.NoEntryPoints is set")
	case l.o.Damaged == Refuse && l.o.NoIndex:
		return 0, errors.New("imageloader: under Options.Damaged Refuse a GPU decodes by the entry points of an index alone, and Options.NoIndex is set")
	}
	return l.bytesOfBatch(l.planSizes()), nil
}

// planSizes returns the sizes of plans.
func (l *Loader) planSizes() spread {
	var sizes spread
	x := l.index.Load()
	if x == nil || x.Len() == 0 {
		sizes.add(l.planSize(typicalBytes))
		return sizes
	}
	for i := 0; i < x.Len(); i += 1 + x.Len()/1000 {
		sizes.add(l.planSize(x.Size(i)))
	}
	return sizes
}

// planSize returns about the size of the plan of a file: a crop's share of it, or all of it, with
// the entry points that a GPU finds.
func (l *Loader) planSize(file int64) int64 {
	if l.o.Damaged == Refuse {
		return file + planTables
	}
	return file + file/2 + planTables
}

// Sizes for PlanBytes and MemberBytes, in bytes. A plan has the crop's share of the file, a few
// kilobytes of tables, and the entry points.
const (
	typicalBytes  = 128 << 10 // of a file, while they are not known
	typicalWindow = 48 << 10  // a window, and the bytes from a checkpoint to its member
	planTables    = 8 << 10
	minPlanBytes  = 1 << 20
	maxPlanBytes  = 256 << 20
)

// StepsOnDevice reports whether a GPU that decodes runs every step of Transform.Ops, whatever is
// drawn for a sample.
func (p *devicePlanner) StepsOnDevice() bool { return p.plan.StepsOnDevice() }

// FillPlans is Fill for a consumer that decodes images itself: lend also returns the memory for the
// plans of a slot, or nil. A row with a plan has undefined pixels in the slot; all other rows, and
// the second field, are as Fill's. The plans describe the pixels that Fill would write, to the bit,
// and which samples are bad does not depend on who decodes. Only JPEGs get a plan, of an archive
// with random access. Baseline ones get it by entry points that were compared with their images, or
// that Options.TrustIndex trusts; or of the whole scan, in which the consumer finds the entry
// points, for images that are good whatever their scan has, except under Options.Damaged Refuse.
// Progressive ones get that of a baseline copy with the same pixels, as far as
// Options.MaxTranscodedBytes has room for it. The loader also decodes the rows that Plans.HostRows
// leaves to it.
//
// The info of deliver is what DecodeRow and KeepEntryPoints take.
func (p *devicePlanner) FillPlans(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, *decodeplan.Plans, error),
	deliver func(n int, info any) error) error {
	if _, err := p.PlanBytes(); err != nil {
		return err
	}
	return (*Loader)(p).fill(ctx, epoch, true, lend, deliver)
}

// DecodeRow decodes a row of a batch of FillPlans on the host, as Fill does: dst gets its Size *
// Size * 3 bytes. A consumer calls it for rows whose plan it could not decode. It reads the image
// from the archive again, which stays open for further calls with the same ctx, until Close, an
// error, or a call with another one. Calls run one at a time. info is the batch's. It returns an
// error if the archive has changed, if reading fails or ctx ends meanwhile, if the loader is
// closed, and for an image that turns out to be bad: only where Options.TrustIndex trusts entry
// points that were forged on purpose.
func (p *devicePlanner) DecodeRow(ctx context.Context, info any, row int, dst []byte) error {
	l := (*Loader)(p)
	batch, ok := info.(Info)
	if !ok || row < 0 || row >= len(batch.repeats) {
		return fmt.Errorf("imageloader: DecodeRow of row %d: the batch is not one of FillPlans, or has no such row", row)
	}
	if size := 3 * l.o.Transform.Size * l.o.Transform.Size; len(dst) < size {
		return fmt.Errorf("imageloader: DecodeRow needs %d bytes for the pixels, not %d", size, len(dst))
	}
	if !l.begin() {
		return ErrClosed
	}
	defer l.running.Done()
	l.repeated.mu.Lock()
	defer l.repeated.mu.Unlock()
	err := l.repeated.open(ctx, l, batch.known)
	if err == nil {
		if batch.repeats[row].member {
			l.entryPoints(batch.known).headsOf().refuse(batch.Samples[row].Index)
		}
		if batch.repeats[row].searched {
			l.searches(batch.known).refuse(batch.Samples[row].Index)
		}
		err = l.decodeAgain(batch.known, l.repeated.reader, batch.Samples[row], batch.repeats[row], dst)
	}
	if err != nil {
		l.repeated.close()
	}
	return stopCause(ctx, err)
}

// rereader is the archive that DecodeRow reads. It stays open for the rows of an epoch.
type rereader struct {
	mu     sync.Mutex      // held while a row is decoded
	ends   <-chan struct{} // Done of the epoch's context, with which the archive's reads end
	known  *index.Index
	a      *archive.Archive // nil if none is open
	reader *index.Reader
}

// open opens the archive, unless it is open for a context that ends with this one, and this index.
func (r *rereader) open(ctx context.Context, l *Loader, known *index.Index) error {
	if r.a != nil && r.ends == ctx.Done() && r.known == known {
		return nil
	}
	r.close()
	a, err := l.openAgain(ctx)
	if err != nil {
		return err
	}
	if known == nil {
		err = fmt.Errorf("imageloader: %s: %w", archive.Shown(l.path), archive.ErrSourceChanged)
	} else {
		err = known.Changed(a)
	}
	if err != nil {
		_ = a.Close() // nothing was written
		return err
	}
	r.ends, r.known, r.a, r.reader = ctx.Done(), known, a, index.NewReader(known, a)
	return nil
}

// close closes what is open.
func (r *rereader) close() {
	if r.a != nil {
		r.reader.Close()
		_ = r.a.Close() // nothing was written
	}
	r.ends, r.known, r.a, r.reader = nil, nil, nil, nil
}

// repeat is what it takes to decode a sample again, beside the Sample: see item.
type repeat struct {
	size   int64
	epoch  int
	again  uint64
	member bool // the consumer has inflated it

	searched bool    // the consumer has searched it for entry points
	search   *search // for KeepEntryPoints; nil: nothing is kept

	substitute bool // for a bad sample: another row is the sample's own
}

// decodeAgain reads a sample of an archive with random access, and decodes it on the host without
// entry points.
func (l *Loader) decodeAgain(known *index.Index, r *index.Reader, s Sample, again repeat, dst []byte) error {
	data := known.InMemory(s.Index)
	if data == nil {
		data = make([]byte, again.size)
		if err := r.Read(s.Index, data); err != nil {
			return err
		}
	}
	defer runtime.KeepAlive(known) // data may be the index's
	d, err := newDecoder(l.codec, l.o.MaxPixels, l.o.Damaged)
	if err != nil {
		return fmt.Errorf("imageloader: no decoder: %w", err)
	}
	defer d.Close()
	w := worker{p: &pass{l: l, known: known}, d: d, pixelsOnly: true}
	w.reset()
	if w.augmenter, err = l.plan.NewAugmenter(); err != nil {
		return fmt.Errorf("imageloader: no augmenter: %w", err)
	}
	defer w.augmenter.Close()
	j := job{item: item{sample: s, size: again.size, data: data, epoch: again.epoch, again: again.again}, dst: dst}
	state, err := w.decode(&j)
	if state == good {
		if e, ok := err.(*SampleError); ok && !again.substitute {
			l.counters.tolerated(e, l.o.Damaged, l.o.Logger)
		}
		return nil
	}
	return err
}

// staging is a slot's memory for plans. Workers put plans into it, each for a row of its own.
type staging struct {
	plans *decodeplan.Plans
	used  atomic.Uint64
	rooms atomic.Uint64 // bytes of the consumer's rooms
	rows  []rowPlan
}

// rowPlan says where a row's pixels come from.
type rowPlan struct {
	decodeplan.Row // without bytes: the host's
	repeat         repeat
	// lost says that the row's plan had no room in the slot that its sample was moved to: the host
	// has to decode it again.
	lost bool
}

func newStaging(plans *decodeplan.Plans, size int) (*staging, error) {
	if plans == nil {
		return nil, nil
	}
	if len(plans.Rows) < size || uintptr(unsafe.Pointer(unsafe.SliceData(plans.Memory)))%decodeplan.Align != 0 {
		return nil, fmt.Errorf("imageloader: the lent memory for plans has %d rows, not %d, or is not aligned to %d bytes", len(plans.Rows), size, decodeplan.Align)
	}
	return &staging{plans: plans, rows: make([]rowPlan, size)}, nil
}

// of returns the staging for a row's plan, or nil if the consumer wants its pixels.
func (s *staging) of(row int) *staging {
	if s == nil || row%decodeplan.Group < s.plans.HostRows {
		return nil
	}
	return s
}

// reserve returns memory for what belongs to a row, and the row with its place. It returns false if
// there is no room.
func (s *staging) reserve(row decodeplan.Row) (to []byte, at decodeplan.Row, fits bool) {
	begin, fits := reserve(&s.used, decodeplan.Aligned(row.Span()), len(s.plans.Memory))
	if fits && row.Member.InputBytes > 0 {
		_, fits = reserve(&s.rooms, row.Member.Room(), s.plans.Rooms)
	}
	if !fits {
		return nil, decodeplan.Row{}, false
	}
	row.At = begin
	return s.plans.Memory[begin:][:row.Span()], row, true
}

// reserve adds bytes to used, if they are no more than the maximum then. It returns what was used
// before.
func reserve(used *atomic.Uint64, bytes, maximum int) (before int, fits bool) {
	for {
		at := used.Load()
		if at+uint64(bytes) > uint64(maximum) {
			return 0, false
		}
		if used.CompareAndSwap(at, at+uint64(bytes)) {
			return int(at), true
		}
	}
}

// move copies what belongs to a row of a slot into the memory. It returns false if there is no
// room.
func (s *staging) move(from *staging, row decodeplan.Row) (decodeplan.Row, bool) {
	to, moved, fits := s.reserve(row)
	copy(to, from.plans.Memory[row.At:][:row.Span()])
	return moved, fits
}

// take makes a row of s that of another slot's row.
func (s *staging) take(row int, from *staging, fromRow int) {
	r := from.rows[fromRow]
	// Rows may share a plan, but not a member, which is inflated for one image.
	if r.Bytes > 0 && (from != s || r.Member.InputBytes > 0) {
		var fits bool
		r.Row, fits = s.move(from, r.Row)
		r.lost = !fits
	}
	s.rows[row] = r
}

// exchangePlans moves a row's plan from one slot to another, and if both rows are wanted the other
// way too.
func exchangePlans(to *slot, row int, from *slot, fromRow int, both bool) {
	if to.staging == nil {
		return
	}
	before := to.staging.rows[row]
	if both && to == from {
		to.staging.rows[row], to.staging.rows[fromRow] = to.staging.rows[fromRow], before
		return
	}
	to.staging.take(row, from.staging, fromRow)
	if !both {
		return
	}
	if before.Bytes > 0 { // its memory in to.staging is still as it was
		var fits bool
		before.Row, fits = from.staging.move(to.staging, before.Row)
		before.lost = !fits
	}
	from.staging.rows[fromRow] = before
}

// publish writes the places of the plans of the first n rows for the consumer.
func (s *staging) publish(n int) {
	clear(s.plans.Rows)
	for row := range s.rows[:n] {
		s.plans.Rows[row] = s.rows[row].Row
	}
	s.plans.Used = int(s.used.Load())
}

// decodeLost decodes the rows of a complete batch whose plans were lost.
func (p *pass) decodeLost(r *ready) error {
	if r.slot.staging == nil {
		return nil
	}
	var reader *index.Reader
	for row := range r.samples {
		if again := &r.slot.staging.rows[row]; again.lost {
			if reader == nil {
				reader = index.NewReader(p.known, p.archive)
				defer reader.Close()
			}
			if err := p.l.decodeAgain(p.known, reader, r.samples[row], again.repeat, r.slot.image(row, p.asm.row)); err != nil {
				return err
			}
		}
	}
	return nil
}

// info returns what travels with a batch.
func (p *pass) info(r *ready, state State) Info {
	info := Info{Samples: r.samples, State: state}
	if s := r.slot.staging; s != nil {
		s.publish(len(r.samples))
		info.known = p.known
		info.repeats = make([]repeat, len(r.samples))
		for row := range info.repeats {
			info.repeats[row] = s.rows[row].repeat
		}
	}
	return info
}

// plan writes the plan of a job's image, and returns false if the host has to decode it.
func (w *worker) plan(j *job, info *imagecapi.Info) bool {
	s := j.staging
	if s == nil {
		return false
	}
	again := repeat{size: j.size, epoch: j.epoch, again: j.again}
	s.rows[j.row] = rowPlan{repeat: again}
	if w.points == nil || !w.p.known.Random() || info.Format != imagecapi.JPEG {
		return false
	}
	ops, ok := w.operations()
	if !ok {
		return false
	}
	var row decodeplan.Row
	if info.Progressive {
		row = w.planProgressive(j, info, ops)
	} else {
		row = w.points.plan(j.sample.Index, j.data, &w.geometry, ops, s)
	}
	s.rows[j.row] = rowPlan{Row: row, repeat: again}
	return row.Bytes > 0
}

// operations returns what was drawn of Transform.Ops for the current image. ok is false if Go code
// is among it.
func (w *worker) operations() (ops []imagecapi.AugmentOp, ok bool) {
	if w.augmenter == nil {
		return nil, true
	}
	return w.augmenter.Operations()
}

package imageloader

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/epoch"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
)

// Planner is what a prefetcher asks for to decode images on a GPU (prefetcher.Options.Decode). What
// it returns has no use outside of this module.
//
// A type that embeds a Loader has this method too: a prefetcher that decodes on a GPU then does not
// call the type's own Fill. Such a type overrides Planner, and returns nil, with which the loader's
// workers decode.
func (l *Loader) Planner() decodeplan.Planner { return l.devicePlanner() }

// devicePlanner is a Loader as a decodeplan.Planner.
type devicePlanner Loader

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
	return devplan.PlanBytes(l.index.Load(), l.o.BatchSize, l.o.Damaged != Refuse), nil
}

// MemberBytes implements decodeplan.Planner.
func (p *devicePlanner) MemberBytes() (staging, rooms int) {
	l := (*Loader)(p)
	if _, err := p.PlanBytes(); err != nil || !l.keepsEntryPoints() {
		return 0, 0
	}
	return devplan.MemberBytes(l.index.Load(), l.o.BatchSize)
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

// StepsOnDevice reports whether a GPU that decodes runs every step of Transform.Ops, whatever is
// drawn for a sample.
func (p *devicePlanner) StepsOnDevice() bool { return p.plan.StepsOnDevice() }

// planFiller is the consumer of FillPlans.
type planFiller struct{ decodeplan.Consumer }

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
func (p *devicePlanner) FillPlans(ctx context.Context, epoch int, to decodeplan.Consumer) error {
	if _, err := p.PlanBytes(); err != nil {
		return err
	}
	return (*Loader)(p).fill(ctx, epoch, planFiller{to})
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
	if !ok || row < 0 || row >= len(batch.redos) {
		return fmt.Errorf("imageloader: DecodeRow of row %d: the batch is not one of FillPlans, or has no such row", row)
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
	err := l.repeated.open(ctx, l, batch.known)
	if err == nil {
		err = l.decodeRow(&batch, row, dst)
	}
	if err != nil {
		l.repeated.close()
	}
	return archive.StopCause(ctx, err)
}

// decodeRow decodes a row from the archive that is open for it. It leaves the row's image to the
// host from now on, in the way in which the device has failed.
func (l *Loader) decodeRow(batch *Info, row int, dst []byte) error {
	s, redo := batch.Samples[row], batch.redos[row]
	if redo.Inflated {
		l.entryPoints(batch.known).RefuseMember(s.Index)
	}
	if redo.Searched {
		l.searches(batch.known).Refuse(s.Index)
	}
	config, err := l.epochConfig(batch.known, l.opened)
	if err != nil {
		return err
	}
	return epoch.DecodeAgain(config, l.env(), batch.known, l.repeated.reader, s, redo, dst)
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
	if !l.startCall() {
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
func (l *Loader) keepRow(points *devplan.EntryPoints, batch *Info, row int, found []byte) {
	if row < 0 || row >= len(batch.redos) || batch.redos[row].Search == nil {
		return
	}
	i := batch.Samples[row].Index
	made, others := points.KeepFound(i, batch.redos[row].Search, found)
	if made {
		l.counters.Decoded.EntriesMade.Add(1)
	}
	if others { // a worker compares them with the image, as in a pass without plans
		l.searches(batch.known).Refuse(i)
	}
}

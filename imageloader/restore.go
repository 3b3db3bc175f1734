package imageloader

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/internal/order"
)

// Restore continues an interrupted epoch. From now on, Epoch and Fill start that epoch right after
// the state's batch. Epochs with other numbers run whole. The rest of the epoch is the same as
// without the interruption: the same bytes in the same batches, with any number of workers, even if
// the archive has gained or lost random access since. Restore() without a state undoes this.
// Running epochs are not affected. A closed loader returns ErrClosed.
//
// If Rank and World are the same as in the state, this rank's state is enough. The other ranks'
// states may be given too. With another World, the rest of the epoch is dealt to the new ranks.
// Every sample that was in no batch is then delivered once. A sample that was in a batch is
// delivered again only as padding. Dealing again needs the states of all former ranks after the
// same number of batches. One state is enough if there was one rank, or if Options.BadSamples is
// not Skip. (Under Skip, one rank may have passed over more bad samples than another.) When the
// rest is dealt again, BatchSize may differ too. If World*BatchSize is unchanged, each step has the
// same samples over all ranks as without the interruption, as long as all batches are full.
//
// Restore refuses a state of another archive, other classes, or other options, with an error that
// names the difference. Options that don't change a batch (Workers, Logger and the like) may
// differ. If the loader was opened without reading the archive, Restore reads it completely.
func (l *Loader) Restore(ctx context.Context, states ...State) error {
	if !l.startCall() {
		return ErrClosed
	}
	defer l.running.Done()
	if len(states) == 0 {
		l.mu.Lock()
		l.resume, l.order = nil, l.opened
		l.mu.Unlock()
		return nil
	}
	r, kind, err := l.restore(ctx, states)
	if err != nil {
		return fmt.Errorf("imageloader: %s can't go on from this state: %w", archive.Shown(l.path), err)
	}
	l.mu.Lock()
	l.resume, l.order = r, kind
	l.mu.Unlock()
	return nil
}

// restore returns the start position of a restored epoch, and the order of its run.
func (l *Loader) restore(ctx context.Context, states []State) (*order.Start, order.Kind, error) {
	x := l.index.Load()
	if x == nil {
		var err error
		if x, err = l.readThrough(ctx); err != nil {
			return nil, "", err
		}
	}
	marks := make([]order.Mark, len(states))
	for i, s := range states {
		if s.run == nil {
			return nil, "", errors.New("it is the zero State")
		}
		if err := l.accepts(s.run); err != nil {
			return nil, "", err
		}
		size, err := strconv.Atoi(s.run.options[batchSize])
		if err != nil || size < 1 || size > maxBatchSize {
			return nil, "", fmt.Errorf("it is damaged: its Options.%s is %q", batchSize, s.run.options[batchSize])
		}
		marks[i] = s.mark()
		marks[i].Share.Batch, marks[i].Share.DropLast, marks[i].Share.PadLast = size, l.o.DropLast, l.o.PadLast
	}
	start, err := order.Resume(marks, l.o.share(), l.positions(x), l.o.BadSamples == Skip)
	if err != nil {
		return nil, "", err
	}
	kind := marks[0].Kind
	if !l.possible(kind) {
		return nil, "", fmt.Errorf(
			"it is damaged: its epochs are in the order %q, which these options do not have", kind)
	}
	if (kind == order.Permuted || kind == order.Drawn) && !x.Random() {
		return nil, "", errors.New(
			"its epochs are in an order that needs random access, which this archive does not have (any more): " +
				"make an index with torchstream index, repack it as .tar, or let it stay in memory (Options.ShuffleBytes)")
	}
	return &start, kind, nil
}

// possible reports whether epochs with the loader's options can be in the given order, with or
// without random access.
func (l *Loader) possible(kind order.Kind) bool {
	switch {
	case l.weights != nil:
		return kind == order.Drawn
	case !l.o.Shuffle:
		return kind == order.Archive
	}
	return kind == order.Permuted || kind == order.Buffered
}

// accepts returns an error that names the difference in the archive or the options between a state
// and this loader. It returns nil if there is none.
func (l *Loader) accepts(r *run) error {
	have, was := l.identity(l.index.Load()), r.archive
	if r.identify != nil {
		was = r.identify()
	}
	switch {
	case have.Bytes != was.Bytes:
		return fmt.Errorf("it was made with another archive: one of %d bytes, this has %d", was.Bytes, have.Bytes)
	case l.classesDigest() != r.classes:
		return errors.New("it was made with other classes, or in another order: set Options.Classes to the earlier list")
	case was.Digest != "" && have.Samples != was.Samples:
		return fmt.Errorf("it was made with another archive: one of %d samples, this has %d", was.Samples, have.Samples)
	case was.Digest != "" && have.Digest != was.Digest:
		return errors.New("it was made with another archive: the samples have other names, sizes or labels")
	}
	mine := l.fingerprint(r.order)
	for _, name := range sortedKeys(mine, r.options) {
		a, inMine := mine[name]
		b, inState := r.options[name]
		if byDefault, later := laterOptions[name]; later {
			a, b = cmp.Or(a, byDefault), cmp.Or(b, byDefault)
			inMine, inState = true, true
		}
		switch {
		case name == batchSize && inState && r.world != l.o.World: // the rest is dealt again
		case !inState:
			return fmt.Errorf("it was made by a version of this program without Options.%s", name)
		case !inMine:
			return fmt.Errorf("it was made by a version of this program with Options.%s", name)
		case a != b:
			return fmt.Errorf("this loader's Options.%s is %s, and the state was made with %s", name, a, b)
		}
	}
	return nil
}

package loadersim

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/simworld/imagecapi"
	"github.com/torchstream/torchstream/internal/simworld/world"
)

// rank is a rank of a training.
type rank struct {
	*job
	number int
	epoch  int
	plan
	progress

	altered
	session
	failure error // why the last process ended early
	err     error // a broken promise
}

// altered says how the archive was changed.
type altered struct {
	changed  bool
	replaced bool              // another file has replaced the archive's one file, which stays open
	epoch    int               // when it was changed
	other    int               // the kind of change, if the archive has other samples, so that no state fits
	next     map[string][]byte // if not nil, the archive's files after each batch
}

// session is a process of the rank.
type session struct {
	began   faults // before the process
	kept    kept
	ordered string // the order of whole epochs; "": not known
	fills   bool   // the process lends the memory of batches
}

// kept is the last batch of a loop that the rank has left: it stays valid.
type kept struct{ images, were []byte }

// plan is the model of an epoch.
type plan struct {
	rest     []int // positions of the epoch that were not taken before it was dealt; nil: all
	before   int   // batches of the epoch before it was dealt
	want     [][]Row
	ending   Ending
	inBuffer bool // the epoch is shuffled through a buffer
}

// progress counts the batches of an epoch that a rank has got.
type progress struct {
	states [][]byte // the saved state of the last batch, or of all former ranks; empty: none
	taken  int      // batches of the epoch that the rank has
	short  int      // rows of the last batch, if an error has cut it short
	stray  bool     // the last batch has samples that an error has left in the shuffle buffer
	strays []int    // the samples of such batches
}

// start starts an epoch.
func (r *rank) start() {
	r.rest, r.before, r.progress = nil, 0, progress{}
	r.planIn(r.model.Order)
}

// planIn plans the rest of an epoch in an order.
func (r *rank) planIn(o Order) {
	m := r.model
	m.Order, r.inBuffer = o, o == Buffered
	r.want, r.ending = m.Batches(r.epoch, r.number, r.rest, r.before)
}

// stopped reports whether the rank ends here, so that others continue.
func (r *rank) stopped() bool {
	return r.deal.stop > 0 && r.epoch == r.deal.epoch && r.taken == r.deal.stop
}

// maxTries is the number of processes after which no more disturbances are drawn.
const maxTries = 4

// train runs the processes of a rank until it has all epochs.
func (r *rank) train() error {
	name := fmt.Sprintf("rank %d", r.number)
	for tries := 1; ; tries++ {
		if tries > maxTries+20 {
			return fmt.Errorf("%s: no end after %d processes: %w", name, tries, r.failure)
		}
		kill, crash := 0, false
		if tries <= maxTries && r.w.Choose(name+" killed", 3) != 0 {
			kill = 1 + r.w.Choose(name+" call", 2*r.calls)
			crash = r.w.Choose(name+" loses power", 4) == 3
		}
		if tries > maxTries {
			r.w.Disk.Faults, r.rarity = world.Faults{}, rarity{}
		}
		if err := r.replaceIndex(); err != nil {
			return fmt.Errorf("%s: making the index: %w", name, err)
		}
		before := r.faults()
		ctx, cancel := context.WithCancel(context.Background())
		p := r.w.Start(kill, crash, cancel)
		r.w.Say("%s starts as %s in epoch %d after %d batches", name, p.Root, r.epoch, r.taken)
		r.processIn(ctx, p, 1+r.w.Choose(name+" workers", 3))
		cancel()
		if r.err != nil {
			return fmt.Errorf("%s: %w", name, r.err)
		}
		disturbed := p.Killed() || r.faults().disturb(before) || r.changed
		r.killed = r.killed || p.Killed()
		if err := p.End(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := r.wholeIndex(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := r.refusals(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		r.mend()
		if r.failure == nil {
			return nil
		}
		r.w.Say("%s ends: %v", name, r.failure)
		if !disturbed {
			return fmt.Errorf("%s: nothing disturbed it: %w", name, r.failure)
		}
		if !p.Killed() && !errors.Is(r.failure, imageloader.ErrClosed) && !strings.Contains(r.failure.Error(), "train") {
			return fmt.Errorf("%s: the error does not name the archive: %w", name, r.failure)
		}
	}
}

// replaceIndex makes the index again or removes it, now and then, before a process resumes: another
// order is then the loader's own.
func (r *rank) replaceIndex() error {
	if len(r.states) == 0 || !r.files.format.indexed() || r.options.NoIndex {
		return nil
	}
	switch r.w.Choose("index before a process", 6) {
	case 4:
		r.w.Disk.Delete(r.files.index)
	case 5:
		p := r.w.Start(0, false, nil)
		p.Calm()
		path, o := r.place(p)
		_, err := imageloader.MakeIndex(context.Background(), path, o, nil)
		if p.Killed() { // the machine has lost power
			r.killed, err = true, nil
		}
		return errors.Join(err, p.End())
	}
	return nil
}

// faults counts the faults so far.
type faults struct{ all, transient int }

func (j *job) faults() faults { return faults{j.w.Faults(), j.w.Transient()} }

// disturb reports whether the faults since before may end a process: any other one than few of a
// server, because a loader makes each request six times.
func (f faults) disturb(before faults) bool {
	transient := f.transient - before.transient
	return transient >= 6 || f.all-before.all > transient
}

// refusals checks that a loader refuses the rank's states if its archive or its options are others.
func (r *rank) refusals() error {
	if len(r.states) == 0 || (r.other == 6 || r.other == 8) && !r.identified() {
		return nil
	}
	what, states := "the archive has other samples", r.states
	p := r.w.Start(0, false, nil)
	p.Calm()
	path, o := r.place(p)
	o.Rank = r.number
	if r.other == 0 {
		if r.changed || r.w.Choose("other options", 8) != 7 {
			return p.End()
		}
		if what = "the options are others"; r.w.Choose("other place", 2) == 1 {
			what, states = "a rank's state is after another batch", append(states[:1:1], r.elsewhere())
		} else {
			r.otherOptions(&o)
		}
	}
	l, err := imageloader.Open(path, o)
	if err != nil {
		return p.End()
	}
	if states[len(states)-1] != nil && r.restore(context.Background(), l, states) == nil {
		err = fmt.Errorf("%s, and the loader continues from the state %s", what, states)
	}
	return errors.Join(err, r.err, l.Close(), p.End())
}

// elsewhere returns the last state of another rank if it is after another batch, or nil.
func (r *rank) elsewhere() []byte {
	for number := range r.model.World {
		if s := r.latest[number]; number != r.number && s.state != nil && (s.epoch != r.epoch || s.batches != r.taken) {
			return s.state
		}
	}
	return nil
}

// otherOptions changes an option that batches depend on.
func (r *rank) otherOptions(o *imageloader.Options) {
	switch r.w.Choose("other option", 5) {
	case 0:
		o.Seed++
	case 1:
		o.Repeat++
	case 2:
		o.DropLast, o.PadLast = !o.DropLast, false
	case 3:
		o.BadSamples = (o.BadSamples + 1) % 3
	case 4:
		o.Transform.FlipP = 0.25
	}
}

func (r *rank) process(p *world.Process, workers int) {
	r.processIn(context.Background(), p, workers)
}

// processIn is a process of the rank: it opens the loader, resumes, and takes batches to the end of
// the last epoch. It sets r.failure if it ends early, and r.err if the loader broke a promise.
func (r *rank) processIn(ctx context.Context, p *world.Process, workers int) {
	r.failure, r.session = nil, session{began: r.faults(), fills: r.w.Choose("fill", 3) == 2}
	if len(r.states) == 0 {
		r.planIn(r.model.Order) // an earlier process may have shuffled through a buffer
	}
	path, o := r.place(p)
	o.Rank, o.Workers = r.number, workers
	l, err := imageloader.OpenContext(ctx, path, o)
	if err != nil {
		r.failure = err
		return
	}
	defer func() {
		if err := l.Close(); err != nil && r.failure == nil {
			r.failure = err
		}
	}()
	if r.err = r.checkLoader(l); r.err != nil {
		return
	}
	if r.failure = r.restore(ctx, l, r.states); r.failure != nil || r.err != nil {
		return
	}
	for r.runEpoch(ctx, p, l) && r.epoch+1 < r.epochs {
		r.epoch++
		r.start()
	}
}

// checkLoader compares the sizes of a loader's epochs with the model.
func (r *rank) checkLoader(l *imageloader.Loader) error {
	if r.changed || r.moved { // the loader may have opened another archive
		return nil
	}
	if n := l.Len(); n >= 0 && n != len(r.model.Names) {
		return fmt.Errorf("the loader has %d samples, want %d", n, len(r.model.Names))
	}
	if n, want := l.Batches(), r.model.Count(); n >= 0 && n != want {
		return fmt.Errorf("an epoch of the loader has %d batches, want %d", n, want)
	}
	return nil
}

// restore resumes from saved states.
func (r *rank) restore(ctx context.Context, l *imageloader.Loader, saved [][]byte) error {
	states := make([]imageloader.State, len(saved))
	for i, text := range saved {
		if r.err = json.Unmarshal(text, &states[i]); r.err != nil {
			return nil
		}
	}
	if len(saved) > 0 {
		r.ordered, _ = orderName(saved[0]) // it was read before
	}
	return l.Restore(ctx, states...)
}

// runEpoch takes the batches of an epoch. Now and then it leaves them early, and takes them again
// from the start or from the last state. It returns false if the process has ended.
func (r *rank) runEpoch(ctx context.Context, p *world.Process, l *imageloader.Loader) bool {
	began := r.progress
	for {
		left, more := r.takeBatches(ctx, p, l)
		if left == restart && r.rest != nil { // the rest of an epoch has no start
			left = again
		}
		switch left {
		case again:
			r.progress = began
			continue
		case resume:
			if r.failure = r.restore(ctx, l, r.states); r.failure != nil || r.err != nil {
				return false
			}
			began = r.progress
			continue
		case restart:
			if r.failure = l.Restore(ctx); r.failure != nil {
				return false
			}
			r.ordered = "" // the one with which the loader was opened
			r.start()
			began = r.progress
			continue
		}
		return more
	}
}

// leaving says how a rank continues after it has left an epoch.
type leaving int

const (
	stay leaving = iota
	again
	resume
	closing
	restart // without a state
)

// maxAfterClose is the maximum number of batches that are ready when a loader is closed.
const maxAfterClose = 4

// takeBatches takes batches until the epoch ends or is left. more is false if the process has
// ended.
func (r *rank) takeBatches(ctx context.Context, p *world.Process, l *imageloader.Loader) (left leaving, more bool) {
	r.short, r.stray, r.strays = 0, false, nil
	from, known := r.taken, l.Len() >= 0
	closed := -1 // batches since the loader was closed; -1: it is open
	batches := l.Epoch(ctx, r.epoch)
	if r.fills {
		batches = r.fill(ctx, l)
	}
	for b, err := range batches {
		if p.Killed() {
			r.failure = world.ErrKilled
			return stay, false
		}
		if err != nil {
			if r.failure = r.ended(err); r.failure != nil {
				r.err = errors.Join(r.needless(p, from), r.lost(p, from, known))
			}
			return stay, r.failure == nil
		}
		if r.err = r.check(b); r.err != nil {
			return stay, false
		}
		if closed >= 0 {
			if closed++; closed > maxAfterClose {
				r.err = fmt.Errorf("epoch %d has %d batches after the loader was closed", r.epoch, closed)
				return stay, false
			}
		}
		if r.stopped() {
			return stay, false
		}
		r.w.Wait("train")
		r.change()
		if left := leaving(r.w.Chance("leave", r.leaves, 4)); left == closing && closed < 0 {
			closed = 0
			go func() { _ = l.Close() }() // the process closes it again, and returns that error
			r.w.Wait("close")
		} else if left != stay && left != closing && !r.changed {
			r.kept = kept{b.Images, bytes.Clone(b.Images)}
			return left, true
		}
	}
	if p.Killed() {
		r.failure = world.ErrKilled
		return stay, false
	}
	if r.stray || r.short > 0 || r.taken != len(r.want) || r.ending != (Ending{Bad: -1}) {
		r.err = fmt.Errorf("epoch %d ends without an error after %d batches, want %d and %+v", r.epoch, r.taken,
			len(r.want), r.ending)
	}
	return stay, r.err == nil
}

// change changes the archive now and then. It does so only if no other process opens the archive at
// that time: a training on a changed archive from its start on is right.
func (r *rank) change() {
	r.writeNext()
	if r.model.World > 1 || r.changed || r.epochs == 1 && r.taken == len(r.want) {
		return
	}
	kind := r.w.Chance("archive changes", r.changes, 13)
	inPlace := kind >= 11
	if kind == 0 || inPlace && !r.summed() {
		return
	}
	if kind >= 9 { // other pixels are the hardest to notice
		kind = 5
	}
	files, err := r.variant(variant(max(0, kind-5)))
	if kind >= 5 && (files == nil || err != nil) {
		return
	}
	r.moved = true
	r.altered = altered{changed: true, epoch: r.epoch, replaced: kind >= 3 && !inPlace && !r.files.remote && r.files.format != Tree &&
		len(r.files.was) == 1}
	if kind == 2 || kind >= 6 {
		r.other = kind
	}
	r.nextSecond()
	r.writeAll(kind, files, inPlace)
}

// writeAll changes the files of the archive. others has the files of another version.
func (r *rank) writeAll(kind int, others map[string][]byte, inPlace bool) {
	if all := r.files.format.files(); kind == 5 && len(all) > 1 {
		if one := r.w.Choose("one shard alone", 3); one > 0 {
			delete(others, all[one-1])
		}
	}
	for name, data := range r.files.was {
		if other, ok := others[name]; ok || kind < 5 {
			r.write(name, data, other, kind, inPlace)
		}
	}
}

// nextSecond waits until a server can tell another time: servers tell times in seconds.
func (r *rank) nextSecond() {
	if r.files.remote {
		time.Sleep(2 * time.Second)
	}
}

// write changes a file of the archive.
func (r *rank) write(name string, data, other []byte, kind int, inPlace bool) {
	switch {
	case kind == 1: // cut off
		r.w.Disk.Overwrite(name, data[:len(data)/2])
	case kind == 2: // longer
		r.w.Disk.Overwrite(name, append(bytes.Clone(data), make([]byte, 2048)...))
	case kind == 3: // another file
		r.w.Disk.Write(name, bytes.Repeat([]byte("other "), 1+len(data)/7))
	case kind == 4: // the same bytes again
		r.w.Disk.Write(name, data)
	case inPlace: // another version
		was := r.w.Disk.Changed(name)
		r.w.Disk.Overwrite(name, other)
		if r.w.Choose("same time", 2) == 1 { // the index alone tells
			r.w.Disk.Age(name, r.w.Disk.Changed(name).Sub(was))
		}
	default:
		was := r.w.Disk.Changed(name)
		r.w.Disk.Write(name, other)
		switch since := r.w.Disk.Changed(name).Sub(was); r.w.Choose("time of the other version", 4) {
		case 2:
			if len(other) != len(data) {
				r.w.Disk.Age(name, since)
			}
		case 3:
			r.w.Disk.Age(name, since+time.Hour)
		}
	}
}

// summed reports whether the loader reads the archive by an index with checksums of its samples.
func (r *rank) summed() bool {
	random := r.model.Order == Drawn || r.model.Order == Permuted && !r.inBuffer && r.ordered == "permutation"
	return random && r.files.format.gzipped()
}

// identified reports whether the rank's state has the digest of the archive's samples.
func (r *rank) identified() bool {
	var s struct{ Archive struct{ Digest string } }
	return len(r.states) > 0 && json.Unmarshal(r.states[0], &s) == nil && s.Archive.Digest != ""
}

// mend undoes a change of the archive.
func (r *rank) mend() {
	if !r.changed {
		return
	}
	r.altered = altered{}
	r.nextSecond()
	for name, data := range r.files.was {
		r.w.Disk.Write(name, data)
	}
}

// ended returns nil if an epoch ends with an error as it should.
func (r *rank) ended(err error) error {
	failure := r.endedAsPlanned(err)
	if failure != nil && r.taken == 0 && r.short == 0 && !r.inBuffer && r.buffered() && len(r.states) == 0 { // no state has named the order
		r.planIn(Buffered)
		if failure = r.endedAsPlanned(err); failure != nil {
			r.planIn(Permuted)
		}
	}
	return failure
}

// buffered reports whether an epoch may be shuffled through a buffer.
func (r *rank) buffered() bool { return r.model.Order == Permuted && r.files.format.gzipped() }

func (r *rank) endedAsPlanned(err error) error {
	if r.stray {
		return err
	}
	if left := r.want[r.taken:]; len(left) > 1 || len(left) == 1 && r.short != len(left[0]) {
		return err
	}
	var bad *imageloader.SampleError
	switch {
	case r.ending.Bad >= 0 && errors.As(err, &bad) && bad.Name == r.model.Names[r.ending.Bad]:
		return nil
	case r.ending.NoSamples && errors.Is(err, imageloader.ErrNoSamples):
		return nil
	}
	return err
}

// check compares a batch with the model, and saves its state.
func (r *rank) check(b *imageloader.Batch) error {
	if !bytes.Equal(r.kept.images, r.kept.were) {
		return fmt.Errorf("the last batch of a loop that was left has the pixels %x, and had %x", r.kept.images, r.kept.were)
	}
	state, err := json.Marshal(b.State)
	if err != nil {
		return err
	}
	if r.taken == 0 && r.short == 0 && len(r.states) == 0 {
		if err := r.orderOf(state); err != nil {
			return err
		}
	}
	same := b.State.Batches() == r.before+r.taken // an error follows
	if r.short > 0 || r.stray && !same {
		return fmt.Errorf("epoch %d has a batch after one that an error has cut short: %v", r.epoch, b.Samples)
	}
	short := same && b.N < r.model.Batch
	err = r.checkRows(b, short)
	if same && r.inBuffer && (err != nil || !short) {
		r.stray = true
		return r.checkStray(b)
	}
	if err != nil {
		return err
	}
	if short {
		r.short = b.N
		return nil
	}
	r.taken++
	if b.State.Batches() != r.before+r.taken || b.State.Epoch() != r.epoch {
		return fmt.Errorf("the state is after batch %d of epoch %d, want %d of %d", b.State.Batches(), b.State.Epoch(),
			r.before+r.taken, r.epoch)
	}
	r.states = [][]byte{state}
	r.latest[r.number] = latest{state, r.epoch, r.taken}
	return nil
}

// checkRows compares the rows of a batch with the model. If short is set, they may be fewer.
func (r *rank) checkRows(b *imageloader.Batch, short bool) error {
	if r.taken == len(r.want) {
		return fmt.Errorf("epoch %d has a batch after the last of %d: %v", r.epoch, len(r.want), b.Samples)
	}
	want := r.want[r.taken]
	if b.N != len(want) && !(short && b.N < len(want)) || b.N != len(b.Samples) {
		return fmt.Errorf("epoch %d, batch %d has %d rows, want %d", r.epoch, r.taken, b.N, len(want))
	}
	for i, s := range b.Samples {
		row := want[i]
		if s.Index != row.Index || s.Name != row.Name || s.Label != row.Label || b.Labels[i] != int64(row.Label) {
			return fmt.Errorf("epoch %d, batch %d, row %d: got %+v with label %d, want %+v", r.epoch, r.taken, i, s,
				b.Labels[i], row)
		}
		if err := r.checkPixels(row, b.Images[i*3*side*side:][:3*side*side]); err != nil {
			return fmt.Errorf("epoch %d, batch %d, row %d: %w", r.epoch, r.taken, i, err)
		}
	}
	return nil
}

// checkStray checks a batch of the samples that were in the shuffle buffer when reading failed. Its
// state is the one of the batch before, so a training that resumes gets them again in their places.
func (r *rank) checkStray(b *imageloader.Batch) error {
	for i, s := range b.Samples {
		got := binary.LittleEndian.Uint32(b.Images[i*3*side*side:])
		if want := imagecapi.Sum(r.members[s.Index].Data); s.Name != r.model.Names[s.Index] || got != want {
			return fmt.Errorf("epoch %d, a sample left in the buffer: got %+v of the bytes %x, want %x", r.epoch, s, got, want)
		}
		r.strays = append(r.strays, s.Index)
	}
	return nil
}

// orderOf plans the epoch again in the order that its first batch's state names. A shuffled .tar.gz
// is either permuted or shuffled through a buffer: that depends on whether it had an index when
// it was opened.
func (r *rank) orderOf(state []byte) error {
	if r.model.Order != Permuted {
		return nil
	}
	name, err := orderName(state)
	if err != nil {
		return err
	}
	if r.ordered != "" && name != r.ordered {
		return fmt.Errorf("epoch %d is in the order %q, and the one before in %q", r.epoch, name, r.ordered)
	}
	r.ordered = name
	switch {
	case name == "permutation":
		r.planIn(Permuted)
	case name == "buffer" && r.buffered():
		r.planIn(Buffered)
	default:
		return fmt.Errorf("the order of the epoch is %q", name)
	}
	return nil
}

// orderName returns the order that a state names.
func orderName(state []byte) (string, error) {
	var s struct{ Order string }
	err := json.Unmarshal(state, &s)
	return s.Order, err
}

// checkPixels compares the pixels of a row with the model.
func (r *rank) checkPixels(row Row, pixels []byte) error {
	data := r.members[row.Index].Data
	info, err := imagecapi.Header(data)
	if err != nil {
		return err
	}
	c := r.model.Crop(row.Draw, int(info.Width), int(info.Height))
	want := make([]byte, len(pixels))
	imagecapi.Pixels(data, &imagecapi.Geometry{CropX: int32(c.X), CropY: int32(c.Y), CropWidth: int32(c.Width),
		CropHeight: int32(c.Height), Flip: c.Flip, WindowWidth: side, WindowHeight: side}, want, 3*side)
	if !bytes.Equal(pixels, want) {
		return fmt.Errorf("%s has the pixels %x, want %x of the bytes %x", row.Name, pixels, want, imagecapi.Sum(data))
	}
	return nil
}

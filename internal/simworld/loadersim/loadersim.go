// Package loadersim runs trainings on a simulated machine, and compares what package imageloader
// delivers with a model. A training has ranks that run at the same time, are killed, meet faults of
// the disk, and resume from the states that they saved.
package loadersim

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"strings"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/simworld/imagecapi"
	"github.com/torchstream/torchstream/internal/simworld/world"
)

const (
	folder  = "/data"
	archive = folder + "/train.tar"
	index   = archive + ".tsidx"
	side    = 4 // of the images that are loaded
)

// job is a training.
type job struct {
	w       *world.World
	model   Model
	members []Member
	options imageloader.Options
	epochs  int
	calls   int // of an undisturbed process
	pixels  map[Draw][]byte
	unclean bool // a process was killed or met a fault, so its temporary files may be left
}

// Run draws a training and runs it.
func Run(w *world.World) error {
	j, err := draw(w)
	if err != nil {
		return err
	}
	if err := w.Calm(j.reference); err != nil {
		return fmt.Errorf("undisturbed: %w", err)
	}
	j.draws()
	if err := j.train(); err != nil {
		return err
	}
	return w.Calm(j.after)
}

// draw draws an archive and the options of a training.
func draw(w *world.World) (*job, error) {
	j := &job{w: w, pixels: map[Draw][]byte{}}
	var classes []string
	j.members, classes = drawMembers(w)
	data, err := packTar(j.members)
	if err != nil {
		return nil, err
	}
	w.Disk.Write(archive, data)
	m := &j.model
	for _, f := range j.members {
		m.Names, m.Labels, m.Bad = append(m.Names, f.Name), append(m.Labels, f.Label), append(m.Bad, f.Bad)
	}
	m.Batch, m.World = 1+w.Choose("batch", 6), 1+w.Choose("world", 3)
	m.Repeat, m.Seed = 1+w.Choose("repeat", 5)/3, uint64(w.Choose("seed", 1000))
	m.Policy = Policy(w.Choose("policy", 3))
	last := w.Choose("last", 3)
	m.DropLast, m.PadLast = last == 1, last == 2
	o := imageloader.Options{
		BatchSize: m.Batch, World: m.World, Repeat: m.Repeat, Seed: m.Seed, DropLast: m.DropLast, PadLast: m.PadLast,
		BadSamples: imageloader.BadSamplePolicy(m.Policy),
		Transform:  imageloader.Transform{Size: side, RandomResizedCrop: true, FlipP: 0.5},
		NoIndex:    w.Choose("no index", 4) == 3,
	}
	if w.Choose("give classes", 2) == 1 {
		o.Classes = classes
	}
	switch m.Order = Order(w.Choose("order", 3)); m.Order {
	case Permuted:
		o.Shuffle = true
	case Drawn:
		j.weigh(&o)
	}
	j.options, j.epochs = o, 1+w.Choose("epochs", 2)
	return j, nil
}

// weigh makes the order one of weighted draws.
func (j *job) weigh(o *imageloader.Options) {
	m := &j.model
	m.Weights = make([]float64, len(m.Names))
	for i := range m.Weights {
		m.Weights[i] = float64(1 + j.w.Choose("weight", 4))
	}
	m.Draws = []int{0, 1, 5, 11}[j.w.Choose("draws", 4)]
	o.Draws = m.Draws
	o.Weights = func(s imageloader.Sample) float64 { return m.Weights[s.Index] }
}

// draws draws the disturbances.
func (j *job) draws() {
	w := j.w
	rare := func(name string) int { return []int{0, 400, 60, 15}[w.Choose(name, 4)] }
	f := &w.Disk.Faults
	f.Read, f.Write, f.Name = rare("rare reads"), rare("rare writes"), rare("rare names")
	f.Sync, f.Lock = rare("rare syncs"), rare("rare locks")
	w.Disk.Network = w.Choose("network disk", 3) == 2
	j.w.Say("%d samples %v, %+v, epochs %d", len(j.members), j.model.Bad, j.model.Share, j.epochs)
}

// reference runs the epochs of one rank undisturbed, so that the model is checked without the
// disturbances, and notes the pixels.
func (j *job) reference() error {
	p := j.w.Start(0, false, nil)
	r := &rank{job: j, number: 0}
	for r.epoch = range j.epochs {
		r.plan()
		r.process(p, 1)
		if r.err != nil {
			return r.err
		}
		if r.failure != nil {
			return fmt.Errorf("epoch %d: %w", r.epoch, r.failure)
		}
	}
	j.calls = p.Calls()
	return p.End()
}

// train runs all ranks at the same time, to their ends.
func (j *job) train() error {
	done := make(chan error, j.model.World)
	for number := range j.model.World {
		go func() { done <- (&rank{job: j, number: number}).train() }()
	}
	var errs []error
	for range j.model.World {
		errs = append(errs, <-done)
	}
	return errors.Join(errs...)
}

// after checks what a training leaves.
func (j *job) after() error {
	for _, name := range j.w.Disk.Files() {
		switch {
		case name == archive:
		case name == index:
			if data, _ := j.w.Disk.Read(name); len(data) > 0 {
				if err := checkIndex(data); err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
			}
		case !j.unclean || !strings.HasPrefix(name, index+".") || !strings.HasSuffix(name, ".tmp"):
			return fmt.Errorf("a file is left: %s", name)
		}
	}
	return j.reference()
}

// rank is a rank of a training.
type rank struct {
	*job
	number int
	epoch  int

	want   [][]Row
	ending Ending
	state  []byte // the saved state of the last batch; nil: none
	taken  int    // batches of the epoch that the rank has
	short  int    // rows of the last batch, if an error has cut it short

	failure error // why the last process ended early
	err     error // a broken promise
}

// plan starts an epoch.
func (r *rank) plan() {
	r.want, r.ending = r.model.Batches(r.epoch, r.number, nil, 0)
	r.state, r.taken = nil, 0
}

// maxTries is the number of processes after which no more disturbances are drawn.
const maxTries = 4

// train runs the processes of a rank until it has all epochs.
func (r *rank) train() error {
	tries := 0
	for r.epoch = 0; r.epoch < r.epochs; r.epoch++ {
		r.plan()
		for {
			tries++
			name := fmt.Sprintf("rank %d", r.number)
			kill, crash := 0, false
			if tries <= maxTries && r.w.Choose(name+" killed", 3) != 0 {
				kill = 1 + r.w.Choose(name+" call", 2*r.calls)
				crash = r.w.Choose(name+" loses power", 4) == 3
			}
			if tries > maxTries {
				r.w.Disk.Faults = world.Faults{}
			}
			faults := r.w.Faults()
			ctx, cancel := context.WithCancel(context.Background())
			p := r.w.Start(kill, crash, cancel)
			r.w.Say("%s starts as %s in epoch %d after %d batches", name, p.Root, r.epoch, r.taken)
			r.processIn(ctx, p, 1+r.w.Choose(name+" workers", 3))
			cancel()
			if r.err != nil {
				return fmt.Errorf("%s: %w", name, r.err)
			}
			disturbed := p.Killed() || r.w.Faults() > faults
			r.unclean = r.unclean || disturbed
			if err := p.End(); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if r.failure == nil {
				break
			}
			r.w.Say("%s ends: %v", name, r.failure)
			if !disturbed {
				return fmt.Errorf("%s: nothing disturbed it: %w", name, r.failure)
			}
			if !p.Killed() && !strings.Contains(r.failure.Error(), "train.tar") {
				return fmt.Errorf("%s: the error does not name the archive: %w", name, r.failure)
			}
			if tries > maxTries+20 {
				return fmt.Errorf("%s: no end after %d processes: %w", name, tries, r.failure)
			}
		}
	}
	return nil
}

func (r *rank) process(p *world.Process, workers int) {
	r.processIn(context.Background(), p, workers)
}

// processIn is a process of the rank: it opens the loader, resumes, and takes batches to the end of
// the epoch. It sets r.failure if the epoch did not end as it should, and r.err if the loader broke
// a promise.
func (r *rank) processIn(ctx context.Context, p *world.Process, workers int) {
	r.failure, r.short = nil, 0
	o := r.options
	o.Rank, o.Workers = r.number, workers
	log := &logger{say: r.w.Say}
	o.Logger = slog.New(log)
	l, err := imageloader.OpenContext(ctx, p.Root+archive, o)
	if err != nil {
		r.failure = err
		return
	}
	defer func() {
		if err := l.Close(); err != nil && r.failure == nil {
			r.failure = err
		}
	}()
	if r.state != nil {
		var s imageloader.State
		if err := json.Unmarshal(r.state, &s); err != nil {
			r.err = err
			return
		}
		if err := l.Restore(ctx, s); err != nil {
			r.failure = err
			return
		}
	}
	for b, err := range l.Epoch(ctx, r.epoch) {
		if err != nil {
			r.failure = r.ended(err)
			return
		}
		if r.err = r.check(b); r.err != nil {
			return
		}
		r.w.Wait("train")
		if p.Killed() {
			r.failure = world.ErrKilled
			return
		}
	}
	if p.Killed() {
		r.failure = world.ErrKilled
		return
	}
	if r.taken != len(r.want) || r.ending != (Ending{Bad: -1}) {
		r.err = fmt.Errorf("epoch %d ends without an error after %d batches, want %d and %+v", r.epoch, r.taken,
			len(r.want), r.ending)
	}
}

// ended returns nil if an epoch ends with an error as it should.
func (r *rank) ended(err error) error {
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
	if r.taken == len(r.want) {
		return fmt.Errorf("epoch %d has a batch after the last of %d: %v", r.epoch, len(r.want), b.Samples)
	}
	want := r.want[r.taken]
	short := b.State.Batches() == r.taken && b.N < r.model.Batch // an error follows
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
	if short {
		r.short = b.N
		return nil
	}
	r.taken++
	if b.State.Batches() != r.taken || b.State.Epoch() != r.epoch {
		return fmt.Errorf("the state is after batch %d of epoch %d, want %d of %d", b.State.Batches(), b.State.Epoch(),
			r.taken, r.epoch)
	}
	var err error
	r.state, err = json.Marshal(b.State)
	return err
}

// checkPixels checks that the pixels are of the sample, and are the same for each occurrence of a
// draw.
func (r *rank) checkPixels(row Row, pixels []byte) error {
	if got, want := binary.LittleEndian.Uint32(pixels), imagecapi.Sum(r.members[row.Index].Data); got != want {
		return fmt.Errorf("the pixels are of the bytes %x, want %x of %s", got, want, row.Name)
	}
	before, known := r.pixels[row.Draw]
	if !known {
		r.pixels[row.Draw] = bytes.Clone(pixels)
	} else if !bytes.Equal(before, pixels) {
		return fmt.Errorf("%s has other pixels than before: %x, want %x", row.Name, pixels, before)
	}
	return nil
}

// checkIndex checks that a file is a whole index, by docs/index-format.md.
func checkIndex(b []byte) error {
	le := binary.LittleEndian
	if len(b) < 32 || string(b[:8]) != "TSIDX\x00\r\n" || le.Uint32(b[8:]) != 3 {
		return fmt.Errorf("it begins with %q", b[:min(len(b), 12)])
	}
	n := int(le.Uint32(b[12:]))
	if le.Uint64(b[16:]) != uint64(len(b)) || crc32.ChecksumIEEE(b[:28]) != le.Uint32(b[28:]) || 32+32*n > len(b) {
		return errors.New("its header is damaged")
	}
	table := b[32:][:32*n]
	if crc32.ChecksumIEEE(table) != le.Uint32(b[24:]) {
		return errors.New("its table is damaged")
	}
	for ; len(table) > 0; table = table[32:] {
		kind, at, size := le.Uint32(table), le.Uint64(table[8:]), le.Uint64(table[16:])
		if at > uint64(len(b)) || size > uint64(len(b))-at {
			return fmt.Errorf("section %d is outside of it", kind)
		}
		if kind != 6 && kind != 9 && crc32.ChecksumIEEE(b[at:][:size]) != le.Uint32(table[4:]) {
			return fmt.Errorf("section %d is damaged", kind)
		}
	}
	return nil
}

// logger adds log lines to the story.
type logger struct{ say func(string, ...any) }

func (l *logger) Enabled(context.Context, slog.Level) bool { return true }
func (l *logger) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logger) WithGroup(string) slog.Handler            { return l }

func (l *logger) Handle(_ context.Context, r slog.Record) error {
	text := "log: " + r.Message
	r.Attrs(func(a slog.Attr) bool { text += " " + a.String(); return true })
	l.say("%s", text)
	return nil
}

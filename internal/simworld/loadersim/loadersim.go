// Package loadersim runs trainings on a simulated machine, and compares what package imageloader
// delivers with a model. A training has ranks that run at the same time, are killed, meet faults of
// the disk and of servers, and resume from the states that they saved.
package loadersim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"strings"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/simworld/world"
)

const (
	folder = "/data"
	side   = 4 // of the images that are loaded
)

// job is a training.
type job struct {
	w       *world.World
	model   Model
	members []Member
	files   files
	options imageloader.Options
	epochs  int
	calls   int  // of an undisturbed process
	leaves  int  // how rarely an epoch is left early; 0: never
	unclean bool // a process was killed or met a fault, so its temporary files may be left
	moved   bool // the archive was changed
}

// files is the archive of a training.
type files struct {
	format         Format
	archive, index string
	remote         bool              // the archive is behind a URL
	was            map[string][]byte // the archive's files
	found          []byte            // a damaged index that the training finds
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
	j.disturb()
	if err := j.train(); err != nil {
		return err
	}
	w.Disk.Faults = world.Faults{}
	return w.Calm(j.after)
}

// draw draws an archive and the options of a training.
func draw(w *world.World) (*job, error) {
	j := &job{w: w}
	m := &j.model
	if err := j.drawArchive(); err != nil {
		return nil, err
	}
	m.Batch, m.World = 1+w.Choose("batch", 6), 1+w.Choose("world", 3)
	m.Repeat, m.Seed = 1+w.Choose("repeat", 5)/3, uint64(w.Choose("seed", 1000))
	m.Policy = Policy(w.Choose("policy", 3))
	last := w.Choose("last", 3)
	m.DropLast, m.PadLast = last == 1, last == 2
	j.epochs = 1 + w.Choose("epochs", 3)
	o := &j.options
	o.BatchSize, o.World, o.Repeat, o.Seed = m.Batch, m.World, m.Repeat, m.Seed
	o.DropLast, o.PadLast, o.BadSamples = m.DropLast, m.PadLast, imageloader.BadSamplePolicy(m.Policy)
	o.Transform = imageloader.Transform{Size: side, RandomResizedCrop: true, FlipP: 0.5}
	o.NoIndex = w.Choose("no index", 4) == 3
	switch w.Choose("order", 4) {
	case 0:
		if j.files.format.gzipped() { // with few bytes a loader reads a stream each time
			o.ShuffleBytes = []int64{0, 1, 3000}[w.Choose("held bytes", 3)]
		}
	case 1:
		m.Order, o.Shuffle = Permuted, true
	case 2:
		j.weigh()
	case 3:
		m.Order, o.Shuffle = Permuted, true
		if j.files.format.gzipped() {
			m.Buffer = 1 + w.Choose("buffer", 8)
			m.BufferBytes = []int{1 << 20, 3000, 20_000}[w.Choose("buffer bytes", 3)]
			o.ShuffleBuffer, o.ShuffleBytes = m.Buffer, int64(m.BufferBytes)
		}
	}
	if m.Buffer == 0 { // the defaults
		m.Buffer, m.BufferBytes = 4096, 256<<20
	}
	return j, nil
}

// drawArchive draws an archive and writes it.
func (j *job) drawArchive() error {
	w := j.w
	members, classes := drawMembers(w)
	j.files.format = Format(w.Choose("format", int(formats)))
	j.files.archive, j.files.index = j.files.format.path()
	if j.files.format != Tree && w.Choose("remote", 4) == 3 {
		j.files.remote, j.files.index = true, folder+"/train.remote.tsidx"
		j.options.OpenSource = func(ctx context.Context, url string) (imageloader.Source, error) {
			return imageloader.OpenHTTP(ctx, url, &http.Client{Transport: w})
		}
	}
	var err error
	if j.members, err = j.files.format.pack(w, members); err != nil {
		return err
	}
	j.files.was = map[string][]byte{}
	m := &j.model
	for _, f := range w.Disk.Files() {
		data, _ := w.Disk.Read(f)
		j.files.was[f] = data
		m.ArchiveBytes += len(data)
	}
	for _, f := range j.members {
		m.Names, m.Labels, m.Bad = append(m.Names, f.Name), append(m.Labels, f.Label), append(m.Bad, f.Bad)
		m.Sizes = append(m.Sizes, len(f.Data))
	}
	if w.Choose("give classes", 2) == 1 {
		j.options.Classes = classes
	}
	return nil
}

// weigh makes the order one of weighted draws.
func (j *job) weigh() {
	m := &j.model
	m.Order = Drawn
	m.Weights = make([]float64, len(m.Names))
	for i := range m.Weights {
		m.Weights[i] = float64(1 + j.w.Choose("weight", 4))
	}
	m.Draws = []int{0, 1, 5, 11}[j.w.Choose("draws", 4)]
	j.options.Draws = m.Draws
	j.options.Weights = func(s imageloader.Sample) float64 { return m.Weights[s.Index] }
}

// disturb draws how rare faults are.
func (j *job) disturb() {
	w := j.w
	rare := func(name string) int { return []int{0, 400, 60, 15}[w.Choose(name, 4)] }
	f := &w.Disk.Faults
	f.Read, f.Write, f.Name = rare("rare reads"), rare("rare writes"), rare("rare names")
	f.Move = f.Name
	f.Sync, f.Lock, f.Server = rare("rare syncs"), rare("rare locks"), rare("rare responses")
	j.leaves = rare("rare leaves") / 2
	f.Stop = 20 * rare("rare stops")
	w.Disk.Network = w.Choose("network disk", 3) == 2
	j.spoilIndex()
	w.Say("%d samples in %s, bad: %v, %+v, %d epochs", len(j.members), j.files.archive, j.model.Bad, j.model.Share, j.epochs)
}

// spoilIndex removes the index that the reference has made, or damages it.
func (j *job) spoilIndex() {
	w, name := j.w, j.files.index
	data, ok := w.Disk.Read(name)
	if !ok {
		return
	}
	// A file without the first 8 bytes of an index is of another kind, and is kept.
	switch w.Choose("index", 6) {
	case 0, 1:
		w.Disk.Delete(name)
	case 2:
		j.files.found = data[:8+w.Choose("cut", len(data)-8)]
		w.Disk.Write(name, j.files.found)
	case 3, 4:
		j.files.found = bytes.Clone(data)
		j.files.found[w.Choose("damaged byte", unchecked(data)-8)+8] ^= byte(1 + w.Choose("damage of index", 255))
		w.Disk.Write(name, j.files.found)
	}
}

// reference runs the epochs of rank 0 undisturbed, so that the model is also checked without
// disturbances.
func (j *job) reference() error {
	p := j.w.Start(0, false, nil)
	r := &rank{job: j}
	r.start()
	r.process(p, 1)
	if r.err != nil {
		return r.err
	}
	if r.failure != nil {
		return fmt.Errorf("epoch %d: %w", r.epoch, r.failure)
	}
	j.calls = p.Calls()
	return p.End()
}

// maxDeals is the maximum number of times that the rest of the first epoch is dealt.
const maxDeals = 3

// train runs all ranks at the same time, to their ends. Now and then another number of ranks
// continues the first epoch.
func (j *job) train() error {
	ranks := make([]*rank, j.model.World)
	for i := range ranks {
		ranks[i] = &rank{job: j, number: i}
		ranks[i].start()
	}
	for deal := 1; ; deal++ {
		stop := 0
		if deal < maxDeals {
			stop = j.drawStop(ranks)
		}
		for _, r := range ranks {
			r.stop = stop
		}
		if err := j.all(ranks); err != nil || stop == 0 {
			return err
		}
		ranks = j.redeal(ranks)
	}
}

// all runs ranks at the same time.
func (j *job) all(ranks []*rank) error {
	done := make(chan error, len(ranks)+1)
	for _, r := range ranks {
		go func() { done <- r.train() }()
	}
	go func() { done <- j.makeIndex() }()
	var errs []error
	for range len(ranks) + 1 {
		errs = append(errs, <-done)
	}
	return errors.Join(errs...)
}

// makeIndex is a process that makes the index again, now and then, while the ranks run.
func (j *job) makeIndex() error {
	if !j.files.format.indexed() || j.options.NoIndex || j.w.Choose("index process", 6) != 5 {
		return nil
	}
	for range j.w.Choose("index process waits", 100) {
		j.w.Wait("index process")
	}
	faults := j.w.Faults()
	kill := j.w.Choose("index process killed", 2) * (1 + j.w.Choose("index process call", 200))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	p := j.w.Start(kill, false, cancel)
	path, o := j.place(p)
	_, err := imageloader.MakeIndex(ctx, path, o, nil)
	disturbed := p.Killed() || j.w.Faults() > faults
	j.unclean = j.unclean || disturbed
	if err := p.End(); err != nil {
		return fmt.Errorf("making the index: %w", err)
	}
	if err != nil && !disturbed && !j.moved {
		return fmt.Errorf("making the index, which nothing disturbed: %w", err)
	}
	return nil
}

// place returns the path and the options of the archive for a process.
func (j *job) place(p *world.Process) (path string, o imageloader.Options) {
	path, o = p.Root+j.files.archive, j.options
	o.Logger = slog.New(&logger{say: j.w.Say})
	if j.files.remote {
		path = "http://server" + path
		if j.files.format.indexed() {
			o.IndexFile = p.Root + j.files.index
		}
	}
	return path, o
}

// drawStop draws after how many batches of the first epoch other ranks continue. It returns 0 if
// none do.
func (j *job) drawStop(ranks []*rank) int {
	if j.w.Choose("deal again", 2) != 1 {
		return 0
	}
	whole := math.MaxInt
	for _, r := range ranks {
		batches := r.want
		if n := len(batches); n > 0 && (r.ending.Bad >= 0 || len(batches[n-1]) < j.model.Batch) {
			batches = batches[:n-1]
		}
		whole = min(whole, len(batches))
	}
	if whole == 0 || j.files.format.gzipped() && j.model.Order == Permuted { // the order is not known yet
		return 0
	}
	return 1 + j.w.Choose("batches before", whole)
}

// redeal returns other ranks, which continue where the ranks have stopped.
func (j *job) redeal(ranks []*rank) []*rank {
	m, stop, before := &j.model, ranks[0].stop, ranks[0].before
	rest := m.Rest(0, ranks[0].rest, stop)
	before += stop
	var states [][]byte
	for _, r := range ranks {
		states = append(states, r.states[0])
	}
	if m.Policy != Skip && j.w.Choose("one state", 2) == 1 { // is enough
		states = states[:1]
	}
	world := 1 + j.w.Choose("other world", 3)
	if world >= m.World {
		world++
	}
	m.World, m.Batch = world, 1+j.w.Choose("other batch", 6)
	j.options.World, j.options.BatchSize = m.World, m.Batch
	j.w.Say("%d ranks continue after %d batches with %d positions", world, before, len(rest))
	others := make([]*rank, world)
	for i := range others {
		others[i] = &rank{job: j, number: i, plan: plan{rest: rest, before: before}, progress: progress{states: states}}
		others[i].planIn(m.Order)
	}
	return others
}

// wholeIndex returns an error if there is an index that is not whole, unless the training has found
// it so.
func (j *job) wholeIndex() error {
	data, ok := j.w.Disk.Read(j.files.index)
	if !ok || bytes.Equal(data, j.files.found) {
		return nil
	}
	if err := checkIndex(data); err != nil {
		return fmt.Errorf("%s: %w", j.files.index, err)
	}
	return nil
}

// after checks what a training leaves, and that a new process gets the same from it.
func (j *job) after() error {
	for _, name := range j.w.Disk.Files() {
		switch {
		case j.files.was[name] != nil || strings.HasPrefix(name, folder+"/train/"):
		case name == j.files.index:
		case !j.unclean || !strings.HasPrefix(name, j.files.index+".") || !strings.HasSuffix(name, ".tmp"):
			return fmt.Errorf("a file is left: %s", name)
		}
	}
	return j.reference()
}

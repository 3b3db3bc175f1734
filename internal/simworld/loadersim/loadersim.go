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
	"slices"
	"strings"
	"time"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/simworld/imagecapi"
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
	calls   int // of an undisturbed process
	rarity
	deal   deal
	latest map[int]latest // by rank, of the present ranks
	killed bool           // a process was killed, so its temporary files may be left
	moved  bool           // the archive was changed
}

// rarity says how rare disturbances other than faults are: one in this number; 0: never.
type rarity struct {
	leaves  int // of an epoch, early
	changes int // of the archive
}

// deal says when other ranks continue.
type deal struct {
	epoch int
	stop  int // after this many batches of the epoch; 0: never
}

// latest is the last state that a rank has saved, and its place.
type latest struct {
	state          []byte
	epoch, batches int
}

// files is the archive of a training.
type files struct {
	format         Format
	how            []packing
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
	if err := j.disturb(); err != nil {
		return err
	}
	if err := j.train(); err != nil {
		return err
	}
	w.Disk.Faults = world.Faults{}
	if err := w.Calm(j.after); err != nil {
		return err
	}
	return w.Calm(j.damaged)
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
		if f := j.files.format; f.gzipped() || f == Parquet { // with few bytes a loader reads the file each time
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
			m.BufferBytes = []int{1 << 20, 3000, 20_000, 400, 1000}[w.Choose("buffer bytes", 5)]
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
	f := &j.files
	for i := range members {
		m := &members[i]
		switch {
		case f.format == Parquet && len(m.Data) == 0: // a row without an image is no sample
			m.spoil(1)
		case f.format != Zip && m.torn: // there is no other checksum than the image's
			m.spoil(0)
		}
	}
	f.how = f.format.drawPacking(w, members, classes)
	j.members = f.format.sorted(members)
	var err error
	if f.was, err = f.format.pack(j.members, f.how); err != nil {
		return err
	}
	for name, data := range f.was {
		w.Disk.Write(name, data)
		j.model.ArchiveBytes += len(data)
	}
	if w.Disk.Other, err = j.variant(otherPixels); err != nil {
		return err
	}
	j.drawLimits()
	m := &j.model
	for _, f := range j.members {
		m.Names, m.Labels, m.Bad = append(m.Names, f.Name), append(m.Labels, f.Label), append(m.Bad, f.Bad)
		m.Sizes = append(m.Sizes, len(f.Data))
		if most := int(j.options.MaxSampleBytes); most > 0 && len(f.Data) > most {
			m.Sizes[len(m.Sizes)-1] = 0 // it is not read
		}
	}
	if w.Choose("give classes", 2) == 1 {
		j.options.Classes = classes
	}
	return nil
}

// drawLimits limits the sizes of samples, now and then, to the sizes of one sample.
func (j *job) drawLimits() {
	w, o := j.w, &j.options
	if w.Choose("limit bytes", 6) == 5 {
		o.MaxSampleBytes = int64(max(1, len(j.members[w.Choose("largest sample", len(j.members))].Data)))
	}
	area := func(m *Member) int64 {
		info, err := imagecapi.Header(m.Data)
		if err != nil {
			return 1
		}
		return int64(info.Width) * int64(info.Height)
	}
	if w.Choose("limit pixels", 6) == 5 {
		o.MaxPixels = area(&j.members[w.Choose("largest image", len(j.members))])
	}
	for i := range j.members {
		m := &j.members[i]
		m.Bad = m.Bad || o.MaxSampleBytes > 0 && int64(len(m.Data)) > o.MaxSampleBytes ||
			o.MaxPixels > 0 && area(m) > o.MaxPixels
	}
}

// variant is another version of an archive.
type variant int

// The variants.
const (
	otherPixels variant = iota // of the same sizes
	otherOrder
	moreSamples
	otherNames
)

// variant returns the files of another version of the archive, or nil if there is none.
func (j *job) variant(v variant) (map[string][]byte, error) {
	if j.files.format == Tree { // nothing of a file's content is known before it is read
		return nil, nil
	}
	members := slices.Clone(j.members)
	switch v {
	case otherPixels:
		for i := range members {
			members[i] = members[i].otherPayload()
		}
	case otherOrder:
		if len(members) == 1 {
			return nil, nil
		}
		members = append(members[1:], members[0])
	case moreSamples:
		last := members[len(members)-1]
		last.Name += ".more.png"
		members = append(members, last)
	case otherNames:
		for i := range members {
			members[i].Name = strings.Replace(members[i].Name, "/i", "/j", 1)
		}
	}
	return j.files.format.pack(members, j.files.how)
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
	j.options.Weights = func(s imageloader.Sample) float64 { return m.Weights[s.Index%len(m.Weights)] } // another archive may have more
}

// disturb draws how rare faults are.
func (j *job) disturb() error {
	w := j.w
	rare := func(name string) int { return []int{0, 400, 60, 15}[w.Choose(name, 4)] }
	f := &w.Disk.Faults
	f.Read, f.Write, f.Name = rare("rare reads"), rare("rare writes"), rare("rare names")
	f.Move = f.Name
	f.Sync, f.Lock, f.Server = rare("rare syncs"), rare("rare locks"), rare("rare responses")
	f.Fstat = 5 * f.Name
	j.rarity = rarity{leaves: rare("rare leaves") / 2, changes: 30}
	f.Stop = 20 * rare("rare stops")
	w.Disk.Network = w.Choose("network disk", 3) == 2
	w.Say("%d samples in %s, bad: %v, %+v, %d epochs", len(j.members), j.files.archive, j.model.Bad, j.model.Share, j.epochs)
	return j.spoilIndex()
}

// spoilIndex removes the index that the reference has made, damages it, or makes it stale.
func (j *job) spoilIndex() error {
	w, name := j.w, j.files.index
	data, ok := w.Disk.Read(name)
	if !ok {
		return nil
	}
	// A file without the first 8 bytes of an index is of another kind, and is kept.
	switch w.Choose("index", 8) {
	case 0, 1:
		w.Disk.Delete(name)
	case 2:
		j.files.found = data[:8+w.Choose("cut", len(data)-8)]
		w.Disk.Write(name, j.files.found)
	case 3, 4:
		j.files.found = bytes.Clone(data)
		j.files.found[w.Choose("damaged byte", unchecked(data)-8)+8] ^= byte(1 + w.Choose("damage of index", 255))
		w.Disk.Write(name, j.files.found)
	case 6, 7:
		return w.Calm(j.staleIndex)
	}
	return nil
}

// staleIndex makes the index of an older version of the archive.
func (j *job) staleIndex() error {
	files, err := j.variant(variant(j.w.Choose("older version", 4)))
	if files == nil || err != nil {
		return err
	}
	for name, data := range files {
		changed := j.w.Disk.Changed(name)
		defer func() {
			j.w.Disk.Write(name, j.files.was[name])
			j.w.Disk.Age(name, j.w.Disk.Changed(name).Sub(changed))
		}()
		j.w.Disk.Write(name, data)
		j.w.Disk.Age(name, j.w.Disk.Changed(name).Sub(changed))
		if len(data) == len(j.files.was[name]) || j.w.Choose("same time", 2) == 0 {
			j.w.Disk.Age(name, time.Hour)
		}
	}
	p := j.w.Start(0, false, nil)
	path, o := j.place(p)
	_, err = imageloader.MakeIndex(context.Background(), path, o, nil)
	j.w.Say("the index is of an older version of the archive: %v", err)
	return errors.Join(err, p.End())
}

// reference runs the epochs of rank 0 undisturbed, so that the model is also checked without
// disturbances.
func (j *job) reference() error {
	p := j.w.Start(0, false, nil)
	j.latest = map[int]latest{}
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
	made := j.files.format.indexed() && !j.options.NoIndex && (!j.files.format.gzipped() || j.options.Classes == nil)
	if _, ok := j.w.Disk.Read(j.files.index); made && !ok {
		return fmt.Errorf("there is no index %s", j.files.index)
	}
	return p.End()
}

// maxDeals is the maximum number of times that the rest of an epoch is dealt.
const maxDeals = 3

// train runs all ranks at the same time, to their ends. Now and then another number of ranks
// continues an epoch.
func (j *job) train() error {
	ranks := make([]*rank, j.model.World)
	for i := range ranks {
		ranks[i] = &rank{job: j, number: i}
		ranks[i].start()
	}
	for deals := 1; ; deals++ {
		j.deal, j.latest = deal{}, map[int]latest{}
		if deals < maxDeals {
			j.drawDeal(ranks)
		}
		if err := j.all(ranks); err != nil || j.deal.stop == 0 {
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
	before := j.faults()
	kill := j.w.Choose("index process killed", 2) * (1 + j.w.Choose("index process call", 200))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	p := j.w.Start(kill, false, cancel)
	path, o := j.place(p)
	_, err := imageloader.MakeIndex(ctx, path, o, nil)
	disturbed := p.Killed() || j.faults().disturb(before)
	j.killed = j.killed || p.Killed()
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

// drawDeal draws after which batch of which epoch other ranks continue, if any do.
func (j *job) drawDeal(ranks []*rank) {
	if j.w.Choose("deal again", 2) != 1 {
		return
	}
	d := deal{epoch: ranks[0].epoch + j.w.Choose("epochs before", j.epochs-ranks[0].epoch)}
	whole := math.MaxInt
	for _, r := range ranks {
		batches, ending := r.want, r.ending
		if d.epoch > r.epoch {
			batches, ending = j.model.Batches(d.epoch, r.number, nil, 0)
		}
		if n := len(batches); n > 0 && (ending.Bad >= 0 || len(batches[n-1]) < j.model.Batch) {
			batches = batches[:n-1]
		}
		whole = min(whole, len(batches))
	}
	if whole == 0 || j.files.format.gzipped() && j.model.Order == Permuted { // the order is not known yet
		return
	}
	d.stop = 1 + j.w.Choose("batches before", whole)
	j.deal = d
}

// redeal returns other ranks, which continue where the ranks have stopped.
func (j *job) redeal(ranks []*rank) []*rank {
	m, d, before := &j.model, j.deal, ranks[0].before
	rest := m.Rest(d.epoch, ranks[0].rest, d.stop)
	before += d.stop
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
	j.w.Say("%d ranks continue epoch %d after %d batches with %d positions", world, d.epoch, before, len(rest))
	others := make([]*rank, world)
	for i := range others {
		others[i] = &rank{job: j, number: i, epoch: d.epoch, plan: plan{rest: rest, before: before},
			progress: progress{states: states}}
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
		if j.files.was[name] == nil && !strings.HasPrefix(name, folder+"/train/") && name != j.files.index && !j.mayStay(name) {
			return fmt.Errorf("a file is left: %s", name)
		}
	}
	return j.reference()
}

// mayStay reports whether a file may be a temporary file that a killed process or a fault has left.
func (j *job) mayStay(name string) bool {
	end, ok := strings.CutPrefix(name, j.files.index+".")
	switch {
	case !ok || !strings.HasSuffix(name, ".tmp"):
		return false
	case end == "making.tmp": // two processes may have it, and its name is looked up before it is removed
		return j.killed || j.w.Met("remove", "stat", "fstat", "lock", "open")
	}
	return j.killed || j.w.Met("remove")
}

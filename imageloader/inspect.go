package imageloader

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Report is what Inspect found in an archive.
type Report struct {
	File      string
	Format    string // "tar", "tar.gz", "tar.zst" or "directory"; of the first shard
	FileBytes int64  // of all shards; of a directory, the files in it
	Samples   int    // images in the directories of classes, bad ones included
	Ignored   int    // other members, not counting directories
	Orphans   int    // images among the ignored members that are in no directory
	// OrphansNamed are the first 10 images without a label, with WebDataset.
	OrphansNamed []Orphan
	// LeftOut are folders and links that may have been meant as classes, and are none. nil where
	// directories are not the classes: with WebDataset and List.
	LeftOut []LeftOut
	Classes []ClassReport
	Formats map[string]int // good images by format, for example "JPEG", "JPEG progressive", "JPEG grey", "PNG 16-bit"
	Width   Range          // pixels, of good images
	Height  Range
	Bytes   Range          // compressed, of good images
	Bad     []*SampleError // the first 1,000 bad samples
	BadBy   map[Reason]int // all bad samples
	// Warned are the first 1,000 of the damaged images that are good samples (see Options.Damaged),
	// and WarnedCount counts all.
	Warned      []*SampleError
	WarnedCount int
	// Findings count the samples that are tolerated, refused or rare, by kind. A format is rare if
	// no more than a twentieth of the good images have it.
	Findings []Finding
}

// LeftOut is a kind of folder or link that is no class: folders without an image, hidden folders,
// links in a tar, links that lead nowhere or to a folder that they are in, archives in the archive.
// First has at most 10 names.
type LeftOut = index.LeftOut

// ClassReport is one class of a Report, in the order of labels.
type ClassReport struct {
	Name    string
	Samples int // bad ones included
	Bad     int
	Bytes   int64
	// Directories are the paths of the directories that hold its samples, the first 5 in the
	// archive's order. More than one has this name where an archive holds train/cat and test/cat.
	// nil where directories are not the classes: with WebDataset and List.
	Directories []string
}

// Range sums up a set of numbers. The median of an even count is the lower middle one.
type Range struct{ Min, Median, Max int64 }

// Inspect reads an archive through and decodes every sample in full, on all cores. It calls
// progress, if that is not nil, now and then from its own goroutine. Of the options WebDataset,
// List, Damaged, MaxSampleBytes, MaxPixels and OpenSource matter. If the archive itself is damaged,
// Inspect returns the report on what comes before the damage along with the *ArchiveError.
func Inspect(ctx context.Context, path string, o Options, progress func(Progress)) (*Report, error) {
	l, err := inspectedBy(path, o, nil, sample.Library{})
	if err != nil {
		return nil, err
	}
	return l.inspect(ctx, progress, newNameSet(), nil)
}

// inspectedBy returns what inspects an archive: a loader that has not opened it.
func inspectedBy(path string, o Options, file func(string) (archive.File, error), c sample.Codecs) (*Loader, error) {
	o, err := Options{
		WebDataset: o.WebDataset, List: o.List, Damaged: o.Damaged, MaxSampleBytes: o.MaxSampleBytes, MaxPixels: o.MaxPixels, OpenSource: o.OpenSource,
	}.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Loader{path: path, o: o, openFile: file, codec: c, rules: newRules(path, &o)}, nil
}

// inspect inspects the archive. At the end, without an error, take is called for each bad sample
// and each one whose damage was tolerated, in no order; nil: nothing takes them. names makes the
// digests of their names. With take, a WebDataset key of samples in several shards is an error.
func (l *Loader) inspect(ctx context.Context, progress func(Progress), names *nameSet, take func(verdict)) (*Report, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	a, err := archive.Open(ctx, l.path, l.archiveConfig())
	if err != nil {
		return nil, archive.StopCause(ctx, err)
	}
	defer func() { _ = a.Close() }() // nothing was written
	if err := l.readList(ctx); err != nil {
		return nil, archive.StopCause(ctx, err)
	}
	config := l.indexConfig()
	config.Progress, config.OneShard = progress, take != nil
	b, err := index.NewBuilder(archive.Shown(l.path), config)
	if err != nil {
		return nil, err
	}
	defer b.Close()

	in := inspection{
		l:       l,
		ctx:     ctx,
		stop:    stop,
		buffers: arena.NewBuffers(queueBytes),
		budget:  arena.NewBudget(queueBytes, nil),
		items:   make(chan inspectItem, 2*l.o.Workers),
		names:   names,
		judging: take != nil,
		census:  newCensus(&l.o),
	}
	defer in.buffers.Close() // no worker is left
	defer context.AfterFunc(ctx, in.budget.Stop)()
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(in.work)
	}
	err = b.WalkLabels(a, &in)
	close(in.items)
	workers.Wait()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if progress != nil {
		progress(a.Progress())
	}
	labels := b.Labels()
	if labels.Odd >= 0 { // there are no classes
		if err == nil {
			err = &index.LabelError{File: archive.Shown(l.path), Name: in.firstNames[labels.Odd], Label: b.Directory(labels.Odd)}
		}
		return nil, err
	}
	for _, v := range in.verdicts {
		if err == nil {
			take(v)
		}
	}
	return in.census.report(a, labels), err
}

// inspection is an Inspect under way. It visits the walk over the archive, and has the workers.
type inspection struct {
	l       *Loader
	ctx     context.Context
	stop    context.CancelCauseFunc
	buffers *arena.Buffers // of compressed samples
	budget  *arena.Budget
	items   chan inspectItem

	// What the walk uses.
	bad        *SampleError // of the sample whose buffer was asked for
	names      *nameSet
	firstNames []string // with WebDataset: of the first image of each label

	mu       sync.Mutex
	census   *census
	judging  bool // verdicts are collected
	verdicts []verdict
}

// inspectItem is a sample on its way to a worker.
type inspectItem struct {
	found index.Found
	data  []byte
	bad   *SampleError
	again bool // an earlier sample has its name
}

// verdict is the result of an inspection for a sample that is bad, or whose damage was tolerated.
type verdict struct {
	position, group, dir int32  // see index.Found
	name                 uint64 // a digest
	bad                  bool
}

// Buffer returns memory for a sample that can be read. It is a method of index.Visitor.
func (in *inspection) Buffer(f *index.Found) ([]byte, error) {
	s := Sample{Name: f.Name, Index: f.Index}
	if in.bad = in.l.rules.Member(&s, f.Kind, f.Size); in.bad != nil {
		return nil, nil
	}
	if !in.budget.Acquire(int(f.Size)) {
		return nil, archive.ErrStopped
	}
	return in.buffers.Get(int(f.Size)), nil
}

// Visit sends a sample to the workers. It is a method of index.Visitor.
func (in *inspection) Visit(f *index.Found, data []byte) error {
	if f.Dir < 0 {
		in.recycle(data)
		return nil
	}
	it := inspectItem{found: *f, data: data, bad: in.bad, again: in.names.again(f.Name)}
	if it.bad != nil {
		it.bad.Index = f.Index
	}
	if in.l.o.WebDataset && f.Dir == len(in.firstNames) {
		in.firstNames = append(in.firstNames, f.Name)
	}
	select {
	case in.items <- it:
		return nil
	case <-in.ctx.Done():
		return archive.ErrStopped
	}
}

// recycle gives back the memory of a sample's content.
func (in *inspection) recycle(data []byte) {
	if data != nil {
		in.budget.Release(len(data))
		in.buffers.Put(data)
	}
}

// work inspects samples.
func (in *inspection) work() {
	d, err := sample.NewDecoder(in.l.codec, in.l.o.MaxPixels, in.l.o.Damaged)
	if err != nil {
		in.stop(fmt.Errorf("imageloader: no decoder: %w", err))
		return
	}
	defer d.Close()
	var pixels [8 * 8 * 3]byte
	for it := range in.items {
		if in.ctx.Err() != nil {
			continue
		}
		r, err := in.inspect(&it, d, pixels[:])
		if err != nil {
			in.stop(err)
		}
		in.mu.Lock()
		in.census.add(r)
		if in.judging && (r.bad != nil || r.warned != nil) {
			f := &it.found
			in.verdicts = append(in.verdicts, verdict{int32(f.Position), int32(f.Group), int32(f.Dir), in.names.digest(f.Name), r.bad != nil})
		}
		in.mu.Unlock()
		in.recycle(it.data)
	}
}

// inspect decodes all of a sample to an image of 8 x 8 pixels.
func (in *inspection) inspect(it *inspectItem, d sample.Decoder, pixels []byte) (r inspected, fatal error) {
	f, rules := &it.found, &in.l.rules
	r = inspected{index: f.Index, dir: f.Dir, name: f.Name, bytes: int64(len(it.data)), bad: it.bad}
	if it.again {
		r.rare = append(r.rare, nameAgain)
	}
	if it.bad != nil {
		return r, nil
	}
	s := Sample{Name: f.Name, Index: f.Index}
	format := codec.Sniff(it.data)
	if format == "" {
		r.bad = rules.NotImage(&s, it.data)
		return r, nil
	}
	info, err := d.Header(it.data)
	if err == nil {
		if r.bad = rules.Header(&s, &info); r.bad != nil {
			return r, nil
		}
		g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: 8, ResizeHeight: 8, WindowWidth: 8, WindowHeight: 8}
		err = d.Decode(it.data, &g, pixels, 8*3)
	}
	if err != nil {
		r.bad, fatal = rules.Decoding(&s, err)
		return r, fatal
	}
	r.width, r.height, r.format = info.Width, info.Height, describe(format, info)
	r.rare = append(r.rare, rarities(f.Name, format, info)...)
	if animated(format, it.data) {
		r.rare = append(r.rare, "animated: the first frame is the image")
	}
	if damage := sample.Tolerated(d); damage != "" {
		r.warned = rules.Tolerated(&s, damage)
	}
	return r, nil
}

// InspectIndex is Inspect by the archive's index alone, which it makes first if there is none. It
// reads and decodes no image, and so finds only the damage that an image's header shows. Images
// whose headers lie too far behind the beginning of their files have the format "unknown", and
// count in no range of pixels. Of the options, IndexFile, Classes, WebDataset, List (an index that
// was made otherwise is an error), MaxSampleBytes, MaxPixels, OpenSource and Logger matter. A
// directory has no index: an error.
func InspectIndex(ctx context.Context, path string, o Options, progress func(Progress)) (*Report, error) {
	o.NoIndex, o.ShuffleBytes, o.Masks, o.MultiLabel = false, 1, Masks{}, false // no contents are held in memory
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Loader{path: path, o: o, codec: sample.Library{}, rules: newRules(path, &o)}
	for tried := false; ; tried = true {
		r, err := inspectIndex(ctx, l)
		switch {
		case r != nil || err != nil:
			return r, archive.StopCause(ctx, err)
		case tried:
			return nil, fmt.Errorf("imageloader: %s: the index that was just made does not fit: the archive changes while it is read", archive.Shown(path))
		}
		if _, err := MakeIndex(ctx, path, o, progress); err != nil {
			return nil, err
		}
	}
}

// inspectIndex reports on the archive's index. It returns nil without an error if there is none.
func inspectIndex(ctx context.Context, l *Loader) (*Report, error) {
	a, err := archive.Open(ctx, l.path, l.archiveConfig())
	if err != nil {
		return nil, err
	}
	defer func() { _ = a.Close() }() // nothing was written
	if err := l.readList(ctx); err != nil {
		return nil, err
	}
	config := l.indexConfig()
	config.RefuseOtherLabels = true // loaders use that index: it is not replaced
	x, err := index.Load(a, config)
	if x == nil || err != nil {
		return nil, err
	}
	defer func() { _ = x.Close() }() // nothing was kept
	c, names := newCensus(&l.o), newNameSet()
	i := 0
	for h, err := range x.Headers() {
		if err != nil {
			return nil, err
		}
		f := inspectHeader(&l.rules, x.Sample(i), i, &h)
		if h.State != index.HeaderNoImage && names.again(f.name) {
			f.rare = append(f.rare, nameAgain)
		}
		c.add(f)
		i++
	}
	labels := index.Labels{Classes: x.Classes(), Ignored: x.Ignored(), Orphans: x.Orphans(), OrphansNamed: x.OrphansNamed(), LeftOut: x.LeftOut()}
	for label := range labels.Classes {
		labels.OfDirectory = append(labels.OfDirectory, int32(label))
	}
	return c.report(a, labels), nil
}

// inspectHeader judges a sample by its header in an index.
func inspectHeader(rules *sample.Rules, m index.Sample, i int, h *index.Header) inspected {
	s := Sample{Name: m.Name, Index: i, Label: m.Label}
	f := inspected{index: i, dir: m.Label, name: m.Name, format: unknownFormat, bytes: m.Size, bad: rules.Member(&s, m.Kind, m.Size)}
	if f.bad != nil {
		return f
	}
	switch h.State {
	case index.HeaderNoImage:
		f.bad = rules.Bad(&s, NotImage, nil)
	case index.HeaderUnusable:
		f.bad = rules.Bad(&s, Damaged, errors.New("it has no header of an image that can be read"))
	case index.HeaderKnown:
		if f.bad = rules.Header(&s, &h.Info); f.bad == nil {
			f.format, f.width, f.height = describe(h.Format, h.Info), h.Info.Width, h.Info.Height
			f.rare = rarities(m.Name, h.Format, h.Info)
		}
	}
	return f
}

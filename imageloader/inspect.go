package imageloader

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Report is what Inspect found in an archive.
type Report struct {
	File      string
	Format    string // "tar", "tar.gz", "tar.zst" or "directory"; of the first shard
	FileBytes int64
	Samples   int // members in the directories of classes, bad ones included
	Ignored   int // other members, not counting directories
	Orphans   int // images among the ignored members, which lie outside of any directory
	Classes   []ClassReport
	Formats   map[string]int // good images by format, for example "JPEG", "JPEG progressive", "JPEG grey", "PNG 16-bit"
	Width     Range          // pixels, of good images
	Height    Range
	Bytes     Range // compressed, of good images
	Bad       []*SampleError
	BadBy     map[Reason]int
	Warned    []*SampleError // damaged images that are good samples: see Options.Damaged
}

// ClassReport is one class of a Report, in the order of labels.
type ClassReport struct {
	Name    string
	Samples int // bad ones included
	Bad     int
	Bytes   int64
}

// Range sums up a set of numbers. The median of an even count is the lower middle one.
type Range struct{ Min, Median, Max int64 }

// Inspect reads an archive through and decodes every sample in full, on all cores. It calls
// progress, if that is not nil, now and then from its own goroutine. Of the options Damaged,
// MaxSampleBytes, MaxPixels and OpenSource matter. If the archive itself is damaged, Inspect
// returns the report on what comes before the damage along with the *ArchiveError.
func Inspect(ctx context.Context, path string, o Options, progress func(Progress)) (*Report, error) {
	return inspect(ctx, path, o, progress, nil, shimCodec{})
}

func inspect(ctx context.Context, path string, o Options, progress func(Progress), file func(string) (archive.File, error), c codec) (*Report,
	error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	o, err := Options{Damaged: o.Damaged, MaxSampleBytes: o.MaxSampleBytes, MaxPixels: o.MaxPixels, OpenSource: o.OpenSource}.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Loader{path: path, o: o, openFile: file, codec: c}
	a, err := archive.Open(ctx, path, l.archiveConfig())
	if err != nil {
		return nil, stopCause(ctx, err)
	}
	defer func() { _ = a.Close() }() // nothing was written
	config := l.indexConfig()
	config.Progress = progress
	b, err := index.NewBuilder(path, config)
	if err != nil {
		return nil, err
	}
	defer b.Close()

	in := inspection{
		ctx:     ctx,
		stop:    stop,
		judge:   newJudge(path, &o),
		codec:   c,
		damaged: o.Damaged,
		buffers: arena.NewBuffers(queueBytes),
		budget:  newBudget(queueBytes),
		items:   make(chan item, 2*o.Workers),
	}
	defer in.buffers.Close() // no worker is left
	defer context.AfterFunc(ctx, in.budget.stop)()
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
	return in.report(a, b.Labels()), err
}

// inspection is an Inspect under way. It visits the walk over the archive, and has the workers.
type inspection struct {
	ctx     context.Context
	stop    context.CancelCauseFunc
	judge   judge
	codec   codec
	damaged DamagePolicy
	buffers *arena.Buffers // of compressed samples
	budget  *budget
	items   chan item
	bad     *SampleError // of the sample that is being visited

	mu    sync.Mutex
	found []inspected
}

// inspected holds the facts that are known of a sample.
type inspected struct {
	index         int
	dir           int // the number of its directory
	format        string
	width, height int32
	bytes         int
	bad           *SampleError
	warned        *SampleError // damage that was tolerated
}

// Buffer returns memory for a sample that can be read. It is a method of index.Visitor.
func (in *inspection) Buffer(f *index.Found) ([]byte, error) {
	s := Sample{Name: f.Name, Index: f.Index}
	if in.bad = in.judge.member(&s, f.Kind, f.Size); in.bad != nil {
		return nil, nil
	}
	if !in.budget.acquire(int(f.Size)) {
		return nil, errStopped
	}
	return in.buffers.Get(int(f.Size)), nil
}

// Visit sends a sample to the workers. It is a method of index.Visitor.
func (in *inspection) Visit(f *index.Found, data []byte) error {
	it := item{sample: Sample{Name: f.Name, Index: f.Index, Label: f.Dir}, size: f.Size, data: data, bad: in.bad}
	select {
	case in.items <- it:
		return nil
	case <-in.ctx.Done():
		return errStopped
	}
}

// work inspects samples.
func (in *inspection) work() {
	d, err := newDecoder(in.codec, in.judge.maxPixels, in.damaged)
	if err != nil {
		in.stop(fmt.Errorf("imageloader: no decoder: %w", err))
		return
	}
	defer d.close()
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
		in.found = append(in.found, r)
		in.mu.Unlock()
		if it.data != nil {
			in.budget.release(len(it.data))
			in.buffers.Put(it.data)
		}
	}
}

// inspect decodes all of a sample to an image of 8 x 8 pixels.
func (in *inspection) inspect(it *item, d decoder, pixels []byte) (r inspected, fatal error) {
	r = inspected{index: it.sample.Index, dir: it.sample.Label, bytes: len(it.data), bad: it.bad}
	if it.bad != nil {
		return r, nil
	}
	format := index.Sniff(it.data)
	if format == "" {
		r.bad = in.judge.notImage(&it.sample, it.data)
		return r, nil
	}
	info, err := d.header(it.data)
	if err == nil {
		if r.bad = in.judge.header(&it.sample, &info); r.bad != nil {
			return r, nil
		}
		r.width, r.height, r.format = info.Width, info.Height, describe(format, info)
		g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: 8, ResizeHeight: 8, WindowWidth: 8, WindowHeight: 8}
		err = d.decode(it.data, &g, pixels, 8*3)
		if damage := tolerated(d); err == nil && damage != "" {
			r.warned = in.judge.tolerated(&it.sample, damage)
		}
	}
	if err != nil {
		r.bad, fatal = in.judge.decoding(&it.sample, err)
	}
	return r, fatal
}

// report makes the report of the samples found. Directories that turned out not to be classes have
// no samples.
func (in *inspection) report(a *archive.Archive, labels index.Labels) *Report {
	c := newCensus(a, labels.Classes, labels.Ignored, labels.Orphans)
	slices.SortFunc(in.found, func(a, b inspected) int { return cmp.Compare(a.index, b.index) })
	for _, f := range in.found {
		if label := labels.OfDirectory[f.dir]; label >= 0 {
			c.add(int(label), f)
		}
	}
	return c.report()
}

// describe names the kind of an image, for Report.Formats.
func describe(format string, i imagecapi.Info) string {
	if i.BitDepth != 8 {
		format += fmt.Sprintf(" %d-bit", i.BitDepth)
	}
	switch {
	case i.Components == 1:
		format += " grey"
	case i.Components == 2:
		format += " grey with alpha"
	case i.Components == 4 && i.Format == imagecapi.JPEG:
		format += " CMYK"
	case i.Components == 4:
		format += " with alpha"
	}
	if i.Progressive {
		if i.Format == imagecapi.PNG {
			return format + " interlaced"
		}
		return format + " progressive"
	}
	return format
}

// census makes a Report of samples, which it takes in their order.
type census struct {
	r                    *Report
	width, height, bytes []int64
}

func newCensus(a *archive.Archive, classes []string, ignored, orphans int) *census {
	r := &Report{
		File:      a.Path(),
		Format:    a.Format(),
		FileBytes: a.Info().Size(),
		Ignored:   ignored,
		Orphans:   orphans,
		Formats:   map[string]int{},
		BadBy:     map[Reason]int{},
	}
	for _, c := range classes {
		r.Classes = append(r.Classes, ClassReport{Name: c})
	}
	return &census{r: r}
}

func (c *census) add(label int, f inspected) {
	r := c.r
	class := &r.Classes[label]
	if f.bad != nil {
		f.bad.Index = r.Samples
	}
	r.Samples++
	class.Samples++
	class.Bytes += int64(f.bytes)
	if f.bad != nil {
		class.Bad++
		r.Bad = append(r.Bad, f.bad)
		r.BadBy[f.bad.Reason]++
		return
	}
	if f.warned != nil {
		f.warned.Index = r.Samples - 1
		r.Warned = append(r.Warned, f.warned)
	}
	r.Formats[f.format]++
	c.bytes = append(c.bytes, int64(f.bytes))
	if f.width > 0 {
		c.width, c.height = append(c.width, int64(f.width)), append(c.height, int64(f.height))
	}
}

func (c *census) report() *Report {
	c.r.Width, c.r.Height, c.r.Bytes = rangeOf(c.width), rangeOf(c.height), rangeOf(c.bytes)
	return c.r
}

// InspectIndex is Inspect by the archive's index alone, which it makes first if there is none. It
// reads and decodes no image, and so finds only the damage that an image's header shows. Images
// whose headers lie too far behind the beginning of their files have the format "unknown", and
// count in no range of pixels. Of the options, IndexFile, Classes, WebDataset (an index that was
// made otherwise is an error), MaxSampleBytes, MaxPixels, OpenSource and Logger matter. A directory
// has no index: an error.
func InspectIndex(ctx context.Context, path string, o Options, progress func(Progress)) (*Report, error) {
	o.NoIndex, o.ShuffleBytes, o.Masks = false, 1, Masks{} // no contents are held in memory
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Loader{path: path, o: o, codec: shimCodec{}, judge: newJudge(path, &o)}
	for tried := false; ; tried = true {
		r, err := inspectIndex(ctx, l)
		switch {
		case r != nil || err != nil:
			return r, stopCause(ctx, err)
		case tried:
			return nil, fmt.Errorf("imageloader: %s: the index that was just made does not fit: the archive changes while it is read", path)
		}
		if _, err := MakeIndex(ctx, path, o, progress); err != nil {
			return nil, err
		}
	}
}

// inspectIndex reports on the archive's index; nil without an error if there is none.
func inspectIndex(ctx context.Context, l *Loader) (*Report, error) {
	a, err := archive.Open(ctx, l.path, l.archiveConfig())
	if err != nil {
		return nil, err
	}
	defer func() { _ = a.Close() }() // nothing was written
	config := l.indexConfig()
	config.RefuseOtherLabels = true // loaders use that index: it is not replaced
	x, err := index.Load(a, config)
	if x == nil || err != nil {
		return nil, err
	}
	defer func() { _ = x.Close() }() // nothing was kept
	c := newCensus(a, x.Classes(), x.Ignored(), x.Orphans())
	i := 0
	for h, err := range x.Headers() {
		if err != nil {
			return nil, err
		}
		c.add(x.Label(i), inspectHeader(&l.judge, x.Sample(i), i, &h))
		i++
	}
	return c.report(), nil
}

// inspectHeader judges a sample by what an index says of it.
func inspectHeader(j *judge, m index.Sample, i int, h *index.Header) inspected {
	s := Sample{Name: m.Name, Index: i, Label: m.Label}
	f := inspected{index: i, format: "unknown", bytes: int(m.Size), bad: j.member(&s, m.Kind, m.Size)}
	if f.bad != nil {
		return f
	}
	switch h.State {
	case index.HeaderNoImage:
		f.bad = j.bad(&s, NotImage, nil)
	case index.HeaderUnusable:
		f.bad = j.bad(&s, Damaged, errors.New("it has no header of an image that can be read"))
	case index.HeaderKnown:
		if f.bad = j.header(&s, &h.Info); f.bad == nil {
			f.format, f.width, f.height = describe(h.Format, h.Info), h.Info.Width, h.Info.Height
		}
	}
	return f
}

// rangeOf sums up values, which it sorts.
func rangeOf(values []int64) Range {
	if len(values) == 0 {
		return Range{}
	}
	slices.Sort(values)
	return Range{values[0], values[(len(values)-1)/2], values[len(values)-1]}
}

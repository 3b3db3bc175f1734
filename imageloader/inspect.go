package imageloader

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"

	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Report is what Inspect found in an archive.
type Report struct {
	File      string
	Format    string // "tar", "tar.gz", "tar.zst" or "directory"; of the first shard
	FileBytes int64
	Samples   int // members in the directories of classes, bad ones included
	Ignored   int // other members, without directories
	Orphans   int // images among them that lie outside of any directory
	Classes   []ClassReport
	Formats   map[string]int // good images by format, for example "JPEG", "JPEG progressive", "JPEG grey", "PNG 16-bit"
	Width     Range          // pixels, of good images
	Height    Range
	Bytes     Range // compressed, of good images
	Bad       []*SampleError
	BadBy     map[Reason]int
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

// Progress is how far Inspect has come.
type Progress struct {
	Members           int
	Bytes, TotalBytes int64 // of the file
}

// Inspect reads an archive through and decodes every sample in full, on all cores. progress, if not nil, is called now and then from Inspect's own goroutine.
// Of the options MaxSampleBytes, MaxPixels and OpenSource matter. If the archive itself is damaged, the report on what comes before the damage is returned along with the
// *ArchiveError.
func Inspect(ctx context.Context, path string, o Options, progress func(Progress)) (*Report, error) {
	return inspect(ctx, path, o, progress, openFile, shimCodec{})
}

// inspected is what a worker finds out about a sample.
type inspected struct {
	index         int
	dir           int // its number
	format        string
	width, height int32
	bytes         int
	bad           *SampleError
}

func inspect(ctx context.Context, path string, o Options, progress func(Progress), file func(string) (source, error), c codec) (*Report, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	o, err := Options{MaxSampleBytes: o.MaxSampleBytes, MaxPixels: o.MaxPixels, OpenSource: o.OpenSource}.withDefaults()
	if err != nil {
		return nil, err
	}
	a, err := openArchive(ctx, path, opener{file, o.OpenSource})
	if err != nil {
		return nil, stopCause(ctx, err)
	}
	defer a.Close()
	l := &Loader{path: path, o: o}
	x, err := newIndexer(path, nil)
	if err != nil {
		return nil, err
	}

	var (
		buffers = arena.NewBuffers(queueBytes)
		budget  = newBudget(queueBytes)
		items   = make(chan item, 2*o.Workers)
		workers sync.WaitGroup
		mu      sync.Mutex
		found   []inspected
	)
	defer buffers.Close() // no worker is left
	defer context.AfterFunc(ctx, budget.stop)()
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			d, err := c.newDecoder(o.MaxPixels)
			if err != nil {
				stop(fmt.Errorf("imageloader: no decoder: %w", err))
				return
			}
			defer d.close()
			var pixels [8 * 8 * 3]byte
			for it := range items {
				if ctx.Err() != nil {
					continue
				}
				r, err := l.inspectSample(&it, d, pixels[:])
				if err != nil {
					stop(err)
				}
				mu.Lock()
				found = append(found, r)
				mu.Unlock()
				if it.data != nil {
					budget.release(len(it.data))
					buffers.Put(it.data)
				}
			}
		})
	}
	walk := func() error {
		for {
			m, head, err := a.nextHead()
			if err == io.EOF {
				return nil
			}
			if err != nil {
				return err
			}
			if progress != nil && a.names%64 == 1 {
				progress(a.progress())
			}
			_, i, err := x.add(&m, head)
			if err != nil {
				return err
			}
			if i < 0 {
				continue
			}
			it := item{sample: Sample{Name: m.name, Index: i, Label: int(x.last.label)}, size: m.size}
			if it.bad = l.unreadable(&it, m.kind); it.bad == nil {
				if !budget.acquire(int(m.size)) {
					return errStopped
				}
				it.data = buffers.Get(int(m.size))
				if err := a.rest(head, it.data); err != nil {
					return err
				}
			}
			select {
			case items <- it:
			case <-ctx.Done():
				return errStopped
			}
		}
	}
	err = walk()
	close(items)
	workers.Wait()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if progress != nil {
		progress(a.progress())
	}
	return report(a, x, found), err
}

// inspectSample decodes all of a sample, into next to nothing.
func (l *Loader) inspectSample(it *item, d decoder, pixels []byte) (inspected, error) {
	r := inspected{index: it.sample.Index, dir: it.sample.Label, bytes: len(it.data), bad: it.bad}
	if it.bad != nil {
		return r, nil
	}
	format := sniff(it.data)
	if format == "" {
		r.bad = l.bad(it, NotImage, looksLike(it))
		return r, nil
	}
	info, err := d.header(it.data)
	if err == nil {
		if r.bad = l.oversize(it, info); r.bad != nil {
			return r, nil
		}
		r.width, r.height, r.format = info.Width, info.Height, describe(format, info)
		g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: 8, ResizeHeight: 8, WindowWidth: 8, WindowHeight: 8}
		err = d.decode(it.data, &g, pixels, 8*3)
	}
	switch {
	case err == nil:
	case errors.Is(err, imagecapi.CodeDecode):
		r.bad = l.bad(it, Damaged, err)
	case errors.Is(err, imagecapi.CodeUnsupported):
		r.bad = l.bad(it, Unsupported, err)
	default:
		return r, fmt.Errorf("imageloader: %s: decoding %q: %w", l.path, it.sample.Name, err)
	}
	return r, nil
}

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

func report(a *archive, x *indexer, found []inspected) *Report {
	classes, labels := x.labels() // of directories: those that turn out to be no class have no samples
	for d, n := range x.counts {
		if labels[d] < 0 {
			x.ignored += n
		}
	}
	c := newCensus(a, classes, x.ignored, x.orphans)
	slices.SortFunc(found, func(a, b inspected) int { return cmp.Compare(a.index, b.index) })
	for _, f := range found {
		if label := labels[f.dir]; label >= 0 {
			c.add(int(label), f)
		}
	}
	return c.report()
}

// census makes a Report of samples that come in order.
type census struct {
	r                    *Report
	width, height, bytes []int64
}

func newCensus(a *archive, classes []string, ignored, orphans int) *census {
	r := &Report{File: a.path, Format: cmp.Or(a.shards[0].format, a.format), FileBytes: a.info.Size(), Ignored: ignored, Orphans: orphans, Formats: map[string]int{}, BadBy: map[Reason]int{}}
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

// InspectIndex is Inspect by the archive's index alone, which is made first if there is none: it reads and decodes no image, and so finds no damage but what an image's header
// shows. Images whose headers lie too far behind the beginning of their files have the format "unknown", and count in no range of pixels. Of the options, IndexFile,
// Classes, WebDataset (an index that was made otherwise is an error), MaxSampleBytes, MaxPixels, OpenSource and Logger matter. A directory has no index: an error.
func InspectIndex(ctx context.Context, path string, o Options, progress func(Progress)) (*Report, error) {
	o.NoIndex, o.ShuffleBytes = false, 1 // nothing is to be held in memory
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Loader{path: path, o: o, open: opener{openFile, o.OpenSource}, codec: shimCodec{}, inspecting: true}
	for tried := false; ; tried = true {
		a, err := openArchive(ctx, path, l.open)
		if err != nil {
			return nil, stopCause(ctx, err)
		}
		x, err := l.loadIndex(a)
		if x != nil {
			defer func() { _ = x.close() }() // nothing is kept
			r, err := l.reportOf(a, x)
			_ = a.Close() // only read
			return r, err
		}
		_ = a.Close() // only read
		switch {
		case err != nil:
			return nil, stopCause(ctx, err)
		case tried:
			return nil, fmt.Errorf("imageloader: %s: the index that was just made does not fit: the archive changes while it is read", path)
		}
		if _, err := MakeIndex(ctx, path, o, progress); err != nil {
			return nil, err
		}
	}
}

// reportOf is a Report of what an index says.
func (l *Loader) reportOf(a *archive, x *index) (*Report, error) {
	section, err := x.side.section(sectionHeads, headBytes)
	if err != nil {
		return nil, fmt.Errorf("imageloader: %s: %w", x.side.path, err)
	}
	heads := section.reader(headBytes)
	at := -1
	c := newCensus(a, x.classes, x.ignored, x.orphans)
	for i := range x.entries {
		e := &x.entries[i]
		it := item{sample: l.sample(x, i), size: e.size}
		f := inspected{index: i, format: "unknown", bytes: int(e.size), bad: l.unreadable(&it, e.kind)}
		var head imageHead
		for ; at < int(x.number(i)); at++ {
			b, err := heads.next()
			if b == nil {
				return nil, fmt.Errorf("imageloader: %s: %w", x.side.path, cmp.Or(err, error(errIndexDamaged)))
			}
			head = imageHead(b)
		}
		info, format, ok := head.info()
		switch {
		case f.bad != nil:
		case e.flags&entryImage == 0 || head[8] == headNoImage:
			f.bad = l.bad(&it, NotImage, nil)
		case head[8] == headUnusable:
			f.bad = l.bad(&it, Damaged, errors.New("it has no header of an image that can be read"))
		case ok:
			if f.bad = l.oversize(&it, info); f.bad == nil {
				f.format, f.width, f.height = describe(format, info), info.Width, info.Height
			}
		}
		c.add(int(e.label), f)
	}
	return c.report(), nil
}

func rangeOf(values []int64) Range {
	if len(values) == 0 {
		return Range{}
	}
	slices.Sort(values)
	return Range{values[0], values[(len(values)-1)/2], values[len(values)-1]}
}

package imageloader

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/imageloader/internal/audit"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Formats of archives: values of [Report].Format and [Loader.Format].
const (
	FormatTar       = archive.Tar     // "tar"
	FormatTarGzip   = archive.TarGzip // "tar.gz"
	FormatTarZstd   = archive.TarZstd // "tar.zst"
	FormatZip       = archive.Zip     // "zip"
	FormatParquet   = archive.Parquet // "parquet"
	FormatDirectory = archive.Tree    // "directory"
)

// Report is the result of Inspect.
type Report struct {
	File      string
	Format    string // FormatTar, ...; of the first shard
	FileBytes int64  // size of all shards, or of the files in a directory
	Samples   int    // images in the directories of classes, including bad ones
	Ignored   int    // other members, not counting directories
	Orphans   int    // images among the ignored members that are outside of any directory
	// With WebDataset, OrphansNamed holds the first 10 images without a label.
	OrphansNamed []Orphan
	// LeftOut lists folders and links that are not classes, but that may have been meant as
	// classes. It is nil with WebDataset and List, whose classes are not directories.
	LeftOut []LeftOut
	Classes []ClassReport
	Formats map[string]int // good images by format, for example "JPEG", "JPEG progressive", "JPEG grey", "PNG 16-bit"
	Width   Range          // in pixels, of good images
	Height  Range
	Bytes   Range // compressed size, of good images
	// Turned counts the good images whose EXIF orientation is not upright. A loader with
	// Transform.ApplyEXIFOrientation turns them.
	Turned int
	Bad    []*SampleError // the first 1,000 bad samples
	BadBy  map[Reason]int // all bad samples
	// Warned holds the first 1,000 damaged images that are good samples (see Options.Damaged).
	// WarnedCount counts all of them.
	Warned      []*SampleError
	WarnedCount int
	// Findings counts the samples that are tolerated, refused or rare, by kind. A format is rare if
	// at most a twentieth of the good images have it.
	Findings []Finding
	// List compares Options.List with the archive. It is nil without a list.
	List *ListReport
	// Advice says what an archive without samples may be, and the next step. Instead is the path to
	// open instead, such as a pattern for the Parquet files of a directory. Both may be "".
	Advice, Instead string
}

// LeftOut counts one kind of folder or link that is not a class: folders without an image, hidden
// folders, links in a tar, broken links, links to a folder that contains them, or archives inside
// the archive. First has at most 10 names.
type LeftOut = index.LeftOut

// ClassReport is one class of a Report, in the order of labels.
type ClassReport struct {
	Name    string
	Samples int // including bad ones
	Bad     int
	Bytes   int64
	// Directories lists the first 5 directories that contain the class's samples, in the archive's
	// order. In an archive with train/cat and test/cat, class cat has two directories. Directories
	// is nil with WebDataset and List, whose classes are not directories.
	Directories []string
}

// Range summarises a set of numbers. The median of an even count is the lower middle one.
type Range struct{ Min, Median, Max int64 }

// Inspect reads a whole archive and decodes every sample in full, on all cores. If progress is not
// nil, Inspect calls it now and then from the caller's goroutine. It uses the options WebDataset,
// List, Columns, Damaged, MaxSampleBytes, MaxPixels and OpenSource. If the archive itself is
// damaged, Inspect returns the *ArchiveError and the report on the part before the damage.
func Inspect(ctx context.Context, path string, o Options, progress func(Progress)) (*Report, error) {
	l, err := inspectedBy(path, o, nil, sample.Library{})
	if err != nil {
		return nil, err
	}
	return l.inspect(ctx, progress, audit.NewNames(), nil)
}

// inspectedBy returns a loader for inspecting an archive, without opening the archive.
func inspectedBy(path string, o Options, file func(string) (archive.File, error), c sample.Codecs) (*Loader, error) {
	o.ListFormat.GroupColumn = "" // only Part needs groups, and Inspect reads all samples
	o, err := Options{
		WebDataset: o.WebDataset, List: o.List, ListFormat: o.ListFormat,
		MultiLabel: o.MultiLabel && o.List != "", Damaged: o.Damaged, MaxSampleBytes: o.MaxSampleBytes,
		MaxPixels: o.MaxPixels, OpenSource: o.OpenSource, Columns: o.Columns,
	}.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Loader{archiveFile: archiveFile{path: path, openFile: file}, o: o,
		decoding: decoding{codec: c, rules: newRules(path, &o)}}, nil
}

// inspect inspects the archive. names makes the digests of the samples' names. If take is not nil,
// inspect calls it at the end, unless there was an error: once for each bad sample and each sample
// with tolerated damage, in no particular order. With take, it is an error if samples in several
// shards have the same WebDataset key.
func (l *Loader) inspect(ctx context.Context, progress func(Progress), names *audit.Names,
	take func(verdict)) (*Report, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	a, err := archive.Open(ctx, l.path, l.archiveConfig())
	if err != nil {
		return nil, archive.StopCause(ctx, err)
	}
	defer func() { _ = a.Close() }() // nothing was written
	if err := l.readList(ctx, a); err != nil {
		return nil, archive.StopCause(ctx, err)
	}
	if err := l.o.checkFormat(a.Path(), a.Format()); err != nil {
		return nil, err
	}
	config := l.indexConfig(a.Format())
	config.Parquet = a.InParquet() && l.list == nil
	config.Progress, config.OneShard = progress, take != nil
	b, err := index.NewBuilder(archive.Shown(l.path), config)
	if err != nil {
		return nil, err
	}
	defer b.Close()

	in := inspection{
		l:        l,
		ctx:      ctx,
		stop:     stop,
		buffers:  arena.NewBuffers(queueBytes),
		budget:   arena.NewBudget(queueBytes, nil),
		items:    make(chan inspectItem, 2*l.o.Workers),
		names:    names,
		findings: findings{judging: take != nil, census: newCensus(l.otherLabels(a))},
	}
	defer in.buffers.Close() // no worker is running
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
			err = &index.LabelError{File: archive.Shown(l.path), Name: in.firstNames[labels.Odd],
				Label: b.Directory(labels.Odd)}
		}
		return nil, err
	}
	for _, v := range in.findings.verdicts {
		if err == nil {
			take(v)
		}
	}
	return in.findings.census.report(a, labels), err
}

// inspection is a running Inspect. It visits the members in the walk over the archive, and runs the
// workers.
type inspection struct {
	l       *Loader
	ctx     context.Context
	stop    context.CancelCauseFunc
	buffers *arena.Buffers // of compressed samples
	budget  *arena.Budget
	items   chan inspectItem

	// Only the goroutine of the walk uses the fields up to findings.
	bad        *SampleError // reason why the current sample is bad, or nil
	names      *audit.Names
	firstNames []string // with WebDataset, and in a Parquet file: name of the first image of each label

	findings findings
}

// findings are the results of the workers.
type findings struct {
	mu       sync.Mutex
	census   *census
	judging  bool // whether verdicts are collected
	verdicts []verdict
}

// add adds the result for a sample.
func (s *findings) add(r inspected, f *index.Found, names *audit.Names) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.census.add(r)
	if s.judging && (r.bad != nil || r.warned != nil) {
		s.verdicts = append(s.verdicts,
			verdict{int32(f.Position), int32(f.Group), int32(f.Dir), names.Digest(f.Name), r.bad != nil})
	}
}

// inspectItem is a sample that is sent to a worker.
type inspectItem struct {
	found index.Found
	data  []byte
	bad   *SampleError
	again bool // an earlier sample has the same name
}

// verdict is the result of inspecting a sample that is bad or has tolerated damage.
type verdict struct {
	position, group, dir int32  // see index.Found
	name                 uint64 // digest of the name
	bad                  bool
}

// Buffer returns memory for a sample that can be read. It implements index.Visitor.
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

// Visit sends a sample to the workers. It implements index.Visitor.
func (in *inspection) Visit(f *index.Found, data []byte) error {
	if f.Dir < 0 {
		in.recycle(data)
		return nil
	}
	it := inspectItem{found: *f, data: data, bad: in.bad, again: in.names.Again(f.Name)}
	if f.Damage != nil {
		it.bad = in.l.rules.Bad(&Sample{Name: f.Name}, Damaged, f.Damage)
	}
	if it.bad != nil {
		it.bad.Index = f.Index
	}
	if (in.l.o.WebDataset || len(f.Labels) > 0) && f.Dir == len(in.firstNames) {
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
		in.findings.add(r, &it.found, in.names)
		in.recycle(it.data)
	}
}

// inspect decodes a sample in full, and scales it to 8 x 8 pixels.
func (in *inspection) inspect(it *inspectItem, d sample.Decoder, pixels []byte) (r inspected, fatal error) {
	f, rules := &it.found, &in.l.rules
	r = inspected{index: f.Index, dir: f.Dir, name: f.Name, bytes: int64(len(it.data)), bad: it.bad}
	if it.again {
		r.rare = append(r.rare, audit.NameAgain)
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
		g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: 8,
			ResizeHeight: 8, WindowWidth: 8, WindowHeight: 8}
		err = d.Decode(it.data, &g, pixels, 8*3)
	}
	if err != nil {
		r.bad, fatal = rules.Decoding(&s, err)
		return r, fatal
	}
	r.width, r.height, r.format = info.Width, info.Height, audit.Describe(format, info)
	r.turned = info.Orientation > 1
	r.rare = append(r.rare, audit.Rarities(f.Name, format, info)...)
	if audit.Animated(format, it.data) {
		r.rare = append(r.rare, "animated: the first frame is the image")
	}
	if damage := sample.Tolerated(d); damage != "" {
		r.warned = rules.Tolerated(&s, damage)
	}
	return r, nil
}

// InspectIndex makes the report of Inspect from the archive's index alone. If there is no index, it
// first makes one. InspectIndex reads and decodes no image, so it finds only damage that is visible
// in an image's header. If the header is too far from the start of the file, the image has the
// format "unknown", and its pixels do not count in Width and Height.
//
// InspectIndex uses the options IndexFile, Classes, WebDataset, List, Part, MaxSampleBytes,
// MaxPixels, OpenSource and Logger. An index that was made with labels from another source is not
// replaced: InspectIndex returns [ErrOtherLabels]. A directory or a zip has no index and is an
// error.
func InspectIndex(ctx context.Context, path string, o Options, progress func(Progress)) (*Report, error) {
	o.clearPairs()
	o.NoIndex, o.ShuffleBytes = false, 1        // no contents are held in memory
	o.MultiLabel = o.MultiLabel && o.List != "" // without a List, a report has one label a sample
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Loader{archiveFile: archiveFile{path: path}, o: o,
		decoding: decoding{codec: sample.Library{}, rules: newRules(path, &o)}}
	for tried := false; ; tried = true {
		r, err := inspectIndex(ctx, l)
		switch {
		case r != nil || err != nil:
			return r, archive.StopCause(ctx, err)
		case tried:
			return nil, fmt.Errorf("imageloader: %s: the index that was just made does not fit: the "+
				"archive changes while it is read", archive.Shown(path))
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
	if err := l.readList(ctx, a); err != nil {
		return nil, err
	}
	config := l.indexConfig(a.Format())
	config.RefuseOtherLabels = true // loaders use that index, so it must not be replaced
	x, err := index.Load(a, config)
	if x == nil || err != nil {
		return nil, err
	}
	defer func() { _ = x.Close() }() // there is nothing to save
	c, names := newCensus(l.otherLabels(a)), audit.NewNames()
	labels := index.Labels{Classes: x.Classes(), Ignored: x.Ignored(), Orphans: x.Orphans(),
		OrphansNamed: x.OrphansNamed(), LeftOut: x.LeftOut(), List: x.List(), Lists: x.Lists()}
	i := 0
	for h, err := range x.Headers() {
		if err != nil {
			return nil, err
		}
		f := inspectHeader(&l.rules, x.Sample(i), i, &h)
		if labels.Lists != nil {
			f.dir = x.ListNumber(i)
		}
		if h.State != index.HeaderNoImage && h.State != index.HeaderForeign && names.Again(f.name) {
			f.rare = append(f.rare, audit.NameAgain)
		}
		c.add(f)
		i++
	}
	for label := range labels.Classes {
		labels.OfDirectory = append(labels.OfDirectory, int32(label))
	}
	return c.report(a, labels), nil
}

// inspectHeader classifies a sample by its header in an index.
func inspectHeader(rules *sample.Rules, m index.Sample, i int, h *index.Header) inspected {
	s := Sample{Name: m.Name, Index: i, Label: m.Label}
	f := inspected{index: i, dir: m.Label, name: m.Name, format: audit.UnknownFormat, bytes: m.Size,
		bad: rules.Member(&s, m.Kind, m.Size)}
	if f.bad != nil {
		return f
	}
	switch h.State {
	case index.HeaderNoImage:
		f.bad = rules.Bad(&s, NotImage, nil)
	case index.HeaderForeign:
		f.bad = rules.Bad(&s, Unsupported,
			errors.New("an image of a format that is not decoded: convert it to JPEG, PNG or WebP"))
	case index.HeaderUnusable:
		f.bad = rules.Bad(&s, Damaged, errors.New("it has no header of an image that can be read"))
	case index.HeaderKnown:
		if f.bad = rules.Header(&s, &h.Info); f.bad == nil {
			f.format, f.width, f.height = audit.Describe(h.Format, h.Info), h.Info.Width, h.Info.Height
			f.rare, f.turned = audit.Rarities(m.Name, h.Format, h.Info), h.Info.Orientation > 1
		}
	}
	return f
}

const (
	// maxNamed is the maximum number of members in Report.Bad and Report.Warned.
	maxNamed = 1000
	// maxFirst is the maximum number of members in a Finding, and of directories in a ClassReport.
	maxFirst = 5
	// maxRows is the maximum number of findings of one verdict that are listed as separate rows.
	maxRows = 100
	// rareShare defines what is rare: a kind that at most 1 in rareShare of the good images has.
	rareShare = 20
)

// Verdict is a loader's treatment of the images of a Finding.
type Verdict string

// The verdicts.
const (
	FindingTolerated Verdict = "tolerated" // damaged, but good samples: see Options.Damaged
	FindingRefused   Verdict = "refused"   // bad samples
	FindingRare      Verdict = "rare"      // good samples of a kind that is easily overlooked
)

// Finding is one row of a Report: a kind of sample that is tolerated, refused or rare.
type Finding struct {
	Verdict Verdict
	What    string // "damaged: truncated JPEG", "16 bits a channel"; it may contain text from the archive
	Count   int
	First   []string // names of the first samples, at most 5
}

// inspected is the result of inspecting one sample.
type inspected struct {
	index         int
	dir           int // the number of its directory
	name          string
	format        string
	width, height int32
	bytes         int64
	turned        bool
	bad           *SampleError
	warned        *SampleError // tolerated damage
	rare          []string     // rare properties
}

// census makes a Report from samples, which may arrive in any order. It keeps names only for the
// first samples of each kind.
type census struct {
	byDirectory          bool       // the directories are the classes
	dirs                 []dirCount // by directory number
	formats              map[string]int
	width, height, bytes []int64 // of good images
	bad, warned          namedSamples
	rows                 map[row]*firsts
	rowsOf               map[Verdict]int
	turned               int // good images whose orientation is not upright
}

type dirCount struct {
	samples, bad int
	bytes        int64
	badBy        map[Reason]int
	paths        firsts // of the directories with its name
}

// row identifies a Finding.
type row struct {
	verdict Verdict
	what    string
	format  bool // the row is a format: a finding only if few images have it
}

// otherLabels reports whether the labels of an archive come from a source other than its
// directories.
func (l *Loader) otherLabels(a *archive.Archive) bool {
	return l.o.WebDataset || l.o.List != "" || a.Format() == archive.Parquet
}

// newCensus returns an empty census. otherLabels means that the directories are not the classes.
func newCensus(otherLabels bool) *census {
	return &census{byDirectory: !otherLabels, formats: map[string]int{},
		rows: map[row]*firsts{}, rowsOf: map[Verdict]int{}}
}

func (c *census) add(f inspected) {
	c.dirs = append(c.dirs, make([]dirCount, max(0, f.dir+1-len(c.dirs)))...)
	d := &c.dirs[f.dir]
	d.samples++
	d.bytes += f.bytes
	if slash := strings.LastIndexByte(f.name, '/'); c.byDirectory && slash > 0 {
		d.paths.addOnce(f.index, f.name[:slash])
	}
	for _, what := range f.rare {
		c.note(row{verdict: FindingRare, what: what}, f.index, f.name)
	}
	if f.bad != nil {
		d.bad++
		if d.badBy == nil {
			d.badBy = map[Reason]int{}
		}
		d.badBy[f.bad.Reason]++
		c.bad.add(f.bad)
		c.note(row{verdict: FindingRefused, what: kindOfError(f.bad)}, f.index, f.name)
		return
	}
	if f.warned != nil {
		c.warned.add(f.warned)
		c.note(row{verdict: FindingTolerated, what: kindOfError(f.warned)}, f.index, f.name)
	}
	c.formats[f.format]++
	if f.turned {
		c.turned++
	}
	if f.format != audit.UnknownFormat && len(f.rare) == 0 {
		c.note(row{verdict: FindingRare, what: f.format, format: true}, f.index, f.name)
	}
	c.bytes = append(c.bytes, f.bytes)
	if f.width > 0 {
		c.width, c.height = append(c.width, int64(f.width)), append(c.height, int64(f.height))
	}
}

// note counts a sample in a row. If the maximum number of rows is reached, all further kinds share
// one row.
func (c *census) note(r row, index int, name string) {
	f := c.rows[r]
	if f == nil && c.rowsOf[r.verdict] >= maxRows {
		r = row{verdict: r.verdict, what: "others"}
		f = c.rows[r]
	}
	if f == nil {
		f = &firsts{}
		c.rows[r] = f
		c.rowsOf[r.verdict]++
	}
	f.count++
	f.add(index, name)
}

// report makes the Report. labels are the labels after the whole archive has been read.
func (c *census) report(a *archive.Archive, labels index.Labels) *Report {
	r := &Report{
		File:      a.Path(),
		Format:    a.Format(),
		FileBytes: a.FileBytes(),
		Ignored:   labels.Ignored,
		Orphans:   labels.Orphans,
		LeftOut:   labels.LeftOut,
		Formats:   c.formats,
		BadBy:     map[Reason]int{},
		Width:     rangeOf(c.width),
		Height:    rangeOf(c.height),
		Bytes:     rangeOf(c.bytes),
		Turned:    c.turned,

		OrphansNamed: labels.OrphansNamed,
		List:         labels.List,
		Advice:       labels.Advice,
		Instead:      labels.Instead,
	}
	for _, class := range labels.Classes {
		r.Classes = append(r.Classes, ClassReport{Name: class})
	}
	for dir, d := range c.dirs {
		if d.samples == 0 { // not in a class
			continue
		}
		of := []int32{}
		if labels.Lists != nil {
			of = labels.Lists[dir]
		} else {
			of = append(of, labels.OfDirectory[dir])
		}
		for _, label := range of {
			class := &r.Classes[label]
			class.Samples += d.samples
			class.Bad += d.bad
			class.Bytes += d.bytes
			class.Directories = d.paths.names()
		}
		r.Samples += d.samples
		for reason, n := range d.badBy {
			r.BadBy[reason] += n
		}
	}
	r.Bad, r.Warned, r.WarnedCount = c.bad.first(), c.warned.first(), c.warned.count
	r.Findings = c.findings()
	return r
}

// findings lists the rows by verdict, most frequent first.
func (c *census) findings() (list []Finding) {
	for row, f := range c.rows {
		if row.format && (f.count*rareShare > len(c.bytes) || len(c.formats) == 1) {
			continue
		}
		list = append(list, Finding{row.verdict, row.what, f.count, f.names()})
	}
	verdicts := []Verdict{FindingTolerated, FindingRefused, FindingRare}
	slices.SortFunc(list, func(a, b Finding) int {
		return cmp.Or(
			cmp.Compare(slices.Index(verdicts, a.Verdict), slices.Index(verdicts, b.Verdict)),
			cmp.Compare(b.Count, a.Count),
			strings.Compare(a.What, b.What),
		)
	})
	return list
}

// detailed reports whether the bad samples of a reason have a row for each detail.
func detailed(r Reason) bool { return r == Damaged || r == Unsupported || r == Rejected }

// kindOfError returns the text that all errors of a row share: the reason, and for some reasons the
// decoder's message. For Damaged it removes the numbers from the message, because they are offsets
// and sizes in one file.
func kindOfError(e *SampleError) string {
	if !detailed(e.Reason) || e.Err == nil {
		return string(e.Reason)
	}
	text := e.Err.Error()
	var decoding *imagecapi.Error
	if errors.As(e.Err, &decoding) {
		text = decoding.Message
	}
	if e.Reason == Damaged {
		text = withoutNumbers(text)
	}
	const maxText = 100
	if !strings.HasPrefix(text, string(e.Reason)) {
		text = string(e.Reason) + ": " + text
	}
	return strings.ToValidUTF8(text[:min(len(text), maxText)], "")
}

// withoutNumbers replaces decimal and hexadecimal numbers by N.
func withoutNumbers(text string) string {
	digit := func(c byte) bool { return c >= '0' && c <= '9' }
	var b strings.Builder
	for i := 0; i < len(text); {
		if !digit(text[i]) || i > 0 && isLetter(text[i-1]) { // "CRC32" is a name
			b.WriteByte(text[i])
			i++
			continue
		}
		hex := strings.HasPrefix(text[i:], "0x")
		if hex {
			i += 2
		}
		for i < len(text) && (digit(text[i]) || hex && text[i]|0x20 >= 'a' && text[i]|0x20 <= 'f') {
			i++
		}
		b.WriteByte('N')
	}
	return b.String()
}

func isLetter(c byte) bool { return c|0x20 >= 'a' && c|0x20 <= 'z' }

// firsts counts samples and keeps the names of the first ones.
type firsts struct {
	count int
	list  []firstName // in order
}

type firstName struct {
	index int
	name  string
}

func (f *firsts) add(index int, name string) {
	at, _ := slices.BinarySearchFunc(f.list, index,
		func(n firstName, index int) int { return cmp.Compare(n.index, index) })
	if at < maxFirst {
		f.list = slices.Insert(f.list, at, firstName{index, name})
		f.list = f.list[:min(len(f.list), maxFirst)]
	}
}

// addOnce is add for names that several samples share. Each name is in the list once, at the index
// of its first sample.
func (f *firsts) addOnce(index int, name string) {
	if at := slices.IndexFunc(f.list, func(n firstName) bool { return n.name == name }); at >= 0 {
		if f.list[at].index <= index {
			return
		}
		f.list = slices.Delete(f.list, at, at+1)
	}
	f.add(index, name)
}

func (f *firsts) names() (names []string) {
	for _, n := range f.list {
		names = append(names, n.name)
	}
	return names
}

// namedSamples counts samples and keeps the first ones.
type namedSamples struct {
	count int
	list  []*SampleError
}

func (n *namedSamples) add(e *SampleError) {
	n.count++
	n.list = append(n.list, e)
	if len(n.list) >= 2*maxNamed {
		n.list = n.first()
	}
}

// first returns the first samples, in order.
func (n *namedSamples) first() []*SampleError {
	slices.SortFunc(n.list, func(a, b *SampleError) int { return cmp.Compare(a.Index, b.Index) })
	clear(n.list[min(len(n.list), maxNamed):])
	n.list = n.list[:min(len(n.list), maxNamed)]
	return n.list
}

// rangeOf summarises values, and sorts them.
func rangeOf(values []int64) Range {
	if len(values) == 0 {
		return Range{}
	}
	slices.Sort(values)
	return Range{values[0], values[(len(values)-1)/2], values[len(values)-1]}
}

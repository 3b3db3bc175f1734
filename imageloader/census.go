package imageloader

import (
	"cmp"
	"errors"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

const (
	// maxNamed is the maximum number of members that Report.Bad and Report.Warned name.
	maxNamed = 1000
	// maxFirst is the maximum number of members that a Finding names, and of directories that a
	// ClassReport names.
	maxFirst = 5
	// maxRows is the maximum number of findings of one verdict that have rows of their own.
	maxRows = 100
	// rareShare makes a kind of image rare: at most 1 in rareShare of the good images are of it.
	rareShare = 20
)

// Verdict says what becomes of the images of a Finding.
type Verdict string

// The verdicts.
const (
	FindingTolerated Verdict = "tolerated" // damaged, and good samples all the same: see Options.Damaged
	FindingRefused   Verdict = "refused"   // bad samples
	FindingRare      Verdict = "rare"      // good samples, of a kind that is easily overlooked
)

// Finding is one row of a Report: a kind of sample that is tolerated, refused or rare.
type Finding struct {
	Verdict Verdict
	What    string // "damaged: truncated JPEG", "16 bits a channel"; it may hold text from the archive
	Count   int
	First   []string // the names of its first samples, at most 5
}

// inspected holds the facts that are known of a sample.
type inspected struct {
	index         int
	dir           int // the number of its directory
	name          string
	format        string
	width, height int32
	bytes         int64
	bad           *SampleError
	warned        *SampleError // damage that was tolerated
	rare          []string     // what is rare of it
}

// census makes a Report of samples, which it takes in any order. It keeps names of the first
// samples of each kind only.
type census struct {
	byDirectory          bool       // the directories are the classes
	dirs                 []dirCount // by number of directory
	formats              map[string]int
	width, height, bytes []int64 // of good images
	bad, warned          namedSamples
	rows                 map[row]*firsts
	rowsOf               map[Verdict]int
}

type dirCount struct {
	samples, bad int
	bytes        int64
	badBy        map[Reason]int
	paths        firsts // of the directories with its name
}

// row is the identity of a Finding.
type row struct {
	verdict Verdict
	what    string
	format  bool // of a format: a finding only if few images have it
}

func newCensus(o *Options) *census {
	return &census{byDirectory: !o.WebDataset && o.List == "", formats: map[string]int{}, rows: map[row]*firsts{}, rowsOf: map[Verdict]int{}}
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
	if f.format != unknownFormat && len(f.rare) == 0 {
		c.note(row{verdict: FindingRare, what: f.format, format: true}, f.index, f.name)
	}
	c.bytes = append(c.bytes, f.bytes)
	if f.width > 0 {
		c.width, c.height = append(c.width, int64(f.width)), append(c.height, int64(f.height))
	}
}

// note counts a sample into a row. Rows over the maximum are counted together.
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

// report makes the report, now that the labels are known.
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

		OrphansNamed: labels.OrphansNamed,
	}
	for _, class := range labels.Classes {
		r.Classes = append(r.Classes, ClassReport{Name: class})
	}
	for dir, d := range c.dirs {
		if d.samples == 0 { // not of a class
			continue
		}
		class := &r.Classes[labels.OfDirectory[dir]]
		class.Samples += d.samples
		class.Bad += d.bad
		class.Bytes += d.bytes
		class.Directories = d.paths.names()
		r.Samples += d.samples
		for reason, n := range d.badBy {
			r.BadBy[reason] += n
		}
	}
	r.Bad, r.Warned, r.WarnedCount = c.bad.first(), c.warned.first(), c.warned.count
	r.Findings = c.findings()
	return r
}

// findings lists the rows: by verdict, the most frequent first.
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

// kindOfError is what the errors of one row have in common: the reason, and for what decoders say
// their message without its numbers, which are places and sizes in one file.
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
	at, _ := slices.BinarySearchFunc(f.list, index, func(n firstName, index int) int { return cmp.Compare(n.index, index) })
	if at < maxFirst {
		f.list = slices.Insert(f.list, at, firstName{index, name})
		f.list = f.list[:min(len(f.list), maxFirst)]
	}
}

// addOnce is add for names that several samples have: a name is in the list once, at the index of
// its first sample.
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

// rangeOf sums up values, which it sorts.
func rangeOf(values []int64) Range {
	if len(values) == 0 {
		return Range{}
	}
	slices.Sort(values)
	return Range{values[0], values[(len(values)-1)/2], values[len(values)-1]}
}

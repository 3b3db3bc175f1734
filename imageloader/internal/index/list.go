package index

import (
	"fmt"
	"io"
	"math"
	"path"
	"slices"
	"strings"
	"unicode/utf8"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// List names the samples and their labels. It is read from a CSV or TSV file. It is safe for
// concurrent use.
type List struct {
	file       string
	format     ListFormat
	columns    columns
	rows       []listRow
	byPath     map[string]int32 // row numbers by path
	prefix     string           // folders at the start of all paths, with a slash at the end; "" if there are none
	labels     []listLabel
	hot        []string // names of one-hot columns; nil: there are none
	groups     []string
	duplicates int // number of rows that repeat an earlier one
	comma      string
	listKind
}

// listKind says where a list comes from, unless it comes from a file of rows.
type listKind struct {
	numbered bool   // from NumberedList: lines are numbers of images, and there is no header
	text     string // with numbered: where the file has names and boxes
	every    bool   // from EveryImage: its only row stands for every image
	hidden   bool   // with every: images in hidden directories are in the list
}

// errorAt returns an error in a line, or of an image if the list is numbered.
func (l *List) errorAt(line int, err error) error {
	if l.numbered {
		return fmt.Errorf("%s: image %d: %w", l.file, line, err)
	}
	return &ListError{l.file, line, err}
}

type listRow struct{ label, group, line int32 }

// listLabel is a label, and the path in the first row with this label. If images have lists of
// labels, name is the text of a list: see listOf.
type listLabel struct {
	name, path string
	line       int32
}

// ListError is an error in a line of Options.List.
type ListError struct {
	File string // the list
	Line int    // from 1
	Err  error
}

func (e *ListError) Error() string {
	return fmt.Sprintf("imageloader: %s:%d: %v", e.File, e.Line, e.Err)
}

func (e *ListError) Unwrap() error { return e.Err }

// listReader reads a list.
type listReader struct {
	*List
	table  *listText
	labels map[string]int32 // indexes in List.labels, by the label's text in the list
	groups map[string]int32 // indexes in List.groups
	multi  bool
}

// fieldEnd ends each field in the text of a label that consists of several columns.
const fieldEnd = "\x00"

// ReadList reads a list in the format of RFC 4180. The separator may also be a semicolon or a tab.
// The encoding is UTF-8, or UTF-16 if there is a byte order mark. ReadList ignores spaces around
// fields. multi allows several labels for an image. An error in a line is a *ListError.
func ReadList(file string, in io.Reader, f ListFormat, multi bool) (*List, error) {
	t, err := newListText(file, in)
	if err != nil {
		return nil, err
	}
	r := &listReader{List: &List{file: file, format: f, byPath: map[string]int32{}, comma: t.separatorName()}, table: t,
		labels: map[string]int32{}, groups: map[string]int32{}, multi: multi}
	first, line, err := t.read()
	first = slices.Clone(first) // the reader reuses its memory
	if err == io.EOF {
		return nil, r.empty()
	}
	if err != nil {
		return nil, err
	}
	second, secondLine, err := t.read()
	if err != nil && err != io.EOF {
		return nil, err
	}
	if r.columns, err = f.findColumns(first, second); err != nil {
		return nil, &ListError{file, line, err}
	}
	if r.columns.header == nil {
		if err := r.add(first, line); err != nil {
			return nil, &ListError{file, line, err}
		}
	}
	for record, line := second, secondLine; record != nil; {
		if err := r.add(record, line); err != nil {
			return nil, &ListError{file, line, err}
		}
		if record, line, err = t.read(); err != nil && err != io.EOF {
			return nil, err
		}
	}
	if len(r.rows) == 0 {
		return nil, r.empty()
	}
	return r.List, r.finish()
}

// empty returns the error for a list without rows.
func (l *List) empty() error {
	return fmt.Errorf("imageloader: %s: the list has no lines with a path and a label", l.file)
}

// add adds a row.
func (r *listReader) add(record []string, line int) error {
	c := &r.columns
	if need := c.need(); len(record) < need {
		return fmt.Errorf("%s, and %d are needed: names are in column %s, labels in column %s (separated by %s)",
			many(len(record), "column", "columns"), need, c.title(c.name), c.titles(c.labels), r.comma)
	}
	name := fieldOf(record, c.name)
	switch {
	case name == "":
		return fmt.Errorf("column %s: the path is empty", c.title(c.name))
	case len(name) > archive.MaxNameBytes:
		return fmt.Errorf("column %s: a path has more than %d bytes", c.title(c.name), archive.MaxNameBytes)
	case len(r.rows) == archive.MaxMembers, line > math.MaxInt32:
		return fmt.Errorf("more than %d lines", archive.MaxMembers)
	}
	label, err := r.label(record, name)
	if err != nil {
		return err
	}
	row := listRow{group: -1, line: int32(line)}
	if c.group >= 0 {
		group := fieldOf(record, c.group)
		if group == "" {
			return fmt.Errorf("column %s: %q has no group", c.title(c.group), name)
		}
		row.group = intern(r.groups, group, func(group string) { r.List.groups = append(r.List.groups, group) })
	}
	if !strings.Contains(name, "/") { // paths of Windows have backslashes
		name = strings.ReplaceAll(name, "\\", "/")
	}
	name = strings.Clone(path.Clean(name)) // the reader reuses the record's memory
	row.label = intern(r.labels, label,
		func(label string) { r.List.labels = append(r.List.labels, listLabel{label, name, int32(line)}) })
	if before, twice := r.byPath[name]; twice {
		return r.again(name, r.rows[before], row)
	}
	if len(r.rows) == 0 {
		r.prefix = name
	}
	r.prefix = commonFolders(r.prefix, name)
	r.byPath[name] = int32(len(r.rows))
	r.rows = append(r.rows, row)
	return nil
}

// intern returns the number of a text. If the text is new, intern calls add.
func intern(numbers map[string]int32, text string, add func(string)) int32 {
	number, known := numbers[text]
	if !known {
		number, text = int32(len(numbers)), strings.Clone(text)
		numbers[text] = number
		add(text)
	}
	return number
}

// label returns the text of a row's label. This is a field, or the fields of all label columns,
// each with fieldEnd at its end.
func (r *listReader) label(record []string, name string) (string, error) {
	c := &r.columns
	var text strings.Builder
	for _, at := range c.labels {
		field := fieldOf(record, at)
		switch {
		case len(field) > archive.MaxNameBytes:
			return "", fmt.Errorf("column %s: a label has more than %d bytes", c.title(at), archive.MaxNameBytes)
		case !utf8.ValidString(field):
			return "", fmt.Errorf("column %s: the label %q is not UTF-8: save the list as \"CSV UTF-8\", or convert it "+
				"(iconv -f WINDOWS-1252 -t UTF-8)", c.title(at), field)
		case strings.Contains(field, fieldEnd):
			return "", fmt.Errorf("column %s: the label %q has a byte 0", c.title(at), field)
		case len(c.labels) > 1:
			text.WriteString(field + fieldEnd)
			continue
		case field == "" && !r.multi:
			return "", fmt.Errorf("column %s: %q has no label", c.title(at), name)
		}
		return field, nil
	}
	return text.String(), nil
}

// again counts a row with the name of an earlier row. It is an error if the two rows have different
// labels or groups.
func (r *listReader) again(name string, before, row listRow) error {
	if before.label == row.label && before.group == row.group {
		r.duplicates++
		return nil
	}
	if r.numbered {
		return fmt.Errorf("%q is image %d already: remove one of them", name, before.line)
	}
	what, a, b := "label", r.List.labels[before.label].name, r.List.labels[row.label].name
	if before.label == row.label {
		what, a, b = "group", r.List.groups[before.group], r.List.groups[row.group]
	}
	show := func(text string) string {
		return fmt.Sprintf("%.100q", strings.ReplaceAll(strings.TrimSuffix(text, fieldEnd), fieldEnd, " "))
	}
	return fmt.Errorf("%q is in line %d already, with the %s %s, and here with %s: correct or remove one of the lines",
		name, before.line, what, show(a), show(b))
}

// commonFolders returns the folders at the start of both names, with a slash at the end, or "".
func commonFolders(a, b string) string {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return a[:strings.LastIndexByte(a[:n], '/')+1]
}

// finish turns the texts of the labels into labels, after the last row.
func (r *listReader) finish() error {
	c := &r.columns
	if len(c.labels) > 1 {
		return r.finishColumns()
	}
	if !r.multi {
		return nil
	}
	separator := r.format.Separator
	for _, s := range []string{"|", ";", ","} {
		if separator == "" && slices.ContainsFunc(r.List.labels,
			func(l listLabel) bool { return strings.Contains(l.name, s) }) {
			separator = s
		}
	}
	for i := range r.List.labels {
		l := &r.List.labels[i]
		words := strings.Fields(l.name)
		if strings.TrimSpace(separator) != "" {
			words = nil
			for word := range strings.SplitSeq(l.name, separator) {
				if word = strings.TrimSpace(word); word != "" {
					words = append(words, word)
				}
			}
		}
		if err := r.setList(l, words); err != nil {
			return err
		}
	}
	return nil
}

// setList replaces a label's name by the text of a list with these labels.
func (r *listReader) setList(l *listLabel, words []string) (err error) {
	if l.name, err = listOf(words); err != nil {
		return &ListError{r.file, int(l.line), fmt.Errorf("column %s: %w", r.columns.titles(r.columns.labels), err)}
	}
	return nil
}

// finishColumns implements finish for a list with several label columns.
func (r *listReader) finishColumns() (err error) {
	c := &r.columns
	fields := func(l *listLabel) []string { return strings.Split(strings.TrimSuffix(l.name, fieldEnd), fieldEnd) }
	cold := func(field string) bool { _, ok := isHot(field); return !ok }
	if c.header == nil || slices.ContainsFunc(fields(&r.List.labels[0]), cold) {
		if !r.multi {
			return &ListError{r.file, int(r.List.labels[0].line), errSeveral}
		}
		for i := range r.List.labels {
			l := &r.List.labels[i]
			words := slices.DeleteFunc(fields(l), func(word string) bool { return word == "" })
			if err := r.setList(l, words); err != nil {
				return err
			}
		}
		return nil
	}
	if r.hot, err = c.hotNames(); err != nil {
		return &ListError{r.file, 1 + r.table.skipped, err}
	}
	for i := range r.List.labels {
		l := &r.List.labels[i]
		var words []string
		for k, field := range fields(l) {
			switch hot, ok := isHot(field); {
			case !ok:
				return &ListError{r.file, int(l.line), fmt.Errorf("column %s: %.40q is neither 0 nor 1, and the label "+
					"columns of line %d have nothing else: correct it, or choose other columns "+
					"(Options.ListFormat.LabelColumns)", c.title(c.labels[k]), field, r.List.labels[0].line)}
			case hot:
				words = append(words, r.hot[k])
			}
		}
		if r.multi {
			err = r.setList(l, words)
		} else {
			err = l.only(r.file, words)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// only sets the name of a label that must have exactly one class.
func (l *listLabel) only(file string, words []string) error {
	if len(words) == 1 {
		l.name = words[0]
		return nil
	}
	const most = 5
	which := ""
	if len(words) > 0 {
		which = " (" + strings.Join(words[:min(len(words), most)], ", ") + ")"
	}
	return &ListError{file, int(l.line), fmt.Errorf("%q has %s%s, and one is needed (several need Options.MultiLabel): "+
		"correct the line, or choose other columns (Options.ListFormat.LabelColumns)", l.path, many(len(words), "label", "labels"), which)}
}

// at returns the list's file and a line number, for errors that do not name the file.
func (l *List) at(line int32) string { return fmt.Sprintf("%s:%d", l.file, line) }

// listLabels has the classes of a list, and its labels as class numbers.
type listLabels struct {
	classes []string
	label   []int32   // by index of List.labels; nil with MultiLabel
	lists   [][]int32 // by index of List.labels, with MultiLabel
}

// resolve returns the classes and the labels of a list. The rules for WebDataset labels number the
// classes. Every one-hot column is a class, unless classes are given.
func (l *List) resolve(c *Config) (r listLabels, err error) {
	if l.every {
		return listLabels{label: []int32{0}}, nil
	}
	d, err := newDirectories(l.file, &Config{Classes: c.Classes, WebDataset: true, MultiLabel: c.MultiLabel})
	if err != nil {
		return r, err
	}
	number := func(name string) (n int32) {
		if err == nil {
			if n, err = d.number(name); err == nil {
				d.claimed[n] = true
			}
		}
		return n
	}
	numbers := make([]int32, len(l.labels))
	for i, x := range l.labels {
		numbers[i] = number(x.name)
	}
	if len(c.Classes) == 0 {
		for _, name := range l.hot {
			if c.MultiLabel {
				name = "\n" + name
			}
			number(name)
		}
	}
	if err != nil {
		return r, err
	}
	var label []int32
	var odd int
	if r.classes, label, odd = d.labels(); odd >= 0 {
		x := listLabel{name: d.names[odd], path: "the first line", line: 1}
		if i := slices.Index(numbers, int32(odd)); i >= 0 {
			x = l.labels[i]
		}
		return r, &LabelError{l.at(x.line), x.path, strings.ReplaceAll(strings.TrimPrefix(x.name, "\n"), "\n", " ")}
	}
	if c.MultiLabel {
		_, lists, _ := d.eachList()
		r.lists = make([][]int32, len(numbers))
		for i, n := range numbers {
			r.lists[i] = lists[n]
			if class, unknown := d.unknownIn(l.labels[i].name); unknown {
				return r, l.unknownClass(i, class, c)
			}
		}
		return r, nil
	}
	r.label = make([]int32, len(numbers))
	for i, n := range numbers {
		if r.label[i] = label[n]; r.label[i] < 0 {
			return r, l.unknownClass(i, l.labels[i].name, c)
		}
	}
	return r, nil
}

// unknownClass returns the error for a label that is not one of the given classes.
func (l *List) unknownClass(i int, class string, c *Config) error {
	x := l.labels[i]
	return &UnknownClassError{File: l.at(x.line), Name: x.path, Class: class, Known: c.Classes}
}

// listDirectory is the only directory in the index file of a list. A list does not use directories.
const listDirectory = "*"

// addListed implements add for a list and for files of boxes. It records every member, so that one
// index file serves all lists and all patterns.
func (b *Builder) addListed(m *archive.Member, magic []byte) (number int, err error) {
	dir, err := b.dirs.number(listDirectory)
	if err != nil {
		return -1, err
	}
	b.dirs.claimed[dir] = true
	flags := uint8(0)
	if claims(m, magic) {
		flags = recordImage
	}
	return b.record(m, dir, flags)
}

// loadListed reads the members. Those in the list become the samples of x.
func (b *Builder) loadListed(x *Index, sections map[uint32]section) error {
	list := b.config.List
	labels, err := list.resolve(&b.config)
	if err != nil {
		return err
	}
	members, err := newMemberReader(x.shards, len(b.dirs.names), sections)
	if err != nil {
		return err
	}
	x.classes, x.lists = labels.classes, labels.lists
	w := workMeter{shards: x.shards, next: x.eachMark()}
	kept := members.names[:0]
	matcher := newListMatcher(list, b.file)
	for i := 0; ; i++ {
		m, name, err := members.next()
		if err != nil {
			return err
		}
		if m == nil {
			break
		}
		if b.dirs.names[m.label] != listDirectory {
			return errIndexDamaged
		}
		row, err := matcher.match(string(name), m.flags&recordImage != 0)
		if err != nil {
			return err
		}
		if row < 0 {
			x.ignored++
			continue
		}
		x.noteNumber(i, int(sections[sectionMembers].count))
		if m.label = list.rows[row].label; labels.label != nil {
			m.label = labels.label[m.label]
		}
		m.name = uint32(len(kept))
		kept = append(kept, name...) // in place: never longer than the names read so far
		x.samples = append(x.samples, *m)
		if list.columns.group >= 0 {
			x.listed.groups = append(x.listed.groups, list.rows[row].group)
		}
		w.sample(m)
	}
	if x.listed.report, err = matcher.finish(b.config.Logger); err != nil {
		return err
	}
	x.orphans, x.listed.groupNames, x.listed.numbered = x.listed.report.Unlisted, list.groups, list.numbered
	x.names = unsafe.String(unsafe.SliceData(kept), len(kept)) // kept does not change any more
	x.readCost = w.cost()
	return nil
}

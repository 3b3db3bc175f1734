package index

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"path"
	"slices"
	"strings"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/internal/normalform"
)

// List names the samples and their labels. It is read from a CSV or TSV file. It is safe for
// concurrent use.
type List struct {
	file   string
	rows   []listRow
	byPath map[string]int32 // indexes of rows
	labels []listLabel
}

type listRow struct{ label, line int32 }

// listLabel is a label and the path of the first row that has it.
type listLabel struct {
	name, path string
	line       int32
}

// ListError reports an error in a line of Options.List.
type ListError struct {
	File string // the list
	Line int    // from 1
	Err  error
}

func (e *ListError) Error() string {
	return fmt.Sprintf("imageloader: %s:%d: %v", e.File, e.Line, e.Err)
}

func (e *ListError) Unwrap() error { return e.Err }

// listColumns are the possible names of the two columns, in order of preference.
var listColumns = [2][]string{{"path", "file", "filename", "file_name", "image"}, {"label", "class"}}

// ReadList reads a list in the format of RFC 4180. It ignores spaces around fields. The file's name
// determines the separator: tabs for .tsv and .tab, commas otherwise. .json and .jsonl files are
// errors. If the first line names a column of paths and a column of labels, it is a header.
// Otherwise the first column has the paths and the second the labels. All other columns are
// ignored. An error in a line is a *ListError.
func ReadList(file string, in io.Reader) (*List, error) {
	b := bufio.NewReaderSize(in, 1<<16)
	if mark, err := b.Peek(3); err == nil && string(mark) == "\xef\xbb\xbf" { // a byte order mark
		_, _ = b.Discard(len(mark)) // Peek has buffered it
	}
	if mark, err := b.Peek(2); err == nil && (string(mark) == "\xff\xfe" || string(mark) == "\xfe\xff") {
		return nil, fmt.Errorf("imageloader: %s: the list is UTF-16: write it as UTF-8 (iconv -f UTF-16 "+
			"-t UTF-8 %s > NEW)", file, path.Base(file))
	}
	ext := strings.ToLower(path.Ext(file))
	if ext == ".json" || ext == ".jsonl" {
		return nil, fmt.Errorf("imageloader: %s: a list is a CSV or TSV file, not JSON: write its paths "+
			"and labels to a .csv with the columns path and label", file)
	}
	r := csv.NewReader(b)
	r.FieldsPerRecord, r.ReuseRecord = -1, true
	if ext == ".tsv" || ext == ".tab" {
		r.Comma, r.LazyQuotes = '\t', true
	}
	l := &List{file: file, byPath: map[string]int32{}}
	columns, labels := [2]int{0, 1}, map[string]int32{}
	for first := true; ; first = false {
		record, err := r.Read()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, l.readError(err)
		}
		if first {
			if found, header := headerColumns(record); header {
				columns = found
				continue
			}
		}
		line, _ := r.FieldPos(0)
		if err := l.add(record, columns, line, labels); err != nil {
			return nil, &ListError{file, line, err}
		}
	}
	if len(l.rows) == 0 {
		return nil, fmt.Errorf("imageloader: %s: the list has no lines with a path and a label", file)
	}
	return l, nil
}

// readError adds the line number to an error of encoding/csv.
func (l *List) readError(err error) error {
	var parse *csv.ParseError
	if errors.As(err, &parse) {
		return &ListError{l.file, parse.Line, parse.Err}
	}
	return fmt.Errorf("imageloader: %s: %w", l.file, err)
}

// headerColumns returns the columns of paths and labels. header is false if the record does not
// name both.
func headerColumns(record []string) (columns [2]int, header bool) {
	for i, names := range listColumns {
		columns[i] = -1
		for _, name := range slices.Backward(names) {
			at := slices.IndexFunc(record,
				func(field string) bool { return strings.EqualFold(strings.TrimSpace(field), name) })
			if at >= 0 {
				columns[i] = at
			}
		}
	}
	return columns, columns[0] >= 0 && columns[1] >= 0
}

// add adds a row.
func (l *List) add(record []string, columns [2]int, line int, labels map[string]int32) error {
	if need := max(columns[0], columns[1]) + 1; len(record) < need {
		return fmt.Errorf("%d columns, and %d are needed: a path and a label, separated by commas (by "+
			"tabs in a .tsv)", len(record), need)
	}
	name, label := strings.TrimSpace(record[columns[0]]), strings.TrimSpace(record[columns[1]])
	switch {
	case name == "":
		return errors.New("the path is empty")
	case label == "":
		return fmt.Errorf("%q has no label", name)
	case max(len(name), len(label)) > archive.MaxNameBytes:
		return fmt.Errorf("a path or a label has more than %d bytes", archive.MaxNameBytes)
	case len(l.rows) == archive.MaxMembers, line > math.MaxInt32:
		return fmt.Errorf("more than %d lines", archive.MaxMembers)
	}
	name = path.Clean(name)
	if before, twice := l.byPath[name]; twice {
		return fmt.Errorf("%q is in line %d already", name, l.rows[before].line)
	}
	name = strings.Clone(name) // the csv.Reader reuses the record's memory
	number, known := labels[label]
	if !known {
		number, label = int32(len(l.labels)), strings.Clone(label)
		labels[label] = number
		l.labels = append(l.labels, listLabel{label, name, int32(line)})
	}
	l.byPath[name] = int32(len(l.rows))
	l.rows = append(l.rows, listRow{number, int32(line)})
	return nil
}

// at returns the list's file and a line number, for errors that do not name the file.
func (l *List) at(line int32) string { return fmt.Sprintf("%s:%d", l.file, line) }

// classes returns the classes, and the number of the class of each label in the list. The rules for
// WebDataset labels number the classes.
func (l *List) classes(c *Config) (classes []string, label []int32, err error) {
	d, err := newDirectories(l.file, &Config{Classes: c.Classes, WebDataset: true})
	if err != nil {
		return nil, nil, err
	}
	for _, x := range l.labels {
		number, err := d.number(x.name)
		if err != nil {
			return nil, nil, err
		}
		d.claimed[number] = true
	}
	classes, label, odd := d.labels()
	if odd >= 0 {
		x := l.labels[odd]
		return nil, nil, &LabelError{l.at(x.line), x.path, x.name}
	}
	if unknown := slices.Index(label, -1); unknown >= 0 {
		x := l.labels[unknown]
		return nil, nil, &UnknownClassError{File: l.at(x.line), Name: x.path, Class: x.name, Known: c.Classes}
	}
	return classes, label, nil
}

// listDirectory is the only directory in the index file that all lists share. A list does not use
// directories.
const listDirectory = "*"

// addListed implements add for a list. It records every member, so that one index file serves all
// lists.
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

// loadListed reads the members, and makes the members that the list names the samples of x.
func (b *Builder) loadListed(x *Index, sections map[uint32]section) error {
	list := b.config.List
	classes, label, err := list.classes(&b.config)
	if err != nil {
		return err
	}
	members, err := newMemberReader(x.shards, len(b.dirs.names), sections)
	if err != nil {
		return err
	}
	x.classes = classes
	w := workMeter{shards: x.shards, next: x.eachMark()}
	kept := members.names[:0]
	seen := make([]bool, len(list.rows))
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
		row, listed := list.byPath[string(name)]
		if !listed {
			if x.ignored++; m.flags&recordImage != 0 {
				x.orphans++
				b.unlisted.note(list, string(name))
			}
			continue
		}
		seen[row] = true
		x.noteNumber(i, int(sections[sectionMembers].count))
		m.label, m.name = label[list.rows[row].label], uint32(len(kept))
		kept = append(kept, name...) // in place: kept is never longer than the names read so far
		x.samples = append(x.samples, *m)
		w.sample(m)
	}
	if err := list.missing(b.file, &b.unlisted, seen); err != nil {
		return err
	}
	if x.orphans > 0 {
		b.config.Logger.Warn("images that the list does not name are ignored", "archive", b.file, "list",
			list.file, "images", x.orphans)
	}
	x.names = unsafe.String(unsafe.SliceData(kept), len(kept)) // kept does not change any more
	x.readCost = w.cost()
	return nil
}

// unlisted records images that a list does not name.
type unlisted struct {
	first string // name of the first such image, or ""
	twin  string // the first image whose name equals a path in the list after Unicode normalisation
	path  string // the path in the list that equals twin
	forms map[string]string
}

// note adds an image.
func (u *unlisted) note(list *List, name string) {
	if u.first == "" {
		u.first = name
		u.forms = normalform.Forms(maps.Keys(list.byPath))
	}
	if u.twin != "" {
		return
	}
	if path, found := normalform.Twin(name, u.forms); found {
		u.twin, u.path = name, path
	}
}

// hint explains why a path in the list may have no member. The caller adds it to the error.
func (u *unlisted) hint() string {
	switch {
	case u.twin != "":
		return normalform.Hint([]string{u.path}, []string{u.twin})
	case u.first != "":
		return fmt.Sprintf("; an image there that the list does not name is %q", u.first)
	}
	return ""
}

// missing returns the error for rows of the list without a member.
func (l *List) missing(archive string, images *unlisted, seen []bool) error {
	absent, first := 0, int32(0)
	for i, found := range seen {
		if line := l.rows[i].line; !found {
			if absent++; absent == 1 || line < first {
				first = line
			}
		}
	}
	if absent == 0 {
		return nil
	}
	name := ""
	for p, row := range l.byPath {
		if l.rows[row].line == first {
			name = p
		}
	}
	hint := ""
	if first == 1 {
		hint = "; a first line that is a header names the columns path and label"
	}
	others := ""
	if absent > 1 {
		others = fmt.Sprintf(" (%d lines in all name none)", absent)
	}
	return &ListError{l.file, int(first), fmt.Errorf("%q is no member of %s%s%s", name, archive, others,
		hint+images.hint())}
}

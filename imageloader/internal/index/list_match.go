package index

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/internal/normalform"
)

// ListReport compares a list with an archive.
type ListReport struct {
	File string // the list: a file, or a member of the archive
	// Columns describes the columns in use: "names in column 1 (id), labels in column 2 (breed)".
	Columns    string
	Rows       int // number of images that the list names
	Duplicates int // number of rows with the name and label of an earlier row
	// WithoutImage counts the rows whose image is not in the archive. These rows are left out.
	// FirstWithout is the name in the first of these rows, and FirstWithoutLine is its line.
	WithoutImage     int
	FirstWithout     string
	FirstWithoutLine int
	// Unlisted counts the images of the archive without a row. They are not samples. FirstUnlisted
	// is the name of the first of them.
	Unlisted      int
	FirstUnlisted string
}

// listMatcher finds the row of each member of an archive. If no row has exactly the member's name,
// listMatcher compares the names without leading folders and without the extension.
type listMatcher struct {
	list    *List
	archive string
	before  []string // folders that may precede a member's name in the list: see List.prefixes
	rows    []matched
	names   []byte // names of the members with inexact matches, each with a byte 0 at its end
	key     []byte
	report  ListReport
	forms   map[string]string // Unicode normal forms of the non-ASCII names in the list
	twins   [2]string         // a name in the list, and a member's name with the same Unicode normal form
}

// matched is the match of a row.
type matched struct {
	kind matchKind
	at   int64 // position of the member's name in names
}

type matchKind uint8

const (
	unmatched matchKind = iota
	matchedInexactly
	matchedExactly
	matchedByTwin // another row names the same image
)

func newListMatcher(list *List, archive string) *listMatcher {
	return &listMatcher{list: list, archive: archive, before: list.prefixes(), rows: make([]matched, len(list.rows)),
		report: ListReport{File: list.file, Columns: list.described(), Rows: len(list.rows), Duplicates: list.duplicates}}
}

// described returns a description of the list's columns.
func (l *List) described() string {
	if l.numbered {
		return l.text
	}
	c := &l.columns
	text := fmt.Sprintf("names in column %s, labels in column %s", c.title(c.name), c.titles(c.labels))
	if c.group >= 0 {
		text += ", groups in column " + c.title(c.group)
	}
	return text
}

// prefixes returns "" and the leading parts of List.prefix. If there are more than maxFolders
// parts, it returns the longest ones.
func (l *List) prefixes() []string {
	list := []string{""}
	for at := range len(l.prefix) {
		if l.prefix[at] == '/' {
			list = append(list, l.prefix[:at+1])
		}
	}
	return slices.Delete(list, 1, max(1, len(list)-maxFolders))
}

// maxFolders is the maximum number of leading folders that may differ between a name in the list
// and a member's name.
const maxFolders = 16

// match returns the row of a member, or -1 if there is none. image reports whether the member looks
// like an image. Any other member needs a row with exactly its name.
func (m *listMatcher) match(name string, image bool) (row int32, err error) {
	if m.list.every {
		return m.matchEvery(name, image), nil
	}
	row, twin, exact := m.find(name, image)
	if row < 0 {
		return m.unlisted(name, image), nil
	}
	if twin >= 0 {
		if err := m.same(row, twin); err != nil {
			return -1, err
		}
	}
	was := &m.rows[row]
	switch {
	case exact && was.kind != matchedInexactly:
		was.kind = matchedExactly
		return row, nil
	case was.kind == matchedExactly:
		return m.unlisted(name, image), nil
	case was.kind == matchedInexactly:
		end := was.at + int64(bytes.IndexByte(m.names[was.at:], 0))
		if other := string(m.names[was.at:end]); other != name {
			return -1, m.ambiguous(row, other, name)
		}
		return row, nil
	}
	*was = matched{matchedInexactly, int64(len(m.names))}
	m.names = append(append(m.names, name...), 0)
	return row, nil
}

// matchEvery implements match for a list of every image.
func (m *listMatcher) matchEvery(name string, image bool) (row int32) {
	if !image || !m.list.hidden && hiddenIn(name[:strings.LastIndexByte(name, '/')+1]) != "" {
		return -1
	}
	return 0
}

// ambiguous returns the error for a row that fits two images.
func (m *listMatcher) ambiguous(row int32, first, second string) error {
	mend := "choose the folder that the names start from (Options.ListFormat.Folder), or give"
	if m.list.numbered {
		mend = "give"
	}
	return m.list.errorAt(int(m.list.rows[row].line), fmt.Errorf("%q may be %q or %q in %s: %s the whole path with its "+
		"extension", m.nameOf(row), first, second, m.archive, mend))
}

// nameOf returns the name in a row.
func (m *listMatcher) nameOf(row int32) string {
	for name, r := range m.list.byPath {
		if r == row {
			return name
		}
	}
	return ""
}

// same returns an error if two rows of one image have different labels or groups.
func (m *listMatcher) same(row, twin int32) error {
	l := m.list
	a, b := l.rows[row], l.rows[twin]
	if a.label != b.label || a.group != b.group {
		if a.line > b.line {
			a, b, row, twin = b, a, twin, row
		}
		if l.numbered {
			return l.errorAt(int(b.line), fmt.Errorf("%q names the same image as %q, which is image %d: remove one of them",
				m.nameOf(twin), m.nameOf(row), a.line))
		}
		return l.errorAt(int(b.line), fmt.Errorf("%q is the image %q of line %d, with another label or group: "+
			"correct or remove one of the lines", m.nameOf(twin), m.nameOf(row), a.line))
	}
	if m.rows[twin].kind != matchedByTwin {
		m.rows[twin].kind = matchedByTwin
		m.report.Duplicates++
		m.report.Rows--
	}
	return nil
}

// find returns the row of a member. If another row has the member's name without the extension,
// twin is that row, and otherwise -1. exact reports whether the row has the member's whole name.
func (m *listMatcher) find(name string, image bool) (row, twin int32, exact bool) {
	short := name
	if dot := strings.LastIndexByte(name, '.'); image && dot > strings.LastIndexByte(name, '/')+1 {
		short = name[:dot]
	}
	if folder := m.list.format.Folder; folder != "" {
		rest, inside := name, true
		if folder = strings.Trim(strings.TrimPrefix(folder, "./"), "/"); folder != "." && folder != "" {
			rest, inside = strings.CutPrefix(name, folder+"/")
		}
		if !inside {
			return -1, -1, false
		}
		cut := len(name) - len(rest)
		if row, twin = m.look("", rest, short[cut:]); row < 0 {
			row, twin = m.look("", name, short)
		}
		return row, twin, true
	}
	if row, exact := m.list.byPath[name]; exact || !image {
		if !exact {
			return -1, -1, false
		}
		_, twin = m.look("", name, short)
		return row, twin, true
	}
	for _, before := range m.before { // names in the list may have more folders than the member's name
		if row, twin = m.look(before, name, short); row >= 0 {
			return row, twin, false
		}
	}
	for range maxFolders { // the member's name may have more folders
		slash := strings.IndexByte(short, '/')
		if slash < 0 {
			break
		}
		name, short = name[slash+1:], short[slash+1:]
		if row, twin = m.look("", name, short); row >= 0 {
			return row, twin, false
		}
	}
	return -1, -1, false
}

// look finds the row of a name, with or without its extension. If the list has both, row is the one
// with the extension, and twin the other.
func (m *listMatcher) look(prefix, name, short string) (row, twin int32) {
	at := func(name string) int32 {
		m.key = append(append(m.key[:0], prefix...), name...)
		if row, found := m.list.byPath[string(m.key)]; found {
			return row
		}
		return -1
	}
	row, twin = at(name), -1
	if short != name {
		if twin = at(short); row < 0 {
			row, twin = twin, -1
		}
	}
	return row, twin
}

// unlisted counts a member without a row. It returns -1.
func (m *listMatcher) unlisted(name string, image bool) int32 {
	if !image {
		return -1
	}
	if m.report.Unlisted++; m.report.Unlisted == 1 {
		m.report.FirstUnlisted = strings.Clone(name)
		m.forms = normalform.Forms(maps.Keys(m.list.byPath))
	}
	if m.twins[0] == "" {
		if path, found := normalform.Twin(name, m.forms); found {
			m.twins = [2]string{path, strings.Clone(name)}
		}
	}
	return -1
}

// finish reports on all rows, after the last member. It returns an error if no row has an image, or
// if the first line looks like a header. A list of every image has an empty report.
func (m *listMatcher) finish(log *slog.Logger) (*ListReport, error) {
	l, r := m.list, &m.report
	if l.every {
		return r, nil
	}
	first := int32(-1)
	for i := range l.rows {
		if m.rows[i].kind != unmatched {
			continue
		}
		if r.WithoutImage++; first < 0 {
			first = int32(i)
		}
	}
	if first >= 0 {
		r.FirstWithout, r.FirstWithoutLine = m.nameOf(first), int(l.rows[first].line)
	}
	if r.WithoutImage > 0 && (r.WithoutImage == r.Rows || first == 0 && l.mayHaveHeader() && l.oddFirst()) {
		return nil, m.missing()
	}
	if r.WithoutImage > 0 {
		text, rows, line := "rows of the list without an image are left out", "rows", "line"
		if l.numbered {
			text, rows, line = "images that are not in the archive are left out", "images", "image"
		}
		log.Warn(text, "archive", m.archive, "list", l.file, rows, r.WithoutImage, line, r.FirstWithoutLine,
			"name", r.FirstWithout, "hint", m.hint())
	}
	if r.Duplicates > 0 {
		log.Warn("rows of the list repeat others", "list", l.file, "rows", r.Duplicates)
	}
	if r.Unlisted > 0 {
		log.Warn("images that the list does not name are ignored", "archive", m.archive, "list", l.file,
			"images", r.Unlisted, "first", r.FirstUnlisted)
	}
	return r, nil
}

// mayHaveHeader reports whether the first line may be a header that was read as a row.
func (l *List) mayHaveHeader() bool { return l.columns.header == nil && !l.numbered }

// oddFirst reports whether the first row has a label that no other row has. The first row may then
// be a header.
func (l *List) oddFirst() bool {
	return len(l.rows) > 1 && !slices.ContainsFunc(l.rows[1:], func(r listRow) bool { return r.label == l.rows[0].label })
}

// missing returns the error for rows without an image.
func (m *listMatcher) missing() error {
	l, r := m.list, &m.report
	if l.numbered {
		return l.errorAt(r.FirstWithoutLine, fmt.Errorf("%q is no member of %s, and neither is any other of its %d images%s",
			r.FirstWithout, m.archive, r.Rows, m.hint()))
	}
	others := ""
	if r.WithoutImage > 1 {
		others = fmt.Sprintf(" (%d lines in all name none)", r.WithoutImage)
	}
	hint := ": " + l.described()
	if l.mayHaveHeader() && r.FirstWithoutLine == int(l.rows[0].line) {
		hint += "; if the first line has the names of the columns, choose columns by them " +
			"(Options.ListFormat.NameColumn)"
	} else {
		hint += "; Options.ListFormat.NameColumn chooses another"
	}
	return l.errorAt(r.FirstWithoutLine, fmt.Errorf("%q is no member of %s%s%s", r.FirstWithout, m.archive, others,
		hint+m.hint()))
}

// hint explains why a name in the list may have no member. The caller adds it to the error.
func (m *listMatcher) hint() string {
	switch {
	case m.twins[0] != "":
		return normalform.Hint(m.twins[:1], m.twins[1:])
	case m.report.FirstUnlisted != "":
		return fmt.Sprintf("; an image there that the list does not name is %q", m.report.FirstUnlisted)
	}
	return ""
}

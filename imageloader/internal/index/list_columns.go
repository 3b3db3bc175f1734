package index

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// ListFormat describes the columns of a list. With the zero value, ReadList finds the columns: see
// imageloader.Options.List. A column is given by its name in the first line or by its position,
// from "1". Names are not case-sensitive.
type ListFormat struct {
	NameColumn string // column with the paths or ids of the images
	// LabelColumns are the columns with the labels. "*" stands for all columns except those of the
	// names and the groups. If there are several columns, they are one-hot or have class names. In
	// a one-hot column, a 1 means that the image has the class with the column's name; all other
	// values are 0. Several columns of class names need MultiLabel.
	LabelColumns []string
	// GroupColumn, if not empty, is the column with the group of each image, such as a patient.
	// Part.HeldOut then holds out whole groups.
	GroupColumn string
	// Separator separates the labels in a field, with MultiLabel. "" selects the first of "|", ";"
	// and "," that occurs in a label of the list, or else white space.
	Separator string
	// Folder, if not empty, is a folder of the archive, such as "train", or "." for the whole
	// archive. Names in the list are relative to it, and images outside of it have no label. ""
	// allows any folder.
	Folder string
}

// IsZero reports whether the format is the zero value.
func (f ListFormat) IsZero() bool {
	return f.NameColumn == "" && len(f.LabelColumns) == 0 && f.GroupColumn == "" && f.Separator == "" && f.Folder == ""
}

// columns has the columns of a list, numbered from 0.
type columns struct {
	header []string // nil: the first line has data
	name   int
	labels []int
	group  int // -1: there is none
}

// nameColumns lists the usual names of the column with the images' names, in order of preference.
// labelColumns lists the usual names of the column with the labels. Upper case counts as lower
// case, and spaces and "-" count as "_".
func nameColumns() []string {
	return []string{"path", "file", "filename", "file_name", "image", "image_path", "img_path", "filepath",
		"file_path", "image_name", "img_name", "image_file", "image_id", "img_id", "imageid", "image_index", "img", "id"}
}

func labelColumns() []string {
	return []string{"label", "class", "labels", "class_name", "category", "target", "tags", "tag", "finding_labels",
		"diagnosis"}
}

// usual returns the index of the field that is one of the given names, or -1. If there are several
// such fields, the earliest of the names decides.
func usual(record, names []string) int {
	for _, name := range names {
		at := slices.IndexFunc(record, func(field string) bool {
			return strings.NewReplacer(" ", "_", "-", "_").Replace(strings.ToLower(strings.TrimSpace(field))) == name
		})
		if at >= 0 {
			return at
		}
	}
	return -1
}

// findColumns finds the columns of a list from its first two records. second is nil if the list has
// only one line.
func (f *ListFormat) findColumns(first, second []string) (c columns, err error) {
	byName, err := f.lookUp(first, &c)
	if err != nil {
		return c, err
	}
	if byName || isHeader(first, second) {
		c.header = make([]string, len(first))
		for i, name := range first {
			c.header[i] = strings.Clone(strings.TrimSpace(name))
		}
	}
	if c.name < 0 {
		c.name = c.findName(first, second)
	}
	switch {
	case slices.Contains(f.LabelColumns, "*"):
		c.labels = c.others(len(first))
	case len(c.labels) == 0:
		err = c.findLabels(first, second)
	}
	switch {
	case err != nil:
	case len(c.labels) == 0:
		err = fmt.Errorf("no column is left for the labels: the first line has the columns %s", namesOf(first))
	case slices.Contains(c.labels, c.name):
		err = fmt.Errorf("column %s is chosen for the names and for the labels", c.title(c.name))
	}
	return c, err
}

// lookUp finds the columns that the format selects. byName reports whether the format selects one
// of them by a name in the first record. The first record is then a header.
func (f *ListFormat) lookUp(first []string, c *columns) (byName bool, err error) {
	find := func(column string) (at int) {
		if column == "" || err != nil {
			return -1
		}
		var named bool
		at, named, err = lookUpColumn(first, column)
		byName = byName || named
		return at
	}
	c.name, c.group = find(f.NameColumn), find(f.GroupColumn)
	for _, column := range f.LabelColumns {
		if column != "*" {
			c.labels = append(c.labels, find(column))
		}
	}
	return byName, err
}

// lookUpColumn finds a column by its name or position.
func lookUpColumn(first []string, column string) (at int, named bool, err error) {
	same := func(equal func(a, b string) bool) (found []int) {
		for i, field := range first {
			if equal(strings.TrimSpace(field), strings.TrimSpace(column)) {
				found = append(found, i)
			}
		}
		return found
	}
	found := same(func(a, b string) bool { return a == b })
	if len(found) == 0 {
		found = same(strings.EqualFold)
	}
	switch n, notNumber := strconv.Atoi(column); {
	case len(found) == 1:
		return found[0], true, nil
	case len(found) > 1:
		return -1, false, fmt.Errorf("%d columns have the name %q: give the position of one, from 1", len(found), column)
	case notNumber == nil && n >= 1 && n <= len(first):
		return n - 1, false, nil
	}
	return -1, false, fmt.Errorf("no column %q: the first line has the columns %s (a number is a position from 1)",
		column, namesOf(first))
}

// namesOf lists the columns of a record for messages.
func namesOf(record []string) string {
	const most = 20
	var names []string
	for i, name := range record[:min(len(record), most)] {
		names = append(names, fmt.Sprintf("%d %.40q", i+1, strings.TrimSpace(name)))
	}
	if len(record) > most {
		names = append(names, fmt.Sprintf("... (%d in all)", len(record)))
	}
	return strings.Join(names, ", ")
}

// isHeader reports whether the first record has the names of columns. A record that contains the
// file name of an image is not a header. Any other record is a header if it has a usual column
// name, or if it has a word in the column where the second record has the file name of an image. A
// single record is a header only if it has usual names of both columns.
func isHeader(first, second []string) bool {
	image := func(field string) bool { return claimsByName(strings.TrimSpace(field)) }
	if slices.ContainsFunc(first, image) {
		return false
	}
	name, label := usual(first, nameColumns()) >= 0, usual(first, labelColumns()) >= 0
	switch {
	case name && label:
		return true
	case second == nil:
		return false
	case name || label:
		return true
	}
	at := slices.IndexFunc(second, image)
	word := fieldOf(first, max(at, 0))
	return at >= 0 && word != "" && !strings.Contains(word, "/") && (word[0] < '0' || word[0] > '9')
}

// findName returns the column of the images' names.
func (c *columns) findName(first, second []string) int {
	taken := func(at int) bool { return at < 0 || at == c.group || slices.Contains(c.labels, at) }
	label := -1
	if c.header != nil {
		if at := usual(first, nameColumns()); !taken(at) {
			return at
		}
		if label = usual(first, labelColumns()); len(c.labels) > 0 {
			label = -1
		}
		at := slices.IndexFunc(second, func(field string) bool { return claimsByName(strings.TrimSpace(field)) })
		if !taken(at) && at != label && at < len(first) {
			return at
		}
	}
	for at, field := range first { // a data frame's index column has no name
		if !taken(at) && at != label && (c.header == nil || strings.TrimSpace(field) != "") {
			return at
		}
	}
	return 0
}

// others returns all columns except those of the names and the groups.
func (c *columns) others(count int) (list []int) {
	for at := range count {
		if at != c.name && at != c.group {
			list = append(list, at)
		}
	}
	return list
}

// findLabels finds the columns with the labels.
func (c *columns) findLabels(first, second []string) error {
	others := c.others(len(first))
	if c.header == nil {
		if len(others) == 0 { // add reports that the record is too short
			others = []int{c.name + 1}
		}
		c.labels = others[:1]
		return nil
	}
	rest := make([]string, len(first))
	for _, at := range others {
		rest[at] = first[at]
	}
	if at := usual(rest, labelColumns()); at >= 0 {
		c.labels = []int{at}
		return nil
	}
	named := slices.DeleteFunc(slices.Clone(others), func(at int) bool { return strings.TrimSpace(first[at]) == "" })
	switch {
	case len(named) == 1:
		c.labels = named
		return nil
	case len(named) > 1 && !slices.ContainsFunc(named, func(at int) bool {
		_, hot := isHot(fieldOf(second, at))
		return !hot
	}):
		c.labels = named // one-hot columns
		return nil
	}
	return fmt.Errorf("the columns are %s, and which have the labels is unclear: choose them "+
		"(Options.ListFormat.LabelColumns)", namesOf(first))
}

// fieldOf returns a field without the spaces around it, or "" if the record is too short.
func fieldOf(record []string, at int) string {
	if at >= len(record) {
		return ""
	}
	return strings.TrimSpace(record[at])
}

// isHot parses a field of a one-hot column. ok is false if the field is neither 0 nor 1.
func isHot(field string) (hot, ok bool) {
	switch strings.ToLower(field) {
	case "true":
		return true, true
	case "false":
		return false, true
	}
	v, err := strconv.ParseFloat(field, 64)
	return v == 1, err == nil && (v == 0 || v == 1)
}

// title returns a column's position, and its name if it has one.
func (c *columns) title(at int) string {
	if at < len(c.header) && c.header[at] != "" {
		return fmt.Sprintf("%d (%s)", at+1, c.header[at])
	}
	return strconv.Itoa(at + 1)
}

// titles returns the titles of several columns for messages.
func (c *columns) titles(list []int) string {
	const most = 5
	var names []string
	for _, at := range list[:min(len(list), most)] {
		names = append(names, c.title(at))
	}
	if len(list) > most {
		names = append(names, fmt.Sprintf("... (%d in all)", len(list)))
	}
	return strings.Join(names, ", ")
}

// need returns the minimum number of columns in a record.
func (c *columns) need() int { return max(c.name, c.group, slices.Max(c.labels)) + 1 }

// hotNames returns the names of the one-hot columns. They are the classes.
func (c *columns) hotNames() (names []string, err error) {
	seen := map[string]bool{}
	for _, at := range c.labels {
		name := c.header[at]
		switch {
		case name == "":
			return nil, fmt.Errorf("column %d of 0 and 1 has no name in the first line", at+1)
		case seen[name]:
			return nil, fmt.Errorf("two columns of labels have the name %q", name)
		}
		seen[name] = true
		names = append(names, name)
	}
	return names, nil
}

// errSeveral is the error for several label columns without MultiLabel.
var errSeveral = errors.New("several columns of labels give an image several labels (Options.MultiLabel): for one " +
	"label an image choose one column (Options.ListFormat.LabelColumns)")

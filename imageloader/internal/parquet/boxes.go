package parquet

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
)

// boxColumns are the columns of bounding boxes. Its zero value means that there are none.
type boxColumns struct {
	numbers leaf // lists of boxes of four numbers
	labels  leaf // lists of labels, one for each box
}

// Box is a bounding box in a row.
type Box struct {
	Numbers [4]float64
	Label   string
	Named   bool // Label is the name of a class, not a number
}

// BoxRow has the boxes of a row.
type BoxRow struct {
	Path   string // as in Row
	Number int64
	Boxes  []Box
}

// boxNames and categoryNames are the usual names of columns of boxes and of their labels, in the
// order of preference.
var (
	boxNames      = []string{"bbox", "bboxes", "box", "boxes"}
	categoryNames = []string{"category", "categories", "category_id", "label", "labels", "class", "class_label"}
)

// chooseBoxes finds the columns of boxes and labels in the column of the given name, which is a
// struct of lists or a list of structs. The column may also be the lists of boxes alone: then the
// labels are another column of lists.
func (f *footer) chooseBoxes(leaves []leaf, name string) (c boxColumns, err error) {
	find := func(rep int32, outside bool, names []string, types ...int32) (leaf, bool) {
		for _, n := range names {
			for _, l := range leaves {
				if (l.path[0] == name) != outside && l.maxRep == rep && slices.Contains(types, l.physical) &&
					slices.ContainsFunc(l.path, func(part string) bool { return strings.EqualFold(part, n) }) {
					return l, true
				}
			}
		}
		return leaf{}, false
	}
	var found bool
	if c.numbers, found = find(2, false, append(slices.Clone(boxNames), name), typeFloat, typeDouble, typeInt32,
		typeInt64); !found {
		return c, fmt.Errorf("the Parquet file has no column %q with lists of boxes of four numbers (bbox): it has %s", name,
			describe(leaves))
	}
	for _, outside := range []bool{false, true} {
		if c.labels, found = find(1, outside, categoryNames, typeInt32, typeInt64, typeByteArray); found {
			c.labels.classNames = classNamesIn(f.described()[c.labels.path[0]], c.labels.path)
			return c, nil
		}
	}
	return c, fmt.Errorf("the Parquet file has no lists of labels (category) for the boxes in column %q: it has %s", name,
		describe(leaves))
}

// classNamesIn returns the names of the classes of a column with a path, from the description of
// its outermost column. It returns nil if the description does not name them.
func classNamesIn(description json.RawMessage, path []string) []string {
	var value any
	if json.Unmarshal(description, &value) != nil {
		return nil
	}
	fields := slices.DeleteFunc(slices.Clone(path[1:]), func(part string) bool {
		return part == "list" || part == "element" || part == "item" // names of a list's levels
	})
	var find func(value any, inside bool) []string
	find = func(value any, inside bool) []string {
		switch v := value.(type) {
		case []any:
			for _, item := range v {
				if names := find(item, inside); names != nil {
					return names
				}
			}
		case map[string]any:
			if names, isList := v["names"].([]any); inside && isList && v["_type"] == "ClassLabel" {
				return texts(names)
			}
			for key, item := range v {
				if names := find(item, inside || slices.Contains(fields, key)); names != nil {
					return names
				}
			}
		}
		return nil
	}
	return find(value, len(fields) == 0)
}

// texts returns the texts in a JSON array.
func texts(list []any) (found []string) {
	for _, item := range list {
		text, _ := item.(string)
		found = append(found, text)
	}
	return found
}

// BoxClasses returns the names of the boxes' classes by label, or nil if the file does not have
// them.
func (f *File) BoxClasses() []string { return slices.Clone(f.columns.boxes.labels.classNames) }

// Boxes yields the boxes of all rows, in order, with Columns.Boxes. It reads no images. If an error
// ends the iteration early, the last pair has the error.
func (f *File) Boxes() iter.Seq2[BoxRow, error] {
	return func(yield func(BoxRow, error) bool) {
		first := int64(0)
		for g := range f.footer.groups {
			w := boxWalk{groupWalk: groupWalk{f: f, group: g, first: first}}
			if !w.run(yield) {
				return
			}
			first += f.footer.groups[g].rows
		}
	}
}

// boxWalk reads the boxes of a row group.
type boxWalk struct {
	groupWalk
	numbers, categories listCursor
}

// run yields the rows. It returns false if the iteration has ended.
func (w *boxWalk) run(yield func(BoxRow, error) bool) bool {
	if err := w.open(); err != nil {
		yield(BoxRow{}, err)
		return false
	}
	for i := range w.f.footer.groups[w.group].rows {
		r := Row{}
		err := w.readPath(i, &r)
		row := BoxRow{Path: r.Path, Number: w.first + i}
		if err == nil {
			row.Boxes, err = w.boxes(i)
		}
		if !yield(row, err) || err != nil {
			return false
		}
	}
	return true
}

// open creates the cursors.
func (w *boxWalk) open() error {
	g := &w.f.footer.groups[w.group]
	for l, to := range map[*leaf]*listCursor{&w.f.columns.boxes.numbers: &w.numbers, &w.f.columns.boxes.labels: &w.categories} {
		c, err := newCursor(w.f.file, l, &g.chunks[l.column], g.rows, false)
		if err != nil {
			return w.fail(0, l, err)
		}
		to.cursor = c
	}
	return w.openPath()
}

// boxes reads the boxes of row i.
func (w *boxWalk) boxes(i int64) (boxes []Box, err error) {
	if boxes, err = w.readNumbers(); err != nil {
		return nil, w.fail(i, w.numbers.leaf, err)
	}
	if err := w.readCategories(boxes); err != nil {
		return nil, w.fail(i, w.categories.leaf, err)
	}
	return boxes, nil
}

// readNumbers reads the numbers of the next row's boxes. Each box has four, and none is null.
func (w *boxWalk) readNumbers() (boxes []Box, err error) {
	count := 4 // numbers of the last box
	complete := func() error {
		if count != 4 {
			return fmt.Errorf("its box %d has %d numbers, and a box needs four", len(boxes)-1, count)
		}
		return nil
	}
	leaf := w.numbers.leaf
	err = w.numbers.levels(func(rep, def int32) error {
		if def < leaf.items[0] {
			return nil // no boxes
		}
		if rep < 2 {
			if err := complete(); err != nil {
				return err
			}
			boxes, count = append(boxes, Box{}), 0
		}
		switch {
		case def < leaf.items[1]:
			return nil // a null or an empty list: complete refuses it
		case def < leaf.maxDef:
			return fmt.Errorf("a number of its box %d is null", len(boxes)-1)
		}
		text, err := w.numbers.nextText()
		if err != nil {
			return err
		}
		v, err := strconv.ParseFloat(text, 64)
		if count < 4 {
			boxes[len(boxes)-1].Numbers[count] = v
		}
		count++
		return err
	})
	if err == nil {
		err = complete()
	}
	return boxes, err
}

// readCategories reads the labels of the next row's boxes. None is null.
func (w *boxWalk) readCategories(boxes []Box) error {
	count := 0
	err := w.categories.levels(func(_, def int32) error {
		if def < w.categories.leaf.items[0] {
			return nil // no boxes
		}
		if def < w.categories.leaf.maxDef {
			return fmt.Errorf("the label of its box %d is null", count)
		}
		b := Box{}
		if err := w.category(&b); err != nil {
			return err
		}
		if count++; count <= len(boxes) {
			boxes[count-1].Label, boxes[count-1].Named = b.Label, b.Named
		}
		return nil
	})
	if err == nil && count != len(boxes) {
		err = fmt.Errorf("it has %d labels for %d boxes", count, len(boxes))
	}
	return err
}

// category reads a label.
func (w *boxWalk) category(b *Box) (err error) {
	if b.Label, err = w.categories.nextText(); err != nil {
		return err
	}
	names := w.categories.leaf.classNames
	b.Named = names != nil || w.categories.leaf.physical == typeByteArray
	if names == nil {
		return nil
	}
	n, err := strconv.Atoi(b.Label)
	if err != nil || n < 0 || n >= len(names) {
		return fmt.Errorf("the label is %.40s, and the file names %d classes", b.Label, len(names))
	}
	if b.Label = names[n]; b.Label == "" {
		return errors.New("the name of a class is empty")
	}
	return nil
}

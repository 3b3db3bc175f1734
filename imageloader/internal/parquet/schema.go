package parquet

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Columns selects the columns of images and labels. With the zero value, Open finds the columns.
type Columns struct {
	Image  string   // "": the only column of images
	Labels []string // nil: the column of labels
	// Lists allows a column with lists of labels. It also allows several columns of labels.
	Lists bool
	// Unlabelled means that no column of labels is read.
	Unlabelled bool
	// Boxes is the column of bounding boxes: see [File.Boxes]. "" means that there is none.
	Boxes string
}

// leaf is a leaf of the schema: a column with values.
type leaf struct {
	column     int      // its number among the column chunks of a row group
	path       []string // names of the groups that contain it, and its own name
	physical   int32
	text       bool
	maxDef     int32   // definition level of a value
	maxRep     int32   // number of lists that contain the column
	items      []int32 // for each of these lists, outermost first, the definition level of an item
	classNames []string
}

func (l *leaf) name() string { return strings.Join(l.path, ".") }

// leaves returns the columns of a schema.
func (f *footer) leaves() ([]leaf, error) {
	if len(f.schema) == 0 {
		return nil, errThrift
	}
	w := schemaWalk{rest: f.schema[1:]}
	if err := w.children(f.schema[0].children, leaf{}); err != nil {
		return nil, err
	}
	if len(w.rest) > 0 {
		return nil, errSchema
	}
	for _, g := range f.groups {
		if len(g.chunks) != len(w.leaves) {
			return nil, fmt.Errorf("a row group of the Parquet file has %d columns, and the schema %d", len(g.chunks),
				len(w.leaves))
		}
	}
	return w.leaves, nil
}

var errSchema = errors.New("the schema of the Parquet file is damaged")

type schemaWalk struct {
	rest   []element
	leaves []leaf
}

// children reads the next n nodes, and all nodes below them.
func (w *schemaWalk) children(n int32, above leaf) error {
	if n < 0 || len(above.path) > maxSchemaDepth {
		return errSchema
	}
	for ; n > 0; n-- {
		if len(w.rest) == 0 {
			return errSchema
		}
		e := w.rest[0]
		w.rest = w.rest[1:]
		at := above
		at.path = append(slices.Clone(above.path), e.name)
		if e.repetition > 0 {
			at.maxDef++
		}
		if e.repetition == 2 {
			at.maxRep++
			at.items = append(slices.Clone(above.items), at.maxDef)
		}
		if e.physical < 0 || e.children > 0 {
			if err := w.children(e.children, at); err != nil {
				return err
			}
			continue
		}
		at.column, at.physical, at.text = len(w.leaves), e.physical, e.text
		w.leaves = append(w.leaves, at)
	}
	return nil
}

// selection has the columns that are read.
type selection struct {
	image  leaf
	path   *leaf // column of the images' names; nil: none
	labels []leaf
	boxes  boxColumns
	// flags means that each column of labels has the values 0 and 1. The labels of a row are then
	// the names of the columns with a 1.
	flags bool
}

// feature is the description of a column in the metadata that Hugging Face's datasets writes.
type feature struct {
	Type    string   `json:"_type"`
	Names   []string `json:"names"`
	Feature *feature `json:"feature"`
}

// described returns the JSON of the descriptions of the columns, by column name. It returns nil if
// the file has no readable description.
func (f *footer) described() map[string]json.RawMessage {
	var meta struct {
		Info struct {
			Features map[string]json.RawMessage `json:"features"`
		} `json:"info"`
	}
	if json.Unmarshal([]byte(f.keys["huggingface"]), &meta) != nil {
		return nil
	}
	return meta.Info.Features
}

// features returns the descriptions of the columns, by column name.
func (f *footer) features() map[string]feature {
	found := map[string]feature{}
	for name, text := range f.described() {
		var one feature
		if json.Unmarshal(text, &one) == nil { // the description of a struct has another form
			found[name] = one
		}
	}
	return found
}

// classNames returns the names of the classes of a column. For a column of lists, it returns the
// names of the items' classes.
func (f feature) classNames() []string {
	if f.Feature != nil {
		return f.Feature.classNames()
	}
	if f.Type != "ClassLabel" {
		return nil
	}
	return f.Names
}

// choose finds the selected columns.
func (f *footer) choose(c Columns) (s selection, err error) {
	leaves, err := f.leaves()
	if err != nil {
		return s, err
	}
	features := f.features()
	for i := range leaves {
		leaves[i].classNames = features[leaves[i].path[0]].classNames()
	}
	if err := s.chooseImage(leaves, features, c.Image); err != nil {
		return s, err
	}
	if c.Boxes != "" {
		if s.boxes, err = f.chooseBoxes(leaves, c.Boxes); err != nil {
			return s, err
		}
	}
	if c.Unlabelled {
		return s, nil
	}
	if err := s.chooseLabels(leaves, c); err != nil {
		return s, labelsError{err}
	}
	return s, nil
}

// ErrLabels is the error of Open if a file has no column of labels, if several columns may have
// them, or if the column can't have labels.
var ErrLabels = errors.New("no column of labels")

// labelsError is an error that is ErrLabels. Errors of single rows are, too.
type labelsError struct{ error }

func (labelsError) Is(target error) bool { return target == ErrLabels }

func (e labelsError) Unwrap() error { return e.error }

// imageNames are the usual names of columns of images.
var imageNames = []string{"image", "img", "images", "picture", "photo", "jpg", "jpeg", "png", "pixel_values",
	"image_bytes", "bytes"}

// chooseImage finds the column of images and the column of their names.
func (s *selection) chooseImage(leaves []leaf, features map[string]feature, name string) error {
	var found []leaf
	for _, l := range leaves {
		if l.mayBeImage(name) {
			found = append(found, l)
		}
	}
	if name == "" && len(found) > 1 {
		found = preferred(found, func(l *leaf) bool { return features[l.path[0]].Type == "Image" })
		found = preferred(found, func(l *leaf) bool { return slices.Contains(imageNames, strings.ToLower(l.path[0])) })
	}
	switch {
	case len(found) == 1:
		s.image = found[0]
	case name != "":
		return fmt.Errorf("the Parquet file has no column of bytes with the name %q: it has %s", name, describe(leaves))
	case len(found) == 0:
		return fmt.Errorf("the Parquet file has no column of images, which is bytes, or bytes and path: it has %s",
			describe(leaves))
	default:
		return fmt.Errorf("several columns of the Parquet file may have the images: name one in "+
			"Options.Columns.Image: it has %s", describe(leaves))
	}
	s.choosePath(leaves)
	return nil
}

// choosePath finds the column of the images' names. This is the column "path" in the group of the
// column of images.
func (s *selection) choosePath(leaves []leaf) {
	group := s.image.path[:len(s.image.path)-1]
	for i := range leaves {
		l := &leaves[i]
		if len(group) > 0 && l.physical == typeByteArray && l.maxRep == 0 && len(l.path) == len(group)+1 &&
			slices.Equal(l.path[:len(group)], group) && l.path[len(group)] == "path" {
			s.path = l
		}
	}
}

// mayBeImage reports whether a column of bytes may contain the images. With a name, it must be the
// column of this name, or the column "bytes" of the group of this name. Without a name, it must be
// outside of all groups, or be the column "bytes" of a group, as Hugging Face's datasets writes it.
func (l *leaf) mayBeImage(name string) bool {
	last := len(l.path) - 1
	switch {
	case l.physical != typeByteArray || l.text || l.maxRep > 0:
		return false
	case name == "":
		return last == 0 || last == 1 && l.path[1] == "bytes"
	}
	return name == l.name() || name == strings.Join(l.path[:last], ".") && l.path[last] == "bytes"
}

// preferred returns the columns for which better is true, or all columns if it is true for none.
func preferred(list []leaf, better func(l *leaf) bool) []leaf {
	var found []leaf
	for i := range list {
		if better(&list[i]) {
			found = append(found, list[i])
		}
	}
	if found == nil {
		return list
	}
	return found
}

// labelNames are the usual names of columns of labels, in the order of preference.
var labelNames = []string{"label", "labels", "class", "category", "target", "cls", "class_label", "y"}

// chooseLabels finds the columns of labels.
func (s *selection) chooseLabels(leaves []leaf, c Columns) error {
	switch {
	case len(c.Labels) > 0:
		for _, name := range c.Labels {
			l, err := labelColumn(leaves, name)
			if err != nil {
				return err
			}
			s.labels = append(s.labels, l)
		}
	default:
		l, err := s.findLabel(leaves)
		if err != nil {
			return err
		}
		s.labels = []leaf{l}
	}
	s.flags = len(s.labels) > 1
	for i := range s.labels {
		l := &s.labels[i]
		if err := l.checkLabel(c.Lists); err != nil {
			return err
		}
		s.flags = s.flags && l.physical != typeByteArray && l.classNames == nil && l.maxRep == 0
	}
	if len(s.labels) > 1 && !c.Lists {
		return errors.New("several columns of labels need Options.MultiLabel: " +
			"otherwise a sample has one label")
	}
	return s.checkNames()
}

// labelColumn returns the column with a name. The name may also be that of the lists that contain
// the column.
func labelColumn(leaves []leaf, name string) (leaf, error) {
	for _, l := range leaves {
		if l.name() == name || l.path[0] == name && l.maxRep == 1 {
			return l, nil
		}
	}
	return leaf{}, fmt.Errorf("the Parquet file has no column of labels with the name %q: it has %s", name,
		describe(leaves))
}

// findLabel finds the column of labels by its description or its name.
func (s *selection) findLabel(leaves []leaf) (leaf, error) {
	var described []leaf
	for _, l := range leaves {
		if l.classNames != nil {
			described = append(described, l)
		}
	}
	for _, list := range [][]leaf{described, leaves} {
		for _, name := range labelNames {
			for _, l := range list {
				if strings.EqualFold(l.path[0], name) && l.column != s.image.column {
					return l, nil
				}
			}
		}
		if len(described) == 1 {
			return described[0], nil
		}
		if len(described) > 1 {
			return leaf{}, fmt.Errorf("several columns of the Parquet file may have the labels: name one in "+
				"Options.Columns.Labels: it has %s", describe(leaves))
		}
	}
	return leaf{}, fmt.Errorf("the Parquet file has no column with the name label: name the column of labels in "+
		"Options.Columns.Labels: it has %s", describe(leaves))
}

// checkLabel returns an error if the column can't have labels.
func (l *leaf) checkLabel(lists bool) error {
	kind := typeName(l.physical)
	switch {
	case l.maxRep > 1:
		return fmt.Errorf("column %s has lists of lists, which can't be labels", l.name())
	case l.maxRep == 1 && !lists:
		return fmt.Errorf("column %s has lists of labels: they need Options.MultiLabel", l.name())
	case l.physical == typeBoolean || l.physical == typeInt32 || l.physical == typeInt64 || l.physical == typeByteArray:
		return nil
	}
	return fmt.Errorf("column %s has values of type %s, and labels are integers or strings: "+
		"write it again as one of these, or use Options.Target for numbers", l.name(), kind)
}

// checkNames returns an error if two classes have the same name.
func (s *selection) checkNames() error {
	for i := range s.labels {
		seen := map[string]bool{}
		for _, name := range s.labels[i].classNames {
			if name == "" || seen[name] {
				return fmt.Errorf("the names of the classes of column %s have %q twice, or an empty one",
					s.labels[i].name(), name)
			}
			seen[name] = true
		}
	}
	return nil
}

// describe lists columns for messages.
func describe(leaves []leaf) string {
	const show = 20
	var list []string
	for i := range leaves {
		l := &leaves[i]
		kind := typeName(l.physical)
		switch {
		case l.text:
			kind = "string"
		case l.physical == typeByteArray:
			kind = "bytes"
		}
		if l.maxRep > 0 {
			kind = "list of " + kind
		}
		list = append(list, fmt.Sprintf("%s (%s)", l.name(), kind))
	}
	if len(list) > show {
		list = append(list[:show], fmt.Sprintf("and %d more", len(list)-show))
	}
	if len(list) == 0 {
		return "no columns"
	}
	return strings.Join(list, ", ")
}

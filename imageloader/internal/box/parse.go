package box

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/torchstream/torchstream/imageloader/transform"
)

// maxBytes is the maximum size of a member with boxes.
const maxBytes = 16 << 20

// isJSON reports whether a member has boxes in JSON. All others have text.
func isJSON(name string) bool { return strings.EqualFold(path.Ext(name), ".json") }

// units returns the units of a member's boxes.
func (d *Decoder) units(name string) units {
	switch {
	case d.Format != Default:
		return units{d.Format, d.Normalized}
	case isJSON(name):
		return units{XYWH, false}
	}
	return units{CXCYWH, true}
}

// parse reads the boxes of a member. They are valid until the next call.
func (d *Decoder) parse(name string, data []byte) ([]Labelled, error) {
	if len(data) > maxBytes {
		return nil, fmt.Errorf("%d bytes, over the limit of %d", len(data), maxBytes)
	}
	d.boxes, d.size, d.categories = d.boxes[:0], size{}, nil
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	read := d.readText
	if isJSON(name) && len(data) > 0 {
		read = d.readJSON
	}
	if err := read(data); err != nil {
		return nil, err
	}
	return d.boxes, nil
}

// add adds a box, unless there are too many.
func (d *Decoder) add(label int, numbers transform.Box) error {
	if len(d.boxes) == d.Max {
		return d.errTooMany()
	}
	for _, v := range numbers {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return errNumbers
		}
	}
	d.boxes = append(d.boxes, Labelled{numbers, label})
	return nil
}

// isNumber reports whether a text is a finite number.
func isNumber(text string) bool {
	n, err := strconv.ParseFloat(text, 64)
	return err == nil && !math.IsNaN(n) && !math.IsInf(n, 0)
}

// class returns the label of a class.
func (d *Decoder) class(name string) (int, error) {
	if class, ok := d.classes[name]; ok {
		return class, nil
	}
	return 0, fmt.Errorf("the label %q is not one of Options.Classes", shown(name))
}

// label returns the number of a label. A number is the label itself. Other text is the name of a
// class, and so is a quoted number if any class has a number as its name.
func (d *Decoder) label(text string, quoted bool) (int, error) {
	number := isNumber(text)
	if len(d.Classes) > 0 && (!number || quoted && d.numeric) {
		return d.class(text)
	}
	n, err := strconv.ParseFloat(text, 64)
	switch {
	case err != nil:
		return 0, fmt.Errorf("the label %q is no number: list the names of the labels in Options.Classes", shown(text))
	case n != math.Trunc(n) || n < 0 || n > MaxLabel:
		return 0, fmt.Errorf("the label %q is not a whole number from 0 to %d", shown(text), MaxLabel)
	case len(d.Classes) > 0 && int(n) >= len(d.Classes):
		return 0, fmt.Errorf("the label %d is not below %d, the number of Options.Classes", int(n), len(d.Classes))
	}
	return int(n), nil
}

// shown returns the start of a text, for errors.
func shown(text string) string { return text[:min(len(text), 40)] }

// readText reads lines of a label and four numbers.
func (d *Decoder) readText(data []byte) error {
	if !utf8.Valid(data) {
		return errors.New("it is no text in UTF-8")
	}
	number := 0
	for line := range strings.Lines(string(data)) {
		number++
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if err := d.readLine(words); err != nil {
			return fmt.Errorf("line %d: %w", number, err)
		}
	}
	return nil
}

func (d *Decoder) readLine(words []string) error {
	if len(words) != 1+4 {
		return fmt.Errorf("%d words, not a label and four numbers (polygons and rotated boxes are not read)", len(words))
	}
	label, err := d.label(words[0], false)
	if err != nil {
		return err
	}
	var numbers [4]float64
	for i, word := range words[1:] {
		if numbers[i], err = strconv.ParseFloat(word, 64); err != nil {
			return fmt.Errorf("%q is no number", shown(word))
		}
	}
	return d.add(label, numbers)
}

// Names of fields in JSON. Of each list, an object has at most one.
var (
	listFields  = []string{"annotations", "objects"}
	boxFields   = []string{"bbox", "bboxes", "boxes", "box"}
	labelFields = []string{"category_id", "labels", "label", "category", "categories", "class", "classes", "cls"}
)

// readJSON reads an array of objects, each with a box and a label, or an object with such an array,
// or an object with an array of boxes and an array of labels.
func (d *Decoder) readJSON(data []byte) error {
	value := json.RawMessage(bytes.TrimSpace(data))
	var syntax *json.SyntaxError
	if err := json.Unmarshal(value, new(json.RawMessage)); errors.As(err, &syntax) {
		return fmt.Errorf("byte %d: %w: correct the file", max(0, syntax.Offset-1), err)
	} else if err != nil {
		return err
	}
	if value[0] != '{' {
		return d.readObjects(value)
	}
	fields, err := object(value)
	if err != nil {
		return err
	}
	if err := d.readImages(fields["images"]); err != nil {
		return err
	}
	list, err := field(fields, listFields)
	if err != nil {
		return err
	}
	if fields["annotations"] != nil {
		if err := d.readCategories(fields["categories"]); err != nil {
			return fmt.Errorf("in \"categories\": %w", err)
		}
	}
	if list == nil {
		return d.readArrays(fields)
	}
	if list[0] == '{' {
		if fields, err = object(list); err != nil {
			return err
		}
		return d.readArrays(fields)
	}
	return d.readObjects(list)
}

// readImages reads the size of the only image. It returns an error if there are several.
func (d *Decoder) readImages(value json.RawMessage) error {
	count := 0
	err := each(value, func(item json.RawMessage) (err error) {
		count++
		switch {
		case count > 1:
			return errors.New("it describes several images: each image needs its own file")
		case item[0] == '{':
			var image struct{ Width, Height json.RawMessage }
			if err := json.Unmarshal(item, &image); err != nil {
				return err
			}
			d.size, err = readSize(image.Width, image.Height)
		}
		return err
	})
	if err == errNoArray {
		return nil
	}
	return err
}

// readSize reads an image's width and height. If one is missing or not positive, the size is not
// known.
func readSize(width, height json.RawMessage) (size, error) {
	var numbers [2]float64
	for i, value := range []json.RawMessage{width, height} {
		text := idText(value)
		if text == "" {
			return size{}, nil
		}
		n, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return size{}, fmt.Errorf("%q is no width or height of an image", shown(text))
		}
		if !(n > 0) {
			return size{}, nil
		}
		numbers[i] = n
	}
	return size{numbers[0], numbers[1]}, nil
}

// idText returns the text of an id in JSON, without quotes. It returns "" if there is none.
func idText(value json.RawMessage) string {
	if string(value) == "null" {
		return ""
	}
	return string(bytes.Trim(value, `"`))
}

// categories are the names of COCO's categories by their ids.
type categories map[string]string

// category is one of COCO's categories.
type category struct {
	ID   json.RawMessage `json:"id"`
	Name string          `json:"name"`
}

func (c categories) add(n category) error {
	id := idText(n.ID)
	name, twice := c[id]
	switch {
	case id == "":
		return errors.New("a category needs an id")
	case twice && name != n.Name:
		return fmt.Errorf("the id %s is there twice, for %q and %q", shown(id), shown(name), shown(n.Name))
	}
	c[id] = n.Name
	return nil
}

// category returns the label of a category: the number of its name in Classes.
func (d *Decoder) category(c categories, id string) (int, error) {
	name, known := c[id]
	if !known {
		return 0, fmt.Errorf("its category_id %s is not the id of a category", shown(id))
	}
	return d.class(name)
}

// readCategories reads COCO's categories, if the decoder has Classes.
func (d *Decoder) readCategories(value json.RawMessage) error {
	if len(d.Classes) == 0 || value == nil {
		return nil
	}
	d.categories = categories{}
	return each(value, func(item json.RawMessage) error {
		var c category
		if err := json.Unmarshal(item, &c); err != nil {
			return err
		}
		return d.categories.add(c)
	})
}

var errNoArray = errors.New("it is no array")

// each calls read with each item of a valid array, until an error. The item is valid until read
// returns. If value is no array, each returns errNoArray.
func each(value json.RawMessage, read func(item json.RawMessage) error) error {
	if len(value) == 0 || value[0] != '[' {
		return errNoArray
	}
	in := json.NewDecoder(bytes.NewReader(value))
	if _, err := in.Token(); err != nil {
		return err
	}
	var item json.RawMessage
	for in.More() {
		if err := in.Decode(&item); err != nil {
			return err
		}
		if err := read(item); err != nil {
			return err
		}
	}
	return nil
}

// object returns the fields of an object.
func object(value json.RawMessage) (fields map[string]json.RawMessage, err error) {
	if err := json.Unmarshal(value, &fields); err != nil || fields == nil {
		return nil, fmt.Errorf("%q is no object with a box and a label", shown(string(value)))
	}
	return fields, nil
}

// field returns the value of the only field with one of the names. It returns nil if there is none.
func field(fields map[string]json.RawMessage, names []string) (value json.RawMessage, err error) {
	found := ""
	for _, name := range names {
		if fields[name] == nil {
			continue
		}
		if found != "" {
			return nil, fmt.Errorf("it has the fields %q and %q: remove one of them", found, name)
		}
		found, value = name, fields[name]
	}
	return value, nil
}

// boxAndLabel returns the values of the fields with the box and the label. With the format Default,
// the field of the box must be COCO's bbox.
func (d *Decoder) boxAndLabel(fields map[string]json.RawMessage) (box, label json.RawMessage, err error) {
	if box, err = field(fields, boxFields); err != nil {
		return nil, nil, err
	}
	if label, err = field(fields, labelFields); err != nil {
		return nil, nil, err
	}
	switch {
	case box == nil:
		return nil, nil, fmt.Errorf("it has no boxes: none of the fields %q", boxFields)
	case label == nil:
		return nil, nil, fmt.Errorf("it has no labels: none of the fields %q", labelFields)
	case d.Format == Default && fields["bbox"] == nil:
		return nil, nil, errors.New("its boxes are not in the field \"bbox\", which is left, top, width, height: " +
			"set Boxes.Format")
	}
	return box, label, nil
}

// readObjects reads an array of objects. It leaves out COCO's crowds, which are not single objects.
func (d *Decoder) readObjects(value json.RawMessage) error {
	number := 0
	err := each(value, func(item json.RawMessage) error {
		number++
		if err := d.readObject(item); err != nil {
			return fmt.Errorf("box %d: %w", number, err)
		}
		return nil
	})
	if err == errNoArray {
		return fmt.Errorf("%q is no array of boxes", shown(string(value)))
	}
	return err
}

// isCrowd reports whether the value of iscrowd marks a crowd: true, or another number than 0.
func isCrowd(value json.RawMessage) bool {
	text := idText(value)
	n, err := strconv.ParseFloat(text, 64)
	return err == nil && n != 0 || text == "true"
}

func (d *Decoder) readObject(value json.RawMessage) error {
	fields, err := object(value)
	if err != nil {
		return err
	}
	if isCrowd(fields["iscrowd"]) {
		return nil
	}
	box, label, err := d.boxAndLabel(fields)
	if err != nil {
		return err
	}
	return d.readBox(box, label, fields["category_id"] != nil)
}

// readArrays reads the parallel arrays of an object.
func (d *Decoder) readArrays(fields map[string]json.RawMessage) error {
	boxes, labels, err := d.boxAndLabel(fields)
	if err != nil {
		return err
	}
	labelList, err := d.list(labels)
	if err != nil {
		return err
	}
	boxList, err := d.list(boxes)
	if err != nil {
		return err
	}
	if len(boxList) != len(labelList) {
		return fmt.Errorf("%d boxes and %d labels", len(boxList), len(labelList))
	}
	for i := range boxList {
		if err := d.readBox(boxList[i], labelList[i], fields["category_id"] != nil); err != nil {
			return fmt.Errorf("box %d: %w", i+1, err)
		}
	}
	return nil
}

// list returns the items of an array of boxes or labels, which are at most Max.
func (d *Decoder) list(value json.RawMessage) (items []json.RawMessage, err error) {
	err = each(value, func(item json.RawMessage) error {
		if len(items) == d.Max {
			return d.errTooMany()
		}
		items = append(items, slices.Clone(item))
		return nil
	})
	if err == errNoArray {
		err = errors.New("its boxes and labels are no arrays")
	}
	return items, err
}

// readBox reads a box and its label. byID says that the label is a category_id.
func (d *Decoder) readBox(box, label json.RawMessage, byID bool) error {
	var list [5]json.RawMessage // an array in Go drops further items
	if json.Unmarshal(box, &list) != nil || list[4] != nil {
		return errNumbers
	}
	var numbers transform.Box
	for i := range numbers {
		var n *float64 // nil: null
		if json.Unmarshal(list[i], &n) != nil || n == nil {
			return errNumbers
		}
		numbers[i] = *n
	}
	n, err := d.readLabel(label, byID)
	if err != nil {
		return err
	}
	return d.add(n, numbers)
}

// readLabel reads a label. byID says that it is a category_id.
func (d *Decoder) readLabel(value json.RawMessage, byID bool) (int, error) {
	text := string(value)
	number := json.Unmarshal(value, new(float64)) == nil
	if text == "null" || !number && json.Unmarshal(value, &text) != nil {
		return 0, fmt.Errorf("the label %q is neither a number nor a text", shown(text))
	}
	if byID && d.categories != nil {
		return d.category(d.categories, text)
	}
	return d.label(text, !number)
}

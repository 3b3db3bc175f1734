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
	d.boxes = d.boxes[:0]
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

// label returns the number of a label, which is a number or the name of a class.
func (d *Decoder) label(text string) (int, error) {
	if class, ok := d.classes[text]; ok {
		return class, nil
	}
	n, err := strconv.ParseFloat(text, 64)
	switch {
	case err != nil && len(d.Classes) == 0:
		return 0, fmt.Errorf("the label %q is no number: list the names of the labels in Options.Classes", shown(text))
	case err != nil:
		return 0, fmt.Errorf("the label %q is not one of Options.Classes", shown(text))
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
	label, err := d.label(words[0])
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
	if images := fields["images"]; images != nil {
		var list []json.RawMessage
		if json.Unmarshal(images, &list) == nil && len(list) > 1 {
			return fmt.Errorf("it describes %d images: each image needs its own file", len(list))
		}
	}
	list, err := field(fields, listFields)
	if err != nil {
		return err
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
	var list []json.RawMessage
	if err := json.Unmarshal(value, &list); err != nil || list == nil {
		return fmt.Errorf("%q is no array of boxes", shown(string(value)))
	}
	for i, item := range list {
		if err := d.readObject(item); err != nil {
			return fmt.Errorf("box %d: %w", i+1, err)
		}
	}
	return nil
}

// isCrowd reports whether the value of iscrowd marks a crowd.
func isCrowd(value []byte) bool { return string(value) == "1" || string(value) == "true" }

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
	return d.readBox(box, label)
}

// readArrays reads the parallel arrays of an object.
func (d *Decoder) readArrays(fields map[string]json.RawMessage) error {
	boxes, labels, err := d.boxAndLabel(fields)
	if err != nil {
		return err
	}
	var boxList, labelList []json.RawMessage
	if json.Unmarshal(boxes, &boxList) != nil || json.Unmarshal(labels, &labelList) != nil ||
		boxList == nil || labelList == nil {
		return errors.New("its boxes and labels are no arrays")
	}
	if len(boxList) != len(labelList) {
		return fmt.Errorf("%d boxes and %d labels", len(boxList), len(labelList))
	}
	for i := range boxList {
		if err := d.readBox(boxList[i], labelList[i]); err != nil {
			return fmt.Errorf("box %d: %w", i+1, err)
		}
	}
	return nil
}

// readBox reads a box and its label.
func (d *Decoder) readBox(box, label json.RawMessage) error {
	var list []*float64 // nil: null
	if json.Unmarshal(box, &list) != nil || len(list) != 4 || slices.Contains(list, nil) {
		return errNumbers
	}
	text := string(label)
	if text == "null" || json.Unmarshal(label, new(float64)) != nil && json.Unmarshal(label, &text) != nil {
		return fmt.Errorf("the label %q is neither a number nor a text", shown(text))
	}
	n, err := d.label(text)
	if err != nil {
		return err
	}
	return d.add(n, [4]float64{*list[0], *list[1], *list[2], *list[3]})
}

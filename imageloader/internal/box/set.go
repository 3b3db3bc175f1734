package box

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/torchstream/torchstream/imageloader/internal/parquet"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Set has the boxes of all images of a data set, from one file in COCO's format, or from a column
// of Parquet files. It is immutable.
type Set struct {
	Names []string     // names of the images, as the file has them
	sizes []size       // of the images
	boxes [][]Labelled // the boxes of each image, in the units of the file
}

// maxImages is the maximum number of images in a Set. Each image's number becomes its label in a
// list, and a list has at most this many labels.
const maxImages = 1 << 20

// setReader reads a Set.
type setReader struct {
	in         *json.Decoder
	labels     *Decoder        // for its method label
	images     map[string]int  // numbers by id
	names      map[string]bool // of the images
	set        Set
	found      []annotation
	count      int  // of annotations, including crowds
	annotated  bool // the file has "annotations"
	categories categories
}

// annotation is a box whose image and label are not resolved yet.
type annotation struct {
	number          int // from 1
	image, category string
	box             transform.Box
}

// ReadSet reads a set: an object with images (id, file_name), annotations (image_id, bbox,
// category_id, iscrowd) and categories (id, name). If c has Classes, a label is the number of the
// category's name in Classes, and otherwise the category's id. Crowds are left out. An image may
// have its width and height.
func ReadSet(in io.Reader, c Config) (*Set, error) {
	b := bufio.NewReaderSize(in, 1<<16)
	if mark, err := b.Peek(3); err == nil && string(mark) == "\xef\xbb\xbf" {
		_, _ = b.Discard(len(mark)) // Peek has buffered it
	}
	r := &setReader{in: json.NewDecoder(b), labels: NewDecoder(c), images: map[string]int{}, names: map[string]bool{},
		categories: categories{}}
	if err := r.read(); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("the JSON is cut off")
		}
		return nil, fmt.Errorf("byte %d: %w", r.in.InputOffset(), err)
	}
	if len(r.set.Names) == 0 {
		return nil, errors.New(`it has no "images": Boxes.File without "*" is for COCO's format, one file for all images`)
	}
	if !r.annotated {
		return nil, errors.New(`it has no "annotations": choose COCO's file with the boxes ("instances_val2017.json")`)
	}
	r.set.boxes = make([][]Labelled, len(r.set.Names))
	for i := range r.found {
		if err := r.resolve(&r.found[i]); err != nil {
			return nil, fmt.Errorf("annotation %d: %w", r.found[i].number, err)
		}
	}
	return &r.set, nil
}

// read reads the object.
func (r *setReader) read() error {
	if start, err := r.in.Token(); err != nil {
		return err
	} else if start != json.Delim('{') {
		return errors.New("it is no object")
	}
	for r.in.More() {
		key, err := r.in.Token()
		if err != nil {
			return err
		}
		item := map[json.Token]func() error{"images": r.image, "annotations": r.annotation, "categories": r.category}[key]
		if item == nil {
			if err := r.in.Decode(new(json.RawMessage)); err != nil {
				return err
			}
			continue
		}
		r.annotated = r.annotated || key == "annotations"
		if err := r.array(item); err != nil {
			return fmt.Errorf("in %q: %w", key, err)
		}
	}
	if _, err := r.in.Token(); err != nil {
		return err
	}
	return r.end()
}

// end returns an error unless the file ends after the object.
func (r *setReader) end() error {
	_, err := r.in.Token()
	var syntax *json.SyntaxError
	switch {
	case err == io.EOF:
		return nil
	case err == nil || errors.As(err, &syntax):
		return errors.New("the file has more after the end of the object: remove it, or join the objects")
	}
	return err
}

// array reads an array. It calls item to read each item.
func (r *setReader) array(item func() error) error {
	if start, err := r.in.Token(); err != nil {
		return err
	} else if start != json.Delim('[') {
		return errors.New("it is no array")
	}
	for r.in.More() {
		if err := item(); err != nil {
			return err
		}
	}
	_, err := r.in.Token()
	return err
}

func (r *setReader) image() error {
	var image struct {
		ID       json.RawMessage `json:"id"`
		FileName string          `json:"file_name"`
		Width    json.RawMessage `json:"width"`
		Height   json.RawMessage `json:"height"`
	}
	if err := r.in.Decode(&image); err != nil {
		return err
	}
	id := string(image.ID)
	_, twice := r.images[id]
	switch {
	case id == "" || image.FileName == "":
		return errors.New("an image needs an id and a file_name")
	case twice:
		return fmt.Errorf("the id %s is there twice", shown(id))
	case r.names[image.FileName]:
		return fmt.Errorf("the file_name %q is there twice", shown(image.FileName))
	case len(r.set.Names) == maxImages:
		return fmt.Errorf("more than %d images", maxImages)
	}
	r.images[id], r.names[image.FileName] = len(r.set.Names), true
	r.set.Names = append(r.set.Names, image.FileName)
	s, err := readSize(image.Width, image.Height)
	r.set.sizes = append(r.set.sizes, s)
	return err
}

func (r *setReader) category() error {
	var c category
	if err := r.in.Decode(&c); err != nil {
		return err
	}
	return r.categories.add(c)
}

func (r *setReader) annotation() error {
	var a struct {
		Image    json.RawMessage `json:"image_id"`
		Category json.RawMessage `json:"category_id"`
		Crowd    json.RawMessage `json:"iscrowd"`
		Box      []*float64      `json:"bbox"`
	}
	if err := r.in.Decode(&a); err != nil {
		return err
	}
	r.count++
	if isCrowd(a.Crowd) {
		return nil
	}
	if len(a.Box) != 4 || slices.Contains(a.Box, nil) {
		return fmt.Errorf("an annotation of image %s: %w", shown(string(a.Image)), errNumbers)
	}
	r.found = append(r.found, annotation{r.count, string(a.Image), idText(a.Category),
		transform.Box{*a.Box[0], *a.Box[1], *a.Box[2], *a.Box[3]}})
	return nil
}

// resolve adds an annotation to the boxes of its image.
func (r *setReader) resolve(a *annotation) (err error) {
	image, known := r.images[a.image]
	if !known {
		return fmt.Errorf("its image_id %s is not the id of an image", shown(a.image))
	}
	var label int
	if len(r.labels.Classes) > 0 {
		label, err = r.labels.category(r.categories, a.category)
	} else {
		label, err = r.labels.label(a.category, false)
	}
	if err != nil {
		return err
	}
	r.set.boxes[image] = append(r.set.boxes[image], Labelled{a.box, label})
	return nil
}

// SetBuilder makes a Set of the rows of Parquet files.
type SetBuilder struct {
	Set    Set
	labels *Decoder // for its method label
}

// NewSetBuilder returns a builder of an empty set. classes are the names of labels.
func NewSetBuilder(classes []string) *SetBuilder {
	return &SetBuilder{labels: NewDecoder(Config{Classes: classes})}
}

// Add adds an image.
func (b *SetBuilder) Add(name string, boxes []parquet.Box) error {
	s := &b.Set
	if len(s.Names) == maxImages {
		return fmt.Errorf("more than %d images", maxImages)
	}
	var list []Labelled
	for i := range boxes {
		label, err := b.labels.label(boxes[i].Label, boxes[i].Named)
		if err == nil && slices.ContainsFunc(boxes[i].Numbers[:], func(v float64) bool {
			return math.IsNaN(v) || math.IsInf(v, 0)
		}) {
			err = errNumbers
		}
		if err != nil {
			return fmt.Errorf("box %d of %q: %w", i+1, name, err)
		}
		list = append(list, Labelled{boxes[i].Numbers, label})
	}
	s.Names, s.sizes, s.boxes = append(s.Names, name), append(s.sizes, size{}), append(s.boxes, list)
	return nil
}

// Append appends the bytes of an image's boxes, for a digest.
func (s *Set) Append(to []byte, image int) []byte {
	for _, b := range s.boxes[image] {
		for _, v := range b.Box {
			to = binary.LittleEndian.AppendUint64(to, math.Float64bits(v))
		}
		to = binary.AppendVarint(to, int64(b.Label))
	}
	return to
}

// Decode transforms the boxes of an image of a set: see Decoder.Decode.
func (s *Set) Decode(d *Decoder, image int, info *imagecapi.Info, g *imagecapi.Geometry, a *transform.Augmenter,
	dst []byte) error {
	if len(s.boxes[image]) > d.Max {
		return d.errTooMany()
	}
	d.boxes, d.size = append(d.boxes[:0], s.boxes[image]...), s.sizes[image]
	return d.move(d.boxes, d.units(".json"), info, g, a, dst)
}

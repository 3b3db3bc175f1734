package box

import (
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

const coco = `{"info": {"year": 2017, "images": [1]}, "licenses": [], "annotations": [
	{"id": 1, "image_id": 5, "category_id": 90, "bbox": [1, 2, 3, 4], "segmentation": [[1, 2]], "area": 12, "iscrowd": 0},
	{"id": 2, "image_id": 7, "category_id": 1, "bbox": [5.5, 6, 7, 8]},
	{"id": 3, "image_id": 5, "category_id": 1, "bbox": [0, 0, 9, 9], "segmentation": {"counts": [1]}, "iscrowd": 1.0},
	{"id": 4, "image_id": 5, "category_id": 1, "bbox": [9, 9, 1, 1]}],
	"images": [{"id": 7, "file_name": "b.jpg", "width": 19, "height": "18"},
	{"id": 5, "file_name": "d/a.jpg"}, {"id": 6, "file_name": "c.jpg"}],
	"categories": [{"id": 1, "name": "cat", "supercategory": "animal"}, {"id": "90", "name": "dog"},
	{"id": 1, "name": "cat"}]}`

// TestSetsAreRead: annotations belong to the images of their ids, in any order of the fields.
func TestSetsAreRead(t *testing.T) {
	for classes, labels := range map[string][2]int{"": {1, 90}, "dog,cat": {1, 0}} {
		c := Config{}
		if classes != "" {
			c.Classes = strings.Split(classes, ",")
		}
		s, err := ReadSet(strings.NewReader("\ufeff"+coco), c)
		if err != nil {
			t.Fatal(err)
		}
		want := &Set{Names: []string{"b.jpg", "d/a.jpg", "c.jpg"}, sizes: []size{{19, 18}, {}, {}}, boxes: [][]Labelled{
			{{transform.Box{5.5, 6, 7, 8}, labels[0]}},
			{{transform.Box{1, 2, 3, 4}, labels[1]}, {transform.Box{9, 9, 1, 1}, labels[0]}}, nil}}
		if !reflect.DeepEqual(s, want) {
			t.Errorf("classes %q: got %v, want %v", classes, s, want)
		}
		if a, b := s.Append(nil, 0), s.Append(nil, 1); len(a) == 0 || len(s.Append(nil, 2)) != 0 || string(a) == string(b) {
			t.Errorf("bytes %x and %x", a, b)
		}
	}
}

// TestWrongSetsAreErrors: each error says what is wrong.
func TestWrongSetsAreErrors(t *testing.T) {
	for _, c := range []struct{ old, new, says string }{
		{coco, "", "cut off"},
		{coco, "[]", "it is no object"},
		{coco, "{}", `it has no "images"`},
		{`"annotations"`, `"labels"`, `it has no "annotations"`},
		{coco, coco + " {}", "more after the end of the object"},
		{coco, coco + "x", "more after the end of the object"},
		{`"id": 1, "name": "cat"`, `"name": "cat"`, "a category needs an id"},
		{`{"id": "90"`, `{"id": "1"`, `the id 1 is there twice, for "cat" and "dog"`},
		{`"name": "dog"`, `"name": "0"`, `annotation 1: the label "0" is not one of Options.Classes`},
		{`"width": 19,`, `"width": "x",`, `"x" is no width`},
		{coco, coco[:200], "cut off"},
		{`"licenses": [], "annotations": [`, `"annotations": {`, `in "annotations": it is no array`},
		{`"bbox": [5.5, 6, 7, 8]`, `"bbox": [5.5, 6, 7]`, "an annotation of image 7: a box needs four finite numbers"},
		{`"bbox": [5.5, 6, 7, 8]`, `"bbox": [5.5, null, 7, 8]`, "four finite numbers"},
		{`"bbox": [5.5, 6, 7, 8]`, `"bbox": [5.5, "6", 7, 8]`, "cannot unmarshal"},
		{`"bbox": [5.5, 6, 7, 8]`, `"bbox": [5.5, 6 7, 8]`, "invalid character"},
		{`"image_id": 7`, `"image_id": 8`, "annotation 2: its image_id 8"},
		{`"category_id": 90`, `"category_id": 91`, "annotation 1: its category_id 91 is not the id of a category"},
		{`[9, 9, 1, 1]}`, `[9, 9, 1, 1]}, {"iscrowd": 1}, {"image_id": 9, "bbox": [1, 2, 3, 4]}`, "annotation 6: its image_id 9"},
		{`"name": "dog"`, `"name": "horse"`, `annotation 1: the label "horse" is not one of Options.Classes`},
		{`"id": 6, "file`, `"id": 5, "file`, "the id 5 is there twice"},
		{`"c.jpg"`, `"b.jpg"`, `the file_name "b.jpg" is there twice`},
		{`"file_name": "c.jpg"`, `"name": "c.jpg"`, "an image needs an id and a file_name"},
	} {
		text := strings.Replace(coco, c.old, c.new, 1)
		if s, err := ReadSet(strings.NewReader(text), Config{Classes: []string{"cat", "dog"}}); err == nil ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%q instead of %.40q: got %v, %v, want an error with %q", c.new, c.old, s, err, c.says)
		}
	}
	if _, err := ReadSet(strings.NewReader(strings.Replace(coco, `"category_id": 90`, `"category_id": -1`, 1)),
		Config{}); err == nil || !strings.Contains(err.Error(), `the label "-1"`) {
		t.Errorf("a negative id: got error %v, want one with %q", err, `the label "-1"`)
	}
}

// TestSetsCheckTheSizesOfImages: boxes of an image that was resized are an error. An image may have
// no size in the file.
func TestSetsCheckTheSizesOfImages(t *testing.T) {
	s, err := ReadSet(strings.NewReader(coco), Config{})
	if err != nil {
		t.Fatal(err)
	}
	d := NewDecoder(Config{Max: 2, MinSize: 1})
	for _, c := range []struct {
		image, width, height int32
		says                 string // "": no error
	}{{0, 19, 18, ""}, {1, 38, 36, ""}, {0, 38, 36, "of an image of 19 x 18 pixels, and the image has 38 x 36"},
		{1, 38, 36, ""}} {
		info, g := imagecapi.Info{Width: c.width, Height: c.height}, whole(c.width, c.height)
		err := s.Decode(d, int(c.image), &info, &g, nil, make([]byte, 2*4*Numbers))
		if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%+v: got error %v, want %q", c, err, c.says)
		}
	}
}

// FuzzSet: any file gives a set with the boxes of its images, or an error.
func FuzzSet(f *testing.F) {
	f.Add(coco)
	f.Add(`{"images": [{"id": "a", "file_name": "b"}], "annotations": [{"image_id": "a", "category_id": "3", "bbox": [1,2,3,4]}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ReadSet(strings.NewReader(text), Config{})
		if (err == nil) != (s != nil) || err == nil && (len(s.boxes) != len(s.Names) || len(s.Names) == 0) {
			t.Errorf("%v; %v", s, err)
		}
	})
}

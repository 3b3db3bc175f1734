package box

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// cropped holds results of torchvision (testdata/make_boxes.py).
type cropped struct {
	width, height, x, y, w, h, size int32
	flip                            bool
	boxes                           []transform.Box
	want                            [][Numbers]float64
}

// UnmarshalJSON reads an array of the fields.
func (c *cropped) UnmarshalJSON(data []byte) error {
	fields := []any{&c.width, &c.height, &c.x, &c.y, &c.w, &c.h, &c.size, &c.flip, &c.boxes, &c.want}
	return json.Unmarshal(data, &fields)
}

// resized holds results of torchvision.
type resized struct {
	width, height, resize, size int
	boxes                       []transform.Box
	want                        [][Numbers]float64
}

// UnmarshalJSON reads an array of the fields.
func (r *resized) UnmarshalJSON(data []byte) error {
	fields := []any{&r.width, &r.height, &r.resize, &r.size, &r.boxes, &r.want}
	return json.Unmarshal(data, &fields)
}

type golden struct {
	Crops   []cropped
	Resizes []resized
	Formats map[string][2][]transform.Box
}

func readGolden(t testing.TB) (g golden) {
	t.Helper()
	data, err := os.ReadFile("testdata/boxes.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &g); err != nil {
		t.Fatal(err)
	}
	return g
}

// decode decodes a member of boxes and returns the rows before the first row without a box.
func decode(t testing.TB, d *Decoder, name string, data []byte, width, height int,
	g imagecapi.Geometry) (rows [][Numbers]float64, err error) {
	t.Helper()
	dst := make([]byte, 4*Numbers*d.Max)
	info := imagecapi.Info{Width: int32(width), Height: int32(height), Orientation: g.Orientation}
	if err := d.Decode(name, data, &info, &g, nil, dst); err != nil {
		return nil, err
	}
	ended := false
	for ; len(dst) > 0; dst = dst[4*Numbers:] {
		var row [Numbers]float64
		for i := range row {
			row[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(dst[4*i:])))
		}
		switch {
		case row == [Numbers]float64{0, 0, 0, 0, NoBox}:
			ended = true
		case ended || row[4] < 0:
			t.Errorf("row %v after the end of the boxes: %v", row, ended)
		default:
			rows = append(rows, row)
		}
	}
	return rows, nil
}

// lines returns boxes as text, with their numbers as labels.
func lines(boxes []transform.Box) []byte {
	var text strings.Builder
	for i, b := range boxes {
		fmt.Fprintf(&text, "%d %v %v %v %v\n", i, b[0], b[1], b[2], b[3])
	}
	return []byte(text.String())
}

// near compares rows with torchvision's. torchvision computes in float32, in which the edges of
// large images have errors of a few ten thousandths of a pixel.
func near(a, b [][Numbers]float64) bool {
	return slices.EqualFunc(a, b, func(a, b [Numbers]float64) bool {
		for i := range a {
			if !(math.Abs(a[i]-b[i]) <= 5e-4) {
				return false
			}
		}
		return true
	})
}

// whole is the identity geometry.
func whole(width, height int32) imagecapi.Geometry {
	return imagecapi.Geometry{CropWidth: width, CropHeight: height, ResizeWidth: width,
		ResizeHeight: height, WindowWidth: width, WindowHeight: height}
}

func TestBoxCropsEqualTorchvision(t *testing.T) {
	g := readGolden(t)
	pixels := NewDecoder(Config{Format: XYXY, Max: 20, MinSize: 1})
	kept := 0
	for _, c := range g.Crops {
		geometry := imagecapi.Geometry{CropX: c.x, CropY: c.y, CropWidth: c.w, CropHeight: c.h, ResizeWidth: c.size,
			ResizeHeight: c.size, WindowWidth: c.size, WindowHeight: c.size, Flip: c.flip}
		got, err := decode(t, pixels, "a.txt", lines(c.boxes), int(c.width), int(c.height), geometry)
		if err != nil || !near(got, c.want) {
			t.Errorf("crop %+v of %v: got %v, %v, want %v", geometry, c.boxes, got, err, c.want)
		}
		kept += len(got)
	}
	for _, r := range g.Resizes {
		compiled, err := transform.Compile(transform.Transform{Size: r.size, Resize: r.resize})
		if err != nil {
			t.Fatal(err)
		}
		var geometry imagecapi.Geometry
		if err := compiled.Geometry(rand.New(rand.NewPCG(1, 1)),
			&imagecapi.Info{Width: int32(r.width), Height: int32(r.height)}, &geometry); err != nil {
			t.Fatal(err)
		}
		got, err := decode(t, pixels, "a.txt", lines(r.boxes), r.width, r.height, geometry)
		if err != nil || !near(got, r.want) {
			t.Errorf("resize %+v of %v: got %v, %v, want %v", geometry, r.boxes, got, err, r.want)
		}
		kept += len(got)
	}
	if all := 8 * (len(g.Crops) + len(g.Resizes)); kept == 0 || kept == all {
		t.Errorf("%d of %d boxes are kept, want some but not all", kept, all)
	}
}

// TestFormatsEqualTorchvision compares each format in pixels and as fractions, in text and JSON.
func TestFormatsEqualTorchvision(t *testing.T) {
	for format, name := range map[Format]string{XYXY: "XYXY", XYWH: "XYWH", CXCYWH: "CXCYWH"} {
		g := readGolden(t).Formats[name]
		var want [][Numbers]float64
		for i, b := range g[1] {
			want = append(want, [Numbers]float64{b[0], b[1], b[2], b[3], float64(i)})
		}
		for _, normalized := range []bool{false, true} {
			in := slices.Clone(g[0])
			for i := range in {
				if normalized {
					in[i] = transform.Box{in[i][0] / 100, in[i][1] / 90, in[i][2] / 100, in[i][3] / 90}
				}
			}
			type object struct {
				Bbox     transform.Box `json:"bbox"`
				Category int           `json:"category_id"`
			}
			var list []object
			for i, b := range in {
				list = append(list, object{b, i})
			}
			text, err := json.Marshal(list)
			if err != nil {
				t.Fatal(err)
			}
			for member, data := range map[string][]byte{"a.txt": lines(in), "a.JSON": text} {
				d := NewDecoder(Config{Format: format, Normalized: normalized, Max: 5, MinSize: 1})
				got, err := decode(t, d, member, data, 100, 90, whole(100, 90))
				if err != nil || !near(got, want) || name != format.String() {
					t.Errorf("%v, normalized %v, %s: got %v, %v, want %v", format, normalized, member, got, err, want)
				}
			}
		}
	}
}

// TestStructuresOfBoxes: the shapes of text and JSON that data sets have give the same boxes.
func TestStructuresOfBoxes(t *testing.T) {
	two := [][Numbers]float64{{10, 20, 30, 60, 1}, {0, 0, 50, 40, 0}}
	for name, c := range map[string]struct {
		member, data string
		want         [][Numbers]float64
	}{
		"YOLO":          {"a.txt", "1 .2 .4 .2 .4\n0 0.25 0.2 0.5 0.4\n", two},
		"Windows":       {"a.txt", "\ufeff1\t0.2 0.4 0.2 0.4 \r\n\r\n0 0.25 0.2 0.5 0.4", two},
		"names":         {"a.txt", "dog 0.2 0.4 0.2 0.4\ncat 0.25 0.2 0.5 0.4\n", two},
		"no text":       {"a.txt", "", nil},
		"blank text":    {"a.txt", "\n \n", nil},
		"annotations":   {"a.json", `[{"bbox": [10, 20, 20, 40], "category_id": 1}, {"bbox": [0,0,50,40], "category_id": 0}]`, two},
		"names in JSON": {"a.json", `[{"bbox": [10, 20, 20, 40], "label": "dog"}, {"bbox": [0,0,50,40], "class": "cat"}]`, two},
		"COCO of one image": {"a.json", `{"images": [{"id": 4}], "annotations": [{"bbox": [10, 20, 20, 40], "category_id": 1, "iscrowd": 0},
			{"bbox": [1, 1, 9, 9], "category_id": 5, "iscrowd": 1}, {"bbox": [0,0,50,40], "category_id": 0}]}`, two},
		"crowds as text and as a fraction": {"a.json", `[{"bbox": [10, 20, 20, 40], "category_id": 1}, {"iscrowd": "1"},
			{"iscrowd": 1.0}, {"bbox": [0,0,50,40], "category_id": 0, "iscrowd": 0.0}]`, two},
		"categories": {"a.json", `{"images": [{"width": 100, "height": 100.0}], "categories": [{"id": 0, "name": "dog"},
			{"id": "7", "name": "cat"}], "annotations": [{"bbox": [10, 20, 20, 40], "category_id": 0},
			{"bbox": [0,0,50,40], "category_id": 7}]}`, two},
		"categories of arrays": {"a.json", `{"categories": [{"id": 0, "name": "dog"}, {"id": 7, "name": "cat"}],
			"annotations": {"bbox": [[10, 20, 20, 40], [0,0,50,40]], "category_id": [0, 7]}}`, two},
		"names and categories": {"a.json", `{"categories": [{"id": 0, "name": "dog"}],
			"annotations": [{"bbox": [10, 20, 20, 40], "label": "dog"}, {"bbox": [0,0,50,40], "label": "cat"}]}`, two},
		"Hugging Face":   {"a.json", `{"image_id": 3, "objects": {"bbox": [[10,20,20,40],[0,0,50,40]], "category": [1, 0]}}`, two},
		"torchvision":    {"a.json", `{"boxes": [[10,20,30,60],[0,0,50,40]], "labels": [1.0, "0"]}`, two},
		"no annotations": {"a.json", `{"annotations": []}`, nil},
		"no boxes":       {"a.json", ` [] `, nil},
		"empty arrays":   {"a.json", `{"boxes": [], "labels": []}`, nil},
	} {
		d := NewDecoder(Config{Max: 2, MinSize: 1, Classes: []string{"cat", "dog"}})
		if name == "torchvision" || name == "empty arrays" {
			d.Format = XYXY
		}
		if got, err := decode(t, d, c.member, []byte(c.data), 100, 100, whole(100, 100)); err != nil || !near(got, c.want) {
			t.Errorf("%s: got %v, %v, want %v", name, got, err, c.want)
		}
	}
}

// TestWrongBoxesAreErrors: each error says what is wrong, and where.
func TestWrongBoxesAreErrors(t *testing.T) {
	many := strings.Repeat("0 .5 .5 .1 .1\n", 3)
	for _, c := range []struct{ member, data, says string }{
		{"a.txt", many, "line 3: more than 2 boxes: raise Boxes.Max"},
		{"a.txt", "0 .5 .5 .1", "line 1: 4 words"},
		{"a.txt", "\n0 .5 .5 .1 .1 .9", "line 2: 6 words"},
		{"a.txt", "0 .5 .5 .1 x", `line 1: "x" is no number`},
		{"a.txt", "0 .5 .5 .1 nan", "four finite numbers"},
		{"a.txt", "0 .5 .5 .1 1e400", "is no number"},
		{"a.txt", "horse .5 .5 .1 .1", `the label "horse" is not one of Options.Classes`},
		{"a.txt", "1.5 .5 .5 .1 .1", `the label "1.5" is not a whole number`},
		{"a.txt", "-1 .5 .5 .1 .1", `the label "-1" is not a whole number`},
		{"a.txt", "2 .5 .5 .1 .1", "the label 2 is not below 2"},
		{"a.txt", "0 .5 .5 -.1 .1", "box 1 has a negative size, as CXCYWH"},
		{"a.txt", "0 50 50 10 10", "far outside of the image of 100 x 80 pixels"},
		{"a.txt", "0 1e307 1 1e308 1", "far outside"},
		{"a.txt", "\xff\xfe", "UTF-8"},
		{"a.json", "\n", "byte 0"},
		{"a.json", "[{]", "byte 2"},
		{"a.json", "7", `"7" is no array of boxes`},
		{"a.json", "null", `"null" is no array of boxes`},
		{"a.json", "[7]", `box 1: "7" is no object`},
		{"a.json", "[null]", `box 1: "null" is no object`},
		{"a.json", "{}", "it has no boxes: none of the fields"},
		{"a.json", `{"caption": "a cat", "label": 3}`, "it has no boxes"},
		{"a.json", `[{"bbox": [1,2,3,4]}]`, "it has no labels"},
		{"a.json", `[{"bbox": [1,2,3,4], "label": 1, "category_id": 1}]`, `"category_id" and "label"`},
		{"a.json", `[{"bbox": [1,2,3], "label": 1}]`, "four finite numbers"},
		{"a.json", `[{"bbox": [1,2,3,4,5], "label": 1}]`, "four finite numbers"},
		{"a.json", `[{"bbox": [1,2,3,null], "label": 1}]`, "four finite numbers"},
		{"a.json", `[{"bbox": {"x": 1}, "label": 1}]`, "four finite numbers"},
		{"a.json", `[{"bbox": [1,2,3,4], "label": null}]`, "neither a number nor a text"},
		{"a.json", `[{"bbox": [1,2,3,4], "label": [1]}]`, "neither a number nor a text"},
		{"a.json", `[{"bbox": [1,2,-3,4], "label": 1}]`, "negative size, as XYWH"},
		{"a.json", `{"bbox": [[1,2,3,4]], "labels": []}`, "1 boxes and 0 labels"},
		{"a.json", `{"bbox": [1,2,3,4], "labels": 1}`, "no arrays"},
		{"a.json", `{"boxes": [[1,2,3,4]], "labels": [1]}`, "set Boxes.Format"},
		{"a.json", `[{"box": [1,2,3,4], "label": 1}]`, "set Boxes.Format"},
		{"a.json", `{"annotations": [], "objects": []}`, `"annotations" and "objects"`},
		{"a.json", `{"images": [1, 2], "annotations": []}`, "it describes several images"},
		{"a.json", "[" + strings.Repeat(" ", maxBytes) + "]", "over the limit"},
		{"a.json", `{"bbox": [[1,2,3,4],[1,2,3,4],[1,2,3,4]], "labels": [0,0,0]}`, "more than 2 boxes"},
		{"a.json", `{"bbox": [[1,2,3,4]], "labels": null}`, "no arrays"},
		{"a.json", `{"categories": [{"id": 1, "name": "cat"}], "annotations": [{"bbox": [1,2,3,4], "category_id": 0}]}`,
			"box 1: its category_id 0 is not the id of a category"},
		{"a.json", `{"categories": [{"id": 0, "name": "1"}], "annotations": [{"bbox": [1,2,3,4], "category_id": 0}]}`,
			`the label "1" is not one of Options.Classes`},
		{"a.json", `{"categories": ["cat"], "annotations": []}`, `in "categories": json: cannot unmarshal`},
		{"a.json", `{"categories": [{"id": 1, "name": "cat"}, {"id": 1, "name": "dog"}], "annotations": []}`,
			`the id 1 is there twice, for "cat" and "dog"`},
		{"a.json", `{"images": [{"width": 50, "height": 40}], "annotations": [{"bbox": [1,2,3,4], "category_id": 0}]}`,
			"of an image of 50 x 40 pixels, and the image has 100 x 80"},
		{"a.json", `{"images": [{"width": "wide", "height": 40}], "annotations": []}`, `"wide" is no width`},
	} {
		d := NewDecoder(Config{Max: 2, MinSize: 1, Classes: []string{"cat", "dog"}})
		got, err := decode(t, d, c.member, []byte(c.data), 100, 80, whole(100, 80))
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s %.60q: got %v, %v, want an error with %q", c.member, c.data, got, err, c.says)
		}
	}
	d := NewDecoder(Config{Max: 2, MinSize: 1})
	if _, err := decode(t, d, "a.txt", []byte("cat 0 0 0 0"), 9, 9, whole(9, 9)); err == nil ||
		!strings.Contains(err.Error(), "Options.Classes") {
		t.Errorf("a name without classes: got error %v, want one with %q", err, "Options.Classes")
	}
}

// TestNumbersAreLabels: a number in text or JSON is a label, even if it is a class's name.
// A quoted number is the name.
func TestNumbersAreLabels(t *testing.T) {
	for _, c := range []struct {
		member, data, classes string
		want                  float64 // -1: an error
	}{
		{"a.txt", "0 .5 .5 .1 .1", "1 2 3 0", 0},
		{"a.txt", "nan .5 .5 .1 .1", "cat nan", 1},
		{"a.json", `[{"bbox": [1,2,3,4], "label": 0}]`, "1 2 3 0", 0},
		{"a.json", `[{"bbox": [1,2,3,4], "label": "0"}]`, "1 2 3 0", 3},
		{"a.json", `[{"bbox": [1,2,3,4], "label": "0"}]`, "1 2 3", -1},
		{"a.json", `[{"bbox": [1,2,3,4], "label": "1"}]`, "cat dog", 1},
	} {
		d := NewDecoder(Config{Max: 2, MinSize: 1, Classes: strings.Fields(c.classes)})
		rows, err := decode(t, d, c.member, []byte(c.data), 100, 80, whole(100, 80))
		if c.want < 0 {
			if err == nil || !strings.Contains(err.Error(), "is not one of Options.Classes") {
				t.Errorf("%s of %s: got %v, %v, want an error about Classes", c.data, c.classes, rows, err)
			}
		} else if err != nil || len(rows) != 1 || rows[0][4] != c.want {
			t.Errorf("%s of %s: got %v, %v, want the label %v", c.data, c.classes, rows, err, c.want)
		}
	}
}

// TestBoxesOfAnotherFrameAreErrors: boxes of a resized image are errors, and boxes that may be of
// the stored or the upright image. Fractions of a resized image are not.
func TestBoxesOfAnotherFrameAreErrors(t *testing.T) {
	const sized = `{"images": [{"width": %v, "height": %v}], "annotations": [{"bbox": [0.1, 0.2, 0.3, 0.4], "label": 0}]}`
	for _, c := range []struct {
		width, height any
		exif, turned  int32 // EXIF's orientation, and the transform's
		config        Config
		says          string // "": no error
	}{
		{60, 40, 1, 0, Config{}, ""},
		{"null", 40, 1, 0, Config{}, ""},
		{0, 0, 1, 0, Config{}, ""},
		{30, 20, 1, 0, Config{}, "of an image of 30 x 20 pixels, and the image has 60 x 40"},
		{30, 20, 1, 0, Config{Format: XYWH, Normalized: true}, ""},
		{40, 60, 1, 0, Config{}, "of an image of 40 x 60 pixels, and the image has 60 x 40"},
		{"null", "null", 6, 0, Config{}, "EXIF's orientation 6 turns the image: set Transform.ApplyEXIFOrientation"},
		{"null", "null", 3, 0, Config{}, "Boxes.Stored"},
		{60, 40, 3, 0, Config{}, "Boxes.Stored"}, // both frames have this size
		{60, 40, 3, 3, Config{}, ""},
		{"null", "null", 6, 0, Config{Stored: true}, ""},
		{"null", "null", 6, 6, Config{}, ""},
		{60, 40, 6, 0, Config{}, ""},
		{40, 60, 6, 0, Config{}, "of an image of 40 x 60 pixels, and are read as boxes of one of 60 x 40"},
		{40, 60, 6, 6, Config{}, ""},
		{60, 40, 6, 6, Config{}, "of an image of 60 x 40 pixels, and are read as boxes of one of 40 x 60"},
		{60, 40, 6, 6, Config{Stored: true}, ""},
		{40, 60, 6, 6, Config{Stored: true}, "of an image of 40 x 60 pixels, and are read as boxes of one of 60 x 40"},
	} {
		g := whole(60, 40)
		if c.turned >= 5 {
			g = whole(40, 60)
		}
		g.Orientation = c.turned
		c.config.Max = 1
		d, info := NewDecoder(c.config), imagecapi.Info{Width: 60, Height: 40, Orientation: c.exif}
		text := fmt.Sprintf(sized, c.width, c.height)
		err := d.Decode("a.json", []byte(text), &info, &g, nil, make([]byte, 4*Numbers))
		if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%+v: got error %v, want %q", c, err, c.says)
		}
		none := strings.Replace(text, `{"bbox": [0.1, 0.2, 0.3, 0.4], "label": 0}`, "", 1)
		if err := d.Decode("a.json", []byte(none), &info, &g, nil, make([]byte, 4*Numbers)); err != nil {
			t.Errorf("%+v, without boxes: got error %v, want none", c, err)
		}
	}
}

// TestLongArraysStopAtTheFirstError: a long array without boxes takes little more memory than its
// text.
func TestLongArraysStopAtTheFirstError(t *testing.T) {
	const size = 1 << 20
	zeros := "[0" + strings.Repeat(",0", size/2) + "]"
	for _, text := range []string{zeros, `{"annotations":` + zeros + "}", `{"images":` + zeros + "}",
		`{"bbox":` + zeros + `,"label":[0]}`, `[{"label":0,"bbox":` + zeros + "}]"} {
		d := NewDecoder(Config{Max: 2, MinSize: 1})
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		rows, err := decode(t, d, "a.json", []byte(text), 9, 9, whole(9, 9))
		runtime.ReadMemStats(&after)
		if got, most := after.TotalAlloc-before.TotalAlloc, uint64(10*size); err == nil || got > most {
			t.Errorf("%.30s: got %v, %v and %d bytes, want an error and at most %d bytes", text, rows, err, got, most)
		}
	}
}

// TestStoredBoxesTurnUpright compares the corners of boxes with EXIF's definition of orientations,
// which maps each position in the stored image to a position in the upright image.
func TestStoredBoxesTurnUpright(t *testing.T) {
	const w, h = 100, 60
	// Where the pixel (x, y) of the stored image is in the upright image.
	upright := map[int32]func(x, y float64) (float64, float64){
		0: func(x, y float64) (float64, float64) { return x, y },
		1: func(x, y float64) (float64, float64) { return x, y },
		2: func(x, y float64) (float64, float64) { return w - x, y },
		3: func(x, y float64) (float64, float64) { return w - x, h - y },
		4: func(x, y float64) (float64, float64) { return x, h - y },
		5: func(x, y float64) (float64, float64) { return y, x },
		6: func(x, y float64) (float64, float64) { return h - y, x },
		7: func(x, y float64) (float64, float64) { return h - y, w - x },
		8: func(x, y float64) (float64, float64) { return y, w - x },
	}
	for orientation, move := range upright {
		g := whole(w, h)
		if orientation >= 5 {
			g = whole(h, w)
		}
		g.Orientation = orientation
		x1, y1 := move(10, 20)
		x2, y2 := move(70, 25)
		turned := [][Numbers]float64{{min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2), 0}}
		d := NewDecoder(Config{Format: XYXY, Max: 1, MinSize: 1, Stored: true})
		got, err := decode(t, d, "a", []byte("0 10 20 70 25"), w, h, g)
		if err != nil || !near(got, turned) {
			t.Errorf("orientation %d: got %v, %v, want %v", orientation, got, err, turned)
		}
		// Fractions are of the upright image without Stored.
		d = NewDecoder(Config{Max: 1, MinSize: 1})
		got, err = decode(t, d, "a", []byte("0 .5 .5 1 .5"), w, h, g)
		want := [][Numbers]float64{{0, float64(g.CropHeight) / 4, float64(g.CropWidth), float64(g.CropHeight) * 3 / 4, 0}}
		if err != nil || !near(got, want) {
			t.Errorf("orientation %d: got %v, %v, want %v", orientation, got, err, want)
		}
	}
}

// FuzzBoxes: any file gives boxes within the image or an error.
func FuzzBoxes(f *testing.F) {
	for _, seed := range []string{"1 .2 .4 .2 .4\n0 0.25 0.2 0.5 0.4\n", "", "cat 1 2 3 4", "0 nan 1e999 -0 0x1p-2"} {
		f.Add(seed, "a.txt", 0, false)
	}
	for _, seed := range []string{`[{"bbox": [10, 20, 20, 40], "category_id": 1}]`, `{"boxes": [[1,2,3,4]], "labels": ["cat"]}`,
		`{"objects": {"bbox": [[1,2,3,4]], "category": [1]}}`, `{"annotations": [{"iscrowd": 1}]}`, `[[]]`, `{"boxes":null}`} {
		f.Add(seed, "a.json", 1, true)
	}
	f.Fuzz(func(t *testing.T, data, name string, format int, stored bool) {
		d := NewDecoder(Config{Format: Format(format & 3), Max: 7, MinSize: 0.5, Stored: stored, Classes: []string{"cat"}})
		g := imagecapi.Geometry{CropX: 3, CropY: 1, CropWidth: 15, CropHeight: 16, ResizeWidth: 11,
			ResizeHeight: 10, WindowX: 1, WindowWidth: 9, WindowHeight: 10, Flip: true, Orientation: int32(format>>2) & 7}
		rows, err := decode(t, d, name, []byte(data), 23, 17, g)
		for _, b := range rows {
			if !(b[0] >= 0 && b[1] >= 0 && b[2] <= 9 && b[3] <= 10 && b[2]-b[0] >= 0.5 && b[3]-b[1] >= 0.5 && b[4] == 0) {
				t.Errorf("box %v of %q, %v", b, data, err)
			}
		}
	})
}

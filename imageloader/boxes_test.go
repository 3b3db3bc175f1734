package imageloader

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/tensor"
)

// boxColors are the colours of the rectangles with the labels 0, 1 and 2.
var boxColors = []color.RGBA{{255, 0, 0, 255}, {0, 255, 0, 255}, {0, 0, 255, 255}}

// rectangles returns an image with a filled rectangle for each label from 0 to 2, in three rows,
// and the text with their boxes.
func rectangles(rng *rand.Rand, width, height int) (m *image.RGBA, text string) {
	m = image.NewRGBA(image.Rect(0, 0, width, height))
	for label, c := range boxColors {
		top, row := height*label/3, height/3
		x, y := rng.IntN(width/2), top+rng.IntN(row/3)
		r := image.Rect(x, y, x+width/4+rng.IntN(width/4), y+row/2+rng.IntN(row/6))
		draw.Draw(m, r, &image.Uniform{c}, image.Point{}, draw.Src)
		w, h := float64(width), float64(height)
		text += fmt.Sprintln(label, float64(r.Min.X+r.Max.X)/2/w, float64(r.Min.Y+r.Max.Y)/2/h, float64(r.Dx())/w,
			float64(r.Dy())/h)
	}
	return m, text
}

// boxScenes returns n images of rectangles and their boxes, in two folders, and members without a
// partner.
func boxScenes(t testing.TB, n int) (members []archivetest.Member) {
	t.Helper()
	rng := rand.New(rand.NewPCG(5, 6))
	var texts []archivetest.Member
	for i := range n {
		m, text := rectangles(rng, 200+10*(i%5), 180)
		members = append(members, archivetest.Member{Name: fmt.Sprintf("set/images/%02d.png", i), Data: archivetest.PNG(t, m)})
		texts = append(texts, archivetest.Member{Name: fmt.Sprintf("set/labels/%02d.txt", i), Data: text})
	}
	slices.Reverse(texts)
	members = append(members, archivetest.Member{Name: "set/images/alone.png", Data: members[0].Data},
		archivetest.Member{Name: "set/labels/classes.txt", Data: "red\ngreen\nblue\n"},
		archivetest.Member{Name: "set/images/Thumbs.db", Data: "no image"})
	return append(members, texts...)
}

// sceneBoxes has the options for boxScenes.
var sceneBoxes = Boxes{Image: "set/images/*.*", File: "set/labels/*.txt", Max: 3}

// findRectangles returns the bounding box of the pixels of each label's colour.
func findRectangles(pixels []byte, size int) (found [3]image.Rectangle) {
	for i := 0; i < len(pixels); i += 3 {
		for label := range found {
			if pixels[i+label] >= 128 {
				x, y := i/3%size, i/3/size
				found[label] = found[label].Union(image.Rect(x, y, x+1, y+1))
			}
		}
	}
	return found
}

// TestBoxesFollowTheirImages: after any transform a box is where its rectangle is in the pixels.
// Boxes are the same from every kind of archive, with any number of workers.
func TestBoxesFollowTheirImages(t *testing.T) {
	members := boxScenes(t, 23)
	data := archivetest.Tar(t, members...)
	paths := map[string]string{
		"tar":       archivetest.WriteFile(t, "a.tar", data),
		"tar.gz":    archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data)),
		"tar.zst":   archivetest.WriteFile(t, "a.tar.zst", archivetest.Zstd(t, data)),
		"directory": archivetest.Extract(t, members),
	}
	turns := func(low, high float64) transform.RandomRotation {
		return transform.RandomRotation{Degrees: [2]float64{low, high}, Interpolation: transform.Bilinear}
	}
	grow := turns(-90, 90)
	grow.Expand = true
	steps := func(ops ...transform.Op) Transform { return Transform{Size: 96, Resize: 96, FlipP: 0.5, Ops: ops} }
	several := steps(turns(-40, 40), transform.ColorJitter{Brightness: 0.1},
		transform.RandomApply{Ops: []transform.Op{transform.RandomPerspective{P: 1}}}, turns(-40, 40))
	several.RandomResizedCrop, several.Resize, several.Scale = true, 0, [2]float64{0.5, 1}
	for name, c := range map[string]struct {
		t Transform
		// exact means that a box has the size of its rectangle. Otherwise it may be larger, because
		// the bounding box of a rotated box is larger, and a part may be outside of the image.
		exact bool
	}{
		"centre":  {Transform{Size: 96, Resize: 100}, true},
		"crop":    {Transform{Size: 96, Resize: 120, RandomCrop: true, FlipP: 0.5}, true},
		"resized": {Transform{Size: 128, RandomResizedCrop: true, Scale: [2]float64{0.2, 1}, FlipP: 0.5}, true},
		"smaller": {Transform{Size: 64, Resize: 64, Interpolation: transform.Bicubic}, true},
		"turned":  {steps(turns(90, 90), &transform.RandomVerticalFlip{}), true},
		"padded":  {steps(transform.RandomHorizontalFlip{}, transform.RandomCrop{Padding: [4]int{20, 10, 20, 10}}), true},
		"scaled": {steps(transform.RandomAffine{Translate: [2]float64{0.2, 0.2}, Scale: [2]float64{0.6, 1.4}}),
			true},
		"rotated":  {steps(turns(-40, 40)), false},
		"expanded": {steps(grow, transform.CenterCrop{Size: 96}), false},
		"warped":   {steps(transform.RandomPerspective{P: 1, DistortionScale: 0.4}), false},
		"sheared":  {steps(transform.RandomAffine{Shear: [4]float64{-20, 20, -20, 20}}), false},
		"several":  {several, false},
	} {
		t.Run(name, func(t *testing.T) {
			if testing.Short() && name != "several" {
				t.Skip("its goroutines are those of the row \"several\"")
			}
			o := Options{BatchSize: 4, Transform: c.t, Boxes: sceneBoxes, Shuffle: true, NoIndex: true}
			want, least := "", 23
			if name == "several" { // most boxes become larger than their rectangles
				least = 1
			}
			for kind, path := range paths {
				for _, workers := range []int{1, 3} {
					o.Workers = workers
					got, compared := followBoxes(t, path, o, c.exact)
					if compared < least {
						t.Errorf("%s: %d of 69 boxes are compared, want at least %d", kind, compared, least)
					}
					if kind == "directory" {
						continue // its order differs
					}
					if want == "" {
						want = got
					}
					if got != want {
						t.Errorf("%s, %d workers: other boxes: %.200s, want %.200s", kind, workers, got, want)
					}
				}
			}
		})
	}
}

// followBoxes compares the boxes of an epoch with the pixels, and returns them as text. compared is
// the number of boxes whose four edges are where their rectangle is.
func followBoxes(t *testing.T, path string, o Options, exact bool) (all string, compared int) {
	t.Helper()
	l, err := Open(path, o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	size := float32(o.Transform.Size)
	for b, err := range l.Epoch(t.Context(), 2) {
		if err != nil {
			t.Fatal(err)
		}
		if len(b.Boxes) != b.N || b.Masks != nil || b.Soft != nil {
			t.Fatalf("%d boxes of %d samples, %d masks, %d soft labels", len(b.Boxes), b.N, len(b.Masks), len(b.Soft))
		}
		all += fmt.Sprintln(b.Boxes)
		for i, boxes := range b.Boxes {
			found := findRectangles(b.Images[len(b.Images)/b.N*i:][:len(b.Images)/b.N], o.Transform.Size)
			var has [3]bool
			for _, box := range boxes {
				has[box.Label] = true
				r := found[box.Label]
				if r.Empty() {
					if exact && min(box.Right-box.Left, box.Bottom-box.Top) > 3 {
						t.Errorf("%s: there is nothing in the box %v", b.Samples[i].Name, box)
					}
					continue
				}
				const near = 1.5 // resampling moves an edge by up to a pixel
				left, top := float32(r.Min.X)-box.Left, float32(r.Min.Y)-box.Top
				right, bottom := box.Right-float32(r.Max.X), box.Bottom-float32(r.Max.Y)
				edges := []float32{left, top, right, bottom}
				inside := box.Left > 1 && box.Top > 1 && box.Right < size-1 && box.Bottom < size-1
				if slices.Min(edges) < -near || exact && slices.Max(edges) > near {
					t.Errorf("%s: the rectangle %v has the box %v", b.Samples[i].Name, r, box)
				} else if slices.Max(edges) < near && (inside || exact) {
					compared++
				}
			}
			for label, r := range found {
				if !has[label] && min(r.Dx(), r.Dy()) > 3 {
					t.Errorf("%s: the rectangle %v of label %d has no box", b.Samples[i].Name, r, label)
				}
			}
		}
	}
	return all, compared
}

// TestBoxesOfUprightImages: with ApplyEXIFOrientation the boxes are of the upright image, or with
// Boxes.Stored of the stored image.
func TestBoxesOfUprightImages(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for orientation := range byte(9) {
		m, text := rectangles(rng, 160, 120)
		file := archivetest.Turned(archivetest.JPEG(t, m), orientation)
		o := Options{Transform: Transform{Size: 96, Resize: 96}, NoIndex: true,
			Boxes: Boxes{Image: "*.jpg", File: "*.txt", Max: 3, Stored: true}}
		open := func(text string, o Options) (string, []Box) {
			path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, archivetest.Member{Name: "a.jpg", Data: file},
				archivetest.Member{Name: "a.txt", Data: text}))
			l, err := Open(path, o)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			for b, err := range l.Epoch(t.Context(), 0) {
				if err != nil {
					t.Fatal(err)
				}
				return path, slices.Clone(b.Boxes[0])
			}
			return path, nil
		}
		path, _ := open(text, o)
		if _, compared := followBoxes(t, path, o, true); compared != 3 {
			t.Errorf("orientation %d, as stored: %d of 3 boxes fit", orientation, compared)
		}
		o.Transform.ApplyEXIFOrientation = true
		path, stored := open(text, o)
		if _, compared := followBoxes(t, path, o, true); compared != 3 {
			t.Errorf("orientation %d, upright: %d of 3 boxes fit", orientation, compared)
		}
		// The same boxes, written in the upright frame: pixels of the result, 96 pixels high or
		// wide.
		var lines strings.Builder
		width, height := 160., 120.
		if orientation >= 5 {
			width, height = height, width
		}
		scale := 96 / min(width, height)
		dx, dy := math.RoundToEven(math.Trunc(width*scale)-96)/2, math.RoundToEven(math.Trunc(height*scale)-96)/2
		for _, b := range stored {
			fmt.Fprintln(&lines, b.Label, (float64(b.Left)+dx)/scale, (float64(b.Top)+dy)/scale,
				(float64(b.Right)+dx)/scale, (float64(b.Bottom)+dy)/scale)
		}
		o.Boxes.Stored, o.Boxes.Format = false, XYXY
		if _, upright := open(lines.String(), o); !slices.EqualFunc(upright, stored, func(a, b Box) bool {
			return a.Label == b.Label && math.Abs(float64(a.Left-b.Left)) < 1e-3 && math.Abs(float64(a.Bottom-b.Bottom)) < 1e-3
		}) {
			t.Errorf("orientation %d: boxes of the upright image %v, want %v", orientation, upright, stored)
		}
	}
}

// TestBoxesHaveTheirField checks the second field: its shape, its rows, and the size of a slot.
func TestBoxesHaveTheirField(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, boxScenes(t, 5)...))
	o := Options{BatchSize: 5, Transform: Transform{Size: 32, Resize: 40, FlipP: 1}, Boxes: sceneBoxes, NoIndex: true,
		Classes: []string{"red", "green", "blue"}}
	o.Boxes.Max = 7
	l, err := Open(path, o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	want := tensor.Spec{Name: "boxes", DType: tensor.Float32, Shape: []int64{7, 5}}
	if f, u := l.Fields(), l.Outputs(); !reflect.DeepEqual(f[1], want) || !reflect.DeepEqual(u[1], want) || len(f) != 2 ||
		len(l.Finishes()) != 2 {
		t.Errorf("fields %v, outputs %v, want %v", f, u, want)
	}
	if got := l.Classes(); !slices.Equal(got, o.Classes) || l.ClassCounts() != nil {
		t.Errorf("classes %v, counts %v, want %v and none", got, l.ClassCounts(), o.Classes)
	}
	slot := [][]byte{make([]byte, 5*3*32*32), make([]byte, 5*7*5*4)}
	err = l.Fill(t.Context(), 0, func(context.Context) ([][]byte, error) { return slot, nil },
		func(n int, _ any) error {
			for i := range 5 * 7 {
				var row [5]float32
				for k := range row {
					row[k] = math.Float32frombits(binary.LittleEndian.Uint32(slot[1][20*i+4*k:]))
				}
				if i%7 < 3 && row[4] != float32(i%7) || i%7 >= 3 && row != [5]float32{0, 0, 0, 0, -1} {
					t.Errorf("row %d of the boxes is %v", i, row)
				}
			}
			return errors.New("seen")
		})
	if err == nil || err.Error() != "seen" {
		t.Errorf("Fill: %v, want the error of deliver", err)
	}
	err = l.Fill(t.Context(), 0, func(context.Context) ([][]byte, error) {
		return [][]byte{slot[0], slot[1][1:]}, nil
	}, func(int, any) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "boxes") {
		t.Errorf("a slot that is too small: %v, want an error with %q", err, "boxes")
	}
}

// TestBoxOptionsAreChecked: wrong options, and options that exclude boxes, are refused by name.
func TestBoxOptionsAreChecked(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, boxScenes(t, 2)...))
	for says, change := range map[string]func(o *Options){
		"Options.Boxes.Image: \"a\" needs one":        func(o *Options) { o.Boxes.Image = "a" },
		"Options.Boxes.File: \"\" needs one":          func(o *Options) { o.Boxes.File = "" },
		"are both":                                    func(o *Options) { o.Boxes.File = o.Boxes.Image },
		"Options.Boxes.Format is Format(4)":           func(o *Options) { o.Boxes.Format = 4 },
		"Options.Boxes.Normalized needs":              func(o *Options) { o.Boxes.Normalized = true },
		"Options.Boxes.Max is -1":                     func(o *Options) { o.Boxes.Max = -1 },
		"Options.Boxes.MinSize is NaN":                func(o *Options) { o.Boxes.MinSize = math.NaN() },
		"Options.Boxes excludes Options.WebDataset":   func(o *Options) { o.WebDataset = true },
		"Options.Boxes excludes Options.Balanced":     func(o *Options) { o.Balanced = true },
		"Options.Boxes excludes Options.List":         func(o *Options) { o.List = "a.csv" },
		"Options.Boxes and Options.Masks exclude":     func(o *Options) { o.Masks = sceneMasks },
		"Options.Transform: field Mix":                func(o *Options) { o.Transform.Mix = []transform.BatchOp{transform.CutMix{}} },
		"no image has a file of boxes by Options.Box": func(o *Options) { o.Boxes.File = "boxes/*" },
		"no file matches \"boxes/*\"; the archive's":  func(o *Options) { o.Boxes.File = "boxes/*" },
	} {
		o := Options{Boxes: sceneBoxes, NoIndex: true}
		change(&o)
		if _, err := Open(path, o); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v, want an error with %q", err, says)
		}
	}
	path = archivetest.WriteFile(t, "a.tar.zst", archivetest.Zstd(t, archivetest.Tar(t, boxScenes(t, 9)...)))
	if _, err := Open(path, Options{Boxes: sceneBoxes, NoIndex: true, ShuffleBytes: 1000}); err == nil ||
		!strings.Contains(err.Error(), "Options.Boxes needs random access") {
		t.Errorf("a stream: %v, want an error with %q", err, "Options.Boxes needs random access")
	}
}

// TestWrongBoxesAreBadSamples: a file of boxes that can't be used makes its sample a bad one, whose
// reason has the file's name. An empty file means that the image has no objects.
func TestWrongBoxesAreBadSamples(t *testing.T) {
	file := archivetest.PNG(t, archivetest.Gradient(50, 40))
	for name, c := range map[string]struct {
		text   archivetest.Member
		reason Reason // "": a good sample
		says   string
	}{
		"empty":    {archivetest.Member{}, "", ""},
		"no boxes": {archivetest.Member{Data: "[]"}, "", ""},
		"too many": {archivetest.Member{Data: `[{"bbox":[1,2,3,4],"label":1},{"bbox":[1,2,3,4],"label":1}]`},
			WrongBoxes, "more than 1 boxes: raise Boxes.Max"},
		"no JSON":   {archivetest.Member{Data: "0 .5 .5 .1 .1"}, WrongBoxes, "byte"},
		"a link":    {archivetest.Member{Kind: '2', Link: "a"}, NotRegular, "symbolic"},
		"too large": {archivetest.Member{Data: "[]" + strings.Repeat(" ", 5000)}, TooLarge, "MaxSampleBytes"},
	} {
		t.Run(name, func(t *testing.T) {
			members := []archivetest.Member{}
			for i := range 4 {
				m := archivetest.Member{Data: fmt.Sprintf(`[{"bbox": [%d, 2, 13, 14], "category_id": 7}]`, 5+i)}
				if i == 2 {
					m = c.text
				}
				m.Name = fmt.Sprintf("%02d.json", i)
				members = append(members, archivetest.Member{Name: fmt.Sprintf("%02d.png", i), Data: file}, m)
			}
			path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...))
			o := Options{BatchSize: 2, Transform: Transform{Size: 40, Resize: 40}, NoIndex: true, MaxSampleBytes: 5000,
				Boxes: Boxes{Image: "*.png", File: "*.json", Max: 1}}
			for policy, want := range map[BadSamplePolicy]string{Skip: "0 1 3", Substitute: "0 1 3 3"} {
				if c.reason == "" {
					want = "0 1 none 3"
				}
				o.BadSamples = policy
				l, err := Open(path, o)
				if err != nil {
					t.Fatal(err)
				}
				var got []string
				for b, err := range l.Epoch(t.Context(), 0) {
					if err != nil {
						t.Fatal(err)
					}
					for _, boxes := range b.Boxes {
						if len(boxes) == 0 {
							got = append(got, "none")
						}
						for _, box := range boxes {
							got = append(got, fmt.Sprint(box.Left))
						}
					}
				}
				s := l.Stats()
				if strings.Join(got, " ") != want {
					t.Errorf("%v: boxes at %v, want %s", policy, got, want)
				}
				if c.reason != "" && (s.Bad != 1 || s.BadBy[c.reason] != 1 || s.BadNamed[0].Name != "02.json") ||
					c.reason == "" && s.Bad != 0 {
					t.Errorf("%v: bad %v %v, want %q", policy, s.BadBy, s.BadNamed, c.reason)
				}
				l.Close()
			}
			if c.reason == "" {
				return
			}
			o.BadSamples = Fail
			l, err := Open(path, o)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			err = nil
			for _, e := range l.Epoch(t.Context(), 0) {
				err = errors.Join(err, e)
			}
			var bad *SampleError
			if !errors.As(err, &bad) || bad.Name != "02.json" || bad.Index != 2 || bad.Reason != c.reason ||
				!strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v, want reason %q and %q", err, c.reason, c.says)
			}
		})
	}
}

// TestBoxedEpochsResume: a resumed epoch has the boxes of an uninterrupted one, and so have two
// ranks together. A loader with other options for boxes refuses the state.
func TestBoxedEpochsResume(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, boxScenes(t, 21)...)))
	o := Options{BatchSize: 4, Transform: Transform{Size: 64, RandomResizedCrop: true, FlipP: 0.5,
		Ops: []transform.Op{transform.RandomRotation{Degrees: [2]float64{-30, 30}}}},
		Boxes: sceneBoxes, Shuffle: true, NoIndex: true, DropLast: true}
	open := func(o Options) *Loader {
		l, err := Open(path, o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	ofSample := map[string]string{}
	run := func(l *Loader, from int) (all []string, states []State) {
		for b, err := range l.Epoch(t.Context(), 1) {
			if err != nil {
				t.Fatal(err)
			}
			text := fmt.Sprintf("%v %x", b.Boxes, b.Images[:100])
			for i, s := range b.Samples {
				if boxes := fmt.Sprint(b.Boxes[i]); ofSample[s.Name] == "" {
					ofSample[s.Name] = boxes
				} else if ofSample[s.Name] != boxes {
					t.Errorf("%s has the boxes %s, want %s", s.Name, boxes, ofSample[s.Name])
				}
			}
			all, states = append(all, text), append(states, b.State)
		}
		return all, states
	}
	all, states := run(open(o), 0)
	state := throughJSON(t, states[1])
	again := open(o)
	if err := again.Restore(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	if rest, _ := run(again, 2); len(all) != 5 || !slices.Equal(rest, all[2:]) {
		t.Errorf("the resumed epoch has %d batches, want the last %d of the whole epoch", len(rest), len(all)-2)
	}
	for rank := range 2 {
		ranked := o
		ranked.Rank, ranked.World, ranked.BatchSize = rank, 2, 2
		if batches, _ := run(open(ranked), 0); len(batches) != 5 { // run compares the boxes of each sample
			t.Errorf("rank %d has %d batches, want 5", rank, len(batches))
		}
	}
	for name, change := range map[string]func(o *Options){
		"Boxes": func(o *Options) { o.Boxes.Max = 4 }, "MinSize": func(o *Options) { o.Boxes.MinSize = 3 },
		"Classes": func(o *Options) { o.Classes = []string{"a", "b", "c"} },
	} {
		other := o
		change(&other)
		if err := open(other).Restore(t.Context(), state); err == nil {
			t.Errorf("%s: a state of other boxes is accepted, want an error", name)
		}
	}
}

// TestBoxIndexServesAllPatterns: a loader with other patterns, or with a list, uses the index file
// unchanged. Without Options.Boxes or a list, InspectIndex refuses it.
func TestBoxIndexServesAllPatterns(t *testing.T) {
	o := Options{BatchSize: 4, Transform: Transform{Size: 16, Resize: 16}, Boxes: sceneBoxes}
	other := o
	other.Boxes.Image = "set/images/*.png"
	list := filepath.Join(t.TempDir(), "a.csv")
	if err := os.WriteFile(list, []byte("path,label\nset/images/01.png,cat\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	checkPairIndex(t, boxScenes(t, 9), "Options.Boxes", o, other, Options{List: list})
}

// checkPairIndex makes the index of an archive of 9 pairs with the first options. Epochs of the
// other options must use it. The labels of directories, which option has not, must not.
func checkPairIndex(t *testing.T, members []archivetest.Member, option string, first Options, others ...Options) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a.tgz")
	if err := os.WriteFile(path, archivetest.Gzip(t, archivetest.Tar(t, members...)), 0o644); err != nil {
		t.Fatal(err)
	}
	r, err := MakeIndex(t.Context(), path, first, nil)
	if err != nil || r.Samples != 9 || r.Classes != 0 {
		t.Fatalf("%+v; %v, want no error, r.Samples = 9, r.Classes = 0", r, err)
	}
	before, err := os.ReadFile(r.File)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range others {
		l, err := Open(path, o)
		if err != nil || l.Len() != 9 && o.List == "" || l.Len() != 1 && o.List != "" {
			t.Fatalf("%+v: %v, want a loader of 9 samples, or with a list of 1", o, err)
		}
		for _, err := range l.Epoch(t.Context(), 0) {
			if err != nil {
				t.Error(err)
			}
		}
		l.Close()
	}
	if after, err := os.ReadFile(r.File); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the index was made anew; %v", err)
	}
	if _, err := InspectIndex(t.Context(), path, Options{}, nil); err == nil || !strings.Contains(err.Error(), option) {
		t.Errorf("an index of %s is inspected: %v, want an error with %q", option, err, option)
	}
}

// TestPlannedBatchesHaveBoxes: boxes are the same if a GPU decodes the images.
func TestPlannedBatchesHaveBoxes(t *testing.T) {
	if d, err := (sample.Library{}).NewDecoder(0); err != nil {
		t.Skip(err)
	} else {
		d.Close()
	}
	const photos = 9
	var members []archivetest.Member
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range photos {
		_, text := rectangles(rng, 320, 240)
		members = append(members,
			archivetest.Member{Name: fmt.Sprintf("%d.jpg", i), Data: string(archivetest.Photo(t, uint64(i)))},
			archivetest.Member{Name: fmt.Sprintf("%d.txt", i), Data: text})
	}
	o := Options{BatchSize: photos, Transform: Train(64), Shuffle: true, Workers: 2,
		Boxes: Boxes{Image: "*.jpg", File: "*.txt"}, IndexFile: filepath.Join(t.TempDir(), "index")}
	o.Transform.Ops = []transform.Op{transform.RandomRotation{Degrees: [2]float64{-30, 30}}}
	l, err := Open(archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...)), o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for epoch := range 3 { // the entry points become known
		want := ""
		for b, err := range l.Epoch(t.Context(), epoch) {
			if err != nil {
				t.Fatal(err)
			}
			want += fmt.Sprint(b.Boxes)
		}
		c := &planned{slots: 2, capacity: 8 << 20}
		if _, err := c.epoch(t, l, epoch); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(readBoxes(c.second, photos)); got != want || c.rows != photos {
			t.Errorf("epoch %d: %d plans with the boxes %s, want %d with %s", epoch, c.rows, got, photos, want)
		}
	}
}

// cocoOf returns the boxes of boxScenes as one file in COCO's format. Its categories have the ids
// 10, 11 and 12.
func cocoOf(t *testing.T, members []archivetest.Member) string {
	t.Helper()
	type image struct {
		ID       int    `json:"id"`
		FileName string `json:"file_name"`
	}
	type annotation struct {
		ImageID    int        `json:"image_id"`
		CategoryID int        `json:"category_id"`
		Box        [4]float64 `json:"bbox"`
	}
	var images []image
	var annotations []annotation
	for _, m := range members {
		base, isText := strings.CutSuffix(filepath.Base(m.Name), ".txt")
		number, err := strconv.Atoi(base)
		if err != nil || !isText {
			continue
		}
		images = append(images, image{100 - number, base + ".png"})
		w, h := float64(200+10*(number%5)), 180.
		for line := range strings.Lines(m.Data) {
			var label int
			var x, y, bw, bh float64
			if _, err := fmt.Sscan(line, &label, &x, &y, &bw, &bh); err != nil {
				t.Fatal(err)
			}
			annotations = append(annotations, annotation{100 - number, 10 + label,
				[4]float64{(x - bw/2) * w, (y - bh/2) * h, bw * w, bh * h}})
		}
	}
	images = append([]image{{1000, "not there.png"}}, images...) // the first one is no header
	data, err := json.Marshal(map[string]any{"images": images, "annotations": annotations, "categories": []any{
		map[string]any{"id": 10, "name": "red"}, map[string]any{"id": 11, "name": "green"},
		map[string]any{"id": 12, "name": "blue"}}})
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestOneFileOfBoxes: one file in COCO's format gives the same boxes as a file for each image, with
// every kind of archive. The file may be a member of the archive, even of a stream.
func TestOneFileOfBoxes(t *testing.T) {
	members := boxScenes(t, 13)
	text := cocoOf(t, members)
	file := archivetest.WriteFile(t, "instances.json", []byte(text))
	members = append(members, archivetest.Member{Name: "set/annotations/a.json", Data: text})
	data := archivetest.Tar(t, members...)
	stream := archivetest.WriteFile(t, "a.tar.zst", archivetest.Zstd(t, data))
	o := Options{BatchSize: 4, NoIndex: true, Classes: []string{"red", "green", "blue"},
		Transform: Transform{Size: 64, RandomResizedCrop: true, FlipP: 0.5}}
	read := func(path string, o Options) (boxes map[string]string) {
		l, err := Open(path, o)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		boxes = map[string]string{}
		for b, err := range l.Epoch(t.Context(), 1) {
			if err != nil {
				t.Fatal(err)
			}
			for i, s := range b.Samples {
				if s.Label != 0 || b.Labels[i] != 0 {
					t.Errorf("%s has the label %d, want 0", s.Name, s.Label)
				}
				for _, x := range b.Boxes[i] {
					boxes[s.Name] += fmt.Sprintf("%.2f %.2f %.2f %.2f %d;", x.Left, x.Top, x.Right, x.Bottom, x.Label)
				}
				boxes[s.Name] += "."
			}
		}
		if got := l.Classes(); !slices.Equal(got, o.Classes) || l.ClassCounts() != nil || len(boxes) != l.Len() {
			t.Errorf("classes %v, %v, %d samples of %d, want %v, no counts", got, l.ClassCounts(), len(boxes), l.Len(), o.Classes)
		}
		return boxes
	}
	pairs := o
	pairs.Boxes = sceneBoxes
	tar := archivetest.WriteFile(t, "a.tar", data)
	want := read(tar, pairs)
	if len(want) != 13 {
		t.Fatalf("%d samples, want 13", len(want))
	}
	for name, path := range map[string]string{"tar": tar, "directory": archivetest.Extract(t, members),
		"tgz": archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data)), "stream": stream} {
		for _, boxes := range []string{file, "annotations/a.json"} {
			one := o
			one.Boxes = Boxes{File: boxes, Max: 3}
			if name == "stream" {
				one.ShuffleBytes = 1000 // too few to keep the samples in memory
			}
			got := read(path, one)
			if name == "directory" { // the samples have another order, so their random crops differ
				if len(got) != 13 {
					t.Errorf("%s, %s: %d samples, want 13", name, boxes, len(got))
				}
			} else if !reflect.DeepEqual(got, want) {
				t.Errorf("%s, %s: boxes %v, want %v", name, boxes, got, want)
			}
		}
	}
	one := o
	one.Boxes, one.Classes = Boxes{File: file, Max: 3}, nil
	for _, boxes := range read(tar, one) {
		if boxes != "." && !strings.Contains(boxes, " 10;") && !strings.Contains(boxes, " 11;") &&
			!strings.Contains(boxes, " 12;") {
			t.Errorf("without Classes: boxes %s, want the ids of categories as labels", boxes)
		}
	}
}

// TestOneFileOfBoxesIsChecked: Open returns an error that names a file that can't be used. A state
// can be restored if the boxes are the same, even if their file has another path.
func TestOneFileOfBoxesIsChecked(t *testing.T) {
	members := boxScenes(t, 5)
	text := cocoOf(t, members)
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...))
	for says, change := range map[string]func(o *Options, file string){
		"instances.json: byte": func(o *Options, file string) { archivetest.Rewrite(t, file, []byte(text[:100])) },
		"no images":            func(o *Options, file string) { archivetest.Rewrite(t, file, []byte("{}")) },
		"none.json":            func(o *Options, _ string) { o.Boxes.File = "none.json" },
		"leave out Image":      func(o *Options, _ string) { o.Boxes.Image = "*.png" },
		`instances.json: image 1: "x0.png" is no member`: func(o *Options, file string) {
			archivetest.Rewrite(t, file, []byte(`{"annotations": [],
				"images": [{"id": 0, "file_name": "x0.png"}, {"id": 1, "file_name": "x1.png"}]}`))
		},
		`image 2: "000.png" is image 1 already`: func(o *Options, file string) {
			archivetest.Rewrite(t, file, []byte(`{"annotations": [],
				"images": [{"id": 0, "file_name": "000.png"}, {"id": 1, "file_name": "./000.png"}]}`))
		},
		"Options.Classes": func(o *Options, _ string) { o.Classes = []string{"red"} },
	} {
		file := archivetest.WriteFile(t, "instances.json", []byte(text))
		o := Options{NoIndex: true, Boxes: Boxes{File: file}}
		change(&o, file)
		if says == "no images" {
			says = `no "images"`
		}
		if _, err := Open(path, o); err == nil || !strings.Contains(err.Error(), says) ||
			strings.Contains(err.Error(), "olumn") {
			t.Errorf("got %v, want an error with %q, and not about columns", err, says)
		}
	}
	open := func(text string) *Loader {
		l, err := Open(path, Options{NoIndex: true, BatchSize: 2, Transform: Transform{Size: 32, Resize: 32},
			Boxes: Boxes{File: archivetest.WriteFile(t, "instances.json", []byte(text))}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	var state State
	for b, err := range open(text).Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		state = b.State
		break
	}
	if err := open(text).Restore(t.Context(), state); err != nil {
		t.Errorf("the same boxes in another file: got error %v, want none", err)
	}
	other := strings.Replace(text, `"category_id":10`, `"category_id":12`, 1)
	if err := open(other).Restore(t.Context(), state); other == text || err == nil {
		t.Error("a state of other boxes is accepted, want an error")
	}
}

// The boxes in columns of Parquet files are those that datasets reads, with the classes that the
// file names, in its order, or with given classes. Rows share a path or have none.
func TestBoxesOfParquetColumns(t *testing.T) {
	text, err := os.ReadFile("testdata/parquet/boxes.json")
	if err != nil {
		t.Fatal(err)
	}
	var files map[string][][][5]any
	if err := json.Unmarshal(text, &files); err != nil || len(files) != 2 {
		t.Fatalf("got %d files, %v, want 2", len(files), err)
	}
	for file, rows := range files {
		data, err := os.ReadFile("testdata/parquet/" + file + ".parquet")
		if err != nil {
			t.Fatal(err)
		}
		path := archivetest.WriteFile(t, file+".parquet", data)
		for _, classes := range [][]string{nil, {"cat", "café", "owl"}, nil} { // the last one reads the index file
			o := Options{BatchSize: 4, Transform: Eval(30, 30), Boxes: Boxes{File: "objects"}, Classes: classes}
			l, err := open(t.Context(), path, o, openFile, fakeCodec{})
			if err != nil {
				t.Fatal(err)
			}
			if classes == nil {
				classes = []string{"owl", "cat", "café"}
			}
			if got := l.Classes(); !slices.Equal(got, classes) || l.Len() != len(rows) {
				t.Errorf("%s: %d samples, classes %q, want %d and %q", file, l.Len(), got, len(rows), classes)
			}
			for b, err := range l.Epoch(t.Context(), 0) {
				if err != nil {
					t.Fatal(err)
				}
				for i, s := range b.Samples {
					if place := fmt.Sprintf("%s/%08d", file, s.Index); !strings.HasPrefix(s.Name, place) {
						t.Errorf("sample %d has the name %q, want %q and its path", s.Index, s.Name, place)
					}
					var want []Box
					for _, v := range rows[s.Index] {
						x, y, w, h := v[0].(float64)-5, v[1].(float64), v[2].(float64), v[3].(float64) // the crop of 40 x 30
						left := max(0, x)
						if x+w-left >= 1 {
							want = append(want, Box{float32(left), float32(y), float32(x + w), float32(y + h),
								slices.Index(classes, v[4].(string))})
						}
					}
					if !slices.Equal(b.Boxes[i], want) {
						t.Errorf("%s: got the boxes %v, want %v", s.Name, b.Boxes[i], want)
					}
				}
			}
			if !l.index.Load().HasFile() {
				t.Errorf("%s: got no index file, want one", file)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
		for says, o := range map[string]Options{
			"no column \"bbox2\" with lists of boxes":         {Boxes: Boxes{File: "bbox2"}},
			"give Options.Boxes.File the column":              {Boxes: Boxes{Image: "*.png", File: "*.txt"}},
			"the label \"owl\" is not one of Options.Classes": {Boxes: Boxes{File: "objects"}, Classes: []string{"cat", "café"}},
			"Options.Boxes and Options.Masks exclude each":    {Boxes: Boxes{File: "objects"}, Masks: sceneMasks},
		} {
			if _, err := open(t.Context(), path, o, openFile, fakeCodec{}); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%s: got %v, want an error with %q", file, err, says)
			}
		}
	}
}

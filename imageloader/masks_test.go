package imageloader

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/gif"
	"image/png"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/tensor"
)

// scene returns image i and its mask. A pixel's red is the class in the mask, and its green is i.
func scene(t testing.TB, i, width, height int) (file, mask []byte) {
	t.Helper()
	picture := image.NewNRGBA(image.Rect(0, 0, width, height))
	for y := range height {
		for x := range width {
			picture.SetNRGBA(x, y, color.NRGBA{uint8(archivetest.MaskClass(x, y+i, 200)), uint8(i), 77, 255})
		}
	}
	grey := image.NewGray(picture.Rect)
	for k := range grey.Pix {
		grey.Pix[k] = picture.Pix[4*k]
	}
	var a, b bytes.Buffer
	if err := errors.Join(png.Encode(&a, picture), png.Encode(&b, grey)); err != nil {
		t.Fatal(err)
	}
	return a.Bytes(), b.Bytes()
}

// scenes returns n images and their masks, in two folders, and an image without a mask.
func scenes(t testing.TB, n int) (members []archivetest.Member) {
	t.Helper()
	var masks []archivetest.Member
	for i := range n {
		file, mask := scene(t, i, 40+i%7, 40)
		members = append(members, archivetest.Member{Name: fmt.Sprintf("set/images/%02d.png", i), Data: string(file)})
		masks = append(masks, archivetest.Member{Name: fmt.Sprintf("set/masks/%02d_l.png", i), Data: string(mask)})
	}
	slices.Reverse(masks)
	file, _ := scene(t, 250, 50, 50)
	members = append(members, archivetest.Member{Name: "set/images/alone.png", Data: string(file)})
	return append(members, masks...)
}

// sceneMasks has the options for scenes.
var sceneMasks = Masks{Image: "set/images/*.png", Mask: "set/masks/*_l.png"}

// collectMasks returns the images and masks of an epoch, one after the other, and checks that each
// pixel's red is its class.
func collectMasks(t *testing.T, l *Loader, epoch int, moved bool) (all []byte) {
	t.Helper()
	for b, err := range l.Epoch(t.Context(), epoch) {
		if err != nil {
			t.Fatal(err)
		}
		if len(b.Images) != 3*len(b.Masks) || b.N == 0 || len(b.Soft) != 0 ||
			slices.ContainsFunc(b.Labels, func(n int64) bool { return n != 0 }) {
			t.Fatalf("%d bytes of images, %d of masks, labels %v", len(b.Images), len(b.Masks), b.Labels)
		}
		wrong := 0
		for i, class := range b.Masks {
			if b.Images[3*i] != class {
				wrong++
			}
		}
		if wrong > 0 {
			t.Errorf("%d of %d pixels have another class than their mask says, want 0", wrong, len(b.Masks))
		}
		for i, s := range b.Samples {
			if number := fmt.Sprintf("set/images/%02d.png", b.Images[3*len(b.Masks)/b.N*i+1]); !moved &&
				s.Name != number {
				t.Errorf("%s has the pixels of %s", s.Name, number)
			}
		}
		all = append(append(all, b.Images...), b.Masks...)
	}
	return all
}

// TestMasksFollowTheirImages: images and masks go through the same geometry, from every kind of
// archive, with any number of workers.
func TestMasksFollowTheirImages(t *testing.T) {
	members := scenes(t, 23)
	data := archivetest.Tar(t, members...)
	paths := map[string]string{
		"tar":         archivetest.WriteFile(t, "a.tar", data),
		"tar.gz":      archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data)),
		"tar.zst":     archivetest.WriteFile(t, "a.tar.zst", archivetest.Zstd(t, data)),
		"directory":   archivetest.Extract(t, members),
		"gzip blocks": archivetest.WriteFile(t, "b.tgz", archivetest.GzipSplit(t, data, 5000, 1)),
	}
	same := transform.Color{7, 7, 7}
	for name, tr := range map[string]Transform{
		// the images' short side, so nothing is resized
		"crop":    {Size: 32, Resize: 40, RandomCrop: true, FlipP: 0.5},
		"resized": {Size: 40, Resize: 40},
		"moved": {Size: 32, Resize: 40, RandomCrop: true, FlipP: 0.5, Ops: []transform.Op{
			transform.RandomRotation{Degrees: [2]float64{-40, 40}, Fill: same},
			transform.RandomErasing{P: 1e-9}, // draws
			transform.RandomCrop{Padding: [4]int{4, 4, 4, 4}, Fill: same},
			&transform.RandomVerticalFlip{},
			transform.RandomApply{Ops: []transform.Op{transform.RandomPerspective{P: 1,
				Interpolation: transform.Nearest, Fill: same}}},
			transform.RandomRotation{Degrees: [2]float64{90, 90}, Expand: true}, transform.CenterCrop{Size: 32}}},
	} {
		t.Run(name, func(t *testing.T) {
			o := Options{BatchSize: 4, Transform: tr, Masks: sceneMasks, Shuffle: true, NoIndex: true}
			o.Masks.Fill = 7
			var want []byte
			for kind, path := range paths {
				for _, workers := range []int{1, 3} {
					o.Workers = workers
					l, err := Open(path, o)
					if err != nil {
						t.Fatal(err)
					}
					if l.Len() != 23 || len(l.Classes()) != 0 {
						t.Errorf("%d samples, classes %v", l.Len(), l.Classes())
					}
					got := collectMasks(t, l, 2, len(tr.Ops) > 0)
					if kind == "directory" {
						continue // its order differs
					}
					if want == nil {
						want = got
					}
					if !bytes.Equal(got, want) {
						t.Errorf("%s, %d workers: other bytes", kind, workers)
					}
					l.Close()
				}
			}
			if len(want) != 23*4*tr.Size*tr.Size {
				t.Errorf("%d bytes, want %v", len(want), 23*4*tr.Size*tr.Size)
			}
		})
	}
}

// TestMasksHaveTheirType checks a mask's field, in both types.
func TestMasksHaveTheirType(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, scenes(t, 5)...))
	o := Options{BatchSize: 5, Transform: Transform{Size: 32, Resize: 40, FlipP: 1}, Masks: sceneMasks, NoIndex: true}
	bytesOf := map[tensor.DType][]byte{}
	for _, dtype := range []tensor.DType{tensor.Uint8, tensor.Int64} {
		o.Masks.DType = dtype
		l, err := Open(path, o)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		want := tensor.Spec{Name: "masks", DType: dtype, Shape: []int64{32, 32}}
		if f, u := l.Fields(), l.Outputs(); !reflect.DeepEqual(f[1], want) ||
			!reflect.DeepEqual(u[1], want) || len(f) != 2 || len(l.Finishes()) != 2 {
			t.Errorf("fields %v, outputs %v", f, u)
		}
		for b, err := range l.Epoch(t.Context(), 0) {
			if err != nil {
				t.Fatal(err)
			}
			bytesOf[dtype] = append(bytesOf[dtype], b.Masks...)
		}
		// A consumer's slots are checked.
		err = l.Fill(t.Context(), 0, func(context.Context) ([][]byte, error) {
			return [][]byte{make([]byte, 5*3*32*32), make([]byte, 5*32*32*dtype.Size()-1)}, nil
		}, func(int, any) error { return nil })
		if err == nil || !strings.Contains(err.Error(), "masks") {
			t.Errorf("a slot that is too small: %v, want an error with %q", err, "masks")
		}
	}
	for i, class := range bytesOf[tensor.Uint8] {
		if binary.LittleEndian.Uint64(bytesOf[tensor.Int64][8*i:]) != uint64(class) {
			t.Fatalf("pixel %d is another class as int64", i)
		}
	}
}

// TestMaskOptionsAreChecked: options that exclude masks are refused by name.
func TestMaskOptionsAreChecked(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, scenes(t, 2)...))
	for says, change := range map[string]func(o *Options){
		"Options.Masks.Image: \"a\" needs one":     func(o *Options) { o.Masks.Image = "a" },
		"Options.Masks.Mask: \"\" needs one":       func(o *Options) { o.Masks.Mask = "" },
		"are both":                                 func(o *Options) { o.Masks.Mask = o.Masks.Image },
		"Options.Masks.DType is float32":           func(o *Options) { o.Masks.DType = tensor.Float32 },
		"Options.Masks.Fill is 256, not in 0 to 2": func(o *Options) { o.Masks.Fill = 256 },
		"Options.Masks.Fill is -1":                 func(o *Options) { o.Masks.Fill, o.Masks.DType = -1, tensor.Int64 },
		"excludes Options.Classes":                 func(o *Options) { o.Classes = []string{"a"} },
		"excludes Options.WebDataset":              func(o *Options) { o.WebDataset = true },
		"excludes Options.Balanced":                func(o *Options) { o.Balanced = true },
		"field Ops[0] (transform.RandomApply) adds up images": func(o *Options) {
			o.Transform.Ops = []transform.Op{transform.RandomApply{Ops: []transform.Op{&transform.AugMix{}}}}
		},
		"field Mix": func(
			o *Options) {
			o.Transform.Mix = []transform.BatchOp{transform.CutMix{}}
		},
		"no image has a mask by Options.Masks": func(o *Options) { o.Masks.Mask = "labels/*" },
	} {
		o := Options{Masks: sceneMasks, NoIndex: true}
		change(&o)
		if _, err := Open(path, o); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v, want an error with %q", err, says)
		}
	}
	// A stream that is not kept in memory has no random access.
	data := archivetest.Tar(t, scenes(t, 30)...)
	path = archivetest.WriteFile(t, "a.tar.zst", archivetest.Zstd(t, data))
	if _, err := Open(path, Options{Masks: sceneMasks, NoIndex: true, ShuffleBytes: 1000}); err == nil ||
		!strings.Contains(err.Error(), "Options.Masks needs random access") {
		t.Errorf("a stream: %v, want an error with %q", err, "Options.Masks needs random access")
	}
}

// TestBadMasksAreBadSamples: a mask that can't be used makes its sample a bad one, whose reason has
// the mask's name.
func TestBadMasksAreBadSamples(t *testing.T) {
	_, good := scene(t, 1, 40, 40)
	_, large := scene(t, 1, 40, 41)
	var colours, animation bytes.Buffer
	if err := png.Encode(&colours, image.NewNRGBA(image.Rect(0, 0, 40, 40))); err != nil {
		t.Fatal(err)
	}
	if err := gif.Encode(&animation,
		image.NewPaletted(image.Rect(0, 0, 40, 40), color.Palette{color.Black}), nil); err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(good)
	flipped[len(flipped)/2] ^= 4
	for name, c := range map[string]struct {
		mask   archivetest.Member
		reason Reason
		says   string
	}{
		"another size": {archivetest.Member{Data: string(large)}, MaskSize, "40 x 41 pixels, and 40 x 40"},
		"colours":      {archivetest.Member{Data: colours.String()}, Unsupported, "grey levels or a palette"},
		"16 bits": {archivetest.Member{Data: string(archivetest.MaskPNG(t, 40, 40, 1000))},
			Unsupported, "set tensor.Int64"},
		"a GIF":       {archivetest.Member{Data: animation.String()}, Unsupported, "no PNG"},
		"text":        {archivetest.Member{Data: "a text"}, NotImage, "a text"},
		"cut off":     {archivetest.Member{Data: string(good[:len(good)-20])}, Damaged, ""},
		"a header":    {archivetest.Member{Data: string(good[:20])}, Damaged, "cut off"},
		"a wrong bit": {archivetest.Member{Data: string(flipped)}, Damaged, ""},
		"empty":       {archivetest.Member{}, Empty, ""},
		"a link":      {archivetest.Member{Kind: tar.TypeSymlink, Link: "a"}, NotRegular, "symbolic"},
		"too large": {archivetest.Member{Data: string(good) + strings.Repeat("x", 5000)}, TooLarge,
			"MaxSampleBytes"},
		"a small bomb": {archivetest.Member{Data: string(archivetest.PNGBomb(t, 3000, 3000))}, MaskSize,
			"3000 x 3000"},
		"a bit of PNG": {archivetest.Member{Data: string(good[:8])}, Damaged, "cut off"},
		"no width":     {archivetest.Member{Data: string(archivetest.PNGBomb(t, 0, 40))}, MaskSize, "0 x 40"},
		"a huge claim": {archivetest.Member{Data: string(archivetest.PNGBomb(t, 1<<31, 1<<31))}, MaskSize, ""},
		"unknown depth": {archivetest.Member{Data: string(good[:24]) + "\x05" + string(good[25:])},
			Unsupported, "bit depth 5"},
	} {
		t.Run(name, func(t *testing.T) {
			members := []archivetest.Member{}
			for i := range 6 {
				file, mask := scene(t, i, 40, 40)
				m := archivetest.Member{Name: fmt.Sprintf("%02d.seg.png", i), Data: string(mask)}
				if i == 2 {
					m.Data, m.Kind, m.Link = c.mask.Data, c.mask.Kind, c.mask.Link
				}
				members = append(members, archivetest.Member{Name: fmt.Sprintf("%02d.png", i), Data: string(file)}, m)
			}
			path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...))
			o := Options{BatchSize: 3, Transform: Transform{Size: 32, Resize: 40, RandomCrop: true},
				Masks:   Masks{Image: "*.*", Mask: "*.seg.png"},
				NoIndex: true, MaxSampleBytes: 5000}
			for policy, want := range map[BadSamplePolicy]string{Skip: "00 01 03 04 05",
				Substitute: "00 01 01 03 04 05"} {
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
					for i, s := range b.Samples {
						got = append(got, strings.TrimSuffix(s.Name, ".png"))
						for k, class := range b.Masks[i*32*32 : (i+1)*32*32] {
							if b.Images[3*(i*32*32+k)] != class {
								t.Fatalf("%s has another mask", s.Name)
							}
						}
					}
				}
				s := l.Stats()
				if strings.Join(got, " ") != want || s.Bad != 1 || s.BadBy[c.reason] != 1 ||
					len(s.BadNamed) != 1 || s.BadNamed[0].Name != "02.seg.png" {
					t.Errorf("%v: samples %v, bad %v %v", policy, got, s.BadBy, s.BadNamed)
				}
				l.Close()
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
			if !errors.As(err, &bad) || bad.Name != "02.seg.png" || bad.Index != 2 || bad.File != path ||
				bad.Reason != c.reason || !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v", err)
			}
		})
	}
}

// TestMaskHasTheSizeOfTheCroppedImage: a mask must have the size of the image that is cropped.
func TestMaskHasTheSizeOfTheCroppedImage(t *testing.T) {
	file, err := os.ReadFile("../cshim/test/data/orientation-6.jpg")
	if err != nil {
		t.Fatal(err)
	}
	info, err := imagecapi.Header(file)
	if err != nil || info.Width == info.Height {
		t.Fatal(info, err)
	}
	for upright, size := range map[bool][2]int32{false: {info.Width, info.Height}, true: {info.Height, info.Width}} {
		mask := archivetest.MaskPNG(t, int(size[0]), int(size[1]), 9)
		path := archivetest.WriteFile(t, "a.tar",
			archivetest.Tar(t, archivetest.Member{Name: "a.jpg", Data: string(file)},
				archivetest.Member{Name: "a.png", Data: string(mask)}))
		l, err := Open(path, Options{Transform: Transform{Size: 8, Resize: 8,
			ApplyEXIFOrientation: upright}, Masks: Masks{Image: "*.jpg", Mask: "*.png"}, NoIndex: true})
		if err != nil {
			t.Fatal(err)
		}
		for b, err := range l.Epoch(t.Context(), 0) {
			if err != nil || b.N != 1 {
				t.Errorf("upright %v: %v, want no error, b.N = 1", upright, err)
			}
		}
		l.Close()
	}
}

// TestMaskedEpochsResume: a resumed epoch has the bytes of an uninterrupted one. A state records
// its masks, and a loader with masks refuses a state of a loader without masks.
func TestMaskedEpochsResume(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, scenes(t, 21)...)))
	o := Options{BatchSize: 4, Transform: Transform{Size: 16, RandomResizedCrop: true, FlipP: 0.5},
		Masks: sceneMasks, Shuffle: true, NoIndex: true}
	open := func(o Options) *Loader {
		l, err := Open(path, o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	var all [][]byte
	var states []State
	for b, err := range open(o).Epoch(t.Context(), 1) {
		if err != nil {
			t.Fatal(err)
		}
		all, states = append(all, slices.Concat(b.Images, b.Masks)), append(states, b.State)
	}
	state := throughJSON(t, states[1])
	again := open(o)
	if err := again.Restore(t.Context(), state); err != nil {
		t.Fatal(err)
	}
	var rest [][]byte
	for b, err := range again.Epoch(t.Context(), 1) {
		if err != nil {
			t.Fatal(err)
		}
		rest = append(rest, slices.Concat(b.Images, b.Masks))
	}
	if !slices.EqualFunc(rest, all[2:], bytes.Equal) {
		t.Errorf("the resumed epoch has %d batches with other bytes, want the last %d of the whole epoch",
			len(rest), len(all[2:]))
	}
	for name, change := range map[string]func(o *Options){
		"Masks": func(o *Options) { o.Masks.Fill = 3 }, "names": func(o *Options) { o.Masks = Masks{} },
	} {
		other := o
		change(&other)
		if err := open(other).Restore(t.Context(), state); err == nil {
			t.Errorf("%s: a state of other masks is accepted, want an error", name)
		}
	}
	plain := o
	plain.Masks = Masks{}
	if list := open(plain).fingerprint("permuted"); list["Masks"] != "" {
		t.Errorf("the fingerprint of a loader without masks has Masks %q, want none", list["Masks"])
	}
}

// TestMaskIndexServesAllPatterns: a loader with other patterns uses the index file unchanged.
// Without Options.Masks, InspectIndex refuses it.
func TestMaskIndexServesAllPatterns(t *testing.T) {
	o := Options{BatchSize: 4, Transform: Transform{Size: 16, Resize: 16}, Masks: sceneMasks}
	other := o
	other.Masks.Image = "set/images/*.*"
	checkPairIndex(t, scenes(t, 9), "Options.Masks", o, other)
}

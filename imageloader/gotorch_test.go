package imageloader

import (
	"archive/tar"
	"bytes"
	"errors"
	"image"
	"image/color"
	"io"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// TestGoTorchDefects covers the defects that go-torch's loader, the predecessor of this one, had in
// reading archives. Each subtest is named for a defect, and shows that this loader does not have
// it.
func TestGoTorchDefects(t *testing.T) {
	member := func(name string) archivetest.Member {
		return archivetest.Member{Name: name, Data: archivetest.Image(name)}
	}
	load := func(t *testing.T, name string, data []byte, o Options) (*Loader, []copied, error) {
		t.Helper()
		o.Transform = Eval(4, 4)
		o.NoIndex = true
		l, err := open(t.Context(), archivetest.WriteFile(t, name, data), o, openFile, fakeCodec{})
		if err != nil {
			return nil, nil, err
		}
		t.Cleanup(func() { l.Close() })
		got, err := collect(t, l, 0, 2)
		return l, got, err
	}
	t.Run("a class that is not in the vocabulary becomes label 0", func(t *testing.T) {
		data := archivetest.Gzip(t, archivetest.Tar(t, member("a/1.png"), member("new/2.png")))
		_, got, err := load(t, "a.tgz", data, Options{BatchSize: 1, Classes: []string{"b", "a"}})
		var unknown *UnknownClassError
		if !errors.As(err, &unknown) || unknown.Class != "new" || len(got) != 1 || got[0].labels[0] != 1 {
			t.Errorf("%d batches, error %v, want an error of type *UnknownClassError, unknown.Class = "+
				"%q, len(got) = 1, got[0].labels[0] = 1", len(got), err, "new")
		}
	})
	t.Run("ids are in order of first appearance", func(t *testing.T) {
		one, _, err1 := load(t, "a.tgz",
			archivetest.Gzip(t, archivetest.Tar(t, member("b/1.png"), member("a/1.png"))), Options{})
		two, _, err2 := load(t, "b.tgz",
			archivetest.Gzip(t, archivetest.Tar(t, member("a/1.png"), member("b/1.png"))), Options{})
		if err1 != nil || err2 != nil || strings.Join(one.Classes(), " ") != "a b" ||
			strings.Join(two.Classes(), " ") != "a b" {
			t.Errorf("%v, %v", err1, err2)
		}
	})
	t.Run("any junk file makes a class, and a file at the root class dot", func(t *testing.T) {
		junk := []archivetest.Member{{Name: "README", Data: "x"}, {Name: "docs/README", Data: "x"},
			{Name: ".DS_Store", Data: "x"}, member("root.png"), member("a/1.png")}
		l, got, err := load(t, "a.tar", archivetest.Tar(t, junk...), Options{})
		if err != nil || strings.Join(l.Classes(), " ") != "a" || len(names(got)) != 1 {
			t.Errorf("classes %v, samples %v, error %v", l.Classes(), names(got), err)
		}
	})
	t.Run("a buffer of 0 panics", func(t *testing.T) {
		_, got, err := load(t, "a.tgz",
			archivetest.Gzip(t, archivetest.Tar(t, member("a/1.png"), member("a/2.png"))),
			Options{Shuffle: true, ShuffleBuffer: 0, ShuffleBytes: 1})
		if err != nil || len(names(got)) != 2 {
			t.Errorf("error %v, want no error, 2 samples", err)
		}
	})
	t.Run("a read error hangs, and drops the good batches before it", func(t *testing.T) {
		archivetest.Within(t)
		var members []archivetest.Member
		for i := range 53 {
			members = append(members, archivetest.Member{Name: "a/" + string(rune('A'+i)) + ".png",
				Data: archivetest.Image(strings.Repeat(string(rune('A'+i)), 700))})
		}
		for _, at := range []int{0, 5, 30, 52} {
			cut := archivetest.Tar(t, members...)[:at*1536+600]
			_, got, err := load(t, "a.tgz", archivetest.Gzip(t, cut), Options{BatchSize: 8, Classes: []string{"a"}})
			if !errors.Is(err, io.ErrUnexpectedEOF) || len(names(got)) != at {
				t.Errorf("cut off in member %d: %d samples, error %v, want the error %v, "+
					"%v samples", at, len(names(got)), err, io.ErrUnexpectedEOF, at)
			}
		}
	})
	t.Run("an undecodable image ends the process", func(t *testing.T) {
		_, got, err := load(t, "a.tgz",
			archivetest.Gzip(t, archivetest.Tar(t, member("a/1.png"),
				archivetest.Member{Name: "a/2.png", Data: archivetest.Image("BAD")})), Options{BatchSize: 1})
		var bad *SampleError
		if !errors.As(err, &bad) || bad.Name != "a/2.png" || len(got) != 1 {
			t.Errorf("%d batches, error %v, want an error of type *SampleError, bad.Name = %q, len(got) "+
				"= 1", len(got), err, "a/2.png")
		}
	})
	t.Run("the tar file is never closed, an abandoned loader never freed", func(t *testing.T) {
		archivetest.NoLeaks(t)
		l, err := open(t.Context(),
			archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Images(t, 60, nil))),
			Options{BatchSize: 2, Transform: Eval(4, 4)}, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range l.Epoch(t.Context(), 0) {
			if err != nil {
				t.Error(err)
			}
			break
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Run("plain tar and zstd are rejected", func(t *testing.T) {
		data := archivetest.Tar(t, member("a/1.png"))
		for name, data := range map[string][]byte{"a.tar": data, "a.tgz": data, "a.zip": archivetest.Zstd(t, data)} {
			if _, got, err := load(t, name, data, Options{}); err != nil || len(names(got)) != 1 {
				t.Errorf("%s: error %v, want no error, 1 samples", name, err)
			}
		}
	})
	t.Run("archives of bsdtar are unreadable", func(t *testing.T) {
		var b strings.Builder
		w := tar.NewWriter(&b)
		for _, h := range []*tar.Header{
			{Name: "a/._1.png", Size: 4, Format: tar.FormatPAX,
				PAXRecords: map[string]string{"LIBARCHIVE.xattr.com.apple.x": "eA", "SCHILY.xattr.x": "y"}},
			{Name: "a/1.png", Size: int64(len(archivetest.Image(""))), Format: tar.FormatPAX,
				PAXRecords: map[string]string{"LIBARCHIVE.creationtime": "1"}},
		} {
			h.Typeflag = tar.TypeReg
			if err := w.WriteHeader(h); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(w,
				map[bool]string{true: "\x00\x05\x16\x07", false: archivetest.Image("")}[h.Size == 4]); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		l, got, err := load(t, "a.tgz", archivetest.Gzip(t, []byte(b.String())), Options{BadSamples: Skip})
		if err != nil || len(names(got)) != 1 || l.Stats().Bad != 0 || l.Stats().Ignored != 1 {
			t.Errorf("%v, %d bad, %d ignored, error %v, want 1 image and 1 ignored", names(got),
				l.Stats().Bad, l.Stats().Ignored, err)
		}
	})
}

// TestGoTorchTransformDefects covers the defects of go-torch's images and transforms. Each subtest
// shows that this loader does not have the defect.
func TestGoTorchTransformDefects(t *testing.T) {
	// quarters returns an image whose red is 255 in the upper half, and whose green is 255 in the
	// right half.
	quarters := func(w, h int) image.Image {
		m := image.NewRGBA(image.Rect(0, 0, w, h))
		for y := range h {
			for x := range w {
				c := color.RGBA{0, 0, 0, 255}
				if y < h/2 {
					c.R = 255
				}
				if x >= w/2 {
					c.G = 255
				}
				m.SetRGBA(x, y, c)
			}
		}
		return m
	}
	load := func(t *testing.T, o Options, images ...image.Image) ([]copied, error) {
		t.Helper()
		var members []archivetest.Member
		for i, m := range images {
			members = append(members, archivetest.Member{Name: "a/" + string(rune('A'+i)) + ".png",
				Data: archivetest.PNG(t, m)})
		}
		o.NoIndex = true
		l, err := Open(archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, members...))), o)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		return collect(t, l, 0, 2)
	}
	at := func(b copied, i, size, x, y int) [2]byte { // red: the upper half; green: the right half
		p := b.images[3*((i*size+y)*size+x):]
		return [2]byte{p[0], p[1]}
	}
	t.Run("mixed sizes become that of the first image", func(t *testing.T) {
		got, err := load(t, Options{BatchSize: 3, Transform: Eval(8, 8)}, quarters(20, 20),
			quarters(90, 40), quarters(40, 90))
		if err != nil || len(got) != 1 || len(got[0].images) != 3*3*8*8 {
			t.Fatalf("%d batches, error %v, want no error, len(got) = 1, len(got[0].images) = %v",
				len(got), err, 3*3*8*8)
		}
		for i := range 3 {
			if at(got[0], i, 8, 0, 0) != [2]byte{255, 0} || at(got[0], i, 8, 7, 7) != [2]byte{0, 255} {
				t.Errorf("image %d: %v and %v", i, at(got[0], i, 8, 0, 0), at(got[0], i, 8, 7, 7))
			}
		}
	})
	// the aspect is kept: the outer columns are cut off
	t.Run("Resize makes a square of any image", func(t *testing.T) {
		m := image.NewRGBA(image.Rect(0, 0, 300, 100))
		for i := range m.Pix {
			m.Pix[i] = 255
		}
		for y := range 100 {
			for x := range 90 {
				m.SetRGBA(x, y, color.RGBA{0, 0, 0, 255})
				m.SetRGBA(299-x, y, color.RGBA{0, 0, 0, 255})
			}
		}
		got, err := load(t, Options{BatchSize: 1, Transform: Eval(10, 10)}, m)
		if err != nil || at(got[0], 0, 10, 0, 5) != [2]byte{255, 255} || at(got[0], 0, 10, 9, 5) != [2]byte{255, 255} {
			t.Errorf("error %v", err)
		}
	})
	t.Run("an image smaller than the crop ends the process", func(t *testing.T) {
		for _, small := range []Transform{Eval(64, 64), {Size: 64, Resize: 70, RandomCrop: true}, Train(64)} {
			got, err := load(t, Options{BatchSize: 2, Transform: small}, quarters(1, 1), quarters(5, 2))
			if err != nil || len(got) != 1 || len(got[0].samples) != 2 {
				t.Errorf("%+v: %d batches, error %v, want no error, len(got) = 1, len(got[0].samples) = 2",
					small, len(got), err)
			}
		}
	})
	t.Run("flip axes are swapped", func(t *testing.T) {
		for name, c := range map[string]struct {
			change func(*Transform)
			want   [2]byte // the upper left corner
		}{
			"none":       {func(*Transform) {}, [2]byte{255, 0}},
			"FlipP":      {func(x *Transform) { x.FlipP = 1 }, [2]byte{255, 255}},
			"horizontal": {func(x *Transform) { x.Ops = []transform.Op{transform.RandomHorizontalFlip{P: 1}} }, [2]byte{255, 255}},
			"vertical":   {func(x *Transform) { x.Ops = []transform.Op{transform.RandomVerticalFlip{P: 1}} }, [2]byte{0, 0}},
			"vertical, inside": {func(x *Transform) {
				x.Ops = []transform.Op{transform.RandomApply{Ops: []transform.Op{transform.RandomVerticalFlip{P: 1}}, P: 1}}
			}, [2]byte{0, 0}},
		} {
			flipped := Eval(16, 16)
			c.change(&flipped)
			got, err := load(t, Options{BatchSize: 1, Transform: flipped}, quarters(16, 16))
			if err != nil || at(got[0], 0, 16, 1, 1) != c.want {
				t.Errorf("%s: %v, error %v", name, at(got[0], 0, 16, 1, 1), err)
			}
		}
	})
	t.Run("RandomResizedCrop ignores its scale and ratio", func(t *testing.T) {
		train := Train(224)
		crop := func(rng *rand.Rand, side int32) (g imagecapi.Geometry) {
			compiled, err := transform.Compile(train)
			if err != nil {
				t.Fatal(err)
			}
			if err := compiled.Geometry(rng, &imagecapi.Info{Width: side, Height: side}, &g); err != nil {
				t.Fatal(err)
			}
			return g
		}
		rng := rand.New(rand.NewPCG(1, 2))
		low, high, narrow, wide := 1., 0., 1., 1.
		for range 20_000 {
			g := crop(rng, 2000)
			share, ratio := float64(g.CropWidth)*float64(g.CropHeight)/4e6, float64(g.CropWidth)/float64(g.CropHeight)
			low, high, narrow, wide = min(low, share), max(high, share), min(narrow, ratio), max(wide, ratio)
		}
		if low < 0.0799 || low > 0.081 || high < 0.97 || high > 1 || narrow < 0.749 || narrow > 0.752 ||
			wide > 1.335 || wide < 1.33 {
			t.Errorf("scale %v to %v, ratio %v to %v", low, high, narrow, wide)
		}
		train.Scale = [2]float64{1, 1}
		train.Ratio = [2]float64{1, 1}
		if g := crop(rng, 300); g.CropX != 0 || g.CropY != 0 || g.CropWidth != 300 || g.CropHeight != 300 {
			t.Errorf("scale 1 gives %d x %d at %d, %d, want g.CropX = 0, g.CropY = 0, g.CropWidth = "+
				"300, g.CropHeight = 300", g.CropWidth, g.CropHeight, g.CropX, g.CropY)
		}
	})
	t.Run("a standard deviation of 0, and a batch size below 1, are accepted", func(t *testing.T) {
		path := archivetest.WriteFile(t, "a.tar",
			archivetest.Tar(t, archivetest.Member{Name: "a/1.png", Data: archivetest.Image("x")}))
		for name, o := range map[string]Options{"std": {Transform: Transform{Mean: [3]float32{1, 1, 1},
			Std: [3]float32{1, 0, 1}}}, "batch": {BatchSize: -1}} {
			if _, err := Open(path, o); err == nil {
				t.Errorf("%s: got no error, want one", name)
			}
		}
	})
	t.Run("two loaders disturb each other's random numbers", func(t *testing.T) {
		path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Images(t, 60, nil)))
		o := Options{BatchSize: 8, Transform: Train(4), Shuffle: true, Seed: 3}
		other := o
		other.Seed = 4
		want, err := collect(t, openFake(t, path, o), 1, 2)
		if err != nil {
			t.Fatal(err)
		}
		next, stop := iter.Pull2(openFake(t, path, other).Epoch(t.Context(), 1))
		defer stop()
		var got []copied
		for b, err := range openFake(t, path, o).Epoch(t.Context(), 1) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, copied{bytes.Clone(b.Images), slices.Clone(b.Labels), slices.Clone(b.Samples)})
			next()
		}
		if got, want := digest(got), digest(want); got != want {
			t.Errorf("digest of an epoch during another loader's epoch = %s, want %s", got, want)
		}
	})
}

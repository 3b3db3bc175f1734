package transform

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/order"
)

func TestShortSide(t *testing.T) {
	for _, c := range [][5]int{ // width, height, Resize's size, new width, new height
		{500, 375, 256, 341, 256}, {375, 500, 256, 256, 341}, {256, 256, 256, 256, 256},
		{333, 500, 256, 256, 384}, {499, 334, 256, 382, 256}, {1, 1, 256, 256, 256},
		{640, 427, 232, 347, 232}, {427, 640, 235, 235, 352}, {1024, 683, 224, 335, 224},
		{683, 1024, 96, 96, 143}, {101, 77, 64, 83, 64}, {77, 101, 33, 33, 43},
	} {
		t.Run(fmt.Sprintf("%dx%d to %d", c[0], c[1], c[2]), func(t *testing.T) {
			if w, h := shortSide(int32(c[0]), int32(c[1]), c[2]); w != c[3] || h != c[4] {
				t.Errorf("%d x %d, want %d x %d", w, h, c[3], c[4])
			}
		})
	}
}

func TestCentre(t *testing.T) {
	for _, c := range [][3]int{ // side, CenterCrop's size, its offset
		{256, 224, 16}, {257, 224, 16}, {259, 224, 18}, {341, 224, 58}, {343, 224, 60}, {225, 224, 0},
		{227, 224, 2}, {224, 224, 0}, {97, 64, 16},
	} {
		t.Run(fmt.Sprintf("%d of %d", c[1], c[0]), func(t *testing.T) {
			if got := centre(c[0], c[1]); got != int32(c[2]) {
				t.Errorf("at %d, want %d", got, c[2])
			}
		})
	}
}

func share(at, room int32) float64 {
	if room == 0 {
		return 0.5
	}
	return float64(at) / float64(room)
}

// TestRandomResizedCrop compares the distributions of 100,000 boxes and of 100,000 boxes of
// torchvision's RandomResizedCrop.get_params.
func TestRandomResizedCrop(t *testing.T) {
	type moments struct{ mean, std float64 }
	usual, usualRatio := [2]float64{0.08, 1}, [2]float64{3. / 4, 4. / 3}
	for _, c := range []struct {
		width, height int32
		scale, ratio  [2]float64
		area          moments  // share of the image
		logRatio      moments  // log(width / height)
		x, y          moments  // position among the possible ones, 0 to 1
		widths        [5]int32 // the 5, 25, 50, 75, 95 % quantiles
	}{
		{500, 375, usual, usualRatio, moments{0.43381, 0.21711}, moments{0.03096, 0.16393},
			moments{0.49868, 0.29024}, moments{0.49942, 0.29684}, [5]int32{145, 215, 279, 344, 431}},
		{64, 480, usual, usualRatio, moments{0.14663, 0.03566}, moments{-0.18, 0.15263},
			moments{0.49995, 0.23278}, moments{0.49909, 0.19989}, [5]int32{49, 58, 64, 64, 64}},
		// never fits
		{900, 90, [2]float64{0.5, 1}, usualRatio, moments{0.13333, 0}, moments{0.28768, 0}, moments{0.5, 0},
			moments{0.5, 0}, [5]int32{120, 120, 120, 120, 120}},
		{100, 100, [2]float64{0.3, 0.3}, [2]float64{0.5, 2}, moments{0.29999, 0.00236},
			moments{-0.00137, 0.40063}, moments{0.50118, 0.29558}, moments{0.50093, 0.29543},
			[5]int32{40, 46, 55, 65, 75}},
		{31, 57, [2]float64{0.01, 0.9}, [2]float64{1, 1}, moments{0.28663, 0.15927}, moments{0, 0},
			moments{0.49983, 0.33179}, moments{0.50256, 0.29724}, [5]int32{8, 16, 23, 27, 31}},
	} {
		t.Run(fmt.Sprintf("%dx%d", c.width, c.height), func(t *testing.T) {
			const n = 100_000
			transform := Transform{RandomResizedCrop: true, Size: 224, Scale: c.scale, Ratio: c.ratio,
				FlipP: 0.5}.withDefaults()
			var source rand.PCG
			rng := rand.New(&source)
			var area, logRatio, x, y []float64
			var widths []int32
			flips := 0
			for i := range n {
				// as the loader does: consecutive indices must be independent
				order.Seed(&source, 5, order.OfSample, 0, i)
				var g imagecapi.Geometry
				if err := transform.geometry(rng, c.width, c.height, &g); err != nil {
					t.Fatal(err)
				}
				if g.CropX < 0 || g.CropY < 0 || g.CropWidth < 1 || g.CropHeight < 1 ||
					g.CropX+g.CropWidth > c.width || g.CropY+g.CropHeight > c.height {
					t.Fatalf("%+v is not inside %d x %d", g, c.width, c.height)
				}
				area = append(area, float64(g.CropWidth)*float64(g.CropHeight)/float64(c.width)/float64(c.height))
				logRatio = append(logRatio, math.Log(float64(g.CropWidth)/float64(g.CropHeight)))
				x, y = append(x, share(g.CropX, c.width-g.CropWidth)), append(y, share(g.CropY, c.height-g.CropHeight))
				widths = append(widths, g.CropWidth)
				if g.Flip {
					flips++
				}
			}
			for _, d := range []struct {
				name   string
				values []float64
				want   moments
			}{{"area", area, c.area}, {"log ratio", logRatio, c.logRatio}, {"x", x, c.x}, {"y", y, c.y}} {
				mean, std := meanStd(d.values)
				// Both sides are estimates: 5 standard errors of their difference, and 2 % of the
				// deviation.
				if math.Abs(mean-d.want.mean) > 5*d.want.std*math.Sqrt(2./n)+2e-5 ||
					math.Abs(std-d.want.std) > 0.02*d.want.std+2e-5 {
					t.Errorf("%s has mean %.5f and deviation %.5f, want %.5f and %.5f", d.name, mean, std,
						d.want.mean, d.want.std)
				}
			}
			slices.Sort(widths)
			for i, q := range []float64{0.05, 0.25, 0.5, 0.75, 0.95} {
				if got := widths[int(q*n)]; got < c.widths[i]-1-c.width/250 || got > c.widths[i]+1+c.width/250 {
					t.Errorf("quantile %v of the width is %d, want %d", q, got, c.widths[i])
				}
			}
			if math.Abs(float64(flips)/n-0.5) > 0.008 {
				t.Errorf("%d of %d are flipped", flips, n)
			}
		})
	}
}

// TestRandomResizedCropDistribution compares 100,000 draws with torchvision's theoretical
// distributions. On a large image that every box fits in, they are uniform up to rounding to whole
// pixels.
func TestRandomResizedCropDistribution(t *testing.T) {
	transform := Train(224)
	transform.Scale = [2]float64{0.08, 0.5}
	var source rand.PCG
	rng := rand.New(&source)
	values := make([][]float64, 4)
	for i := range manyDraws {
		order.Seed(&source, 5, order.OfSample, 3, i)
		x, y, w, h := transform.randomBox(rng, 8000, 8000)
		for k, v := range []float64{float64(w) * float64(h) / 64e6, math.Log(float64(w) / float64(h)),
			float64(x) / float64(8000-w), float64(y) / float64(8000-h)} {
			values[k] = append(values[k], v)
		}
	}
	for k, cdf := range []func(float64) float64{uniformCDF(0.08, 0.5),
		uniformCDF(math.Log(3./4), math.Log(4./3)), uniformCDF(0, 1), uniformCDF(0, 1)} {
		if d := kolmogorov(values[k], cdf); d > ksLimit {
			t.Errorf("%s: the distribution is off by %.4f, want at most %.4f",
				[]string{"scale", "ratio", "x", "y"}[k], d, ksLimit)
		}
	}
}

// TestFlip: the flip is drawn with its probability, and changes nothing else.
func TestFlip(t *testing.T) {
	for _, p := range []float64{0, 0.25, 1} {
		t.Run(fmt.Sprint(p), func(t *testing.T) {
			transform := Train(64)
			plain := transform
			transform.FlipP, plain.FlipP = p, 0
			var source rand.PCG
			rng := rand.New(&source)
			flips := 0
			for i := range 20_000 {
				var g, h imagecapi.Geometry
				order.Seed(&source, 5, order.OfSample, 3, i)
				if err := transform.geometry(rng, 300, 200, &g); err != nil {
					t.Fatal(err)
				}
				order.Seed(&source, 5, order.OfSample, 3, i)
				if err := plain.geometry(rng, 300, 200, &h); err != nil {
					t.Fatal(err)
				}
				if g.Flip {
					flips++
				}
				if g.Flip = false; g != h {
					t.Fatalf("sample %d: %+v and %+v", i, g, h)
				}
			}
			if got := float64(flips) / 20_000; math.Abs(got-p) > 0.02 || p == 0 && flips != 0 || p == 1 &&
				flips != 20_000 {
				t.Errorf("flipped %v", got)
			}
		})
	}
}

func TestRandomCropOfResize(t *testing.T) {
	transform := Transform{Size: 20, Resize: 24, RandomCrop: true}.withDefaults()
	var source rand.PCG
	rng := rand.New(&source)
	var x, y []float64
	for i := range manyDraws {
		order.Seed(&source, 5, order.OfSample, 0, i)
		var g imagecapi.Geometry
		if err := transform.geometry(rng, 50, 40, &g); err != nil {
			t.Fatal(err)
		}
		if g.ResizeWidth != 30 || g.ResizeHeight != 24 || g.WindowWidth != 20 || g.WindowHeight != 20 {
			t.Fatalf("%+v, want g.ResizeWidth = 30, g.ResizeHeight = 24, g.WindowWidth = 20, "+
				"g.WindowHeight = 20", g)
		}
		x, y = append(x, float64(g.WindowX)), append(y, float64(g.WindowY))
	}
	if d := kolmogorov(x, stepsCDF(0, 10)); d > ksLimit {
		t.Errorf("x is off by %v, want at most %v", d, ksLimit)
	}
	if d := kolmogorov(y, stepsCDF(0, 4)); d > ksLimit {
		t.Errorf("y is off by %v, want at most %v", d, ksLimit)
	}
}

// TestGeometryOfTurnedImage: if an image is stored on its side, its crop is drawn in the upright
// frame.
func TestGeometryOfTurnedImage(t *testing.T) {
	compiled, err := Compile(Transform{Size: 8, RandomResizedCrop: true, ApplyEXIFOrientation: true})
	if err != nil {
		t.Fatal(err)
	}
	info := imagecapi.Info{Width: 40, Height: 30, Orientation: 6}
	var g, h imagecapi.Geometry
	if err := compiled.Geometry(rand.New(rand.NewPCG(1, 2)), &info, &g); err != nil {
		t.Fatal(err)
	}
	if err := compiled.t.geometry(rand.New(rand.NewPCG(1, 2)), 30, 40, &h); err != nil {
		t.Fatal(err)
	}
	if h.Orientation = 6; g != h {
		t.Errorf("%+v, want %+v", g, h)
	}
}

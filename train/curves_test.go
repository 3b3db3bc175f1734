package train

import (
	"bytes"
	"encoding/json"
	"image"
	"image/color"
	"image/png"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/image/vector"
)

func has(img image.Image, c color.RGBA) bool {
	b := img.Bounds()
	for y := b.Min.Y; y < b.Max.Y; y++ {
		for x := b.Min.X; x < b.Max.X; x++ {
			if r, g, b, _ := img.At(x, y).RGBA(); uint8(r>>8) == c.R && uint8(g>>8) == c.G && uint8(b>>8) == c.B {
				return true
			}
		}
	}
	return false
}

// The picture has a panel for each metric, and one curve each for training and evaluation.
func TestCurves(t *testing.T) {
	classifier := func(loss, top1 float64) *Metrics { return &Metrics{Loss: loss, Top1: top1, Classes: 3} }
	for name, c := range map[string]struct {
		epochs []Epoch
		panels int
		eval   bool
	}{
		"a classifier with evaluation": {[]Epoch{{Epoch: 1, Train: classifier(2, 0.1),
			Eval: classifier(3, 0.2)}, {Epoch: 2, Train: classifier(1, 0.6), Eval: classifier(2, 0.5)}}, 2, true},
		"no classes": {[]Epoch{{Epoch: 1, Train: &Metrics{Loss: 2}},
			{Epoch: 2, Train: &Metrics{Loss: 1}}}, 1, false},
		"one epoch": {[]Epoch{{Epoch: 1, Train: &Metrics{Loss: 2}}}, 1, false},
		"not finite": {[]Epoch{{Epoch: 1, Train: &Metrics{Loss: math.Inf(1)}},
			{Epoch: 2, Train: &Metrics{Loss: 7}}}, 1, false},
		"never finite": {[]Epoch{{Epoch: 1, Train: &Metrics{Loss: math.NaN()},
			Eval: &Metrics{Loss: 1}}}, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			var file bytes.Buffer
			if err := writeCurves(&file, c.epochs); err != nil {
				t.Fatal(err)
			}
			img, err := png.Decode(&file)
			if err != nil {
				t.Fatal(err)
			}
			if got := img.Bounds(); got != image.Rect(0, 0, c.panels*panelWidth, panelHeight) {
				t.Errorf("the image's bounds are %v, want %d panels of %d x %d", got, c.panels, panelWidth,
					panelHeight)
			}
			training, eval := has(img, curveTrain), has(img, curveEval)
			if name != "never finite" && !training || eval != c.eval {
				t.Errorf("has a training curve %v and an evaluation curve %v, want true and %v", training,
					eval, c.eval)
			}
		})
	}
}

func TestTicks(t *testing.T) {
	for _, c := range []struct {
		low, high float64
		count     int
		want      []float64
	}{
		{0, 1, 5, []float64{0, 0.2, 0.4, 0.6000000000000001, 0.8, 1}}, {0, 9, 5, []float64{0, 2, 4, 6, 8}},
		{3, 3, 5, []float64{3}}, {0, 100, 5, []float64{0, 20, 40, 60, 80, 100}},
		{0.5, 2.6, 5, []float64{0.5, 1, 1.5, 2, 2.5}},
	} {
		if got := ticks(c.low, c.high, c.count); !slices.Equal(got, c.want) {
			t.Errorf("ticks from %v to %v: %v, want %v", c.low, c.high, got, c.want)
		}
	}
}

// The loss axis has at least three marks, and they enclose the curves, even if there are only two
// round numbers between the losses.
func TestLossAxisEnclosesTheCurves(t *testing.T) {
	for _, c := range []struct{ values, want []float64 }{
		{[]float64{0.9, 1.95}, []float64{0.5, 1, 1.5, 2}}, {[]float64{2.31, 0.02}, []float64{0, 0.5, 1, 1.5, 2, 2.5}},
		{[]float64{1, 1}, []float64{0, 0.5, 1, 1.5, 2}}, {[]float64{0, 5}, []float64{0, 1, 2, 3, 4, 5}},
		{[]float64{math.NaN()}, []float64{0, 0.2, 0.4, 0.6000000000000001, 0.8, 1}},
		{[]float64{9.65, 10.58}, []float64{9.600000000000001, 9.8, 10, 10.200000000000001, 10.4,
			10.600000000000001}}, {[]float64{2e16, 2e16 + 4}, []float64{2e16, 2e16, 2e16 + 2, 2e16 + 4, 2e16 + 4}},
		{[]float64{-1.7e308, 1.7e308}, []float64{-1.7e308, 1.7e308}},
	} {
		if got, n := (panel{curves: []curve{{values: c.values}}}).axis(); !slices.Equal(got, c.want) ||
			n != len(c.values) {
			t.Errorf("losses %v have an axis with the marks %v, want %v", c.values, got, c.want)
		}
	}
}

// ticks terminates even for numbers so large that adding the step changes nothing.
func TestTicksOfLargeNumbers(t *testing.T) {
	if got := ticks(2e16, 2e16+4, 5); len(got) == 0 || len(got) > 6 {
		t.Errorf("%v, want len(got) at least 1, len(got) at most 6", got)
	}
}

// If a resumed run adds an evaluation, its curve starts at the first epoch that was evaluated.
func TestCurvesBeginLate(t *testing.T) {
	m := &Metrics{Loss: 2}
	loss := panels([]Epoch{{Epoch: 1, Train: m}, {Epoch: 2, Train: m}, {Epoch: 3, Train: m, Eval: m}})[0]
	if v := loss.curves[1].values; len(v) != 3 || !math.IsNaN(v[0]) || !math.IsNaN(v[1]) || v[2] != 2 {
		t.Errorf("the evaluation's curve is %v", v)
	}
}

// A checkpoint is refused if its epochs lack metrics, because the comparison of epochs needs them.
// It is also refused if its epochs do not match its position.
func TestSavedEpochsAreChecked(t *testing.T) {
	complete := []Epoch{{Epoch: 1, Best: true, Train: &Metrics{Loss: 1}}}
	good := saved{Version: version, At: position{Epoch: 1}, Epochs: complete}
	if err := good.check(); err != nil {
		t.Error(err)
	}
	for name, s := range map[string]saved{
		"without metrics": {Version: version, At: position{Epoch: 1}, Epochs: []Epoch{{Epoch: 1, Best: true}}},
		"too few":         {Version: version, At: position{Epoch: 2}, Epochs: complete},
	} {
		if err := s.check(); err == nil {
			t.Errorf("%s: epochs are accepted, want an error", name)
		}
	}
}

// An earlier program called the rate images_per_second.
func TestFormerNameOfRateIsRead(t *testing.T) {
	for _, text := range []string{
		`{"version": 2, "epochs": [{"epoch": 3, "steps": 7, "train": {}, "images_per_second": 12.5, "seconds": 2}]}`,
		`{"version": 2, "epochs": [{"epoch": 3, "steps": 7, "train": {}, "samples_per_second": 12.5, "seconds": 2}]}`,
	} {
		var s saved
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			t.Fatal(err)
		}
		if e := s.Epochs[0]; e.SamplesPerSecond != 12.5 || e.Epoch != 3 || e.Steps != 7 || e.Seconds != 2 || e.Train == nil {
			t.Errorf("%s: got %+v, want epoch 3, 7 steps, 12.5 samples/s, 2 s and metrics", text, e)
		}
	}
	text, err := json.Marshal(Epoch{SamplesPerSecond: 12.5})
	if err != nil || bytes.Contains(text, []byte("images")) || !bytes.Contains(text, []byte(`"samples_per_second":12.5`)) {
		t.Errorf("an epoch is written as %s, %v, want samples_per_second alone", text, err)
	}
}

// A line has the pixels of a drawing of the whole picture, up to the rounding of its coverage, also
// if it leaves the picture.
func TestLineIsDrawnWhole(t *testing.T) {
	whole := func(canvas *image.RGBA, x0, y0, x1, y1, width float64, c color.RGBA) {
		length := math.Hypot(x1-x0, y1-y0)
		dx, dy := (y1-y0)/length*width/2, (x0-x1)/length*width/2
		r := vector.NewRasterizer(canvas.Bounds().Dx(), canvas.Bounds().Dy())
		r.MoveTo(float32(x0+dx), float32(y0+dy))
		r.LineTo(float32(x1+dx), float32(y1+dy))
		r.LineTo(float32(x1-dx), float32(y1-dy))
		r.LineTo(float32(x0-dx), float32(y0-dy))
		r.ClosePath()
		r.Draw(canvas, canvas.Bounds(), image.NewUniform(c), image.Point{})
	}
	rng := rand.New(rand.NewPCG(4, 4))
	const wide, high, most = 300, 200, 2 // most is the largest difference of a colour's level
	for range 200 {
		x0, y0 := rng.Float64()*1.5*wide-wide/4, rng.Float64()*1.5*high-high/4
		x1, y1, width := rng.Float64()*1.5*wide-wide/4, rng.Float64()*1.5*high-high/4, 1+4*rng.Float64()
		switch rng.IntN(4) {
		case 0:
			x1 = x0
		case 1:
			y1 = y0
		}
		got, want := image.NewRGBA(image.Rect(0, 0, wide, high)), image.NewRGBA(image.Rect(0, 0, wide, high))
		line(got, x0, y0, x1, y1, width, curveTrain)
		whole(want, x0, y0, x1, y1, width, curveTrain)
		for i := range got.Pix {
			if d := int(got.Pix[i]) - int(want.Pix[i]); d > most || d < -most {
				t.Fatalf("line from %v, %v to %v, %v of width %v: byte %d is %d, want %d", x0, y0, x1, y1, width, i,
					got.Pix[i], want.Pix[i])
			}
		}
	}
}

// BenchmarkCurves draws the curves of a long training, as each of its last epochs does.
func BenchmarkCurves(b *testing.B) {
	var epochs []Epoch
	for i := range 100 {
		m := &Metrics{Loss: 1 / float64(i+1), Top1: 1 - 1/float64(i+1), Classes: 2}
		epochs = append(epochs, Epoch{Epoch: i + 1, Train: m, Eval: m})
	}
	for b.Loop() {
		if err := writeCurves(io.Discard, epochs); err != nil {
			b.Fatal(err)
		}
	}
}

package train

import (
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"io"
	"math"
	"strconv"

	"golang.org/x/image/font"
	"golang.org/x/image/font/gofont/goregular"
	"golang.org/x/image/font/opentype"
	"golang.org/x/image/math/fixed"
	"golang.org/x/image/vector"
)

// Layout of the curves' picture: a panel for the loss and, for classifiers, one for
// top-1 or the mean average precision.
const (
	panelWidth, panelHeight         = 760, 520
	marginLeft, marginRight         = 110, 40
	marginTop, marginBottom         = 70, 70
	fontSize                        = 22
	lineWidth               float64 = 3
)

// The colours of training and evaluation also differ in greyscale.
var (
	curveInk   = color.RGBA{0x33, 0x33, 0x33, 0xff}
	curveGrid  = color.RGBA{0xdd, 0xdd, 0xdd, 0xff}
	curveTrain = color.RGBA{0xe6, 0x9f, 0x00, 0xff}
	curveEval  = color.RGBA{0x00, 0x45, 0x8b, 0xff}
)

// panel is a chart of curves over the epochs.
type panel struct {
	title  string
	curves []curve
	share  bool // the values are shares, from 0 to 1
}

type curve struct {
	name   string
	color  color.RGBA
	values []float64 // by epoch
}

// put sets the value of an epoch. Earlier epochs without a value leave a gap, for example those
// before a resume that added Config.Eval.
func (c *curve) put(epoch int, value float64) {
	for len(c.values) < epoch {
		c.values = append(c.values, math.NaN())
	}
	c.values = append(c.values, value)
}

// panels returns the charts of the epochs.
func panels(epochs []Epoch) []panel {
	loss := panel{title: "loss",
		curves: []curve{{name: "training", color: curveTrain}, {name: "evaluation", color: curveEval}}}
	top1 := panel{title: "top-1", share: true,
		curves: []curve{{name: "training", color: curveTrain}, {name: "evaluation", color: curveEval}}}
	precision := panel{title: "mean average precision", share: true,
		curves: []curve{{name: "evaluation", color: curveEval}}}
	classes, multi := false, false
	for at, e := range epochs {
		for i, m := range []*Metrics{e.Train, e.Eval} {
			if m == nil {
				continue
			}
			loss.curves[i].put(at, m.Loss)
			top1.curves[i].put(at, m.Top1)
			classes = classes || m.Classes > 0
		}
		if e.Eval != nil {
			precision.curves[0].put(at, e.Eval.MAP)
			multi = multi || e.Eval.MAP > 0
		}
	}
	switch {
	case multi:
		return []panel{loss, precision}
	case !classes:
		return []panel{loss}
	}
	return []panel{loss, top1}
}

// newFace returns the font of the pictures.
func newFace() (font.Face, error) {
	parsed, err := opentype.Parse(goregular.TTF)
	if err != nil {
		return nil, err
	}
	return opentype.NewFace(parsed, &opentype.FaceOptions{Size: fontSize, DPI: 72})
}

// writeCurves draws the epochs as a PNG.
func writeCurves(w io.Writer, epochs []Epoch) error {
	face, err := newFace()
	if err != nil {
		return err
	}
	defer face.Close()
	charts := panels(epochs)
	canvas := image.NewRGBA(image.Rect(0, 0, len(charts)*panelWidth, panelHeight))
	draw.Draw(canvas, canvas.Bounds(), image.White, image.Point{}, draw.Src)
	for i, p := range charts {
		p.draw(canvas, face, float64(i*panelWidth), epochs[0].Epoch)
	}
	return png.Encode(w, canvas)
}

// draw draws the panel at x. first is the number of the first epoch.
func (p panel) draw(canvas *image.RGBA, face font.Face, x float64, first int) {
	marks, n := p.axis()
	low, high := marks[0], marks[len(marks)-1]
	left, right := x+marginLeft, x+panelWidth-marginRight
	top, bottom := float64(marginTop), float64(panelHeight-marginBottom)
	at := func(epoch int, v float64) (float64, float64) {
		share := 0.5
		if n > 1 {
			share = float64(epoch) / float64(n-1)
		}
		return left + share*(right-left), bottom - (v-low)/(high-low)*(bottom-top)
	}
	for _, v := range marks {
		_, y := at(0, v)
		line(canvas, left, y, right, y, 1, curveGrid)
		write(canvas, face, left-10, y+fontSize/3, 1, curveInk, strconv.FormatFloat(v, 'g', 4, 64))
	}
	for _, v := range ticks(0, float64(n-1), 8) {
		if v == math.Trunc(v) {
			tx, _ := at(int(v), low)
			write(canvas, face, tx, bottom+fontSize+8, 0, curveInk, strconv.Itoa(first+int(v)))
		}
	}
	write(canvas, face, left, top-28, -1, curveInk, p.title)
	write(canvas, face, right, bottom+fontSize+34, 1, curveInk, "epoch")
	label := right
	for i := len(p.curves) - 1; i >= 0; i-- {
		c := p.curves[i]
		if len(c.values) == 0 {
			continue
		}
		write(canvas, face, label, top-28, 1, c.color, c.name)
		label -= float64(font.MeasureString(face, c.name).Ceil()) + 24
		c.draw(canvas, at)
	}
}

// draw draws the curve. Epochs whose value is not finite leave a gap.
func (c curve) draw(canvas *image.RGBA, at func(int, float64) (float64, float64)) {
	for i, v := range c.values {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			continue
		}
		x, y := at(i, v)
		line(canvas, x-lineWidth, y, x+lineWidth, y, 2*lineWidth, c.color)
		if i > 0 && !math.IsNaN(c.values[i-1]) && !math.IsInf(c.values[i-1], 0) {
			x0, y0 := at(i-1, c.values[i-1])
			line(canvas, x0, y0, x, y, lineWidth, c.color)
		}
	}
}

// axis returns the values to mark on the vertical axis, and the number of epochs. The axis spans
// the first to the last mark.
func (p panel) axis() (marks []float64, n int) {
	low, high := math.Inf(1), math.Inf(-1)
	for _, c := range p.curves {
		n = max(n, len(c.values))
		for _, v := range c.values {
			if !math.IsNaN(v) && !math.IsInf(v, 0) {
				low, high = min(low, v), max(high, v)
			}
		}
	}
	switch {
	case p.share || low > high:
		low, high = 0, 1
	case low == high:
		low, high = low-1, high+1
	}
	const most = 5
	step := tickStep(low, high, most)
	first, last := math.Floor(low/step), math.Ceil(high/step)
	for i := 0; i <= most+2 && float64(i) <= last-first; i++ { // first+1 may equal first for large numbers, so most bounds the loop
		marks = append(marks, (first+float64(i))*step)
	}
	if len(marks) < 2 { // the range of the values is not finite or has no steps
		return []float64{low, high}, n
	}
	return marks, n
}

// tickStep returns the distance between the marks of an axis: a round number that divides the range
// from low to high, high > low, into at most about count steps.
func tickStep(low, high float64, count int) float64 {
	span := high - low
	step := math.Pow(10, math.Floor(math.Log10(span/float64(count))))
	for _, factor := range []float64{2, 2.5, 2} { // 1, 2, 5, 10
		if span/step <= float64(count) {
			break
		}
		step *= factor
	}
	return step
}

// ticks returns at most about count round numbers from low to high.
func ticks(low, high float64, count int) []float64 {
	if high <= low {
		return []float64{low}
	}
	step := tickStep(low, high, count)
	var marks []float64
	first := math.Ceil(low / step)
	for i := 0; i <= count; i++ { // first+1 may equal first for large numbers, so count bounds the loop
		if mark := (first + float64(i)) * step; mark <= high+step*1e-9 {
			marks = append(marks, mark)
		}
	}
	return marks
}

// line draws a straight line with the given width.
func line(canvas *image.RGBA, x0, y0, x1, y1, width float64, c color.RGBA) {
	length := math.Hypot(x1-x0, y1-y0)
	if length == 0 {
		return
	}
	dx, dy := (y1-y0)/length*width/2, (x0-x1)/length*width/2
	// Only the line's box is drawn, because Draw visits each pixel of the Rasterizer.
	box := image.Rect(int(math.Floor(min(x0, x1)-math.Abs(dx))), int(math.Floor(min(y0, y1)-math.Abs(dy))),
		int(math.Ceil(max(x0, x1)+math.Abs(dx))), int(math.Ceil(max(y0, y1)+math.Abs(dy)))).Intersect(canvas.Bounds())
	if box.Empty() {
		return
	}
	x0, x1 = x0-float64(box.Min.X), x1-float64(box.Min.X)
	y0, y1 = y0-float64(box.Min.Y), y1-float64(box.Min.Y)
	r := vector.NewRasterizer(box.Dx(), box.Dy())
	r.MoveTo(float32(x0+dx), float32(y0+dy))
	r.LineTo(float32(x1+dx), float32(y1+dy))
	r.LineTo(float32(x1-dx), float32(y1-dy))
	r.LineTo(float32(x0-dx), float32(y0-dy))
	r.ClosePath()
	r.Draw(canvas, box, image.NewUniform(c), image.Point{})
}

// write draws text so that its left end (anchor -1), middle (0) or right end (1) is at x.
func write(canvas *image.RGBA, face font.Face, x, y float64, anchor int, c color.RGBA, text string) {
	x -= float64(font.MeasureString(face, text)) / 64 * float64(anchor+1) / 2
	d := font.Drawer{Dst: canvas, Src: image.NewUniform(c), Face: face,
		Dot: fixed.Point26_6{X: fixed.Int26_6(x * 64), Y: fixed.Int26_6(math.Round(y) * 64)}}
	d.DrawString(text)
}

package trace

import (
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"io"
	"math"
	"sync"

	"github.com/torchstream/torchstream/internal/picture"
	"golang.org/x/image/font"
	"golang.org/x/image/font/gofont/gobold"
	"golang.org/x/image/font/gofont/goregular"
	"golang.org/x/image/font/opentype"
	"golang.org/x/image/font/sfnt"
	"golang.org/x/image/math/fixed"
)

// scale is the number of PNG pixels per pixel of the picture, so that text is sharp on
// high-resolution screens.
const scale = 2

// WritePNG draws the same picture as [Trace.WriteSVG].
func (t *Trace) WritePNG(w io.Writer, o PictureOptions) error { return writePNG(w, t.draw(o)) }

func writePNG(w io.Writer, p picture.Picture) error {
	canvas := image.NewRGBA(image.Rect(0, 0, int(math.Ceil(p.Width*scale)), int(math.Ceil(p.Height*scale))))
	draw.Draw(canvas, canvas.Bounds(), image.White, image.Point{}, draw.Src)
	faces := map[[2]float64]font.Face{}
	for _, s := range p.Shapes {
		if r := s.Rect; r != nil {
			fill(canvas, r.X*scale, r.Y*scale, r.W*scale, r.H*scale, r.Fill)
			continue
		}
		l := s.Text
		key := [2]float64{l.Size, weight(l.Bold)}
		if faces[key] == nil {
			face, err := opentype.NewFace(typeface(l.Bold), &opentype.FaceOptions{Size: l.Size * scale, DPI: 72})
			if err != nil {
				return err
			}
			faces[key] = face
		}
		x := l.X - measure(l.Text, l.Size, l.Bold)*float64(l.Anchor+1)/2
		drawer := font.Drawer{
			Dst: canvas, Src: image.NewUniform(l.Fill), Face: faces[key],
			Dot: fixed.Point26_6{X: fixed.Int26_6(x * scale * 64), Y: fixed.Int26_6(math.Round(l.Y*scale) * 64)},
		}
		drawer.DrawString(l.Text)
	}
	return png.Encode(w, canvas)
}

func weight(bold bool) float64 {
	if bold {
		return 1
	}
	return 0
}

// fill draws a rectangle. Its borders may be at fractions of a pixel: pixels at a border blend in
// proportion to their coverage.
func fill(canvas *image.RGBA, x, y, w, h float64, c color.RGBA) {
	cover := func(from, to float64, i int) float64 {
		return max(0, min(to, float64(i+1))-max(from, float64(i)))
	}
	bounds := canvas.Bounds()
	for py := max(0, int(math.Floor(y))); py < min(bounds.Max.Y, int(math.Ceil(y+h))); py++ {
		for px := max(0, int(math.Floor(x))); px < min(bounds.Max.X, int(math.Ceil(x+w))); px++ {
			share := cover(x, x+w, px) * cover(y, y+h, py)
			old := canvas.RGBAAt(px, py)
			mix := func(a, b uint8) uint8 { return uint8(math.Round(float64(a) + (float64(b)-float64(a))*share)) }
			canvas.SetRGBA(px, py, color.RGBA{mix(old.R, c.R), mix(old.G, c.G), mix(old.B, c.B), 255})
		}
	}
}

// The Go fonts are compiled in; the first measurement of text parses them.
var (
	regular = sync.OnceValue(func() *opentype.Font { return parsed(goregular.TTF) })
	bold    = sync.OnceValue(func() *opentype.Font { return parsed(gobold.TTF) })
)

// parsed returns the font. Parsing a compiled-in font does not fail.
func parsed(ttf []byte) *opentype.Font {
	f, err := opentype.Parse(ttf)
	if err != nil {
		return &opentype.Font{}
	}
	return f
}

func typeface(isBold bool) *opentype.Font {
	if isBold {
		return bold()
	}
	return regular()
}

// measure returns the width of text in pixels.
func measure(text string, size float64, isBold bool) float64 {
	const em = 1 << 10
	f := typeface(isBold)
	var buffer sfnt.Buffer
	var sum fixed.Int26_6
	for _, r := range text {
		index, err := f.GlyphIndex(&buffer, r)
		if err != nil {
			continue
		}
		advance, err := f.GlyphAdvance(&buffer, index, fixed.I(em), font.HintingNone)
		if err == nil {
			sum += advance
		}
	}
	return float64(sum) / 64 / em * size
}

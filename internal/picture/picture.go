// Package picture draws shapes as SVG.
package picture

import (
	"fmt"
	"image/color"
	"io"
	"strings"
)

// Picture is a list of shapes in drawing order, in pixels from the upper left corner.
type Picture struct {
	Width, Height float64
	Shapes        []Shape
	// Measure returns the width of text in pixels. With it the layout is correct with any font of
	// the viewer; without it the viewer's font decides.
	Measure func(text string, size float64, bold bool) float64
}

// Shape is a rectangle or a line of text: exactly one of the two is set.
type Shape struct {
	Rect *Rectangle
	Text *Label
}

// Rectangle is a filled rectangle.
type Rectangle struct {
	X, Y, W, H float64
	Fill       color.RGBA
	Tip        string // shown by SVG viewers for the rectangle under the mouse
}

// Label is a line of text.
type Label struct {
	// X, Y is the left end (Anchor -1), middle (0) or right end (1) of the baseline.
	X, Y   float64
	Anchor int
	Size   float64
	Bold   bool
	Fill   color.RGBA
	Text   string
}

// RGB returns the colour 0xrrggbb.
func RGB(hex uint32) color.RGBA {
	return color.RGBA{uint8(hex >> 16), uint8(hex >> 8), uint8(hex), 255}
}

// Rect draws a rectangle over the shapes so far.
func (p *Picture) Rect(x, y, w, h float64, fill color.RGBA, tip string) {
	p.Shapes = append(p.Shapes, Shape{Rect: &Rectangle{x, y, w, h, fill, tip}})
}

// Text draws a line of text over the shapes so far.
func (p *Picture) Text(x, y float64, anchor int, size float64, bold bool, fill color.RGBA, text string) {
	p.Shapes = append(p.Shapes, Shape{Text: &Label{x, y, anchor, size, bold, fill, text}})
}

// WriteSVG writes a self-contained SVG.
func (p *Picture) WriteSVG(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%g" height="%g" viewBox="0 0 %g %g" `+
		`font-family="Go, Helvetica, Arial, 'DejaVu Sans', sans-serif">`+"\n",
		p.Width, p.Height, p.Width, p.Height)
	for _, s := range p.Shapes {
		if r := s.Rect; r != nil {
			fmt.Fprintf(&b, `<rect x="%s" y="%s" width="%s" height="%s" fill="%s"`, pixels(r.X),
				pixels(r.Y), pixels(r.W), pixels(r.H), hex(r.Fill))
			if r.Tip == "" {
				b.WriteString("/>\n")
			} else {
				fmt.Fprintf(&b, "><title>%s</title></rect>\n", escape(r.Tip))
			}
			continue
		}
		l := s.Text
		if l.Text == "" {
			continue
		}
		fmt.Fprintf(&b, `<text x="%s" y="%s" font-size="%g" fill="%s"`, pixels(l.X), pixels(l.Y), l.Size, hex(l.Fill))
		if p.Measure != nil {
			fmt.Fprintf(&b, ` textLength="%s" lengthAdjust="spacingAndGlyphs"`,
				pixels(p.Measure(l.Text, l.Size, l.Bold)))
		}
		if l.Bold {
			b.WriteString(` font-weight="bold"`)
		}
		switch l.Anchor {
		case 0:
			b.WriteString(` text-anchor="middle"`)
		case 1:
			b.WriteString(` text-anchor="end"`)
		}
		fmt.Fprintf(&b, " pointer-events=\"none\">%s</text>\n", escape(l.Text))
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// pixels formats x with at most two decimals and without trailing zeros.
func pixels(x float64) string {
	text := strings.TrimRight(fmt.Sprintf("%.2f", x), "0")
	return strings.TrimSuffix(text, ".")
}

func hex(c color.RGBA) string { return fmt.Sprintf("#%02x%02x%02x", c.R, c.G, c.B) }

func escape(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	text = strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' {
			return '\uFFFD' // XML does not allow the character, even escaped
		}
		return r
	}, text)
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;").Replace(text)
}

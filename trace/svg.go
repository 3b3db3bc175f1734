package trace

import (
	"fmt"
	"image/color"
	"io"
	"strings"
)

// WriteSVG draws the timeline: a row per stream, the copies that are hidden under compute and the
// exposed copies, the work of the host, and the figures of [Trace.Summary]. The file is
// self-contained, and shows the name of the event under the mouse.
func (t *Trace) WriteSVG(w io.Writer, o PictureOptions) error {
	p := t.draw(o)
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%g" height="%g" viewBox="0 0 %g %g" font-family="Go, Helvetica, Arial, 'DejaVu Sans', sans-serif">`+"\n",
		p.width, p.height, p.width, p.height)
	for _, s := range p.shapes {
		if r := s.rect; r != nil {
			fmt.Fprintf(&b, `<rect x="%s" y="%s" width="%s" height="%s" fill="%s"`, pixels(r.x), pixels(r.y), pixels(r.w), pixels(r.h), hex(r.fill))
			if r.tip == "" {
				b.WriteString("/>\n")
			} else {
				fmt.Fprintf(&b, "><title>%s</title></rect>\n", escape(r.tip))
			}
			continue
		}
		l := s.text
		if l.text == "" {
			continue
		}
		// textLength keeps the layout correct with any font of the viewer.
		fmt.Fprintf(&b, `<text x="%s" y="%s" font-size="%g" fill="%s" textLength="%s" lengthAdjust="spacingAndGlyphs"`, pixels(l.x), pixels(l.y), l.size, hex(l.fill),
			pixels(measure(l.text, l.size, l.bold)))
		if l.bold {
			b.WriteString(` font-weight="bold"`)
		}
		switch l.anchor {
		case 0:
			b.WriteString(` text-anchor="middle"`)
		case 1:
			b.WriteString(` text-anchor="end"`)
		}
		fmt.Fprintf(&b, " pointer-events=\"none\">%s</text>\n", escape(l.text))
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

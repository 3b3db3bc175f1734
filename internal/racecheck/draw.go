package racecheck

import (
	"io"
	"path/filepath"
	"strings"

	"github.com/torchstream/torchstream/internal/picture"
)

var (
	white   = picture.RGB(0xffffff)
	ink     = picture.RGB(0x1f2933)
	faint   = picture.RGB(0x6b7785)
	row     = picture.RGB(0xf6f8fa)
	writing = picture.RGB(0xf0902c)
	reading = picture.RGB(0x3566a8)
	missing = picture.RGB(0xd64545)
)

// WriteSVG draws the two streams with the two uses, and the missing edge between them. A finding
// that involves no memory has one row per place.
func (f *Finding) WriteSVG(w io.Writer) error {
	const (
		left, top, height = 20.0, 58.0, 62.0
		first, second     = 250.0, 560.0 // left edges of the boxes of the two uses
		wide              = 250.0
	)
	p := &picture.Picture{Width: 860, Height: 272}
	p.Rect(0, 0, p.Width, p.Height, white, "")
	p.Text(left, 30, -1, 15, true, ink, short(f.title(), 100))
	p.Rect(left, top, p.Width-2*left, height, row, "")
	p.Rect(left, top+height+24, p.Width-2*left, height, row, "")
	f.First.draw(p, left, first, top, wide, height)
	f.Second.draw(p, left, second, top+height+24, wide, height)

	// The missing edge, dashed: from the end of the first box down to the start of the second.
	from, to := top+height/2, top+height+24+height/2
	middle := (first + wide + second) / 2
	dashed(p, first+wide, from, middle, from)
	dashed(p, middle, from, middle, to)
	dashed(p, middle, to, second-8, to)
	for i := range 8 { // the head of the arrow
		p.Rect(second-8+float64(i), to-float64(8-i)/1.6, 1, 2*float64(8-i)/1.6, missing, "")
	}
	p.Text(middle+10, (from+to)/2+4, -1, 12, true, missing, "missing: "+short(f.Missing, 60))
	if f.Tensor != "" {
		line := f.Tensor
		if f.MadeBy != "" {
			line += ", made by " + f.MadeBy + " at " + f.MadeAt.base()
		}
		p.Text(left, top+2*height+52, -1, 12, false, ink, short(line, 120))
	}
	p.Text(left, top+2*height+72, -1, 12, false, missing, "add "+short(f.Missing, 70)+" before "+f.Where.base())
	return p.WriteSVG(w)
}

// draw draws the row of a stream with one use.
func (u Use) draw(p *picture.Picture, left, x, y, wide, height float64) {
	name := u.Stream
	if u.Variable != "" && u.Variable != "host" {
		name = u.Variable
	}
	p.Text(left+10, y+26, -1, 13, true, ink, short(name, 28))
	if name != u.Stream {
		p.Text(left+10, y+44, -1, 11, false, faint, short(u.Stream, 36))
	}
	fill, does := reading, "reads"
	if u.Write {
		fill, does = writing, "writes"
	}
	if u.What == "Tensor.Close" || u.What == "Scope.Close" {
		does = "frees"
	}
	p.Rect(x, y+8, wide, height-16, fill, u.What+"\n"+u.At.String()+"\n"+u.At.Function)
	p.Text(x+wide/2, y+height/2-3, 0, 12, true, white, short(u.What, 28)+" "+does)
	p.Text(x+wide/2, y+height/2+13, 0, 11, false, white, u.At.base())
}

// dashed draws a horizontal or a vertical dashed line.
func dashed(p *picture.Picture, x0, y0, x1, y1 float64) {
	const dash, gap, thick = 6.0, 4.0, 2.0
	for x := x0; x < x1; x += dash + gap {
		p.Rect(x, y0-thick/2, min(dash, x1-x), thick, missing, "")
	}
	for y := y0; y < y1; y += dash + gap {
		p.Rect(x0-thick/2, y, thick, min(dash, y1-y), missing, "")
	}
}

// short truncates a text to a number of characters.
func short(text string, length int) string {
	runes := []rune(text)
	if len(runes) <= length {
		return text
	}
	return string(runes[:length-1]) + "…"
}

// base returns the line with only the file's base name.
func (f Frame) base() string {
	if f.File == "" {
		return f.String()
	}
	return strings.Replace(f.String(), f.File, filepath.Base(f.File), 1)
}

// Package study holds the common parts of the examples that train: the choice of the device, a
// check of flags, and pictures of results.
package study

import (
	"fmt"
	"image"
	"image/color"
	"image/png"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/torch"
)

// Positive returns an error that names the first flag, in order of name, whose value is less than
// 1.
func Positive(flags map[string]int) error {
	for _, name := range slices.Sorted(maps.Keys(flags)) {
		if flags[name] < 1 {
			return fmt.Errorf("-%s %d: want 1 or more", name, flags[name])
		}
	}
	return nil
}

// Device parses the value of a flag -device: "cpu", "cuda:N", "cuda" for the first GPU. "" selects
// the first GPU if there is one, and otherwise the CPU.
func Device(name string) (cuda.Device, error) {
	if name == "cuda" {
		name = "cuda:0"
	}
	switch n, ok := strings.CutPrefix(name, "cuda:"); {
	case name == "cpu" || name == "" && cuda.DeviceCount() == 0:
		return cuda.CPU, nil
	case name == "":
		return cuda.Device(0), nil
	case ok:
		if i, err := strconv.Atoi(n); err == nil && i >= 0 {
			if i < cuda.DeviceCount() {
				return cuda.Device(i), nil
			}
			return 0, fmt.Errorf("-device %s: this machine has no such GPU (%d are usable): see "+
				"torchstream doctor", name, cuda.DeviceCount())
		}
	}
	return 0, fmt.Errorf("-device %q: want cpu, or cuda:N for the GPU N", name)
}

// Grid writes images, float [N C H W] between 0 and 1 with C 1 or 3, as a PNG. columns is the
// number of images in a row. Each pixel becomes a square of scale x scale pixels.
func Grid(path string, images *torch.Tensor, columns, scale int) error {
	x := images.NoGrad().Detach()
	defer x.Close()
	shape := x.Shape()
	values, err := x.Float32s()
	if err != nil {
		return err
	}
	if len(shape) != 4 || shape[1] != 1 && shape[1] != 3 || columns < 1 || scale < 1 {
		return fmt.Errorf("a grid of images %v: want [N 1 H W] or [N 3 H W]", shape)
	}
	n, channels, h, w := int(shape[0]), int(shape[1]), int(shape[2]), int(shape[3])
	const gap = 2
	rows := (n + columns - 1) / columns
	out := image.NewRGBA(image.Rect(0, 0, columns*(w*scale+gap)-gap, rows*(h*scale+gap)-gap))
	for i := range out.Pix {
		out.Pix[i] = 0xff
	}
	for i := range n {
		left, top := i%columns*(w*scale+gap), i/columns*(h*scale+gap)
		for y := range h * scale {
			for x := range w * scale {
				at := func(c int) uint8 {
					v := values[((i*channels+c%channels)*h+y/scale)*w+x/scale]
					return uint8(math.Round(255 * float64(min(max(v, 0), 1))))
				}
				out.SetRGBA(left+x, top+y, color.RGBA{at(0), at(1), at(2), 0xff})
			}
		}
	}
	return write(path, safefile.Prefix("PNG picture", "\x89PNG"), func(f *os.File) error { return png.Encode(f, out) })
}

// Curve is a line of a picture: a value for each step.
type Curve struct {
	Name   string
	Values []float64
}

// Curves writes curves as an SVG, with lines of text below them.
func Curves(path, title, steps string, curves []Curve, text []string) error {
	const width, height, left, right, top, bottom = 720.0, 360.0, 60.0, 20.0, 40.0, 40.0
	low, high, longest := math.Inf(1), math.Inf(-1), 1
	for _, c := range curves {
		longest = max(longest, len(c.Values)-1)
		for _, v := range c.Values {
			low, high = min(low, v), max(high, v)
		}
	}
	if !(high > low) {
		low, high = low-1, low+1
	}
	x := func(i int) float64 { return left + (width-left-right)*float64(i)/float64(longest) }
	y := func(v float64) float64 { return top + (height-top-bottom)*(high-v)/(high-low) }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" font-family="sans-serif" font-size="13">`+"\n",
		width, height+18*float64(len(text))+10)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="#fff"/><text x="%g" y="22" font-size="16">%s</text>`+"\n", left,
		escape(title))
	for i := range 5 {
		v := low + (high-low)*float64(i)/4
		fmt.Fprintf(&b, `<path d="M%g %.1fH%g" stroke="#ddd"/><text x="%g" y="%.1f" text-anchor="end">%.3g</text>`+"\n", left, y(v),
			width-right, left-6, y(v)+4, v)
	}
	fmt.Fprintf(&b, `<text x="%g" y="%g">0</text><text x="%g" y="%g" text-anchor="end">%d %s</text>`+"\n",
		left, height-bottom+18, width-right, height-bottom+18, longest, escape(steps))
	for i, c := range curves {
		colour := []string{"#00458b", "#e69f00", "#009e73", "#cc79a7"}[i%4]
		b.WriteString(`<path fill="none" stroke-width="2" stroke="` + colour + `" d="`)
		for j, v := range c.Values {
			fmt.Fprintf(&b, "%c%.1f %.1f", "ML"[min(j, 1)], x(j), y(v))
		}
		fmt.Fprintf(&b, `"/><text x="%g" y="%g" text-anchor="end" fill="%s">%s</text>`+"\n", width-right,
			22+16*float64(i), colour, escape(c.Name))
	}
	for i, line := range text {
		fmt.Fprintf(&b, `<text x="20" y="%g" font-family="monospace" font-size="12" xml:space="preserve">%s</text>`+"\n",
			height+18*float64(i), escape(line))
	}
	b.WriteString("</svg>\n")
	return write(path, safefile.Prefix("SVG picture", "<svg"), func(f *os.File) error {
		_, err := f.WriteString(b.String())
		return err
	})
}

func escape(text string) string {
	clean := strings.Map(func(r rune) rune {
		if r < ' ' || r == '�' {
			return ' '
		}
		return r
	}, text)
	return strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;").Replace(clean)
}

// write replaces the file atomically, if it is of the same kind.
func write(path string, kind safefile.Kind, fill func(*os.File) error) error {
	f, err := safefile.Replace(path, kind, 0o644, fill)
	if err != nil {
		return err
	}
	return f.Close()
}

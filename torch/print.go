package torch

import (
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"strings"
)

// The numbers of PyTorch's and NumPy's printing.
const (
	printThreshold = 1000 // elements; a larger tensor is printed without the middle of its dimensions
	printEdge      = 3    // elements at each end of such a dimension
	printColumns   = 80
	printPrecision = 4
	printMax       = 1 << 16 // values to read; a tensor of many dimensions has more even at its edges
)

// String returns dtype, shape, device and values, as [Tensor.Format] prints them with %v.
func (t *Tensor) String() string { return fmt.Sprint(t) }

// LogValue returns dtype, shape and device for package log/slog, without the values: it does not
// wait for a device. A failed tensor returns its error.
func (t *Tensor) LogValue() slog.Value {
	if err := t.Err(); err != nil {
		return slog.StringValue(err.Error())
	}
	return slog.StringValue(t.describe())
}

// Format prints the tensor for package fmt: dtype, shape and device, then the values in PyTorch's
// notation.
//
//	float32[2 3] cpu:
//	[[ 1.0000, -2.5000,  0.0000],
//	 [ 0.1000, 12.0000,     nan]]
//
// %v and %s print floats with four digits after the point, or with an exponent if their magnitudes
// differ much. Of a tensor of more than 1000 elements they print the first and last three of each
// dimension. %.2v prints two digits, %+v all elements. %f, %e and %g print floats in that notation,
// for example %.3g. A failed tensor prints its error.
//
// Format reads the values. For a GPU's tensor it waits for the work that computes them, so do not
// print in a loop that keeps a GPU busy. Package log/slog prints a tensor without its values, and
// does not wait (see [Tensor.LogValue]).
func (t *Tensor) Format(f fmt.State, verb rune) {
	if f == nil {
		return
	}
	if !strings.ContainsRune("vsfFeEgG", verb) {
		fmt.Fprintf(f, "%%!%c(torch.Tensor=%s)", verb, t.describe())
		return
	}
	if err := t.Err(); err != nil {
		fmt.Fprintf(f, "torch.Tensor: %v", err)
		return
	}
	head := t.describe()
	p := printer{precision: printPrecision, all: f.Flag('+')}
	if n, ok := f.Precision(); ok {
		p.precision = min(n, 64)
	}
	if verb != 'v' && verb != 's' {
		p.verb = byte(verb | 0x20) // in lower case
		if _, ok := f.Precision(); !ok {
			p.precision = -1
		}
	}
	body, err := p.body(t)
	switch {
	case err != nil:
		fmt.Fprintf(f, "%s: %v", head, err)
	case strings.Contains(body, "\n"):
		fmt.Fprintf(f, "%s:\n%s", head, body)
	default:
		fmt.Fprintf(f, "%s: %s", head, body)
	}
}

// printer formats the values of one tensor.
type printer struct {
	precision int  // -1: as many digits as the value needs
	verb      byte // of strconv.FormatFloat; 0: as PyTorch chooses
	all       bool

	shape  []int64 // of the values
	cut    []bool  // whether the middle of the dimension is left out
	values []string
	width  int
}

func (p *printer) body(t *Tensor) (string, error) {
	corner, err := p.corner(t)
	if err != nil || corner == nil {
		return "[...]", err
	}
	defer corner.Close()
	p.shape = corner.Shape()
	if corner.Elements() == 0 {
		return "[]", nil
	}
	if err := p.format(corner); err != nil {
		return "", err
	}
	if len(p.shape) == 0 {
		return p.values[0], nil
	}
	var b strings.Builder
	p.write(&b, 0, 0)
	return b.String(), nil
}

// corner returns the values to print, or nil if they are too many.
func (p *printer) corner(t *Tensor) (*Tensor, error) {
	x := t.NoGrad().Alias()
	shape := x.Shape()
	p.cut = make([]bool, len(shape))
	left, elements := int64(1), x.Elements()
	for d, n := range shape {
		p.cut[d] = !p.all && elements > printThreshold && n > 2*printEdge
		if p.cut[d] {
			n = 2 * printEdge
		}
		if left *= n; left > printMax && !p.all {
			x.Close()
			return nil, nil
		}
	}
	for d := range shape {
		if p.cut[d] {
			dim := int64(d)
			head, tail := x.Narrow(dim, 0, printEdge), x.Narrow(dim, shape[d]-printEdge, printEdge)
			edges := Cat([]*Tensor{head, tail}, dim)
			for _, used := range []*Tensor{x, head, tail} {
				used.Close()
			}
			x = edges
		}
	}
	return x, x.Err()
}

func (p *printer) format(x *Tensor) error {
	switch d := x.DType(); {
	case d == Bool:
		values, err := x.Bools()
		for _, v := range values {
			p.values = append(p.values, strconv.FormatBool(v))
		}
		p.pad(nil)
		return err
	case isComplex(d):
		values, err := x.Complex128s()
		re, im := make([]float64, len(values)), make([]float64, len(values))
		for i, v := range values {
			re[i], im[i] = real(v), imag(v)
		}
		left := p.floats(re)
		width := p.width
		right := p.floats(im)
		for i := range values {
			imaginary := strings.TrimLeft(right[i], " ") + "i"
			if imaginary[0] != '-' {
				imaginary = "+" + imaginary
			}
			left[i] += imaginary
		}
		p.values, p.width = left, width+p.width+1
		return err
	case integral(d):
		values, err := x.Int64s()
		for _, v := range values {
			p.values = append(p.values, strconv.FormatInt(v, 10))
		}
		p.pad(nil)
		return err
	case isFloat(d):
		values, err := x.Float64s()
		p.values = p.floats(values)
		return err
	default:
		return invalid("values of %v cannot be printed", d)
	}
}

// floats formats numbers, and sets their width. Zeros, infinities and NaN do not affect the choice
// of the notation and the width.
func (p *printer) floats(values []float64) []string {
	smallest, largest, whole := math.Inf(1), 0.0, true
	counts := make([]bool, len(values))
	for i, v := range values {
		if v == 0 || math.IsInf(v, 0) || math.IsNaN(v) {
			continue
		}
		counts[i] = true
		smallest, largest = min(smallest, math.Abs(v)), max(largest, math.Abs(v))
		whole = whole && v == math.Ceil(v)
	}
	exponent := largest > 0 && (largest/smallest > 1000 || largest > 1e8 || smallest < 1e-4)
	texts := make([]string, len(values))
	for i, v := range values {
		counts[i] = counts[i] || p.verb != 0
		switch {
		case math.IsNaN(v):
			texts[i] = "nan"
		case math.IsInf(v, 1):
			texts[i] = "inf"
		case math.IsInf(v, -1):
			texts[i] = "-inf"
		case p.verb != 0:
			texts[i] = strconv.FormatFloat(v, p.verb, p.precision, 64)
		case exponent:
			texts[i] = strconv.FormatFloat(v, 'e', p.precision, 64)
		case whole:
			texts[i] = strconv.FormatFloat(v, 'f', 0, 64) + "."
		default:
			texts[i] = strconv.FormatFloat(v, 'f', p.precision, 64)
		}
	}
	p.values = texts
	p.pad(counts)
	return p.values
}

// pad sets the width to the width of the widest value, and pads narrower values. counts selects the
// values that determine the width; nil: all.
func (p *printer) pad(counts []bool) {
	p.width = 1
	for i, s := range p.values {
		if counts == nil || counts[i] {
			p.width = max(p.width, len(s))
		}
	}
	for i, s := range p.values {
		p.values[i] = strings.Repeat(" ", max(0, p.width-len(s))) + s
	}
}

// write writes the values of dimension d and of the dimensions after it, starting with the value at
// index at. It returns the index of the next value.
func (p *printer) write(b *strings.Builder, d, at int) int {
	b.WriteByte('[')
	n := int(p.shape[d])
	if d == len(p.shape)-1 {
		p.line(b, d, p.values[at:at+n])
		b.WriteByte(']')
		return at + n
	}
	between := "," + strings.Repeat("\n", len(p.shape)-1-d) + strings.Repeat(" ", d+1)
	for i := range n {
		if i > 0 {
			b.WriteString(between)
		}
		if p.cut[d] && i == printEdge {
			b.WriteString("..." + between)
		}
		at = p.write(b, d+1, at)
	}
	b.WriteByte(']')
	return at
}

// line writes the values of the last dimension, in lines of at most printColumns columns.
func (p *printer) line(b *strings.Builder, d int, values []string) {
	if p.cut[d] {
		values = append(append(append([]string(nil), values[:printEdge]...), " ..."), values[printEdge:]...)
	}
	each := max(1, (printColumns-d)/(p.width+2))
	for i, v := range values {
		switch {
		case i == 0:
		case i%each == 0:
			b.WriteString(",\n" + strings.Repeat(" ", d+1))
		default:
			b.WriteString(", ")
		}
		b.WriteString(v)
	}
}

// Package box reads the bounding boxes of images from text and JSON. It transforms boxes with the
// geometry of their image.
package box

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Labelled is a box and its label.
type Labelled struct {
	transform.Box
	Label int
}

// Numbers is the number of float32 of a box in a batch: four edges and the label.
const Numbers = 5

// NoBox is the label of a row without a box.
const NoBox = -1

// MaxLabel is the highest label.
const MaxLabel = 1<<20 - 1

// Config describes the boxes of a data set. Package imageloader documents it as Boxes.
type Config struct {
	Format     Format
	Normalized bool
	Stored     bool
	Max        int
	MinSize    float64
	Classes    []string
}

// Decoder decodes the boxes of images. It is not safe for concurrent use.
type Decoder struct {
	Config
	classes    map[string]int
	numeric    bool       // the name of a class is a number
	boxes      []Labelled // of the current image; reused
	size       size       // of the current image, as the file of boxes has it
	categories categories // of the current file for one image; nil: labels are not the ids of categories
}

// NewDecoder returns a decoder.
func NewDecoder(c Config) *Decoder {
	d := &Decoder{Config: c, classes: map[string]int{}}
	for i, name := range c.Classes {
		d.classes[name] = i
		d.numeric = d.numeric || isNumber(name)
	}
	return d
}

// Decode reads the boxes of an image from a member, and transforms them with the image's geometry.
// info is the image's header. If the augmenter is not nil, it moves the boxes as it moves the
// image's pixels. dst has room for Max rows. An error describes a box that can't be used.
func (d *Decoder) Decode(name string, data []byte, info *imagecapi.Info, g *imagecapi.Geometry,
	a *transform.Augmenter, dst []byte) error {
	boxes, err := d.parse(name, data)
	if err != nil {
		return err
	}
	return d.move(boxes, d.units(name), info, g, a, dst)
}

// move transforms boxes and writes their rows.
func (d *Decoder) move(boxes []Labelled, u units, info *imagecapi.Info, g *imagecapi.Geometry,
	a *transform.Augmenter, dst []byte) error {
	if len(boxes) > 0 {
		if err := d.checkFrame(u, info, g.Orientation); err != nil {
			return err
		}
	}
	if err := d.place(boxes, u, int(info.Width), int(info.Height), g.Orientation); err != nil {
		return err
	}
	rows := dst
	for i := range boxes {
		b := &boxes[i].Box
		crop(b, g)
		if a != nil {
			a.MoveBox(b)
		}
		if b[2]-b[0] >= d.MinSize && b[3]-b[1] >= d.MinSize {
			rows = put(rows, boxes[i])
		}
	}
	for len(rows) > 0 {
		rows = put(rows, Labelled{Label: NoBox})
	}
	return nil
}

// put writes a row, and returns the rows after it.
func put(rows []byte, b Labelled) []byte {
	for i, v := range [Numbers]float64{b.Box[0], b.Box[1], b.Box[2], b.Box[3], float64(b.Label)} {
		binary.LittleEndian.PutUint32(rows[4*i:], math.Float32bits(float32(v)))
	}
	return rows[4*Numbers:]
}

// units are the meaning of the numbers of a box.
type units struct {
	format     Format
	normalized bool // fractions of the image's width and height instead of pixels
}

// size is the size of an image in pixels. Zero means that it is not known.
type size struct{ width, height float64 }

func (s size) transposed() size { return size{s.height, s.width} }

func (s size) String() string { return fmt.Sprintf("%g x %g", s.width, s.height) }

// checkFrame returns an error if the boxes may not be positions in the image that place assumes:
// the size in the file of boxes is another one, or EXIF's orientation turns the image and nothing
// says whether the boxes are of the stored or the upright image. turned is the orientation that the
// transform applies.
func (d *Decoder) checkFrame(u units, info *imagecapi.Info, turned int32) error {
	frame := size{float64(info.Width), float64(info.Height)}
	if turned >= 5 && !d.Stored {
		frame = frame.transposed()
	}
	known := d.size != size{}
	const options = "set Transform.ApplyEXIFOrientation if boxes are positions in the upright image, " +
		"and Boxes.Stored if they are positions in the image as stored"
	switch {
	case known && !u.normalized && d.size != frame && info.Orientation >= 5 && d.size == frame.transposed():
		return fmt.Errorf("the boxes are of an image of %v pixels, and are read as boxes of one of %v, which EXIF's "+
			"orientation %d turns: %s", d.size, frame, info.Orientation, options)
	case known && !u.normalized && d.size != frame:
		return fmt.Errorf("the boxes are of an image of %v pixels, and the image has %v: annotate the image as it is, "+
			"or resize its boxes too", d.size, frame)
	case info.Orientation <= 1 || turned > 1 || d.Stored:
		return nil
	case d.size == frame && info.Orientation >= 5 && frame.width != frame.height:
		return nil // the size is the stored image's
	}
	return fmt.Errorf("EXIF's orientation %d turns the image: %s", info.Orientation, options)
}

// maxOutside is the part of the image's width or height by which a box may exceed the image. Boxes
// in another format or unit usually exceed it by more.
const maxOutside = 0.5

// place converts the boxes of an image of width x height pixels, as stored, to edges in pixels of
// the image that the geometry crops.
func (d *Decoder) place(boxes []Labelled, u units, width, height int, orientation int32) error {
	w, h := float64(width), float64(height)
	if orientation >= 5 && !d.Stored {
		w, h = h, w
	}
	for i := range boxes {
		b := &boxes[i].Box
		if u.normalized {
			*b = transform.Box{b[0] * w, b[1] * h, b[2] * w, b[3] * h}
		}
		u.format.edges(b)
		switch {
		case b[2] < b[0] || b[3] < b[1]:
			return fmt.Errorf("box %d has a negative size, as %s: is Boxes.Format right?", i+1, u.format)
		// An edge that is not a number is outside too.
		case !(b[0] >= -maxOutside*w && b[1] >= -maxOutside*h && b[2] <= (1+maxOutside)*w && b[3] <= (1+maxOutside)*h):
			return fmt.Errorf("box %d is from (%g, %g) to (%g, %g), as %s, far outside of the image of %g x %g "+
				"pixels: are Boxes.Format and Boxes.Normalized right?", i+1, b[0], b[1], b[2], b[3], u.format, w, h)
		}
		if d.Stored {
			turn(b, w, h, orientation)
		}
	}
	return nil
}

// turn turns a box of a w x h image upright.
func turn(b *transform.Box, w, h float64, orientation int32) {
	if orientation >= 5 {
		b.Transpose()
		w, h = h, w
	}
	switch orientation {
	case 2, 6:
		b.FlipHorizontal(w)
	case 4, 8:
		b.FlipVertical(h)
	case 3, 7:
		b.FlipHorizontal(w)
		b.FlipVertical(h)
	}
}

// crop applies a geometry to a box of the upright image.
func crop(b *transform.Box, g *imagecapi.Geometry) {
	x, y := float64(g.CropX), float64(g.CropY)
	*b = transform.Box{b[0] - x, b[1] - y, b[2] - x, b[3] - y}
	column := func(v float64) float64 { return v*float64(g.ResizeWidth)/float64(g.CropWidth) - float64(g.WindowX) }
	row := func(v float64) float64 { return v*float64(g.ResizeHeight)/float64(g.CropHeight) - float64(g.WindowY) }
	*b = transform.Box{column(b[0]), row(b[1]), column(b[2]), row(b[3])}
	b.Clamp(float64(g.WindowWidth), float64(g.WindowHeight))
	if g.Flip {
		b.FlipHorizontal(float64(g.WindowWidth))
	}
}

// Format is the meaning of a box's four numbers.
type Format int

// The formats. Package imageloader documents them.
const (
	Default Format = iota
	XYXY
	XYWH
	CXCYWH
)

func (f Format) String() string {
	switch f {
	case Default:
		return "default"
	case XYXY:
		return "XYXY"
	case XYWH:
		return "XYWH"
	case CXCYWH:
		return "CXCYWH"
	}
	return fmt.Sprintf("Format(%d)", int(f))
}

// edges converts four numbers to edges.
func (f Format) edges(b *transform.Box) {
	switch f {
	case XYWH:
		*b = transform.Box{b[0], b[1], b[0] + b[2], b[1] + b[3]}
	case CXCYWH:
		*b = transform.Box{b[0] - b[2]/2, b[1] - b[3]/2, b[0] + b[2]/2, b[1] + b[3]/2}
	}
}

// errTooMany is the error for more than Max boxes.
func (d *Decoder) errTooMany() error {
	return fmt.Errorf("more than %d boxes: raise Boxes.Max", d.Max)
}

// errNumbers means that a box does not have four numbers.
var errNumbers = errors.New("a box needs four finite numbers")

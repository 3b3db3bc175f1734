//go:build linux && cgo

package main

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"io"
	"math"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/image/font"
	"golang.org/x/image/font/basicfont"
	"golang.org/x/image/math/fixed"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/safefile"
)

// Sizes of a contact sheet, in pixels.
const (
	sheetGap     = 6  // around a picture
	sheetLine    = 15 // height of a line of text; below each picture are two lines
	sheetHeading = 24 // above a batch
	boxLine      = 2  // width of the edges of a bounding box
	maxSheet     = 1 << 26
)

var (
	sheetPaper = color.RGBA{250, 250, 250, 255}
	sheetInk   = color.RGBA{20, 20, 20, 255}
	sheetFaint = color.RGBA{120, 120, 120, 255}
)

// preview draws the batches that a training loop would get.
func preview(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream preview -archive FILE", "Draws a contact sheet: batches of an archive "+
		"as a training loop gets them (before normalisation), with class, label and member under each picture,\n"+
		"or with bounding boxes.\n"+
		"Look at it before you train: wrong labels, crops that miss their object, and unshuffled "+
		"archives show at once.", stderr)
	archive := set.String("archive", "", cli.ArchiveHelp)
	out := set.String("o", "sheet.png", "`FILE` to write, a PNG")
	batches := set.Int("batches", 1, "how many batches")
	batch := set.Int("batch", 32, "images per batch")
	columns := set.Int("columns", 8, "pictures in a row")
	size := set.Int("size", 224, "pixels of a picture's side")
	kind := set.String("transform", "train", "train (random crop and flip) or eval (resize and centre crop)")
	var images cli.Images
	images.Register(set, cli.LabelOptions|cli.MultiLabelOptions|cli.UprightOption|cli.AugmentOptions|cli.SplitOptions)
	boxes := set.String("boxes", "", boxesHelp)
	epoch := set.Int("epoch", 1, "which epoch, from 1, as train counts: each has its own order, crops and flips")
	seed := set.Uint64("seed", 1, "of the order, crops and flips")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	transform, err := previewTransform(*kind, *size)
	if err != nil {
		return err
	}
	o := imageloader.Options{BatchSize: *batch, Seed: *seed, Shuffle: true, BadSamples: imageloader.Skip, Transform: transform}
	if err := cmp.Or(images.Check(), setBoxes(&o, *boxes)); err != nil {
		return err
	}
	switch {
	case *archive == "":
		return cli.UsageError{Message: "preview needs -archive FILE"}
	case min(*batches, *batch, *columns, *epoch) < 1:
		return cli.UsageError{Message: "-batches, -batch, -columns and -epoch are more than 0"}
	}
	if err := cli.CheckSize(*size, 1); err != nil {
		return err
	}
	sheet, err := newSheet(*batches, *batch, *columns, *size)
	if err != nil {
		return err
	}
	if err := safefile.CheckWrite(*out, safefile.PNG); err != nil {
		return err
	}
	as := trainOptions{archive: *archive, feeding: feeding{images: images}}
	if *boxes == "" {
		if err := as.findFolders(ctx, stdout, stderr); err != nil {
			return err
		}
	}
	if err := as.images.Set(&o); err != nil {
		return err
	}
	loader, err := imageloader.OpenContext(ctx, *archive, o)
	if err != nil {
		return err
	}
	defer loader.Close()
	classes := loader.Classes()
	shown, drawn := 0, 0
	for b, err := range loader.Epoch(ctx, *epoch-1) {
		if err != nil {
			return err
		}
		sheet.heading(drawn, fmt.Sprintf("%s   epoch %d, batch %d of %s",
			path.Base(printable.Archive(*archive)), *epoch, drawn+1, *kind))
		sheet.pictures(drawn, b, classes)
		shown += b.N
		if drawn++; drawn == *batches {
			break
		}
	}
	if err := writePNG(*out, sheet.cut(drawn)); err != nil {
		return err
	}
	printList(stdout, *archive, loader.ListReport())
	says := fmt.Sprintf("%s: %s in %s", *out, printable.Counted(shown, "sample", "samples"),
		printable.Counted(drawn, "batch", "batches"))
	if len(classes) > 0 || *boxes == "" {
		says += ", " + printable.Counted(len(classes), "class", "classes") + " in all"
	}
	if n := loader.Stats().Bad; n > 0 {
		says += fmt.Sprintf("; %s left out (torchstream inspect names what is bad)",
			printable.Counted(n, "bad sample was", "bad samples were"))
	}
	_, err = fmt.Fprintln(stdout, says)
	return err
}

// previewTransform returns the transform with which train trains or evaluates.
func previewTransform(kind string, size int) (imageloader.Transform, error) {
	switch kind {
	case "train":
		return imageloader.Train(size), nil
	case "eval":
		return imageloader.Eval(size*8/7, size), nil
	}
	return imageloader.Transform{}, cli.Usagef("there is no transform %q: train and eval are known", kind)
}

// labelText returns the label of sample i of a batch: its class, or the classes and their shares if
// images are mixed or have several labels. For bounding boxes, it is their number.
func labelText(b *imageloader.Batch, i int, classes []string) string {
	if b.Boxes != nil {
		return printable.Counted(len(b.Boxes[i]), "box", "boxes")
	}
	if b.Soft == nil {
		return fmt.Sprintf("%d %s", b.Labels[i], classes[b.Labels[i]])
	}
	var parts []string
	for label, share := range b.Soft[i*len(classes) : (i+1)*len(classes)] {
		switch {
		case share == 1:
			parts = append(parts, fmt.Sprintf("%d %s", label, classes[label]))
		case share > 0:
			parts = append(parts, fmt.Sprintf("%.0f%% %s", 100*share, classes[label]))
		}
	}
	if len(parts) == 0 {
		return "no label"
	}
	return strings.Join(parts, ", ")
}

// sheet is a contact sheet: batches from top to bottom, each with a heading.
type sheet struct {
	canvas              *image.RGBA
	columns, size, band int // band: pixel rows per batch
}

func newSheet(batches, batch, columns, size int) (*sheet, error) {
	tooLarge := fmt.Errorf("a sheet of %d batches of %d pictures, %d x %d pixels each, is larger than a "+
		"viewer opens: ask for fewer (-batches, -batch, -size)", batches, batch, size, size)
	if max(batches, batch, size) > maxSheet {
		return nil, tooLarge
	}
	columns = min(columns, batch)
	rows := (batch + columns - 1) / columns
	width := int64(columns)*int64(size+sheetGap) + sheetGap
	band := int64(rows)*int64(size+2*sheetLine+sheetGap) + sheetHeading
	if float64(width)*float64(band)*float64(batches) > maxSheet {
		return nil, tooLarge
	}
	s := &sheet{image.NewRGBA(image.Rect(0, 0, int(width), int(band)*batches)), columns, size, int(band)}
	draw.Draw(s.canvas, s.canvas.Bounds(), image.NewUniform(sheetPaper), image.Point{}, draw.Src)
	return s, nil
}

func (s *sheet) heading(batch int, text string) {
	s.text(sheetGap, batch*s.band+sheetHeading-8, s.canvas.Bounds().Dx()-2*sheetGap, sheetInk, text)
}

// pictures draws the pictures of a batch.
func (s *sheet) pictures(batch int, b *imageloader.Batch, classes []string) {
	for i := range b.N {
		s.picture(batch, i, b.Images[i*3*s.size*s.size:], labelText(b, i, classes), path.Base(b.Samples[i].Name))
		if b.Boxes != nil {
			s.boxes(batch, i, b.Boxes[i], classes)
		}
	}
}

// place returns the upper left corner of the i-th picture of a batch.
func (s *sheet) place(batch, i int) (x, y int) {
	return sheetGap + i%s.columns*(s.size+sheetGap),
		batch*s.band + sheetHeading + i/s.columns*(s.size+2*sheetLine+sheetGap)
}

// boxes draws bounding boxes on the i-th picture of a batch, with their classes. Each label has one
// of seven colours.
func (s *sheet) boxes(batch, i int, boxes []imageloader.Box, classes []string) {
	x, y := s.place(batch, i)
	picture := s.canvas.SubImage(image.Rect(x, y, x+s.size, y+s.size)).(*image.RGBA)
	for _, b := range boxes {
		ink := color.RGBA{A: 255}
		n := [7]int{6, 3, 5, 2, 4, 7, 1}[b.Label%7] // each bit is one of red, green and blue
		ink.R, ink.G, ink.B = uint8(255*(n>>2&1)), uint8(255*(n>>1&1)), uint8(255*(n&1))
		r := image.Rect(x+int(b.Left), y+int(b.Top), x+int(math.Ceil(float64(b.Right))), y+int(math.Ceil(float64(b.Bottom))))
		for _, side := range []image.Rectangle{
			{r.Min, image.Pt(r.Max.X, r.Min.Y+boxLine)}, {image.Pt(r.Min.X, r.Max.Y-boxLine), r.Max},
			{r.Min, image.Pt(r.Min.X+boxLine, r.Max.Y)}, {image.Pt(r.Max.X-boxLine, r.Min.Y), r.Max}} {
			draw.Draw(picture, side.Intersect(r), image.NewUniform(ink), image.Point{}, draw.Src)
		}
		name := strconv.Itoa(b.Label)
		if b.Label < len(classes) {
			name = classes[b.Label]
		}
		label := &sheet{canvas: picture}
		label.text(r.Min.X+boxLine+1, min(r.Min.Y+sheetLine-2, y+s.size-3), s.size, ink, name)
	}
}

// picture draws the i-th picture of a batch from rows of RGB.
func (s *sheet) picture(batch, i int, pixels []byte, title, name string) {
	x, y := s.place(batch, i)
	for row := range s.size {
		to := s.canvas.Pix[s.canvas.PixOffset(x, y+row):]
		from := pixels[3*row*s.size:]
		for column := range s.size {
			copy(to[4*column:4*column+3], from[3*column:])
		}
	}
	s.text(x, y+s.size+sheetLine-3, s.size, sheetInk, title)
	s.text(x, y+s.size+2*sheetLine-4, s.size, sheetFaint, name)
}

// text writes one line. If the line is wider than width pixels, text cuts off the start of the
// line, since names differ at their ends.
func (s *sheet) text(x, y, width int, ink color.Color, line string) {
	face := basicfont.Face7x13
	runes := []rune(line)
	if room := width / face.Advance; len(runes) > room {
		runes = append([]rune{'~'}, runes[len(runes)-max(room-1, 0):]...)
	}
	d := font.Drawer{Dst: s.canvas, Src: image.NewUniform(ink), Face: face, Dot: fixed.P(x, y)}
	d.DrawString(string(runes))
}

// cut returns the sheet without the space for batches that did not arrive.
func (s *sheet) cut(batches int) image.Image {
	return s.canvas.SubImage(image.Rect(0, 0, s.canvas.Bounds().Dx(), batches*s.band))
}

// writePNG writes a PNG file. After an error it leaves no partial file.
func writePNG(name string, m image.Image) (err error) {
	f, err := safefile.Create(name, safefile.PNG)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
		if info, statErr := os.Lstat(name); err != nil && statErr == nil && info.Mode().IsRegular() {
			os.Remove(name)
		}
	}()
	w := bufio.NewWriter(f)
	if err := png.Encode(w, m); err != nil {
		return err
	}
	return w.Flush()
}

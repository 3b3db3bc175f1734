package train

import (
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/image/font"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/safefile"
)

const (
	confusionCSV = "confusion.csv"
	confusionPNG = "confusion.png"
)

// corner is the first cell of confusion.csv.
const corner = `true\predicted`

// confusionKind is the kind of file that confusion.csv is.
func confusionKind() safefile.Kind { return safefile.Prefix("a confusion matrix", corner+",") }

// Confusion says how often a model took a class for another.
type Confusion struct {
	Label     int     `json:"label"`     // the true class
	Predicted int     `json:"predicted"` // the class with the largest output, another one
	Count     int64   `json:"count"`     // of samples
	Share     float64 `json:"share"`     // of the samples of the true class, from 0 to 1
}

// Confusions returns all pairs of classes of which Metrics.Confusion counts a sample, but those of
// a class and itself: the largest counts first, among equals the largest shares, then by label. It
// returns nil without Confusion.
func (m *Metrics) Confusions() []Confusion {
	var all []Confusion
	for label, row := range m.Confusion {
		samples := total(row)
		for predicted, count := range row {
			if count > 0 && predicted != label {
				all = append(all, Confusion{label, predicted, count, float64(count) / float64(samples)})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b Confusion) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(b.Share, a.Share))
	})
	return all
}

func total(row []int64) (sum int64) {
	for _, count := range row {
		sum += count
	}
	return sum
}

// SaveConfusion writes Confusion to two files of a folder, which it makes if it is missing:
// confusion.csv, a row for each true class and a column for each class that the model can take it
// for, and confusion.png, a picture of the shares of each row. classes are the names by label, as
// Loader.Classes returns them; a class beyond them has its number as its name. New files take the
// places of old ones as a whole. Metrics without Confusion, and a file of another kind in the
// place, are errors.
func (m *Metrics) SaveConfusion(dir string, classes []string) error {
	n := len(m.Confusion)
	if n == 0 {
		return errors.New("train: the metrics have no confusion matrix: they are of a training, or not of a classifier")
	}
	for label, row := range m.Confusion {
		if len(row) != n {
			return fmt.Errorf("train: the confusion matrix has %d rows, and %d columns in row %d: %w", n, len(row), label, cuda.ErrInvalidArgument)
		}
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return fmt.Errorf("train: %w", err)
	}
	names := make([]string, n)
	for label := range names {
		names[label] = strconv.Itoa(label)
		if label < len(classes) {
			names[label] = classes[label]
		}
	}
	for _, file := range []struct {
		name  string
		kind  safefile.Kind
		write func(io.Writer, [][]int64, []string) error
	}{{confusionCSV, confusionKind(), writeConfusion}, {confusionPNG, safefile.PNG, drawConfusion}} {
		f, err := safefile.Replace(filepath.Join(dir, file.name), file.kind, 0o644, func(f *os.File) error { return file.write(f, m.Confusion, names) })
		if err != nil {
			return fmt.Errorf("train: %w", err)
		}
		if err := f.Close(); err != nil {
			return fmt.Errorf("train: %w", err)
		}
	}
	return nil
}

// writeConfusion writes the counts as a table.
func writeConfusion(w io.Writer, counts [][]int64, names []string) error {
	table := csv.NewWriter(w)
	table.Write(append([]string{corner}, names...)) // Error has its error
	for label, row := range counts {
		cells := []string{names[label]}
		for _, count := range row {
			cells = append(cells, strconv.FormatInt(count, 10))
		}
		table.Write(cells)
	}
	table.Flush()
	return table.Error()
}

// A picture of a confusion matrix.
const (
	maxMatrix = 900 // pixels of the matrix's side
	maxCell   = 64  // of a class
	minNamed  = 28  // of a class whose name is written
	maxName   = 320 // of a name
)

// mark is a pixel of the matrix.
type mark struct {
	share float64 // of the true class's samples
	right bool    // of the diagonal
}

// drawConfusion draws the counts as a PNG: right predictions in one colour, confusions in another,
// the darker the larger their share of the true class's samples.
func drawConfusion(w io.Writer, counts [][]int64, names []string) error {
	face, err := newFace()
	if err != nil {
		return err
	}
	defer face.Close()
	n := len(counts)
	side := min(maxMatrix, n*maxCell)
	named := side/n >= minNamed
	left := marginLeft
	rows := make([]string, n)
	for label, name := range names {
		if named {
			rows[label] = cut(face, name) + "  " + strconv.Itoa(label)
			left = max(left, 2*marginRight+font.MeasureString(face, rows[label]).Ceil())
		}
	}
	const title = "rows: true class   columns: taken for"
	width := max(left+side, marginRight+font.MeasureString(face, title).Ceil()) + marginRight
	canvas := image.NewRGBA(image.Rect(0, 0, width, marginTop+marginBottom/2+side+marginRight))
	draw.Draw(canvas, canvas.Bounds(), image.White, image.Point{}, draw.Src)
	write(canvas, face, marginRight, marginTop-28, -1, curveInk, title)
	top := marginTop + marginBottom/2
	at := func(class int) int { return class * side / n }
	for i, m := range marks(counts, side, at) {
		if m.share > 0 {
			canvas.SetRGBA(left+i%side, top+i/side, m.color())
		}
	}
	// The frame is around the outer pixels.
	x0, y0, x1, y1 := float64(left)-0.5, float64(top)-0.5, float64(left+side)+0.5, float64(top+side)+0.5
	for _, edge := range [][4]float64{{x0, y0, x1, y0}, {x0, y1, x1, y1}, {x0, y0, x0, y1}, {x1, y0, x1, y1}} {
		line(canvas, edge[0], edge[1], edge[2], edge[3], 1, curveGrid)
	}
	if !named {
		for _, v := range ticks(0, float64(n-1), 8) {
			if v == math.Trunc(v) {
				middle := float64(at(int(v))+at(int(v)+1)) / 2
				write(canvas, face, float64(left)+middle, float64(top-10), 0, curveInk, strconv.Itoa(int(v)))
				write(canvas, face, float64(left-10), float64(top)+middle+fontSize/3, 1, curveInk, strconv.Itoa(int(v)))
			}
		}
		return png.Encode(w, canvas)
	}
	for label, row := range counts {
		samples := total(row)
		middle := float64(at(label)+at(label+1)) / 2
		y := float64(top) + middle + fontSize/3
		write(canvas, face, float64(left)+middle, float64(top-10), 0, curveInk, strconv.Itoa(label))
		write(canvas, face, float64(left-10), y, 1, curveInk, rows[label])
		for predicted, count := range row {
			text := strconv.FormatInt(count, 10)
			if count == 0 || font.MeasureString(face, text).Ceil()+6 > side/n {
				continue
			}
			ink := curveInk
			if predicted == label && 2*count > samples {
				ink = color.RGBA{0xff, 0xff, 0xff, 0xff} // on the darkest colour
			}
			write(canvas, face, float64(left)+float64(at(predicted)+at(predicted+1))/2, y, 0, ink, text)
		}
	}
	return png.Encode(w, canvas)
}

// marks returns the pixels of the matrix, row by row. Of the cells that share a pixel, because
// there are more classes than pixels, the largest share counts.
func marks(counts [][]int64, side int, at func(class int) int) []mark {
	pixels := make([]mark, side*side)
	for label, row := range counts {
		samples := total(row)
		for predicted, count := range row {
			if count == 0 {
				continue
			}
			m := mark{float64(count) / float64(samples), predicted == label}
			for y := at(label); y < max(at(label+1), at(label)+1); y++ {
				for x := at(predicted); x < max(at(predicted+1), at(predicted)+1); x++ {
					if m.share > pixels[y*side+x].share {
						pixels[y*side+x] = m
					}
				}
			}
		}
	}
	return pixels
}

// color mixes white with the colour of right or wrong predictions. The root of the share makes
// confusions of a few percent visible.
func (m mark) color() color.RGBA {
	full := curveTrain
	if m.right {
		full = curveEval
	}
	mix := func(c uint8) uint8 { return uint8(math.Round(255 - math.Sqrt(m.share)*float64(255-c))) }
	return color.RGBA{mix(full.R), mix(full.G), mix(full.B), 0xff}
}

// cut shortens a name that is too long for the picture.
func cut(face font.Face, name string) string {
	last := 0 // of the part that has room for dots
	for at := range name {
		if font.MeasureString(face, name[:at]+"...").Ceil() <= maxName {
			last = at
		}
		if font.MeasureString(face, name[:at]).Ceil() > maxName {
			return name[:last] + "..."
		}
	}
	if font.MeasureString(face, name).Ceil() > maxName {
		return name[:last] + "..."
	}
	return name
}

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

// confusionKind recognises the files that confusion.csv may replace.
func confusionKind() safefile.Kind { return safefile.Prefix("a confusion matrix", corner+",") }

// Confusion counts how often a model mistook one class for another.
type Confusion struct {
	Label     int     `json:"label"`     // the true class
	Predicted int     `json:"predicted"` // the class with the largest output, never Label
	Count     int64   `json:"count"`     // number of samples
	Share     float64 `json:"share"`     // of the true class's samples, from 0 to 1
}

// Confusions lists the misclassified (label, prediction) pairs, most frequent first. Ties sort by
// share, then label. It returns nil if m.Confusion is nil.
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

// SaveConfusion writes m.Confusion to two files in dir, and makes dir if it is missing.
// confusion.csv has a row per true class and a column per predicted class. confusion.png is a
// picture of each row's shares. classes holds the names by label, as Loader.Classes returns them; a
// class without a name is written as its number. Each file is replaced atomically. It is an error
// if m.Confusion is nil, or if an existing file is of another kind.
func (m *Metrics) SaveConfusion(dir string, classes []string) error {
	n := len(m.Confusion)
	if n == 0 {
		return errors.New("train: the metrics have no confusion matrix: they are of a training, or not of a classifier")
	}
	for label, row := range m.Confusion {
		if len(row) != n {
			return fmt.Errorf("train: the confusion matrix has %d rows, and %d columns in row %d: %w", n,
				len(row), label, cuda.ErrInvalidArgument)
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
		f, err := safefile.Replace(filepath.Join(dir, file.name), file.kind, 0o644,
			func(f *os.File) error { return file.write(f, m.Confusion, names) })
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
	table.Write(append([]string{corner}, names...)) // Error reports a failure
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

// Sizes of a confusion matrix's picture.
const (
	maxMatrix = 900 // pixels per side of the matrix
	maxCell   = 64  // pixels per class
	minNamed  = 28  // minimum pixels per class for names to be written
	maxName   = 320 // maximum width of a name in pixels
)

// mark is a pixel of the matrix.
type mark struct {
	share float64 // of the true class's samples
	right bool    // on the diagonal
}

// drawConfusion draws the counts as a PNG. Right predictions have one colour, confusions another. A
// larger share of the true class's samples is darker.
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
	// The frame surrounds the outer pixels.
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
				ink = color.RGBA{0xff, 0xff, 0xff, 0xff} // readable on the darkest colour
			}
			write(canvas, face, float64(left)+float64(at(predicted)+at(predicted+1))/2, y, 0, ink, text)
		}
	}
	return png.Encode(w, canvas)
}

// marks returns the pixels of the matrix, row by row. If there are more classes than pixels, a
// pixel shows the largest share of its cells.
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

// color blends white with the colour of right or wrong predictions. The square root makes shares of
// a few percent visible.
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
	last := 0 // end of the longest prefix that fits together with the dots
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

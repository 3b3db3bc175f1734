package main

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
)

// table has the numbers of a CSV file.
type table struct {
	features, classes []string
	cells             [][]float64 // by row and feature; the mean for an empty cell
	labels            []int64     // by row, the class's index in the sorted classes
	mean, deviation   []float64   // by feature
}

// openTable reads the file of the options, or draws a table.
func openTable(o options) (*table, error) {
	if o.csv == "" {
		return readTable(bytes.NewReader(drawTable(1500, o.seed)), "the drawn table", o.label)
	}
	f, err := os.Open(o.csv)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readTable(f, o.csv, o.label)
}

// readTable reads a CSV with a header. Every column except label has numbers or empty cells.
func readTable(r io.Reader, name, label string) (*table, error) {
	lines := csv.NewReader(r)
	header, err := lines.Read()
	if err != nil {
		return nil, fmt.Errorf("%s: no header: %w", name, err)
	}
	at := slices.Index(header, label)
	if at < 0 || len(header) < 2 {
		return nil, fmt.Errorf("%s: there is no column %q among %q: name the column of the classes with -label", name,
			label, header)
	}
	t := &table{features: slices.Delete(slices.Clone(header), at, at+1)}
	var labels []string
	for {
		record, err := lines.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		labels = append(labels, record[at])
		row := make([]float64, 0, len(t.features))
		for k, cell := range record {
			if k == at {
				continue
			}
			v := math.NaN()
			if cell != "" {
				if v, err = strconv.ParseFloat(cell, 64); err != nil {
					line, _ := lines.FieldPos(k)
					return nil, fmt.Errorf("%s:%d: column %q has %q, which is no number: leave the column out, or "+
						"replace its words by numbers", name, line, header[k], cell)
				}
			}
			row = append(row, v)
		}
		t.cells = append(t.cells, row)
	}
	t.classes = slices.Compact(slices.Sorted(slices.Values(labels)))
	if len(t.classes) < 2 {
		return nil, fmt.Errorf("%s: the column %q has %d classes in %d rows: want two or more", name, label,
			len(t.classes), len(labels))
	}
	for _, l := range labels {
		i, _ := slices.BinarySearch(t.classes, l)
		t.labels = append(t.labels, int64(i))
	}
	return t, nil
}

// split divides the rows at random into rows to learn and rows that are held out.
func (t *table) split(share float64, seed uint64) (learned, held []int, err error) {
	rows := rand.New(rand.NewPCG(seed, 2)).Perm(len(t.cells))
	n := int(share * float64(len(rows)))
	if n < 1 || n >= len(rows) {
		return nil, nil, fmt.Errorf("-val %v of %d rows holds out %d: want one row or more on each side", share, len(rows), n)
	}
	return rows[n:], rows[:n], nil
}

// normalise computes the features' means and standard deviations over some rows, and fills empty
// cells with the means.
func (t *table) normalise(rows []int) {
	t.mean, t.deviation = make([]float64, len(t.features)), make([]float64, len(t.features))
	for k := range t.features {
		n, sum, squares := 0., 0., 0.
		for _, row := range rows {
			if v := t.cells[row][k]; !math.IsNaN(v) {
				n, sum, squares = n+1, sum+v, squares+v*v
			}
		}
		n = max(n, 1)
		t.mean[k] = sum / n
		t.deviation[k] = math.Sqrt(max(0, squares/n-t.mean[k]*t.mean[k]))
		if t.deviation[k] == 0 {
			t.deviation[k] = 1
		}
		for _, row := range t.cells {
			if math.IsNaN(row[k]) {
				row[k] = t.mean[k]
			}
		}
	}
}

// drawTable returns a CSV of three kinds of seeds. Two kinds overlap in each feature alone, and
// differ in the features' product.
func drawTable(rows int, seed uint64) []byte {
	rng := rand.New(rand.NewPCG(seed, 1))
	var b bytes.Buffer
	b.WriteString("length,width,mass,gloss,species\n")
	for range rows {
		kind := rng.IntN(3)
		length, width := 4+3*rng.Float64(), 2+2*rng.Float64()
		if kind == 2 {
			length += 4
		}
		thickness := []float64{0.8, 1.3, 1}[kind]
		mass := strconv.FormatFloat(length*width*thickness*(1+0.05*rng.NormFloat64()), 'f', 2, 64)
		if rng.IntN(50) == 0 {
			mass = "" // not measured
		}
		fmt.Fprintf(&b, "%.2f,%.2f,%s,%.2f,%s\n", length, width, mass, rng.Float64(),
			[]string{"barley", "rye", "spelt"}[kind])
	}
	return b.Bytes()
}

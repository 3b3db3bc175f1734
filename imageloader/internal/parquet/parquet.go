// Package parquet reads the images, labels and names of Parquet files.
//
// A [File] gives the position of each image. In an uncompressed page, this is the offset in the
// file. A loader can thus read the image directly, like a member of a tar. An image in a compressed
// page has a position in the decompressed page, which [File.Page] returns. The package never reads
// the columns that are not selected.
//
// The package reads the files that Hugging Face's datasets, pandas, Polars, DuckDB and Spark write.
// It supports the compact protocol of Thrift, pages of version 1 and 2, dictionaries, and the
// compressions snappy, gzip and zstd. It allocates memory in proportion to the bytes of a file, not
// to the sizes that the file declares. The format is specified at
// https://parquet.apache.org/docs/file-format/.
package parquet

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strconv"
)

// File is an open Parquet file. It is safe for concurrent use.
type File struct {
	file    io.ReaderAt
	footer  *footer
	columns selection
	chunks  []*chunk // column chunks with images, ordered by their offsets in the file
}

// Open reads the footer of a file of the given size, and chooses the columns. The file must stay
// open.
func Open(file io.ReaderAt, size int64, c Columns) (*File, error) {
	meta, err := readFooter(file, size)
	if err != nil {
		return nil, err
	}
	f := &File{file: file, footer: meta}
	if f.columns, err = meta.choose(c); err != nil {
		return nil, err
	}
	for i := range meta.groups {
		f.chunks = append(f.chunks, &meta.groups[i].chunks[f.columns.image.column])
	}
	slices.SortFunc(f.chunks, func(a, b *chunk) int { return cmp.Compare(a.start, b.start) })
	return f, nil
}

// On returns a copy of f that reads from file. file must have the same bytes.
func (f *File) On(file io.ReaderAt) *File {
	other := *f
	other.file = file
	return &other
}

// NumRows returns the number of rows, including those without an image.
func (f *File) NumRows() int64 { return f.footer.rows }

// Classes returns the names of the classes in the order of their labels. These are in the file if
// datasets has written it. If the file has several columns of labels with the values 0 and 1, the
// names are those of the columns. If several columns name their classes, the names of the first
// column come first. Classes returns nil if a column does not name its classes.
func (f *File) Classes() (names []string) {
	for i := range f.columns.labels {
		l := &f.columns.labels[i]
		switch {
		case f.columns.flags:
			names = append(names, l.name())
		case l.classNames == nil:
			return nil
		default:
			for _, name := range l.classNames {
				if !slices.Contains(names, name) || len(f.columns.labels) == 1 {
					names = append(names, name)
				}
			}
		}
	}
	return names
}

// Columns returns the names of the selected columns.
func (f *File) Columns() []string {
	list := []string{f.columns.image.name()}
	for i := range f.columns.labels {
		list = append(list, f.columns.labels[i].name())
	}
	return list
}

// Row is a row of a file.
type Row struct {
	Path   string // the image's name; "": the file has no name
	Labels []string
	Image  bool // the row has an image
	Number int64

	// If the image is in a page that must be decompressed, Page is the offset of that page in the
	// file, PageBytes is its decompressed size, and Offset is the position of the image in the
	// decompressed page. Otherwise Page is 0, and Offset is the position of the image in the file.
	Page, PageBytes int64
	Offset, Size    int64
	// If Page is not 0, Data is the image. It is valid until the next row.
	Data []byte
}

// RowError is an error in a row.
type RowError struct {
	Group  int   // number of the row group, from 0
	Row    int64 // number of the row, from 0
	Column string
	Err    error
}

func (e *RowError) Error() string {
	return fmt.Sprintf("row group %d, row %d, column %s: %v", e.Group, e.Row, e.Column, e.Err)
}

func (e *RowError) Unwrap() error { return e.Err }

// Rows yields all rows, in order. If an error ends the iteration early, the last pair has the
// error. images reads the same file. Rows reads the pages of images from it, at ascending offsets.
func (f *File) Rows(images io.ReaderAt) iter.Seq2[Row, error] {
	return func(yield func(Row, error) bool) {
		first := int64(0)
		for g := range f.footer.groups {
			w := groupWalk{f: f, group: g, first: first}
			if !w.run(images, yield) {
				return
			}
			first += f.footer.groups[g].rows
		}
	}
}

// groupWalk reads the rows of a row group.
type groupWalk struct {
	f     *File
	group int
	first int64 // number of the first row of the group

	image  *cursor
	path   *cursor // nil: there are no names
	labels []*listCursor
}

// fail returns the error for a row of the group and a column.
func (w *groupWalk) fail(row int64, l *leaf, err error) error {
	return &RowError{w.group, w.first + row, l.name(), err}
}

// run yields the rows. It returns false if the iteration has ended.
func (w *groupWalk) run(images io.ReaderAt, yield func(Row, error) bool) bool {
	if err := w.open(images); err != nil {
		yield(Row{}, err)
		return false
	}
	for i := range w.f.footer.groups[w.group].rows {
		r := Row{Number: w.first + i}
		if err := w.read(i, &r); err != nil {
			yield(r, err)
			return false
		}
		if !yield(r, nil) {
			return false
		}
	}
	return true
}

// open creates the cursors.
func (w *groupWalk) open(images io.ReaderAt) (err error) {
	s, g := &w.f.columns, &w.f.footer.groups[w.group]
	if w.image, err = newCursor(images, &s.image, &g.chunks[s.image.column], g.rows, true); err != nil {
		return w.fail(0, &s.image, err)
	}
	if err := w.openPath(); err != nil {
		return err
	}
	for i := range s.labels {
		l := &s.labels[i]
		c, err := newCursor(w.f.file, l, &g.chunks[l.column], g.rows, false)
		if err != nil {
			return w.fail(0, l, err)
		}
		w.labels = append(w.labels, &listCursor{cursor: c})
	}
	return nil
}

// openPath creates the cursor of the column of paths, if there is one.
func (w *groupWalk) openPath() (err error) {
	s, g := &w.f.columns, &w.f.footer.groups[w.group]
	if s.path == nil {
		return nil
	}
	if w.path, err = newCursor(w.f.file, s.path, &g.chunks[s.path.column], g.rows, false); err != nil {
		return w.fail(0, s.path, err)
	}
	return nil
}

// read reads row i of the group.
func (w *groupWalk) read(i int64, r *Row) error {
	if err := w.image.place(r); err != nil {
		return w.fail(i, w.image.leaf, err)
	}
	if err := w.readPath(i, r); err != nil {
		return err
	}
	for _, c := range w.labels {
		if err := w.readLabels(c, r); err != nil {
			return w.fail(i, c.leaf, err)
		}
	}
	return nil
}

// readPath reads the path of row i, if there is a column of paths.
func (w *groupWalk) readPath(i int64, r *Row) error {
	if w.path == nil {
		return nil
	}
	_, def, err := w.path.level()
	if err == nil && def == w.path.leaf.maxDef {
		r.Path, err = w.path.nextText()
	}
	if err != nil {
		return w.fail(i, w.path.leaf, err)
	}
	return nil
}

// place reads the position of the next row's image.
func (c *cursor) place(r *Row) error {
	_, def, err := c.level()
	if err != nil || def < c.leaf.maxDef {
		return err
	}
	s, err := c.nextSpan()
	if err != nil {
		return err
	}
	from := &c.data
	if s.dict {
		from = &c.dict
	}
	r.Image, r.Page, r.Offset, r.Size = true, from.page, int64(s.at), int64(s.size)
	if from.page == 0 {
		r.Offset += from.base
		return nil
	}
	r.PageBytes = int64(from.body.len())
	r.Data, err = from.body.bytes(s.at, s.size)
	return err
}

// readLabels reads the labels of a row in a column.
func (w *groupWalk) readLabels(c *listCursor, r *Row) error {
	if c.leaf.maxRep == 0 {
		_, def, err := c.level()
		if err != nil || def < c.leaf.maxDef {
			return err
		}
		return w.addLabel(c.cursor, r)
	}
	return c.each(func() error { return w.addLabel(c.cursor, r) })
}

// listCursor reads a column of lists.
type listCursor struct {
	*cursor
	// known means that def is the definition level of the first item of the next row.
	known bool
	def   int32
}

// each calls read for each item of the next row's lists that is not null. read reads the item.
func (c *listCursor) each(read func() error) error {
	return c.levels(func(_, def int32) error {
		if def < c.leaf.maxDef {
			return nil
		}
		return read()
	})
}

// levels calls read with the repetition and definition levels of each item of the next row's lists,
// null or not. A list without items has the levels of one. read reads the item, unless def is below
// the column's maximum.
func (c *listCursor) levels(read func(rep, def int32) error) error {
	def := c.def
	if !c.known {
		var err error
		if _, def, err = c.level(); err != nil {
			return err
		}
	}
	c.known = false
	rep := int32(0)
	for items := 0; ; items++ {
		if items == maxLabels {
			return fmt.Errorf("the row has more than %d values", maxLabels)
		}
		if err := read(rep, def); err != nil {
			return err
		}
		if c.done() {
			return nil
		}
		var err error
		if rep, def, err = c.level(); err != nil {
			return err
		}
		if rep == 0 {
			c.known, c.def = true, def
			return nil
		}
	}
}

// done reports whether the chunk has no more values.
func (c *cursor) done() bool { return c.left == 0 && c.pages.at >= c.pages.chunk.end }

// maxLabels is the maximum number of values in a column of lists, in a row.
const maxLabels = 1 << 16

// addLabel reads a label and adds it to the row.
func (w *groupWalk) addLabel(c *cursor, r *Row) error {
	text, err := c.nextText()
	if err != nil {
		return err
	}
	if w.f.columns.flags {
		switch text {
		case "0":
		case "1":
			r.Labels = append(r.Labels, c.leaf.name())
		default:
			return fmt.Errorf("the value is %s: values of several columns are 0 or 1, or strings", text)
		}
		return nil
	}
	if names := c.leaf.classNames; names != nil {
		n, err := strconv.Atoi(text)
		switch {
		case err != nil || n < -1 || n >= len(names):
			return fmt.Errorf("the label is %.40s, and the file names %d classes", text, len(names))
		case n < 0: // datasets writes -1 if there is no label
			return nil
		}
		text = names[n]
	}
	if text == "" {
		return labelsError{errors.New("the label is empty")}
	}
	r.Labels = append(r.Labels, text)
	return nil
}

// Page decompresses the page at an offset that was the Page of a Row. It uses the memory of room if
// the page fits.
func (f *File) Page(at int64, room []byte) ([]byte, error) {
	i, found := slices.BinarySearchFunc(f.chunks, at, func(c *chunk, at int64) int { return cmp.Compare(c.start, at) })
	if !found {
		i--
	}
	if i < 0 || at >= f.chunks[i].end {
		return nil, fmt.Errorf("no column of images has a page at byte %d", at)
	}
	p := newPages(f.file, f.chunks[i], aheadOfImages)
	p.at = at
	h, begin, err := p.next()
	if err != nil {
		return nil, err
	}
	return h.content(p, begin, room)
}

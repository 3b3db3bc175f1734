package archive

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/torchstream/torchstream/imageloader/internal/parquet"
)

// Columns selects the columns of images and labels in Parquet files.
type Columns = parquet.Columns

// ErrLabels is the error for Parquet files without a usable column of labels.
var ErrLabels = parquet.ErrLabels

// RowError is an error in a row of a Parquet file.
type RowError = parquet.RowError

// isParquet reports whether the first bytes of a file are those of a Parquet file.
func isParquet(head []byte) bool { return bytes.HasPrefix(head, []byte(parquet.Magic)) }

// parquetWalk reads the rows of a Parquet file in order.
type parquetWalk struct {
	file *parquet.File
	in   io.ReaderAt // the file, read forward
	next func() (parquet.Row, error, bool)
	stop func()
	row  parquet.Row
	at   int64  // number of bytes of the current image that were read
	stem string // the file in names of rows

	// For images in compressed pages, Member.Offset is a position in a stream. The stream consists
	// of the decompressed pages.
	pages  [2]streamPage // the last two pages: a dictionary page and a data page
	stream int64         // number of bytes of all pages so far

	page     []byte // the page that readAt has decompressed
	pageFrom int64  // offset of page in the file
}

// streamPage is a page in the stream of decompressed pages. It has the offset of the page in the
// file and in the stream.
type streamPage struct{ page, begin int64 }

// forwardFile implements io.ReaderAt by Seek and Read, because these read ahead in a remote file.
type forwardFile struct{ file File }

func (f forwardFile) ReadAt(p []byte, at int64) (int, error) {
	if _, err := f.file.Seek(at, io.SeekStart); err != nil {
		return 0, err
	}
	return io.ReadFull(f.file, p)
}

// startParquet creates the readers of the Parquet file in a.at.file.
func (a *Archive) startParquet() error {
	a.at.format, a.at.in = Parquet, &stream{}
	shard := &a.shards[a.at.index]
	f, err := a.parquets.open(a.at.index, a.at.file, shard.Info.Size(), a.config.Columns)
	if err != nil {
		return a.Fail(err)
	}
	if first := a.parquets.known(0); a.at.index > 0 && first != nil && (!slices.Equal(f.Classes(), first.Classes()) ||
		!slices.Equal(f.Columns(), first.Columns())) {
		return a.Fail(fmt.Errorf("its columns or the names of its classes differ from those of %s",
			Shown(a.shards[0].Path)))
	}
	a.at.table = &parquetWalk{file: f, in: a.at.file, stem: a.stem(a.at.index)}
	if IsURL(shard.Path) {
		a.at.table.in = forwardFile{a.at.file}
	}
	a.at.release = a.at.table.close
	return nil
}

// InParquet reports whether the current shard is a Parquet file.
func (a *Archive) InParquet() bool { return a.at.format == Parquet }

// Table returns the names of the classes in the order of their labels, and the names of the
// columns, for an archive of Parquet files. If the files do not name their classes, classes is nil.
func (a *Archive) Table() (classes, columns []string) {
	f := a.parquets.known(0)
	if f == nil {
		return nil, nil
	}
	if a.config.RowNames {
		return f.Classes(), append(f.Columns(), "file and row in names")
	}
	return f.Classes(), f.Columns()
}

// Boxes calls add with the name and the boxes of each row of the Parquet files, in order. It ends
// with the archive's context.
func (r *Reader) Boxes(add func(name string, boxes []parquet.Box) error) error {
	classes, err := r.BoxClasses()
	if err != nil {
		return err
	}
	for shard := range r.a.shards {
		f, err := r.parquet(shard)
		if err != nil {
			return err
		}
		fail := func(err error) error { return fmt.Errorf("%s: %w", Shown(r.a.shards[shard].Path), err) }
		if !slices.Equal(classes, f.BoxClasses()) {
			return fail(fmt.Errorf("the names of its classes differ from those of %s", Shown(r.a.shards[0].Path)))
		}
		stem := r.a.stem(shard)
		for row, err := range f.Boxes() {
			if err == nil {
				err = r.a.ctx.Err()
			}
			if err == nil {
				err = add(r.a.rowName(stem, row.Path, row.Number), row.Boxes)
			}
			if err != nil {
				return fail(err)
			}
		}
	}
	return nil
}

// BoxClasses returns the names of the boxes' classes in Parquet files, or nil if the files do not
// have them.
func (r *Reader) BoxClasses() ([]string, error) {
	f, err := r.parquet(0)
	if err != nil {
		return nil, err
	}
	return f.BoxClasses(), nil
}

// parquet returns the Parquet file of a shard, which it enters.
func (r *Reader) parquet(shard int) (*parquet.File, error) {
	if err := r.enter(shard); err != nil {
		return nil, err
	}
	f, err := r.a.parquets.open(shard, &r.timed, r.a.shards[shard].Info.Size(), r.a.config.Columns)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Shown(r.a.shards[shard].Path), err)
	}
	return f, nil
}

// close ends the walk.
func (w *parquetWalk) close() {
	if w.stop != nil {
		w.stop()
	}
	w.next, w.stop = nil, nil
}

// nextOfParquet moves to the next row. It returns found = false at the end of the shard, and for a
// row without an image.
func (a *Archive) nextOfParquet() (m Member, found bool, err error) {
	w := a.at.table
	if w.next == nil {
		w.next, w.stop = iter.Pull2(w.file.Rows(w.in))
	}
	row, err, more := w.next()
	if !more {
		return m, false, a.advance()
	}
	if err != nil {
		return m, false, a.Fail(err)
	}
	w.row, w.at = row, 0
	a.member.position++
	name := a.rowName(w.stem, row.Path, row.Number)
	a.member.name = name
	if len(name) > MaxNameBytes {
		a.member.name = name[:MaxNameBytes]
		return m, false, a.Fail(fmt.Errorf("a row's path has %d bytes, over the limit of %d", len(name), MaxNameBytes))
	}
	if !row.Image {
		a.imageless++
		return m, false, nil
	}
	if row.Page == 0 {
		a.at.in.offset = row.Offset // Progress uses the offset
	} else {
		a.at.in.offset = row.Page
	}
	m = Member{Name: name, Shard: a.at.index, Offset: row.Offset, Size: row.Size, Labels: row.Labels, Stored: row.Page == 0}
	if !m.Stored {
		begin, err := a.placeInStream(&row)
		if err != nil {
			return m, false, a.Fail(err)
		}
		m.Offset += begin
	}
	a.member.begin(&m)
	return m, true, nil
}

// Imageless returns the number of rows without an image, among the rows read so far.
func (a *Archive) Imageless() int { return a.imageless }

// rowName returns the name of a row's image. This is the path in the row, or else the name of the
// file and the number of the row. With Config.RowNames it is all three. A row's path is below the
// root, without dots and empty parts.
func (a *Archive) rowName(stem, image string, row int64) string {
	name := path.Clean("/" + image)[1:]
	if name != "" && !a.config.RowNames {
		return name
	}
	return path.Join(stem, fmt.Sprintf("%08d", row), name)
}

// stem returns the name of a shard in the names of its rows.
func (a *Archive) stem(shard int) string {
	f := &a.parquets
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stems == nil {
		f.stems = stems(a.shards)
	}
	return f.stems[shard]
}

// stems returns the path of each shard below the common folder of all shards, without the
// extension. It keeps the extension if the path without it is also another shard's name: a.pq is
// "a.pq" if there is an a.parquet, and a.parquet.pq is "a.parquet.pq". So the names depend neither
// on how the paths are spelled nor, below one folder, on later files of other names.
func stems(shards []Shard) []string {
	paths := make([]string, len(shards))
	for i := range shards {
		paths[i] = absolute(shards[i].Path)
	}
	folder := path.Dir(paths[0])
	for _, p := range paths {
		for !strings.HasPrefix(p, strings.TrimSuffix(folder, "/")+"/") {
			folder = path.Dir(folder)
		}
	}
	short, others := make([]string, len(paths)), map[string]int{}
	for i, p := range paths {
		paths[i] = strings.TrimPrefix(p[len(folder):], "/")
		short[i] = paths[i]
		if extension := path.Ext(p); extension != path.Base(p) {
			short[i] = strings.TrimSuffix(short[i], extension)
		}
		others[short[i]]++
		if paths[i] != short[i] {
			others[paths[i]]++
		}
	}
	for i := range short {
		if others[short[i]] > 1 {
			short[i] = paths[i]
		}
	}
	return short
}

// absolute returns the absolute path of a shard, with slashes. Of a URL it has the host and the
// path.
func absolute(shard string) string {
	if IsURL(shard) {
		_, place, _ := strings.Cut(Shown(shard), "://")
		return path.Clean("/" + place)
	}
	if full, err := filepath.Abs(shard); err == nil { // fails only without a working directory
		shard = full
	}
	return path.Clean("/" + Shown(filepath.ToSlash(shard)))
}

// placeInStream returns the offset of a row's page in the stream of decompressed pages. When a page
// is used for the first time, placeInStream records a checkpoint.
func (a *Archive) placeInStream(row *parquet.Row) (begin int64, err error) {
	w := a.at.table
	for i := range w.pages {
		if w.pages[i].page == row.Page {
			return w.pages[i].begin, nil
		}
	}
	if row.Page < w.pages[1].page {
		return 0, fmt.Errorf("its pages are not in the order of the rows: write the file again")
	}
	w.pages[0], w.pages[1] = w.pages[1], streamPage{row.Page, w.stream}
	if a.keep != nil {
		a.keep(a.at.index, Checkpoint{Bit: row.Page << 3, Output: w.stream})
	}
	w.stream += row.PageBytes
	return w.pages[1].begin, nil
}

// read fills p with the next bytes of the current row's image.
func (w *parquetWalk) read(p []byte) error {
	if w.row.Page != 0 {
		if int64(len(p)) > int64(len(w.row.Data))-w.at {
			return io.ErrUnexpectedEOF
		}
		copy(p, w.row.Data[w.at:])
	} else if n, err := w.in.ReadAt(p, w.row.Offset+w.at); n < len(p) {
		return err
	}
	w.at += int64(len(p))
	return nil
}

// readAt fills p with an image. page is the offset of the image's page in the file, and offset is
// the position of the image in the decompressed page. If page is 0, offset is the position in the
// file.
func (w *parquetWalk) readAt(page, offset int64, p []byte) (err error) {
	if page == 0 {
		n, err := w.in.ReadAt(p, offset)
		if n < len(p) {
			return err
		}
		return nil
	}
	if w.pageFrom != page {
		w.pageFrom = 0
		if w.page, err = w.file.Page(page, w.page); err != nil {
			return damagedPage(err)
		}
		w.pageFrom = page
	}
	return copyFrom(w.page, offset, p)
}

// copyFrom fills p with the bytes at an offset in a page.
func copyFrom(page []byte, offset int64, p []byte) error {
	if offset < 0 || offset > int64(len(page)) || int64(len(p)) > int64(len(page))-offset {
		return ErrSourceChanged
	}
	copy(p, page[offset:])
	return nil
}

// damagedPage adds the column to an error of a page.
func damagedPage(err error) error {
	if errors.Is(err, ErrStopped) {
		return err
	}
	return fmt.Errorf("the column of images: %w", err)
}

// parquetFiles holds the footers of the shards that have been read. It is safe for concurrent use.
type parquetFiles struct {
	mu    sync.Mutex
	of    map[int]*parquet.File
	stems []string // names of all shards in names of rows; nil: not needed yet
}

// open returns the Parquet file of a shard, which then reads from file. The first call for a shard
// reads the footer.
func (f *parquetFiles) open(shard int, file io.ReaderAt, size int64, c Columns) (*parquet.File, error) {
	if known := f.known(shard); known != nil {
		return known.On(file), nil
	}
	opened, err := parquet.Open(file, size, c)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.of == nil {
		f.of = map[int]*parquet.File{}
	}
	f.of[shard] = opened
	return opened, nil
}

// known returns the Parquet file of a shard, or nil if its footer has not been read.
func (f *parquetFiles) known(shard int) *parquet.File {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.of[shard]
}

// ReadRow fills p with an image of a Parquet file. page is the offset of the image's page in the
// file, and offset is the position of the image in the decompressed page. If page is 0, offset is
// the position in the file.
func (r *Reader) ReadRow(shard int, page, offset int64, p []byte) error {
	if err := r.enter(shard); err != nil {
		return err
	}
	if page == 0 {
		n, err := r.timed.ReadAt(p, offset)
		if n < len(p) {
			return err
		}
		return nil
	}
	if r.pageOf != shard || r.pageFrom != page {
		f, err := r.a.parquets.open(shard, &r.timed, r.a.shards[shard].Info.Size(), r.a.config.Columns)
		if err != nil {
			return err
		}
		r.pageFrom = 0
		if r.page, err = f.Page(page, r.page); err != nil {
			return damagedPage(err)
		}
		r.pageOf, r.pageFrom = shard, page
	}
	return copyFrom(r.page, offset, p)
}

package parquet

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

const fixtures = "../../testdata/parquet/"

// fixture returns the bytes of a file that testdata/make_parquet.py has written.
func fixture(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(fixtures + name + ".parquet")
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// columnsOf has the selected columns of the fixtures that need a selection.
var columnsOf = map[string]Columns{"datasets-lists": {Lists: true}, "datasets-two": {Lists: true,
	Labels: []string{"fine_label", "coarse_label"}}, "flags": flags, "flags-2": flags, "boxes-lists": boxed, "boxes-structs": boxed}

var boxed = Columns{Unlabelled: true, Boxes: "objects"}

var flags = Columns{Lists: true, Labels: []string{"bird", "round"}}

// contentOf returns a row's image, read from its position.
func contentOf(t *testing.T, f *File, data []byte, r *Row) []byte {
	t.Helper()
	if r.Page == 0 {
		return data[r.Offset:][:r.Size]
	}
	page, err := f.Page(r.Page, nil)
	if err != nil || int64(len(page)) != r.PageBytes {
		t.Fatalf("page at %d: %d bytes, error %v, want %d bytes", r.Page, len(page), err, r.PageBytes)
	}
	if got := page[r.Offset:][:r.Size]; !bytes.Equal(got, r.Data) {
		t.Errorf("row %d: the page has %q, want the row's %q", r.Number, got, r.Data)
	}
	return page[r.Offset:][:r.Size]
}

// TestRowsAreThoseOfDatasets reads files from datasets, pandas, Polars, DuckDB and pyarrow, with
// all encodings and compressions. The names, labels and images equal those that Hugging Face's
// reader returns (testdata/make_parquet.py).
func TestRowsAreThoseOfDatasets(t *testing.T) {
	text, err := os.ReadFile(fixtures + "expected.json")
	if err != nil {
		t.Fatal(err)
	}
	var expected map[string][][3]any
	if err := json.Unmarshal(text, &expected); err != nil {
		t.Fatal(err)
	}
	if len(expected) < 20 {
		t.Fatalf("expected.json has %d files, want 20 or more", len(expected))
	}
	for name, want := range expected {
		data := fixture(t, name)
		f, err := Open(bytes.NewReader(data), int64(len(data)), columnsOf[name])
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		n := 0
		for r, err := range f.Rows(bytes.NewReader(data)) {
			if err != nil {
				t.Errorf("%s: %v", name, err)
				break
			}
			if n >= len(want) {
				t.Errorf("%s has more than %d rows", name, len(want))
				break
			}
			got := fmt.Sprint(r.Path, r.Labels, any(nil))
			if r.Image {
				got = fmt.Sprint(r.Path, r.Labels, crc32.ChecksumIEEE(contentOf(t, f, data, &r)))
			}
			w := want[n]
			if crc, ok := w[2].(float64); ok {
				w[2] = uint32(crc)
			}
			if want := fmt.Sprint(w[0], slices.DeleteFunc(w[1].([]any), func(x any) bool { return x == "None" }),
				w[2]); got != want {
				t.Errorf("%s, row %d: got %s, want %s", name, n, got, want)
			}
			n++
		}
		if n != len(want) || f.NumRows() != int64(len(want)) {
			t.Errorf("%s: %d rows, NumRows %d, want %d", name, n, f.NumRows(), len(want))
		}
	}
}

// TestClassesAreInTheOrderOfTheFile: the names of classes come from the metadata of datasets.
func TestClassesAreInTheOrderOfTheFile(t *testing.T) {
	for name, want := range map[string][]string{"datasets": {"owl", "cat", "café"}, "datasets-lists": {"owl", "cat", "café"},
		"datasets-two": {"owl", "cat", "café", "bird", "beast"}, "flags": {"bird", "round"}, "pandas": nil, "polars": nil} {
		data := fixture(t, name)
		f, err := Open(bytes.NewReader(data), int64(len(data)), columnsOf[name])
		if err != nil {
			t.Fatal(err)
		}
		if got := f.Classes(); !slices.Equal(got, want) {
			t.Errorf("%s: classes %q, want %q", name, got, want)
		}
	}
}

// countingReader counts the bytes of a file that are read.
type countingReader struct {
	*bytes.Reader
	read [][2]int64
}

func (r *countingReader) ReadAt(p []byte, at int64) (int, error) {
	n, err := r.Reader.ReadAt(p, at)
	r.read = append(r.read, [2]int64{at, at + int64(n)})
	return n, err
}

// TestOnlySelectedColumnsAreRead: the pages of other columns, and the images of a file that is not
// compressed, are not read.
func TestOnlySelectedColumnsAreRead(t *testing.T) {
	data := fixture(t, "datasets-two")
	r := &countingReader{Reader: bytes.NewReader(data)}
	f, err := Open(r, int64(len(data)), Columns{Labels: []string{"fine_label"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range f.Rows(r) {
		if err != nil {
			t.Fatal(err)
		}
	}
	var other chunk
	leaves, err := f.footer.leaves()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range leaves {
		if l.path[0] == "coarse_label" {
			other = f.footer.groups[0].chunks[l.column]
		}
	}
	for _, s := range r.read {
		if s[0] < other.end && s[1] > other.start {
			t.Errorf("bytes %d to %d were read, of the column at %d to %d that is not selected", s[0], s[1],
				other.start, other.end)
		}
	}
}

// TestErrorsNameColumns: if a file does not make clear which columns to read, the error lists its
// columns and names the option that selects one.
func TestErrorsNameColumns(t *testing.T) {
	for _, c := range []struct {
		file    string
		columns Columns
		want    []string
	}{
		{"datasets-two", Columns{}, []string{"Options.Columns.Labels", "coarse_label (INT64)", "img.bytes (bytes)"}},
		{"datasets", Columns{Image: "photo"}, []string{`"photo"`, "image.bytes (bytes)", "label (INT64)"}},
		{"datasets", Columns{Labels: []string{"kind"}}, []string{`"kind"`, "label (INT64)"}},
		{"datasets-lists", Columns{}, []string{"labels.list.element", "Options.MultiLabel"}},
		{"datasets-two", Columns{Labels: []string{"fine_label", "coarse_label"}}, []string{"Options.MultiLabel"}},
		{"lz4", Columns{}, []string{"row group 0, row 0, column image", "LZ4", "snappy"}},
	} {
		data := fixture(t, c.file)
		f, err := Open(bytes.NewReader(data), int64(len(data)), c.columns)
		if err == nil {
			for _, e := range f.Rows(bytes.NewReader(data)) {
				err = e
			}
		}
		for _, text := range c.want {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%s with %+v: error %v, want one with %q", c.file, c.columns, err, text)
			}
		}
	}
}

// TestEncryptedFileIsNamed: a file with an encrypted footer is not called damaged.
func TestEncryptedFileIsNamed(t *testing.T) {
	data := fixture(t, "pandas")
	copy(data, encryptedMagic)
	copy(data[len(data)-4:], encryptedMagic)
	if _, err := readAll(data, Columns{}); err == nil || !strings.Contains(err.Error(), "encrypted") {
		t.Errorf("got error %v, want one that says encrypted", err)
	}
}

// errImpossible is an error that no file may cause.
var errImpossible = errors.New("impossible")

// readAll reads all rows and pages of a file.
func readAll(data []byte, c Columns) (rows int, err error) {
	return readFrom(bytes.NewReader(data), int64(len(data)), c)
}

// readFrom implements readAll for a file of any kind.
func readFrom(file io.ReaderAt, size int64, c Columns) (rows int, err error) {
	f, err := Open(file, size, c)
	if err != nil {
		return 0, err
	}
	var room []byte
	page := int64(0)
	for r, err := range f.Rows(file) {
		if err != nil {
			return rows, err
		}
		switch {
		case !r.Image:
		case r.Page == 0 && (r.Offset < 0 || r.Size < 0 || r.Offset+r.Size > size):
			return rows, fmt.Errorf("%w: row %d is at %d with %d bytes of %d", errImpossible, r.Number, r.Offset, r.Size, size)
		case r.Page != page:
			page = r.Page
			if room, err = f.Page(page, room); err != nil {
				return rows, fmt.Errorf("%w: row %d: page at %d, which had been read: %w", errImpossible, r.Number, page, err)
			}
		}
		if page > 0 && r.Page == page && (r.Offset+r.Size > int64(len(room)) ||
			!bytes.Equal(room[r.Offset:][:r.Size], r.Data)) {
			return rows, fmt.Errorf("%w: row %d: page at %d has another image", errImpossible, r.Number, page)
		}
		rows++
	}
	if c.Boxes == "" {
		return rows, nil
	}
	boxed := 0
	for r, err := range f.Boxes() {
		if err != nil {
			return boxed, err
		}
		if r.Number != int64(boxed) {
			return boxed, fmt.Errorf("%w: row %d has the number %d", errImpossible, boxed, r.Number)
		}
		boxed++
	}
	if boxed != rows {
		return boxed, fmt.Errorf("%w: %d rows of boxes, and %d of images", errImpossible, boxed, rows)
	}
	return rows, nil
}

// TestDamagedBytesAreErrors: a file with any byte changed, or cut off anywhere, is read without a
// panic. A page that differs from its checksum is an error.
func TestDamagedBytesAreErrors(t *testing.T) {
	data := fixture(t, "pages-zstd-2")
	f, err := Open(bytes.NewReader(data), int64(len(data)), Columns{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range data {
		damaged := slices.Clone(data)
		damaged[i] ^= 0x55
		_, err := readAll(damaged, Columns{})
		// The headers of pages have no checksum, so a change there may go unnoticed.
		for r := range f.Rows(bytes.NewReader(data)) {
			p := newPages(bytes.NewReader(data), f.chunks[0], aheadOfImages)
			p.at = r.Page
			_, begin, headErr := p.next()
			if headErr != nil {
				t.Fatal(headErr)
			}
			if int64(i) >= begin && int64(i) < p.at && err == nil {
				t.Errorf("byte %d of a page was changed: got no error, want one", i)
			}
		}
		if _, err := readAll(data[:i], Columns{}); err == nil {
			t.Errorf("the first %d of %d bytes are read without an error", i, len(data))
		}
	}
}

// TestSizesInHeadersAreNotBelieved: a page declares a gigabyte. Reading it takes no more memory
// than its bytes need.
func TestSizesInHeadersAreNotBelieved(t *testing.T) {
	for codec, packed := range map[int32][]byte{
		codecSnappy: {0x80, 0x80, 0x80, 0x80, 4, 0},
		codecGzip:   {0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		codecZstd:   {0x28, 0xb5, 0x2f, 0xfd, 0x24, 0, 1, 0, 0, 0x99, 0xe9, 0xd8, 0x51},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := decompress(codec, packed, maxPageBytes, nil)
		runtime.ReadMemStats(&after)
		const limit = 64 << 20
		if used := after.TotalAlloc - before.TotalAlloc; err == nil || used > limit {
			t.Errorf("%s: %d bytes that declare %d: error %v, %d bytes allocated, want an error and at most %d",
				codecName(codec), len(packed), maxPageBytes, err, used, limit)
		}
	}
}

// FuzzFile reads any bytes as a file. There is no panic and no read outside of the file, and every
// page that was read once can be read again.
func FuzzFile(f *testing.F) {
	list, err := filepath.Glob(fixtures + "*.parquet")
	if err != nil || len(list) < 20 {
		f.Fatalf("%d fixtures, error %v, want 20 or more", len(list), err)
	}
	for _, file := range list {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, false)
		f.Add(data, true)
	}
	f.Fuzz(func(t *testing.T, data []byte, lists bool) {
		for _, c := range []Columns{{Lists: lists}, {Unlabelled: true, Boxes: "objects"}} {
			if _, err := readAll(data, c); errors.Is(err, errImpossible) {
				t.Error(err)
			}
		}
	})
}

// fixtureNames returns the names of the fixtures that can be read.
func fixtureNames(t *testing.T) (names []string) {
	t.Helper()
	list, err := filepath.Glob(fixtures + "*.parquet")
	if err != nil || len(list) < 20 {
		t.Fatalf("%d fixtures, error %v, want 20 or more", len(list), err)
	}
	for _, file := range list {
		if name := strings.TrimSuffix(filepath.Base(file), ".parquet"); name != "lz4" {
			names = append(names, name)
		}
	}
	return names
}

// TestDamagedFilesOfAllWritersHaveNoImpossibleRows: with a byte of a file changed, each row that is
// read has an image within the file, and the same image when its page is read again.
func TestDamagedFilesOfAllWritersHaveNoImpossibleRows(t *testing.T) {
	step := 3
	if testing.Short() {
		step = 31
	}
	for _, name := range fixtureNames(t) {
		data := fixture(t, name)
		for i := 0; i < len(data); i += step {
			damaged := slices.Clone(data)
			damaged[i] ^= []byte{1, 0xff}[i/step%2]
			if _, err := readAll(damaged, columnsOf[name]); errors.Is(err, errImpossible) {
				t.Errorf("%s with byte %d changed from %#x to %#x: got error %v, want possible rows", name, i, data[i],
					damaged[i], err)
			}
		}
	}
}

// TestWrongBoxesNameTheRow: a box of other than four numbers, a null number and a null label are
// errors of the row, also if other boxes of the row make up for them.
func TestWrongBoxesNameTheRow(t *testing.T) {
	for name, want := range map[string]string{
		"sizes-lists": "box 0 has 5 numbers", "sizes-structs": "box 0 has 5 numbers",
		"null-box-lists": "box 1 has 0 numbers", "null-both-lists": "box 1 has 0 numbers",
		"null-both-structs": "box 1 has 0 numbers", "empty-box-lists": "box 0 has 0 numbers",
		"null-number-lists": "number of its box 0 is null", "null-number-structs": "number of its box 0 is null",
		"null-label-lists": "label of its box 1 is null", "few-labels-lists": "1 labels for 2 boxes",
	} {
		data := fixture(t, "wrong/"+name)
		f, err := Open(bytes.NewReader(data), int64(len(data)), boxed)
		if err != nil {
			t.Fatal(err)
		}
		rows := 0
		for _, e := range f.Boxes() {
			if err = e; err == nil {
				rows++
			}
		}
		var in *RowError
		if !errors.As(err, &in) || in.Row != 1 || rows != 1 || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %d rows and error %v, want 1 row, and a RowError of row 1 with %q", name, rows, err, want)
		}
	}
}

// TestWrongColumnOfBoxesIsTheError: an error about labels does not take its place.
func TestWrongColumnOfBoxesIsTheError(t *testing.T) {
	data := fixture(t, "boxes-lists")
	_, err := Open(bytes.NewReader(data), int64(len(data)), Columns{Boxes: "bbox2"})
	if err == nil || !strings.Contains(err.Error(), `"bbox2"`) {
		t.Errorf("got error %v, want one with \"bbox2\"", err)
	}
}

// failingReader fails after a number of reads.
type failingReader struct {
	*bytes.Reader
	left int
	err  error
}

func (r *failingReader) ReadAt(p []byte, at int64) (int, error) {
	if r.left--; r.left < 0 {
		return 0, r.err
	}
	return r.Reader.ReadAt(p, at)
}

// TestEveryFailedReadIsReported: a read that fails is the error of the footer, of a row or of a
// page, and is not taken for damage.
func TestEveryFailedReadIsReported(t *testing.T) {
	errDisk := errors.New("the disk has failed")
	for _, name := range fixtureNames(t) {
		data := fixture(t, name)
		for reads := 0; ; reads++ {
			r := &failingReader{bytes.NewReader(data), reads, errDisk}
			_, err := readFrom(r, int64(len(data)), columnsOf[name])
			if r.left >= 0 {
				if err != nil {
					t.Errorf("%s: got error %v, want none", name, err)
				}
				break
			}
			if !errors.Is(err, errDisk) {
				t.Errorf("%s, after %d reads: got error %v, want %v", name, reads, err, errDisk)
			}
		}
	}
}

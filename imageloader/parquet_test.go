package imageloader

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/parquettest"
)

// rowsOf returns the members of a tar as rows. The label of a row is the member's folder, and the
// folders are ordered by bytes.
func rowsOf(t testing.TB, data []byte) (rows []parquettest.Row, classes []string) {
	t.Helper()
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		rows = append(rows, parquettest.Row{Path: h.Name, Image: string(content)})
		classes = append(classes, path.Base(path.Dir(h.Name)))
	}
	slices.Sort(classes)
	classes = slices.Compact(classes)
	for i := range rows {
		rows[i].Label = slices.Index(classes, path.Base(path.Dir(rows[i].Path)))
	}
	return rows, classes
}

// TestParquetGivesTheBatchesOfTheTar compares a .tar with Parquet files of the same photographs. It
// uses one file, shards, and a file behind a URL. All of them give the same pixels, labels and
// samples, with and without an index, in every order, and to every rank and part.
func TestParquetGivesTheBatchesOfTheTar(t *testing.T) {
	data := photoTar(t, 60)
	rows, classes := rowsOf(t, data)
	dir := writeNamed(t, map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data),
		"plain.parquet":   parquettest.File(t, rows, parquettest.Layout{Classes: classes, Group: 17, Page: 5}),
		"packed.parquet":  parquettest.File(t, rows, parquettest.Layout{Classes: classes, Group: 20, Page: 7, Snappy: true}),
		"train-0.parquet": parquettest.File(t, rows[:25], parquettest.Layout{Classes: classes, Group: 10}),
		"train-1.parquet": parquettest.File(t, rows[25:], parquettest.Layout{Classes: classes, Snappy: true})})
	server := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer server.Close()
	for name, o := range map[string]Options{
		"in order": {},
		"shuffled": {Shuffle: true, Seed: 3},
		"rank":     {Shuffle: true, Rank: 1, World: 3},
		"balanced": {Shuffle: true, Balanced: true},
		"part":     {Shuffle: true, Part: Part{HeldOut: 0.4}},
	} {
		o.BatchSize, o.Transform = 8, Train(32)
		epoch := func(path string, o Options) string {
			l, err := Open(path, o)
			if err != nil {
				t.Fatalf("%s of %s: %v", name, path, err)
			}
			defer l.Close()
			if got := l.Classes(); !slices.Equal(got, classes) {
				t.Errorf("%s: classes %q, want %q", path, got, classes)
			}
			batches, err := collect(t, l, 1, 2)
			if err != nil || len(batches) == 0 {
				t.Fatalf("%s of %s: %d batches, error %v, want some and no error", name, path, len(batches), err)
			}
			return digest(batches)
		}
		for _, noIndex := range []bool{true, false, false} { // the last pass reads the index
			o.NoIndex = noIndex
			want := epoch(filepath.Join(dir, "a.tar"), o)
			for _, file := range []string{dir + "/plain.parquet", dir + "/packed.parquet", dir + "/train-*.parquet",
				server.URL + "/plain.parquet", server.URL + "/packed.parquet"} {
				if strings.Contains(file, "://") {
					o.IndexFile = filepath.Join(dir, path.Base(file)+".url.tsidx")
				}
				if got := epoch(file, o); got != want {
					t.Errorf("%s of %s, NoIndex %v: digest %s, want the tar's %s", name, path.Base(file), noIndex, got, want)
				}
				o.IndexFile = ""
			}
		}
	}
	for file, random := range map[string]bool{"plain.parquet": true, "packed.parquet": true} {
		l, err := Open(filepath.Join(dir, file), Options{})
		if err != nil {
			t.Fatal(err)
		}
		if got := l.index.Load().Random(); got != random || !l.index.Load().HasFile() {
			t.Errorf("%s: random access %v, index file %v, want %v and true", file, got, l.index.Load().HasFile(), random)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestLargePagesAreReadInOrder: if the samples do not fit in ShuffleBytes, and a compressed page
// has many samples, the epoch equals the epoch of a .tgz that is shuffled through the same buffer.
func TestLargePagesAreReadInOrder(t *testing.T) {
	data := photoTar(t, 60)
	rows, classes := rowsOf(t, data)
	dir := writeNamed(t, map[string][]byte{"a.tgz": archivetest.Gzip(t, data),
		"a.parquet": parquettest.File(t, rows, parquettest.Layout{Classes: classes, Snappy: true})})
	want := ""
	for _, file := range []string{"a.tgz", "a.parquet"} {
		l, err := Open(filepath.Join(dir, file), Options{BatchSize: 8, Transform: Train(32), Shuffle: true, ShuffleBuffer: 16,
			ShuffleBytes: 1 << 14, NoIndex: true, Classes: classes})
		if err != nil {
			t.Fatal(err)
		}
		if x := l.index.Load(); x != nil && x.Random() {
			t.Errorf("%s has random access with work %v, want none", file, x.Work())
		}
		batches, err := collect(t, l, 0, 2)
		if err != nil {
			t.Fatal(err)
		}
		if got := digest(batches); want == "" {
			want = got
		} else if got != want {
			t.Errorf("%s: digest %s, want the .tgz's %s", file, got, want)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// expectedRow is a row of testdata/parquet/expected.json.
type expectedRow struct {
	labels []string
	crc    uint32
	absent bool
}

// expectedParquet returns the rows that Hugging Face's datasets reads from the fixtures.
func expectedParquet(t *testing.T) map[string][]expectedRow {
	t.Helper()
	text, err := os.ReadFile("testdata/parquet/expected.json")
	if err != nil {
		t.Fatal(err)
	}
	var files map[string][][3]json.RawMessage
	if err := json.Unmarshal(text, &files); err != nil {
		t.Fatal(err)
	}
	expected := map[string][]expectedRow{}
	for name, rows := range files {
		for _, row := range rows {
			var e expectedRow
			if err := errors.Join(json.Unmarshal(row[1], &e.labels), json.Unmarshal(row[2], &e.crc)); err != nil {
				t.Fatal(err)
			}
			e.labels = slices.DeleteFunc(e.labels, func(s string) bool { return s == "None" })
			e.absent = string(row[2]) == "null"
			expected[name] = append(expected[name], e)
		}
	}
	return expected
}

// TestParquetOfAllWritersGivesTheSamplesOfDatasets reads files from datasets, pandas, Polars,
// DuckDB and pyarrow. The counts, labels, classes and images equal those that datasets reads.
// Inspect counts the same.
func TestParquetOfAllWritersGivesTheSamplesOfDatasets(t *testing.T) {
	named := []string{"owl", "cat", "café"}
	for name, rows := range expectedParquet(t) {
		o := Options{BatchSize: 4, Transform: Eval(4, 4)}
		want := named
		switch name {
		case "datasets-lists":
			o.MultiLabel = true
		case "datasets-two":
			o.Columns.Labels = []string{"fine_label"}
		case "flags", "flags-2":
			o.MultiLabel, o.Columns.Labels, want = true, []string{"bird", "round"}, []string{"bird", "round"}
		case "polars", "plain-numbers", "delta-none":
			want = []string{"0", "1", "2"}
		case "datasets", "datasets-absent":
		default:
			want = []string{"café", "cat", "owl"}
		}
		file := "testdata/parquet/" + name + ".parquet"
		l := openFake(t, file, o)
		if got := l.Classes(); !slices.Equal(got, want) {
			t.Errorf("%s: classes %q, want %q", name, got, want)
		}
		x := l.index.Load()
		k, absent := 0, 0
		for _, r := range rows {
			if r.absent || len(r.labels) == 0 && !o.MultiLabel {
				absent++
				continue
			}
			var labels []string
			if o.MultiLabel {
				for _, label := range x.Labels(k) {
					labels = append(labels, l.Classes()[label])
				}
			} else {
				labels = []string{l.Classes()[x.Label(k)]}
			}
			slices.Sort(labels)
			slices.Sort(r.labels)
			if name == "datasets-two" {
				r.labels = slices.DeleteFunc(r.labels, func(s string) bool { return s == "bird" || s == "beast" })
			}
			if !slices.Equal(labels, r.labels) {
				t.Errorf("%s, sample %d %q: labels %q, want %q", name, k, x.Name(k), labels, r.labels)
			}
			k++
		}
		if l.Len() != k {
			t.Errorf("%s: %d samples, want %d", name, l.Len(), k)
		}
		checkContents(t, file, o, rows)
		r, err := inspect(t.Context(), file, o, openFile, fakeCodec{})
		if name == "datasets-lists" || strings.HasPrefix(name, "flags") {
			continue // Inspect has only single labels
		}
		if err != nil || r.Format != "parquet" || r.Samples != k || r.Ignored != absent || len(r.Bad) != 0 {
			t.Errorf("Inspect of %s: got %+v, error %v, want %d samples and %d ignored", name, r, err, k, absent)
		}
	}
}

// checkContents compares the contents of an archive's samples with checksums.
func checkContents(t *testing.T, file string, o Options, rows []expectedRow) {
	t.Helper()
	l := openFake(t, file, o)
	a, err := l.openAgain(t.Context(), l.archiveConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	k := 0
	for _, r := range rows {
		if r.absent || len(r.labels) == 0 && !o.MultiLabel {
			continue
		}
		data := make([]byte, l.index.Load().Size(k))
		if err := l.index.Load().ReadForward(a, k, data); err != nil || crc32.ChecksumIEEE(data) != r.crc {
			t.Errorf("%s, sample %d: %q, error %v, want bytes with the checksum %d", file, k, data, err, r.crc)
		}
		k++
	}
}

// TestParquetOptionsAreChecked: an option that a Parquet file cannot use is an error. So is an
// option for Parquet files with another archive.
func TestParquetOptionsAreChecked(t *testing.T) {
	table := "testdata/parquet/datasets.parquet"
	tarball := archivetest.WriteFile(t, "a.tar", archivetest.Numbered(t, 1, 2))
	for want, open := range map[string]func() (*Loader, error){
		"leave out Options.WebDataset": func() (*Loader, error) { return Open(table, Options{WebDataset: true}) },
		"Options.Masks": func() (*Loader, error) {
			return Open(table, Options{Masks: Masks{Image: "*.jpg", Mask: "*.png"}})
		},
		"Options.Columns is for Parquet": func() (*Loader, error) {
			return Open(tarball, Options{Columns: Columns{Image: "image"}})
		},
		"Options.MultiLabel is for": func() (*Loader, error) { return Open(tarball, Options{MultiLabel: true}) },
		`no column of bytes with the name "photo"`: func() (*Loader, error) {
			return Open(table, Options{Columns: Columns{Image: "photo"}})
		},
		`"owl/0.png" is of class "owl"`: func() (*Loader, error) {
			return open(t.Context(), table, Options{Classes: []string{"cat"}, NoIndex: true}, openFile, fakeCodec{})
		},
	} {
		l, err := open()
		if err == nil {
			l.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want one with %q", err, want)
		}
	}
	_, _, err := Fix(t.Context(), table, filepath.Join(t.TempDir(), "a.tar"), Options{}, FixOptions{}, nil)
	if err == nil || !strings.Contains(err.Error(), "Parquet") {
		t.Errorf("Fix: error %v, want one that names Parquet", err)
	}
}

// TestIndexOfOtherColumnsIsNotUsed: the loader does not use an index that was made for other
// columns.
func TestIndexOfOtherColumnsIsNotUsed(t *testing.T) {
	data, err := os.ReadFile("testdata/parquet/datasets-two.parquet")
	if err != nil {
		t.Fatal(err)
	}
	file := archivetest.WriteFile(t, "a.parquet", data)
	for _, c := range []struct{ column, classes string }{{"fine_label", "[owl cat café]"}, {"coarse_label", "[bird beast]"},
		{"fine_label", "[owl cat café]"}} {
		l, err := open(t.Context(), file, Options{Columns: Columns{Labels: []string{c.column}}}, nil, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(l.Classes()); got != c.classes {
			t.Errorf("column %s: classes %s, want %s", c.column, got, c.classes)
		}
		if !l.index.Load().HasFile() {
			t.Errorf("column %s: got no index file, want one", c.column)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestImpossibleLabelOfAColumnIsAnError: for a number that no class can have, Open and Inspect
// return an error that names the image.
func TestImpossibleLabelOfAColumnIsAnError(t *testing.T) {
	rows, _ := rowsOf(t, archivetest.Images(t, 6, nil))
	rows[4].Label = 1 << 20
	file := archivetest.WriteFile(t, "a.parquet", parquettest.File(t, rows, parquettest.Layout{}))
	_, opened := open(t.Context(), file, Options{NoIndex: true}, openFile, fakeCodec{})
	_, inspected := inspect(t.Context(), file, Options{}, openFile, fakeCodec{})
	for _, err := range []error{opened, inspected} {
		var label *index.LabelError
		if !errors.As(err, &label) || label.Name != rows[4].Path || label.Label != "1048576" {
			t.Errorf("got error %v, want a LabelError of %q with the label 1048576", err, rows[4].Path)
		}
	}
}

// TestParquetShardsMustAgree: if the shards have different classes or formats, Open returns an
// error that names the shard.
func TestParquetShardsMustAgree(t *testing.T) {
	rows, classes := rowsOf(t, archivetest.Images(t, 6, nil))
	dir := writeNamed(t, map[string][]byte{"a-0.x": parquettest.File(t, rows, parquettest.Layout{Classes: classes}),
		"a-1.x": parquettest.File(t, rows, parquettest.Layout{Classes: append([]string{"other"}, classes...)}),
		"b-0.x": parquettest.File(t, rows, parquettest.Layout{Classes: classes}), "b-1.x": archivetest.Images(t, 6, nil),
		"c-0.x": archivetest.Images(t, 6, nil), "c-1.x": parquettest.File(t, rows, parquettest.Layout{Classes: classes})})
	for _, which := range []string{"a", "b", "c"} {
		l, err := open(t.Context(), filepath.Join(dir, which+"-*.x"), Options{NoIndex: true}, openFile, fakeCodec{})
		if err == nil {
			l.Close()
		}
		if err == nil || !strings.Contains(err.Error(), which+"-1.x") {
			t.Errorf("shards %s: error %v, want one that names the second", which, err)
		}
	}
}

// FuzzParquet: whatever the bytes of a Parquet file, epochs and Inspect end, and two epochs deliver
// the same samples and the same error.
func FuzzParquet(f *testing.F) {
	list, err := filepath.Glob("testdata/parquet/*.parquet")
	if err != nil || len(list) < 20 {
		f.Fatalf("%d fixtures, error %v, want 20 or more", len(list), err)
	}
	for _, file := range list {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, uint8(0))
		f.Add(data, uint8(1))
	}
	f.Fuzz(func(t *testing.T, data []byte, mode uint8) {
		o := Options{BatchSize: 4, Transform: Eval(2, 2), BadSamples: Skip, Shuffle: true, Workers: 2,
			MaxSampleBytes: 1 << 16, NoIndex: true, MultiLabel: mode&1 > 0, ShuffleBytes: int64(1 + mode)}
		file := func(string) (archive.File, error) { return memoryFile{bytes.NewReader(data)}, nil }
		r, errI := inspect(t.Context(), "memory", Options{MaxSampleBytes: 1 << 16}, file, fakeCodec{})
		l, err := open(t.Context(), "memory", o, file, fakeCodec{})
		if err != nil {
			return
		}
		defer l.Close()
		first, err1 := collect(t, l, 0, 2)
		second, err2 := collect(t, l, 0, 2)
		if digest(first) != digest(second) || (err1 == nil) != (err2 == nil) {
			t.Errorf("%d samples, error %v, then %d samples, error %v", len(names(first)), err1,
				len(names(second)), err2)
		}
		if !o.MultiLabel && err1 == nil && errI == nil && r.Format == "parquet" && r.Samples-len(r.Bad) != len(names(first)) {
			t.Errorf("an epoch has %d samples, want %d as Inspect", len(names(first)), r.Samples-len(r.Bad))
		}
	})
}

// TestDamagedPagesNameTheirPlace: a page is damaged. The error of the epoch names the file, the row
// group, the row and the column.
func TestDamagedPagesNameTheirPlace(t *testing.T) {
	rows, classes := rowsOf(t, archivetest.Images(t, 12, nil))
	data := parquettest.File(t, rows[:12], parquettest.Layout{Classes: classes, Group: 4, Snappy: true})
	at := bytes.LastIndex(data, []byte("PNG")) - 20 // in the image column of the last row group
	data[at] ^= 0xff
	data[at+1] ^= 0xff
	l, err := open(t.Context(), archivetest.WriteFile(t, "a.parquet", data), Options{NoIndex: true}, openFile, fakeCodec{})
	if err == nil {
		l.Close()
	}
	var damage *ArchiveError
	if !errors.As(err, &damage) || !strings.Contains(err.Error(), "row group 2, row 8, column image.bytes") ||
		!strings.Contains(err.Error(), "a.parquet") {
		t.Errorf("got error %v, want an ArchiveError that names the file, row group 2, row 8 and the column", err)
	}
}

// With RowNames, each name is unique and has the file and the row, also of rows with the same path,
// without a path, or after rows without a label.
func TestRowNamesLeadToTheRow(t *testing.T) {
	photo := string(archivetest.Photo(t, 1))
	rows := []parquettest.Row{{Path: "a.jpg", Image: photo}, {Path: "a.jpg", Image: photo, Label: -1},
		{Path: "a.jpg", Image: photo, Label: 1}, {Image: photo}}
	data := parquettest.File(t, rows, parquettest.Layout{Classes: []string{"a", "b"}, Group: 2})
	dir := t.TempDir()
	for _, file := range []string{"x/train-0.parquet", "x/train-1.parquet", "y/train-0.parquet"} {
		path := filepath.Join(dir, file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, data, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	for pattern, want := range map[string][]string{
		"x/train-0.parquet": {"train-0/00000000/a.jpg", "train-0/00000002/a.jpg", "train-0/00000003"},
		"x/train-*.parquet": {"train-0/00000000/a.jpg", "train-0/00000002/a.jpg", "train-0/00000003",
			"train-1/00000000/a.jpg", "train-1/00000002/a.jpg", "train-1/00000003"},
		"*/train-0.parquet": {"x/train-0/00000000/a.jpg", "x/train-0/00000002/a.jpg", "x/train-0/00000003",
			"y/train-0/00000000/a.jpg", "y/train-0/00000002/a.jpg", "y/train-0/00000003"},
	} {
		l, err := Open(filepath.Join(dir, pattern), Options{Columns: Columns{RowNames: true}})
		if err != nil {
			t.Fatal(err)
		}
		batches, err := collect(t, l, 0, 1)
		if got := names(batches); err != nil || !slices.Equal(got, want) || l.index.Load().HasFile() {
			t.Errorf("%s: got %q, %v, index file %v, want %q and none", pattern, got, err, l.index.Load().HasFile(), want)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	with := Options{Columns: Columns{RowNames: true}}
	_, err := MakeIndex(t.Context(), filepath.Join(dir, "x/train-0.parquet"), with, nil)
	if err == nil || !strings.Contains(err.Error(), "RowNames is not stored") {
		t.Errorf("MakeIndex with RowNames: got %v, want an error", err)
	}
	_, err = InspectIndex(t.Context(), filepath.Join(dir, "x/train-0.parquet"), with, nil)
	if err == nil || !strings.Contains(err.Error(), "RowNames is not stored") {
		t.Errorf("InspectIndex with RowNames: got %v, want an error", err)
	}
	if files, err := filepath.Glob(filepath.Join(dir, "x", "*")); err != nil || len(files) != 2 {
		t.Errorf("with RowNames: got the files %q, %v, want no index", files, err)
	}
	_, err = Open(filepath.Join(dir, "x/train-0.parquet"), Options{List: "a.csv", Columns: Columns{RowNames: true}})
	if err == nil || !strings.Contains(err.Error(), "RowNames and Options.List") {
		t.Errorf("with a list: got %v, want an error with both options", err)
	}
}

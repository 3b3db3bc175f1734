package pack_test

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/jpeg"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/pack"
	"github.com/torchstream/torchstream/internal/parquettest"
)

// photo returns a different picture for each number.
func photo(t testing.TB, number, width, height int) image.Image {
	t.Helper()
	m := archivetest.Gradient(width, height)
	for y := range height / 2 {
		for x := range width / 2 {
			m.Set(x, y, color.RGBA{uint8(40 * number), uint8(91 * number), uint8(number), 255})
		}
	}
	return m
}

// photos returns n samples of 3 classes, every fourth a PNG.
func photos(t testing.TB, n int) (list []archivetest.Member) {
	t.Helper()
	for i := range n {
		m := photo(t, i+1, 20+i%5, 24)
		name, data := fmt.Sprintf("%s/%03d.jpg", []string{"ant", "bee", "cat ü"}[i%3], i), archivetest.JPEG(t, m)
		if i%4 == 3 {
			name, data = strings.TrimSuffix(name, "jpg")+"png", archivetest.PNG(t, m)
		}
		list = append(list, archivetest.Member{Name: name, Data: data})
	}
	return append(list, archivetest.Member{Name: "ant/notes.txt", Data: "no image"})
}

// samples returns a loader's view of an archive: for each sample a text with its class and a digest
// of its pixels, and the names.
func samples(t testing.TB, path string, o imageloader.Options) (list, names, classes []string) {
	t.Helper()
	o.BatchSize, o.Transform, o.NoIndex = 8, imageloader.Eval(8, 8), true
	l, err := imageloader.Open(path, o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	classes = l.Classes()
	for b, err := range l.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		for i := range b.N {
			list = append(list, fmt.Sprintf("%s %x", classes[b.Labels[i]], sha256.Sum256(b.Images[i*192:][:192])))
			names = append(names, b.Samples[i].Name)
		}
	}
	slices.Sort(list)
	return list, names, classes
}

// contents returns the members of a folder's shards by name, and the names in their order.
func contents(t testing.TB, pattern string) (data map[string]string, names []string) {
	t.Helper()
	data = map[string]string{}
	shards, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range shards {
		file, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		var in io.Reader = file
		if strings.HasSuffix(path, ".tgz") {
			if in, err = gzip.NewReader(file); err != nil {
				t.Fatal(err)
			}
		}
		for r := tar.NewReader(in); ; {
			h, err := r.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			content, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			if _, twice := data[h.Name]; twice {
				t.Errorf("%s: %q is there twice", path, h.Name)
			}
			data[h.Name] = string(content)
			names = append(names, h.Name)
		}
	}
	return data, names
}

// zipped returns a zip of members.
func zipped(t testing.TB, members []archivetest.Member) []byte {
	t.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for _, m := range members {
		f, err := w.Create(m.Name)
		if err == nil {
			_, err = io.WriteString(f, m.Data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// files returns the files of a folder by name, except indexes.
func files(t testing.TB, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".tsidx") {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		found[e.Name()] = string(data)
	}
	return found
}

// differences names the files in which two folders differ, except the journals.
func differences(got, want map[string]string) (names []string) {
	for name := range maps.Keys(want) {
		if name != pack.JournalFile && got[name] != want[name] {
			names = append(names, name)
		}
	}
	for name := range got {
		if _, wanted := want[name]; !wanted {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func write(t testing.TB, path, dir string, in imageloader.Options, o pack.Options) *pack.Report {
	t.Helper()
	r, err := pack.Write(t.Context(), path, dir, in, o)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return r
}

// inputs writes the same samples as every kind of input, and returns their paths.
func inputs(t testing.TB, members []archivetest.Member) map[string]string {
	t.Helper()
	data := archivetest.Tar(t, members...)
	return map[string]string{
		"folder": archivetest.Extract(t, members),
		"tar":    archivetest.WriteFile(t, "a.tar", data),
		"tgz":    archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data)),
		"zst":    archivetest.WriteFile(t, "a.tar.zst", archivetest.Zstd(t, data)),
		"zip":    archivetest.WriteFile(t, "a.zip", zipped(t, members)),
	}
}

// TestShardsHaveTheSamplesOfTheInput: each image keeps its bytes and its class, from every kind of
// input to every format, in shards of the wanted size with an index, in another order.
func TestShardsHaveTheSamplesOfTheInput(t *testing.T) {
	members := photos(t, 30)
	inFiles := archivetest.Contents(members)
	delete(inFiles, "ant/notes.txt")
	for kind, path := range inputs(t, members) {
		want, _, wantClasses := samples(t, path, imageloader.Options{})
		for _, format := range []pack.Format{pack.Tar, pack.TarGzip, pack.WebDataset} {
			dir := filepath.Join(t.TempDir(), "out")
			r := write(t, path, dir, imageloader.Options{}, pack.Options{Format: format, ShardBytes: 16 << 10})
			o := imageloader.Options{WebDataset: format == pack.WebDataset}
			got, names, classes := samples(t, r.Parts[0].Shards, o)
			if !slices.Equal(got, want) || !slices.Equal(classes, wantClasses) {
				t.Errorf("%s to %s: got %d samples of %q, want the input's %d of %q", kind, format, len(got), classes,
					len(want), wantClasses)
			}
			if slices.IsSorted(names) {
				t.Errorf("%s to %s: the samples are in the input's order", kind, format)
			}
			if r.Samples != 30 || r.Others != 1 || r.Parts[0].Samples != 30 || r.Parts[0].Files < 2 {
				t.Errorf("%s to %s: got %d samples and %d others, %d in %d shards; want 30, 1, 30, at least 2", kind, format,
					r.Samples, r.Others, r.Parts[0].Samples, r.Parts[0].Files)
			}
			if _, err := os.Stat(r.Parts[0].Index); err != nil || filepath.Dir(r.Parts[0].Index) != dir {
				t.Errorf("%s to %s: got the index %q (%v), want one in %s", kind, format, r.Parts[0].Index, err, dir)
			}
			data, _ := contents(t, filepath.Join(dir, "train-*.t*[rz]"))
			inBytes, outBytes := slices.Sorted(maps.Values(inFiles)), []string{}
			for name, content := range data {
				if !strings.HasSuffix(name, ".cls") {
					outBytes = append(outBytes, content)
				}
			}
			if slices.Sort(outBytes); !slices.Equal(outBytes, inBytes) {
				t.Errorf("%s to %s: got %d images, want the bytes of %d", kind, format, len(outBytes), len(inBytes))
			}
			for _, s := range shards(t, dir) {
				if s.Size() > 16<<10 {
					t.Errorf("%s to %s: %s has %d bytes, want at most %d", kind, format, s.Name(), s.Size(), 16<<10)
				}
			}
		}
	}
}

func shards(t testing.TB, dir string) (list []os.FileInfo) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".tar") || strings.HasSuffix(e.Name(), ".tgz") {
			info, err := e.Info()
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, info)
		}
	}
	return list
}

// TestListGivesClasses: the classes of a list become directories or .cls members. Numbers keep
// their order. Classes whose order or names directories cannot have need .cls members.
func TestListGivesClasses(t *testing.T) {
	members := photos(t, 24)
	dir := archivetest.Extract(t, members)
	list := func(class func(i int) string) string {
		var b strings.Builder
		for i, m := range members[:24] {
			fmt.Fprintf(&b, "%s,%q\n", m.Name, class(i))
		}
		return archivetest.WriteFile(t, "list.csv", []byte(b.String()))
	}
	for _, c := range []struct {
		name    string
		class   func(i int) string
		refused map[pack.Format]string // a part of the message
	}{
		{"words", func(i int) string { return []string{"red", "green", "blå"}[i%3] }, nil},
		{"few numbers", func(i int) string { return strconv.Itoa(i % 3) }, nil},
		{"many numbers", func(i int) string { return strconv.Itoa(i % 12) },
			map[pack.Format]string{pack.Tar: "-format webdataset"}},
		{"numbers with gaps", func(i int) string { return strconv.Itoa(i % 2 * 5) },
			map[pack.Format]string{pack.Tar: "has no sample"}},
		{"paths", func(i int) string { return []string{"a/b", "a/c"}[i%2] },
			map[pack.Format]string{pack.Tar: "-format webdataset"}},
		{"parents", func(i int) string { return []string{"..", "a"}[i%2] },
			map[pack.Format]string{pack.Tar: "-format webdataset"}},
		{"hidden", func(i int) string { return []string{".x", "a"}[i%2] },
			map[pack.Format]string{pack.Tar: "-format webdataset"}},
	} {
		in := imageloader.Options{List: list(c.class)}
		want, _, wantClasses := samples(t, dir, in)
		for _, format := range []pack.Format{pack.Tar, pack.WebDataset} {
			out := filepath.Join(t.TempDir(), "out")
			r, err := pack.Write(t.Context(), dir, out, in, pack.Options{Format: format})
			if says := c.refused[format]; says != "" {
				if err == nil || !strings.Contains(err.Error(), says) {
					t.Errorf("%s to %s: error %v, want one with %q", c.name, format, err, says)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s to %s: %v", c.name, format, err)
				continue
			}
			got, _, classes := samples(t, r.Parts[0].Shards, imageloader.Options{WebDataset: format == pack.WebDataset})
			if !slices.Equal(got, want) || !slices.Equal(classes, wantClasses) {
				t.Errorf("%s to %s: got %d samples of %q, want the input's %d of %q", c.name, format, len(got), classes,
					len(want), wantClasses)
			}
		}
	}
}

// TestClassesInAnotherOrderBecomeNumbers: .cls members have numbers if a loader would order the
// names of classes differently, such as 2023 and 2024. The labels stay.
func TestClassesInAnotherOrderBecomeNumbers(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t,
		archivetest.Member{Name: "2023/a.jpg", Data: archivetest.JPEG(t, photo(t, 1, 8, 8))},
		archivetest.Member{Name: "2024/b.jpg", Data: archivetest.JPEG(t, photo(t, 2, 8, 8))}))
	dir := t.TempDir()
	r := write(t, path, dir, imageloader.Options{}, pack.Options{Format: pack.WebDataset})
	data, _ := contents(t, filepath.Join(dir, "*.tar"))
	want := `1 {"label":1,"name":"2024"}`
	if got := data["2024/b.cls"] + " " + data["2024/b.json"]; got != want || !r.Numbered {
		t.Errorf("got the label %s (numbered %v), want %s", got, r.Numbered, want)
	}
	if _, _, classes := samples(t, r.Parts[0].Shards, imageloader.Options{WebDataset: true}); !slices.Equal(classes, []string{"0", "1"}) {
		t.Errorf("a loader reads the classes %q, want 0 and 1", classes)
	}
}

// TestParquetLabelsAreKept: rows of Parquet files, of plain and compressed pages, become samples
// with their labels, in the order of the file's names of classes.
func TestParquetLabelsAreKept(t *testing.T) {
	var rows []parquettest.Row
	for i, m := range photos(t, 30)[:30] {
		row := parquettest.Row{Image: m.Data, Label: i % 3}
		if i%2 == 0 { // others have no path
			row.Path = filepath.Base(m.Name)
		}
		rows = append(rows, row)
	}
	for _, names := range [][]string{{"ant", "bee", "cat"}, {"cat", "ant", "bee"}} {
		for _, snappy := range []bool{false, true} {
			path := archivetest.WriteFile(t, "a.parquet", parquettest.File(t, rows,
				parquettest.Layout{Classes: names, Group: 12, Page: 5, Snappy: snappy}))
			want, _, wantClasses := samples(t, path, imageloader.Options{})
			if len(want) != 30 || !slices.Equal(wantClasses, names) {
				t.Fatalf("the file has %d samples of %q, want 30 of %q", len(want), wantClasses, names)
			}
			for _, format := range []pack.Format{pack.TarGzip, pack.WebDataset} {
				r, err := pack.Write(t.Context(), path, t.TempDir(), imageloader.Options{}, pack.Options{Format: format})
				sorted := slices.IsSorted(names)
				if format == pack.TarGzip && !sorted {
					if err == nil || !strings.Contains(err.Error(), "-format webdataset") {
						t.Errorf("%s of %q: error %v, want one with -format webdataset", format, names, err)
					}
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				got, _, classes := samples(t, r.Parts[0].Shards, imageloader.Options{WebDataset: format == pack.WebDataset})
				if !sorted {
					for i := range got { // the class is a number there
						label, err := strconv.Atoi(got[i][:1])
						if err != nil {
							t.Fatal(err)
						}
						got[i] = names[label] + got[i][1:]
					}
					slices.Sort(got)
				}
				if !slices.Equal(got, want) || r.Numbered == sorted {
					t.Errorf("%s of %q, snappy %v: got %d samples of %q, want the file's %d", format, names, snappy, len(got),
						classes, len(want))
				}
			}
		}
	}
}

// webMembers returns n WebDataset samples of one shard, each with five members.
func webMembers(t testing.TB, first, n int) (list []archivetest.Member) {
	t.Helper()
	for i := range n {
		key, number := fmt.Sprintf("s/%03d", i), first+i
		list = append(list,
			archivetest.Member{Name: key + ".txt", Data: fmt.Sprint("caption ", number)},
			archivetest.Member{Name: key + ".jpg", Data: archivetest.JPEG(t, photo(t, number, 20, 20))},
			archivetest.Member{Name: key + ".seg.png", Data: archivetest.PNG(t, photo(t, number+100, 20, 20))},
			archivetest.Member{Name: key + ".cls", Data: fmt.Sprint(number % 12)},
			archivetest.Member{Name: key + ".json", Data: fmt.Sprintf(`{"id": %d}`, number)})
	}
	return list
}

// TestWebDatasetSamplesKeepTheirMembers: captions, masks and JSON stay with their image, from plain
// and compressed shards. Two shards of the input have the same keys.
func TestWebDatasetSamplesKeepTheirMembers(t *testing.T) {
	dir := t.TempDir()
	one, two := webMembers(t, 0, 12), webMembers(t, 50, 12)
	for name, data := range map[string][]byte{"p-0.tar": archivetest.Tar(t, one...), "p-1.tar": archivetest.Tar(t, two...),
		"g-0.tgz": archivetest.Gzip(t, archivetest.Tar(t, one...)), "g-1.tgz": archivetest.Gzip(t, archivetest.Tar(t, two...)),
		"m-0.tar": archivetest.Tar(t, one...), "m-1.tar.zst": archivetest.Zstd(t, archivetest.Tar(t, two...)),
		"z-0.zip": zipped(t, one), "z-1.zip": zipped(t, two)} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := map[string]int{} // the members of a sample, without the key
	for i := 0; i < len(one); i += 5 {
		for _, m := range [][]archivetest.Member{one[i : i+5], two[i : i+5]} {
			want[group(m)]++
		}
	}
	for _, input := range []string{"p-*", "g-*", "m-*", "z-*"} {
		path, in := filepath.Join(dir, input), imageloader.Options{WebDataset: true, NoIndex: true}
		wantSamples, _, wantClasses := samples(t, path, in)
		out := t.TempDir()
		r := write(t, path, out, in, pack.Options{ShardBytes: 40 << 10})
		got, _, classes := samples(t, r.Parts[0].Shards, in)
		if !slices.Equal(got, wantSamples) || !slices.Equal(classes, wantClasses) {
			t.Errorf("%s: got %d samples of %q, want the input's %d of %q", input, len(got), classes, len(wantSamples),
				wantClasses)
		}
		if r.Others != 0 || r.Parts[0].Files < 2 {
			t.Errorf("%s: got %d other members and %d shards, want 0 and several", input, r.Others, r.Parts[0].Files)
		}
		data, names := contents(t, filepath.Join(out, "*.tar"))
		found := map[string]int{}
		for i := 0; i < len(names); i += 5 {
			var m []archivetest.Member
			for _, name := range names[i:min(i+5, len(names))] {
				m = append(m, archivetest.Member{Name: name, Data: data[name]})
			}
			found[group(m)]++
		}
		if !maps.Equal(found, want) {
			t.Errorf("%s: got %d groups of members, want the input's %d", input, len(found), len(want))
		}
	}
	for options, says := range map[*pack.Options]string{{Format: pack.Tar}: "-format webdataset",
		{Side: 8}: "without -side"} {
		_, err := pack.Write(t.Context(), filepath.Join(dir, "p-0.tar"), t.TempDir(), imageloader.Options{WebDataset: true},
			*options)
		if err == nil || !strings.Contains(err.Error(), "seg.png") && options.Side > 0 || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: error %v, want one with %q", *options, err, says)
		}
	}
}

// group returns the sorted extensions and contents of members that have one key.
func group(members []archivetest.Member) string {
	var list []string
	key := ""
	for _, m := range members {
		base, extension, _ := strings.Cut(m.Name, ".")
		if key != "" && base != key {
			return "two keys"
		}
		key = base
		list = append(list, fmt.Sprintf("%s %x", extension, sha256.Sum256([]byte(m.Data))))
	}
	slices.Sort(list)
	return strings.Join(list, "\n")
}

// TestNamesOfHostileForm: members whose names leave the folder, are absolute, long or repeated,
// have dots, or are not UTF-8 become samples that a loader finds, and that tar unpacks below a
// folder.
func TestNamesOfHostileForm(t *testing.T) {
	var members []archivetest.Member
	for i, name := range []string{"../../up/a.jpg", "/abs/a.jpg", "up/a.jpg", "a/same.jpg", "a/same.jpg", "a/same~2.jpg",
		"a/same.png", "a/one.two.jpg", "a/one_two.jpg", "a/no extension", "a/é.jpg", "a/e\u0301.jpg", "a/\xff\xfe.jpg",
		"a/" + strings.Repeat("long", 60) + ".jpg", "a/line\nbreak.jpg", "a/.hidden", "deep/" + strings.Repeat("d/", 40) + "a/x.JPG"} {
		data := archivetest.JPEG(t, photo(t, i+1, 24, 24))
		if strings.HasSuffix(name, ".png") {
			data = archivetest.PNG(t, photo(t, i+1, 24, 24))
		}
		members = append(members, archivetest.Member{Name: name, Data: data})
	}
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...))
	want, _, wantClasses := samples(t, path, imageloader.Options{})
	if len(want) != len(members) {
		t.Fatalf("the input has %d samples, want %d", len(want), len(members))
	}
	for _, o := range []pack.Options{{Format: pack.Tar}, {Format: pack.WebDataset}, {Format: pack.TarGzip, Side: 16}} {
		dir := t.TempDir()
		r := write(t, path, dir, imageloader.Options{}, o)
		got, _, classes := samples(t, r.Parts[0].Shards, imageloader.Options{WebDataset: o.Format == pack.WebDataset})
		if o.Side == 0 && !slices.Equal(got, want) || len(got) != len(want) || !slices.Equal(classes, wantClasses) {
			t.Errorf("%s: got %d samples of %q, want the input's %d of %q", o.Format, len(got), classes, len(want), wantClasses)
		}
		data, _ := contents(t, filepath.Join(dir, "train-*.t*[rz]")) // reports names that are there twice
		for name := range data {
			if !filepath.IsLocal(name) {
				t.Errorf("%s: the member %q would be unpacked elsewhere", o.Format, name)
			}
		}
	}
}

// TestPartsAreThoseOfTheLoader: the parts of a pack have the samples of a loader's parts, and every
// class stays in the training part.
func TestPartsAreThoseOfTheLoader(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, photos(t, 60)...))
	train := imageloader.Part{HeldOut: 0.25, Seed: 4}
	test := train
	test.Test = true
	dir := t.TempDir()
	r := write(t, path, dir, imageloader.Options{}, pack.Options{Shards: 3,
		Parts: []pack.Part{{Name: "train", Part: train}, {Name: "val", Part: test}}})
	total := 0
	for i, part := range []imageloader.Part{train, test} {
		_, want, _ := samples(t, path, imageloader.Options{Part: part})
		_, got, _ := samples(t, r.Parts[i].Shards, imageloader.Options{})
		slices.Sort(want)
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("part %s: got %d samples, want the loader's %d", r.Parts[i].Name, len(got), len(want))
		}
		total += r.Parts[i].Samples
	}
	if total != 60 || r.Parts[0].Files != 3 || r.Parts[1].Files != 1 {
		t.Errorf("got %d samples, %d and %d shards; want 60, 3 and 1", total, r.Parts[0].Files, r.Parts[1].Files)
	}
	_, err := pack.Write(t.Context(), path, t.TempDir(), imageloader.Options{},
		pack.Options{Parts: []pack.Part{{Name: "a", Part: imageloader.Part{Folder: "ant"}}, {Name: "b"}}})
	if err == nil || !strings.Contains(err.Error(), `the parts "a" and "b"`) {
		t.Errorf("parts that overlap: error %v, want one that names them", err)
	}
}

// TestSeedSetsTheOrder: the same seed gives the same bytes with any number of workers, and another
// seed gives another order.
func TestSeedSetsTheOrder(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, photos(t, 40)...))
	pack1 := func(seed uint64, workers int) map[string]string {
		dir := t.TempDir()
		write(t, path, dir, imageloader.Options{Seed: seed, Workers: workers}, pack.Options{ShardBytes: 20 << 10})
		return files(t, dir)
	}
	first := pack1(1, 1)
	if names := differences(pack1(1, 7), first); len(names) > 0 {
		t.Errorf("with 7 workers: got other bytes in %q, want those of one", names)
	}
	if names := differences(pack1(2, 1), first); len(names) == 0 {
		t.Error("another seed: got the same bytes, want another order")
	}
}

// damaged returns a tar of n photos. Those with the given numbers are cut off.
func damaged(t testing.TB, n int, cut ...int) []byte {
	t.Helper()
	members := photos(t, n)
	for _, i := range cut {
		members[i].Data = members[i].Data[:len(members[i].Data)/2]
	}
	return archivetest.Tar(t, members...)
}

// TestBadSamplesAreNamedAndCounted: a pack under Fail ends with an error that names a bad sample. A
// pack under Skip continues it, and counts and names all bad samples. Without Check, only the
// header of an image that is copied is examined.
func TestBadSamplesAreNamedAndCounted(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", damaged(t, 30, 4, 8, 20))
	dir := t.TempDir()
	o := pack.Options{Check: true, ShardBytes: 10 << 10}
	_, err := pack.Write(t.Context(), path, dir, imageloader.Options{}, o)
	var bad *imageloader.SampleError
	if !errors.As(err, &bad) || !slices.Contains([]int{4, 8, 20}, bad.Index) {
		t.Fatalf("Fail: error %v, want a *SampleError of a damaged sample", err)
	}
	r := write(t, path, dir, imageloader.Options{BadSamples: imageloader.Skip}, o)
	var names []string
	for _, l := range r.LeftOut {
		names = append(names, fmt.Sprint(l.Part, " ", l.Name, " ", l.Reason))
	}
	slices.Sort(names)
	want := []string{"train bee/004.jpg damaged", "train cat ü/008.jpg damaged", "train cat ü/020.jpg damaged"}
	if !slices.Equal(names, want) || r.Parts[0].Samples != 27 || r.Parts[0].LeftOut != 3 {
		t.Errorf("Skip: got %q left out, %d samples of %d; want %q, 27 of 30", names, r.Parts[0].Samples, r.Parts[0].Input, want)
	}
	if got, _, _ := samples(t, r.Parts[0].Shards, imageloader.Options{}); len(got) != 27 {
		t.Errorf("a loader finds %d samples, want 27", len(got))
	}
	if r = write(t, path, t.TempDir(), imageloader.Options{}, pack.Options{}); r.Parts[0].Samples != 30 {
		t.Errorf("without Check: got %d samples, want 30", r.Parts[0].Samples)
	}
	if _, err = pack.Write(t.Context(), path, t.TempDir(), imageloader.Options{}, pack.Options{Side: 8}); !errors.As(err, &bad) {
		t.Errorf("resized: error %v, want a *SampleError", err)
	}
}

// TestClassWithoutGoodSamplesIsAnError: the labels of the classes after it would change.
func TestClassWithoutGoodSamplesIsAnError(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", damaged(t, 6, 1, 4))
	dir, in := t.TempDir(), imageloader.Options{BadSamples: imageloader.Skip}
	_, err := pack.Write(t.Context(), path, dir, in, pack.Options{Check: true})
	if err == nil || !strings.Contains(err.Error(), `"bee"`) {
		t.Errorf("error %v, want one that names the class bee", err)
	}
	r := write(t, path, dir, in, pack.Options{Check: true, DropClasses: true})
	if !slices.Equal(r.Dropped, []string{"bee"}) || r.Parts[0].Samples != 4 {
		t.Errorf("DropClasses: got %q dropped and %d samples, want bee and 4", r.Dropped, r.Parts[0].Samples)
	}
}

// TestFoldersWithOtherFilesAreRefused: a pack writes only into an empty folder or into one that the
// same pack has begun, and never into its input.
func TestFoldersWithOtherFilesAreRefused(t *testing.T) {
	members := photos(t, 12)
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...))
	tree := archivetest.Extract(t, members)
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(tree, link); err != nil {
		t.Fatal(err)
	}
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "train-000000.tar"), []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	other := t.TempDir()
	write(t, path, other, imageloader.Options{}, pack.Options{Side: 100})
	was := files(t, other)
	late := t.TempDir() // a foreign file appears while this pack runs
	options := pack.Options{ShardBytes: 6 << 10}
	options.Progress = func(p imageloader.Progress) {
		if p.TotalBytes > 0 && p.Members == 3 {
			_ = os.WriteFile(filepath.Join(late, "train-000001.tar"), []byte("precious"), 0o644) // checked below
		}
	}
	for _, c := range []struct {
		path, dir string
		o         pack.Options
		says      string
	}{
		{tree, tree, pack.Options{}, "which is read"},
		{tree, filepath.Join(tree, "new", "deep"), pack.Options{}, "which is read"},
		{tree, filepath.Join(link, "new"), pack.Options{}, "which is read"},
		{path, filepath.Dir(path), pack.Options{}, `other files ("a.tar")`},
		{path, full, pack.Options{}, `other files ("train-000000.tar")`},
		{path, other, pack.Options{Side: 200}, `with -side "100", not "200"`},
		{tree, other, pack.Options{Side: 100}, "of another input, or of files that have changed since"},
		{path, late, options, "only an empty file is replaced"},
		{path, filepath.Join(t.TempDir(), "a[1]"), pack.Options{}, "a pattern"},
	} {
		_, err := pack.Write(t.Context(), c.path, c.dir, imageloader.Options{}, c.o)
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s into %s: error %v, want one with %q", c.path, c.dir, err, c.says)
		}
	}
	for dir, name := range map[string]string{full: "train-000000.tar", late: "train-000001.tar"} {
		if got := files(t, dir)[name]; got != "precious" {
			t.Errorf("%s in %s: got %d bytes, want those that were there", name, dir, len(got))
		}
	}
	if names := differences(files(t, other), was); len(names) > 0 {
		t.Errorf("refused packs changed %q", names)
	}
}

// TestRefusedPackSaysWhatDiffers: a folder has a pack of other files, samples or labels, or with
// another value of an option that chooses labels. The error names the difference.
func TestRefusedPackSaysWhatDiffers(t *testing.T) {
	members := slices.DeleteFunc(photos(t, 6), func(m archivetest.Member) bool { return filepath.Ext(m.Name) == ".txt" })
	tree := archivetest.Extract(t, members)
	list := filepath.Join(t.TempDir(), "labels.csv")
	text := "name,kind,place\n"
	for i, m := range members {
		text += fmt.Sprintf("%s,k%d,p%d\n", m.Name, i%2, i%3)
	}
	if err := os.WriteFile(list, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	o := func(label string) imageloader.Options {
		return imageloader.Options{List: list, NoIndex: true,
			ListFormat: imageloader.ListFormat{NameColumn: "name", LabelColumns: []string{label}}}
	}
	dir := t.TempDir()
	write(t, tree, dir, o("kind"), pack.Options{})
	refused := func(in imageloader.Options, says string) {
		t.Helper()
		_, err := pack.Write(t.Context(), tree, dir, in, pack.Options{})
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("error %v, want one with %q", err, says)
		}
	}
	refused(o("place"), `with -label-column "kind", not "place"`)
	inFolder := o("kind")
	inFolder.ListFormat.Folder = "."
	refused(inFolder, `with -list-folder "", not "."`)
	other := strings.Replace(text, ",k1,", ",k0,", 1)
	if err := os.WriteFile(list, []byte(other), 0o644); err != nil {
		t.Fatal(err)
	}
	refused(o("kind"), "with other labels, or a list that has changed since")
	if err := os.WriteFile(list, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(tree, filepath.FromSlash(members[0].Name))); err != nil {
		t.Fatal(err)
	}
	refused(o("kind"), "of an input with other samples")
}

// TestJournalContinuesFromEveryByte: a pack continues from a journal that ends after any byte. The
// folder has the shards that were complete by then, half a temporary file, and sometimes a shard
// that was renamed but is not in the journal yet.
func TestJournalContinuesFromEveryByte(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", damaged(t, 24, 5, 6, 7))
	in, o := imageloader.Options{BadSamples: imageloader.Skip}, pack.Options{Check: true, ShardBytes: 12 << 10}
	whole := t.TempDir()
	wantReport := write(t, path, whole, in, o)
	want := files(t, whole)
	journal := want[pack.JournalFile]
	if wantReport.Parts[0].Files < 3 {
		t.Fatalf("%d shards, want at least 3", wantReport.Parts[0].Files)
	}
	step := 1 + len(journal)/60
	if testing.Short() {
		step = 1 + len(journal)/12
	}
	for at := 0; at <= len(journal); at += step {
		dir := t.TempDir()
		begun := 0
		for name, data := range want {
			if name == pack.JournalFile {
				data = data[:at]
			} else if !strings.Contains(journal[:at], fmt.Sprintf("{\"start\":%q}\n", name)) {
				continue
			} else {
				begun++
				half := filepath.Join(dir, name+".123.tmp")
				if err := os.WriteFile(half, []byte(data[:len(data)/2]), 0o600); err != nil {
					t.Fatal(err)
				}
				if at%2 == 0 && !strings.Contains(journal[:at], fmt.Sprintf("{\"shard\":{\"name\":%q", name)) {
					continue // killed before the rename
				}
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		r := write(t, path, dir, in, o)
		got := files(t, dir)
		for name := range got { // of complete shards, which no kill leaves
			if strings.HasSuffix(name, ".tmp") && strings.Contains(journal[:at], fmt.Sprintf("{\"shard\":{\"name\":%q",
				strings.TrimSuffix(name, ".123.tmp"))) {
				delete(got, name)
			}
		}
		if names := differences(got, want); len(names) > 0 {
			t.Errorf("killed after %d bytes of the journal, %d shards begun: got other files %q", at, begun, names)
		}
		if r.Parts[0].Samples != 21 || len(r.LeftOut) != 3 {
			t.Errorf("killed after %d bytes: got %d samples and %d left out, want 21 and 3", at, r.Parts[0].Samples, len(r.LeftOut))
		}
	}
}

// TestMissingShardIsWrittenAgain: after a complete shard was removed or changed, the next pack
// writes it and the later ones again.
func TestMissingShardIsWrittenAgain(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, photos(t, 24)...))
	dir, o := t.TempDir(), pack.Options{ShardBytes: 10 << 10}
	write(t, path, dir, imageloader.Options{}, o)
	want := files(t, dir)
	if err := os.Remove(filepath.Join(dir, "train-000001.tar")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		write(t, path, dir, imageloader.Options{}, o)
		if names := differences(files(t, dir), want); len(names) > 0 {
			t.Errorf("got other files %q, want those before", names)
		}
		if err := os.WriteFile(filepath.Join(dir, "train-000000.tar"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCancelledPackLeavesNoTemporaryFile: it returns the context's error, and the next pack
// continues.
func TestCancelledPackLeavesNoTemporaryFile(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, photos(t, 24)...))
	dir, o := t.TempDir(), pack.Options{ShardBytes: 8 << 10}
	ctx, stop := context.WithCancel(t.Context())
	cancelled := o
	cancelled.Progress = func(p imageloader.Progress) {
		if p.Members == 12 {
			stop()
		}
	}
	if _, err := pack.Write(ctx, path, dir, imageloader.Options{}, cancelled); !errors.Is(err, context.Canceled) {
		t.Fatalf("error %v, want context.Canceled", err)
	}
	for name := range files(t, dir) {
		if strings.HasSuffix(name, ".tmp") || name == "pack.lock" {
			t.Errorf("got %s, want no temporary file", name)
		}
	}
	write(t, path, dir, imageloader.Options{}, o)
}

// withTag inserts an EXIF orientation into a JPEG.
func withTag(data string, orientation byte) string {
	return data[:2] + "\xff\xe1\x00\x22Exif\x00\x00II*\x00\x08\x00\x00\x00\x01\x00\x12\x01\x03\x00\x01\x00\x00\x00" +
		string([]byte{orientation, 0, 0, 0, 0, 0, 0, 0}) + data[2:]
}

// TestResizedImagesTrainLikeTheirOriginals: the shorter side has the wanted length, and the pixels
// equal a loader's resize, whether or not the loader applies EXIF's orientation. Smaller images
// keep their bytes.
func TestResizedImagesTrainLikeTheirOriginals(t *testing.T) {
	small := archivetest.JPEG(t, photo(t, 3, 30, 90))
	members := []archivetest.Member{
		{Name: "a/wide.jpg", Data: archivetest.JPEG(t, photo(t, 1, 400, 260))},
		{Name: "a/side.jpg", Data: withTag(archivetest.JPEG(t, photo(t, 2, 400, 200)), 6)},
		{Name: "a/small.jpg", Data: small},
		{Name: "b/high.png", Data: archivetest.PNG(t, photo(t, 4, 150, 333))},
		{Name: "b/small side.jpg", Data: withTag(archivetest.JPEG(t, photo(t, 5, 30, 60)), 8)},
	}
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...))
	for _, upright := range []bool{false, true} {
		dir := t.TempDir()
		r := write(t, path, dir, imageloader.Options{}, pack.Options{Side: 64, Quality: 95, Upright: upright})
		data, _ := contents(t, filepath.Join(dir, "*.tar"))
		wantSizes := map[string]image.Point{"a/wide.jpg": {98, 64}, "a/side.jpg": {128, 64}, "a/small.jpg": {30, 90},
			"b/high.jpg": {64, 142}, "b/small side.jpg": {30, 60}}
		resized := 3
		if upright {
			wantSizes["a/side.jpg"], wantSizes["b/small side.jpg"] = image.Pt(64, 128), image.Pt(60, 30)
			resized = 4
		}
		got := map[string]image.Point{}
		for name, content := range data {
			c, err := jpeg.DecodeConfig(strings.NewReader(content))
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			got[name] = image.Pt(c.Width, c.Height)
		}
		if !maps.Equal(got, wantSizes) || r.Parts[0].Resized != resized {
			t.Errorf("upright %v: got %v, %d resized; want %v, %d", upright, got, r.Parts[0].Resized, wantSizes, resized)
		}
		if data["a/small.jpg"] != small {
			t.Errorf("upright %v: the small image has other bytes", upright)
		}
		for _, turns := range []bool{false, true} { // the loader's option -upright
			if upright && !turns {
				continue
			}
			transform := imageloader.Transform{Size: 48, Resize: 64, ApplyEXIFOrientation: turns}
			want, have := pixels(t, path, transform), pixels(t, r.Parts[0].Shards, transform)
			for name, p := range want {
				if db := psnr(p, have[name]); db < 32 {
					t.Errorf("upright %v, loader's orientation %v: %s has %.1f dB, want at least 32", upright, turns, name, db)
				}
			}
		}
	}
}

// pixels returns the pixels of each sample by its name without the extension.
func pixels(t testing.TB, path string, transform imageloader.Transform) map[string][]byte {
	t.Helper()
	l, err := imageloader.Open(path, imageloader.Options{BatchSize: 1, Transform: transform, NoIndex: true})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	found := map[string][]byte{}
	for b, err := range l.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		found[strings.TrimSuffix(b.Samples[0].Name, filepath.Ext(b.Samples[0].Name))] = bytes.Clone(b.Images)
	}
	return found
}

// psnr returns the ratio of peak signal to noise.
func psnr(a, b []byte) float64 {
	if len(a) != len(b) {
		return 0
	}
	var sum float64
	for i := range a {
		d := float64(a[i]) - float64(b[i])
		sum += d * d
	}
	return 10 * math.Log10(255*255*float64(len(a))/max(sum, 1e-9))
}

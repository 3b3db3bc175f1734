package imageloader

import (
	"archive/tar"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// webFile is a member of a random shard, and the properties with which it was made.
type webFile struct {
	archivetest.Member
	key, extension string // key "" if it belongs to no sample
	image          bool
	label          string // of a .cls or .json; "": none
	odd            bool   // its label is an error
}

func (f *webFile) labels() bool { return f.extension == "cls" || f.extension == "json" }

// webModel models what a loader makes of shards by the rules in docs/imageloader.md: the samples
// with the text of their labels, the images without a label, and the members that are errors.
func webModel(shards [][]webFile) (samples [][2]string, orphans []string, faults map[string]bool) {
	faults = map[string]bool{}
	fault := func(shard int, f *webFile) { faults[fmt.Sprint(shard, " ", f.Name)] = true }
	for shard, files := range shards {
		var runs [][]webFile
		for _, f := range files {
			switch n := len(runs); {
			case f.key == "" && f.image:
				orphans = append(orphans, f.Name)
			case f.key == "":
			case n > 0 && runs[n-1][0].key == f.key:
				runs[n-1] = append(runs[n-1], f)
			default:
				runs = append(runs, []webFile{f})
			}
		}
		used := map[string]bool{}
		for _, run := range runs {
			has, label, from := map[string]bool{}, "", ""
			best := -1
			worth := func(f *webFile) int { // the lowest is the sample
				return 2*strings.Count(f.extension, ".") + map[bool]int{true: 0,
					false: 1}[f.extension == "jpg" || f.extension == "png"]
			}
			for i := range run {
				f := &run[i]
				if has[f.extension] || f.odd || (f.image || f.labels()) && !has["used"] && used[f.key] {
					fault(shard, f)
				}
				has[f.extension] = true
				if f.image || f.labels() {
					used[f.key], has["used"] = true, true
				}
				if f.label != "" {
					if label != "" && isWord(label) == isWord(f.label) &&
						strings.TrimLeft(label, "0") != strings.TrimLeft(f.label, "0") {
						fault(shard, f)
					}
					if label == "" || f.extension == "cls" {
						label, from = f.label, f.Name
					}
				}
				if f.image && (best < 0 || worth(f) < worth(&run[best])) {
					best = i
				}
			}
			switch {
			case best >= 0 && from != "":
				samples = append(samples, [2]string{run[best].Name, label})
			case best >= 0:
				orphans = append(orphans, run[best].Name)
			}
		}
	}
	return samples, orphans, faults
}

func isWord(label string) bool { _, err := strconv.Atoi(label); return err != nil }

// webNumbers returns the classes, and the number of each label.
func webNumbers(samples [][2]string) (classes []string, number map[string]int) {
	number = map[string]int{}
	var texts []string
	for _, s := range samples {
		texts = append(texts, s[1])
	}
	texts = slices.Compact(slices.Sorted(slices.Values(texts)))
	if slices.ContainsFunc(texts, isWord) {
		for i, text := range texts {
			number[text] = i
		}
		return texts, number
	}
	for _, text := range texts {
		number[text], _ = strconv.Atoi(text)
		for len(classes) <= number[text] {
			classes = append(classes, strconv.Itoa(len(classes)))
		}
	}
	return classes, number
}

// randomShards makes shards with oddities, and with one error in about half of the seeds.
func randomShards(r *rand.Rand) (shards [][]webFile) {
	words := []string{"0", "1", "3", "03", "7"}
	if r.IntN(2) == 0 {
		words = []string{"cat", "dog", "owl", "7", "é"}
	}
	chance := func(n int) bool { return r.IntN(n) == 0 }
	n := 0
	image := func(key, extension string) webFile {
		n++
		data := archivetest.Image(fmt.Sprint("image ", n))
		return webFile{Member: archivetest.Member{Name: key + "." + extension, Data: data}, key: key,
			extension: extension, image: true}
	}
	text := func(key, extension, data, label string) webFile {
		return webFile{Member: archivetest.Member{Name: key + "." + extension, Data: data}, key: key,
			extension: extension, label: label}
	}
	json := func(key, label string) webFile {
		value := strconv.Quote(label)
		if !isWord(label) && label != "03" && chance(2) {
			value = label
		}
		data := []string{`{"label":%s}`, `{"score":NaN,"low":-Infinity,"cls":%s}`,
			"\xef\xbb\xbf{\"s\":\"NaN \\\" Infinity\",\"class\":%s,\"x\":Infinity}\n",
			`{"class":{},"label": %s }`}[r.IntN(4)]
		return text(key, "json", fmt.Sprintf(data, value), label)
	}
	for range 1 + r.IntN(3) {
		var files []webFile
		for i := range r.IntN(6) {
			key := fmt.Sprintf("s.d/%03d", i)
			label := words[r.IntN(len(words))]
			group := []webFile{image(key, []string{"jpg", "png"}[r.IntN(2)])}
			switch r.IntN(6) {
			case 0: // no label
			case 1:
				group = append(group, text(key, "json", `{"caption": "label"}`, ""))
			case 2, 3:
				group = append(group, text(key, "cls",
					[]string{"", "\xef\xbb\xbf"}[r.IntN(2)]+label+[]string{"", "\n", " \r\n"}[r.IntN(3)], label))
			case 4:
				group = append(group, json(key, label))
			case 5:
				group = append(group, text(key, "cls", label, label), json(key, label))
			}
			if chance(3) {
				group = append(group, image(key, "depth.png"))
			}
			if chance(3) {
				group = append(group, image(key, "depth"))
			}
			if chance(3) {
				group = append(group, text(key, "txt", "a caption", ""))
			}
			if chance(4) { // a file that macOS adds, within the group
				group = append(group, webFile{Member: archivetest.Member{Name: "s.d/._" + key[4:] + ".jpg",
					Data: "\x00\x05\x16\x07"}},
					webFile{Member: archivetest.Member{Name: "s.d/._" + key[4:] + ".cls", Data: "\x00\x05\x16\x07"}})
			}
			if chance(6) {
				group = append(group, webFile{Member: archivetest.Member{Name: "README", Data: "text"}})
			}
			if chance(8) {
				n++
				group = append(group, webFile{Member: archivetest.Member{Name: fmt.Sprint("s.d/alone", n),
					Data: archivetest.Image("x")}, image: true})
			}
			r.Shuffle(len(group), func(i, j int) { group[i], group[j] = group[j], group[i] })
			files = append(files, group...)
		}
		shards = append(shards, files)
	}
	if chance(2) {
		return shards
	}
	shard := r.IntN(len(shards))
	files, key, label := shards[shard], "s.d/900", words[0]
	odd := func(extension, data string) []webFile {
		f := text(key, extension, data, "")
		f.odd = true
		return []webFile{image(key, "jpg"), f}
	}
	link := odd("cls", "")
	link[1].Kind, link[1].Link = tar.TypeLink, "s.d/000.cls"
	between := []webFile{image("s.d/901", "jpg")}
	again := []webFile{image(key, "jpg"), text(key, "cls", label, label)}
	upper := image(key, "jpg")
	upper.Name = key + ".JPG"
	shards[shard] = append(files, [][]webFile{
		slices.Concat(again, again),                       // a key twice in a row
		slices.Concat(again, between, again),              // and with another between
		slices.Concat(again[:1], between, again[1:]),      // not adjacent
		slices.Concat(again, []webFile{upper}),            // the same extension
		slices.Concat(again, []webFile{json(key, "1x1")}), // two labels, if the first is a name
		slices.Concat(again, []webFile{json(key, "9")}),   // two labels, if the first is a number
		odd("cls", "\x80\x04K\x03."), odd("cls", "\x03\x00\x00\x00"), odd("cls", " \n"), odd("cls", "\xff\xfe1\x00"),
		odd("json", `{"label": null}`), odd("json", `{"label": 0.5}`), odd("json", `{"label": NaN}`),
		odd("json", `{"label": 1,}`),
		odd("json", `{"label": "caf`+"\xe9"+`"}`), odd("json", `{"label": "caf\udce9"}`), odd("json", ""),
		odd("json", `{"label":1,"label":2}`), link,
	}[r.IntN(19)]...)
	return shards
}

// checkRandomShards compares a loader and Inspect with the model.
func checkRandomShards(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 29))
	shards := randomShards(r)
	samples, orphans, faults := webModel(shards)
	folder, ending := t.TempDir(), []string{"tar", "tar.gz"}[r.IntN(2)]
	files, labels := 0, 0
	for i, shard := range shards {
		var members []archivetest.Member
		for _, f := range shard {
			members = append(members, f.Member)
			if files++; f.labels() {
				labels++
			}
		}
		data := archivetest.Tar(t, members...)
		if ending == "tar.gz" {
			data = archivetest.Gzip(t, data)
		}
		if err := os.WriteFile(filepath.Join(folder, fmt.Sprintf("s-%d.%s", i, ending)), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(folder, fmt.Sprintf("s-{0..%d}.%s", len(shards)-1, ending))
	o := Options{Transform: Eval(4, 4), WebDataset: true}
	report, inspected := inspect(t.Context(), path, o, openFile, fakeCodec{})
	if len(faults) == 0 && inspected == nil {
		checkReport(t, seed, report, samples, orphans)
	}
	for round := range 2 { // by a scan, and by the index
		l, err := open(t.Context(), path, o, openFile, fakeCodec{})
		if len(faults) > 0 {
			for _, err := range []error{err, inspected} {
				var at *ArchiveError
				named := false
				for i := range shards {
					file := filepath.Join(folder, fmt.Sprintf("s-%d.%s", i, ending))
					named = named || errors.As(err, &at) && at.File == file && faults[fmt.Sprint(i, " ", at.Member)]
				}
				if !named {
					t.Errorf("seed %d: error %v, want one of shard and member %v", seed, err, faults)
				}
			}
			return
		}
		if len(samples) == 0 {
			if !errors.Is(err, ErrNoSamples) {
				t.Errorf("seed %d: error %v, want no samples", seed, err)
			}
			return
		}
		if err != nil {
			t.Fatalf("seed %d, round %d: %v, want no error", seed, round, err)
		}
		classes, number := webNumbers(samples)
		var got, want []string
		batches, err := collect(t, l, 0, 1)
		for _, b := range batches {
			for _, s := range b.samples {
				got = append(got, fmt.Sprint(s.Name, " ", s.Label))
			}
		}
		for _, s := range samples {
			want = append(want, fmt.Sprint(s[0], " ", number[s[1]]))
		}
		if err != nil || !slices.Equal(got, want) || !slices.Equal(l.Classes(), classes) {
			t.Errorf("seed %d, round %d: %q of %q, error %v, want %q of %q", seed, round, got, l.Classes(),
				err, want, classes)
		}
		if s := l.Stats(); s.Orphans != len(orphans) || s.Ignored != files-labels-len(samples) {
			t.Errorf("seed %d, round %d: %d orphans, %d ignored, want %d, %d", seed, round, s.Orphans,
				s.Ignored, len(orphans), files-labels-len(samples))
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

// checkReport compares a report with the model.
func checkReport(t *testing.T, seed uint64, r *Report, samples [][2]string, orphans []string) {
	t.Helper()
	classes, number := webNumbers(samples)
	counts := make([]int, len(classes))
	for _, s := range samples {
		counts[number[s[1]]]++
	}
	var names, gotClasses []string
	var gotCounts []int
	for _, o := range r.OrphansNamed {
		names = append(names, o.Name)
	}
	for _, c := range r.Classes {
		gotClasses, gotCounts = append(gotClasses, c.Name), append(gotCounts, c.Samples)
	}
	// The group of an image without a key ends after the member is read, so the orders differ.
	slices.Sort(names)
	want := slices.Sorted(slices.Values(orphans))
	if r.Samples != len(samples) || !slices.Equal(gotClasses, classes) ||
		!slices.Equal(gotCounts, counts) || r.Orphans != len(orphans) ||
		len(orphans) <= 10 && !slices.Equal(names, want) {
		t.Errorf("seed %d: report of %d samples, %q %v, orphans %d %q, want %d, %q %v, %d %q",
			seed, r.Samples, gotClasses, gotCounts, r.Orphans, names, len(samples), classes, counts, len(orphans), want)
	}
}

// TestRandomShardsEqualAModel: names, labels, counts and errors of random WebDataset shards equal
// an independent model's.
func TestRandomShardsEqualAModel(t *testing.T) {
	for seed := range uint64(150) {
		checkRandomShards(t, seed)
	}
}

// FuzzWebDataset is TestRandomShardsEqualAModel with other seeds.
func FuzzWebDataset(f *testing.F) {
	f.Add(uint64(1000))
	f.Fuzz(func(t *testing.T, seed uint64) { checkRandomShards(t, seed) })
}

// webTar returns a tar of names with contents. The content "image" stands for an image's content.
func webTar(t *testing.T, files ...string) []byte {
	t.Helper()
	var members []archivetest.Member
	for i := 0; i < len(files); i += 2 {
		data := files[i+1]
		if data == "image" {
			data = archivetest.Image(files[i])
		}
		members = append(members, archivetest.Member{Name: files[i], Data: data})
	}
	return archivetest.Tar(t, members...)
}

// TestWebDatasetRules: each rule of grouping and labels, with its message where it is an error.
func TestWebDatasetRules(t *testing.T) {
	for name, c := range map[string]struct {
		files []string
		want  string // samples, or "error" and a part of the message
	}{
		"cls comes before json": {[]string{"a.jpg", "image", "a.json", `{"label":"cat"}`,
			"a.cls", "3"}, "a.jpg:3"},
		"cls comes before json, first": {[]string{"a.cls", "3", "a.jpg", "image", "a.json",
			`{"label":"cat"}`}, "a.jpg:3"},
		"leading zeros are the same number": {[]string{"a.jpg", "image", "a.cls", "3", "a.json",
			`{"label":"003"}`}, "a.jpg:3"},
		"two numbers": {[]string{"a.jpg", "image", "a.cls", "3", "a.json",
			`{"label":4}`}, `error "a.json" has the label "4", and "a.cls" of the same sample has "3": correct or remove`},
		"two names": {[]string{"a.cls", "cat", "a.jpg", "image", "a.json",
			`{"label":"dog"}`}, `error "a.json" has the label "dog", and "a.cls" of the same sample has "cat"`},
		"a member twice": {[]string{"a.jpg", "image", "a.cls", "0", "a.jpg", "image",
			"a.cls", "1"}, `error "a.jpg": duplicate file name: the shard has a member with the key "a" and the extension "jpg"`},
		"an extension in two cases": {[]string{"a.jpg", "image", "a.JPG", "image", "a.cls", "0"},
			`error "a.JPG": duplicate file name`},
		"a key again": {[]string{"a.jpg", "image", "a.cls", "0", "b.jpg", "image",
			"b.cls", "0", "a.png", "image", "a.json", `{"label":1}`},
			`error "a.png": the shard has members with the key "a" already, and others between`},
		"a label that is not adjacent": {[]string{"a.jpg", "image", "b.jpg", "image", "b.cls", "0",
			"a.cls", "0"}, `error "a.cls": the shard has members with the key "a" already, and others between: ` +
			`the members of a sample have to follow each other`},
		"a caption that is not adjacent": {[]string{"a.jpg", "image", "a.cls", "0", "b.jpg", "image",
			"b.cls", "0", "a.txt", "x"}, "a.jpg:0 b.jpg:0"},
		"NaN and Infinity": {[]string{"a.jpg", "image", "a.json",
			`{"x":[NaN,-Infinity],"s":"NaN","label":1,"y":Infinity}`}, "a.jpg:1"},
		"the label NaN": {[]string{"a.jpg", "image", "a.json", `{"label": NaN}`},
			`error "a.json": "label" is neither a string nor a whole number: "NaN" (byte 10)`},
		"null": {[]string{"a.jpg", "image", "a.json", `{"label": null}`},
			`error "a.json": "label" is neither a string nor a whole number: "null" (byte 10)`},
		"a fraction, with NaN before": {[]string{"a.jpg", "image", "a.json", `{"x":NaN,"label":0.5}`},
			`error "a.json": "label" is neither a string nor a whole number: "0.5" (byte 17)`},
		"a JSON syntax error": {[]string{"a.jpg", "image", "a.json", `{"label": 1,}`},
			`error "a.json": byte 12: invalid character '}'`},
		"JSON that is cut off": {[]string{"a.jpg", "image", "a.json", `{"label": 1`},
			`error "a.json": byte 10: unexpected end of JSON input`},
		"a field twice": {[]string{"a.jpg", "image", "a.json",
			`{"label": 1, "label": 2}`}, `error "a.json": the field "label" is there twice`},
		"JSON that is not UTF-8": {[]string{"a.jpg", "image", "a.json",
			"{\"label\": \"caf\xe9\"}"}, `error "a.json": byte 14 is 0xe9, which is not UTF-8`},
		"half a surrogate pair": {[]string{"a.jpg", "image", "a.json",
			`{"label": "caf\udce9"}`}, `error "a.json": "label" is empty, or is no text`},
		"a byte order mark": {[]string{"a.jpg", "image", "a.cls", "\xef\xbb\xbf1", "b.jpg",
			"image", "b.json", "\xef\xbb\xbf{\"label\":0}"}, "a.jpg:1 b.jpg:0"},
		"binary labels": {[]string{"a.jpg", "image", "a.cls", "\x03\x00\x00\x00"},
			`error "a.cls": the label is no text: byte 0 is 0x03: write a number or a name in UTF-8`},
		"a pickle": {[]string{"a.jpg", "image", "a.cls", "1\x80\x04K."},
			`error "a.cls": the label is no text: byte 1 is 0x80`},
		"an empty label": {[]string{"a.jpg", "image", "a.cls", "\n"},
			`error "a.cls": the label is empty`},
		"a large label": {[]string{"a.jpg", "image", "a.cls",
			strings.Repeat("1", 1<<20+1)}, `error "a.cls": a label file of 1048577 bytes, over the limit of 1048576`},
		"AppleDouble": {[]string{"d/._a.jpg", "\x00\x05", "d/a.jpg", "image",
			"d/._a.cls", "\x00\x05", "d/a.cls", "1", "d/.b.jpg", "image"}, "d/a.jpg:1"},
		"a README within a group": {[]string{"a.jpg", "image", "README", "text", "a.cls", "1"}, "a.jpg:1"},
		"a depth map first": {[]string{"0.cls", "1", "0.depth.png", "image", "0.jpg",
			"image"}, "0.jpg:1"},
		"a mask without an image's name": {[]string{"0.cls", "1", "0.depth", "image", "0.jpg", "image"}, "0.jpg:1"},
		"a depth map alone":              {[]string{"0.cls", "1", "0.depth.png", "image"}, "0.depth.png:1"},
		"labels with line ends": {[]string{"a.jpg", "image", "a.cls", "0\n", "b.jpg", "image",
			"b.cls", "1\r\n", "c.jpg", "image", "c.cls", " 10 \n\n"}, "a.jpg:0 b.jpg:1 c.jpg:10"},
		"upper-case extensions": {[]string{"K.JPG", "image", "K.CLS", "1", "k.jpg", "image",
			"k.cls", "0"}, "K.JPG:1 k.jpg:0"},
		"folders with dots": {[]string{"v1.0/a.b/0.jpg", "image", "v1.0/a.b/0.cls", "1",
			"v1.1/0.jpg", "image", "v1.1/0.cls", "0"}, "v1.0/a.b/0.jpg:1 v1.1/0.jpg:0"},
		"a key in two folders": {[]string{"a/0.jpg", "image", "a/0.cls", "0", "b/0.jpg",
			"image", "b/0.cls", "1"}, "a/0.jpg:0 b/0.jpg:1"},
		"paths that begin with ./": {[]string{"./0.jpg", "image", "./0.cls", "1"}, "0.jpg:1"},
		"a caption is no label":    {[]string{"a.jpg", "image", "a.txt", "7", "a.cls", "1"}, "a.jpg:1"},
		"a list for one label": {[]string{"a.jpg", "image", "a.json", `{"label":[1,2]}`},
			`error "a.json": "label" is neither a string nor a whole number: "[1,2]" (byte 9)`},
	} {
		t.Run(name, func(t *testing.T) {
			data := webTar(t, c.files...)
			for kind, data := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
				path := archivetest.WriteFile(t, kind, data)
				o := Options{Transform: Eval(4, 4), WebDataset: true}
				l, err := open(t.Context(), path, o, openFile, fakeCodec{})
				if message, wrong := strings.CutPrefix(c.want, "error "); wrong {
					if err == nil || !strings.Contains(err.Error(), message) || !strings.Contains(err.Error(), path) {
						t.Errorf("%s: error %v, want %s", kind, err, message)
					}
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				batches, err := collect(t, l, 0, 1)
				var got []string
				for _, b := range batches {
					for _, s := range b.samples {
						got = append(got, fmt.Sprint(s.Name, ":", s.Label))
					}
				}
				if text := strings.Join(got, " "); err != nil || text != c.want {
					t.Errorf("%s: %s, error %v, want %s", kind, text, err, c.want)
				}
				l.Close()
			}
		})
	}
}

// TestLabelLinksAreErrors: a label file that is a link has no text, so the label is unknown.
func TestLabelLinksAreErrors(t *testing.T) {
	for kind, want := range map[byte]string{tar.TypeLink: "this is a hard link: pack the archive with " +
		"tar --hard-dereference", tar.TypeSymlink: "--dereference"} {
		path := archivetest.WriteFile(t, "a.tar",
			archivetest.Tar(t, archivetest.Member{Name: "a.jpg", Data: archivetest.Image("a")},
				archivetest.Member{Name: "a.cls", Kind: kind, Link: "b.cls"}))
		_, err := open(t.Context(), path, Options{Transform: Eval(4, 4), WebDataset: true}, openFile, fakeCodec{})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), `"a.cls"`) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
}

// TestGroupEndsWithItsShard: the next shard may start with the key that ended this one.
func TestGroupEndsWithItsShard(t *testing.T) {
	folder := t.TempDir()
	for i := range 3 {
		data := webTar(t, "0.jpg", "image", "0.cls", fmt.Sprint(i))
		if err := os.WriteFile(filepath.Join(folder, fmt.Sprintf("s-%d.tar", i)), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(folder, "s-{0..2}.tar")
	l := openFake(t, path, Options{Transform: Eval(4, 4), WebDataset: true})
	batches, err := collect(t, l, 0, 1)
	var got []int
	for _, b := range batches {
		for _, s := range b.samples {
			got = append(got, s.Label)
		}
	}
	if err != nil || !slices.Equal(got, []int{0, 1, 2}) {
		t.Errorf("labels %v, error %v, want [0 1 2]", got, err)
	}
	out := filepath.Join(t.TempDir(), "out.tar")
	if _, _, err := Fix(t.Context(), path, out, Options{WebDataset: true}, FixOptions{}, nil); err == nil ||
		!strings.Contains(err.Error(), `the key "0" has come before, in this shard or another`) {
		t.Errorf("Fix: error %v, want one of the key that would be twice in one shard", err)
	}
}

// TestImagesWithoutLabelsAreNamed: the first ten are named with the reason, by a scan, by the index
// and by Inspect. The log also names a label that is not a number.
func TestImagesWithoutLabelsAreNamed(t *testing.T) {
	files := []string{"a.jpg", "image", "a.cls", "7", "b.jpg", "image", "c.jpg", "image", "c.json",
		`{"caption":"x"}`, "d.jpg", "image", "d.json", "[1]",
		"22.05.jpg", "image", "22.05.cls", "1", "alone", "image"}
	want := []Orphan{
		{Name: "b.jpg", Reason: "no .cls or .json member with its key is next to it in the shard"},
		{Name: "c.jpg", Reason: "its .json has none of the fields label, cls and class"},
		{Name: "d.jpg", Reason: "its .json has none of the fields label, cls and class"},
		{Name: "alone", Reason: "its name has no extension, and so it belongs to no sample"},
		{Name: "22.05.jpg", Reason: "no .cls or .json member of the shard has its key, which is the name up to the " +
			"first dot"},
	}
	for i := range 8 {
		name := fmt.Sprintf("e%d.jpg", i)
		files = append(files, name, "image")
		if len(want) < 10 {
			want = append(want, Orphan{Name: name, Reason: want[0].Reason})
		}
	}
	files = append(files, "f.jpg", "image", "f.cls", "cat", "g.cls", "3")
	path := archivetest.WriteFile(t, "a.tar", webTar(t, files...))
	var text strings.Builder
	o := Options{Transform: Eval(4, 4), WebDataset: true, Logger: slog.New(slog.NewTextHandler(&text, nil))}
	for round := range 2 {
		text.Reset()
		l := openFake(t, path, o)
		if s := l.Stats(); s.Orphans != 13 || l.Len() != 2 {
			t.Errorf("round %d: %d orphans, %d samples, want 13, 2", round, s.Orphans, l.Len())
		}
		if got := l.index.Load().OrphansNamed(); !slices.Equal(got, want) {
			t.Errorf("round %d: %q, want %q", round, got, want)
		}
		for _, line := range []string{
			`msg="images without a label are ignored" archive=` + path + ` images=13`,
			`msg="image without a label is ignored" archive=` + path + ` name=c.jpg reason="its .json has none`,
			`msg="labels are names of classes, since not all of them are numbers" archive=` + path +
				` name=f.jpg label=cat`,
		} {
			if !strings.Contains(text.String(), line) {
				t.Errorf("round %d: no %s in\n%s", round, line, &text)
			}
		}
		if line := `msg="labels without an image in their group are ignored" archive=` + path +
			` labels=1 first=g.cls`; round == 0 && !strings.Contains(text.String(), line) {
			t.Errorf("got\n%s\nwant it to contain %s", &text, line)
		}
		l.Close()
	}
	r, err := inspect(t.Context(), path, Options{WebDataset: true}, openFile, fakeCodec{})
	if err != nil || r.Orphans != 13 || !slices.Equal(r.OrphansNamed, want) {
		t.Errorf("Inspect: %d, %q, error %v, want 13, %q", r.Orphans, r.OrphansNamed, err, want)
	}
}

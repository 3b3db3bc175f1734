package index

import (
	"archive/tar"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/indextest"
)

func TestPatternsMatchNames(t *testing.T) {
	for _, c := range []struct{ pattern, name, key string }{
		{"images/*.jpg", "images/a/b.jpg", "a/b"},
		{"images/*.jpg", "images/.jpg", ""}, // the text is empty
		{"images/*.jpg", "images/b.png", ""},
		{"images/*.jpg", "more/images/b.jpg", ""},
		{"*.jpg", "a.b.jpg", "a.b"},
		{"*.*", "a.b.jpg", "a.b"},
		{"*.*", "a/b", ""},
		{"*.*", "a.b/c", ""},
		{"*.*", "a/b.", ""},
		{"left/*_left.*", "left/x/1_left.png", "x/1"},
		{"left/*_left.*", "left/_left.png", ""},
		{"*_a", "b_a", "b"},
		{"*", "anything", "anything"},
		{"a.*", "a.b", "b"}, // the only "*"
	} {
		p, err := ParsePattern(c.pattern)
		if err != nil {
			t.Fatal(err)
		}
		if key, ok := p.key(c.name); key != c.key || ok != (c.key != "") {
			t.Errorf("%s of %s: %q, %v; want %q", c.pattern, c.name, key, ok, c.key)
		}
	}
	for _, text := range []string{"", "a", "a*b*", "**", "a*/b*.*", ".*.*.*"} {
		if _, err := ParsePattern(text); err == nil {
			t.Errorf("ParsePattern(%q): got no error, want one", text)
		}
	}
	if key, ok := (Pattern{}).key("a"); ok {
		t.Errorf("the zero Pattern matches a with key %q, want no match", key)
	}
}

// pairConfig returns the Config of a loader with Options.Masks.
func pairConfig(t testing.TB, image, mask string) Config {
	t.Helper()
	c := testConfig()
	c.Pairs = &Pairs{}
	var err error
	if c.Pairs.Image, err = ParsePattern(image); err != nil {
		t.Fatal(err)
	}
	if c.Pairs.Partner, err = ParsePattern(mask); err != nil {
		t.Fatal(err)
	}
	return c
}

// pairsOf returns the names of an index's images and masks.
func pairsOf(x *Index) (list []string) {
	for i := range x.Len() {
		list = append(list, x.Name(i)+"+"+x.Name(x.Partner(i)))
	}
	return list
}

// files returns members with their names as contents.
func files(names string) (list []archivetest.Member) {
	for name := range strings.FieldsSeq(names) {
		list = append(list, archivetest.Member{Name: name, Data: archivetest.Image(name)})
	}
	return list
}

// TestPairsFollowThePatterns checks the pairs of a scan, and of an index file made with another
// pattern.
func TestPairsFollowThePatterns(t *testing.T) {
	for name, c := range map[string]struct {
		shards      []string
		image, mask string
		want        string
		log         string
	}{
		"folders": {[]string{"images/a.jpg images/b.jpg masks/b.png masks/a.png"},
			"images/*.jpg", "masks/*.png", "images/a.jpg+masks/a.png images/b.jpg+masks/b.png", ""},
		"masks first": {[]string{"m/a.png m/b.png i/b.png i/a.png"}, "i/*", "m/*",
			"i/b.png+m/b.png i/a.png+m/a.png", ""},
		"no folder": {[]string{"0.jpg 0.seg.png 1.seg.png 1.jpg"}, "*.jpg",
			"*.seg.png", "0.jpg+0.seg.png 1.jpg+1.seg.png", ""},
		"both patterns": {[]string{"0.png 0.seg.png 1.webp 1.seg.png"}, "*.*",
			"*.seg.png", "0.png+0.seg.png 1.webp+1.seg.png", ""},
		"folders within": {[]string{"d/img/x/a_l.png d/gt/x/a_ids.png d/gt/x/a_color.png"},
			"d/img/*_l.*", "d/gt/*_ids.png", "d/img/x/a_l.png+d/gt/x/a_ids.png", ""},
		"images alone": {[]string{"i/a.png i/b.png i/c.png m/b.png"}, "i/*", "m/*",
			"i/b.png+m/b.png", "images without a mask are ignored"},
		"masks alone": {[]string{"i/b.png m/a.png m/b.png m/c.png"}, "i/*", "m/*",
			"i/b.png+m/b.png", "masks=2 first=m/a.png"},
		"names of shards": {[]string{"0.jpg 0.seg.png 1.jpg", "0.jpg 0.seg.png"}, "*.jpg",
			"*.seg.png", "0.jpg+0.seg.png 0.jpg+0.seg.png", "images=1 first=1.jpg"},
		"kinds of shards": {[]string{"i/a.png i/b.png", "m/b.png m/a.png"}, "i/*", "m/*",
			"i/a.png+m/a.png i/b.png+m/b.png", ""},
		"a name twice, but not in a pair": {[]string{"i/a.png i/a.png i/b.png m/b.png"}, "i/*", "m/*",
			"i/b.png+m/b.png", "images=2"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for i, shard := range c.shards {
				data := archivetest.Tar(t,
					append(files(shard), archivetest.Member{Name: "notes.txt", Data: "no image"})...)
				if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.tgz", i)),
					archivetest.Gzip(t, data), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			path := filepath.Join(dir, "*.tgz")
			first := pairConfig(t, "*.nothing", "*.never") // makes an index file, although no sample matches
			if x, err := tryOpen(t, path, first); !errors.Is(err, ErrNoSamples) {
				t.Fatal(x, err)
			}
			for round := range 2 {
				var log logged
				config := pairConfig(t, c.image, c.mask)
				config.Logger = slog.New(slog.NewTextHandler(&log, nil))
				config.NoFile = round == 0
				x := open(t, path, config)
				if got := strings.Join(pairsOf(x), " "); got != c.want {
					t.Errorf("round %d: %s, want %v", round, got, c.want)
				}
				if (x.side != nil) != (round == 1) || log.has("scanning archive") != (round == 0) {
					t.Errorf("round %d: an index file: %v", round, x.side != nil)
				}
				if c.log != "" && !log.has(c.log) || c.log == "" && log.has("are ignored") {
					t.Errorf("round %d: the log: %s", round, log.text.String())
				}
				if len(x.samples) != 2*x.Len() || x.Classes() != nil || !x.Random() {
					t.Errorf("%d records, classes %v, random access %v", len(x.samples), x.Classes(), x.Random())
				}
				readPairs(t, path, x)
				closeIndex(t, x)
			}
		})
	}
}

// readPairs reads all images and masks, whose contents are their names.
func readPairs(t *testing.T, path string, x *Index) {
	t.Helper()
	a := openArchive(t, path)
	defer a.Close()
	r := NewReader(x, a)
	defer r.Close()
	for i := range 2 * x.Len() {
		b := make([]byte, x.Size(i))
		if err := r.Read(i, b); err != nil || string(b) != archivetest.Image(x.Name(i)) {
			t.Errorf("%s has %q; %v", x.Name(i), b, err)
		}
	}
}

// TestPairsAreHeldInMemory: a scan and an index hold exactly the contents of the pairs.
func TestPairsAreHeldInMemory(t *testing.T) {
	members := files("i/z.png i/a.png i/b.png m/b.png m/y.png m/a.png")
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, members...)))
	for round := range 2 {
		x := open(t, path, pairConfig(t, "i/*", "m/*"))
		if !x.memory.holds() {
			t.Fatalf("round %d: the index holds no members in memory, want the pairs", round)
		}
		readPairs(t, path, x)
		for i := range 2 * x.Len() {
			if string(x.InMemory(i)) != archivetest.Image(x.Name(i)) {
				t.Errorf("round %d: %s is not in memory", round, x.Name(i))
			}
		}
		closeIndex(t, x)
	}
}

func TestSecondMaskIsAnError(t *testing.T) {
	pack := func(members ...archivetest.Member) string {
		return archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...))
	}
	for names, want := range map[string]PairError{
		"i/a.png i/a.jpg m/a.png": {Name: "i/a.png", Other: "i/a.jpg", Pattern: "i/*.*"},
		"m/a.png i/a.png m/a.jpg": {Name: "m/a.png", Other: "m/a.jpg", Pattern: "m/*.*"},
	} {
		path := pack(files(names)...)
		want.File = path
		for range 2 { // without an index file, and with one
			_, err := tryOpen(t, path, pairConfig(t, "i/*.*", "m/*.*"))
			var pair *PairError
			if !errors.As(err, &pair) || *pair != want {
				t.Errorf("%s: %v, want an error of type *PairError, *pair = %v", names, err, want)
			}
		}
	}
	for names, want := range map[string]string{
		"":                "it has no image files",
		"d/a.png d/b.png": `no image file matches "i/*"; no image file matches "m/*"; the archive's first image file is "d/a.png"`,
		"i/a.png m/b.png": `1 match "i/*", the first is "i/a.png"; 1 match "m/*", the first is "m/b.png"`,
	} {
		path := pack(append(files(names), archivetest.Member{Name: "x/notes", Data: "text"})...)
		_, err := tryOpen(t, path, pairConfig(t, "i/*", "m/*"))
		if !errors.Is(err, ErrNoSamples) || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%q: %v, want the error %v, fmt.Sprint(err) with %q", names, err, ErrNoSamples, want)
		}
	}
	// A link is reported as a bad sample when it is read, not here.
	path := pack(append(files("i/a.png"), archivetest.Member{Name: "m/a.png", Kind: tar.TypeSymlink, Link: "b.png"})...)
	x := open(t, path, pairConfig(t, "i/*", "m/*"))
	defer closeIndex(t, x)
	if s := x.Sample(x.Partner(0)); s.Kind != archive.Symlink {
		t.Errorf("the link is %v, want %v", s.Kind, archive.Symlink)
	}
}

// TestIndexOfLabelsServesNoPairs: an index of labels is not used for pairs, nor an index of pairs
// for labels. Each replaces the other.
func TestIndexOfLabelsServesNoPairs(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, files("i/a.png m/a.png")...)))
	pairs, labels := pairConfig(t, "i/*", "m/*"), testConfig()
	for round, c := range []Config{labels, pairs, labels, pairs} {
		var log logged
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
		x := open(t, path, c)
		if want := []int{2, 1}[round%2]; x.Len() != want || round > 0 && !log.has("index is not used") {
			t.Errorf("round %d: %d samples; %s", round, x.Len(), log.text.String())
		}
		closeIndex(t, x)
	}
	labels.RefuseOtherLabels = true
	if _, err := tryOpen(t, path, labels); err == nil || !strings.Contains(err.Error(), string(errIndexPairs)) {
		t.Errorf("an index of pairs serves labels: %v, want an error with %q", err, string(errIndexPairs))
	}
}

// FuzzPairs: with any index file, archives of images and masks open. A sample and its mask have the
// same key. Reading them returns the archive's bytes or an error.
func FuzzPairs(f *testing.F) {
	var members []archivetest.Member
	for i := range 5 {
		data := strings.Repeat(fmt.Sprint(i, " "), 1000+i*3000)
		members = append(members,
			archivetest.Member{Name: fmt.Sprintf("i/%c.png", 'a'+i), Data: archivetest.Image(data)},
			archivetest.Member{Name: fmt.Sprintf("m/%c.png", 'e'-i), Data: archivetest.Image(data + "mask")})
	}
	data := archivetest.Tar(f, members...)
	path := archivetest.WriteFile(f, "a.tgz", archivetest.GzipSplit(f, data, 1<<20, 1))
	closeIndex(f, open(f, path, pairConfig(f, "i/*", "m/*")))
	index, err := os.ReadFile(path + sidecarSuffix)
	if err != nil {
		f.Fatal(err)
	}
	contents := archivetest.Contents(members)
	for part := range byte(11) {
		for edit := range byte(8) {
			f.Add([]byte{part, edit, 16 * edit, 0, 1 + 50*edit, part, 0, 0})
		}
	}
	f.Fuzz(func(t *testing.T, edits []byte) {
		changed := indextest.Edit(index, edits)
		indextest.Reseal(changed)
		c := pairConfig(t, "i/*", "m/*")
		c.File, c.HoldBytes, c.MaxSampleBytes = filepath.Join(t.TempDir(), "index"), 1, 1<<20
		if err := os.WriteFile(c.File, changed, 0o644); err != nil {
			t.Fatal(err)
		}
		x, err := tryOpen(t, path, c)
		var pair *PairError
		if err != nil {
			if !errors.Is(err, ErrNoSamples) && !errors.As(err, &pair) {
				t.Fatal(err)
			}
			return
		}
		defer closeIndex(t, x)
		a := openArchive(t, path)
		defer a.Close()
		r := NewReader(x, a)
		defer r.Close()
		for i := range x.Len() {
			image, mask := x.Name(i), x.Name(x.Partner(i))
			if image[1:] != mask[1:] || image[0] != 'i' || mask[0] != 'm' {
				t.Errorf("%q and %q are a pair, want image[1:] = %v, image[0] = 'i', mask[0] = 'm'",
					image, mask, mask[1:])
			}
			for _, k := range []int{i, x.Partner(i)} {
				s := x.Sample(k)
				if s.Kind != archive.Regular || s.Size > 1<<20 || s.Size == 0 || x.work == 0 {
					continue
				}
				b := make([]byte, s.Size)
				_, known := contents[s.Name]
				if r.Read(k, b) == nil && x.samples[x.at(k)].flags&recordSummed != 0 && known &&
					len(b) == len(contents[s.Name]) &&
					!slices.ContainsFunc(members, func(m archivetest.Member) bool { return m.Data == string(b) }) {
					t.Errorf("%s has bytes of no member", s.Name)
				}
			}
		}
	})
}

package imageloader

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/gif"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/audit"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// animation is a GIF of n frames.
func animation(t testing.TB, n int) string {
	t.Helper()
	palette := color.Palette{color.Black, color.White, color.RGBA{255, 0, 0, 255}}
	g := &gif.GIF{}
	for range n {
		g.Image = append(g.Image, image.NewPaletted(image.Rect(0, 0, 40, 33), palette))
		g.Delay = append(g.Delay, 1)
	}
	var b bytes.Buffer
	if err := gif.EncodeAll(&b, g); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// withChunk inserts a chunk of another kind after the header of a PNG. Its checksum is not checked.
func withChunk(png, kind, content string) string {
	chunk := "\x00\x00\x00" + string(rune(len(content))) + kind + content + "\x00\x00\x00\x00"
	return png[:33] + chunk + png[33:]
}

// oddities returns images that are rare, tolerated or refused, between good ones.
func oddities(t *testing.T) []archivetest.Member {
	jpeg, png := archivetest.JPEG(t, archivetest.Gradient(70, 50)), archivetest.PNG(t, archivetest.Gradient(70, 50))
	deep := image.NewNRGBA64(image.Rect(0, 0, 40, 40))
	list := damagedMembers(t)
	for _, m := range archivetest.Mixed(t) {
		if m.Name == "a/turned.jpg" || m.Name == "b/link.jpg" || m.Name == "b/empty.jpg" {
			list = append(list, m)
		}
	}
	for i := range 50 {
		list = append(list, archivetest.Member{Name: fmt.Sprintf("c/%d.jpg", i), Data: jpeg})
	}
	return append(list,
		archivetest.Member{Name: "c/deep.png", Data: archivetest.PNG(t, deep)},
		archivetest.Member{Name: "c/loop.gif", Data: animation(t, 3)},
		archivetest.Member{Name: "c/still.gif", Data: animation(t, 1)},
		archivetest.Member{Name: "c/small.png", Data: archivetest.PNG(t, archivetest.Gradient(31, 40))},
		archivetest.Member{Name: "c/thin.png", Data: archivetest.PNG(t, archivetest.Gradient(331, 33))},
		archivetest.Member{Name: "c/7.jpg", Data: jpeg},
		archivetest.Member{Name: "c/other.JPG", Data: png},
		archivetest.Member{Name: "c/text.jpg", Data: "not an image"},
		archivetest.Member{Name: "notes/1.txt", Data: "no sample"},
		archivetest.Member{Name: "notes/1.txt", Data: ""},
	)
}

// TestFindingsNameOddImages: tolerated, refused and rare images are counted and named.
func TestFindingsNameOddImages(t *testing.T) {
	r, err := Inspect(t.Context(), archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, oddities(t)...)),
		Options{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for what, names := range map[string]string{
		"tolerated damaged PNG: ":                         "c/checksum.png",
		"tolerated damaged JPEG: ":                        "c/junk.jpg",
		"tolerated damaged: JPEG: Corrupt JPEG data: ":    "c/scan.jpg",
		"refused damaged: truncated JPEG: the image data": "c/cut.jpg",
		"refused empty":                                   "b/empty.jpg",
		"refused not a file":                              "b/link.jpg",
		"refused not an image":                            "c/text.jpg",
		"rare EXIF orientation (turned only with Options.Transform.ApplyEXIFOrientation)": "a/turned.jpg",
		"rare 16 bits a channel":                            "c/deep.png",
		"rare animated: the first frame is the image":       "c/loop.gif",
		"rare tiny: a side of less than 32 pixels":          "c/small.png",
		"rare thin: a side of more than 10 times the other": "c/thin.png",
		"rare " + audit.NameAgain:                           "c/7.jpg",
		"rare PNG with the extension .jpg":                  "c/other.JPG",
		"rare GIF":                                          "c/still.gif",
	} {
		at := slices.IndexFunc(r.Findings,
			func(f Finding) bool { return strings.HasPrefix(string(f.Verdict)+" "+f.What, what) })
		if at < 0 {
			t.Errorf("no finding %q in %+v, at %v, want at least 0", what, r.Findings, at)
			continue
		}
		f := r.Findings[at]
		if !slices.Contains(f.First, names) || f.Count < len(f.First) {
			t.Errorf("%q: %+v, not of %s", what, f, names)
		}
	}
	if i := slices.IndexFunc(r.Findings, func(f Finding) bool { return f.What == "JPEG" }); i >= 0 {
		t.Errorf("most images are rare: %+v, want no such finding", r.Findings[i])
	}
	if r.WarnedCount != 3 || len(r.Warned) != 3 {
		t.Errorf("%d tolerated, %d named, want r.WarnedCount = 3, len(r.Warned) = 3",
			r.WarnedCount, len(r.Warned))
	}
}

// TestReportIsBounded: if there are many bad samples, all are counted and the first are named, with
// their indexes among the samples. Members of directories without an image do not count.
func TestReportIsBounded(t *testing.T) {
	var list []archivetest.Member
	bad := archivetest.Image("BAD")
	for i := range 2 * maxNamed {
		list = append(list,
			archivetest.Member{Name: fmt.Sprintf("notes/%d", i), Data: "no image"},
			archivetest.Member{Name: fmt.Sprintf("a/%d.png", i), Data: bad},
			archivetest.Member{Name: fmt.Sprintf("b/%d.jpg", i), Data: "no image"})
	}
	list = append(list, archivetest.Member{Name: "b/last.png", Data: archivetest.Image("good")})
	r, err := inspect(t.Context(), archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, list...)),
		Options{}, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	const each = 2 * maxNamed
	if len(r.Bad) != maxNamed || r.BadBy[Damaged] != each || r.BadBy[NotImage] != each ||
		r.Samples != 2*each+1 || r.Ignored != each {
		t.Errorf("%d named, %v, %d samples, %d ignored, want len(r.Bad) = %v, r.BadBy[Damaged] = %v, "+
			"r.BadBy[NotImage] = %v, r.Samples = %v, r.Ignored = %v",
			len(r.Bad), r.BadBy, r.Samples, r.Ignored, maxNamed, each, each, 2*each+1, each)
	}
	for i, e := range r.Bad {
		if want := []string{"a/%d.png", "b/%d.jpg"}[i%2]; e.Index != i || e.Name != fmt.Sprintf(want, i/2) {
			t.Fatalf("bad sample %d is %d, %q", i, e.Index, e.Name)
		}
	}
	for _, f := range r.Findings[:2] {
		if f.Count != each || len(f.First) != maxFirst {
			t.Errorf("%+v, want f.Count = %v, len(f.First) = %v", f, each, maxFirst)
		}
	}
	if len(r.Findings) != 3 { // the good image is tiny
		t.Errorf("%+v, want 3", r.Findings)
	}
}

// TestFindingRowsAreBounded: the number of rows is bounded, whatever the decoders' messages, and
// rows contain no numbers of a single file.
func TestFindingRowsAreBounded(t *testing.T) {
	c := newCensus(false)
	for i := range 3 * maxRows {
		for _, text := range []string{fmt.Sprintf("feature %d", i), "damaged at byte 0x1f3a of " + fmt.Sprint(i)} {
			reason := Unsupported
			if strings.HasPrefix(text, "damaged") {
				reason = Damaged
			}
			e := &SampleError{Index: 2 * i, Reason: reason,
				Err: &imagecapi.Error{Code: imagecapi.CodeDecode, Message: text}}
			c.add(inspected{bad: e})
		}
	}
	if n := len(c.rows); n != maxRows+1 {
		t.Errorf("%d rows, want %v", n, maxRows+1)
	}
	if f := c.rows[row{verdict: FindingRefused, what: "damaged at byte N of N"}]; f == nil || f.count != 3*maxRows {
		t.Errorf("damage: %+v, want f not nil, f.count = %v", f, 3*maxRows)
	}
	if f := c.rows[row{verdict: FindingRefused, what: "others"}]; f == nil || f.count != 2*maxRows+1 {
		t.Errorf("others: %+v, want f not nil, f.count = %v", f, 2*maxRows+1)
	}
}

// TestInspectWebDataset: samples, classes and labels equal those of a loader with
// Options.WebDataset.
func TestInspectWebDataset(t *testing.T) {
	member := func(name, data string) archivetest.Member { return archivetest.Member{Name: name, Data: data} }
	good, bad := archivetest.Image("good"), archivetest.Image("BAD")
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t,
		member("t/1.cls", "7"), member("t/1.jpg", good), member("t/1.mask.png", bad),
		member("t/2.jpg", bad), member("t/2.json", `{"label": 3}`),
		member("t/3.jpg", bad), // no label
		member("t/4.png", good), member("t/4.cls", "3"), member("t/README", "")))
	r, err := inspect(t.Context(), path, Options{WebDataset: true}, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	l := openFake(t, path, Options{WebDataset: true, Transform: Eval(4, 4)})
	if r.Samples != l.Len() || len(r.Classes) != len(l.Classes()) || r.Orphans != 1 || len(r.Bad) != 1 ||
		r.Bad[0].Name != "t/2.jpg" || r.Bad[0].Index != 1 || r.Classes[3].Samples != 2 ||
		r.Classes[3].Bad != 1 || r.Classes[7].Samples != 1 {
		t.Errorf("%+v, not the %d samples of the loader", r, l.Len())
	}
	path = archivetest.WriteFile(t, "b.tar", archivetest.Tar(t, member("1.jpg", good), member("1.cls", "1"),
		member("2.jpg", good), member("2.cls", "-1")))
	_, err = inspect(t.Context(), path, Options{WebDataset: true}, openFile, fakeCodec{})
	_, want := open(t.Context(), path, Options{WebDataset: true, NoIndex: true}, openFile, fakeCodec{})
	if err == nil || want == nil || err.Error() != want.Error() {
		t.Errorf("error %v, of a loader %v", err, want)
	}
	var damage *ArchiveError
	cut := archivetest.Gzip(t, archivetest.Tar(t, member("1.jpg", good), member("1.cls", "-1"),
		member("2.jpg", good), member("2.cls", "1")))
	path = archivetest.WriteFile(t, "c.tgz", cut[:len(cut)-20])
	if _, err := inspect(t.Context(), path, Options{WebDataset: true}, openFile,
		fakeCodec{}); !errors.As(err, &damage) {
		t.Errorf("error %v, want an error of type *ArchiveError", err)
	}
}

// TestAnimatedImagesHaveFrames: only images of several frames are animated.
func TestAnimatedImagesHaveFrames(t *testing.T) {
	png := archivetest.PNG(t, archivetest.Gradient(8, 8))
	webp := func(flags string) string {
		return "RIFF\x1e\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00" + flags + "\x00\x00\x00\x07\x00\x00\x07\x00\x00"
	}
	for name, c := range map[string]struct {
		format, data string
		want         bool
	}{
		"GIF":               {"GIF", animation(t, 1), false},
		"GIF of two":        {"GIF", animation(t, 2), true},
		"GIF that is cut":   {"GIF", animation(t, 2)[:60], false},
		"PNG":               {"PNG", png, false},
		"PNG of two":        {"PNG", withChunk(png, "acTL", "\x00\x00\x00\x02\x00\x00\x00\x00"), true},
		"PNG of one":        {"PNG", withChunk(png, "acTL", "\x00\x00\x00\x01\x00\x00\x00\x00"), false},
		"PNG with metadata": {"PNG", withChunk(png, "tEXt", "a\x00acTL"), false},
		"PNG that is cut":   {"PNG", png[:40], false},
		"WebP":              {"WebP", webp("\x00"), false},
		"WebP of several":   {"WebP", webp("\x02"), true},
		"JPEG":              {"JPEG", archivetest.JPEG(t, archivetest.Gradient(8, 8)), false},
	} {
		if got := audit.Animated(c.format, []byte(c.data)); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// FuzzAnimated: the search for frames ends, and reads only the image.
func FuzzAnimated(f *testing.F) {
	png := archivetest.PNG(f, archivetest.Gradient(8, 8))
	for _, data := range []string{animation(f, 1), animation(f, 2), png,
		withChunk(png, "acTL", "\x00\x00\x00\x02\x00\x00\x00\x00"), "GIF89a", "RIFF\x00\x00\x00\x00WEBPVP8X"} {
		f.Add([]byte(data))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		exact := slices.Clip(data)
		for _, format := range []string{"GIF", "PNG", "WebP", "JPEG"} {
			audit.Animated(format, exact)
		}
	})
}

func TestRaritiesByTheHeader(t *testing.T) {
	info := imagecapi.Info{Format: imagecapi.JPEG, Width: 100, Height: 100, Components: 3, BitDepth: 8}
	if list := audit.Rarities("a/b.jpg", "JPEG", info); list != nil {
		t.Errorf("an ordinary image is rare: %q, want nil", list)
	}
	cmyk, huge := info, info
	cmyk.Components = 4
	huge.Width, huge.Height = 1_000_000, 100_000
	for want, i := range map[string]imagecapi.Info{"CMYK": cmyk, "huge: more than 50 megapixels": huge} {
		if list := audit.Rarities("a/b", "JPEG", i); !slices.Contains(list, want) {
			t.Errorf("%q, want %s", list, want)
		}
	}
}

// TestInspectNamesTheDirectoriesOfAClass: a class names the first directories of its samples, from
// the archive and from its index, and none where labels are not directories.
func TestInspectNamesTheDirectoriesOfAClass(t *testing.T) {
	var list []archivetest.Member
	for i, dir := range []string{"train/cat", "dog", "test/cat", "train/cat", "9/bird", "8/bird", "7/bird",
		"6/bird", "5/bird", "4/bird", "9/bird"} {
		list = append(list, archivetest.Member{Name: fmt.Sprintf("%s/%d.jpg", dir, i),
			Data: archivetest.JPEG(t, archivetest.Gradient(40, 40))})
	}
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, list...))
	want := map[string][]string{"bird": {"9/bird", "8/bird", "7/bird", "6/bird", "5/bird"},
		"cat": {"train/cat", "test/cat"}, "dog": {"dog"}}
	type inspector func(context.Context, string, Options, func(Progress)) (*Report, error)
	for name, inspect := range map[string]inspector{"images": Inspect, "index": InspectIndex} {
		r, err := inspect(t.Context(), path, Options{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range r.Classes {
			if !slices.Equal(c.Directories, want[c.Name]) {
				t.Errorf("by the %s, class %s is in %q, want %q", name, c.Name, c.Directories, want[c.Name])
			}
		}
		if len(r.Classes) != len(want) {
			t.Errorf("by the %s, %d classes, want %v", name, len(r.Classes), len(want))
		}
	}
	labels := archivetest.WriteFile(t, "list.csv", []byte("path,label\ntrain/cat/0.jpg,cat\ntest/cat/2.jpg,cat\n"))
	r, err := Inspect(t.Context(), path, Options{List: labels}, nil)
	if err != nil || len(r.Classes) != 1 || r.Classes[0].Directories != nil {
		t.Errorf("with a list: %+v, %v, want no error, len(r.Classes) = 1, r.Classes[0].Directories = nil",
			r, err)
	}
}

// TestFirstDirectoriesInAnyOrder: the first distinct names are kept, whatever the order of the
// samples.
func TestFirstDirectoriesInAnyOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		names := make([]string, 40)
		var want []string
		for i := range names {
			names[i] = string(rune('a' + rng.IntN(12)))
			if !slices.Contains(want, names[i]) && len(want) < maxFirst {
				want = append(want, names[i])
			}
		}
		var f firsts
		for _, i := range rng.Perm(len(names)) {
			f.addOnce(i, names[i])
		}
		if !slices.Equal(f.names(), want) {
			t.Fatalf("%q of %q, want %q", f.names(), names, want)
		}
	}
}

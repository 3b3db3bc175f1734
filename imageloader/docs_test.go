package imageloader

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// features are the rows that the table in docs/imageloader.md must have. They come from a
// comparison of loaders.
var features = []string{
	"source: plain .tar of files", "source: .tgz single archive", "source: folder / CSV list",
	"own indexed/packed format", "label from dirname",
	"JPEG / PNG / WebP / TIFF / BMP / GIF", "EXIF orientation", "CMYK / 16-bit / grey handled",
	"ROI (crop) decode, CPU", "DCT-scaled decode", "GPU JPEG decode",
	"resize antialias / interpolation choice", "RandomResizedCrop", "flips / rotate / affine",
	"colour jitter / grey / blur / erase",
	"RandAugment / AutoAugment / TrivialAugment", "MixUp / CutMix", "normalise on GPU, uint8 over the bus",
	"channels-last output", "fp16 / bf16 output",
	"zero-copy collate into pinned slot", "side-stream H2D with release events",
	"deterministic seed, any thread count", "reshuffle per epoch", "shuffle buffer",
	"shard by rank / worker", "equal batches per rank guaranteed", "resumable state",
	"bad-sample policy (skip, count, report)", "remote storage",
	"cache of decoded/resized data", "throughput / queue stats", "length / progress", "clean cancel, no leak",
}

// testNames returns the names of all tests of the repository. Tests of cshim/test have the form
// Suite.Name.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	goTest := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	cTest := regexp.MustCompile(`(?m)^TEST(?:_[FP])?\((\w+), *(\w+)\)`)
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() &&
			(strings.HasPrefix(name, ".") && len(name) > 2 || strings.HasPrefix(name, "build")) {
			return fs.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") && !strings.HasSuffix(path, "_test.cc") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range goTest.FindAllSubmatch(text, -1) {
			found[string(m[1])] = true
		}
		for _, m := range cTest.FindAllSubmatch(text, -1) {
			found[string(m[1])+"."+string(m[2])] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestFeatureTableNamesItsTests: the table has every row, and names tests that exist for each "yes"
// and "partly".
func TestFeatureTableNamesItsTests(t *testing.T) {
	text, err := os.ReadFile("../docs/imageloader.md")
	if os.IsNotExist(err) {
		t.Skip("the sources are not here")
	}
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(text), "<!-- features -->\n")
	if !found {
		t.Fatal("docs/imageloader.md has no <!-- features -->, want a table after it")
	}
	tests := testNames(t)
	rows := map[string]bool{}
	quoted := regexp.MustCompile("`((?:Test|Fuzz)\\w+|[A-Z]\\w+\\.[A-Z]\\w+)`")
	for i, line := range strings.Split(table, "\n") {
		if !strings.HasPrefix(line, "|") {
			break
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		if i < 2 {
			continue
		}
		if len(cells) != 3 {
			t.Errorf("%q has %d cells, want 3", line, len(cells))
			continue
		}
		feature, state, behind := strings.TrimSpace(cells[0]), strings.TrimSpace(cells[1]), cells[2]
		rows[feature] = true
		names := quoted.FindAllStringSubmatch(behind, -1)
		switch state {
		case "yes", "partly":
			if len(names) == 0 {
				t.Errorf("%s: %s, but no test is named, len(names) %v, want at least 1",
					feature, state, len(names))
			}
		case "no":
		default:
			t.Errorf("%s: %q, not yes, partly or no", feature, state)
		}
		for _, n := range names {
			if !tests[n[1]] {
				t.Errorf("%s: there is no test %s", feature, n[1])
			}
		}
	}
	for _, f := range features {
		if !rows[f] {
			t.Errorf("the table has no row %q", f)
		}
	}
}

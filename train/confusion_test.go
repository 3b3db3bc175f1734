package train

import (
	"bytes"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/image/font"
)

func TestConfusionsAreSortedByCount(t *testing.T) {
	m := &Metrics{Confusion: [][]int64{{5, 2, 0, 3}, {0, 9, 0, 0}, {2, 2, 0, 0}, {1, 0, 0, 0}}}
	want := []Confusion{{0, 3, 3, 0.3}, {2, 0, 2, 0.5}, {2, 1, 2, 0.5}, {0, 1, 2, 0.2}, {3, 0, 1, 1}}
	if got := m.Confusions(); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := (&Metrics{}).Confusions(); got != nil {
		t.Errorf("%v without a matrix, want nil", got)
	}
}

// The table has the class names, a row per true class, and numbers for classes without a name.
func TestSaveConfusion(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	m := &Metrics{Confusion: [][]int64{{5, 2, 0}, {0, 9, 1}, {0, 0, 0}}}
	for range 2 { // the second call replaces the files
		if err := m.SaveConfusion(dir, []string{"cat", "dog, wet"}); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "confusion.csv"))
	if want := "true\\predicted,cat,\"dog, wet\",2\ncat,5,2,0\n\"dog, wet\",0,9,1\n2,0,0,0\n"; err != nil ||
		string(text) != want {
		t.Errorf("%v, %q; want %q", err, text, want)
	}
	picture, err := os.ReadFile(filepath.Join(dir, "confusion.png"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := png.Decode(bytes.NewReader(picture)); err != nil {
		t.Error(err)
	}
	for says, c := range map[string]struct {
		m     *Metrics
		other string
	}{
		"the metrics have no confusion matrix":                            {m: &Metrics{}},
		"the confusion matrix has 2 rows, and 1 columns in row 1":         {m: &Metrics{Confusion: [][]int64{{1, 2}, {3}}}},
		"is a file of another kind, and only a confusion matrix":          {m, "confusion.csv"},
		"confusion.png is a file of another kind, and only a PNG is repl": {m, "confusion.png"},
	} {
		dir := t.TempDir()
		if c.other != "" {
			if err := os.WriteFile(filepath.Join(dir, c.other), []byte("mine"), 0o666); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.m.SaveConfusion(dir, nil); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v, want an error with %q", err, says)
		}
	}
}

// Each row of pixels shows one true class. A pixel that several classes share shows the largest
// share.
func TestSharedPixelShowsLargestShare(t *testing.T) {
	counts := [][]int64{{3, 1, 0, 0}, {0, 0, 0, 0}, {0, 0, 1, 4}, {0, 0, 0, 2}}
	none, wrong := mark{}, mark{0.25, false}
	want := []mark{{0.75, true}, wrong, none, none, none, none, none, none, none, none, {0.2, true},
		{0.8, false}, none, none, none, {1, true}}
	if got := marks(counts, 4, func(class int) int { return class }); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got, want := marks(counts, 2, func(class int) int { return class / 2 }), []mark{{0.75, true}, none,
		none, {1, true}}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// The picture shows right and wrong predictions, both for few classes and for more classes than
// pixels.
func TestConfusionPicture(t *testing.T) {
	for _, n := range []int{2, 12, 33, 1200} {
		counts := make([][]int64, n)
		names := make([]string, n)
		for label := range counts {
			counts[label] = make([]int64, n)
			counts[label][label] = 4
			names[label] = strings.Repeat("long name ", label)
		}
		counts[0][n-1] = 4
		var file bytes.Buffer
		if err := drawConfusion(&file, counts, names); err != nil {
			t.Fatal(err)
		}
		img, err := png.Decode(&file)
		if err != nil {
			t.Fatal(err)
		}
		if size := img.Bounds().Size(); size.X > 1400 || size.Y > 1100 {
			t.Errorf("%d classes: %v pixels, want size.X at most 1400, size.Y at most 1100", n, size)
		}
		if !has(img, mark{0.5, false}.color()) || has(img, mark{1, false}.color()) ||
			!has(img, mark{0.5, true}.color()) != (n > maxMatrix) || !has(img, mark{1, true}.color()) {
			t.Errorf("%d classes: the colours are not those of the shares", n)
		}
	}
}

// A name that is too long is cut and gets dots. The cut name fits together with the dots.
func TestNamesInPictures(t *testing.T) {
	face, err := newFace()
	if err != nil {
		t.Fatal(err)
	}
	defer face.Close()
	long := strings.Repeat("\u00e4\u4e16b", 1e6)
	over := "" // a name that is one letter too long
	for font.MeasureString(face, over).Ceil() <= maxName {
		over += "m"
	}
	for name, same := range map[string]bool{"": true, "cat": true, strings.Repeat("i", 40): true, long: false, over: false,
		over[1:]: true} {
		got := cut(face, name)
		head, dots := strings.CutSuffix(got, "...")
		if (got == name) != same || dots == same || !strings.HasPrefix(name, head) || !utf8.ValidString(head) {
			t.Errorf("%.100q became %q", name, got)
		}
		if w := font.MeasureString(face, got).Ceil(); w > maxName || !same && w < maxName-60 {
			t.Errorf("%q: %d pixels", got, w)
		}
	}
}

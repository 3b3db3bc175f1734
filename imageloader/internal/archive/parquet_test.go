package archive_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/parquet"
)

// TestNamesOfRowsDoNotDependOnTheSpelling: Options.Part hashes names, so another spelling of the
// same files must not move samples between the parts.
func TestNamesOfRowsDoNotDependOnTheSpelling(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for _, c := range []struct {
		paths []string
		want  string
	}{
		{[]string{"d/t-0.parquet"}, "t-0/00000007"},
		{[]string{"./d//t-0.parquet"}, "t-0/00000007"},
		{[]string{"../x/../t-0.parquet"}, "t-0/00000007"},
		{[]string{"d/t-1.parquet", "d/t-0.parquet"}, "t-0/00000007"},
		{[]string{"d/x/t-0.parquet", "d/y/t-0.parquet"}, "y/t-0/00000007"},
		{[]string{filepath.Join(dir, "d/x/t-0.parquet"), "./d/../d/y/t-0.parquet"}, "y/t-0/00000007"},
		{[]string{"d/x/t-0.parquet", "d/z/t-5.parquet", "d/y/t-0.parquet"}, "y/t-0/00000007"}, // added files
		{[]string{"d/x/t-0.parquet", "d/x/t-1.parquet", "d/y/t-0.parquet"}, "y/t-0/00000007"},
		{[]string{"d/x/t-1.parquet", "d/y/t-0.parquet"}, "y/t-0/00000007"}, // before the file of an equal name
		{[]string{"d/t.parquet", "d/x/t.parquet"}, "x/t/00000007"},
		{[]string{"d/t.pq", "d/t.parquet"}, "t.parquet/00000007"},
		{[]string{"d/a.parquet", "d/a.pq", "d/a.parquet.pq"}, "a.parquet.pq/00000007"},
		{[]string{"d/a.parquet.pq", "d/a.pq", "d/a.parquet"}, "a.parquet/00000007"},
		{[]string{"d/a.parquet", "d/a.parquet.pq", "d/a.pq"}, "a.pq/00000007"},
		{[]string{"d/.parquet"}, ".parquet/00000007"},
		{[]string{"/a/t.parquet", "/b/t.parquet"}, "b/t/00000007"},
		{[]string{"https://h/a/t.parquet?key=secret"}, "t/00000007"},
		{[]string{"https://h/a/x/t.parquet?key=secret", "https://h//a/y/t.parquet?key=other"}, "y/t/00000007"},
		{[]string{"s3://h/t.parquet", "s3://i/t.parquet"}, "i/t/00000007"},
	} {
		if got := archive.RowName("", false, c.paths...); got != c.want {
			t.Errorf("%q: the row is called %q, want %q", c.paths, got, c.want)
		}
	}
}

// TestEndedContextEndsReadingBoxes: no later row is read, although the file is open.
func TestEndedContextEndsReadingBoxes(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	a, err := archive.Open(ctx, "../../testdata/parquet/boxes-lists.parquet",
		archive.Config{Columns: archive.Columns{Unlabelled: true, Boxes: "objects"}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	r := archive.NewReader(a)
	defer r.Close()
	rows := 0
	err = r.Boxes(func(string, []parquet.Box) error {
		if rows++; rows == 3 {
			cancel()
		}
		return nil
	})
	if !errors.Is(err, context.Canceled) || rows != 3 {
		t.Errorf("got %d rows and the error %v, want 3 and %v", rows, err, context.Canceled)
	}
}

func TestPathsOfRowsAreClean(t *testing.T) {
	for image, want := range map[string]string{"a/b.jpg": "a/b.jpg", "/a/b.jpg": "a/b.jpg", "./a//b.jpg": "a/b.jpg",
		"../../b.jpg": "b.jpg", "a/../../b.jpg": "b.jpg"} {
		if got := archive.RowName(image, false, "t.parquet"); got != want {
			t.Errorf("%q: the row is called %q, want %q", image, got, want)
		}
		if got := archive.RowName(image, true, "t.parquet"); got != "t/00000007/"+want {
			t.Errorf("%q with RowNames: the row is called %q, want %q", image, got, "t/00000007/"+want)
		}
	}
	for _, image := range []string{"", ".", "/", "..", "../.."} {
		if got := archive.RowName(image, false, "t.parquet"); got != "t/00000007" {
			t.Errorf("%q: the row is called %q, want %q", image, got, "t/00000007")
		}
	}
}

package index

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// The error of an archive without samples names its likely kind.
func TestArchiveWithoutSamplesSaysWhatItIs(t *testing.T) {
	for _, c := range []struct {
		names []string
		want  string // after the error; "": nothing
	}{
		{[]string{"README.md", "data/test-00000-of-00001.parquet", "data/train-00000-of-00002.parquet"},
			`"data/train-00000-of-00002.parquet" is a Parquet file: open '/photos/data/train-*.parquet'`},
		{[]string{"part-7.parquet"}, "open '/photos/part-*.parquet'"},
		{[]string{"ab-of-12.parquet"}, "open '/photos/ab-of-12.parquet'"},
		{[]string{"birds.parquet", "cats.parquet"}, "open '/photos/birds.parquet'"},
		{[]string{"n01440764.tar", "n01443537.tar"}, `"n01440764.tar" is an archive inside of it: unpack each`},
		{[]string{"data/README", "data/train.zip"}, `"data/train.zip" is an archive`},
		{[]string{"dataset_dict.json", "train/data-00000-of-00001.arrow", "train/state.json"},
			`"train/data-00000-of-00001.arrow" is an Arrow file, as save_to_disk of Hugging Face's datasets writes it: ` +
				`repack it in Python: datasets.load_from_disk("FOLDER").to_parquet("train.parquet")`},
		{[]string{"0.jpg", "0.cls"}, `"0.cls" seems to be a label of WebDataset: set Options.WebDataset`},
		{[]string{`ds\cat\0.jpg`}, `has backslashes`},
		{[]string{"a.jpg", "b.txt"}, ""},
	} {
		all := clues{folder: "/photos"}
		for _, name := range c.names {
			all.note(name)
		}
		err := all.explain(ErrNoSamples)
		added := strings.TrimPrefix(fmt.Sprint(err), ErrNoSamples.Error())
		if !errors.Is(err, ErrNoSamples) || !strings.Contains(added, c.want) || c.want == "" && added != "" {
			t.Errorf("%q: got %q, want it with %q", c.names, err, c.want)
		}
	}
	packed := clues{parquet: "a.parquet"}
	if err := packed.explain(ErrNoSamples); !strings.Contains(err.Error(), `"a.parquet" is a Parquet file: unpack it`) {
		t.Errorf("a Parquet file in a .tar: got %q, want advice to unpack it", err)
	}
}

func TestAdviceForFoldersThatLookLikePatterns(t *testing.T) {
	for folder, want := range map[string]string{"/d": "/d/t-*.parquet", "/d[1]": "/d[1]/t-0.parquet",
		"/a*": "/a*/t-0.parquet", "/it's": "/it's/t-0.parquet"} {
		c := clues{folder: folder, parquet: "t-0.parquet"}
		if advice, got := c.advice(); got != want || !strings.Contains(advice, want) {
			t.Errorf("%s: got %q and the path %q, want the path %q in both", folder, advice, got, want)
		}
	}
}

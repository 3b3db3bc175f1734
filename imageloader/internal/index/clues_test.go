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
		{[]string{"n01440764.tar", "n01443537.tar"}, `"n01440764.tar" is an archive inside of it: unpack each`},
		{[]string{"data/README", "data/train.zip"}, `"data/train.zip" is an archive`},
		{[]string{"README.md", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"},
			`"train-00000-of-00002.parquet" is a Parquet file: name it, or several by a pattern`},
		{[]string{"dataset_dict.json", "train/data-00000-of-00001.arrow", "train/state.json"},
			`"train/data-00000-of-00001.arrow" is an Arrow file, as save_to_disk of Hugging Face's datasets writes it: ` +
				`repack it in Python: datasets.load_from_disk("FOLDER").to_parquet("train.parquet")`},
		{[]string{"0.jpg", "0.cls"}, `"0.cls" seems to be a label of WebDataset: set Options.WebDataset`},
		{[]string{`ds\cat\0.jpg`}, `has backslashes`},
		{[]string{"a.jpg", "b.txt"}, ""},
	} {
		var all clues
		for _, name := range c.names {
			all.note(name)
		}
		err := all.explain(ErrNoSamples)
		added := strings.TrimPrefix(fmt.Sprint(err), ErrNoSamples.Error())
		if !errors.Is(err, ErrNoSamples) || !strings.Contains(added, c.want) || c.want == "" && added != "" {
			t.Errorf("%q: got %q, want it with %q", c.names, err, c.want)
		}
	}
}

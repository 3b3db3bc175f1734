package cli

import (
	"errors"
	"testing"
)

// A command's error names the flag instead of the Go option. It does not name an option that has no
// flag.
func TestErrorsNameFlags(t *testing.T) {
	for text, want := range map[string]string{
		"imageloader: Options.List: open a.csv: no such file":       "imageloader: -list: open a.csv: no such file",
		"set Options.WebDataset":                                    "set -webdataset",
		"unless Options.WebDataset or Options.List gives labels":    "unless -webdataset or -list gives labels",
		"(GOMAXPROCS, the quota, Options.Workers), or":              "(GOMAXPROCS, the quota, -workers), or",
		"over the limit of 9 (Options.MaxPixels): skip it":          "over the limit of 9: skip it",
		"the reason (LoadOptions.Dict) is":                          "the reason (-pretrained-dict) is",
		"pack: Options.Shards is 999999, and Options.ShardBytes 0":  "pack: -shards is 999999, and -shard-size 0",
		"name the column in Options.Columns.Labels: it has x":       "name the column in -label-column: it has x",
		"(turned only with Options.Transform.ApplyEXIFOrientation)": "(turned only with -upright)",
		"choose them (Options.ListFormat.LabelColumns)":             "choose them (-label-column)",
		"a program sets Options.OpenSource":                         "a program sets Options.OpenSource",
		"(FixOptions.DropClasses leaves them out)":                  "(-drop-classes leaves them out)",
	} {
		if got := Advised(errors.New(text), "train"); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

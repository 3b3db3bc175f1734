package index

import (
	"fmt"
	"path"
	"path/filepath"
	"strings"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// clues has the name of the first member of each suspicious kind. If an archive has no samples, the
// error names the likely reason.
type clues struct {
	folder  string // the path of the archive if it is a directory; otherwise ""
	archive string // an archive in the archive, for example a class of ImageNet or a part of a data set
	parquet string // a Parquet file
	arrow   string // an Arrow file of Hugging Face's datasets
	label   string // a WebDataset label
	windows string // a path with backslashes
}

// note checks the name of a member.
func (c *clues) note(name string) {
	first := func(to *string) {
		if *to == "" {
			*to = strings.Clone(name)
		}
	}
	var room [maxExtension]byte
	switch string(lower(room[:0], path.Ext(name))) {
	case ".tar", ".tgz", ".gz", ".zst", ".zip", ".7z", ".rar":
		first(&c.archive)
	case ".parquet":
		if first(&c.parquet); !strings.Contains(c.parquet, "train") && strings.Contains(name, "train") {
			c.parquet = strings.Clone(name) // a test set may come first
		}
	case ".arrow":
		first(&c.arrow)
	case ".cls":
		first(&c.label)
	}
	if strings.Contains(name, `\`) {
		first(&c.windows)
	}
}

// explain adds the likely reason and the next step to the error for an archive without samples.
func (c *clues) explain(err error) error {
	if advice, _ := c.advice(); advice != "" {
		return fmt.Errorf("%w; %s", err, advice)
	}
	return err
}

// advice returns the likely reason why an archive has no samples, and the next step, or "". instead
// is the path to open instead, or "".
func (c *clues) advice() (advice, instead string) {
	switch {
	case c.windows != "":
		return fmt.Sprintf(`the path %q has backslashes, as a tool of Windows writes it: `+
			"unpack it, and pack the folder again with tar", c.windows), ""
	case c.label != "":
		return fmt.Sprintf("%q seems to be a label of WebDataset: set Options.WebDataset", c.label), ""
	case c.parquet != "" && c.folder == "":
		return fmt.Sprintf("%q is a Parquet file: unpack it, and open that file", c.parquet), ""
	case c.parquet != "":
		instead = filepath.Join(c.folder, filepath.FromSlash(parquetShards(c.parquet)))
		if strings.ContainsAny(c.folder, "*?[{'") { // no pattern, and in no quotes
			instead = filepath.Join(c.folder, filepath.FromSlash(c.parquet))
			return fmt.Sprintf("%q is a Parquet file: open %q", c.parquet, instead), instead
		}
		return fmt.Sprintf("%q is a Parquet file: open '%s'", c.parquet, instead), instead
	case c.arrow != "":
		return fmt.Sprintf("%q is an Arrow file, as save_to_disk of Hugging Face's datasets writes it: "+
			"%s", c.arrow, archive.RepackArrow), ""
	case c.archive != "":
		return fmt.Sprintf("%q is an archive inside of it: unpack each into a folder, whose name is "+
			"the class of its images, and name the folder above", c.archive), ""
	}
	return "", ""
}

// parquetShards returns a pattern for a Parquet file and the other shards of its set, such as
// "train-*.parquet" for "train-00000-of-00002.parquet". If a file's name has no number, it returns
// the name.
func parquetShards(name string) string {
	stem := name[:len(name)-len(path.Ext(name))]
	first, of, found := cutNumber(stem)
	if before, isShard := strings.CutSuffix(first, "-of"); found && isShard {
		first, of, found = cutNumber(before)
	}
	if !found || of == "" {
		return name
	}
	return first + "-*" + path.Ext(name)
}

// cutNumber cuts a dash and a number from the end of a name.
func cutNumber(name string) (before, number string, found bool) {
	before = strings.TrimRight(name, "0123456789")
	number = name[len(before):]
	before, found = strings.CutSuffix(before, "-")
	return before, number, found && number != ""
}

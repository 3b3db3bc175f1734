package index

import (
	"fmt"
	"path"
	"strings"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// clues has the name of the first member of each suspicious kind. If an archive has no samples, the
// error names the likely reason.
type clues struct {
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
		first(&c.parquet)
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
	switch {
	case c.windows != "":
		return fmt.Errorf(`%w; the path %q has backslashes, as a tool of Windows writes it: `+
			"unpack it, and pack the folder again with tar", err, c.windows)
	case c.label != "":
		return fmt.Errorf("%w; %q seems to be a label of WebDataset: set Options.WebDataset",
			err, c.label)
	case c.parquet != "":
		return fmt.Errorf("%w; %q is a Parquet file: name it, or several by a pattern, such as "+
			"'data/train-*.parquet'", err, c.parquet)
	case c.arrow != "":
		return fmt.Errorf("%w; %q is an Arrow file, as save_to_disk of Hugging Face's datasets writes it: "+
			"%s", err, c.arrow, archive.RepackArrow)
	case c.archive != "":
		return fmt.Errorf("%w; %q is an archive inside of it: unpack each into a folder, whose name is "+
			"the class of its images, "+
			"and name the folder above", err, c.archive)
	}
	return err
}

package trace

import (
	"bufio"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/torchstream/torchstream/internal/safefile"
)

// WriteFile writes a picture or a file for Perfetto, depending on the extension of the name: .svg,
// .png or .json. WriteFile ignores the options for .json. It replaces an empty file or a file of
// the same format. It leaves any other file unchanged and returns an error.
func (t *Trace) WriteFile(name string, o PictureOptions) (err error) { return writeFile(name, t, o) }

// writer writes a recording in each form.
type writer interface {
	WriteSVG(w io.Writer, o PictureOptions) error
	WritePNG(w io.Writer, o PictureOptions) error
	WriteChrome(w io.Writer) error
}

func writeFile(name string, t writer, o PictureOptions) (err error) {
	var write func(io.Writer) error
	switch strings.ToLower(filepath.Ext(name)) {
	case ".svg":
		write = func(w io.Writer) error { return t.WriteSVG(w, o) }
	case ".png":
		write = func(w io.Writer) error { return t.WritePNG(w, o) }
	case ".json":
		write = t.WriteChrome
	default:
		return badName(name)
	}
	f, err := safefile.Create(name, kinds[strings.ToLower(filepath.Ext(name))])
	if err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	buffered := bufio.NewWriter(f)
	err = write(buffered)
	if err == nil {
		err = buffered.Flush()
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return fmt.Errorf("trace: %s: %w", name, err)
	}
	return nil
}

// kinds maps extensions to the formats that WriteFile writes and may replace.
var kinds = map[string]safefile.Kind{
	".svg":  safefile.Prefix("an SVG", "<svg"),
	".png":  safefile.PNG,
	".json": safefile.Prefix("a recording", `{"displayTimeUnit"`),
}

func badName(name string) error {
	return fmt.Errorf("trace: %q: the name of the file must end in .svg, .png or .json", name)
}

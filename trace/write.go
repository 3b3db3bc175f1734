package trace

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// WriteFile writes a picture or a file for Perfetto, by the name's end: .svg, .png or .json. The options do not matter for .json.
func (t *Trace) WriteFile(name string, o PictureOptions) (err error) {
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
	f, err := os.Create(name)
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

var formats = map[string]bool{".svg": true, ".png": true, ".json": true}

func badName(name string) error {
	return fmt.Errorf("trace: %q: the file's name must end in .svg, .png or .json", name)
}

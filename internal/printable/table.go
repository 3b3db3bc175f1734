package printable

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// NewTable returns a writer that aligns tab-terminated cells in columns, separated by two blanks.
// flags are the flags of package tabwriter. Lines have no trailing blanks. The caller calls Flush.
func NewTable(w io.Writer, flags uint) *tabwriter.Writer {
	return tabwriter.NewWriter(&trimmer{w: w}, 0, 0, 2, ' ', flags)
}

// trimmer removes trailing blanks from lines.
type trimmer struct {
	w      io.Writer
	blanks []byte // possibly trailing blanks
	line   []byte
}

func (t *trimmer) Write(p []byte) (int, error) {
	t.line = t.line[:0]
	for _, c := range p {
		switch c {
		case ' ':
			t.blanks = append(t.blanks, c)
			continue
		case '\n':
		default:
			t.line = append(t.line, t.blanks...)
		}
		t.blanks = t.blanks[:0]
		t.line = append(t.line, c)
	}
	if _, err := t.w.Write(t.line); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Counted formats a number with its noun.
func Counted[N int | int64](n N, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

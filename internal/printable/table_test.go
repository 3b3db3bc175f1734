package printable

import (
	"fmt"
	"strings"
	"testing"
	"text/tabwriter"
)

func TestTableHasNoBlanksAtTheEndsOfLines(t *testing.T) {
	for flags, want := range map[uint]string{
		0:                    "a    bb\nccc\n\n  x  d e\n",
		tabwriter.AlignRight: "    a  bb\n  ccc\n\n    x  d e\n",
	} {
		var out strings.Builder
		w := NewTable(&out, flags)
		fmt.Fprint(w, "a\tbb\t\nccc\t\t\n\n  x\td e\t\n")
		if err := w.Flush(); err != nil || out.String() != want {
			t.Errorf("flags %d: %v, %q, want %q", flags, err, out.String(), want)
		}
	}
}

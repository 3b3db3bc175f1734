package cli

import (
	"strings"
	"testing"
)

func TestWrappedLinesHaveAtMost100Columns(t *testing.T) {
	const text = "one two "
	if got, want := wrapped(strings.Repeat(text, 14)+"\nthree", "  "), "  "+
		strings.TrimSpace(strings.Repeat(text, 12))+"\n  one two one two three\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

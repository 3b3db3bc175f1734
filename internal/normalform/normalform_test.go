package normalform

import (
	"strings"
	"testing"
)

// These are outputs of Python's unicodedata.normalize.
const (
	nfc, nfd = "B\u00e4r", "Ba\u0308r"
	korean   = "\ud55c"             // NFC
	jamo     = "\u1112\u1161\u11ab" // NFD
)

func TestHintNamesFormsThatDiffer(t *testing.T) {
	for _, c := range []struct {
		names, known []string
		want         []string // parts of the hint; nil: no hint
	}{
		{[]string{nfd}, []string{"dog", nfc}, []string{`"Ba\u0308r" and "B\u00e4r"`, "(NFD, NFC)", "convmv"}},
		{[]string{"cat", nfc}, []string{nfd}, []string{`"B\u00e4r" and "Ba\u0308r"`, "(NFC, NFD)"}},
		{[]string{korean}, []string{jamo}, []string{"(NFC, NFD)"}},
		{[]string{nfc + nfd}, []string{nfc + nfc}, []string{"(mixed, NFC)"}},
		{[]string{nfc}, []string{nfc}, nil},
		{[]string{"Bar"}, []string{nfc, nfd}, nil},
		{[]string{"B\u00e5r"}, []string{nfd}, nil},
		{[]string{"b\u00e4r"}, []string{nfd}, nil}, // another letter, not another form
		{[]string{"Ba\xccr"}, []string{nfd}, nil},  // invalid UTF-8
		{nil, nil, nil},
	} {
		got := Hint(c.names, c.known)
		for _, want := range c.want {
			if !strings.Contains(got, want) {
				t.Errorf("%+q among %+q: hint %q, want it with %q", c.names, c.known, got, want)
			}
		}
		if c.want == nil && got != "" {
			t.Errorf("%+q among %+q: hint %q, want none", c.names, c.known, got)
		}
	}
}

package ptfile

import (
	"bytes"
	"strings"
	"testing"
)

// Write refuses the same numbers of opcodes and stack values as the unpickler, and then writes
// nothing. At the limit both accept the file.
func TestWriteCountsAsTheReader(t *testing.T) {
	items := make([]any, 5000)
	for _, c := range []struct {
		name  string
		root  any
		at    limits
		below limits
		says  string
	}{
		// PROTO, EMPTY_LIST, STOP, and MARK and APPENDS around 2,000, 2,000 and 1,000 NONE.
		{"opcodes", &List{Items: items}, limits{5009, 9999}, limits{5008, 9999}, "more than 5008 opcodes"},
		{"stack", &Tuple{Items: items}, limits{9999, 5000}, limits{9999, 4999}, "a stack of more than 4999 values"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var written bytes.Buffer
			if err := write(&written, c.root, "", c.below); err == nil ||
				!strings.Contains(err.Error(), c.says) || written.Len() > 0 {
				t.Errorf("over the limit: %v, and %d bytes, want an error with %q, 0",
					err, written.Len(), c.says)
			}
			if err := write(&written, c.root, "", c.at); err != nil {
				t.Fatalf("at the limit: %v, want no error", err)
			}
			f, err := Open(bytes.NewReader(written.Bytes()), int64(written.Len()))
			if err != nil {
				t.Fatal(err)
			}
			pickle, err := f.readAll(f.members["data.pkl"], maxPickle)
			if err != nil {
				t.Fatal(err)
			}
			for limit, want := range map[limits]bool{c.at: true, c.below: false} {
				if _, err := unpickle(pickle, limit, f.storage); (err == nil) != want {
					t.Errorf("the reader with %+v: %v", limit, err)
				}
			}
		})
	}
}

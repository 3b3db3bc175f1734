package index

import (
	"bytes"
	"errors"
	"strings"
	"testing"
)

// TestDamagedSectionIsAnError: a section is read item by item. A section that is cut off, or has
// another checksum, is damaged.
func TestDamagedSectionIsAnError(t *testing.T) {
	var s spool
	for i := range 3*items + 5 {
		s.write([]byte{byte(i), byte(i >> 8), 7})
	}
	read := func(s section) (n int, err error) {
		r := s.reader(3)
		for {
			b, err := r.next()
			if b == nil {
				return n, err
			}
			if !bytes.Equal(b, []byte{byte(n), byte(n >> 8), 7}) {
				t.Fatalf("item %d is %v", n, b)
			}
			n++
		}
	}
	good := s.section(3*items + 5)
	if n, err := read(good); n != 3*items+5 || err != nil {
		t.Errorf("%d items, error %v, want n = %v, no error", n, err, 3*items+5)
	}
	for what, change := range map[string]func(*section){
		"checksum":   func(s *section) { s.checked = true },
		"too long":   func(s *section) { s.size++ },
		"not whole":  func(s *section) { s.size-- },
		"impossible": func(s *section) { s.at = strings.NewReader("") },
	} {
		bad := good
		change(&bad)
		if _, err := read(bad); !errors.Is(err, errIndexDamaged) {
			t.Errorf("%s: error %v, want the error %v", what, err, errIndexDamaged)
		}
	}
}

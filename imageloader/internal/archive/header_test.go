package archive

import (
	"archive/tar"
	"bytes"
	"path"
	"strings"
	"testing"
)

// TestHeadMatchesOnlyItsMember: a header matches the name and the size of its member, in every form
// that Go writes, and no other member.
func TestHeadMatchesOnlyItsMember(t *testing.T) {
	long := "train/" + strings.Repeat("a long name ", 30) + ".jpg"
	for _, name := range []string{"a.jpg", "a/b.jpg", "./a/b.jpg", "a//b.jpg", "ä/b.jpg",
		strings.Repeat("p", 120) + "/x.jpg", long, strings.Repeat("d/", 60) + strings.Repeat("y", 100)} {
		for _, format := range []tar.Format{tar.FormatUSTAR, tar.FormatPAX, tar.FormatGNU} {
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			if err := w.WriteHeader(&tar.Header{Name: "before.jpg", Size: 700, Mode: 0o644}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(make([]byte, 700)); err != nil {
				t.Fatal(err)
			}
			if err := w.WriteHeader(&tar.Header{Name: name, Size: 1234, Mode: 0o644, Format: format}); err != nil {
				continue // not in this format
			}
			blocks, clean := b.Bytes(), path.Clean(name)
			for what, c := range map[string]struct {
				name string
				size int64
				want bool
			}{
				"itself":           {clean, 1234, true},
				"another name":     {clean + "x", 1234, false},
				"a shorter name":   {clean[:len(clean)-1], 1234, false},
				"the one before":   {"before.jpg", 1234, false},
				"the one before's": {"before.jpg", 700, false},
				"another size":     {clean, 1235, false},
			} {
				if got := Heads(blocks, c.name, c.size); got != c.want {
					t.Errorf("%.20s, %v, %s: %v, want %v", name, format, what, got, c.want)
				}
			}
			for at := range BlockBytes {
				if changed := bytes.Clone(blocks); at < 148 {
					if changed[len(changed)-BlockBytes+at] ^= 1; Heads(changed, clean, 1234) {
						t.Errorf("%.20s, %v: byte %d changed", name, format, at)
					}
				}
			}
			alone := blocks[len(blocks)-BlockBytes:]
			if short := len(clean) <= 100 &&
				!strings.Contains(clean, "ä"); short != Heads(alone, clean, 1234) && short {
				t.Errorf("%.20s, %v: not by its own header", name, format)
			}
		}
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "train/a.jpg", Size: 1234}); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(10, func() { Heads(b.Bytes(), "train/a.jpg", 1234) }); n > 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

package trace

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"
)

// A picture of very many events has no more shapes than its pixels can show.
func TestPictureStaysSmall(t *testing.T) {
	tr := &Trace{}
	for i := range 300_000 {
		at := time.Duration(i) * 3 * time.Microsecond
		tr.Events = append(tr.Events,
			Event{Kind: Kind(1 + i%3), Name: "k", Start: at, Duration: 2 * time.Microsecond,
				Lane: int64(7 + i%3), Bytes: 8},
			Event{Kind: Runtime, Name: "cudaLaunchKernel", Start: at, Duration: time.Microsecond,
				Device: Host, Lane: 1})
	}
	if shapes := len(tr.draw(PictureOptions{}).Shapes); shapes > 5000 {
		t.Errorf("%d shapes, want at most 5000", shapes)
	}
}

func TestPictureOfAPart(t *testing.T) {
	p := overlapping().draw(PictureOptions{From: 30 * ms, To: 40 * ms, Width: 700})
	for _, s := range p.Shapes {
		if r := s.Rect; r != nil && (r.X < 0 || r.X+r.W > 700.01 || r.Tip != "" && r.X < margin+gutter-0.01) {
			t.Errorf("a rectangle is outside of the picture: %+v", r)
		}
	}
	part := overlapping().cut(34*ms, 40*ms).Summary()
	if len(part.Copies) != 1 || part.Copies[0].Bytes != 10<<20 {
		t.Errorf("half of a copy: got %+v, want 10 MiB", part.Copies)
	}
}

// An empty recording, and events of zero length, are drawn without a division by zero.
func TestPictureOfNothing(t *testing.T) {
	for _, tr := range []*Trace{{}, {Events: []Event{{Kind: Kernel, Name: "k", Start: 5, Lane: 7}}}} {
		var b bytes.Buffer
		if err := tr.WriteSVG(&b, PictureOptions{}); err != nil || strings.Contains(b.String(), "NaN") ||
			strings.Contains(b.String(), "Inf") {
			t.Errorf("%v: %s", err, b.String())
		}
		if err := tr.WritePNG(io.Discard, PictureOptions{}); err != nil {
			t.Error(err)
		}
	}
}

func TestTicksAreRound(t *testing.T) {
	for _, c := range []struct {
		span  time.Duration
		count int
		step  time.Duration
		label string
	}{
		{55 * ms, 12, 5 * ms, "5 ms"}, {1, 10, 1, "1 ns"}, {0, 0, 1, "1 ns"},
		{9 * time.Second, 10, time.Second, "1 s"}, {1500 * time.Microsecond, 10, 200 * time.Microsecond, "200 µs"},
		{2500 * time.Microsecond, 10, 500 * time.Microsecond, "0.5 ms"}, {700, 10, 100, "100 ns"},
	} {
		t.Run(c.label, func(t *testing.T) {
			step, unit := tick(c.span, c.count)
			if step != c.step || unit.label(step) != c.label {
				t.Errorf("tick(%v, %d): got %v, %q, want %v, %q", c.span, c.count, step, unit.label(step),
					c.step, c.label)
			}
		})
	}
}

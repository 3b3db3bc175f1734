package decode_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/decodeplan"
)

// newPlans returns memory for plans, aligned.
func newPlans(bytes, rows int) *decodeplan.Plans {
	words := make([]struct{ a, b uint64 }, bytes/decodeplan.Align+1)
	memory := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), bytes)
	return &decodeplan.Plans{Memory: memory, Rows: make([]decodeplan.Row, rows)}
}

// TestDecodePlansLeavesTheRestToTheHost: images with a plan have no pixels, and all others, and the
// errors, are those of Decode.
func TestDecodePlansLeavesTheRestToTheHost(t *testing.T) {
	names, images := corpus(t)
	names, images = append(names, "text"), append(images, []byte("text"))
	o := decode.Options{Transform: transform.Eval(40, 32), Seed: 3}
	planar := o
	planar.Planar = true
	for name, c := range map[string]struct {
		o           decode.Options
		bytes, rows int
		least, most int // plans
	}{
		"room":      {o, 4 << 20, len(images), 15, 60},
		"few rows":  {o, 4 << 20, 30, 5, 30},
		"little":    {o, 40 << 10, len(images), 1, 8},
		"no memory": {o, 0, len(images), 0, 0},
		"planar":    {planar, 4 << 20, len(images), 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDecoder(t, c.o)
			want, got := make([]byte, len(images)*d.Bytes()), make([]byte, len(images)*d.Bytes())
			wantErr := d.Decode(t.Context(), want, images...)
			plans := newPlans(c.bytes, c.rows)
			for range 2 { // what is left of a call does not matter to the next
				if err := d.DecodePlans(t.Context(), got, plans, images...); fmt.Sprint(err) != fmt.Sprint(wantErr) || !slices.Equal(faulty(t, err), faulty(t, wantErr)) {
					t.Fatalf("%v, want %v", err, wantErr)
				}
			}
			planned, end := 0, 0
			rows := slices.Clone(plans.Rows)
			for i, r := range rows {
				if r.Bytes > 0 {
					planned++
					copy(got[i*d.Bytes():][:d.Bytes()], want[i*d.Bytes():])
				}
			}
			slices.SortFunc(rows, func(a, b decodeplan.Row) int { return a.At - b.At })
			for _, r := range rows {
				if r.Bytes == 0 {
					continue
				}
				if r.At < end || r.At%decodeplan.Align != 0 || r.At+r.Bytes > plans.Used || plans.Used > c.bytes {
					t.Fatalf("a plan at %d of %d bytes, behind %d, of %d used", r.At, r.Bytes, end, plans.Used)
				}
				end = r.At + r.Bytes
			}
			if planned < c.least || planned > c.most {
				t.Errorf("%d plans", planned)
			}
			for i := range images {
				if row := i * d.Bytes(); !bytes.Equal(got[row:][:d.Bytes()], want[row:][:d.Bytes()]) {
					t.Errorf("%s: other pixels", names[i])
				}
			}
		})
	}
}

// TestDecodeRowIsARowOfDecode: with random crops and operations, and in its error.
func TestDecodeRowIsARowOfDecode(t *testing.T) {
	o := decode.Options{Transform: transform.Train(32), Seed: 9}
	o.Transform.Ops = []transform.Op{transform.ColorJitter{Brightness: 0.5}}
	d := newDecoder(t, o)
	images := [][]byte{photo(t), photo(t), []byte("text"), photo(t)}
	want, row := make([]byte, len(images)*d.Bytes()), make([]byte, d.Bytes())
	_ = d.Decode(t.Context(), want, images...) // faults of the text
	for i := range images {
		err := d.DecodeRow(t.Context(), row, i, images[i])
		if !bytes.Equal(row, want[i*d.Bytes():][:d.Bytes()]) {
			t.Errorf("row %d: other pixels", i)
		}
		var faults decode.Errors
		if bad := errors.As(err, &faults); bad != (i == 2) || bad && (len(faults) != 1 || faults[0].Image != i) {
			t.Errorf("row %d: %v", i, err)
		}
	}
	if err := d.DecodeRow(t.Context(), row[1:], 0, images[0]); err == nil {
		t.Error("too little memory was accepted")
	}
}

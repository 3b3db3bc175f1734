package decode_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
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

// mostPlans returns how many of the images' plans fit into the memory, smallest first. The actual
// number depends on the order in which goroutines plan.
func mostPlans(t *testing.T, d *decode.Decoder, images [][]byte, memory int) (count int) {
	t.Helper()
	plans := newPlans(4<<20, len(images))
	if err := d.Plan(t.Context(), plans, images...); err != nil {
		t.Fatal(err)
	}
	var sizes []int
	for _, row := range plans.Rows {
		if row.Bytes > 0 {
			sizes = append(sizes, row.Bytes)
		}
	}
	slices.Sort(sizes)
	for _, size := range sizes {
		if memory -= size; memory < 0 {
			break
		}
		count++
	}
	return count
}

// TestPlansAndRowsEqualDecode: for the images that have no plan, DecodeRows returns the pixels and
// the errors of Decode. Plans are consecutive in their memory.
func TestPlansAndRowsEqualDecode(t *testing.T) {
	names, images := corpus(t)
	names, images = append(names, "text"), append(images, []byte("text"))
	o := decode.Options{Transform: transform.Train(32), Seed: 3}
	o.Transform.Ops = []transform.Op{transform.ColorJitter{Brightness: 0.5}}
	noisy, planar, few, strict := o, o, o, o
	noisy.Transform.Ops = []transform.Op{transform.GaussianNoise{}}
	planar.Planar = true
	few.MaxPixels = 1000
	strict.MaxMemory = 1
	for name, c := range map[string]struct {
		o           decode.Options
		bytes, rows int
		min, max    int // plans
	}{
		"room":               {o, 4 << 20, len(images), 15, 60},
		"few rows":           {o, 4 << 20, 30, 5, 30},
		"little memory":      {o, 40 << 10, len(images), 1, mostPlans(t, newDecoder(t, o), images, 40<<10)},
		"no memory":          {o, 0, len(images), 0, 0},
		"planar":             {planar, 4 << 20, len(images), 0, 0},
		"the host's":         {noisy, 4 << 20, len(images), 0, 0},
		"more pixels":        {few, 4 << 20, len(images), 0, 10},
		"more memory needed": {strict, 4 << 20, len(images), 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDecoder(t, c.o)
			want, got := make([]byte, len(images)*d.Bytes()), make([]byte, len(images)*d.Bytes())
			wantErr := d.Decode(t.Context(), want, images...)
			plans := newPlans(c.bytes, c.rows)
			for range 2 { // the second call reuses the plans of the first
				if err := d.Plan(t.Context(), plans, images...); err != nil {
					t.Fatal(err)
				}
			}
			if planned := checkPlans(t, plans); planned < c.min || planned > c.max {
				t.Errorf("%d plans, want planned from %v to %v", planned, c.min, c.max)
			}
			var rest []int
			for i := range images {
				if i >= c.rows || plans.Rows[i].Bytes == 0 {
					rest = append(rest, i)
				} else {
					copy(got[i*d.Bytes():][:d.Bytes()], want[i*d.Bytes():])
				}
			}
			err := d.DecodeRows(t.Context(), got, rest, images)
			if fmt.Sprint(err) != fmt.Sprint(wantErr) || !slices.Equal(faulty(t, err), faulty(t, wantErr)) {
				t.Errorf("%v, want %v", err, wantErr)
			}
			for i := range images {
				if row := i * d.Bytes(); !bytes.Equal(got[row:][:d.Bytes()], want[row:][:d.Bytes()]) {
					t.Errorf("%s: other pixels", names[i])
				}
			}
		})
	}
}

// checkPlans returns the number of plans, and checks that none overlap.
func checkPlans(t *testing.T, plans *decodeplan.Plans) (n int) {
	t.Helper()
	rows := slices.Clone(plans.Rows)
	slices.SortFunc(rows, func(a, b decodeplan.Row) int { return a.At - b.At })
	end := 0
	for _, r := range rows {
		if r.Bytes == 0 {
			continue
		}
		if r.At < end || r.At%decodeplan.Align != 0 || r.At+r.Bytes > plans.Used || plans.Used > len(plans.Memory) {
			t.Fatalf("a plan at %d of %d bytes, behind %d, of %d used", r.At, r.Bytes, end, plans.Used)
		}
		end = r.At + r.Bytes
		n++
	}
	return n
}

// TestPlanRefusesOtherModules: the only call that another module can make returns an error.
func TestPlanRefusesOtherModules(t *testing.T) {
	if err := newDecoder(t, decode.Options{}).Plan(t.Context(), nil, photo(t)); err == nil ||
		!strings.Contains(err.Error(), "use Decode") {
		t.Error(err)
	}
}

// TestRowsAreLeftAlone: DecodeRows writes only the rows that it is asked for, but requires memory
// for all rows.
func TestRowsAreLeftAlone(t *testing.T) {
	d := newDecoder(t, decode.Options{Transform: transform.Train(32)})
	images := [][]byte{photo(t), photo(t), []byte("text"), photo(t)}
	dst := bytes.Repeat([]byte{7}, len(images)*d.Bytes())
	for _, rows := range [][]int{nil, {1}, {1, 2}} {
		if err := d.DecodeRows(t.Context(), dst, rows, images); !slices.Equal(faulty(t, err),
			rows[min(1, len(rows)):]) {
			t.Errorf("%v: %v", rows, err)
		}
	}
	for _, wrong := range [][]int{{0, 4}, {0, -1}} {
		if err := d.DecodeRows(t.Context(), dst, wrong, images); err == nil ||
			!strings.Contains(err.Error(), fmt.Sprint("row ", wrong[1])) {
			t.Errorf("%v: %v, want an error with %q", wrong, err, fmt.Sprint("row ", wrong[1]))
		}
	}
	for i := range images {
		row := dst[i*d.Bytes():][:d.Bytes()]
		if untouched := bytes.Count(row, []byte{7}) == len(row); untouched != (i == 0 || i == 3) {
			t.Errorf("row %d is untouched: %v, want %v", i, untouched, (i == 0 || i == 3))
		}
	}
	if err := d.DecodeRows(t.Context(), dst[1:], nil, images); err == nil {
		t.Error("DecodeRows with a byte too little memory = nil, want an error")
	}
}

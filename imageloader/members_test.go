package imageloader

import (
	"archive/zip"
	"os"
	"path/filepath"
	"testing"

	"github.com/torchstream/torchstream/internal/decodeplan"
)

// TestMemberBytes: the memory for compressed members is within its bounds and has room for random
// batches. It is 0 if the host inflates.
func TestMemberBytes(t *testing.T) {
	const batch = 16
	small := Options{BatchSize: batch, Transform: Train(64), ShuffleBytes: 1 << 16}
	held, huge := small, small
	held.ShuffleBytes = 0
	huge.BatchSize = 1 << 16
	labelled := small
	labelled.TargetWidth, labelled.Target = 1, func(Sample, []float32) error { return nil }
	packed, tar := planArchive(t, "t.tgz", 60, 2), planArchive(t, "t.tar", 5, 0)
	data, err := os.ReadFile(planArchive(t, "t.tar", 60, 2))
	if err != nil {
		t.Fatal(err)
	}
	dir := writeNamed(t, map[string][]byte{"deflated.zip": zipped(t, data, zip.Deflate),
		"stored.zip": zipped(t, data, zip.Store)})
	for _, test := range []struct {
		name, path string
		o          Options
		inflates   bool
	}{{"tgz", packed, small, true}, {"huge batches", packed, huge, true}, {"kept in memory", packed, held, false},
		{"target", packed, labelled, false}, {"tar", tar, small, false}, {"deflated zip", filepath.Join(dir, "deflated.zip"), held, true},
		{"stored zip", filepath.Join(dir, "stored.zip"), small, false}} {
		t.Run(test.name, func(t *testing.T) {
			test.o.IndexFile = filepath.Join(t.TempDir(), "index")
			l, err := Open(test.path, test.o)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			staging, rooms := l.devicePlanner().MemberBytes()
			if !test.inflates {
				if staging != 0 || rooms != 0 {
					t.Errorf("%d and %d bytes, want staging = 0, rooms = 0", staging, rooms)
				}
				return
			}
			if min(staging, rooms) < 1<<20 || max(staging, rooms) > 256<<20 ||
				staging%decodeplan.Align+rooms%decodeplan.Align != 0 {
				t.Errorf("%d and %d bytes", staging, rooms)
			}
			x := l.index.Load()
			for first := 0; first+batch <= x.Len(); first += batch {
				inputs, outputs := 0, 0
				for i := first; i < first+batch; i++ {
					at, ok := x.Packed(i)
					if !ok {
						t.Fatalf("%s is not packed", x.Name(i))
					}
					inputs += min(at.Input, at.Skip+at.Lead+int(x.Size(i))) + at.Window
					outputs += (&decodeplan.Member{Skip: at.Skip, Bytes: at.Lead + int(x.Size(i))}).Room()
				}
				if inputs > staging || outputs > rooms {
					t.Errorf("a batch has %d bytes for %d, and %d for %d, want inputs at most %v, "+
						"outputs at most %v", inputs, staging, outputs, rooms, staging, rooms)
				}
			}
		})
	}
}

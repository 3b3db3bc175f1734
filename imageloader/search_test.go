package imageloader

import (
	"path/filepath"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/devplan"
)

// KeepEntryPoints ignores entry points that belong to no row of a batch. A closed loader ignores
// all entry points.
func TestKeepEntryPointsIgnoresOtherBatches(t *testing.T) {
	l, err := Open(planArchive(t, "t.tar", 2, 0),
		Options{BatchSize: 2, Transform: Train(32), IndexFile: filepath.Join(t.TempDir(), "index")})
	if err != nil {
		t.Skip(err)
	}
	defer l.Close()
	info := Info{Samples: make([]Sample, 1), redos: []devplan.Redo{{}}, known: l.index.Load()}
	found := [][]byte{[]byte("an image that was not searched")}
	l.devicePlanner().KeepEntryPoints(nil, []int{0}, found)
	l.devicePlanner().KeepEntryPoints(info, []int{1}, found)
	l.devicePlanner().KeepEntryPoints(info, []int{-1}, found)
	l.devicePlanner().KeepEntryPoints(info, []int{0}, nil)
	l.devicePlanner().KeepEntryPoints(info, []int{0}, found)
	l.Close()
	info.redos[0].Search = new(devplan.Search)
	l.devicePlanner().KeepEntryPoints(info, []int{0}, found)
	if n := l.Stats().EntriesMade; n != 0 {
		t.Errorf("%d entry points, want 0", n)
	}
}

package imageloader

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/decodeplan"
)

// streamArchive returns the archive of planArchive as a stream: a .tgz or a .tar.zst. With
// streamOptions it is read from its start to its end.
func streamArchive(t *testing.T, name string, photos, damaged int) string {
	t.Helper()
	if d, err := (sample.Library{}).NewDecoder(0); err != nil {
		t.Skip(err)
	} else {
		d.Close()
	}
	plain, err := os.ReadFile(planArchive(t, "t.tar", photos, damaged))
	if err != nil {
		t.Fatal(err)
	}
	if filepath.Ext(name) == ".zst" {
		return archivetest.WriteFile(t, name, archivetest.Zstd(t, plain))
	}
	return archivetest.WriteFile(t, name, archivetest.Gzip(t, plain))
}

// streamOptions returns options with which Open leaves reading a stream to the first epoch, and no
// image stays in memory.
func streamOptions(t *testing.T, workers int, policy BadSamplePolicy) Options {
	t.Helper()
	return Options{BatchSize: 8, Transform: Train(64), Shuffle: true, Workers: workers, BadSamples: policy,
		ShuffleBytes: 100 << 10, Classes: []string{"a", "b", "c"}, IndexFile: filepath.Join(t.TempDir(), "index")}
}

// TestPlansOfAStreamChangeNoBatch: the first pass over a .tgz, and every pass over a .tar.zst, has
// plans. The consumer hands all of them back, and the batches equal Fill's. Some plans have no room
// in the slot to which their row moves.
func TestPlansOfAStreamChangeNoBatch(t *testing.T) {
	const photos, damaged = 24, 6
	for _, name := range []string{"t.tgz", "t.tar.zst"} {
		path := streamArchive(t, name, photos, damaged)
		for _, policy := range []BadSamplePolicy{Skip, Substitute} {
			for _, workers := range []int{1, 4} {
				for _, capacity := range []int{1 << 20, 40 << 10} {
					t.Run(fmt.Sprintf("%s, %v, %d workers, %d bytes", name, policy, workers, capacity), func(t *testing.T) {
						if testing.Short() && workers == 1 {
							t.Skip("its goroutines are those of the other rows")
						}
						plain, err := Open(path, streamOptions(t, workers, policy))
						if err != nil {
							t.Fatal(err)
						}
						defer plain.Close()
						l, err := Open(path, streamOptions(t, workers, policy))
						if err != nil {
							t.Fatal(err)
						}
						defer l.Close()
						c := &planned{slots: 3, capacity: capacity}
						for epoch := range 3 {
							want, err := collect(t, plain, epoch, 3)
							if err != nil {
								t.Fatal(err)
							}
							c.rows = 0
							got, err := c.epoch(t, l, epoch)
							if err != nil {
								t.Fatal(err)
							}
							if digest(got) != digest(want) {
								t.Errorf("epoch %d has other batches: %v, want %v", epoch, names(got), names(want))
							}
							if epoch == 0 && capacity == 1<<20 && c.rows < photos {
								t.Errorf("%d rows of %d photographs have plans, want all", c.rows, photos)
							}
						}
						a, b := plain.Stats(), l.Stats()
						if a.Bad != b.Bad || a.Samples != b.Samples || a.Warned != b.Warned {
							t.Errorf("%+v, want %+v", b, a)
						}
					})
				}
			}
		}
	}
}

// TestRefusedDamageLeavesAStreamToTheHost: under Refuse, damage in a scan makes an image bad, which
// only the host finds before its batch is composed.
func TestRefusedDamageLeavesAStreamToTheHost(t *testing.T) {
	o := streamOptions(t, 2, Skip)
	o.Damaged = Refuse
	l, err := Open(streamArchive(t, "t.tgz", 12, 3), o)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := &planned{slots: 3, capacity: 1 << 20}
	if _, err := c.epoch(t, l, 0); err != nil || c.rows != 0 {
		t.Errorf("%d rows have plans, error %v, want none and nil", c.rows, err)
	}
}

// TestPlansOfAStreamResume: a first epoch that another process continues has the remaining batches,
// with plans.
func TestPlansOfAStreamResume(t *testing.T) {
	path := streamArchive(t, "t.tgz", 24, 2)
	l, err := Open(path, streamOptions(t, 2, Skip))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var states []State
	for b, err := range l.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		states = append(states, b.State)
	}
	whole, err := Open(path, streamOptions(t, 2, Skip))
	if err != nil {
		t.Fatal(err)
	}
	defer whole.Close()
	want, err := collect(t, whole, 0, 3)
	if err != nil {
		t.Fatal(err)
	}
	for stop, state := range states[:len(states)-1] {
		again, err := Open(path, streamOptions(t, 2, Skip))
		if err != nil {
			t.Fatal(err)
		}
		if err := again.Restore(t.Context(), state); err != nil {
			t.Fatal(err)
		}
		c := planned{slots: 2, capacity: 1 << 20}
		got, err := c.epoch(t, again, 0)
		if err != nil {
			t.Fatal(err)
		}
		if c.rows == 0 || digest(got) != digest(want[stop+1:]) {
			t.Errorf("after batch %d: %v, want %v; %d plans, want some", stop, names(got), names(want[stop+1:]), c.rows)
		}
		if err := again.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCheckedForgetsFiles: a batch of a stream keeps the files of its planned images until the
// consumer has checked it, although the program may keep the batch's Info.
func TestCheckedForgetsFiles(t *testing.T) {
	l, err := Open(streamArchive(t, "t.tgz", 16, 0), streamOptions(t, 2, Skip))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	size, batch := 3*64*64, l.BatchSize()
	slot := decodeplan.Slot{Images: make([]byte, batch*size), Labels: make([]byte, 8*batch),
		Plans: &decodeplan.Plans{Memory: alignedBytes(1 << 20), Rows: make([]decodeplan.Row, batch)}}
	free, planner, rows := make(chan struct{}, 1), l.devicePlanner(), 0
	free <- struct{}{}
	first, second := make([]byte, size), make([]byte, size)
	err = planner.FillPlans(t.Context(), 0, consumerFuncs{func(ctx context.Context) (decodeplan.Slot, error) {
		select {
		case <-free:
			return slot, nil
		case <-ctx.Done():
			return decodeplan.Slot{}, context.Cause(ctx)
		}
	}, func(n int, info any) error {
		for row := range n {
			if slot.Plans.Rows[row].Bytes == 0 {
				continue
			}
			rows++
			for _, pixels := range [][]byte{first, second} {
				if err := planner.DecodeRow(t.Context(), info, row, pixels); err != nil {
					return err
				}
			}
			if !bytes.Equal(first, second) {
				t.Errorf("a row that is decoded twice has two results, want one")
			}
		}
		planner.Checked(info)
		for row, redo := range info.(Info).redos {
			if redo.File != "" {
				t.Errorf("row %d keeps %d bytes of its file after the check, want none", row, len(redo.File))
			}
		}
		free <- struct{}{}
		return nil
	}})
	if err != nil || rows < 16 {
		t.Errorf("%d rows have plans, error %v, want at least 16 and nil", rows, err)
	}
}

//go:build linux

package index

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// TestIndexesOfOneArchiveAreMerged: each rank on a host makes an index and keeps the entry points
// and checksums of its own samples. Then all of them close their indexes at the same time. The next
// run must find everything.
func TestIndexesOfOneArchiveAreMerged(t *testing.T) {
	const ranks, samples = 4, 40
	for _, name := range []string{"a.tgz", "a.tar"} {
		t.Run(name, func(t *testing.T) {
			data := archivetest.Tar(t, archivetest.Photos(samples)...)
			if name == "a.tgz" {
				data = archivetest.Gzip(t, data)
			}
			path := archivetest.WriteFile(t, name, data)
			blob := func(i int) []byte { return bytes.Repeat([]byte(fmt.Sprint("entries of ", i)), 300) }
			var all [ranks]*Index
			for rank := range all { // the later ones find the first one's index
				all[rank] = open(t, path, testConfig())
			}
			// Remove the index, so that the last rank makes another. This also happens when several
			// ranks find no index at the same time.
			if err := os.Remove(path + sidecarSuffix); err != nil {
				t.Fatal(err)
			}
			closeIndex(t, all[ranks-1])
			all[ranks-1] = open(t, path, testConfig())
			for i := range samples {
				x := all[i%ranks]
				if !x.KeepEntryPoints(i, blob(i)) {
					t.Errorf("sample %d is not kept", i)
				}
				if x.side.sums != nil && !x.side.sums.same(x.number(i), blob(i)) {
					t.Errorf("sample %d has another checksum", i)
				}
			}
			var closing sync.WaitGroup
			for _, x := range all {
				closing.Go(func() { closeIndex(t, x) })
			}
			closing.Wait()
			x := open(t, path, testConfig())
			defer closeIndex(t, x)
			for i := range samples {
				if got := x.EntryPoints(i, nil); !bytes.Equal(got, blob(i)) {
					t.Errorf("sample %d has %d bytes of entry points, want %d", i, len(got), len(blob(i)))
				}
				if s := x.side.sums; s != nil &&
					(s.known[x.number(i)].Load() == 0 || s.same(x.number(i), []byte("others"))) {
					t.Errorf("the checksum of sample %d is lost", i)
				}
			}
		})
	}
}

// TestSavingWaitsForEachOther: several processes wait for the lock to save. Whenever another of
// them gets it, the time limit of those that still wait starts again. Otherwise the last of many
// ranks would give up, because the index of a large archive takes seconds to write.
func TestSavingWaitsForEachOther(t *testing.T) {
	path := indexed(t, "a.tar", archivetest.Numbered(t, 0, 1, 2, 3))
	x := open(t, path, testConfig())
	x.KeepEntryPoints(0, []byte("entries"))
	locked := func(name string) *os.File {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			t.Skip(err)
		}
		return f
	}
	first := locked(path + sidecarSuffix)
	waits := make(chan bool)
	x.side.saving.wait = func() <-chan time.Time {
		waits <- true
		return nil
	}
	closed := make(chan bool)
	go func() {
		closeIndex(t, x)
		close(closed)
	}()
	next := func() {
		t.Helper()
		select {
		case <-waits:
		case <-closed:
			t.Fatal("Close has returned, want it to wait for the other process")
		case <-time.After(time.Minute):
			t.Fatal("after a minute Close has not tried the lock again, want one try for each process")
		}
	}
	next()
	data, err := os.ReadFile(path + sidecarSuffix)
	if err != nil {
		t.Fatal(err)
	}
	saved := path + ".saved"
	if err := os.WriteFile(saved, data, 0o644); err != nil {
		t.Fatal(err)
	}
	second := locked(saved)
	if err := os.Rename(saved, path+sidecarSuffix); err != nil {
		t.Fatal(err)
	}
	first.Close()
	next()
	second.Close()
	<-closed
	x = open(t, path, testConfig())
	defer closeIndex(t, x)
	if b := x.EntryPoints(0, nil); string(b) != "entries" {
		t.Errorf("%q is saved, want %q", b, "entries")
	}
}

// TestSavingWaitsForNoStoppedProcess: a process that is stopped while it saves does not keep
// another process from ending.
func TestSavingWaitsForNoStoppedProcess(t *testing.T) {
	path := indexed(t, "a.tar", archivetest.Numbered(t, 0, 1, 2, 3))
	log := &logged{}
	c := testConfig()
	c.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelInfo}))
	x := open(t, path, c)
	x.KeepEntryPoints(0, []byte("entries"))
	f, err := os.Open(path + sidecarSuffix)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		t.Skip(err)
	}
	x.side.saving.wait = func() <-chan time.Time { return time.After(3 * lockTick) }
	before := time.Now()
	closeIndex(t, x)
	if took := time.Since(before); took > lockWait {
		t.Errorf("Close took %v, want at most %v", took, lockWait)
	}
	if !log.has("another process is saving into the index") {
		t.Errorf("nothing is logged: %s", log.text.String())
	}
	x = open(t, path, c)
	defer closeIndex(t, x)
	if b := x.EntryPoints(0, nil); len(b) > 0 {
		t.Errorf("%q is saved beside the other process, want 0", b)
	}
}

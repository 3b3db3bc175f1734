package index

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// sharedZstd writes a .tar.zst and its index. It returns an Index that shares its samples and has
// read none of them.
func sharedZstd(t *testing.T) (path string, c Config, empty *Index, want [][]byte) {
	t.Helper()
	members := archivetest.Photos(20)
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	path = indexed(t, "a.tar.zst", w.EncodeAll(archivetest.Tar(t, members...), nil))
	c = testConfig()
	c.ShareOnHost, c.HoldBytes = true, 1
	empty = open(t, path, c)
	c.HoldBytes = 1 << 30
	empty.share(t.Context(), &c)
	if empty.memory.shared == nil {
		t.Skip("this system has no memory that processes share")
	}
	t.Cleanup(func() { closeIndex(t, empty) })
	for i := range empty.Len() {
		want = append(want, []byte(archivetest.Contents(members)[empty.Name(i)]))
	}
	return path, c, empty, want
}

func wantShared(t *testing.T, x *Index, want [][]byte) {
	t.Helper()
	for i := range want {
		if got := x.InMemory(i); !bytes.Equal(got, want[i]) {
			t.Errorf("sample %d has %d bytes in memory, want the %d of the archive", i, len(got), len(want[i]))
		}
	}
}

// TestStoppedReaderOfSharedSamples: a process that reads the samples for all and makes no progress
// does not keep the others from reading. What they read, it has too.
func TestStoppedReaderOfSharedSamples(t *testing.T) {
	path, c, stopped, want := sharedZstd(t)
	unlock, err := stopped.memory.shared.memory.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if got := stopped.InMemory(0); got != nil {
		t.Errorf("sample 0 has %d bytes before anybody has read it, want none", len(got))
	}
	var log bytes.Buffer
	c.Logger = slog.New(slog.NewTextHandler(&log, nil))
	waits := 0
	c.stall = func() <-chan time.Time {
		waits++
		if !strings.Contains(log.String(), "waiting for the process") {
			t.Errorf("the log is %q when the wait starts, want it to say that this process waits", log.String())
		}
		ended := make(chan time.Time)
		close(ended)
		return ended
	}
	x := open(t, path, c)
	defer closeIndex(t, x)
	wantShared(t, x, want)
	wantShared(t, stopped, want)
	if waits != 1 || !strings.Contains(log.String(), "makes no progress") {
		t.Errorf("after %d waits the log is %q, want one wait, and that the other process makes no progress", waits,
			log.String())
	}
}

// TestSharedMemoryThatIsFull: a process that cannot write to the shared memory keeps the samples in
// memory that is not shared, also those that were published before.
func TestSharedMemoryThatIsFull(t *testing.T) {
	path, c, other, want := sharedZstd(t)
	unlock, err := other.memory.shared.memory.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	c.Logger = slog.New(slog.NewTextHandler(&log, nil))
	c.stall = func() <-chan time.Time { // the process has joined and waits for its turn
		if err := other.memory.shared.keep(other.at(0), want[0]); err != nil {
			t.Error(err)
		}
		refuseWrites(t)
		unlock()
		return nil
	}
	x := open(t, path, c)
	defer closeIndex(t, x)
	wantShared(t, x, want)
	if x.memory.shared != nil || !strings.Contains(log.String(), "not shared with other processes") {
		t.Errorf("shared: %v, the log is %q, want samples that are not shared and a log that says so",
			x.memory.shared != nil, log.String())
	}
	if s := other.memory.shared; s.memory.Flag(s.complete()) {
		t.Error("the samples of the full memory are complete, want them not to be")
	}
}

// refuseWrites makes later writes to the shared memory of this process fail.
func refuseWrites(t *testing.T) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		link, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || !strings.Contains(link, "memfd:torchstream") {
			continue
		}
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE); err != nil {
			t.Skip("this system has no F_SEAL_FUTURE_WRITE")
		}
	}
}

// TestContextEndsTheWaitForSharedSamples: the end of the archive's context ends the wait for the
// process that reads.
func TestContextEndsTheWaitForSharedSamples(t *testing.T) {
	path, c, other, _ := sharedZstd(t)
	unlock, err := other.memory.shared.memory.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithCancel(t.Context())
	c.stall = func() <-chan time.Time {
		cancel() // the wait has started
		return nil
	}
	a, err := archive.Open(ctx, path, archive.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.Close() }()
	if x, err := Load(a, c); x != nil || !errors.Is(err, archive.ErrStopped) {
		t.Errorf("Load: got %v, %v, want ErrStopped", x, err)
	}
}

// TestMissingContentIsNotPublished: a content that the Builder has not read is not published as
// zeros, and the samples are complete only when a process has published all of them.
func TestMissingContentIsNotPublished(t *testing.T) {
	_, c, empty, want := sharedZstd(t)
	for _, missing := range []int{3, -1} {
		x := &Index{recordTable: empty.recordTable}
		x.shards = empty.shards
		x.memory.held = make([][]byte, len(want))
		for i := range want {
			if i != missing {
				x.memory.held[x.at(i)] = want[i]
			}
		}
		x.shareHeld(t.Context(), &c)
		s := x.memory.shared
		if s == nil {
			t.Fatal("the contents are not shared")
		}
		defer s.close()
		if got := s.memory.Flag(s.complete()); got != (missing < 0) {
			t.Errorf("sample %d is missing: complete %v, want %v", missing, got, missing < 0)
		}
		expected := append([][]byte(nil), want...)
		if missing >= 0 {
			expected[missing] = nil
		}
		wantShared(t, x, expected)
	}
}

// timeless is the description of a file whose time is unknown.
type timeless struct{ fs.FileInfo }

func (timeless) ModTime() time.Time { return time.Time{} }

// TestUnidentifiedSamplesAreNotShared: without checksums and without a time, the memory could have
// the samples of an archive that was replaced.
func TestUnidentifiedSamplesAreNotShared(t *testing.T) {
	_, c, x, _ := sharedZstd(t)
	for _, s := range []struct {
		what          string
		summed, dated bool
		want          bool
	}{{"checksums", true, false, true}, {"a time", false, true, true}, {"neither", false, false, false}} {
		y := &Index{recordTable: recordTable{samples: append([]record(nil), x.samples...), names: x.names}}
		y.shards = append(y.shards, x.shards...)
		for i := range y.samples {
			y.samples[i].flags &^= recordSummed
			if s.summed {
				y.samples[i].flags |= recordSummed
			}
		}
		if !s.dated {
			y.shards[0].info = timeless{y.shards[0].info}
		}
		y.share(t.Context(), &c)
		if got := y.memory.shared != nil; got != s.want {
			t.Errorf("with %s: shared %v, want %v", s.what, got, s.want)
		}
		y.memory.shared.close()
	}
}

// TestSharedNamesDiffer: another archive, other samples or another limit have other memory.
func TestSharedNamesDiffer(t *testing.T) {
	_, _, x, _ := sharedZstd(t)
	names := map[string]bool{x.SharedName(1 << 20): true}
	if !names[x.SharedName(1<<20)] {
		t.Error("the name changes from call to call")
	}
	names[x.SharedName(1<<21)] = true
	x.samples[3].crc++
	names[x.SharedName(1<<20)] = true
	x.samples[3].crc--
	x.shards[0].path += "x"
	names[x.SharedName(1<<20)] = true
	for range 2 { // in two folders
		dir := t.TempDir()
		t.Chdir(dir)
		x.shards[0].path = "a.tar.zst"
		name := x.SharedName(1 << 20)
		names[name] = true
		x.shards[0].path = filepath.Join(dir, "a.tar.zst")
		if got := x.SharedName(1 << 20); got != name {
			t.Errorf("the absolute path gives the name %q, want %q as the relative one", got, name)
		}
	}
	if len(names) != 6 {
		t.Errorf("got %d names, want 6", len(names))
	}
}

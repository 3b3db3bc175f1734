//go:build linux

package pack_test

import (
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/pack"
)

// Environment variables of the process that TestKilledPackContinues starts.
const (
	killedInput  = "TORCHSTREAM_TEST_PACK_INPUT"
	killedOutput = "TORCHSTREAM_TEST_PACK_OUTPUT"
	killedAfter  = "TORCHSTREAM_TEST_PACK_SAMPLES" // samples after which it is killed
	killedLimit  = "TORCHSTREAM_TEST_PACK_LIMIT"   // bytes of the largest file, as on a full disk
)

var killedOptions = pack.Options{ShardBytes: 20 << 10, Format: pack.TarGzip}

// TestKilledPackProcess is the process that TestKilledPackContinues kills.
func TestKilledPackProcess(t *testing.T) {
	path := os.Getenv(killedInput)
	if path == "" {
		t.Skip("TestKilledPackContinues runs it")
	}
	o := killedOptions
	if limit, err := strconv.ParseUint(os.Getenv(killedLimit), 10, 64); err == nil {
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: limit, Max: math.MaxUint64}); err != nil {
			t.Fatal(err)
		}
	}
	after, _ := strconv.Atoi(os.Getenv(killedAfter)) // 0: never
	o.Progress = func(p imageloader.Progress) {
		if p.TotalBytes > 0 && p.Members == after {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL) // the test fails if it lives on
			select {}
		}
	}
	if _, err := pack.Write(t.Context(), path, os.Getenv(killedOutput), imageloader.Options{NoIndex: true}, o); err != nil {
		fmt.Println("pack failed:", err)
		os.Exit(1)
	}
}

// TestKilledPackContinues: after SIGKILL at any sample, and after a disk is full, the next pack has
// the bytes of an undisturbed one.
func TestKilledPackContinues(t *testing.T) {
	path := archivetest.WriteFile(t, "a.zip", zipped(t, photos(t, 40)))
	whole := t.TempDir()
	write(t, path, whole, imageloader.Options{}, killedOptions)
	want := files(t, whole)
	dir := t.TempDir()
	for _, c := range []struct{ samples, limit, says string }{
		{"2", "", ""}, {"25", "", ""}, {"", "15000", "file too large"}, {"33", "", ""},
	} {
		command := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledPackProcess$")
		command.Env = append(os.Environ(), killedInput+"="+path, killedOutput+"="+dir, killedAfter+"="+c.samples,
			killedLimit+"="+c.limit)
		out, err := command.CombinedOutput()
		if err == nil || c.says != "" && !(strings.Contains(string(out), c.says) && strings.Contains(string(out), dir)) {
			t.Fatalf("after %q samples, limit %q: %v, %s; want it to end, with %q", c.samples, c.limit, err, out, c.says)
		}
		if _, err := os.Stat(filepath.Join(dir, pack.JournalFile)); err != nil {
			t.Fatalf("after %q samples, limit %q: %v, want a journal", c.samples, c.limit, err)
		}
	}
	r := write(t, path, dir, imageloader.Options{}, killedOptions)
	if names := differences(files(t, dir), want); len(names) > 0 {
		t.Errorf("got other files %q, want those of an undisturbed pack", names)
	}
	if r.Continued == 0 {
		t.Error("got no shard of the killed packs, want some")
	}
}

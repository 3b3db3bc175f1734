//go:build linux && cgo

package main

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/torchstream/torchstream/internal/clitest"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/interrupt"
	"github.com/torchstream/torchstream/internal/library"
)

// TestMain lets this test program act as the command, for tests that need a process.
func TestMain(m *testing.M) { os.Exit(clitest.Main(m, main)) }

// patience is how long a test waits before it fails.
const patience = 4 * time.Minute

// With the image library alone, commands that do not need LibTorch work. The others name what is
// missing and the command that installs it.
func TestWithoutLibTorch(t *testing.T) {
	folder := t.TempDir()
	if err := imagecapi.Check(); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(library.Mapped()[imagecapi.LibraryName],
		filepath.Join(folder, imagecapi.LibraryName)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{"help"}, 0, "torchstream doctor"},
		{[]string{"inspect", photos}, 0, "classes"},
		{[]string{"bench", "loader", "-archive", photos, "-batch", "16", "-size", "32", "-seconds", "0.05"},
			0, "images/s"},
		{[]string{"doctor"}, 1, "there is no libtorchstream.so in " + folder},
		{[]string{"train", "-archive", photos}, 1,
			"torchstream: libtorchstream.so: library not loaded: there is no libtorchstream.so in " + folder},
		{[]string{"evaluate", "-archive", photos}, 1,
			"torchstream: libtorchstream.so: library not loaded: there is no libtorchstream.so in " + folder},
		{[]string{"predict", photos}, 1,
			"torchstream: libtorchstream.so: library not loaded: there is no libtorchstream.so in " + folder},
		{[]string{"embed", "-archive", photos, "-model", imagesPackage}, 1,
			"torchstream: libtorchstream.so: library not loaded: there is no libtorchstream.so in " + folder},
		{[]string{"serve", "-model", imagesPackage, "-address", "localhost:0"}, 1,
			"torchstream: libtorchstream.so: library not loaded: there is no libtorchstream.so in " + folder},
		{[]string{"bench", "loader", "-archive", photos, "-device", "cuda"}, 1,
			"there is no libtorchstream.so in " + folder},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			command, stderr := clitest.Process(t, c.args...)
			command.Env = append(command.Env, "TORCHSTREAM_LIBRARY="+folder)
			var stdout bytes.Buffer
			command.Stdout = &stdout
			_ = command.Run() // the status is checked
			said := stdout.String() + stderr.String()
			if status := command.ProcessState.ExitCode(); status != c.status ||
				!strings.Contains(said, c.says) || status == 1 && !strings.Contains(said, "unset the variable") {
				t.Errorf("status %d, want %d and %q; said %s", status, c.status, c.says, said)
			}
		})
	}
}

// TestCommandsRefusePipes checks that no command waits for a pipe without a writer.
func TestCommandsRefusePipes(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe.tgz")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	archive, err := filepath.Abs(photos)
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"inspect", pipe},
		{"inspect", "-index", pipe},
		{"inspect", "-fix", filepath.Join(t.TempDir(), "out.tgz"), pipe},
		{"inspect", "-fix", pipe, archive},
		{"index", pipe},
		{"index", "-o", pipe, archive},
		{"preview", "-archive", pipe, "-o", filepath.Join(t.TempDir(), "sheet.png")},
		{"preview", "-archive", archive, "-o", pipe},
		{"bench", "loader", "-archive", pipe},
		{"bench", "loader", "-archive", archive, "-contract", "eval", "-outputs", pipe},
	} {
		command, stderr := clitest.Process(t, args...)
		_ = command.Run() // checked below
		if command.ProcessState.ExitCode() != 1 || !strings.Contains(stderr.String(), pipe) {
			t.Errorf("%q: %v, %s", args, command.ProcessState, stderr)
		}
	}
}

// TestSignalsEndCommands sends SIGINT and SIGTERM while a server keeps the command waiting.
func TestSignalsEndCommands(t *testing.T) {
	asked, over := make(chan string, 100), make(chan struct{}) // asked receives the requested paths
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked <- r.URL.Path
		<-over
	}))
	defer server.Close()
	defer close(over)
	commands := 0
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		for _, args := range [][]string{{"inspect"}, {"inspect", "-fix", "out.tgz"}, {"index"},
			{"bench", "loader", "-archive"}, {"preview", "-archive"}} {
			commands++
			path := fmt.Sprintf("/%d.tgz", commands)
			command, stderr := clitest.Process(t, append(args, server.URL+path)...)
			command.Dir = t.TempDir()
			if err := command.Start(); err != nil {
				t.Fatal(err)
			}
			for limit := time.After(patience); ; {
				select {
				case got := <-asked:
					if got != path { // a late request by the previous command
						continue
					}
				case <-limit:
					t.Fatalf("%q asks for nothing: %s", args, stderr)
				}
				break
			}
			if err := command.Process.Signal(s); err != nil {
				t.Fatal(err)
			}
			_ = command.Wait() // checked below
			if command.ProcessState.ExitCode() != interrupt.Status {
				t.Errorf("%q, %v: %v, %s", args, s, command.ProcessState, stderr)
			}
			if left, err := os.ReadDir(command.Dir); err != nil || len(left) > 0 {
				t.Errorf("%q, %v: %v is left, %v, want no error, len(left) = 0", args, s, left, err)
			}
		}
	}
}

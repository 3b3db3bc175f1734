package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/torchstream/torchstream/internal/clitest"
	"github.com/torchstream/torchstream/torch"
)

const photos = "../../examples/data/photos-test.tgz"

// TestMain lets this test program act as the command or as a server, for tests that need a process.
func TestMain(m *testing.M) {
	if os.Getenv(testServer) != "" {
		fmt.Fprintln(os.Stderr, serveTest(os.Args[1:]))
		os.Exit(1)
	}
	os.Exit(clitest.Main(m, main))
}

// command runs one command line.
func command(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = program().Run(context.Background(), args, &out, &errs)
	return status, out.String(), errs.String()
}

// Error messages name this program's commands.
func TestCommandLine(t *testing.T) {
	for _, c := range []struct {
		args   []string
		status int
		says   string // on stderr
	}{
		{nil, 2, "torchstream-lab: a benchmark is needed: loader, streams, train, operators, distributed, " +
			"serve, load, servers, soak, embed or resume\nRun `torchstream-lab help` for what there is.\n"},
		{[]string{"trian"}, 2, `no benchmark "trian": did you mean train?`},
		{[]string{"streams", "x"}, 2,
			"torchstream-lab: streams takes options only, and no argument: x\nSee `torchstream-lab streams -h`.\n"},
		{[]string{"loader"}, 2, "torchstream-lab: loader needs -archive FILE\n"},
		{[]string{"loader", "-archive", "none.tgz"}, 1, "none.tgz"},
	} {
		if status, stdout, stderr := command(t, c.args...); status != c.status || stdout != "" ||
			!strings.Contains(stderr, c.says) {
			t.Errorf("%q: got status %d, %q and %q, want status %d and %q", c.args, status, stdout, stderr,
				c.status, c.says)
		}
	}
}

// Help has a line for each command, and fits a terminal of 100 columns.
func TestHelpFitsATerminal(t *testing.T) {
	status, list, stderr := command(t, "help")
	if status != 0 || stderr != "" {
		t.Errorf("help: got status %d, %s, want 0, \"\"", status, stderr)
	}
	text := list
	for _, c := range program().List {
		if !strings.Contains(list, "\n  torchstream-lab "+c.Name+" ") {
			t.Errorf("help does not list %s:\n%s\nwant it to contain %q",
				c.Name, list, "\n  torchstream-lab "+c.Name+" ")
		}
		status, help, _ := command(t, c.Name, "-h")
		if status != 0 || !strings.HasPrefix(help, "usage: torchstream-lab "+c.Name) {
			t.Errorf("%s -h: got status %d, %s, want 0, it to begin with %q",
				c.Name, status, help, "usage: torchstream-lab "+c.Name)
		}
		text += help
	}
	for line := range strings.Lines(text) {
		if n := utf8.RuneCountInString(line) - 1; n > 100 {
			t.Errorf("got %d columns, want at most 100: %s", n, line)
		}
	}
}

// A -size that is too large is reported as a wrong option before any measurement.
func TestSizesThatAreTooLarge(t *testing.T) {
	for _, args := range [][]string{{"loader", "-archive", photos}, {"serve", "-images", "."}, {"train"},
		{"distributed"}} {
		if status, stdout, stderr := command(t, append(args, "-size", "28673")...); status != 2 ||
			stdout != "" || !strings.Contains(stderr, "-size 28673: must be from ") {
			t.Errorf("%q: got status %d, %s%s, want 2, \"\", it to contain \"-size 28673: must be from \"",
				args, status, stdout, stderr)
		}
	}
}

// Without LibTorch a command says what is missing.
func TestWithoutLibTorch(t *testing.T) {
	folder := t.TempDir()
	c, stderr := clitest.Process(t, "streams")
	c.Env = append(c.Env, "TORCHSTREAM_LIBRARY="+folder)
	_ = c.Run() // the status is checked
	if status := c.ProcessState.ExitCode(); status != 1 ||
		!strings.Contains(stderr.String(), "there is no libtorchstream") || !strings.Contains(stderr.String(), folder) {
		t.Errorf("got status %d, %s, want 1, it to contain \"there is no libtorchstream\", %q",
			status, stderr, folder)
	}
}

// -threads sets LibTorch's threads in every benchmark that computes, before any other work.
func TestThreadsOption(t *testing.T) {
	// A thread that has computed keeps its number, so the test stays on one.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := torch.NumThreads()
	t.Cleanup(func() {
		if err := torch.SetNumThreads(before); err != nil {
			t.Error(err)
		}
	})
	for _, args := range [][]string{
		{"train", "-models", "none"}, {"serve", "-images", filepath.Join(t.TempDir(), "missing")},
		{"distributed", "-ranks", "1", "-cpu", "-models", "none", "-collectives", "", "-sharded", ""},
	} {
		if err := torch.SetNumThreads(1); err != nil {
			t.Fatal(err)
		}
		if status, stdout, _ := command(t, append(args, "-threads", "3")...); status == 0 || torch.NumThreads() != 3 {
			t.Errorf("%q: got status %d and %d threads, want an error and 3 threads: %s", args, status,
				torch.NumThreads(), stdout)
		}
		if status, _, stderr := command(t, append(args, "-threads", "-1")...); status != 2 ||
			!strings.Contains(stderr, "-threads -1: must be from 1 to 65536") {
			t.Errorf("%q: got status %d, %s, want status 2 and the bounds", args, status, stderr)
		}
	}
}

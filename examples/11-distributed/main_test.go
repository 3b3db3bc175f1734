package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/dist"
	"github.com/torchstream/torchstream/internal/freeport"
	"github.com/torchstream/torchstream/internal/interrupt"
)

func small() options {
	return options{archive: "../data/photos-train.tgz", size: 16, batch: 24, epochs: 3, rate: 0.02, seed: 1, dist: dist.Options{CPU: true, Timeout: time.Minute}}
}

// The test starts itself as the ranks of a job.
const variable = "TORCHSTREAM_EXAMPLE_RANK"

func TestMain(m *testing.M) {
	if os.Getenv(variable) == "" {
		os.Exit(cudatest.Main(m))
	}
	o := small()
	o.dist.CPU = os.Getenv(variable) == "cpu"
	if os.Getenv(checkpointVariable) != "" {
		o = reportSteps(o)
	}
	os.Exit(runRank(o))
}

// alone is the environment of a process that no launcher started.
func alone() *dist.Environment { return &dist.Environment{Launcher: "none", Size: 1} }

func TestOneProcess(t *testing.T) {
	o := small()
	o.save = filepath.Join(t.TempDir(), "net.safetensors")
	o.timeline = filepath.Join(t.TempDir(), "ranks.svg")
	o.dist.Environment = alone()
	var out bytes.Buffer
	r, err := run(t.Context(), o, &out)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.losses) != 3 || r.losses[2] >= r.losses[0] || !strings.Contains(out.String(), "1 ranks, rank 0 on cpu") {
		t.Errorf("losses %v\n%s", r.losses, out.String())
	}
	for _, name := range []string{o.save, o.timeline} {
		if _, err := os.Stat(name); err != nil {
			t.Error(err)
		}
	}
}

func TestShellLoop(t *testing.T) { loop(t, "cpu") }

func TestGPUShellLoop(t *testing.T) {
	cudatest.RequireGPUs(t, 2)
	loop(t, "gpu")
}

// loop starts two ranks with examples/launch/loop.sh.
func loop(t *testing.T, device string) {
	script := "../launch/loop.sh"
	if _, err := os.Stat(script); err != nil {
		t.Skip("needs examples/launch, which a bundle does not have")
	}
	port, err := freeport.Find()
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
	defer stop()
	c := exec.CommandContext(ctx, script, "2", self)
	c.Env = append(os.Environ(), variable+"="+device, "MASTER_PORT="+strconv.Itoa(port), "OMP_NUM_THREADS=1")
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if strings.Count(string(out), "learned true") != 2 || strings.Contains(string(out), "loop.sh:") {
		t.Errorf("%s", out)
	}
}

// The loop has the status of the rank that fails, and ends the others.
func TestShellLoopFails(t *testing.T) {
	script := "../launch/loop.sh"
	if _, err := os.Stat(script); err != nil {
		t.Skip("needs examples/launch, which a bundle does not have")
	}
	for _, c := range []struct {
		name, fails string
		status      int
	}{
		{"at once", "exit 7", 7},
		{"after the others have begun", `until [ -s "$PIDS" ]; do :; done; exit 7`, 7},
		{"by a signal", "kill -KILL $$", 137},
	} {
		t.Run(c.name, func(t *testing.T) {
			pids := filepath.Join(t.TempDir(), "pids")
			cmd := exec.CommandContext(t.Context(), script, "3", "bash", "-c", `[ $RANK = 1 ] && { `+c.fails+`; }; echo $$ >>"$PIDS"; exec sleep 600`)
			cmd.Env = append(os.Environ(), "PIDS="+pids)
			err := cmd.Run()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != c.status {
				t.Errorf("got %v, want the status %d", err, c.status)
			}
			text, err := os.ReadFile(pids)
			if err != nil && !errors.Is(err, os.ErrNotExist) { // a rank may end before it writes
				t.Fatal(err)
			}
			for _, pid := range strings.Fields(string(text)) {
				if _, err := os.Stat("/proc/" + pid); err == nil {
					t.Errorf("the process %s is left", pid)
				}
			}
		})
	}
}

// SIGTERM at the loop, and a terminal's Ctrl-C, reach each rank once. A second signal would kill it
// before its checkpoint is written.
func TestShellLoopIsTerminated(t *testing.T) {
	script := "../launch/loop.sh"
	if _, err := os.Stat(script); err != nil {
		t.Skip("needs examples/launch, which a bundle does not have")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		signal func(loop *os.Process) error
	}{
		{"the loop", func(loop *os.Process) error { return loop.Signal(syscall.SIGTERM) }},
		{"the terminal's foreground", func(loop *os.Process) error { return syscall.Kill(-loop.Pid, syscall.SIGINT) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			port, err := freeport.Find()
			if err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
			defer stop()
			cmd := exec.CommandContext(ctx, script, "2", self)
			cmd.Env = append(os.Environ(), variable+"=cpu", checkpointVariable+"="+filepath.Join(t.TempDir(), "last.pt"), "MASTER_PORT="+strconv.Itoa(port), "OMP_NUM_THREADS=1")
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			cmd.Stderr = cmd.Stdout
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var text strings.Builder
			terminated, steps := 0, 0
			for lines := bufio.NewScanner(out); lines.Scan(); {
				switch line := lines.Text(); {
				case strings.HasPrefix(line, reportPrefix):
					if steps++; steps == 4 {
						if err := c.signal(cmd.Process); err != nil {
							t.Fatal(err)
						}
					}
				case line == errTerminated.Error():
					terminated++
				default:
					text.WriteString(line + "\n")
				}
			}
			err = cmd.Wait()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != interrupt.Status || terminated != 2 {
				t.Errorf("got %v, want the status %d; %d of 2 ranks say that they were terminated\n%s", err, interrupt.Status, terminated, text.String())
			}
		})
	}
}

func TestNegativeFlagsAreRefused(t *testing.T) {
	for name, change := range map[string]func(o *options){
		"-epochs": func(o *options) { o.epochs = -1 },
		"-batch":  func(o *options) { o.batch = -24 },
		"-size":   func(o *options) { o.size = 0 },
		"-every":  func(o *options) { o.every = 3 },
	} {
		o := small()
		o.dist.Environment = alone()
		change(&o)
		if _, err := run(t.Context(), o, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("got %v, want an error with %q", err, name)
		}
	}
}

func TestMistakesSayWhatToDo(t *testing.T) {
	o := small()
	o.archive = "none.tgz"
	o.dist.Environment = alone()
	if _, err := run(t.Context(), o, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), o.archive) {
		t.Errorf("got %v, want an error with %q", err, o.archive)
	}
}

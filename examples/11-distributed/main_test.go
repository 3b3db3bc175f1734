package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/dist"
	"github.com/torchstream/torchstream/internal/freeport"
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

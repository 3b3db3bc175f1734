//go:build linux

package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/internal/freeport"
	"github.com/torchstream/torchstream/internal/interrupt"
)

func small() options {
	return options{archive: "../data/photos-train.tgz", size: 16, batch: 24, epochs: 3, rate: 0.02, seed: 1,
		dist: distributed.Options{CPU: true, Timeout: time.Minute}}
}

// patience is how long a test waits before it fails.
const patience = 4 * time.Minute

// The test runs itself as the ranks of a job.
const variable = "TORCHSTREAM_EXAMPLE_RANK"

func TestMain(m *testing.M) {
	if os.Getenv(variable) == "" {
		os.Exit(cudatest.Main(m))
	}
	o := small()
	o.dist.CPU = os.Getenv(variable) == "cpu"
	os.Exit(runRank(o))
}

// alone returns the environment of a process without a launcher.
func alone() *distributed.Environment { return &distributed.Environment{Launcher: "none", Size: 1} }

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
	if len(r.losses) != 3 || r.losses[2] >= r.losses[0] || !strings.Contains(out.String(), "1 rank, rank 0 on cpu") {
		t.Errorf("losses %v, want 3 that fall, and \"1 rank, rank 0 on cpu\" in\n%s",
			r.losses, out.String())
	}
	for _, name := range []string{o.save, o.timeline} {
		if _, err := os.Stat(name); err != nil {
			t.Error(err)
		}
	}
}

// A run that ends before its timeline is complete draws the steps so far, or says why it cannot.
func TestTimelineOfAShortTraining(t *testing.T) {
	for name, c := range map[string]struct {
		batch, epochs int // of 576 images
		want          bool
	}{
		"4 steps":             {144, 1, true},
		"2 epochs of 3 steps": {192, 2, true},
		"3 steps":             {192, 1, false},
		"2 steps":             {288, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			o := small()
			o.batch, o.epochs, o.timeline, o.dist.Environment = c.batch, c.epochs, filepath.Join(
				t.TempDir(), "ranks.json"), alone()
			var out bytes.Buffer
			if _, err := run(t.Context(), o, &out); err != nil {
				t.Fatal(err)
			}
			_, err := os.Stat(o.timeline)
			if says := strings.Contains(out.String(),
				"-timeline "+o.timeline+
					" is not written: it shows the steps 4 to 8"); (err == nil) != c.want || says == c.want {
				t.Errorf("%v, want a file: %v\n%s", err, c.want, out.String())
			}
		})
	}
}

// If an error ends a run, the function run returns only after the checkpoint that is being written
// is complete.
func TestErrorWaitsForTheCheckpoint(t *testing.T) {
	if testing.Short() {
		t.Skip("writes checkpoints of 480 MB")
	}
	o := small()
	folder := t.TempDir()
	o.arch, o.size, o.batch, o.every, o.checkpoint, o.dist.Environment = "resnet152", 32, 2, 1, filepath.Join(folder, "last.pt"), alone()
	o.archive = damagedArchive(t, 12)
	steps := 0
	o.onStep = func(step) error { steps++; return nil }
	if _, err := run(t.Context(), o, &bytes.Buffer{}); err == nil || steps == 0 {
		t.Fatalf("%v after %d steps, want an error of a damaged image after a step", err, steps)
	}
	files, err := os.ReadDir(folder)
	if err != nil || len(files) != 1 || files[0].Name() != "last.pt" {
		t.Errorf("%v, %v, want last.pt alone", files, err)
	}
}

// damagedArchive writes an archive of the example's first n images. The last one has no pixels.
func damagedArchive(t *testing.T, n int) string {
	t.Helper()
	from, err := os.Open(small().archive)
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	unpacked, err := gzip.NewReader(from)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	packed := tar.NewWriter(&out)
	for r, images := tar.NewReader(unpacked), 0; images < n; {
		h, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			images++
		}
		if images == n {
			content = content[:40]
			h.Size = 40
		}
		if err := packed.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := packed.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	if err := packed.Close(); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "damaged.tar")
	if err := os.WriteFile(name, out.Bytes(), 0o666); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestOneRankSaysWhyTheJobEnds(t *testing.T) {
	for _, c := range []struct {
		rank, culprit int
		full          bool
	}{{0, 2, true}, {1, 2, false}, {2, 2, true}, {3, 2, false}, {1, 0, true}, {2, 0, false}, {0, 0, true},
		{3, -1, true}} {
		err := fmt.Errorf("step: %w",
			&distributed.Error{Rank: c.rank, Culprit: c.culprit, Err: errors.New("the reason")})
		got := message(err)
		if strings.Contains(got, "the reason") != c.full || c.culprit >= 0 &&
			!strings.Contains(got, fmt.Sprintf("rank %d", c.culprit)) && !c.full {
			t.Errorf("rank %d of a job that rank %d ends says %q", c.rank, c.culprit, got)
		}
	}
	if got := message(errTerminated); got != errTerminated.Error() {
		t.Errorf("got %q, want %q", got, errTerminated.Error())
	}
}

func TestShellLoop(t *testing.T) { loop(t, "cpu") }

func TestGPUShellLoop(t *testing.T) {
	cudatest.RequireGPUs(t, 2)
	loop(t, "gpu")
}

// launcher starts ranks on a single host.
const launcher = "../launch/loop.sh"

// loop starts two ranks with examples/launch/loop.sh.
func loop(t *testing.T, device string) {
	port, err := freeport.Find()
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	c := exec.CommandContext(ctx, launcher, "2", self)
	c.Env = append(os.Environ(), variable+"="+device, "MASTER_PORT="+strconv.Itoa(port), "OMP_NUM_THREADS=1")
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v, want no error\n%s", err, out)
	}
	if strings.Count(string(out), "learned true") != 2 || strings.Contains(string(out), "loop.sh:") {
		t.Errorf("%s", out)
	}
}

// The loop exits with the status of the rank that fails, and ends the others.
func TestShellLoopFails(t *testing.T) {
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
			cmd := exec.CommandContext(t.Context(), launcher, "3", "bash", "-c",
				`[ $RANK = 1 ] && { `+c.fails+`; }; echo $$ >>"$PIDS"; exec sleep 600`)
			cmd.Env = append(os.Environ(), "PIDS="+pids)
			err := cmd.Run()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != c.status {
				t.Errorf("got %v, want the status %d", err, c.status)
			}
			text, err := os.ReadFile(pids)
			if err != nil && !errors.Is(err, os.ErrNotExist) { // a rank may end before it has written
				t.Fatal(err)
			}
			for _, pid := range strings.Fields(string(text)) {
				if _, err := os.Stat("/proc/" + pid); err == nil {
					t.Errorf("the process %s is left, want it ended", pid)
				}
			}
		})
	}
}

// SIGTERM to the loop, and a terminal's Ctrl-C, reach each rank once. A second signal would kill a
// rank before its checkpoint is written.
func TestShellLoopIsTerminated(t *testing.T) {
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
			cmd := exec.CommandContext(ctx, launcher, "2", self)
			cmd.Env = append(os.Environ(), variable+"=cpu",
				checkpointVariable+"="+filepath.Join(t.TempDir(), "last.pt"),
				"MASTER_PORT="+strconv.Itoa(port), "OMP_NUM_THREADS=1")
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
				case line == leavesLine:
					terminated++
				default:
					text.WriteString(line + "\n")
				}
			}
			err = cmd.Wait()
			var exit *exec.ExitError
			says := strings.Count(text.String(), errTerminated.Error())
			if !errors.As(err, &exit) || exit.ExitCode() != interrupt.Status || terminated != 2 || says != 1 {
				t.Errorf("got %v, want the status %d; %d of 2 ranks leave, %d say so\n%s", err,
					interrupt.Status, terminated, says, text.String())
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
	if _, err := run(t.Context(), o, &bytes.Buffer{}); err == nil ||
		!strings.Contains(err.Error(), o.archive) || !strings.Contains(err.Error(), "-archive FILE") {
		t.Errorf("got %v, want an error with %q and the flag", err, o.archive)
	}
}

package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/dist"
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
	r, err := run(context.Background(), o, os.Stdout)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("learned", r.losses[0] > r.losses[2], r.weights)
}

func TestOneProcess(t *testing.T) {
	o := small()
	o.save = filepath.Join(t.TempDir(), "net.safetensors")
	o.dist.Environment = &dist.Environment{Launcher: "none", Size: 1}
	var out bytes.Buffer
	r, err := run(t.Context(), o, &out)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.losses) != 3 || r.losses[2] >= r.losses[0] || !strings.Contains(out.String(), "1 ranks, rank 0 on cpu") {
		t.Errorf("losses %v\n%s", r.losses, out.String())
	}
	if _, err := os.Stat(o.save); err != nil {
		t.Error(err)
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
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
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
	if strings.Count(string(out), "learned true") != 2 {
		t.Errorf("%s", out)
	}
}

func TestMistakesSayWhatToDo(t *testing.T) {
	o := small()
	o.archive = "none.tgz"
	o.dist.Environment = &dist.Environment{Launcher: "none", Size: 1}
	if _, err := run(t.Context(), o, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), o.archive) {
		t.Errorf("got %v, want an error with %q", err, o.archive)
	}
}

//go:build linux && cgo

package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/clitest"
	"github.com/torchstream/torchstream/internal/freeport"
	"github.com/torchstream/torchstream/internal/interrupt"
)

// smallJob returns the arguments that make train run two processes on the CPU.
func smallJob(archive, out string, args ...string) []string {
	return append([]string{"train", "-archive", archive, "-size", "32", "-batch", "4", "-epochs", "2", "-device", "cpu",
		"-o", out, "-ranks", "2"}, args...)
}

// process runs a command line and returns its status and outputs.
func process(t *testing.T, env []string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	c, errs := clitest.Process(t, args...)
	c.Env = append(c.Env, env...)
	var out bytes.Buffer
	c.Stdout = &out
	_ = c.Run() // the status is checked
	return c.ProcessState.ExitCode(), out.String(), errs.String()
}

// Two processes make the same steps, files and output as one process. One process sees their run as
// finished.
func TestTrainWithRanks(t *testing.T) {
	archive, out := clitest.FewPhotos(t, map[string]int{"cat": 6, "dog": 6}), filepath.Join(t.TempDir(), "out")
	test := clitest.FewPhotos(t, map[string]int{"cat": 4, "dog": 3})
	status, stdout, stderr := process(t, nil, smallJob(archive, out, "-test", test)...)
	if status != 0 || stderr != "" {
		t.Fatalf("status %d, %s, want 0 and nothing on stderr", status, stderr)
	}
	for want, times := range map[string]int{"12 images in 2 classes": 1, "batches of 4, on cpu by 2 processes": 1,
		"test top-1": 1, "6 steps, ": 1, "7 held-back images": 1} {
		if n := strings.Count(stdout, want); n != times {
			t.Errorf("%q is %d times in the output, want %d:\n%s", want, n, times, stdout)
		}
	}
	for _, name := range []string{"best.pt", "last.pt", "log.csv", "curves.png", "confusion.csv"} {
		if _, err := os.Stat(filepath.Join(out, name)); err != nil {
			t.Error(err)
		}
	}
	// A refused run prints one error, once. Rank 0 alone reads and writes files.
	for _, args := range [][]string{{"-resume", "-lr", "0.3"}, nil} {
		status, _, stderr := process(t, nil, smallJob(archive, out, append([]string{"-test", test}, args...)...)...)
		if n := strings.Count(stderr, "torchstream: "); status != 1 || n != 1 || !strings.Contains(stderr, out) {
			t.Errorf("%q again: status %d and %d errors, %s\nwant 1 and one error about %s", args, status, n, stderr, out)
		}
	}
	if stdout := trainSmall(t, archive, out, "-test", test, "-resume"); !strings.Contains(stdout, "2 of 2 epochs, 6 steps") {
		t.Errorf("one process says\n%s\nwant that the run is finished", stdout)
	}

	// Each rank has five of ten images. BatchNorm cannot normalise its last batch, which has one
	// image.
	status, stdout, stderr = process(t, nil, smallJob(clitest.FewPhotos(t, map[string]int{"cat": 5, "dog": 5}),
		filepath.Join(t.TempDir(), "out"))...)
	if status != 0 || !strings.Contains(stdout, "4 steps, ") || strings.Count(stderr, "is one sample and is left out") != 1 {
		t.Errorf("status %d, %s%s, want 0, 4 steps and one warning", status, stdout, stderr)
	}
}

// A signal to the command reaches the ranks, which write the checkpoint. A single process continues
// from that checkpoint, and so do two processes of a launcher.
func TestInterruptedRanksGoOn(t *testing.T) {
	archive, out := clitest.FewPhotos(t, map[string]int{"cat": 20, "dog": 20}), filepath.Join(t.TempDir(), "out")
	c, stderr := clitest.Process(t, smallJob(archive, out, "-epochs", "60")...)
	stdout, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	var said []byte
	for buffer := make([]byte, 1<<12); !bytes.Contains(said, []byte("\n    2 ")); { // the second epoch is over
		n, err := stdout.Read(buffer)
		said = append(said, buffer[:n]...)
		if err != nil {
			t.Fatalf("%v after\n%s%s", err, said, stderr)
		}
	}
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait() // the status is checked
	if status := c.ProcessState.ExitCode(); status != interrupt.Status ||
		strings.Count(stderr.String(), "interrupted in epoch ") != 1 || !strings.Contains(stderr.String(), "-resume goes on") {
		t.Fatalf("status %d and %q, want %d and how to go on, once", status, stderr, interrupt.Status)
	}
	port, err := freeport.Find()
	if err != nil {
		t.Fatal(err)
	}
	var ranks [2]*exec.Cmd
	var outs, errs [2]*bytes.Buffer
	for rank := range ranks {
		args := smallJob(archive, out, "-epochs", "60", "-resume", "-patience", "1")
		ranks[rank], errs[rank] = clitest.Process(t, args...)
		outs[rank] = &bytes.Buffer{}
		ranks[rank].Stdout = outs[rank]
		ranks[rank].Env = append(ranks[rank].Env, "RANK="+strconv.Itoa(rank), "LOCAL_RANK="+strconv.Itoa(rank), "WORLD_SIZE=2",
			"LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+strconv.Itoa(port))
		if err := ranks[rank].Start(); err != nil {
			t.Fatal(err)
		}
	}
	for rank, c := range ranks {
		if err := c.Wait(); err != nil || rank > 0 && outs[rank].Len() > 0 {
			t.Fatalf("rank %d: %v, said %s%s, want no error, and no output of rank 1", rank, err, outs[rank], errs[rank])
		}
	}
	if said := outs[0].String(); !strings.Contains(said, "resumes in epoch ") || !strings.Contains(said, "best epoch is ") {
		t.Errorf("the launched ranks said\n%s\nwant that they resume", said)
	}
}

// An error of one rank ends the job, and the command prints the error.
func TestFailedRankEndsTheTraining(t *testing.T) {
	good := clitest.FewPhotos(t, map[string]int{"cat": 1})
	data, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	image := string(data[512 : 512+bytes.Index(data, []byte("IEND"))-512+8])
	archive := clitest.WriteTar(t, map[string]string{"cat/a.png": image, "cat/b.png": image, "dog/a.png": image,
		"dog/b.png": image[:len(image)-30]})
	begin := time.Now()
	status, _, stderr := process(t, nil, smallJob(archive, filepath.Join(t.TempDir(), "out"), "-epochs", "40")...)
	if status != 1 || strings.Count(stderr, "torchstream: ") != 1 || !strings.Contains(stderr, `"dog/b.png"`) ||
		!strings.Contains(stderr, "-bad-samples skip") {
		t.Errorf("status %d and %s, want 1 and one error, which names dog/b.png", status, stderr)
	}
	if took := time.Since(begin); took > 3*leaveTime {
		t.Errorf("the job took %v to end, want less than %v", took, 3*leaveTime)
	}
}

func TestRankOptionsAreChecked(t *testing.T) {
	alone := distributed.Environment{Launcher: "none", Size: 1, LocalSize: 1}
	four := distributed.Environment{Launcher: "torchrun", Size: 8, LocalSize: 4}
	for _, c := range []struct {
		gpus, ranks int
		device      string
		batch       int
		env         distributed.Environment
		want        int
		says        string
	}{
		{0, 0, "", 5, alone, 0, ""},
		{0, 1, "cpu", 5, alone, 0, ""},
		{0, 3, "cpu", 6, alone, 3, ""},
		{0, 3, "cpu", 8, alone, 0, "-batch 8: 3 processes cannot share it equally"},
		{0, 2, "", 8, alone, 0, "-ranks needs -device cpu"},
		{2, 0, "cpu", 8, alone, 0, "-gpus is for GPUs"},
		{2, 2, "", 8, alone, 0, "exclude each other"},
		{-1, 0, "", 8, alone, 0, "-gpus -1, -ranks 0: must be at least 1"},
		{2, 0, "cuda:1", 8, alone, 0, "-device cuda:1: each process has another GPU"},
		{1000, 0, "", 1000, alone, 0, "-gpus 1000: this machine has "},
		{0, 0, "cpu", 8, four, 0, ""},
		{0, 4, "cpu", 8, four, 0, ""},
		{0, 2, "cpu", 8, four, 0, "torchrun has started 4 processes on this host"},
		{0, 0, "cpu", 12, four, 0, "-batch 12: 8 processes cannot share it equally"},
	} {
		o := trainOptions{job: jobOptions{gpus: c.gpus, ranks: c.ranks}, device: c.device}
		o.batch = c.batch
		got, err := o.processes(c.env)
		if got != c.want || (err != nil) != (c.says != "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: got %d, %v, want %d and %q", c, got, err, c.want, c.says)
		}
	}
	if cuda.DeviceCount() > 0 {
		return
	}
	status, stdout, stderr := command(t, "train", "-archive", photos, "-gpus", "2", "-o", filepath.Join(t.TempDir(), "out"))
	if status != 1 || stdout != "" || !strings.Contains(stderr, "-gpus 2: this machine has 0 GPUs") {
		t.Errorf("without GPUs: status %d, %s, %s, want 1 and an error that says so", status, stdout, stderr)
	}
}

// A signal may reach one rank before another, which then fails because the first one has left. The
// command says that it was interrupted, but not if a rank failed by itself.
func TestInterruptedRankComesFirst(t *testing.T) {
	ends := func(status string) error { return exec.Command("sh", "-c", "exit "+status).Run() }
	done, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		ctx  context.Context
		want error
	}{{done, cli.InterruptedError{}}, {t.Context(), cli.ErrFound}} {
		ended := make(chan ending, 2)
		ended <- ending{0, ends("1")}
		ended <- ending{1, ends(strconv.Itoa(interrupt.Status))}
		live := exec.Command("true")
		if err := live.Run(); err != nil {
			t.Fatal(err)
		}
		if err := awaitRanks(c.ctx, []*exec.Cmd{live, live}, ended); !errors.Is(err, c.want) {
			t.Errorf("context ended %t: got %v, want %v", c.ctx.Err() != nil, err, c.want)
		}
	}
}

// If a rank is killed, the job ends with an error that names the rank.
func TestKilledRankIsNamed(t *testing.T) {
	c := exec.Command("sh", "-c", "kill -KILL $$")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan ending, 1)
	ended <- ending{3, c.Wait()}
	err := awaitRanks(t.Context(), []*exec.Cmd{c}, ended)
	if err == nil || !strings.Contains(err.Error(), "rank 3 has ended: signal: killed") {
		t.Errorf("got %v, want an error that names rank 3 and the signal", err)
	}
	if err := awaitRanks(t.Context(), nil, nil); err != nil {
		t.Errorf("no ranks: %v, want no error", errors.Unwrap(err))
	}
}

// The workers of a rank run near its GPU, unless too few CPUs are there.
func TestWorkersRunNearTheRanksGPU(t *testing.T) {
	low, high := []int{0, 1, 2, 3}, []int{4, 5, 6, 7}
	two, one := [][]int{low, low, high, high}, [][]int{low, low, low, high}
	for _, c := range []struct {
		name           string
		near           [][]int
		device         cuda.Device
		ranks, workers int
		want           []int
	}{
		{"two GPUs a node", two, 0, 4, 2, low},
		{"the other node", two, 3, 4, 2, high},
		{"too many workers", two, 0, 4, 3, nil},
		{"three GPUs on a node", one, 0, 4, 2, nil},
		{"the fourth GPU", one, 3, 4, 2, high},
		{"ranks without GPUs", two, cuda.CPU, 4, 2, nil},
		{"one rank", two, 0, 1, 2, nil},
		{"more ranks than visible GPUs", two[:1], 0, 4, 2, nil},
		{"one node", [][]int{nil, nil}, 1, 2, 1, nil},
	} {
		if got := nearWorkers(c.near, c.device, c.ranks, c.workers); !slices.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

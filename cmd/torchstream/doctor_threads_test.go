//go:build linux && cgo

package main

import (
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/torch"
)

// The doctor shows GOMAXPROCS, the quota and LibTorch's threads. If there are too many threads, the
// doctor names the variable to set.
func TestDoctorShowsThreads(t *testing.T) {
	for _, c := range []struct {
		counts            threadCounts
		state, want, toDo string
	}{
		{threadCounts{procs: 2, cpus: 64, quota: 1.5, libtorch: 2}, "ok",
			"Go 2 (GOMAXPROCS; 64 CPUs, a cgroup quota of 1.5 CPUs), LibTorch 2 in an operator on the CPU", ""},
		{threadCounts{procs: 8, cpus: 8, libtorch: 4}, "ok",
			"Go 8 (GOMAXPROCS; 8 CPUs, no cgroup quota), LibTorch 4 in", ""},
		{threadCounts{procs: 2, cpus: 64, quota: 2, libtorch: 32, omp: "32"}, "note", "LibTorch 32 in",
			"unset OMP_NUM_THREADS=32, or set -threads 2"},
		{threadCounts{procs: 2, cpus: 64, quota: 2, libtorch: 32, mkl: "32"}, "note", "LibTorch 32 in",
			"unset MKL_NUM_THREADS=32, or set -threads 2"},
		{threadCounts{procs: 16, cpus: 64, quota: 4, libtorch: 16, gomaxprocs: "16"}, "note", "Go 16",
			"GOMAXPROCS=16 is more than the quota: unset it"},
	} {
		f := c.counts.finding()
		if f.State != c.state || !strings.Contains(f.Found, c.want) || (f.ToDo == "") != (c.toDo == "") ||
			!strings.Contains(f.ToDo, c.toDo) {
			t.Errorf("%+v: %+v, want %s, %q and %q", c.counts, f, c.state, c.want, c.toDo)
		}
	}
	if _, stdout, _ := command(t, "doctor"); !strings.Contains(stdout, "(GOMAXPROCS; ") {
		t.Errorf("the doctor printed no threads:\n%s\nwant it with %q", stdout, "(GOMAXPROCS; ")
	}
}

// -threads sets LibTorch's threads in every command that computes, before any other work.
func TestThreadsOption(t *testing.T) {
	// LibTorch keeps the number of computing threads per OS thread, so the test stays on one.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := torch.NumThreads()
	t.Cleanup(func() {
		if err := torch.SetNumThreads(before); err != nil {
			t.Error(err)
		}
	})
	missing := filepath.Join(t.TempDir(), "missing")
	for _, args := range [][]string{
		{"train", "-archive", missing}, {"evaluate", "-archive", missing, "-checkpoint", missing},
		{"predict", "-checkpoint", missing, "-threads", "3", missing},
	} {
		if args[0] != "predict" {
			args = append(args, "-threads", "3")
		}
		if err := torch.SetNumThreads(1); err != nil {
			t.Fatal(err)
		}
		if status, stdout, _ := command(t, args...); status == 0 || torch.NumThreads() != 3 {
			t.Errorf("%q: status %d and %d threads, want an error and 3 threads: %s", args, status,
				torch.NumThreads(), stdout)
		}
		for i := range args {
			if args[i] == "-threads" {
				args[i+1] = "-1"
			}
		}
		if status, _, stderr := command(t, args...); status != 2 ||
			!strings.Contains(stderr, "-threads -1: must be from 1 to 65536") {
			t.Errorf("%q: status %d, %s, want status 2 and the bounds", args, status, stderr)
		}
	}
}

//go:build linux && cgo

package main

import (
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/torchstream/torchstream/torch"
)

// The quota is the smallest quota of the process's cgroup and that cgroup's parents, in both cgroup
// versions.
func TestCPUQuota(t *testing.T) {
	for name, c := range map[string]struct {
		cgroup string
		files  map[string]string
		want   float64
	}{
		"version 2":       {"0::/job\n", map[string]string{"job/cpu.max": "150000 100000\n"}, 1.5},
		"version 2, none": {"0::/job\n", map[string]string{"job/cpu.max": "max 100000\n"}, 0},
		"version 2, above": {"0::/a/b/c\n",
			map[string]string{"a/b/c/cpu.max": "max 100000\n", "a/b/cpu.max": "400000 100000\n",
				"a/cpu.max": "300000 100000\n"}, 3},
		"version 2, container": {"0::/\n", map[string]string{"cpu.max": "200000 100000\n"}, 2},
		"version 2, unseen":    {"0::/../other\n", map[string]string{"cpu.max": "200000 100000\n"}, 2},
		"version 1": {"4:memory:/m\n2:cpu,cpuacct:/job\n0::/\n",
			map[string]string{"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 0.5},
		"version 1, none": {"2:cpu,cpuacct:/job\n",
			map[string]string{"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 0},
		"version 1, another": {"2:cpuset:/job\n",
			map[string]string{"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 0},
		"no file":                 {"0::/job\n", nil, 0},
		"text that is no numbers": {"0::/job\nfoo\n", map[string]string{"job/cpu.max": "x y\n"}, 0},
	} {
		root := fstest.MapFS{"proc/self/cgroup": {Data: []byte(c.cgroup)}}
		for path, text := range c.files {
			root["sys/fs/cgroup/"+path] = &fstest.MapFile{Data: []byte(text)}
		}
		if got := cpuQuota(root); got != c.want {
			t.Errorf("%s: a quota of %g CPUs, want %g", name, got, c.want)
		}
	}
	if got := cpuQuota(fstest.MapFS{}); got != 0 {
		t.Errorf("without /proc: a quota of %g CPUs, want 0", got)
	}
}

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

//go:build linux && cgo

package main

import (
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/torch"
)

// threads reports how many computing threads Go and LibTorch use, and what set these numbers.
func threads() finding {
	return threadCounts{
		procs: runtime.GOMAXPROCS(0), cpus: runtime.NumCPU(), quota: cpuQuota(os.DirFS("/")),
		libtorch: torch.NumThreads(),
		omp:      os.Getenv("OMP_NUM_THREADS"), mkl: os.Getenv("MKL_NUM_THREADS"), gomaxprocs: os.Getenv("GOMAXPROCS"),
	}.finding()
}

type threadCounts struct {
	procs, cpus, libtorch int
	quota                 float64 // CPUs; 0 means no quota
	omp, mkl, gomaxprocs  string  // environment variables
}

func (c threadCounts) finding() finding {
	quota := "no cgroup quota"
	if c.quota > 0 {
		quota = fmt.Sprintf("a cgroup quota of %.4g CPUs", c.quota)
	}
	f := finding{State: "ok", What: "threads",
		Found: fmt.Sprintf("Go %d (GOMAXPROCS; %s, %s), LibTorch %d in an operator on the CPU", c.procs,
			printable.Counted(c.cpus, "CPU", "CPUs"), quota, c.libtorch)}
	// Go uses at least two threads, and rounds a quota up.
	most := max(2, int(math.Ceil(c.quota)))
	switch {
	case c.libtorch > c.procs:
		f.State, f.ToDo = "note", fmt.Sprintf(
			"more threads than GOMAXPROCS slow each other down: unset %s, or set -threads %d",
			threadVariable(c), c.procs)
	case c.quota > 0 && c.procs > most:
		f.State, f.ToDo = "note", fmt.Sprintf(
			"GOMAXPROCS=%s is more than the quota: unset it, and Go follows the quota", c.gomaxprocs)
	}
	return f
}

// threadVariable names the variable that sets LibTorch's threads.
func threadVariable(c threadCounts) string {
	if c.omp == "" && c.mkl != "" {
		return "MKL_NUM_THREADS=" + c.mkl
	}
	return "OMP_NUM_THREADS=" + c.omp
}

// cpuQuota returns how many CPUs the cgroups let this process use at a time. The quotas of the
// process's cgroup and of all its parents apply, so the limit is the smallest of them. cpuQuota
// returns 0 if there is no quota. root is the machine's root directory.
func cpuQuota(root fs.FS) float64 {
	text, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return 0
	}
	quota := math.Inf(1)
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3) // number, controllers, path
		if len(parts) != 3 {
			continue
		}
		mount, read := "sys/fs/cgroup", quotaOfV2
		if controllers := strings.Split(parts[1], ","); slices.Contains(controllers, "cpu") {
			mount, read = "sys/fs/cgroup/cpu", quotaOfV1
		} else if parts[1] != "" {
			continue
		}
		for group := path.Join("/", parts[2]); ; group = path.Dir(group) {
			if q := read(root, mount+group); q > 0 {
				quota = min(quota, q)
			}
			if group == "/" {
				break
			}
		}
	}
	if math.IsInf(quota, 1) {
		return 0
	}
	return quota
}

// quotaOfV2 reads "QUOTA PERIOD", or "max PERIOD" for no quota.
func quotaOfV2(root fs.FS, group string) float64 {
	quota, period, _ := strings.Cut(firstLine(root, group, "cpu.max"), " ")
	return ratio(quota, period)
}

// quotaOfV1 reads two files. A quota of -1 means none.
func quotaOfV1(root fs.FS, group string) float64 {
	return ratio(firstLine(root, group, "cpu.cfs_quota_us"), firstLine(root, group, "cpu.cfs_period_us"))
}

// firstLine returns the first line of a file of a cgroup, or "".
func firstLine(root fs.FS, group, name string) string {
	text, err := fs.ReadFile(root, path.Join(group, name))
	if err != nil {
		return "" // a container may not be able to see its cgroup
	}
	line, _, _ := strings.Cut(string(text), "\n")
	return line
}

// ratio returns a quota as a number of CPUs, or 0 for none.
func ratio(quota, period string) float64 {
	q, err := strconv.ParseFloat(quota, 64)
	if err != nil || q <= 0 {
		return 0
	}
	p, err := strconv.ParseFloat(period, 64)
	if err != nil || p <= 0 {
		return 0
	}
	return q / p
}

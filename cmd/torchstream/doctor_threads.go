//go:build linux && cgo

package main

import (
	"fmt"
	"math"
	"os"
	"runtime"

	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/system"
	"github.com/torchstream/torchstream/torch"
)

// threads reports the numbers of computing threads of Go and LibTorch, and their causes.
func threads() finding {
	return threadCounts{
		procs: runtime.GOMAXPROCS(0), cpus: runtime.NumCPU(), quota: system.CPUQuota(os.DirFS("/")),
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

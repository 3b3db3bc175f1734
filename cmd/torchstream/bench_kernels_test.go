package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/loaderbench"
)

func TestBenchLoaderRecordsKernels(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for _, options := range []string{"-seconds 0.3 -warm 1", "-epochs 1 -no-index"} {
		args := append([]string{"bench", "loader", "-json", "-archive", photos, "-device", "cuda", "-decode", "device", "-batch", "32", "-size", "64"}, strings.Fields(options)...)
		status, stdout, stderr := command(t, args...)
		var r struct{ Kernels loaderbench.KernelTimes }
		if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 {
			t.Fatalf("%s: status %d, %v in %q, stderr %q", options, status, err, stdout, stderr)
		}
		k := r.Kernels
		if k.Seconds <= 0 || k.Seconds > 10 || k.ImagesPerSecond <= 0 || k.Multiprocessors < 1 || k.BusyShare <= 0 || k.BusyShare > 1 || k.SMTimeShare <= 0 || k.SMTimeShare > k.BusyShare+1e-9 {
			t.Errorf("%s: %+v", options, k)
		}
		found := map[string]bool{}
		for _, row := range k.Kernels {
			found[row.Kernel] = true
			if row.Launches < 1 || row.TotalMS <= 0 || row.Blocks < 1 || row.Threads < 1 || row.Registers < 1 || row.Occupancy <= 0 || row.Occupancy > 1 {
				t.Errorf("%s: %+v", options, row)
			}
		}
		for _, want := range []string{"build", "entropy", "transform", "pixels", "weights", "columns", "results"} {
			if !found[want] {
				t.Errorf("%s: no kernel %s in %s", options, want, stdout)
			}
		}
	}
}

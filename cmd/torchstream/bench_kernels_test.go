//go:build linux && cgo

package main

import (
	"debug/elf"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/loaderbench"
)

// loaderKernels run for every batch. otherKernels run only for some batches: they search for entry
// points, transform images, inflate and read files.
var (
	loaderKernels = []string{"build", "entropy", "transform", "weights", "columns", "results"}
	otherKernels  = []string{"augment", "inflate", "gather", "paths", "walk_paths", "synchronise", "sums", "entries",
		"read_ranges"}
)

// TestKernelsOfTheLoaderAreInTheLibrary needs no GPU: it looks in the library for the symbols by
// which the host registers kernels.
func TestKernelsOfTheLoaderAreInTheLibrary(t *testing.T) {
	if capi.CUDAVersion() == "" {
		t.Skip("the library is built without CUDA")
	}
	library, err := elf.Open(loadedLibrary(t, capi.LibraryName))
	if err != nil {
		t.Fatal(err)
	}
	defer library.Close()
	names, err := library.Section(".rodata").Data()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, m := range regexp.MustCompile(`_ZN2ts6decode7kernels(\d+)(\w+)`).FindAllSubmatch(names, -1) {
		length, err := strconv.Atoi(string(m[1]))
		if err != nil || length > len(m[2]) {
			t.Fatalf("the symbol %s has a length of %s: %v", m[0], m[1], err)
		}
		found[string(m[2][:length])] = true
	}
	got, want := slices.Sorted(maps.Keys(found)), slices.Sorted(slices.Values(slices.Concat(loaderKernels,
		otherKernels)))
	if !slices.Equal(got, want) {
		t.Errorf("the library's kernels in ts::decode::kernels are %v, want %v: name new ones in "+
			"loaderKernels or otherKernels", got, want)
	}
}

// loadedLibrary returns the path of a library that the process has loaded.
func loadedLibrary(t *testing.T, name string) string {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if _, path, ok := strings.Cut(line, " /"); ok && filepath.Base(strings.TrimSpace(path)) == name {
			return "/" + strings.TrimSpace(path)
		}
	}
	t.Fatalf("the process has no %s in /proc/self/maps", name)
	return ""
}

func TestBenchLoaderRecordsKernels(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for _, options := range []string{"-seconds 0.3 -warm 1", "-epochs 1 -no-index"} {
		args := append([]string{"bench", "loader", "-json", "-archive", photos, "-device", "cuda",
			"-decode", "device", "-batch", "32", "-size", "64"}, strings.Fields(options)...)
		status, stdout, stderr := command(t, args...)
		var r struct{ Kernels loaderbench.KernelTimes }
		if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 {
			t.Fatalf("%s: status %d, %v in %q, stderr %q, want no error, status 0",
				options, status, err, stdout, stderr)
		}
		k := r.Kernels
		if k.Seconds <= 0 || k.Seconds > 10 || k.ImagesPerSecond <= 0 || k.Multiprocessors < 1 ||
			k.BusyShare <= 0 || k.BusyShare > 1 || k.SMTimeShare <= 0 || k.SMTimeShare > k.BusyShare+1e-9 {
			t.Errorf("%s: %+v", options, k)
		}
		found := map[string]bool{}
		for _, row := range k.Kernels {
			found[row.Kernel] = true
			if row.Launches < 1 || row.TotalMS <= 0 || row.Blocks < 1 || row.Threads < 1 ||
				row.Registers < 1 || row.Occupancy <= 0 || row.Occupancy > 1 {
				t.Errorf("%s: %+v", options, row)
			}
		}
		for _, want := range loaderKernels {
			if !found[want] {
				t.Errorf("%s: no kernel %s in %s", options, want, stdout)
			}
		}
	}
}

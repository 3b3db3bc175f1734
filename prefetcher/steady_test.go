//go:build linux

package prefetcher

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// nullCalls returns nullLog, and skips the test if it is empty.
func nullCalls(t *testing.T) string {
	t.Helper()
	log := nullLog(t)
	if log == "" {
		t.Skip("counts the calls of devices that compute nothing: run it by tools/null-device.sh")
	}
	return log
}

// nullLog returns the log file of devices that compute nothing, or "" without such devices. They
// log each call of CUDA's runtime that allocates, frees or waits, or that may wait because it
// copies pageable memory: a line has the names of the function and of its thread.
func nullLog(t *testing.T) string {
	t.Helper()
	descriptors, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range descriptors {
		if to, err := os.Readlink(d); err == nil && strings.HasPrefix(to, "/memfd:null_calls") {
			return d
		}
	}
	return ""
}

// countCalls counts the calls by function and thread, from an offset of the file on. It also
// returns the file's size.
func countCalls(t *testing.T, file string, from int) (calls map[string]int, size int) {
	t.Helper()
	lines, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	calls = map[string]int{}
	for line := range bytes.Lines(lines[from:]) {
		calls[strings.TrimSpace(string(line))]++
	}
	return calls, len(lines)
}

// TestSteadyDecodingAllocatesAndWaitsForNothing: after two epochs decoded on the device, no thread
// of the process allocates or frees device memory, pinned memory, streams or events. No thread
// waits inside CUDA for a device, a stream, an event, or a copy of unpinned memory.
//
// The design needs two waits. It polls CUDA without blocking (cudaEventQuery), and sleeps in
// between. HostWait waits until a batch is copied, before the host writes to its slot's pinned
// memory again. Check waits until the flags of a batch have arrived, before the consumer gets it.
// Only one call blocks: after the host has uploaded the pixels of an image that the device has
// handed back, the prefetcher's thread calls cudaStreamSynchronize once for each such image
// (check).
func TestSteadyDecodingAllocatesAndWaitsForNothing(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	nullCalls(t) // skips here, before archives are written
	for _, c := range []struct {
		name    string
		archive string
		entries bool // an epoch of the loader alone makes entry points first
		ops     []transform.Op
		o       Options
	}{
		{"entry points", "set.tar", true, nil, Options{}},
		{"the device searches", "set.tar", false, nil, Options{}},
		{"operations", "set.tar", true, deviceOps, Options{}},
		{"a bounded stream, three slots", "set.tar", true, nil, Options{DecodeMultiprocessors: 20, Depth: 3}},
		// Devices that compute nothing do not inflate, so they hand every member back once.
		{"members", "set.tgz", true, nil, Options{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			options := memberOptions(imageloader.Skip, false)
			options.Transform.Ops = c.ops
			l := newLoader(t, decodeArchiveOf(t, 100, c.archive), options)
			if c.entries {
				for _, err := range l.Epoch(t.Context(), 0) {
					if err != nil {
						t.Fatal(err)
					}
				}
			}
			c.o.Decode = Device
			p := newFeed(t, l, c.o)
			epoch := func(epoch int) {
				for b, err := range p.Epoch(t.Context(), epoch) {
					if err != nil {
						t.Fatal(err)
					}
					sum := b.Images.Sum() // on the consumer's stream
					if err := sum.Err(); err != nil {
						t.Fatal(err)
					}
					sum.Close()
				}
			}
			for i := range 2 {
				epoch(i)
			}
			file := nullCalls(t)
			opening, size := countCalls(t, file, 0)
			if opening["cudaHostAlloc prefetcher"] == 0 {
				t.Fatalf("the prefetcher's thread has allocated no pinned memory, by %v: nothing counts", opening)
			}
			before, events := p.Stats(), len(p.starved.events.all)
			for i := range 3 {
				epoch(2 + i)
			}
			after := p.Stats()
			calls, _ := countCalls(t, file, size)
			// The measurement of the consumer's idle time uses an event for each batch that is
			// ready at the same time, and one for the turn. The number of ready batches depends on
			// timing.
			const measures = "cudaEventCreateWithFlags prefetcher"
			if calls[measures] -= len(p.starved.events.all) - events; calls[measures] == 0 {
				delete(calls, measures)
			}
			if most := p.slots.depth + 2; len(p.starved.events.all) > most {
				t.Errorf("%d events measure the consumer's idle time, want at most %d", len(p.starved.events.all), most)
			}
			if n := after.Decoded - before.Decoded; n < 3*40 {
				t.Errorf("the device decoded %d images: the epochs show nothing, want at least %v",
					n, 3*40)
			}
			const mends = "cudaStreamSynchronize prefetcher"
			if got, want := calls[mends], int(after.DecodedAgain-before.DecodedAgain); got != want {
				t.Errorf("%d calls %s for %d images that the device handed back", got, mends, want)
			}
			delete(calls, mends)
			for _, call := range slices.Sorted(maps.Keys(calls)) {
				t.Errorf("%d calls of %s in three epochs", calls[call], call)
			}
			closeFeed(t, p)
		})
	}
}

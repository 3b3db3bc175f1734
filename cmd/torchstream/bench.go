package main

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"syscall"
	"time"

	"github.com/torchstream/torchstream/imageloader"
)

// loaderResult is what `bench loader` prints.
type loaderResult struct {
	ImagesPerSecond      float64 `json:"images_per_second"`
	CPUSecondsPer1000    float64 `json:"cpu_seconds_per_1000_images"`
	PeakRSSBytes         int64   `json:"peak_rss_bytes"`
	Workers              int     `json:"workers"`
	Batch                int     `json:"batch"`
	BadSamples           int64   `json:"bad_samples"` // met, once for each epoch that met them
	Size                 int     `json:"size"`
	MemoryMB             int64   `json:"memory_mb"`
	Contract             string  `json:"contract"`
	Images               int64   `json:"images"`
	Epochs               int     `json:"epochs"` // begun
	Seconds              float64 `json:"seconds"`
	OpenSeconds          float64 `json:"open_seconds"`
	FirstBatchSeconds    float64 `json:"first_batch_seconds"`
	WorkersWaitedForData float64 `json:"workers_waited_for_data"` // share of the workers' time: near 1, reading the archive is the bottleneck
	Cores                int     `json:"cores"`
}

// benchLoader turns an archive into shuffled training batches in host memory, as fast as it goes, and prints what that took.
func benchLoader(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := flags("bench loader", "Turns an archive into training batches (RandomResizedCrop and flip, uint8, in host memory), epoch after epoch, for a while. The clock starts at\n"+
		"the first batch. bench/pytorch_loader.py does the same with PyTorch.", stderr)
	archive := set.String("archive", "", "`FILE`, .tgz or .tar, directory = class")
	batch := set.Int("batch", 64, "images a batch")
	workers := set.Int("workers", 0, "goroutines that decode (default: the CPUs that there are)")
	size := set.Int("size", 224, "pixels of a result's side")
	memory := set.Int64("memory", 256, "`MB` of compressed images: a .tgz that fits in is read once, a larger one is inflated and shuffled anew every epoch")
	seconds := set.Float64("seconds", 10, "how long to measure")
	asJSON := set.Bool("json", false, "print one JSON object")
	if err := parse(set, args, 0); err != nil {
		return err
	}
	switch {
	case *archive == "":
		return usageError{"bench loader needs -archive FILE"}
	case *batch < 1 || *size < 1 || *workers < 0 || *memory < 1 || *seconds <= 0:
		return usageError{"-batch, -size, -memory and -seconds are more than 0, -workers at least 0"}
	}
	result, err := measureLoader(ctx, *archive, time.Duration(*seconds*float64(time.Second)), imageloader.Options{
		BatchSize: *batch, Workers: *workers, Transform: imageloader.Train(*size), Shuffle: true, ShuffleBytes: *memory << 20, Seed: 1, BadSamples: imageloader.Skip,
	}, stderr)
	if err != nil {
		return err
	}
	if *asJSON {
		return writeJSON(stdout, result)
	}
	_, err = fmt.Fprintf(stdout, "%.0f images/s, %.2f CPU seconds per 1,000 images, %.0f MB peak memory\n%d workers on %d cores, batches of %d, %d x %d pixels; %d bad samples\n",
		result.ImagesPerSecond, result.CPUSecondsPer1000, float64(result.PeakRSSBytes)/1e6, result.Workers, result.Cores, result.Batch, result.Size, result.Size, result.BadSamples)
	return err
}

func measureLoader(ctx context.Context, archive string, length time.Duration, o imageloader.Options, stderr io.Writer) (loaderResult, error) {
	r := loaderResult{
		Batch: o.BatchSize, Size: o.Transform.Size, MemoryMB: o.ShuffleBytes >> 20, Cores: runtime.GOMAXPROCS(0),
		Contract: fmt.Sprintf("RandomResizedCrop(%d) antialiased + flip, uint8 in host memory, shuffled epochs", o.Transform.Size),
	}
	begin := time.Now()
	loader, err := imageloader.OpenContext(ctx, archive, o)
	if err != nil {
		return r, err
	}
	defer loader.Close()
	r.OpenSeconds = time.Since(begin).Seconds()
	fmt.Fprintf(stderr, "%s: %d samples of %d classes\n", archive, loader.Len(), len(loader.Classes()))

	begin = time.Now()
	var cpu time.Duration
	first := true
	for ; r.Images == 0 || time.Since(begin) < length; r.Epochs++ {
		before := r.Images
		for batch, err := range loader.Epoch(ctx, r.Epochs) {
			if err != nil {
				return r, err
			}
			if first {
				first = false
				r.FirstBatchSeconds = time.Since(begin).Seconds()
				begin = time.Now()
				if cpu, err = cpuTime(); err != nil {
					return r, err
				}
				continue
			}
			r.Images += int64(batch.N)
			if time.Since(begin) >= length {
				break
			}
		}
		if first || r.Images == before && r.Epochs > 0 {
			return r, fmt.Errorf("%s: not one sample could be decoded: see `torchstream inspect`", archive)
		}
	}
	elapsed := time.Since(begin)
	after, err := cpuTime()
	if err != nil {
		return r, err
	}
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return r, err
	}
	stats := loader.Stats()
	r.Seconds = elapsed.Seconds()
	r.ImagesPerSecond = float64(r.Images) / r.Seconds
	r.CPUSecondsPer1000 = (after - cpu).Seconds() / float64(r.Images) * 1000
	r.PeakRSSBytes = usage.Maxrss * 1024
	r.BadSamples, r.Workers = stats.Bad, stats.Workers
	if busy := stats.Decode + stats.WaitData; busy > 0 {
		r.WorkersWaitedForData = stats.WaitData.Seconds() / busy.Seconds()
	}
	return r, nil
}

// cpuTime is the CPU time that this process has used.
func cpuTime() (time.Duration, error) {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0, err
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano()), nil
}

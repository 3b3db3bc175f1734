package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// epochResult holds the results of an epoch, a line of the table.
type epochResult struct {
	Epoch            int      `json:"epoch"`
	Loss             float64  `json:"loss"`
	TrainAccuracy    float64  `json:"train_accuracy"`
	TestAccuracy     *float64 `json:"test_accuracy,omitempty"`
	ImagesPerSecond  float64  `json:"images_per_second"`
	Seconds          float64  `json:"seconds"`
	WaitSeconds      float64  `json:"wait_seconds"`
	WaitPercent      float64  `json:"wait_percent"`
	FirstWaitSeconds float64  `json:"first_wait_seconds"` // part of WaitSeconds: before the first batch
	AllocatedBytes   int64    `json:"device_allocated_bytes"`
	ReservedBytes    int64    `json:"device_reserved_bytes"`
	LiveTensors      int64    `json:"live_tensors"`
}

// trainResult is the object that -json writes.
type trainResult struct {
	Options    trainOptions  `json:"options"`
	Device     string        `json:"device"`
	Classes    []string      `json:"classes"`
	Samples    int           `json:"samples"`
	Parameters int64         `json:"parameters"`
	Epochs     []epochResult `json:"epochs"`
	Seconds    float64       `json:"seconds"`
}

// setTimes sets the epoch's speed and waiting times from the prefetcher's statistics before and
// after the epoch.
func (e *epochResult) setTimes(took time.Duration, samples int, before, after prefetcher.Stats) {
	e.Seconds = took.Seconds()
	e.ImagesPerSecond = float64(samples) / e.Seconds
	e.WaitSeconds = (after.ConsumerWait - before.ConsumerWait).Seconds()
	e.FirstWaitSeconds = (after.FirstWait - before.FirstWait).Seconds()
	e.WaitPercent = 100 * e.WaitSeconds / e.Seconds
}

// progress draws a bar for one epoch, on a terminal only.
type progress struct{ bar *progressbar.ProgressBar }

func newProgress(w io.Writer, title string, samples int) progress {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return progress{}
	}
	return progress{progressbar.NewOptions(samples, progressbar.OptionSetWriter(w),
		progressbar.OptionSetDescription(title), progressbar.OptionShowCount(),
		progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish(),
		progressbar.OptionSetWidth(30), progressbar.OptionSetPredictTime(true))}
}

func (p progress) add(samples int) {
	if p.bar != nil {
		p.bar.Add(samples) // only the drawing can fail
	}
}

// done removes the bar.
func (p progress) done() {
	if p.bar != nil {
		p.bar.Clear()
	}
}

const columns = "%5s  %8s  %9s  %9s  %9s  %17s  %s\n"

func printHeader(w io.Writer, tested bool) {
	test := "test acc"
	if !tested {
		test = ""
	}
	fmt.Fprintf(w, columns, "epoch", "loss", "train acc", test, "images/s", "waited for data", "device memory")
}

func (e epochResult) print(w io.Writer) {
	test, memory := "", "-"
	if e.TestAccuracy != nil {
		test = percent(*e.TestAccuracy)
	}
	if e.ReservedBytes > 0 {
		memory = fmt.Sprintf("%.1f MB used, %.1f MB held", float64(e.AllocatedBytes)/1e6, float64(e.ReservedBytes)/1e6)
	}
	fmt.Fprintf(w, columns, fmt.Sprint(e.Epoch), fmt.Sprintf("%.4f", e.Loss), percent(e.TrainAccuracy),
		test, fmt.Sprintf("%.0f", e.ImagesPerSecond),
		fmt.Sprintf("%.2f s (%4.1f %%)", e.WaitSeconds, e.WaitPercent), memory)
}

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

// describe prints the data, the device and the network before the training.
func describe(w io.Writer, o trainOptions, r trainResult, device cuda.Device) {
	fmt.Fprintf(w, "data     %s: %d images of %d classes\n", o.Archive, r.Samples, len(r.Classes))
	if len(r.Classes) == 1 {
		fmt.Fprintf(w, "note     there is one class, %q, so there is nothing to learn: the class of an "+
			"image is the directory that contains it\n", r.Classes[0])
	}
	if o.Test != "" {
		fmt.Fprintf(w, "test     %s\n", o.Test)
	} else {
		fmt.Fprintln(w, "test     none: the accuracy is that on the training images; name held-back "+
			"images of the same classes with -test FILE")
	}
	name := fmt.Sprintf("%s, %d threads", device, torch.NumThreads())
	if p, err := device.Properties(); err == nil && device != cuda.CPU {
		name = fmt.Sprintf("%s, %s", device, p.Name)
	}
	fmt.Fprintf(w, "device   %s (%d CPUs for Go)\n", name, runtime.GOMAXPROCS(0))
	fmt.Fprintf(w, "network  %d parameters, images %d x %d, batches of %d\n\n", r.Parameters, o.Size, o.Size, o.Batch)
}

// finish prints the result and writes the checkpoint.
func finish(o trainOptions, r trainResult, net nn.Module, w io.Writer) error {
	last := r.Epochs[len(r.Epochs)-1]
	fmt.Fprintf(w, "\ntrained in %.1f s", r.Seconds)
	if last.TestAccuracy != nil {
		fmt.Fprintf(w, "; right on %s of the held-back images (guessing: %s)", percent(*last.TestAccuracy),
			percent(1/float64(len(r.Classes))))
	}
	fmt.Fprintln(w)
	if o.Checkpoint == "" {
		return nil
	}
	if err := saveCheckpoint(o.Checkpoint, net,
		settings{Classes: r.Classes, Size: o.Size, Width: o.Width}); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "checkpoint in %s\n", o.Checkpoint)
	return err
}

package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/torchstream/torchstream/cuda"
)

// progress draws a bar for one epoch, on a terminal only.
type progress struct{ bar *progressbar.ProgressBar }

func newProgress(w io.Writer, title string, samples int) progress {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return progress{}
	}
	return progress{progressbar.NewOptions(samples, progressbar.OptionSetWriter(w), progressbar.OptionSetDescription(title), progressbar.OptionShowCount(),
		progressbar.OptionShowIts(), progressbar.OptionSetItsString("images"), progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish(),
		progressbar.OptionSetWidth(30), progressbar.OptionSetPredictTime(true))}
}

func (p progress) add(samples int) {
	if p.bar != nil {
		p.bar.Add(samples) // only the drawing can fail
	}
}

func (p progress) done() {
	if p.bar != nil {
		p.bar.Finish()
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
	fmt.Fprintf(w, columns, fmt.Sprint(e.Epoch), fmt.Sprintf("%.4f", e.Loss), percent(e.TrainAccuracy), test, fmt.Sprintf("%.0f", e.ImagesPerSecond),
		fmt.Sprintf("%.2f s (%4.1f %%)", e.WaitSeconds, e.WaitPercent), memory)
}

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

// waitClock measures how long the training had nothing to do because the next batch was not there. On the CPU that is how long the loop waited. On a GPU the loop
// runs ahead of the device and always waits, for the device as it should; what counts is how long the device's stream stood still between the last
// kernel of one step and the first of the next, which two events on the stream tell.
type waitClock struct {
	device  cuda.Device
	stream  cuda.Stream
	events  []*cuda.Event // in pairs: step done, data there
	used    int
	stopped time.Time
	host    time.Duration
}

func newWaitClock(device cuda.Device) *waitClock {
	return &waitClock{device: device, stream: cuda.DefaultStream(device)}
}

// begin starts an epoch, whose first wait begins now.
func (c *waitClock) begin() error {
	c.used, c.host = 0, 0
	return c.wait()
}

// wait is called when a step's work is enqueued; resume when the next batch is there.
func (c *waitClock) wait() error {
	c.stopped = time.Now()
	return c.mark()
}

func (c *waitClock) resume() error {
	c.host += time.Since(c.stopped)
	return c.mark()
}

func (c *waitClock) mark() error {
	if c.device == cuda.CPU {
		return nil
	}
	if c.used == len(c.events) {
		event, err := cuda.NewEvent(cuda.EventOptions{Timing: true})
		if err != nil {
			return err
		}
		c.events = append(c.events, event)
	}
	c.used++
	return c.events[c.used-1].Record(c.stream)
}

// total is the time waited since begin. The device's work must be done.
func (c *waitClock) total() (time.Duration, error) {
	if c.device == cuda.CPU {
		return c.host, nil
	}
	var sum time.Duration
	for i := 0; i+1 < c.used; i += 2 {
		d, err := cuda.Elapsed(c.events[i], c.events[i+1])
		if err != nil {
			return 0, err
		}
		sum += d
	}
	return sum, nil
}

func (c *waitClock) close() {
	for _, e := range c.events {
		e.Close()
	}
}

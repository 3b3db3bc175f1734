package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"
)

// progress draws a bar for one epoch, on a terminal only.
type progress struct{ bar *progressbar.ProgressBar }

func newProgress(w io.Writer, title string, samples int) progress {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return progress{}
	}
	return progress{progressbar.NewOptions(samples, progressbar.OptionSetWriter(w), progressbar.OptionSetDescription(title), progressbar.OptionShowCount(),
		progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish(),
		progressbar.OptionSetWidth(30), progressbar.OptionSetPredictTime(true))}
}

func (p progress) add(samples int) {
	if p.bar != nil {
		p.bar.Add(samples) // only the drawing can fail
	}
}

// done takes the bar away.
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
	fmt.Fprintf(w, columns, fmt.Sprint(e.Epoch), fmt.Sprintf("%.4f", e.Loss), percent(e.TrainAccuracy), test, fmt.Sprintf("%.0f", e.ImagesPerSecond),
		fmt.Sprintf("%.2f s (%4.1f %%)", e.WaitSeconds, e.WaitPercent), memory)
}

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

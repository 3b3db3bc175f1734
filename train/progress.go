package train

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/resident"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// progress prints a table and, on a terminal, a bar below it.
type progress struct {
	run      *runner
	terminal bool
	header   bool // already printed

	bar     *progressbar.ProgressBar // of the current epoch; nil if there is no bar
	batches int                      // of an epoch; 0 if not known
	begin   time.Time                // start of this process's first epoch
	first   int                      // step count at that time
	epochAt time.Time                // start of the current epoch, before the first batch
	samples int                      // in the current epoch
	before  prefetcher.Stats         // at epochAt
	drawn   time.Time
}

func newProgress(r *runner) *progress {
	p := &progress{run: r, begin: time.Now(), first: r.at.Step}
	if f, ok := r.Progress.(*os.File); ok {
		p.terminal = term.IsTerminal(int(f.Fd()))
	}
	if r.Loader != nil {
		p.batches = max(0, r.Loader.Batches())
	}
	if r.Progress != nil && r.at.Step > 0 && r.at.Epoch < r.Epochs {
		fmt.Fprintf(r.Progress, "resumes in epoch %d of %d, after step %d\n", r.at.Epoch+1, r.Epochs, r.at.Step)
	}
	return p
}

// start starts an epoch. now is its start time, and stats are the feed's statistics at that time.
func (p *progress) start(now time.Time, stats prefetcher.Stats) {
	p.epochAt, p.samples, p.before = now, 0, stats
}

// step counts a step of n samples. It writes a line every LogEvery steps, and redraws the bar a few
// times a second.
func (p *progress) step(n int, loss *torch.Tensor) error {
	p.samples += n
	if every := p.run.LogEvery; every > 0 && p.run.Progress != nil && p.run.at.Step%every == 0 {
		if err := p.log(loss); err != nil {
			return err
		}
	}
	p.redraw()
	return nil
}

// log writes a line about the current step.
func (p *progress) log(loss *torch.Tensor) error {
	r := p.run
	value, err := loss.Float64()
	if err != nil {
		return err
	}
	of := ""
	if p.batches > 0 {
		of = fmt.Sprintf(" of %d", p.batches)
	}
	p.clear()
	fmt.Fprintf(r.Progress, "epoch %d of %d  step %d%s  loss %.4f  lr %.3g  %.0f samples/s\n", r.at.Epoch+1, r.Epochs,
		r.at.Batches, of, value, r.at.LR, float64(p.samples*r.job.size())/time.Since(p.epochAt).Seconds())
	return nil
}

func (p *progress) redraw() {
	if !p.terminal {
		return
	}
	if p.bar == nil {
		total := p.batches
		if total == 0 {
			total = -1
		}
		p.bar = progressbar.NewOptions(total, progressbar.OptionSetWriter(p.run.Progress),
			progressbar.OptionSetWidth(20),
			progressbar.OptionClearOnFinish(), progressbar.OptionSetPredictTime(false))
	}
	now := time.Now()
	if now.Sub(p.drawn) < 200*time.Millisecond {
		return
	}
	p.drawn = now
	p.bar.Describe(p.text(now, p.run.Feed.Stats(), memory(p.run.Feed.Device())))
	p.bar.Set(p.run.at.Batches) // an error can only come from drawing
}

// text describes the current epoch at time now, with the feed's statistics at that time. memory is
// "-" if it is not known.
func (p *progress) text(now time.Time, stats prefetcher.Stats, memory string) string {
	r := p.run
	seconds := now.Sub(p.epochAt).Seconds()
	text := fmt.Sprintf("epoch %d of %d  %.0f samples/s  waited %.1f %%", r.at.Epoch+1, r.Epochs,
		float64(p.samples*r.job.size())/seconds,
		100*waitShare(p.before, stats, seconds))
	if memory != "-" {
		text += "  " + memory
	}
	if done := r.at.Step - p.first; p.batches > 0 && done > 0 {
		left := (r.Epochs-r.at.Epoch)*p.batches - r.at.Batches
		text += "  left " + (now.Sub(p.begin) / time.Duration(done) * time.Duration(left)).Round(time.Second).String()
	}
	return text
}

// memory returns the training's memory as text. On a GPU this is the memory that LibTorch has
// reserved. On the CPU it is the resident memory of the process, and the text says so. If the
// number cannot be read, memory returns "-": that is no reason to end the training.
func memory(device cuda.Device) string {
	if device == cuda.CPU {
		bytes, err := resident.Bytes()
		if err != nil {
			return "-"
		}
		return gigabytes(bytes) + " RSS"
	}
	m, err := device.Memory()
	if err != nil {
		return "-"
	}
	return gigabytes(m.Reserved)
}

func gigabytes(bytes int64) string { return fmt.Sprintf("%.2f GB", float64(bytes)/1e9) }

// clear removes the bar.
func (p *progress) clear() {
	if p.bar != nil {
		p.bar.Clear()
		p.bar = nil
	}
}

const columns = "%5s  %10s  %9s  %9s  %9s  %10s  %9s  %7s  %11s  %s"

// epoch prints the line of a complete epoch.
func (p *progress) epoch(e Epoch) {
	p.clear()
	w := p.run.Progress
	if w == nil {
		return
	}
	if !p.header {
		p.header = true
		measure := "test top-1"
		if p.run.MultiLabel {
			measure = "test mAP"
		}
		printRow(w, "epoch", "lr at end", "loss", "top-1", "test loss", measure, "samples/s", "waited", "memory", "best")
	}
	test, top1 := "-", "-"
	if e.Eval != nil {
		test, top1 = fmt.Sprintf("%.4f", e.Eval.Loss), e.Eval.share()
	}
	held := gigabytes(e.ReservedBytes)
	if device := p.run.Feed.Device(); device == cuda.CPU {
		held = memory(device)
	}
	best := ""
	if e.Best {
		best = "*"
	}
	printRow(w, fmt.Sprint(e.Epoch), fmt.Sprintf("%.3g", e.LR), fmt.Sprintf("%.4f", e.Train.Loss),
		e.Train.share(), test, top1,
		fmt.Sprintf("%.0f", e.SamplesPerSecond), fmt.Sprintf("%.1f %%", 100*e.WaitShare), held, best)
}

func printRow(w io.Writer, cells ...any) {
	fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf(columns, cells...), " "))
}

// share returns the top-1 accuracy, or the mean average precision, as text.
func (m *Metrics) share() string {
	if m.MAP > 0 {
		return fmt.Sprintf("%.4f", m.MAP)
	}
	if m.Classes == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*m.Top1)
}

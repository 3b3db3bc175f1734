package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

//go:embed pytorch_train.py
var pytorchTrain string

// trainReport is the output of train.
type trainReport struct {
	Device   string      `json:"device"`
	LibTorch string      `json:"libtorch"`
	CUDA     string      `json:"cuda"`
	Go       string      `json:"go"`
	CPUs     int         `json:"cpus"`
	Method   string      `json:"method"`
	Rows     []*trainRow `json:"rows"`
	Issue    []*issueRow `json:"issue,omitempty"` // on a GPU
	First    []*firstRow `json:"first_step,omitempty"`
	Fed      []*fedRow   `json:"fed,omitempty"`
	// PythonNote says why PyTorch's figures are null or not comparable.
	PythonNote string `json:"python_note,omitempty"`
}

// trainRow is a network, a batch size and a way to run a step, on data in device memory.
type trainRow struct {
	Model   string       `json:"model"`
	Batch   int          `json:"batch"`
	Mode    string       `json:"mode"` // "eager" or "graph"
	Unit    string       `json:"unit"` // "images" or "tokens"
	Go      *trainFigure `json:"go"`
	PyTorch *trainFigure `json:"pytorch"`
	// Ratio is Go's rate divided by PyTorch's.
	Ratio float64 `json:"ratio,omitempty"`
	// Error says why there is no figure for Go.
	Error string `json:"error,omitempty"`
	// MemoryBytes is the peak of device memory that LibTorch reserved in Go.
	MemoryBytes int64 `json:"memory_bytes,omitempty"`
}

type trainFigure struct {
	PerSecond float64 `json:"per_second"` // images or tokens
	StepMS    float64 `json:"step_ms"`
	CPUMS     float64 `json:"cpu_ms"` // of all threads of the process, per step
}

// stepTimes holds milliseconds per step.
type stepTimes struct {
	MS    float64 `json:"ms"`
	CPUMS float64 `json:"cpu_ms"`
}

// issueRow compares the host's time per step.
type issueRow struct {
	Model   string       `json:"model"`
	Mode    string       `json:"mode"`
	Go      *issueFigure `json:"go"`
	PyTorch *issueFigure `json:"pytorch"`
	// Ratio is Go's issue time divided by PyTorch's without a graph.
	Ratio float64 `json:"ratio_to_eager,omitempty"`
}

// issueFigure is the host's time per step. Drain is the time that the device still needs
// afterwards. If it is less than a step, the device was never far behind, so the host never waited
// for it.
type issueFigure struct {
	IssueMS float64 `json:"issue_ms"`
	DrainMS float64 `json:"drain_ms"`
	issueParts
}

// issueParts splits an issue time without a graph. The optimizer's part is the rest of the step:
// the optimizer, and freeing the step's results and gradients.
type issueParts struct {
	ForwardMS   float64 `json:"forward_ms,omitempty"`
	BackwardMS  float64 `json:"backward_ms,omitempty"`
	OptimizerMS float64 `json:"optimizer_ms,omitempty"`
}

func (p issueParts) String() string {
	if p == (issueParts{}) {
		return "-"
	}
	return fmt.Sprintf("%.2f + %.2f + %.2f", p.ForwardMS, p.BackwardMS, p.OptimizerMS)
}

// trainBench runs the measurements of train.
type trainBench struct {
	device  cuda.Device
	size    int
	context int
	seconds float64
	models  []string
	batches []int // nil means defaultBatches
	first   int
	archive string
	memory  int64
	workers int
	decode  prefetcher.Decode
	engines bool
	sms     int // that decode; 0 means all
	// noGraphs skips the graph modes.
	noGraphs bool
}

// defaultBatches returns the batch sizes to measure a network with.
func defaultBatches(model string) []int {
	switch {
	case isGPT(model):
		return []int{8}
	case strings.HasPrefix(model, "vit"):
		return []int{128, 64}
	}
	return []int{256, 64, 32}
}

func isGPT(model string) bool { return strings.HasPrefix(model, "gpt") }

func (b *trainBench) batchesOf(model string) []int {
	if b.batches != nil {
		return b.batches
	}
	return defaultBatches(model)
}

// modes returns the ways to run a step.
func (b *trainBench) modes() []string {
	if b.device == cuda.CPU || b.noGraphs {
		return []string{"eager"}
	}
	return []string{"eager", "graph"}
}

// issues reports whether issue times are measured. On the CPU an operator returns only when it is
// done, so there are none.
func (b *trainBench) issues() bool { return b.device != cuda.CPU }

// benchTrain measures training steps, and PyTorch's in the same run.
func benchTrain(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream-lab train", "Measures training steps on data that lie on the device, "+
		"eager and, on a GPU, as CUDA graphs: ResNets with SGD and momentum, ViT and GPT-2\n"+
		"with AdamW; on a GPU under autocast to bfloat16, images in channels_last. PyTorch does the same "+
		"in the same run, if a python3 can import\n"+
		"torch. The issue time is the host's for a step whose input is so small that the device waits "+
		"for the host.", stderr)
	var b trainBench
	asJSON := set.Bool("json", false, "print one JSON object")
	tableToo := set.Bool("table", false, "with -json: print the table too, on standard error")
	python := set.String("python", "python3", "the Python whose torch is the peer; empty for none")
	device := set.String("device", "", "cpu, cuda, cuda:1, ... (default: the first GPU, else the CPU)")
	names := set.String("models", "resnet50,resnet18,vit_b_16,gpt2", "the networks")
	sizes := set.String("batches", "",
		"samples a batch (default: 256,64,32 for ResNets, 128,64 for a ViT, 8 for a GPT-2)")
	set.IntVar(&b.size, "size", 224, "pixels of an image's side")
	set.IntVar(&b.context, "context", 1024, "tokens of a sequence")
	set.Float64Var(&b.seconds, "seconds", 0.7, "how long to measure each, after the warm-up")
	set.IntVar(&b.first, "first", 0, "measure so many times how long a new process takes until it has "+
		"made one step of the first network at its smallest batch")
	set.StringVar(&b.archive, "archive", "",
		"`FILE` (.tgz, .tar, .zip): feed the first batch size of every network of images from it too")
	set.Int64Var(&b.memory, "memory", fedMemory, "`MB` of compressed images: a .tgz that fits in is held in memory")
	set.IntVar(&b.workers, "workers", 0, "goroutines that decode (default: the number of CPUs)")
	set.IntVar(&b.sms, "decode-sms", 0, cli.DecodeSMsHelp)
	decode := set.String("decode", "host",
		"where images are decoded: host, device, or auto, which is the device if it can")
	set.BoolVar(&b.engines, "engines", false, "with -archive, on a GPU: measure resident steps beside "+
		"the GPU's JPEG engines too, which decode the archive meanwhile (nvJPEG)")
	threads := cli.ThreadsOption(set)
	one := set.Bool("one-step", false,
		"only make one step of the first network at its smallest batch, and print a line: what -first runs")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	var err error
	if b.decode, err = cli.ParseDecode(*decode); err != nil {
		return err
	}
	if err := cli.CheckSMs(b.sms, b.decode); err != nil {
		return err
	}
	if err := cli.SetThreads(*threads); err != nil {
		return err
	}
	if err := b.check(*names, *sizes, *device); err != nil {
		return err
	}
	if *one {
		return b.oneStep(stdout)
	}
	name, err := cli.DeviceName(b.device)
	if err != nil {
		return err
	}
	report := trainReport{
		Device: name, LibTorch: capi.LibTorchVersion(), CUDA: capi.CUDAVersion(), Go: runtime.Version(),
		CPUs: runtime.NumCPU(),
		Method: fmt.Sprintf("images of %d x %d pixels, sequences of %d tokens, about %v s of steps each; "+
			"issue times: %s", b.size, b.size, b.context, b.seconds, issueMethod),
	}
	if err := b.measureFirst(ctx, *python, &report, stderr); err != nil {
		return err
	}
	if err := b.run(ctx, &report, stderr); err != nil {
		return err
	}
	if err := b.feed(ctx, &report, stderr); err != nil {
		return err
	}
	if *python == "" {
		report.PythonNote = "not requested"
	} else if err := b.comparePython(ctx, *python, &report, stderr); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		report.PythonNote = err.Error()
	}
	if *asJSON {
		err := cli.WriteJSON(stdout, report)
		if *tableToo {
			err = errors.Join(err, report.table(stderr))
		}
		return errors.Join(err, report.failure())
	}
	return errors.Join(report.table(stdout), report.failure())
}

// failure returns an error if a figure for Go is missing.
func (r *trainReport) failure() error {
	var errs []error
	for _, row := range r.Rows {
		if row.Error != "" {
			errs = append(errs, fmt.Errorf("train: %s, batch %d, %s: %s", row.Model, row.Batch, row.Mode, row.Error))
		}
	}
	return errors.Join(errs...)
}

// check validates the options.
func (b *trainBench) check(names, sizes, device string) error {
	b.models, b.device = strings.Split(names, ","), cuda.Device(0)
	var err error
	if b.device, err = cli.PickDevice(device); err != nil {
		return err
	}
	for _, text := range strings.Split(sizes, ",") {
		if sizes == "" {
			break
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 2 {
			return cli.Usagef("train: -batches %s: numbers from 2 on, separated by commas", sizes)
		}
		b.batches = append(b.batches, n)
	}
	switch {
	case !(b.seconds > 0) || b.seconds > 3600:
		return cli.UsageError{Message: "train: -seconds is more than 0 and at most 3600"}
	case b.context < 8 || b.context > 1024:
		return cli.UsageError{Message: "train: -context is from 8 to 1024, the positions of a GPT-2"}
	case b.first < 0 || b.memory < 1 || b.workers < 0:
		return cli.UsageError{Message: "train: -first and -workers are at least 0, and -memory at least 1"}
	}
	if err := cli.CheckSize(b.size, cli.MinSize); err != nil {
		return err
	}
	for _, name := range b.models {
		if !slices.Contains(models.Names(), name) {
			return cli.Usagef("train: -models %s: there is no network %q: want some of %s", names, name,
				strings.Join(models.Names(), ", "))
		}
		if strings.HasPrefix(name, "vit") && b.size%16 != 0 {
			return cli.Usagef("train: -size %d: a ViT needs a multiple of 16", b.size)
		}
	}
	return nil
}

// run measures every row in Go.
func (b *trainBench) run(ctx context.Context, report *trainReport, stderr io.Writer) error {
	restore, err := searchAlgorithms()
	if err != nil {
		return err
	}
	defer restore()
	for _, name := range b.models {
		batches := b.batchesOf(name)
		for i, batch := range batches {
			for _, mode := range b.modes() {
				if err := ctx.Err(); err != nil {
					return err
				}
				row := &trainRow{Model: name, Batch: batch, Mode: mode, Unit: "images"}
				if isGPT(name) {
					row.Unit = "tokens"
				}
				fmt.Fprintf(stderr, "measuring %s, batch %d, %s\n", name, batch, mode)
				issue, err := b.measure(row, b.issues() && i == len(batches)-1)
				report.Rows = append(report.Rows, row)
				if err != nil { // the other rows still count
					row.Go, row.Error = nil, err.Error()
				} else if issue != nil {
					report.Issue = append(report.Issue, issue)
				}
			}
		}
	}
	return nil
}

// peerJob is the argument of pytorch_train.py.
type peerJob struct {
	Device  string    `json:"device"`
	Size    int       `json:"size"`
	Context int       `json:"context"`
	Seconds float64   `json:"seconds"`
	Rows    []peerRow `json:"rows"`
	OneStep bool      `json:"one_step"`
	Threads int       `json:"threads"` // threads per operator on the CPU
}

type peerRow struct {
	Model string `json:"model"`
	Batch int    `json:"batch"`
	Issue bool   `json:"issue"` // also measure the issue time
}

func (b *trainBench) peerJob() peerJob {
	return peerJob{Device: b.device.String(), Size: b.size, Context: b.context, Seconds: b.seconds,
		Threads: torch.NumThreads()}
}

// comparePython adds PyTorch's figures.
func (b *trainBench) comparePython(ctx context.Context, python string, report *trainReport, stderr io.Writer) error {
	job := b.peerJob()
	for _, name := range b.models {
		batches := b.batchesOf(name)
		for i, batch := range batches {
			job.Rows = append(job.Rows, peerRow{Model: name, Batch: batch, Issue: b.issues() && i == len(batches)-1})
		}
	}
	text, err := json.Marshal(job)
	if err != nil {
		return err
	}
	fmt.Fprintf(stderr, "measuring the same in PyTorch, by %s\n", printable.Name(python))
	var peer struct {
		Torch  string                  `json:"torch"`
		Steps  map[string]stepTimes    `json:"steps"`
		Issue  map[string]*issueFigure `json:"issue"`
		Errors []string                `json:"errors"`
	}
	if err := runPython(ctx, python, pytorchTrain, &peer, string(text)); err != nil {
		return err
	}
	for _, row := range report.Rows {
		times := peer.Steps[fmt.Sprintf("%s/%d/%s", row.Model, row.Batch, row.Mode)]
		if times.MS <= 0 {
			continue
		}
		row.PyTorch = b.figure(row, times)
		if row.Go != nil {
			row.Ratio = row.Go.PerSecond / row.PyTorch.PerSecond
		}
	}
	for _, row := range report.Issue {
		row.PyTorch = peer.Issue[row.Model+"/"+row.Mode]
		if eager := peer.Issue[row.Model+"/eager"]; eager != nil && eager.IssueMS > 0 {
			row.Ratio = row.Go.IssueMS / eager.IssueMS
		}
	}
	if len(peer.Errors) > 0 {
		return fmt.Errorf("%s: %s", python, strings.Join(peer.Errors, "; "))
	}
	if !strings.HasPrefix(peer.Torch, report.LibTorch) {
		report.PythonNote = "another LibTorch: torch " + peer.Torch
	}
	return nil
}

// figure converts the time of a step to a rate.
func (b *trainBench) figure(row *trainRow, times stepTimes) *trainFigure {
	perStep := row.Batch
	if isGPT(row.Model) {
		perStep *= b.context
	}
	return &trainFigure{PerSecond: float64(perStep) / times.MS * 1e3, StepMS: times.MS, CPUMS: times.CPUMS}
}

func (r *trainReport) table(w io.Writer) error {
	fmt.Fprintf(w, "%s, LibTorch %s, CUDA %s, %s, %d CPUs; %s\n", r.Device, r.LibTorch, r.CUDA, r.Go, r.CPUs, r.Method)
	table := func(title, header string, rows func(*tabwriter.Writer)) error {
		fmt.Fprintf(w, "\n%s\n", title)
		t := printable.NewTable(w, tabwriter.AlignRight)
		fmt.Fprintln(t, header)
		rows(t)
		return t.Flush()
	}
	err := table("Resident data, a second",
		"network\tbatch\tmode\tGo\tPyTorch\tratio\tCPU ms a step\tPyTorch\tGB\t", func(t *tabwriter.Writer) {
			for _, row := range r.Rows {
				ours, theirs, ratio, cpu, theirCPU := "-", "-", "-", "-", "-"
				if row.Go != nil {
					ours, cpu = fmt.Sprintf("%.0f %s", row.Go.PerSecond, row.Unit), fmt.Sprintf("%.1f", row.Go.CPUMS)
				}
				if row.PyTorch != nil {
					theirs, theirCPU = fmt.Sprintf("%.0f", row.PyTorch.PerSecond), fmt.Sprintf("%.1f",
						row.PyTorch.CPUMS)
				}
				if row.Ratio > 0 {
					ratio = fmt.Sprintf("%.3f", row.Ratio)
				}
				fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%.1f\t\n", row.Model, row.Batch, row.Mode, ours,
					theirs, ratio, cpu, theirCPU, float64(row.MemoryBytes)/1e9)
			}
		})
	if len(r.Issue) > 0 {
		header := "network\tmode\tGo\tPyTorch\tratio to PyTorch, eager\tGo: forward + backward + optimizer\tPyTorch\t"
		err = errors.Join(err, table(
			"The host's time for a step, ms (what the device still had to do afterwards)", header,
			func(t *tabwriter.Writer) {
				for _, row := range r.Issue {
					theirs, ratio, parts := "-", "-", "-"
					if p := row.PyTorch; p != nil {
						theirs, ratio, parts = fmt.Sprintf("%.2f (%.2f)", p.IssueMS,
							p.DrainMS), fmt.Sprintf("%.2f", row.Ratio), p.String()
					}
					fmt.Fprintf(t, "%s\t%s\t%.2f (%.2f)\t%s\t%s\t%v\t%s\t\n", row.Model, row.Mode,
						row.Go.IssueMS, row.Go.DrainMS, theirs, ratio, row.Go.issueParts, parts)
				}
			}))
	}
	if len(r.First) > 0 {
		err = errors.Join(err, table("From the start of a process to the end of its first step, s (median)",
			"network\tbatch\tGo\tPyTorch\tratio\t", func(t *tabwriter.Writer) {
				for _, row := range r.First {
					theirs, ratio := "-", "-"
					if row.PyTorch > 0 {
						theirs, ratio = fmt.Sprintf("%.2f", row.PyTorch), fmt.Sprintf("%.2f", row.Ratio)
					}
					fmt.Fprintf(t, "%s\t%d\t%.2f\t%s\t%s\t\n", row.Model, row.Batch, row.Go, theirs, ratio)
				}
			}))
	}
	if len(r.Fed) > 0 {
		err = errors.Join(err, table("Fed from "+r.Fed[0].Archive,
			"network\tbatch\tmode\timages/s\tresident\tratio\tshare waited\tworkers\thost "+
				"cores\tresident\t", func(t *tabwriter.Writer) {
				for _, row := range r.Fed {
					fmt.Fprintf(t, "%s\t%d\t%s\t%.0f\t%.0f\t%.3f\t%.3f\t%d\t%.1f\t%.1f\t\n", row.Model,
						row.Batch, row.Mode, row.ImagesPerSecond, row.Resident, row.Share, row.WaitShare,
						row.Workers, row.HostCores, row.ResidentHostCores)
				}
			}))
		for _, row := range r.Fed {
			if e := row.Engines; e != nil {
				_, note := fmt.Fprintf(w, "%s beside the JPEG engines: %s\n", row.Model, e)
				err = errors.Join(err, note)
			}
		}
	}
	if r.PythonNote != "" {
		_, note := fmt.Fprintf(w, "\nPyTorch: %s\n", r.PythonNote)
		err = errors.Join(err, note)
	}
	return err
}

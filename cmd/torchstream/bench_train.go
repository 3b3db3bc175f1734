package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

//go:embed pytorch_train.py
var pytorchTrain string

// trainReport is the output of bench train.
type trainReport struct {
	Device   string      `json:"device"`
	LibTorch string      `json:"libtorch"`
	CUDA     string      `json:"cuda"`
	Go       string      `json:"go"`
	CPUs     int         `json:"cpus"`
	Method   string      `json:"method"`
	Rows     []*trainRow `json:"rows"`
	// PythonNote is the reason why PyTorch's figures are null or not comparable.
	PythonNote string `json:"python_note,omitempty"`
}

// trainRow is one network, batch size and way to run a step.
type trainRow struct {
	Model   string       `json:"model"`
	Batch   int          `json:"batch"`
	Mode    string       `json:"mode"` // "eager" or "graph"
	Go      *trainFigure `json:"go"`
	PyTorch *trainFigure `json:"pytorch"`
	// Ratio is images per second, and IssueRatio the issue time, in Go by those of PyTorch.
	Ratio      float64 `json:"ratio,omitempty"`
	IssueRatio float64 `json:"issue_ratio,omitempty"`
	// MemoryBytes is what LibTorch reserved on the device at most, in Go.
	MemoryBytes int64 `json:"memory_bytes,omitempty"`
}

type trainFigure struct {
	ImagesPerSecond float64 `json:"images_per_second"`
	StepMS          float64 `json:"step_ms"`
	IssueMS         float64 `json:"issue_ms"` // of the host, for a step that finds the queue empty
}

// trainBench is what bench train measures.
type trainBench struct {
	device  cuda.Device
	size    int
	seconds float64
	models  []string
	batches []int
}

// benchTrain measures training steps on data that lie on the device, beside PyTorch in the same
// run.
func benchTrain(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := flags("bench train", "Measures training steps of ResNets: autocast to bfloat16, channels_last, SGD with momentum, data on the device; eager and, on a GPU, as\n"+
		"CUDA graphs; beside PyTorch in the same run, if a python3 can import torch. The issue time is the host's for one step.", stderr)
	asJSON := set.Bool("json", false, "print one JSON object")
	python := set.String("python", "python3", "the Python whose torch is the peer; empty for none")
	device := set.String("device", "", "cpu, cuda, cuda:1, ... (default: the first GPU, else the CPU)")
	names := set.String("models", "resnet50,resnet18", "the networks, by torchvision's names")
	sizes := set.String("batches", "256,64,32", "images a batch")
	size := set.Int("size", 224, "pixels of an image's side")
	seconds := set.Float64("seconds", 0.7, "how long to measure each, after the warm-up")
	if err := parse(set, args, 0); err != nil {
		return err
	}
	b := trainBench{device: cuda.Device(0), size: *size, seconds: *seconds, models: strings.Split(*names, ",")}
	if cuda.DeviceCount() == 0 {
		b.device = cuda.CPU
	}
	if *device != "" {
		var err error
		if b.device, err = parseDevice(*device); err != nil {
			return err
		}
	}
	for _, text := range strings.Split(*sizes, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 2 {
			return usageError{fmt.Sprintf("bench train: -batches %s: numbers from 2 on, separated by commas", *sizes)}
		}
		b.batches = append(b.batches, n)
	}
	if *size < 32 || *seconds <= 0 {
		return usageError{"bench train: -size is at least 32, and -seconds more than 0"}
	}
	for _, name := range b.models {
		if !slices.Contains(models.Names(), name) || strings.HasPrefix(name, "gpt") {
			return usageError{fmt.Sprintf("bench train: -models %s: there is no classifier %q", *names, name)}
		}
	}
	report := trainReport{
		Device: b.device.String(), LibTorch: capi.LibTorchVersion(), CUDA: capi.CUDAVersion(), Go: runtime.Version(), CPUs: runtime.NumCPU(),
		Method: fmt.Sprintf("%d by %d pixels, about %v s of steps each; issue_ms is the median of 9", *size, *size, *seconds),
	}
	if b.device != cuda.CPU {
		properties, err := b.device.Properties()
		if err != nil {
			return err
		}
		report.Device = properties.Name
	}
	if err := b.run(ctx, &report); err != nil {
		return err
	}
	if *python == "" {
		report.PythonNote = "not requested"
	} else if err := b.comparePython(ctx, *python, &report); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		report.PythonNote = err.Error()
	}
	if *asJSON {
		return writeJSON(stdout, report)
	}
	return report.table(stdout)
}

// run measures every row in Go.
func (b *trainBench) run(ctx context.Context, report *trainReport) error {
	before, err := torch.ProcessNumerics()
	if err != nil {
		return err
	}
	during := before
	during.Benchmark = true // as the peer does
	if err := torch.SetProcessNumerics(during); err != nil {
		return err
	}
	defer torch.SetProcessNumerics(before)
	modes := []string{"eager"}
	if b.device != cuda.CPU {
		modes = append(modes, "graph")
	}
	for _, name := range b.models {
		for _, batch := range b.batches {
			for _, mode := range modes {
				if err := ctx.Err(); err != nil {
					return err
				}
				row := &trainRow{Model: name, Batch: batch, Mode: mode}
				if err := b.measure(row); err != nil {
					return fmt.Errorf("bench train: %s, batch %d, %s: %w", name, batch, mode, err)
				}
				report.Rows = append(report.Rows, row)
			}
		}
	}
	return nil
}

// measure trains one network for a while. All its memory is free afterwards.
func (b *trainBench) measure(row *trainRow) (err error) {
	scope := torch.NewScope("bench train")
	defer func() {
		scope.Close()
		if b.device != cuda.CPU {
			err = errors.Join(err, cuda.EmptyCache(), b.device.ResetPeak())
		}
	}()
	net, err := models.ByName(row.Model, models.Options{})
	if err != nil {
		return err
	}
	defer nn.Close(net)
	if err := errors.Join(nn.To(net, b.device), nn.ToMemoryFormat(net, torch.ChannelsLast)); err != nil {
		return err
	}
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.01, Momentum: 0.9, Capturable: true})
	if err != nil {
		return err
	}
	defer opt.Close()
	images, err := torch.Randn(b.device, torch.Float32, int64(row.Batch), 3, int64(b.size), int64(b.size))
	if err != nil {
		return err
	}
	images = scope.Own(scope.Own(images).Contiguous(torch.ChannelsLast))
	numbers := make([]int64, row.Batch)
	for i := range numbers {
		numbers[i] = int64(i % 1000)
	}
	labels, err := torch.FromInt64s(numbers)
	if err != nil {
		return err
	}
	labels = scope.Own(scope.Own(labels).To(b.device))
	step, err := train.NewStepper(train.StepperOptions{Model: net, Optimizer: opt, Autocast: torch.BFloat16, Graph: row.Mode == "graph"})
	if err != nil {
		return err
	}
	defer step.Close()
	if row.Go, err = b.time(row.Batch, func() error {
		// Results join a scope that ends with the step, as those of a batch do.
		turn := torch.NewScope("step")
		defer turn.Close()
		_, _, err := step.Step(images.In(turn), labels.In(turn))
		return err
	}); err != nil {
		return err
	}
	if s := step.Stats(); row.Mode == "graph" && (s.Captures != 1 || s.Replays != s.Steps-1) {
		return fmt.Errorf("%d of %d steps replayed a graph, and %d were captured", s.Replays, s.Steps, s.Captures)
	}
	if b.device != cuda.CPU {
		memory, err := b.device.Memory()
		if err != nil {
			return err
		}
		row.MemoryBytes = memory.PeakReserved
	}
	return nil
}

// time measures a step after a warm-up of three. It holds the OS thread, because LibTorch plans
// cuDNN's convolutions for each thread anew.
func (b *trainBench) time(batch int, step func() error) (*trainFigure, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	wait := func() error {
		if b.device == cuda.CPU {
			return nil
		}
		return b.device.Synchronize()
	}
	repeat := func(n int) (time.Duration, error) {
		if err := wait(); err != nil {
			return 0, err
		}
		start := time.Now()
		for range n {
			if err := step(); err != nil {
				return 0, err
			}
		}
		err := wait()
		return time.Since(start), err
	}
	if _, err := repeat(3); err != nil {
		return nil, err
	}
	took, err := repeat(3)
	if err != nil {
		return nil, err
	}
	n := max(5, int(b.seconds/max(1e-6, took.Seconds()/3)))
	if took, err = repeat(n); err != nil {
		return nil, err
	}
	issue := make([]time.Duration, 9)
	for i := range issue {
		start := time.Now()
		if err := step(); err != nil {
			return nil, err
		}
		issue[i] = time.Since(start)
		if err := wait(); err != nil {
			return nil, err
		}
	}
	slices.Sort(issue)
	ms := took.Seconds() * 1e3 / float64(n)
	return &trainFigure{ImagesPerSecond: float64(batch) / ms * 1e3, StepMS: ms, IssueMS: issue[4].Seconds() * 1e3}, nil
}

// comparePython adds PyTorch's figures.
func (b *trainBench) comparePython(ctx context.Context, python string, report *trainReport) error {
	sizes := make([]string, len(b.batches))
	for i, n := range b.batches {
		sizes[i] = strconv.Itoa(n)
	}
	var peer struct {
		Torch string                  `json:"torch"`
		Rows  map[string]*trainFigure `json:"rows"`
	}
	if err := runPython(ctx, python, pytorchTrain, &peer, b.device.String(), strconv.Itoa(b.size), fmt.Sprint(b.seconds),
		strings.Join(b.models, ","), strings.Join(sizes, ",")); err != nil {
		return err
	}
	for _, row := range report.Rows {
		f := peer.Rows[fmt.Sprintf("%s/%d/%s", row.Model, row.Batch, row.Mode)]
		if f == nil || f.StepMS <= 0 {
			return fmt.Errorf("%s: no figure of %s, batch %d, %s", python, row.Model, row.Batch, row.Mode)
		}
		f.ImagesPerSecond = float64(row.Batch) / f.StepMS * 1e3
		row.PyTorch, row.Ratio, row.IssueRatio = f, row.Go.ImagesPerSecond/f.ImagesPerSecond, row.Go.IssueMS/f.IssueMS
	}
	if !strings.HasPrefix(peer.Torch, report.LibTorch) {
		report.PythonNote = "another LibTorch: torch " + peer.Torch
	}
	return nil
}

func (r *trainReport) table(w io.Writer) error {
	fmt.Fprintf(w, "%s, LibTorch %s, CUDA %s, %s, %d CPUs; %s\n\n", r.Device, r.LibTorch, r.CUDA, r.Go, r.CPUs, r.Method)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "network\tbatch\tmode\timages/s\tPyTorch\tratio\tissue ms\tPyTorch\tratio\tGB\t")
	for _, row := range r.Rows {
		theirs, ratio, issue, share := "-", "-", "-", "-"
		if p := row.PyTorch; p != nil {
			theirs, ratio = fmt.Sprintf("%.0f", p.ImagesPerSecond), fmt.Sprintf("%.3f", row.Ratio)
			issue, share = fmt.Sprintf("%.2f", p.IssueMS), fmt.Sprintf("%.2f", row.IssueRatio)
		}
		fmt.Fprintf(table, "%s\t%d\t%s\t%.0f\t%s\t%s\t%.2f\t%s\t%s\t%.1f\t\n", row.Model, row.Batch, row.Mode, row.Go.ImagesPerSecond, theirs, ratio,
			row.Go.IssueMS, issue, share, float64(row.MemoryBytes)/1e9)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if r.PythonNote != "" {
		_, err := fmt.Fprintf(w, "\nPyTorch: %s\n", r.PythonNote)
		return err
	}
	return nil
}

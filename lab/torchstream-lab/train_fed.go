package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/loaderbench"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/lab/internal/labcapi"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// firstRow is the time from starting a process to the end of its first step.
type firstRow struct {
	Model   string  `json:"model"`
	Batch   int     `json:"batch"`
	Go      float64 `json:"go_seconds"`
	PyTorch float64 `json:"pytorch_seconds,omitempty"`
	Ratio   float64 `json:"ratio,omitempty"`
}

// fedRow is a training with batches from an archive.
type fedRow struct {
	Archive         string  `json:"archive"`
	Model           string  `json:"model"`
	Batch           int     `json:"batch"`
	Mode            string  `json:"mode"`
	Decode          string  `json:"decode"`               // where images are decoded
	DecodeSMs       int     `json:"decode_sms,omitempty"` // maximum number of decoding multiprocessors; 0 means all
	Workers         int     `json:"workers"`
	ImagesPerSecond float64 `json:"images_per_second"`
	// Resident is the rate of the same steps on data in device memory, measured in turn with the
	// fed steps. Share is the median over the rounds.
	Resident float64 `json:"resident_images_per_second"`
	Share    float64 `json:"share_of_resident"`
	// OnDevice is the share of the images that were sent to the device for decoding.
	OnDevice float64 `json:"decoded_on_device"`
	// WaitShare is the share of the time in which the device waited for a batch.
	WaitShare float64 `json:"wait_share"`
	// HostCores is the CPU time per second of the whole process: reading, decoding and training.
	// ResidentHostCores is the same for the resident steps, so the difference is the cost of
	// feeding.
	HostCores         float64 `json:"host_cores"`
	ResidentHostCores float64 `json:"resident_host_cores"`
	// Engines holds the resident rate while the GPU's JPEG engines decode. It needs -engines and a
	// GPU.
	Engines *enginesRow `json:"beside_engines,omitempty"`
}

// enginesRow is a training on data in device memory, while the GPU's JPEG engines decode the
// archive's images at full size and as fast as they can. The decoded images are not used.
type enginesRow struct {
	ImagesPerSecond float64 `json:"images_per_second"` // of the training
	Share           float64 `json:"share_of_resident"`
	Decoded         float64 `json:"decoded_per_second"` // by the engines
	// WhyNot says why there is no result.
	WhyNot string `json:"why_not,omitempty"`
}

func (e *enginesRow) String() string {
	if e.WhyNot != "" {
		return "not measured: " + e.WhyNot
	}
	return fmt.Sprintf("%.0f images/s, %.3f of resident, while they decode %.0f images/s",
		e.ImagesPerSecond, e.Share, e.Decoded)
}

const oneStepDone = "first step done"

// smallest returns the batch size of -first.
func (b *trainBench) smallest() int { return slices.Min(b.batchesOf(b.models[0])) }

// oneStep runs one step and reports it.
func (b *trainBench) oneStep(stdout io.Writer) (err error) {
	t, err := b.newTrainee(b.models[0], "eager")
	if err != nil {
		return err
	}
	scope := torch.NewScope("train")
	defer func() { err = errors.Join(err, scope.Close(), t.close()) }()
	input, target, err := t.data(scope, b.smallest(), b.size, b.context)
	if err != nil {
		return err
	}
	if _, err := b.repeat(1, t.call(input, target)); err != nil {
		return err
	}
	_, err = fmt.Fprintln(stdout, oneStepDone)
	return err
}

// measureFirst starts Go and Python processes in turn, and measures the time until a step is done.
// Before that, one process of each fills the system's file cache.
func (b *trainBench) measureFirst(ctx context.Context, python string, report *trainReport, stderr io.Writer) error {
	if b.first == 0 {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	row := &firstRow{Model: b.models[0], Batch: b.smallest()}
	job := b.peerJob()
	job.OneStep, job.Rows = true, []peerRow{{Model: row.Model, Batch: row.Batch}}
	text, err := json.Marshal(job)
	if err != nil {
		return err
	}
	commands := [][]string{{self, "train", "-one-step", "-models", row.Model, "-batches",
		strconv.Itoa(row.Batch), "-size", strconv.Itoa(b.size),
		"-context", strconv.Itoa(b.context), "-device", b.device.String(), "-threads", strconv.Itoa(job.Threads)}}
	if python != "" {
		if python, err = exec.LookPath(python); err == nil {
			python, err = filepath.Abs(python)
		}
		if err == nil {
			commands = append(commands, []string{python, "-c", pytorchTrain, string(text)})
		}
	}
	fmt.Fprintf(stderr, "measuring the first step of a new process, %d times\n", b.first)
	seconds := make([][]float64, len(commands))
	for i := range b.first + 1 {
		for k, command := range commands {
			took, err := untilFirstStep(ctx, command)
			switch {
			case err != nil && k == 0:
				return err
			case err != nil: // comparePython gives the reason
				commands = commands[:1]
			case i > 0:
				seconds[k] = append(seconds[k], took.Seconds())
			}
		}
	}
	row.Go = median(seconds[0])
	if len(commands) > 1 {
		row.PyTorch = median(seconds[1])
		row.Ratio = row.Go / row.PyTorch
	}
	report.First = append(report.First, row)
	return nil
}

func median(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}

// untilFirstStep runs a command and measures the time until it prints that its step is done.
func untilFirstStep(ctx context.Context, command []string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, command[0], command[1:]...)
	c.Dir = os.TempDir() // in a clone of this project Python would import the folder torch
	out, err := c.StdoutPipe()
	if err != nil {
		return 0, err
	}
	start := time.Now()
	if err := c.Start(); err != nil {
		return 0, err
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	took := time.Since(start)
	io.Copy(io.Discard, out)
	if err := c.Wait(); err != nil {
		return 0, fmt.Errorf("%s: %w", command[0], err)
	}
	if line != oneStepDone+"\n" {
		return 0, fmt.Errorf("%s: it printed %q, and not that its step is done", command[0], line)
	}
	return took, nil
}

// feed trains on batches of the archive.
func (b *trainBench) feed(ctx context.Context, report *trainReport, stderr io.Writer) error {
	if b.archive == "" {
		return nil
	}
	restore, err := searchAlgorithms()
	if err != nil {
		return err
	}
	defer restore()
	progress, done := cli.ReadingProgress(stderr)
	_, err = imageloader.MakeIndex(ctx, b.archive, imageloader.Options{}, progress)
	done()
	if err != nil && !errors.Is(err, imageloader.ErrNeedsNoIndex) { // a zip or a directory
		return err
	}
	for _, name := range b.models {
		if isGPT(name) {
			continue
		}
		row := &fedRow{Archive: printable.Archive(b.archive), Model: name, Batch: b.batchesOf(name)[0],
			Mode: "eager", Decode: strings.ToLower(b.decode.String())}
		fmt.Fprintf(stderr, "measuring %s, batch %d, fed from %s\n", name, row.Batch, printable.ArchiveName(b.archive))
		if err := train.WithPrecedence(b.device, func() error { return b.measureFed(ctx, row) }); err != nil {
			return fmt.Errorf("train: %s from %s: %w", name, printable.ArchiveName(b.archive), err)
		}
		report.Fed = append(report.Fed, row)
	}
	return nil
}

// measureFed trains for a while, after a first pass over the archive.
func (b *trainBench) measureFed(ctx context.Context, row *fedRow) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	t, err := b.newTrainee(row.Model, row.Mode)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	scope := torch.NewScope("train")
	defer func() { err = errors.Join(err, scope.Close()) }()
	length := max(3*b.seconds, 3) / fedRounds
	if b.device == cuda.CPU {
		length = b.seconds
	}
	m := fedMeasurement{b: b, begin: b.wait, maximum: func(value int64) (int64, error) { return value, nil },
		over: func(steps int, took time.Duration) bool { return steps >= 2 && took.Seconds() >= length }}
	if err := m.run(ctx, t, scope, row.Batch, imageloader.Options{}); err != nil {
		return err
	}
	row.Workers, row.DecodeSMs = m.workers, m.sms
	images := float64(m.steps * row.Batch)
	row.ImagesPerSecond, row.Resident, row.Share = images/m.fed.took.Seconds(), images/m.still.took.Seconds(), median(m.shares)
	row.OnDevice = float64(m.decoded) / images
	row.WaitShare = m.waited.Seconds() / m.fed.took.Seconds()
	row.HostCores, row.ResidentHostCores = m.fed.cores(), m.still.cores()
	if b.engines && b.device != cuda.CPU {
		row.Engines, err = b.besideEngines(ctx, row, m.resident)
	}
	return err
}

// besideEngines runs steps while the JPEG engines decode the archive's images. It counts steps only
// once the engines are decoding, because nvJPEG allocates memory first.
func (b *trainBench) besideEngines(ctx context.Context, row *fedRow, step func() error) (*enginesRow, error) {
	data, sizes, err := readJPEGs(ctx, b.archive, peerBatches*row.Batch)
	if err != nil {
		return &enginesRow{WhyNot: err.Error()}, nil
	}
	const begun = 500 * time.Millisecond
	length := begun.Seconds() + max(3*b.seconds, 3)
	var rate labcapi.NVJPEGRate
	var failed error
	decoded := make(chan struct{})
	begin := time.Now()
	go func() {
		defer close(decoded)
		rate, failed = labcapi.NVJPEG(int32(b.device), labcapi.NVJPEGHardware, data, sizes, row.Batch, 2, length)
	}()
	steps, start, ended := 0, time.Time{}, false
	for !ended && err == nil {
		if start.IsZero() && time.Since(begin) >= begun {
			err = b.wait()
			steps, start = 0, time.Now()
		}
		err = errors.Join(err, step())
		steps++
		select {
		case <-decoded:
			ended = true
		default:
		}
	}
	err = errors.Join(err, b.wait())
	took := time.Since(start)
	<-decoded // the decoder uses the device
	switch {
	case err != nil:
		return nil, err
	case failed != nil:
		return &enginesRow{WhyNot: failed.Error()}, nil
	case start.IsZero():
		return &enginesRow{WhyNot: "a step takes longer than the measurement"}, nil
	}
	r := &enginesRow{ImagesPerSecond: float64(steps*row.Batch) / took.Seconds(),
		Decoded: float64(rate.Images) / rate.Seconds}
	r.Share = r.ImagesPerSecond / row.Resident
	return r, nil
}

// Fed and resident steps alternate in rounds, because a GPU's clock changes within seconds. The
// first steps of a round do not count: they use up batches that were prepared earlier.
const (
	fedRounds = 5
	fedSettle = 10
	fedMemory = 4096 // MB of compressed images
)

// fedMeasurement measures fed and resident steps in turn, on one or more ranks.
type fedMeasurement struct {
	b       *trainBench
	begin   func() error                             // waits for the device, and for all ranks
	maximum func(value int64) (int64, error)         // over all ranks
	over    func(steps int, took time.Duration) bool // whether the fed steps of a round are done

	resident     func() error
	workers, sms int // loader workers; multiprocessors that decode
	steps        int // over all rounds
	fed, still   usedTime
	waited       time.Duration
	decoded      int64     // by the device
	shares       []float64 // of the resident rate, per round
}

// usedTime is an elapsed time, and the CPU time that the process used during it.
type usedTime struct{ took, cpu time.Duration }

func (u *usedTime) cores() float64 { return u.cpu.Seconds() / u.took.Seconds() }

// usedSince returns the times since start. cpu is the CPU time used at start.
func usedSince(start time.Time, cpu time.Duration) (usedTime, error) {
	now, err := loaderbench.CPUTime()
	return usedTime{time.Since(start), now - cpu}, err
}

// run measures rounds. o selects this rank's share of the archive, and run sets the other options.
func (m *fedMeasurement) run(ctx context.Context, t *trainee, scope *torch.Scope, batch int,
	o imageloader.Options) (err error) {
	b := m.b
	o.BatchSize, o.Transform, o.Shuffle, o.Seed = batch, imageloader.Train(b.size), true, 1
	// Use one epoch of many passes, so that the start of an epoch does not count.
	o.Repeat, o.ShuffleBytes, o.Workers, o.DropLast = 1<<20, b.memory<<20, b.workers, true
	loader, err := imageloader.OpenContext(ctx, b.archive, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, loader.Close()) }()
	feed, err := prefetcher.New(loader,
		prefetcher.Options{Device: b.device, Decode: b.decode, DecodeMultiprocessors: b.sms})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, feed.Close()) }()
	input, target, err := t.data(scope, batch, b.size, b.context)
	if err != nil {
		return err
	}
	m.resident = t.call(input, target)
	rounds, settle, first := fedRounds, fedSettle, loader.Len()/batch+fedSettle
	if b.device == cuda.CPU { // where a first pass would take minutes
		rounds, settle, first = 1, 0, min(first, 5)
	}
	skip, err := m.maximum(int64(first))
	if err != nil {
		return err
	}
	steps := 0 // in this round
	var start time.Time
	var cpu time.Duration
	var before prefetcher.Stats
	for batch, err := range feed.Epoch(ctx, 0) {
		if err != nil {
			return err
		}
		if skip == 0 && steps == 0 {
			if err := m.begin(); err != nil {
				return err
			}
			if cpu, err = loaderbench.CPUTime(); err != nil {
				return err
			}
			before, start = feed.Stats(), time.Now()
		}
		if _, _, err := t.step.Step(batch.Images, batch.Labels); err != nil {
			return err
		}
		if skip > 0 {
			skip--
			continue
		}
		if steps++; !m.over(steps, time.Since(start)) {
			continue
		}
		if err := b.wait(); err != nil {
			return err
		}
		fed, err := usedSince(start, cpu)
		if err != nil {
			return err
		}
		after := feed.Stats()
		m.waited += after.ConsumerWait - before.ConsumerWait
		m.decoded += after.Decoded - before.Decoded
		if err := m.add(fed, steps); err != nil {
			return err
		}
		if len(m.shares) == rounds {
			m.workers, m.sms = loader.Stats().Workers, feed.Stats().DecodeMultiprocessors
			return nil
		}
		steps, skip = 0, int64(settle)
	}
	return errors.New("the epoch ended before the measurement")
}

// add counts the fed steps of a round, and runs as many resident steps.
func (m *fedMeasurement) add(fed usedTime, steps int) error {
	if _, err := m.b.repeat(3, m.resident); err != nil {
		return err
	}
	if err := m.begin(); err != nil {
		return err
	}
	cpu, err := loaderbench.CPUTime()
	if err != nil {
		return err
	}
	start := time.Now()
	if _, err := m.b.repeat(steps, m.resident); err != nil {
		return err
	}
	still, err := usedSince(start, cpu)
	if err != nil {
		return err
	}
	for _, used := range []*usedTime{&fed, &still} {
		slowest, err := m.maximum(int64(used.took))
		if err != nil {
			return err
		}
		used.took = time.Duration(slowest)
	}
	m.fed = usedTime{m.fed.took + fed.took, m.fed.cpu + fed.cpu}
	m.still = usedTime{m.still.took + still.took, m.still.cpu + still.cpu}
	m.shares = append(m.shares, still.took.Seconds()/fed.took.Seconds())
	m.steps += steps
	return nil
}

package loaderbench

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/trace"
)

// maxRecording is the maximum length of the recording for KernelTimes.
const maxRecording = time.Second

// KernelTimes are the times of the GPU's kernels in a second run of the loader, of at most a
// second. The profiler's recording costs host time, so ImagesPerSecond is lower than the measured
// rate.
type KernelTimes struct {
	Seconds         float64 `json:"seconds"` // recorded wall-clock time
	ImagesPerSecond float64 `json:"images_per_second"`
	Multiprocessors int     `json:"multiprocessors"` // number on the GPU
	// BusyShare is the share of the time in which at least one kernel ran.
	BusyShare float64 `json:"busy_share"`
	// SMTimeShare is the mean share of the GPU's multiprocessors that run a block. It is the sum
	// over all kernels of kernel time times the share of multiprocessors that the grid occupies,
	// divided by the recorded time. A grid occupies one multiprocessor for each block, up to the
	// number on the GPU or the limit of -decode-sms. Concurrent kernels together count as all
	// multiprocessors at most.
	SMTimeShare float64      `json:"sm_time_share"`
	Kernels     []kernelTime `json:"kernels,omitempty"` // longest time first
	WhyNot      string       `json:"why_not,omitempty"` // why there are no figures
}

// kernelTime summarises the launches of one kernel with one block shape.
type kernelTime struct {
	Kernel   string  `json:"kernel"` // without namespaces and parameters
	Launches int     `json:"launches"`
	TotalMS  float64 `json:"total_ms"`
	MeanUS   float64 `json:"mean_us"`
	// TimeShare is the kernel's time over the recorded time.
	TimeShare float64 `json:"time_share"`
	// SMTimeShare is the kernel's part of the sum in KernelTimes.SMTimeShare, without the limit for
	// concurrent kernels.
	SMTimeShare float64 `json:"sm_time_share"`
	Blocks      float64 `json:"blocks"`       // mean number in a grid
	Threads     int     `json:"threads"`      // in a block
	Registers   int     `json:"registers"`    // for each thread
	SharedBytes int     `json:"shared_bytes"` // for each block
	// Occupancy is the theoretical occupancy: the maximum share of a multiprocessor's threads that
	// the kernel's blocks can occupy at once.
	Occupancy float64 `json:"occupancy"`
}

// RecordKernels runs the loader once more and records the GPU's kernels. It does nothing if the
// batches are not copied to a GPU. Call it after Run, so that the recording does not disturb Run's
// figures. If Run has written the archive's index, this run uses it.
func (m *Measurement) RecordKernels(ctx context.Context, stderr io.Writer) (err error) {
	m.Result.Kernels, err = m.kernels(ctx, stderr)
	return err
}

func (m *Measurement) kernels(ctx context.Context, stderr io.Writer) (*KernelTimes, error) {
	gpu, isDevice := m.target.(device)
	if !isDevice || gpu.Device == cuda.CPU {
		return nil, nil
	}
	properties, err := gpu.Properties()
	if err != nil {
		return nil, err
	}
	again := Measurement{archive: m.archive, length: min(m.length, maxRecording), epochs: m.epochs,
		warm: m.warm, o: m.o, target: m.target}
	var recorder *trace.Recorder
	var whyNot error
	again.record = func() error {
		if recorder, whyNot = trace.Start(trace.Options{NoOperators: true}); whyNot != nil {
			again.stopped.Store(true)
		}
		return nil
	}
	fmt.Fprintln(stderr, "recording the kernels")
	err = again.Run(ctx, io.Discard)
	if recorder == nil {
		if whyNot != nil {
			return &KernelTimes{WhyNot: whyNot.Error()}, nil
		}
		return nil, err
	}
	recorded, stopErr := recorder.Stop()
	if err := cmp.Or(err, stopErr); err != nil {
		return nil, err
	}
	begin := again.begin.Sub(recorded.Begin)
	k := sumKernels(recorded, int(gpu.Device), begin,
		begin+time.Duration(again.Result.Seconds*float64(time.Second)), properties.Multiprocessors,
		again.Result.DecodeSMs)
	k.ImagesPerSecond = again.Result.ImagesPerSecond
	return k, nil
}

// decoding is the name prefix of the kernels that decode and inflate. -decode-sms limits them.
const decoding = "ts::decode::"

// sumKernels sums the kernels of a device between two times of a recording. The decoding kernels
// run on at most bound multiprocessors, or on all if bound is 0.
func sumKernels(t *trace.Trace, device int, begin, end time.Duration, multiprocessors, bound int) *KernelTimes {
	type shape struct {
		name                        string
		threads, registers, sharedB int
	}
	// edge is the start or end of a kernel that uses a share of the multiprocessors.
	type edge struct {
		at    time.Duration
		count int
		share float64
	}
	k := &KernelTimes{Seconds: (end - begin).Seconds(), Multiprocessors: multiprocessors}
	rows := map[shape]*kernelTime{}
	var edges []edge
	for _, e := range t.Events {
		from, to := max(e.Start, begin), min(e.End(), end)
		if e.Kind != trace.Kernel || e.Device != device || from >= to {
			continue
		}
		reached := float64(multiprocessors)
		if bound > 0 && strings.Contains(e.Name, decoding) {
			reached = min(reached, float64(bound))
		}
		share := min(float64(e.Launch.Blocks), reached) / float64(multiprocessors)
		edges = append(edges, edge{from, 1, share}, edge{to, -1, -share})
		key := shape{e.Name, e.Launch.Threads, e.Launch.Registers, e.Launch.SharedBytes}
		row := rows[key]
		if row == nil {
			row = &kernelTime{
				Kernel: trace.ShortName(e.Name), Threads: key.threads, Registers: key.registers,
				SharedBytes: key.sharedB, Occupancy: e.Launch.Occupancy,
			}
			rows[key] = row
		}
		took := (to - from).Seconds()
		row.Launches++
		row.TotalMS += took * 1e3
		row.SMTimeShare += took * share / k.Seconds
		row.Blocks += float64(e.Launch.Blocks)
	}
	if len(rows) == 0 {
		k.WhyNot = "the profiler recorded no kernels: see its messages above, and whether another profiler runs"
		return k
	}
	for _, row := range rows {
		n := float64(row.Launches)
		row.MeanUS, row.Blocks, row.TimeShare = row.TotalMS*1e3/n, row.Blocks/n, row.TotalMS/1e3/k.Seconds
		k.Kernels = append(k.Kernels, *row)
	}
	slices.SortFunc(k.Kernels, func(a, b kernelTime) int {
		return cmp.Or(cmp.Compare(b.TotalMS, a.TotalMS), cmp.Compare(a.Kernel, b.Kernel),
			cmp.Compare(a.Threads, b.Threads))
	})
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Compare(a.at, b.at) })
	running, share, before := 0, 0.0, begin
	for _, e := range edges {
		if running > 0 {
			took := (e.at - before).Seconds() / k.Seconds
			k.BusyShare += took
			k.SMTimeShare += took * min(1, share)
		}
		running, share, before = running+e.count, share+e.share, e.at
	}
	return k
}

// print prints the table as text.
func (k *KernelTimes) print(w io.Writer) error {
	if k == nil {
		return nil
	}
	fmt.Fprintln(w)
	if k.WhyNot != "" {
		_, err := fmt.Fprintf(w, "no times of kernels: %s\n", printable.Text(k.WhyNot))
		return err
	}
	fmt.Fprintf(w, "kernels of %.2f s while recorded, at %.0f images/s: one ran in %.1f %% of the time, "+
		"%.1f %% of the multiprocessors' time\n",
		k.Seconds, k.ImagesPerSecond, 100*k.BusyShare, 100*k.SMTimeShare)
	t := printable.NewTable(w, tabwriter.AlignRight)
	fmt.Fprintln(t, "kernel\tlaunches\ttotal ms\tmean us\ttime %\tSM time "+
		"%\tblocks\tthreads\tregisters\tshared bytes\toccupancy %\t")
	for _, r := range k.Kernels {
		fmt.Fprintf(t, "%s\t%d\t%.2f\t%.1f\t%.1f\t%.1f\t%.0f\t%d\t%d\t%d\t%.0f\t\n",
			printable.Text(r.Kernel), r.Launches, r.TotalMS, r.MeanUS,
			100*r.TimeShare, 100*r.SMTimeShare, r.Blocks, r.Threads, r.Registers, r.SharedBytes, 100*r.Occupancy)
	}
	return t.Flush()
}

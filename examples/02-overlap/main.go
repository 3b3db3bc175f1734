// Command 02-overlap shows when host-to-device copies overlap with GPU computation.
//
// It measures ten steps, each with two matrix products (4096 × 4096, float32) and one copy of 64
// MiB to the GPU, in every combination of three choices: pinned or pageable host memory; a separate
// stream for the copies or the products' stream; and the products or the copy first in each step.
// It prints the time of each combination, of the products alone and of the copies alone, and the
// time that the host needed to issue them. If there is a python3 with torch, it also prints
// PyTorch's times.
//
//	go run ./examples/02-overlap                          # the table
//	go run ./examples/02-overlap -json                    # one JSON object
//	go run ./examples/02-overlap -timeline overlap.svg    # and a picture of three combinations
//
// Result: with pinned memory and a separate stream a copy costs nothing. The driver copies pageable
// memory in pieces through its own pinned memory. This blocks the calling thread until the last
// piece is queued, so the host cannot issue products meanwhile. Pageable copies therefore overlap
// only with products issued earlier, and the order of issue matters. On one stream nothing
// overlaps.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/torch"
)

//go:embed peer.py
var peer string

const (
	steps     = 10
	products  = 2 // per step
	side      = 4096
	copyBytes = side * side * 4
)

func main() {
	rounds := 7
	lesson.Main("02-overlap",
		"Shows when copies to the GPU run while it computes, in all combinations of memory, stream and order.", 1, func(f *flag.FlagSet) {
			f.IntVar(&rounds, "rounds", rounds, "rounds of each measurement; figures are medians")
		},
		func(ctx context.Context, l *lesson.Lesson) error { return run(ctx, l, rounds) })
}

// figures is the output of -json. All times are medians in milliseconds.
type figures struct {
	Device    string             `json:"device"`
	Compute   float64            `json:"compute_ms"`
	Copies    map[string]float64 `json:"copies_ms"`     // keyed by memory kind
	H2D       map[string]float64 `json:"h2d_gbs"`       // copies alone, by memory kind, timed on the GPU
	PeakH2D   float64            `json:"h2d_peak_gbs"`  // best of five pinned 1 GiB copies
	PeakShare float64            `json:"h2d_peak_part"` // pinned H2D / PeakH2D
	Both      []both             `json:"both"`
	PyTorch   *peerFigures       `json:"pytorch,omitempty"`
}

// both holds the results of one combination.
type both struct {
	Memory  string  `json:"memory"`
	Streams int     `json:"streams"`
	First   string  `json:"first"` // the part that each step issues first
	Time    float64 `json:"ms"`
	Held    float64 `json:"host_held_ms"` // until all work was issued
	// Over is Time divided by the longer of compute and copies alone, minus 1: 0 is perfect
	// overlap.
	Over    float64 `json:"over"`
	PyTorch float64 `json:"pytorch_ms,omitempty"`
}

type peerFigures struct {
	Version string             `json:"version"`
	Compute float64            `json:"compute_ms"`
	Copies  map[string]float64 `json:"copies_ms"`
	Both    map[string]float64 `json:"both_ms"`
}

// key returns peer.py's name of the combination.
func (b both) key() string {
	return fmt.Sprintf("%s, %s, %s first", b.Memory, map[int]string{1: "one", 2: "two"}[b.Streams], b.First)
}

func run(ctx context.Context, l *lesson.Lesson, rounds int) (err error) {
	if rounds < 1 {
		return errors.New("-rounds must be at least 1")
	}
	e, err := newExperiment(l.Device)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	f, err := e.measure(ctx, rounds)
	if err != nil {
		return err
	}
	f.PyTorch = new(peerFigures)
	noPeer := l.Peer(ctx, peer, f.PyTorch, strconv.Itoa(int(l.Device)), strconv.Itoa(rounds))
	if noPeer != nil {
		if f.PyTorch = nil; !errors.Is(noPeer, lesson.ErrNoPeer) {
			return noPeer
		}
	} else {
		for i, b := range f.Both {
			f.Both[i].PyTorch = f.PyTorch.Both[b.key()]
		}
	}
	if err := l.Result(f, func() error { return f.print(l, noPeer) }); err != nil {
		return err
	}
	l.Streams = map[cuda.Stream]string{e.compute: "compute", e.copies: "copies"}
	_, err = l.Record("products and copies of 64 MiB to the GPU: pinned, pageable, and on one stream", e.show)
	return err
}

// experiment holds the operands of the products and the copies.
type experiment struct {
	device          cuda.Device
	compute, copies cuda.Stream
	a, b, target    *torch.Tensor
	source          map[string]*torch.Tensor // keyed by memory kind
	buffer          *cuda.Pinned
}

func newExperiment(device cuda.Device) (e *experiment, err error) {
	e = &experiment{device: device, source: map[string]*torch.Tensor{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	if e.compute, err = cuda.NewStream(device, cuda.StreamOptions{}); err != nil {
		return e, err
	}
	if e.copies, err = cuda.NewStream(device, cuda.StreamOptions{}); err != nil {
		return e, err
	}
	for _, t := range []**torch.Tensor{&e.a, &e.b, &e.target} {
		if *t, err = torch.Randn(device, torch.Float32, side, side); err != nil {
			return e, err
		}
	}
	if e.buffer, err = cuda.NewPinned(copyBytes); err != nil {
		return e, err
	}
	if e.source["pinned"], err = torch.FromMemory(e.buffer.Bytes(), torch.Float32, side, side); err != nil {
		return e, err
	}
	if e.source["pageable"], err = torch.Randn(cuda.CPU, torch.Float32, side, side); err != nil {
		return e, err
	}
	return e, device.Synchronize()
}

func (e *experiment) close() error {
	var errs []error
	for _, t := range []*torch.Tensor{e.a, e.b, e.target, e.source["pinned"], e.source["pageable"]} {
		if t != nil {
			errs = append(errs, t.Close())
		}
	}
	if e.buffer != nil {
		errs = append(errs, e.buffer.Close())
	}
	return errors.Join(errs...)
}

// multiply issues a step's products.
func (e *experiment) multiply() error {
	return cuda.WithStream(e.compute, func() error {
		for range products {
			c := e.a.MatMul(e.b)
			if err := errors.Join(c.Err(), c.Close()); err != nil {
				return err
			}
		}
		return nil
	})
}

// copy issues a step's copy.
func (e *experiment) copy(memory string, stream cuda.Stream) func() error {
	return func() error {
		return cuda.WithStream(stream,
			func() error { return e.target.CopyFrom(e.source[memory], torch.CopyOptions{NonBlocking: true}) })
	}
}

// once issues the parts of all steps and waits for the GPU. It returns the total time, and the time
// until all work was issued.
func (e *experiment) once(parts ...func() error) (took, held time.Duration, err error) {
	if err := e.device.Synchronize(); err != nil {
		return 0, 0, err
	}
	begin := time.Now()
	for range steps {
		for _, part := range parts {
			if err := part(); err != nil {
				return 0, 0, err
			}
		}
	}
	held = time.Since(begin)
	err = e.device.Synchronize()
	return time.Since(begin), held, err
}

// median returns the median of the rounds in milliseconds, after one warm-up round.
func (e *experiment) median(ctx context.Context, rounds int, parts ...func() error) (took, held float64, err error) {
	var all, issue []time.Duration
	for i := range rounds + 1 {
		if err := ctx.Err(); err != nil {
			return 0, 0, err
		}
		t, h, err := e.once(parts...)
		if err != nil {
			return 0, 0, err
		}
		if i > 0 {
			all, issue = append(all, t), append(issue, h)
		}
	}
	return inMs(lesson.Median(all)), inMs(lesson.Median(issue)), nil
}

func inMs(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }

func (e *experiment) measure(ctx context.Context, rounds int) (*figures, error) {
	properties, err := e.device.Properties()
	if err != nil {
		return nil, err
	}
	f := &figures{Device: properties.Name, Copies: map[string]float64{}, H2D: map[string]float64{}}
	if f.Compute, _, err = e.median(ctx, rounds, e.multiply); err != nil {
		return nil, err
	}
	for _, memory := range []string{"pinned", "pageable"} {
		if f.Copies[memory], _, err = e.median(ctx, rounds, e.copy(memory, e.copies)); err != nil {
			return nil, err
		}
		if f.H2D[memory], err = e.rate(e.target, e.source[memory], steps); err != nil {
			return nil, err
		}
	}
	if f.PeakH2D, err = e.peak(); err != nil {
		return nil, err
	}
	f.PeakShare = f.H2D["pinned"] / f.PeakH2D
	for _, memory := range []string{"pinned", "pageable"} {
		for streams, stream := range []cuda.Stream{e.compute, e.copies} {
			for _, first := range []string{"compute", "copies"} {
				parts := []func() error{e.multiply, e.copy(memory, stream)}
				if first == "copies" {
					parts[0], parts[1] = parts[1], parts[0]
				}
				b := both{Memory: memory, Streams: streams + 1, First: first}
				if b.Time, b.Held, err = e.median(ctx, rounds, parts...); err != nil {
					return nil, err
				}
				b.Over = b.Time/math.Max(f.Compute, f.Copies[memory]) - 1
				f.Both = append(f.Both, b)
			}
		}
	}
	return f, nil
}

// rate returns the speed of consecutive copies in GB/s, timed by the GPU.
func (e *experiment) rate(dst, src *torch.Tensor, copies int) (float64, error) {
	begin, err := cuda.NewEvent(cuda.EventOptions{Timing: true})
	if err != nil {
		return 0, err
	}
	defer begin.Close()
	end, err := cuda.NewEvent(cuda.EventOptions{Timing: true})
	if err != nil {
		return 0, err
	}
	defer end.Close()
	// The default stream, which allocated dst, may still have work on its memory.
	if err := e.copies.Wait(cuda.DefaultStream(e.device)); err != nil {
		return 0, err
	}
	err = cuda.WithStream(e.copies, func() error {
		if err := begin.Record(e.copies); err != nil {
			return err
		}
		for range copies {
			if err := dst.CopyFrom(src, torch.CopyOptions{NonBlocking: true}); err != nil {
				return err
			}
		}
		return errors.Join(end.Record(e.copies), end.Synchronize())
	})
	if err != nil {
		return 0, err
	}
	took, err := cuda.Elapsed(begin, end)
	if err != nil {
		return 0, err
	}
	size := int64(copies)
	for _, d := range src.Shape() {
		size *= d
	}
	return float64(size*4) / float64(took.Nanoseconds()), nil
}

// peak returns the machine's maximum speed: the best of five 1 GiB copies.
func (e *experiment) peak() (best float64, err error) {
	const large = 1 << 30
	buffer, err := cuda.NewPinned(large)
	if err != nil {
		return 0, err
	}
	defer buffer.Close()
	src, err := torch.FromMemory(buffer.Bytes(), torch.Float32, large/4)
	if err != nil {
		return 0, err
	}
	defer src.Close()
	dst, err := torch.Empty(e.device, torch.Float32, large/4)
	if err != nil {
		return 0, err
	}
	defer dst.Close()
	for range 5 {
		rate, err := e.rate(dst, src, 1)
		if err != nil {
			return 0, err
		}
		best = max(best, rate)
	}
	return best, nil
}

// show runs three combinations once, each in a named range, for the picture.
func (e *experiment) show() error {
	for _, c := range []struct {
		name  string
		parts []func() error
	}{
		{"pinned, two streams", []func() error{e.copy("pinned", e.copies), e.multiply}},
		{"pageable, two streams", []func() error{e.copy("pageable", e.copies), e.multiply}},
		{"pinned, one stream", []func() error{e.copy("pinned", e.compute), e.multiply}},
	} {
		end := cuda.Range(c.name)
		_, _, err := e.once(c.parts...)
		end()
		if err != nil {
			return err
		}
	}
	return nil
}

func (f *figures) print(l *lesson.Lesson, noPeer error) error {
	ms := func(x float64) string {
		if x == 0 {
			return "-"
		}
		return fmt.Sprintf("%.1f", x)
	}
	theirs := func(of func(p *peerFigures) float64) string {
		if f.PyTorch == nil {
			return "-"
		}
		return ms(of(f.PyTorch))
	}
	fmt.Fprintf(l.Out, "%s: %d steps of %d products %d × %d (float32) and a copy of 64 MiB to the GPU; "+
		"medians in ms\n\n", f.Device, steps, products, side, side)
	rows := [][]string{{"alone", "ms", "GB/s", "PyTorch ms"},
		{"products", ms(f.Compute), "", theirs(func(p *peerFigures) float64 { return p.Compute })}}
	for _, memory := range []string{"pinned", "pageable"} {
		rows = append(rows, []string{"copies, " + memory, ms(f.Copies[memory]), fmt.Sprintf("%.1f", f.H2D[memory]),
			theirs(func(p *peerFigures) float64 { return p.Copies[memory] })})
	}
	rows = append(rows, []string{"pinned, 1 GiB at once (peak)", "", fmt.Sprintf("%.1f", f.PeakH2D), ""})
	if err := l.Table(rows); err != nil {
		return err
	}
	fmt.Fprintln(l.Out)
	rows = [][]string{{"both: memory", "streams", "first in a step", "ms", "over the longer one",
		"host held ms", "PyTorch ms"}}
	for _, b := range f.Both {
		rows = append(rows, []string{b.Memory, strconv.Itoa(b.Streams), b.First, ms(b.Time),
			fmt.Sprintf("%+.1f %%", 100*b.Over), ms(b.Held), ms(b.PyTorch)})
	}
	if err := l.Table(rows); err != nil {
		return err
	}
	if noPeer != nil {
		fmt.Fprintf(l.Out, "\n%v\n", noPeer)
	}
	fmt.Fprint(l.Out, "\n", f.lesson())
	return nil
}

// lesson explains the results.
func (f *figures) lesson() string {
	find := func(memory string, streams int, first string) both {
		for _, b := range f.Both {
			if b.Memory == memory && b.Streams == streams && b.First == first {
				return b
			}
		}
		return both{}
	}
	pinned, paged := find("pinned", 2, "copies"), find("pageable", 2, "copies")
	return fmt.Sprintf("Pinned memory and a stream of its own: %.1f ms of copies cost %.1f ms. "+
		"The host was blocked for %.1f ms and free for other work during the rest.\n"+
		"Pageable memory blocks the host in every copy, %.1f ms in total: the driver stages it through "+
		`its own pinned buffer, and the host issues no products meanwhile.
On one stream a copy and a product never run at the same time: %.1f ms.
`, f.Copies["pinned"], max(0, pinned.Time-f.Compute), pinned.Held, paged.Held, find("pinned", 1, "copies").Time)
}

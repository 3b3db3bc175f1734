//go:build linux

package prefetcher

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/prefetcher/internal/ring"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// plannedSource is a rawSource whose images become float32. It plans most of them. A plan has the
// value of the image's pixels, and a flag that tells the decoder to flag the image.
type plannedSource struct {
	rawSource
	refuses  error               // of PlanBytes
	hostStep bool                // a step that only the host runs
	again    func(row int) error // of DecodeRow
	repeated atomic.Int64        // calls of DecodeRow
}

func (s *plannedSource) Outputs() []tensor.Spec {
	n := int64(s.size())
	return []tensor.Spec{{Name: "images", DType: torch.Float32, Shape: []int64{3, n, n},
		MemoryFormat: torch.ChannelsLast}, {Name: "labels", DType: torch.Int64}}
}

func (s *plannedSource) Finishes() []tensor.Finish {
	return []tensor.Finish{{Mean: []float32{0, 0, 0}, Std: []float32{1, 1, 1}}, {}}
}

func (s *plannedSource) Planner() decodeplan.Planner { return s }
func (s *plannedSource) StepsOnDevice() bool         { return !s.hostStep }
func (s *plannedSource) PlanBytes() (int, error)     { return decodeplan.Align * s.batch, s.refuses }
func (s *plannedSource) MemberBytes() (int, int)     { return 0, 0 }
func (s *plannedSource) EntryBytes() int             { return 0 }
func (s *plannedSource) Hold() (release func())      { return func() {} }

func (s *plannedSource) KeepEntryPoints(any, []int, [][]byte) {}
func (s *plannedSource) Checked(any)                          {}

// host reports whether the source decodes a sample, and flagged whether the decoder flags it.
func (s *plannedSource) host(epoch, sample int) bool    { return (epoch+sample)%5 == 0 || epoch == 1 }
func (s *plannedSource) flagged(epoch, sample int) bool { return sample%3 == 0 && epoch != 3 }

func (s *plannedSource) FillPlans(ctx context.Context, epoch int, to decodeplan.Consumer) error {
	var mu sync.Mutex
	var lent []*decodeplan.Plans
	batch := 0
	return s.Fill(ctx, epoch, func(ctx context.Context) ([][]byte, error) {
		slot, err := to.Lend(ctx)
		mu.Lock()
		defer mu.Unlock()
		lent = append(lent, slot.Plans)
		return [][]byte{slot.Images, slot.Labels}, err
	}, func(n int, info any) error {
		mu.Lock()
		plans := lent[0]
		lent = lent[1:]
		mu.Unlock()
		first := batch * s.batch
		batch++
		clear(plans.Rows)
		plans.Used = 0
		for row := range n {
			if s.host(epoch, first+row) {
				continue
			}
			at := plans.Used
			plans.Memory[at], plans.Memory[at+1] = value(epoch, first+row), 0
			if s.flagged(epoch, first+row) {
				plans.Memory[at+1] = 1
			}
			plans.Rows[row] = decodeplan.Row{At: at, Bytes: 2}
			plans.Used += decodeplan.Align
		}
		return to.Deliver(n, info)
	})
}

func (s *plannedSource) DecodeRow(ctx context.Context, info any, row int, dst []byte) error {
	s.repeated.Add(1)
	var epoch, batch int
	if _, err := fmt.Sscanf(info.(string), "epoch %d batch %d", &epoch, &batch); err != nil {
		return err
	}
	sample := batch*s.batch + row
	if s.again != nil {
		if err := s.again(sample); err != nil {
			return err
		}
	}
	for i := range dst {
		dst[i] = value(epoch, sample)
	}
	return ctx.Err()
}

// fakeDecoding is the CPU's device with a decoder of plannedSource's plans.
type fakeDecoding struct {
	*cpuDevice
	pixels *torch.Tensor
	memory []byte
	wait   atomic.Int64 // the number of times that Check has nothing yet
}

// decodes makes the prefetcher's CPU decode plans.
func decodes(t *testing.T, source Source) func(ringDevice) ringDevice {
	return func(device ringDevice) ringDevice {
		d := &fakeDecoding{cpuDevice: device.(*cpuDevice)}
		var err error
		if d.decode, err = newDecoding(source, d.slots); err != nil {
			t.Fatal(err)
		}
		return d
	}
}

func (d *fakeDecoding) Open() (err error) {
	if err = d.cpuDevice.Open(); err != nil {
		return err
	}
	g := d.decode
	for range d.hosts {
		g.plans = append(g.plans,
			decodeplan.Plans{Memory: make([]byte, g.sizes.plans), Rows: make([]decodeplan.Row, d.batch)})
	}
	for range d.depth {
		g.slots = append(g.slots, decodedSlot{flags: make([]int32, d.batch), found: make([]byte, g.sizes.entries)})
	}
	if d.pixels, err = d.own(torch.EmptySpec(cuda.CPU, d.fields[g.images.index], 1)); err != nil {
		return err
	}
	d.memory, err = d.pixels.Bytes()
	return errors.Join(err, d.pixels.Lend(true))
}

func (d *fakeDecoding) Copy(slot, host, n int, released []*cuda.Event, copied *cuda.Event) error {
	g := d.decode
	images := d.host[host].bytes[g.images.index]
	i := 0
	g.planned(slot, host, n, func(row, at int) {
		plan := g.plans[host].Memory[at:]
		pixels := images[row*g.images.row:][:g.images.row]
		g.slots[slot].flags[i] = int32(plan[1])
		i++
		for p := range pixels {
			pixels[p] = plan[0] ^ plan[1]*255
		}
	})
	var runs int
	if err := g.slots[slot].hostRuns(n, func(first, rows int) error {
		for row := first; row < first+rows; row++ {
			if g.plans[host].Rows[row].Bytes > 0 {
				return fmt.Errorf("row %d has a plan", row)
			}
		}
		runs += rows
		return nil
	}); err != nil || runs+i != n {
		return fmt.Errorf("%d rows are copied and %d decoded, of %d: %w", runs, i, n, err)
	}
	d.wait.Store(2)
	return d.cpuDevice.Copy(slot, host, n, released, copied)
}

func (d *fakeDecoding) Check(ctx context.Context, slot, _ int, info any, busy func() bool) (ring.Checked,
	error, error) {
	for d.wait.Add(-1) > 0 {
		if busy() {
			return ring.Unchecked, nil, nil
		}
	}
	mended, bad, err := d.decode.mend(ctx, slot, info, d.memory, func(row int) error {
		return d.decode.images.finishRow(d.out[slot][d.decode.images.index], row, d.pixels)
	})
	if mended {
		return ring.Mended, bad, err
	}
	return ring.Good, bad, err
}

// TestDecodeReturnsSourcePixels: rows decoded by the source, by the device, or handed back by
// the device all have the source's pixels, in every order of batches and epochs.
func TestDecodeReturnsSourcePixels(t *testing.T) {
	for _, depth := range []int{1, 3} {
		t.Run(fmt.Sprint("depth ", depth), func(t *testing.T) {
			nothingLeft(t, func() {
				s := &plannedSource{rawSource: rawSource{batch: 8, samples: 61, ahead: 2}}
				p, err := open(s, Options{Device: cuda.CPU, Depth: depth, HostSlots: 3}, decodes(t, s))
				if err != nil {
					t.Fatal(err)
				}
				planned, flagged := int64(0), int64(0)
				for epoch := range 4 {
					seen := 0
					for b, err := range p.Epoch(t.Context(), epoch) {
						if err != nil {
							t.Fatal(err)
						}
						check(t, b, s.batch)
						for i := range b.N {
							if !s.host(epoch, seen+i) {
								planned++
								if s.flagged(epoch, seen+i) {
									flagged++
								}
							}
						}
						seen += b.N
					}
					if seen != s.samples {
						t.Errorf("epoch %d has %d samples, want %v", epoch, seen, s.samples)
					}
				}
				if st := p.Stats(); st.Decoded != planned || st.DecodedAgain != flagged ||
					s.repeated.Load() != flagged || flagged == 0 {
					t.Errorf("%+v; %d images have plans, %d are flagged", st, planned, flagged)
				}
				closeFeed(t, p)
			})
		})
	}
}

// TestHostRefusalEndsEpoch: the host cannot decode an image. The consumer still gets the batches
// before that image.
func TestHostRefusalEndsEpoch(t *testing.T) {
	errImage := errors.New("no image")
	s := &plannedSource{rawSource: rawSource{batch: 8, samples: 64, ahead: 2}}
	s.again = func(sample int) error {
		if sample >= 27 {
			return errImage
		}
		return nil
	}
	nothingLeft(t, func() {
		p, err := open(s, Options{Device: cuda.CPU, Depth: 3}, decodes(t, s))
		if err != nil {
			t.Fatal(err)
		}
		seen := 0
		var last error
		for b, err := range p.Epoch(t.Context(), 0) {
			if last = err; err == nil {
				check(t, b, s.batch)
				seen += b.N
			}
		}
		if !errors.Is(last, errImage) || seen != 24 {
			t.Errorf("%d samples, then %v, want the error %v, seen = 24", seen, last, errImage)
		}
		s.again = func(int) error { panic("decoder") }
		for _, err := range p.Epoch(t.Context(), 0) {
			last = err
		}
		if last == nil || !strings.Contains(last.Error(), "panicked") {
			t.Errorf("after a panic: %v, want an error with %q", last, "panicked")
		}
		s.again = nil
		for b, err := range p.Epoch(t.Context(), 2) { // the prefetcher is as good as new
			if err != nil {
				t.Fatal(err)
			}
			check(t, b, s.batch)
			if b.Index == 2 {
				break
			}
		}
		closeFeed(t, p)
	})
}

// TestAutoLeavesStepsToTheHost: Auto is Host for a source with a step that only the host runs.
func TestAutoLeavesStepsToTheHost(t *testing.T) {
	for _, hostStep := range []bool{false, true} {
		source := &plannedSource{rawSource: rawSource{batch: 1}, hostStep: hostStep}
		s, err := newSlots(source)
		if err != nil {
			t.Fatal(err)
		}
		for _, decode := range []Decode{Auto, Device} {
			o := Options{Decode: decode}
			d, err := o.decoding(source, s)
			if want := decode == Device || !hostStep; err != nil || (d != nil) != want {
				t.Errorf("%v, with a step of the host %v: the device decodes: %v, %v", decode, hostStep, d != nil, err)
			}
		}
	}
}

// ownFill embeds a source that plans, but returns no planner, so that Fill is called.
type ownFill struct{ *plannedSource }

func (ownFill) Planner() any { return nil }

func TestDecodeOption(t *testing.T) {
	cannot := errors.New("cannot plan")
	for _, test := range []struct {
		name   string
		source Source
		o      Options
		want   string
	}{
		{"Host", &plannedSource{rawSource: rawSource{batch: 1}}, Options{}, ""},
		{"Auto on the CPU", &plannedSource{rawSource: rawSource{batch: 1}}, Options{Decode: Auto}, ""},
		{"Auto of a source that cannot", &plannedSource{rawSource: rawSource{batch: 1}, refuses: cannot},
			Options{Decode: Auto}, ""},
		{"Device on the CPU", &plannedSource{rawSource: rawSource{batch: 1}}, Options{Decode: Device},
			"the device is the CPU"},
		{"Device of a source that cannot", &plannedSource{rawSource: rawSource{batch: 1}, refuses: cannot},
			Options{Decode: Device}, "cannot plan"},
		{"Device of too large batches", &plannedSource{rawSource: rawSource{batch: 65536}},
			Options{Decode: Device}, "at most 65535"},
		{"Device of a source that embeds one that plans",
			ownFill{&plannedSource{rawSource: rawSource{batch: 1}}}, Options{Decode: Device}, "does not plan"},
		{"Device of a source without plans", &rawSource{batch: 1}, Options{Decode: Device}, "does not plan"},
		{"another value", &rawSource{batch: 1}, Options{Decode: 3}, "Decode(3)"},
		{"a bound on the CPU", &plannedSource{rawSource: rawSource{batch: 1}},
			Options{Decode: Auto, DecodeMultiprocessors: 16}, ""},
		{"a negative bound", &plannedSource{rawSource: rawSource{batch: 1}},
			Options{DecodeMultiprocessors: -1}, "DecodeMultiprocessors is -1"},
		{"a negative value", &rawSource{batch: 1}, Options{Decode: -1}, "Decode(-1)"},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.o.Device = cuda.CPU
			p, err := New(test.source, test.o)
			if test.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				if p.slots.decode != nil {
					t.Error("on the CPU the device decodes, want the host to decode")
				}
				closeFeed(t, p)
				return
			}
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want an error with %q", err, test.want)
			}
		})
	}
}

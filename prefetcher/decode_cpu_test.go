//go:build linux

package prefetcher

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/prefetcher/internal/ring"
	"github.com/torchstream/torchstream/torch"
)

// cpuDecoding is the CPU's device with a decoder on the CPU. The decoder runs the arithmetic of the
// GPU's kernels, and writes into the rows of the host slot. Only streams and events are missing.
type cpuDecoding struct {
	*cpuDevice
	decoder *capi.GPUDecoder
	staging [][]byte // by host slot
	pixels  *torch.Tensor
	memory  []byte // of pixels
	release func()
}

// onCPU is a decoderFeed.
func onCPU(t *testing.T, source Source) *Prefetcher {
	t.Helper()
	p, err := open(source, Options{Device: cuda.CPU, Depth: 1 + decoders}, func(device ringDevice) ringDevice {
		d := &cpuDecoding{cpuDevice: device.(*cpuDevice)}
		var err error
		if d.decode, err = newDecoding(source, d.slots); err != nil {
			t.Fatal(err)
		}
		return d
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// ownMemory returns CPU memory. The slots close it.
func (d *cpuDecoding) ownMemory(spec torch.Spec, n int64) (*torch.Tensor, []byte, error) {
	tensor, err := d.own(torch.EmptySpec(cuda.CPU, spec, n))
	if err != nil {
		return nil, nil, err
	}
	memory, err := tensor.Bytes()
	return tensor, memory, errors.Join(err, tensor.Lend(true))
}

func (d *cpuDecoding) Open() (err error) {
	if err = d.cpuDevice.Open(); err != nil {
		return err
	}
	g := d.decode
	bytes := torch.Spec{DType: torch.Uint8, Shape: []int64{int64(g.sizes.staging())}}
	for range d.hosts {
		_, memory, err := d.ownMemory(bytes, 1)
		if err != nil {
			return err
		}
		d.staging = append(d.staging, memory)
		g.plans = append(g.plans,
			decodeplan.Plans{Memory: memory[g.sizes.head:], Rows: make([]decodeplan.Row, d.batch),
				Register: func([]byte) (func() error, error) { return func() error { return nil }, nil },
				Rooms:    g.sizes.rooms})
	}
	d.release = g.source.Hold()
	for range d.depth {
		g.slots = append(g.slots,
			decodedSlot{flags: make([]int32, d.batch), found: make([]byte, g.sizes.entries),
				inflated: make([]capi.GPUInflateResult, d.batch)})
	}
	if d.pixels, d.memory, err = d.ownMemory(d.fields[g.images.index], 1); err != nil {
		return err
	}
	const scratch = 8 << 20 // less than a batch needs, so that it is decoded in parts
	d.decoder, err = g.sizes.newDecoder(capi.DeviceCPU, int(d.batch), scratch)
	g.count.memory.Add(int64(g.sizes.staging() + g.sizes.rooms + scratch))
	return err
}

func (d *cpuDecoding) Close(released []*cuda.Event) error {
	capi.FreeGPUDecoder(d.decoder)
	d.release()
	return d.cpuDevice.Close(released)
}

func (d *cpuDecoding) Copy(slot, host, n int, released []*cuda.Event, copied *cuda.Event) error {
	g := d.decode
	g.requests(slot, host, n)
	if len(g.request.images) > 0 {
		staging := d.staging[host][:g.sizes.head+g.plans[host].Used]
		if err := g.run(d.decoder, slot, staging, d.host[host].tensors[g.images.index],
			capi.Stream{Device: capi.DeviceCPU}); err != nil {
			return err
		}
	}
	return d.cpuDevice.Copy(slot, host, n, released, copied)
}

func (d *cpuDecoding) Check(ctx context.Context, slot, _ int, info any, _ func() bool) (ring.Checked, error, error) {
	mended, bad, err := d.decode.mend(ctx, slot, info, d.memory, func(row int) error {
		return d.decode.images.finishRow(d.out[slot][d.decode.images.index], row, d.pixels)
	})
	if mended {
		return ring.Mended, bad, err
	}
	return ring.Good, bad, err
}

// TestCPUDecodeEqualsTheHost: the device's arithmetic gives the batches of Decode: Host, to the
// bit.
func TestCPUDecodeEqualsTheHost(t *testing.T) { decodeEqualsTheHost(t, onCPU) }

func TestCPUDecodeHandsDamageBack(t *testing.T) { decodeHandsDamageBack(t, onCPU) }

// TestCPUDecodeResumes: an epoch may resume from the state after any of its batches. The remaining
// batches equal the host's, whichever side decoded the earlier ones.
func TestCPUDecodeResumes(t *testing.T) {
	path := decodeArchive(t, 80)
	o := imageloader.Options{Transform: imageloader.Train(48), BadSamples: imageloader.Skip}
	l := newLoader(t, path, o)
	host, device := newFeed(t, newLoader(t, path, o), Options{Device: cuda.CPU}), onCPU(t, l)
	epochValues(t, host, 0)
	epochValues(t, device, 0) // finds the entry points
	want, labels := epochValues(t, host, 1)
	var states []imageloader.State
	for b, err := range device.Epoch(t.Context(), 1) {
		if err != nil {
			t.Fatal(err)
		}
		states = append(states, b.Info.(imageloader.Info).State)
	}
	for stop, state := range states {
		if err := l.Restore(t.Context(), state); err != nil {
			t.Fatal(err)
		}
		got, gotLabels := epochValues(t, device, 1)
		if len(got) != len(want)-stop-1 {
			t.Fatalf("%d batches after batch %d of %d, want %v",
				len(got), stop, len(want), len(want)-stop-1)
		}
		for i := range got {
			if !slices.Equal(got[i], want[stop+1+i]) || !slices.Equal(gotLabels[i], labels[stop+1+i]) {
				t.Errorf("batch %d after a restore behind %d has other images or labels, want the epoch's",
					stop+1+i, stop)
			}
		}
	}
	if st := device.Stats(); st.Decoded < 100 || st.DecodedAgain != 0 {
		t.Errorf("%+v, want st.Decoded at least 100, st.DecodedAgain = 0", st)
	}
	closeFeed(t, host)
	closeFeed(t, device)
}

// TestAutoMixesHostAndDevice: a mixture leaves some images to the loader's workers, and the batches
// still equal the host's.
func TestAutoMixesHostAndDevice(t *testing.T) {
	path := decodeArchive(t, 150)
	o := imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip}
	host, device := newFeed(t, newLoader(t, path, o), Options{Device: cuda.CPU}), onCPU(t, newLoader(t, path, o))
	sameEpochs(t, host, device, 0, 1) // the entry points become known
	before := device.Stats().Decoded
	sameEpochs(t, host, device, 2, 2)
	all := device.Stats().Decoded - before
	mix := newMixture(int(device.slots.batch))
	mix.rows = mix.most
	device.slots.decode.mix = mix
	before = device.Stats().Decoded
	sameEpochs(t, host, device, 3, 3)
	if mixed := device.Stats().Decoded - before; mixed > all/2 {
		t.Errorf("with a mixture the device decodes %d images of an epoch, without %d, want at most %v",
			mixed, all, all/2)
	}
	closeFeed(t, host)
	closeFeed(t, device)
}

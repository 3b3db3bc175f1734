package prefetcher

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// Decode selects where images are decoded: Options.Decode. Each choice gives batches with the same
// bits, and the same bad samples.
//
// # What the GPU decodes
//
// With Auto and Device an imageloader.Loader leaves the following work to the GPU, if the archive
// has random access:
//
//   - Baseline JPEGs. The GPU finds entry points that are unknown or unconfirmed. Under
//     Options.Damaged Refuse of the loader, the workers decode such images instead.
//   - The steps of Transform.Ops, for samples all of whose steps it can run.
//   - Inflating the members of a .tgz that is not kept in memory, once an epoch of this process has
//     read them.
//
// The source's workers decode all other images at the same time. This includes the whole first
// epoch over a .tgz without an index. docs/imageloader.md has the list.
//
// # Memory
//
// Stats.DecoderBytes reports the device memory. Two decoders take turns. Each decoder has
//
//   - the images of a batch,
//   - scratch memory, from 256 to 512 MiB,
//   - a host slot's plans, and
//   - for a .tgz up to 256 MiB for the inflated members of a batch.
//
// The pinned memory consists of
//
//   - the plans, for a .tgz with the compressed members, in each host slot: the size that a random
//     batch needs, at most 256 MiB;
//   - the entry points, in each device slot: a quarter of the size of a batch's plans without
//     compressed members.
//
// # Sources that embed a Loader
//
// If the device decodes, the prefetcher does not call the Fill of a source that embeds a Loader,
// unless the source has its own method Planner, which returns nil.
type Decode int

const (
	// Host decodes in the source's workers.
	Host Decode = iota
	// Auto decodes on the device if the device is a GPU and the source can leave images to it, with
	// every step on their pixels (imageloader's Transform.Ops). Otherwise Auto is Host. It is Host
	// too if the documentation of a step says that the step keeps some or all samples on the host.
	// The source's workers decode as many of the images as they have time for. If the loop takes
	// batches more slowly than they can be made, the GPU decodes only the images that the workers
	// can't.
	Auto
	// Device decodes on the device. The source's workers decode the images that the device can't
	// decode, and images with a step that it can't run. New returns an error if the device is the
	// CPU, or if the source cannot leave images to it.
	Device
)

// String returns the constant's name.
func (d Decode) String() string {
	switch d {
	case Host:
		return "Host"
	case Auto:
		return "Auto"
	case Device:
		return "Device"
	}
	return fmt.Sprintf("Decode(%d)", int(d))
}

// plannerOf returns the interface through which the prefetcher decodes a source's images, or nil if
// the source has none.
func plannerOf(source Source) decodeplan.Planner {
	s, ok := source.(interface{ Planner() decodeplan.Planner })
	if !ok {
		return nil
	}
	return s.Planner()
}

// decoding is the device-independent state of decoding on a device. Only the ring's goroutine uses
// it, except for plans, which belong to the lent slots.
type decoding struct {
	source decodeplan.Planner
	images int           // the field
	finish tensor.Finish // of the field
	row    int           // bytes of a row's pixels
	bytes  int           // of a slot's memory for plans
	head   int           // bytes that a run of a decoder writes in front of the plans
	// rooms is the device memory that a batch's members are inflated into, in bytes. 0: the source
	// inflates.
	rooms int
	// entries is the memory of a slot for entry points that the device finds, in bytes.
	entries int
	// multiprocessors that decode; 0: all. Open sets it.
	multiprocessors int

	plans []decodeplan.Plans // by host slot
	rows  [][]int            // by device slot: the row of each image that the device was to decode
	flags [][]int32          // by device slot, for each of them: not 0 if the host must decode it

	// Per device slot: the expected and the actual results of the inflated members.
	members  [][]member
	inflated [][]capi.GPUInflateResult

	// Per device slot: the images in which the device finds entry points, and these entry points.
	finds [][]find
	found [][]byte

	// For the batch that is decoded next; reused.
	request []capi.GPUDecodeImage
	ranges  []capi.GPUDecodeMember
	wanted  []capi.GPUDecodeEntries

	// For the batch whose entry points are kept; reused.
	keptRows []int
	kept     [][]byte

	mix *mixture // nil if the device decodes all that it can

	decoded, again, memory atomic.Int64 // see Stats
	inflates               atomic.Int64 // of the decoded images: the device was given to inflate them
}

// member is an image whose compressed data the device inflates.
type member struct {
	image    int // among those that the device decodes
	checksum uint32
}

// find is an image in which the device finds entry points.
type find struct {
	image     int // among those that the device decodes
	at, bytes int // of the slot's memory for entry points
}

// maxDecoded is the maximum of the argument max_images of ts_gpu_decoder_new.
const maxDecoded = 65535

// newDecoding returns nil if the host decodes. err is then the reason.
func newDecoding(source Source, s *slots) (*decoding, error) {
	p := plannerOf(source)
	if p == nil {
		return nil, errors.New("the source does not plan images: imageloader does")
	}
	bytes, err := p.PlanBytes()
	if err != nil {
		return nil, err
	}
	if s.batch > maxDecoded {
		return nil, fmt.Errorf("a batch has %d images, and a GPU decodes at most %d at once", s.batch, maxDecoded)
	}
	images := s.field("images")
	describer, ok := source.(Describer)
	if !ok || images < 0 || len(s.fields) != 2 || !s.work[images] {
		return nil, errors.New("the source has not two fields, of which \"images\" needs a finish")
	}
	d := &decoding{source: p, images: images, finish: describer.Finishes()[images], row: int(s.fields[images].Bytes()), bytes: bytes,
		head: capi.GPUDecoderHeadBytes(int(s.batch)), entries: p.EntryBytes()}
	if staging, rooms := p.MemberBytes(); rooms > 0 {
		d.bytes, d.rooms, d.head = max(bytes, staging), rooms, capi.GPUDecoderInflatingHeadBytes(int(s.batch), int(s.batch))
	}
	return d, nil
}

// fill runs an epoch of the source.
func (d *decoding) fill(ctx context.Context, epoch int, s *slots, lend func(context.Context) (int, error), deliver func(int, any) error) error {
	d.mix.begin(s.hosts)
	return d.source.FillPlans(ctx, epoch, planConsumer{d: d, slots: s, lend: lend, deliver: deliver})
}

// planConsumer lends host slots with their memory for plans.
type planConsumer struct {
	d       *decoding
	slots   *slots
	lend    func(context.Context) (int, error) // returns the number of a host slot
	deliver func(int, any) error
}

// Lend is a method of decodeplan.Consumer.
func (c planConsumer) Lend(ctx context.Context) (decodeplan.Slot, error) {
	asked := time.Now()
	k, err := c.lend(ctx)
	if err != nil {
		return decodeplan.Slot{}, public(err)
	}
	d, fields := c.d, c.slots.host[k].bytes
	d.plans[k].HostRows = d.mix.lends(asked, time.Now())
	return decodeplan.Slot{Images: fields[d.images], Labels: fields[1-d.images], Plans: &d.plans[k]}, nil
}

// Deliver is a method of decodeplan.Consumer.
func (c planConsumer) Deliver(n int, info any) error {
	c.d.mix.delivers(time.Now())
	return c.deliver(n, info)
}

// planned finds the images of the first n rows of a host slot that the device decodes into a device
// slot. It calls use for each of them in order.
func (d *decoding) planned(slot, host, n int, use func(row, plan int)) {
	d.rows[slot] = d.rows[slot][:0]
	for row, r := range d.plans[host].Rows[:n] {
		if r.Bytes > 0 {
			d.rows[slot] = append(d.rows[slot], row)
			use(row, r.At)
		}
	}
	d.decoded.Add(int64(len(d.rows[slot])))
}

// requests sets request and ranges to the images of the first n rows of a host slot that the device
// decodes into a device slot. The results of a run are rows of pixels, one for each row of the
// batch.
func (d *decoding) requests(slot, host, n int) {
	d.request, d.ranges, d.members[slot] = d.request[:0], d.ranges[:0], d.members[slot][:0]
	d.finds[slot], d.wanted = d.finds[slot][:0], d.wanted[:0]
	room, found := 0, 0
	d.planned(slot, host, n, func(row, plan int) {
		at := d.head + plan
		if m := &d.plans[host].Rows[row].Member; m.InputBytes > 0 {
			d.ranges = append(d.ranges, capi.GPUDecodeMember{Image: uintptr(len(d.request)), Scan: uintptr(m.Scan), Range: capi.GPUInflateRange{
				Input: uintptr(at + m.Input), InputBytes: uintptr(m.InputBytes), Window: uintptr(at + m.Window), WindowBytes: uintptr(m.WindowBytes),
				Skip: uintptr(m.Skip), Bytes: uintptr(m.Bytes), Room: uintptr(room), SkipBits: int32(m.SkipBits)}})
			d.members[slot] = append(d.members[slot], member{len(d.request), m.Checksum})
			room += m.Room()
		}
		// Entry points without room are found again in a later epoch.
		if bytes := d.plans[host].Rows[row].Found; bytes > 0 && bytes <= d.entries-found {
			d.wanted = append(d.wanted, capi.GPUDecodeEntries{Plan: uintptr(at), To: uintptr(found), Bytes: uintptr(bytes)})
			d.finds[slot] = append(d.finds[slot], find{len(d.request), found, bytes})
			found += bytes
		}
		d.request = append(d.request, capi.GPUDecodeImage{Plan: uintptr(at), Result: uintptr(row * d.row)})
	})
	d.inflates.Add(int64(len(d.ranges)))
}

// newDecoder makes a decoder for batches on a device.
func (d *decoding) newDecoder(device int32, batch, scratch int) (*capi.GPUDecoder, error) {
	if d.rooms > 0 {
		return capi.NewInflatingGPUDecoder(device, batch, d.head+d.bytes, scratch, d.rooms)
	}
	return capi.NewGPUDecoder(device, batch, d.head+d.bytes, scratch)
}

// run decodes the images that requests has set, writes the results to images, and copies the entry
// points that the decoder has found to the host.
func (d *decoding) run(decoder *capi.GPUDecoder, slot int, staging []byte, images *torch.Tensor, on capi.Stream) error {
	err := torch.CAPI("decode", []*torch.Tensor{images}, func(results []*capi.Tensor) error {
		if len(d.ranges) > 0 {
			return capi.RunInflatingGPUDecoder(decoder, staging, d.request, d.ranges, results[0], d.flags[slot], d.inflated[slot], on)
		}
		return capi.RunGPUDecoder(decoder, staging, d.request, results[0], d.flags[slot], on)
	})
	if err != nil || len(d.wanted) == 0 {
		return err
	}
	last := d.finds[slot][len(d.finds[slot])-1]
	return capi.CopyGPUDecoderEntries(decoder, staging, d.wanted, d.found[slot][:last.at+last.bytes], on)
}

// keep hands the entry points that the device has found for a slot to the source. They must already
// be on the host.
func (d *decoding) keep(slot int, info any) {
	d.keptRows, d.kept = d.keptRows[:0], d.kept[:0]
	for _, f := range d.finds[slot] {
		if d.flags[slot][f.image] == 0 {
			d.keptRows = append(d.keptRows, d.rows[slot][f.image])
			d.kept = append(d.kept, d.found[slot][f.at:][:f.bytes])
		}
	}
	d.finds[slot] = d.finds[slot][:0]
	if len(d.kept) > 0 {
		d.source.KeepEntryPoints(info, d.keptRows, d.kept)
	}
}

// judge flags the images of a slot whose inflated bytes are wrong. The results must already be on
// the host.
func (d *decoding) judge(slot int) {
	for i, m := range d.members[slot] {
		if r := d.inflated[slot][i]; r.Failed != 0 || r.Checksum != m.checksum {
			d.flags[slot][m.image] = 1
		}
	}
	d.members[slot] = d.members[slot][:0] // once is enough
}

// hostRuns calls use with each run of rows whose pixels the source has written.
func (d *decoding) hostRuns(slot, n int, use func(first, rows int) error) error {
	return decodeplan.Gaps(d.rows[slot], n, use)
}

// mend decodes the flagged images of a slot on the host. It passes their pixels to put, which may
// not keep them. The flags must already be on the host. mend reports whether there were any. bad is
// an error of the source, err an error of put.
func (d *decoding) mend(ctx context.Context, slot int, info any, pixels []byte, put func(row int) error) (mended bool, bad, err error) {
	d.judge(slot)
	d.keep(slot, info)
	for i, row := range d.rows[slot] {
		if d.flags[slot][i] == 0 {
			continue
		}
		d.again.Add(1)
		if err := d.source.DecodeRow(ctx, info, row, pixels); err != nil {
			return mended, fmt.Errorf("prefetcher: image %d of a batch, which the device could not decode: %w", row, err), nil
		}
		mended = true
		if err := put(row); err != nil {
			return mended, nil, err
		}
	}
	return mended, nil, nil
}

// finishRow enqueues the finish of one image, src, into a row of a batch.
func (d *decoding) finishRow(batch *torch.Tensor, row int, src *torch.Tensor) error {
	dst := batch.Narrow(0, int64(row), 1)
	defer dst.Close()
	if err := dst.Err(); err != nil {
		return err
	}
	return finishField(dst, src, d.finish)
}

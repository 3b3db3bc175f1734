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

// Decode selects where images are decoded: see Options.Decode. Every choice gives the same batches,
// bit for bit, and the same bad samples.
//
// # What the GPU decodes
//
// With Auto and Device an imageloader.Loader leaves the following work to the GPU:
//
//   - Baseline JPEGs. The GPU finds entry points that are unknown or unconfirmed. Under
//     Options.Damaged Refuse of the loader, the workers decode such images instead.
//   - The steps of Transform.Ops. The GPU runs them for a sample only if it can run all of them.
//   - Inflating the members of a .tgz that is not kept in memory, and the deflated members of a
//     zip, once an epoch of this process has read them.
//
// The source's workers decode all other images at the same time. docs/imageloader.md has the list.
//
// # Memory
//
// Stats.DecoderBytes reports the device memory. Two decoders take turns. Each decoder has
//
//   - the images of a batch,
//   - scratch memory, from 256 to 512 MiB,
//   - a host slot's plans, and
//   - for a .tgz or a zip with deflated members up to 256 MiB for the inflated members of a batch.
//
// The pinned memory consists of
//
//   - in each host slot, the plans and, for a .tgz or a zip, the compressed members: the size that
//     a random batch needs, at most 256 MiB;
//   - in each device slot, the entry points: a quarter of the size of a batch's plans without
//     compressed members.
//
// If an archive has no random access, Go's heap has the compressed images of the batches between
// the workers and the end of decoding, at most HostSlots and Depth batches. This includes a first
// epoch over a .tgz that makes the index.
//
// An imageloader.Loader also maps a local archive. The pages that it has read then count in the
// process's resident memory, although the kernel can reclaim them like the rest of the page cache.
// For GPUs, parts of 256 MiB are pinned in the page cache, within Options.MaxMappedBytes, until the
// loader and its prefetchers are closed.
//
// # Sources that embed a Loader
//
// If the device decodes, the prefetcher does not call the Fill of a source that embeds a Loader. To
// have Fill called, such a source defines a method Planner that returns nil.
type Decode int

const (
	// Host decodes in the source's workers.
	Host Decode = iota
	// Auto decodes on the device if three conditions hold: the device is a GPU, the source can
	// leave images to it, and the GPU can run every step of imageloader's Transform.Ops on every
	// image (the step's comment says so). Otherwise Auto is the same as Host.
	//
	// The source's workers decode as many of the images as they have time for, and the GPU decodes
	// the rest. If the loop consumes batches slowly enough, the workers decode all images that they
	// can.
	Auto
	// Device decodes on the device. The source's workers decode only the images that the device
	// can't decode, and images with a step that the device can't run. New returns an error if the
	// device is the CPU, or if the source can't leave images to it.
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

// plannerOf returns the interface through which the prefetcher decodes a source's images. It
// returns nil if the source does not have it.
func plannerOf(source Source) decodeplan.Planner {
	s, ok := source.(interface{ Planner() decodeplan.Planner })
	if !ok {
		return nil
	}
	return s.Planner()
}

// decoding is the part of the decoding state that does not depend on the kind of device. Only the
// ring's goroutine uses it, except for two parts: the elements of plans belong to the lent slots,
// and any goroutine may use count.
type decoding struct {
	source  decodeplan.Planner
	images  imageField
	sizes   decodeSizes
	mix     *mixture           // nil if the device decodes everything that it can
	plans   []decodeplan.Plans // by host slot
	slots   []decodedSlot      // by device slot
	request decodeRequest      // for the next batch to decode; reused
	kept    entryPoints        // of the batch whose entry points are being kept; reused
	count   decodeCounters
}

// imageField is the field whose rows are decoded images.
type imageField struct {
	index  int
	finish tensor.Finish
	row    int // size of a row's pixels in bytes
}

// decodeSizes are the sizes in bytes of the memory that decoding needs.
type decodeSizes struct {
	plans int // a slot's memory for plans
	head  int // the part that a decoder writes before the plans
	// rooms is the device memory for the inflated members of a batch. 0: the source inflates.
	rooms int
	// entries is a slot's memory for entry points that the device finds.
	entries int
}

// newDecodeSizes returns the sizes for batches of a planner's images.
func newDecodeSizes(p decodeplan.Planner, batch int) (decodeSizes, error) {
	bytes, err := p.PlanBytes()
	s := decodeSizes{plans: bytes, entries: p.EntryBytes()}
	members := 0
	if staging, rooms := p.MemberBytes(); rooms > 0 {
		s.plans, s.rooms, members = max(bytes, staging), rooms, batch
	}
	s.head = capi.GPUDecoderReadingHeadBytes(batch, members, batch)
	return s, err
}

// staging returns the size of a host slot's memory for plans, with the head.
func (s decodeSizes) staging() int { return s.head + s.plans }

// newDecoder makes a decoder for batches of images on a device.
func (s decodeSizes) newDecoder(device int32, batch, scratch int) (*capi.GPUDecoder, error) {
	if s.rooms > 0 {
		return capi.NewInflatingGPUDecoder(device, batch, s.staging(), scratch, s.rooms)
	}
	return capi.NewGPUDecoder(device, batch, s.staging(), scratch)
}

// decodeCounters are the decoders' part of Stats. They may be read from any goroutine.
type decodeCounters struct {
	decoded, again, inflated, mapped atomic.Int64

	memory          atomic.Int64 // DecoderBytes
	multiprocessors int          // maximum for decoding; 0: all. Open sets it.
}

// addTo sets the decoders' part of the statistics.
func (c *decodeCounters) addTo(s *Stats) {
	s.Decoded, s.DecodedAgain, s.DecoderBytes = c.decoded.Load(), c.again.Load(), c.memory.Load()
	s.Inflated, s.Mapped = c.inflated.Load(), c.mapped.Load()
	s.DecodeMultiprocessors = c.multiprocessors
}

// decodedSlot describes the images of a device slot that the device decodes.
type decodedSlot struct {
	rows  []int   // number of the row of each image that the device decodes
	flags []int32 // one for each of these images: not 0 if the host must decode it

	// The expected and the actual results of the inflated members.
	members  []member
	inflated []capi.GPUInflateResult

	// The images in which the device finds entry points, and these entry points.
	finds []find
	found []byte
}

// member is an image whose compressed data the device inflates.
type member struct {
	image    int // number among the images that the device decodes
	checksum uint32
}

// find is an image in which the device finds entry points.
type find struct {
	image     int // number among the images that the device decodes
	at, bytes int // position in the slot's memory for entry points
}

// judge flags the images whose inflated bytes are wrong. The results must already be on the host.
func (s *decodedSlot) judge() {
	for i, m := range s.members {
		if r := s.inflated[i]; r.Failed != 0 || r.Checksum != m.checksum {
			s.flags[m.image] = 1
		}
	}
	s.members = s.members[:0] // so that a second call does not judge them again
}

// takeEntryPoints stores in e the entry points that the device has found in undamaged images. The
// entry points must already be on the host.
func (s *decodedSlot) takeEntryPoints(e *entryPoints) {
	e.rows, e.bytes = e.rows[:0], e.bytes[:0]
	for _, f := range s.finds {
		if s.flags[f.image] == 0 {
			e.rows = append(e.rows, s.rows[f.image])
			e.bytes = append(e.bytes, s.found[f.at:][:f.bytes])
		}
	}
	s.finds = s.finds[:0]
}

// hostRuns calls use for each run of consecutive rows whose pixels the source has written.
func (s *decodedSlot) hostRuns(n int, use func(first, rows int) error) error {
	return decodeplan.Gaps(s.rows, n, use)
}

// entryPoints are entry points that the device has found, and the rows of their images.
type entryPoints struct {
	rows  []int
	bytes [][]byte
}

// decodeRequest describes the work of one run of a decoder.
type decodeRequest struct {
	images  []capi.GPUDecodeImage
	members []capi.GPUDecodeMember  // images that the decoder has to inflate first
	entries []capi.GPUDecodeEntries // entry points that the decoder has to find
	files   capi.GPUDecodeFiles     // parts of files and members that the decoder has to read first
}

func (r *decodeRequest) clear() {
	r.images, r.members, r.entries = r.images[:0], r.members[:0], r.entries[:0]
	r.files.List, r.files.Key = r.files.List[:0], nil
}

// addMember adds the bytes to inflate for the next image. at is the position of the image's plan.
// room is the position of the inflated bytes.
func (r *decodeRequest) addMember(m *decodeplan.Member, at, room int) {
	r.members = append(r.members, capi.GPUDecodeMember{Image: uintptr(len(r.images)), Scan: uintptr(m.Scan),
		Range: capi.GPUInflateRange{
			Input: uintptr(at + m.Input), InputBytes: uintptr(m.InputBytes), Window: uintptr(at + m.Window),
			WindowBytes: uintptr(m.WindowBytes),
			Skip:        uintptr(m.Skip), Bytes: uintptr(m.Bytes), Room: uintptr(room), SkipBits: int32(m.SkipBits)}})
}

// maxDecoded is the largest value that ts_gpu_decoder_new accepts for max_images.
const maxDecoded = 65535

// newDecoding returns nil if the host decodes. In that case err is the reason.
func newDecoding(source Source, s *slots) (*decoding, error) {
	p := plannerOf(source)
	if p == nil {
		return nil, errors.New("the source does not plan images: imageloader does")
	}
	sizes, err := newDecodeSizes(p, int(s.batch))
	if err != nil {
		return nil, err
	}
	if s.batch > maxDecoded {
		return nil, fmt.Errorf("a batch has %d images, and a GPU decodes at most %d at once", s.batch, maxDecoded)
	}
	images := s.images
	describer, ok := source.(Describer)
	if !ok || images < 0 || len(s.fields) != 2 || !s.work[images] {
		return nil, errors.New("the source has not two fields, of which \"images\" needs a finish")
	}
	field := imageField{index: images, finish: describer.Finishes()[images], row: int(s.fields[images].Bytes())}
	return &decoding{source: p, images: field, sizes: sizes}, nil
}

// fill runs an epoch of the source.
func (d *decoding) fill(ctx context.Context, epoch int, s *slots, lend func(context.Context) (int, error),
	deliver func(int, any) error) error {
	d.mix.begin(s.hosts)
	return d.source.FillPlans(ctx, epoch, planConsumer{d: d, slots: s, lend: lend, deliver: deliver})
}

// planConsumer lends host slots together with their memory for plans.
type planConsumer struct {
	d       *decoding
	slots   *slots
	lend    func(context.Context) (int, error) // returns the number of a host slot
	deliver func(int, any) error
}

// Lend implements decodeplan.Consumer.
func (c planConsumer) Lend(ctx context.Context) (decodeplan.Slot, error) {
	asked := time.Now()
	k, err := c.lend(ctx)
	if err != nil {
		return decodeplan.Slot{}, public(err)
	}
	d, fields := c.d, c.slots.host[k].bytes
	d.plans[k].HostRows = d.mix.lends(asked, time.Now())
	return decodeplan.Slot{Images: fields[d.images.index], Labels: fields[1-d.images.index], Plans: &d.plans[k]}, nil
}

// Deliver implements decodeplan.Consumer.
func (c planConsumer) Deliver(n int, info any) error {
	c.d.mix.delivers(time.Now())
	return c.deliver(n, info)
}

// planned calls use, in order, for each image that the device decodes, among the first n rows of a
// host slot. The device decodes these images into the device slot.
func (d *decoding) planned(slot, host, n int, use func(row, plan int)) {
	s := &d.slots[slot]
	s.rows = s.rows[:0]
	for row, r := range d.plans[host].Rows[:n] {
		if r.Bytes > 0 {
			s.rows = append(s.rows, row)
			use(row, r.At)
		}
	}
	d.count.decoded.Add(int64(len(s.rows)))
}

// requests fills d.request with the images that the device decodes from the first n rows of a host
// slot into a device slot. The results of a run are rows of pixels, one for each row of the batch.
func (d *decoding) requests(slot, host, n int) {
	s, r := &d.slots[slot], &d.request
	r.clear()
	s.members, s.finds = s.members[:0], s.finds[:0]
	room, found := 0, 0
	d.planned(slot, host, n, func(row, plan int) {
		at := d.sizes.head + plan
		if m := &d.plans[host].Rows[row].Member; m.InputBytes > 0 {
			r.addMember(m, at, room)
			if m.From != nil {
				r.files.List = append(r.files.List, capi.GPUDecodeFile{Image: uintptr(len(r.images)), From: m.From})
			}
			s.members = append(s.members, member{len(r.images), m.Checksum})
			room += m.Room()
		}
		if f := d.plans[host].Rows[row].File; f.From != nil {
			r.files.List = append(r.files.List, capi.GPUDecodeFile{Image: uintptr(len(r.images)), From: f.From})
			r.files.Key = f.Key
		}
		// If there is no room for entry points, a later epoch finds them again.
		if bytes := d.plans[host].Rows[row].Found; bytes > 0 && bytes <= d.sizes.entries-found {
			r.entries = append(r.entries,
				capi.GPUDecodeEntries{Plan: uintptr(at), To: uintptr(found), Bytes: uintptr(bytes)})
			s.finds = append(s.finds, find{len(r.images), found, bytes})
			found += bytes
		}
		r.images = append(r.images, capi.GPUDecodeImage{Plan: uintptr(at), Result: uintptr(row * d.images.row)})
	})
	d.count.inflated.Add(int64(len(r.members)))
	d.count.mapped.Add(int64(len(r.files.List)))
}

// run decodes the images that requests has collected and writes the results to images. It also
// copies the entry points that the decoder has found to the host.
func (d *decoding) run(decoder *capi.GPUDecoder, slot int, staging []byte, images *torch.Tensor, on capi.Stream) error {
	s, r := &d.slots[slot], &d.request
	err := torch.CAPI("decode", []*torch.Tensor{images}, func(results []*capi.Tensor) error {
		if len(r.files.List) > 0 {
			return capi.RunReadingGPUDecoder(decoder, staging, r.images, r.members, r.files, results[0], s.flags,
				s.inflated, on)
		}
		if len(r.members) > 0 {
			return capi.RunInflatingGPUDecoder(decoder, staging, r.images, r.members, results[0], s.flags,
				s.inflated, on)
		}
		return capi.RunGPUDecoder(decoder, staging, r.images, results[0], s.flags, on)
	})
	if err != nil || len(r.entries) == 0 {
		return err
	}
	last := s.finds[len(s.finds)-1]
	return capi.CopyGPUDecoderEntries(decoder, staging, r.entries, s.found[:last.at+last.bytes], on)
}

// mend decodes the flagged images of a slot on the host. It passes the pixels of each image to put,
// which must not keep them. The flags must already be on the host. mended reports whether there
// were flagged images. bad is an error of the source, and err an error of put.
func (d *decoding) mend(ctx context.Context, slot int, info any, pixels []byte,
	put func(row int) error) (mended bool, bad, err error) {
	s := &d.slots[slot]
	s.judge()
	if s.takeEntryPoints(&d.kept); len(d.kept.rows) > 0 {
		d.source.KeepEntryPoints(info, d.kept.rows, d.kept.bytes)
	}
	for i, row := range s.rows {
		if s.flags[i] == 0 {
			continue
		}
		d.count.again.Add(1)
		if err := d.source.DecodeRow(ctx, info, row, pixels); err != nil {
			return mended, fmt.Errorf(
				"prefetcher: image %d of a batch, which the device could not decode: %w", row, err), nil
		}
		mended = true
		if err := put(row); err != nil {
			return mended, nil, err
		}
	}
	d.source.Checked(info)
	return mended, nil, nil
}

// finishRow queues the finish of src, one image, into a row of a batch.
func (f *imageField) finishRow(batch *torch.Tensor, row int, src *torch.Tensor) error {
	dst := batch.Narrow(0, int64(row), 1)
	defer dst.Close()
	if err := dst.Err(); err != nil {
		return err
	}
	return finishField(dst, src, f.finish)
}

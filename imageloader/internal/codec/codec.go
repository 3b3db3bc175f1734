// Package codec decodes a single compressed image to pixels. The image library decodes JPEG, PNG,
// WebP, AVIF and HEIC, and package raster decodes GIF, BMP and TIFF. The loader and package decode
// share this package, so the same bytes give the same pixels in both. The package knows nothing
// about archives.
package codec

import (
	"strconv"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// DamagePolicy selects which damaged images are decoded. Package imageloader documents it.
type DamagePolicy int

// The policies.
const (
	Warned DamagePolicy = iota
	Partial
	Refuse
)

func (p DamagePolicy) String() string {
	switch p {
	case Warned:
		return "warned"
	case Partial:
		return "partial"
	case Refuse:
		return "refuse"
	}
	return "DamagePolicy(" + strconv.Itoa(int(p)) + ")"
}

// Decoder decodes images of all formats. It is not safe for concurrent use. An error with the code
// imagecapi.CodeDecode or imagecapi.CodeUnsupported reports a problem with the image. Any other
// error reports a problem with the machine.
type Decoder struct {
	d         *imagecapi.Decoder
	maxPixels int64
	strict    *imagecapi.Decoder // decodes JPEGs inside other files and never tolerates damage; nil before the first such JPEG
	rgb       []byte             // pixels of a rare format; reused
	// rare says that the last image was in a format that the image library does not decode.
	rare bool
}

// New returns a decoder that rejects damaged images. maxPixels limits width * height of an image.
func New(maxPixels int64) (*Decoder, error) {
	if err := imagecapi.Check(); err != nil {
		return nil, err
	}
	d, err := imagecapi.NewDecoder(maxPixels)
	if err != nil {
		return nil, err
	}
	return &Decoder{d: d, maxPixels: maxPixels}, nil
}

// Header reads the header of an image as a Decoder reads it.
func Header(data []byte) (imagecapi.Info, error) {
	if f := rare(data); f != nil {
		return f.header(data)
	}
	return imagecapi.Header(data)
}

// Header calls the function Header.
func (*Decoder) Header(data []byte) (imagecapi.Info, error) { return Header(data) }

// Decode writes the pixels that g selects to dst. stride is the distance between the starts of two
// rows in bytes.
func (d *Decoder) Decode(data []byte, g *imagecapi.Geometry, dst []byte, stride int) error {
	f := rare(data)
	if d.rare = f != nil; d.rare {
		pixels, width, height, err := f.pixels(data, d.room, d.jpeg)
		if err != nil {
			return err
		}
		return imagecapi.Resize(d.d, pixels, width, height, 3*width, g, dst, stride)
	}
	return imagecapi.Decode(d.d, data, g, dst, stride)
}

// SetDamaged sets the policy for damaged images.
func (d *Decoder) SetDamaged(p DamagePolicy) error {
	return imagecapi.SetDamage(d.d, map[DamagePolicy]int32{
		Warned: imagecapi.DamageWarn, Partial: imagecapi.DamagePartial, Refuse: imagecapi.DamageRefuse,
	}[p])
}

// Tolerated returns the damage of the last decoded image, or "" if it had none.
func (d *Decoder) Tolerated() string {
	if d.rare {
		return ""
	}
	return imagecapi.Tolerated(d.d)
}

// Close frees the decoder's memory.
func (d *Decoder) Close() {
	imagecapi.FreeDecoder(d.d)
	if d.strict != nil {
		imagecapi.FreeDecoder(d.strict)
	}
}

// jpeg decodes the top left part of a JPEG that is embedded in a file of another format.
func (d *Decoder) jpeg(data []byte, width, height int, dst []byte, stride int) (err error) {
	if d.strict == nil {
		if d.strict, err = imagecapi.NewDecoder(d.maxPixels); err != nil {
			return err
		}
	}
	w, h := int32(width), int32(height)
	g := imagecapi.Geometry{CropWidth: w, CropHeight: h, ResizeWidth: w, ResizeHeight: h, WindowWidth: w,
		WindowHeight: h}
	return imagecapi.Decode(d.strict, data, &g, dst, stride)
}

// maxRoom limits, in bytes, the memory that a decoder keeps for reuse when the next images are far
// smaller.
const maxRoom = 16 << 20

// room returns memory for the pixels of an image. The content is undefined.
func (d *Decoder) room(bytes int) []byte {
	if cap(d.rgb) < bytes || cap(d.rgb) > max(4*bytes, maxRoom) {
		d.rgb = nil // lets the garbage collector free it before the next allocation
		d.rgb = make([]byte, bytes)
	}
	return d.rgb[:bytes]
}

// Stats returns the decoder's counts of images so far.
func (d *Decoder) Stats() (imagecapi.Stats, error) { return imagecapi.DecoderStats(d.d) }

// DecodeByEntryPoints is like Decode, but uses a blob of entry points. *proof is 0, or the proof
// that an earlier call of DecodeByEntryPoints or DecodeMakingEntryPoints has returned for the same
// data. If it is 0, the call compares the blob with the image and sets *proof. If proof is nil, the
// call trusts the digests in the blob.
func (d *Decoder) DecodeByEntryPoints(data []byte, g *imagecapi.Geometry, dst []byte, stride int,
	blob []byte, proof *uint64) error {
	d.rare = false
	return imagecapi.DecodeEntries(d.d, data, g, dst, stride, blob, proof)
}

// DecodeMakingEntryPoints is like Decode, but also writes a blob of entry points to buffer. It
// returns the blob's size n and its proof. There is no blob if n is 0 or exceeds len(buffer).
func (d *Decoder) DecodeMakingEntryPoints(data []byte, g *imagecapi.Geometry, dst []byte, stride int,
	buffer []byte) (int, uint64, error) {
	d.rare = false
	return imagecapi.DecodeMakeEntries(d.d, data, g, dst, stride, 0, buffer)
}

// MakeEntryPoints makes a blob as DecodeMakingEntryPoints does, but without decoding pixels. It
// makes an entry point for every spacing-th MCU.
func (d *Decoder) MakeEntryPoints(data []byte, spacing int, buffer []byte) (int, uint64, error) {
	return imagecapi.MakeEntries(d.d, data, spacing, buffer)
}

// Transcode converts a progressive JPEG to a baseline JPEG with the same pixels: see
// imagecapi.Transcode.
func (d *Decoder) Transcode(data, buffer []byte) (n int, err error) {
	return imagecapi.Transcode(d.d, data, buffer)
}

// PlanAugmented writes a plan to buffer. The plan describes the decoding that DecodeByEntryPoints
// would do, followed by ops. buffer must be aligned to 16 bytes. n is the size of the plan. If n
// exceeds len(buffer), the plan did not fit. n is 0 if only the host can decode the image or run
// one of ops, or if *proof is still 0.
func (d *Decoder) PlanAugmented(data []byte, g *imagecapi.Geometry, blob []byte, proof *uint64,
	ops []imagecapi.AugmentOp, buffer []byte) (n int, err error) {
	n, err = imagecapi.PlanSegments(d.d, data, g, blob, proof, buffer)
	return augmented(n, err, ops, buffer)
}

// augmented appends ops to the plan of n bytes in buffer, if there is a plan: see PlanAugmented.
func augmented(n int, err error, ops []imagecapi.AugmentOp, buffer []byte) (int, error) {
	if err != nil || n == 0 || n > len(buffer) || len(ops) == 0 {
		return n, err
	}
	return imagecapi.PlanAugment(buffer, ops)
}

// AppendPlan plans the decoding that DecodeByEntryPoints would do, and appends the plan to the
// plans already in memory. Several goroutines may append to the same memory at a time. memory must
// be aligned to 16 bytes, and used counts its used bytes. at is the plan's offset in memory and n
// its size. n is 0 if only the host can decode the image, if *proof is still 0, or if there is no
// room.
func (d *Decoder) AppendPlan(data []byte, g *imagecapi.Geometry, blob []byte, proof *uint64, memory []byte,
	used *atomic.Uint64) (at, n int, err error) {
	return imagecapi.PlanAppend(d.d, data, g, blob, proof, memory, used)
}

// PlanScan is like PlanAugmented, but without entry points. The device that runs the plan finds
// them: see imagecapi.PlanScan.
func (d *Decoder) PlanScan(data []byte, g *imagecapi.Geometry, ops []imagecapi.AugmentOp,
	search *imagecapi.Search, buffer []byte) (n int, err error) {
	_, n, err = imagecapi.PlanScan(d.d, data, g, buffer, nil, search)
	return augmented(n, err, ops, buffer)
}

// AppendScan is like AppendPlan, but without entry points. The device that runs the plan finds
// them: see imagecapi.PlanScan.
func (d *Decoder) AppendScan(data []byte, g *imagecapi.Geometry, memory []byte, used *atomic.Uint64,
	search *imagecapi.Search) (at, n int, err error) {
	return imagecapi.PlanScan(d.d, data, g, memory, used, search)
}

// PlanHead is like PlanAugmented, but for a compressed image, which the device inflates before it
// runs the plan: see imagecapi.PlanHead.
func (d *Decoder) PlanHead(head []byte, fileBytes, scan int, g *imagecapi.Geometry, blob []byte,
	ops []imagecapi.AugmentOp, buffer []byte) (n int, err error) {
	n, err = imagecapi.PlanHead(d.d, head, fileBytes, scan, g, blob, buffer)
	return augmented(n, err, ops, buffer)
}

// PlanPart appends a plan to the plans in memory. The caller reads the needed part of the image's
// file only after the call: see imagecapi.PlanPart.
func (d *Decoder) PlanPart(head []byte, fileBytes, scan int, g *imagecapi.Geometry, blob []byte, piece int,
	memory []byte, used *atomic.Uint64) (imagecapi.Part, error) {
	return imagecapi.PlanPart(d.d, head, fileBytes, scan, g, blob, piece, memory, used)
}

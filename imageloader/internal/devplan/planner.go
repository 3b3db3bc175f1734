package devplan

import (
	"sync/atomic"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// MaxFile is the size in bytes of the largest file that a goroutine both reads and plans. A worker
// plans or decodes larger files. The limit bounds the reading goroutine's memory.
const MaxFile = 1 << 20

// Image is an image to plan, with its random choices.
type Image struct {
	Index    int   // index of the sample
	Size     int64 // size of the file in bytes
	Draw     Draw
	Data     []byte         // the file; nil if it is not on the host
	Inflated index.Inflated // compressed bytes of Data
	Info     *imagecapi.Info
	Geometry *imagecapi.Geometry
	Ops      []imagecapi.AugmentOp // operations on the pixels
}

// redo returns the data for decoding the image a second time.
func (m *Image) redo() Redo { return Redo{Size: m.Size, Draw: m.Draw} }

// Settings of a Planner.
type Settings struct {
	Points *EntryPoints // nil: entry points are not used
	Known  *index.Index
	// MaxCopyBytes is the maximum size of the baseline copies of all progressive JPEGs.
	MaxCopyBytes int64
	// ReadsMembers says that the same goroutines read and plan samples. Only then are heads of
	// members used.
	ReadsMembers bool
	// Augments says that images have operations. Such images are planned from whole files.
	Augments bool
}

// Planner plans images for one goroutine, which also owns its decoder. It writes plans to the
// staging of a slot. It does not judge samples: if it cannot plan an image, the host decodes the
// image and reports the error.
type Planner struct {
	Settings
	Entries *Decoder    // nil if entry points are not used
	d       planDecoder // nil if the decoder cannot plan
	head    []byte      // head of an image that is not on the host; reused
	plans   []byte      // aligned buffer for a plan that is copied to its final place; reused
	// baseline is the buffer for making a baseline copy; reused.
	baseline []byte
	pieces   []uint64 // digests of a part that was read; reused
	copies   int64    // copies made since TakeCopies
}

// planDecoder is a decoder that can also plan the images that DecodeByEntryPoints decodes.
// [codec.Decoder] documents the methods.
type planDecoder interface {
	PlanAugmented(data []byte, g *imagecapi.Geometry, blob []byte, proof *uint64, ops []imagecapi.AugmentOp,
		buffer []byte) (n int, err error)
	AppendPlan(data []byte, g *imagecapi.Geometry, blob []byte, proof *uint64, memory []byte,
		used *atomic.Uint64) (at, n int, err error)
	AppendScan(data []byte, g *imagecapi.Geometry, memory []byte, used *atomic.Uint64,
		search *imagecapi.Search) (at, n int, err error)
	PlanScan(data []byte, g *imagecapi.Geometry, ops []imagecapi.AugmentOp, search *imagecapi.Search,
		buffer []byte) (n int, err error)
	PlanPart(head []byte, fileBytes, scan int, g *imagecapi.Geometry, blob []byte, piece int, memory []byte,
		used *atomic.Uint64) (imagecapi.Part, error)
	Transcode(data, buffer []byte) (n int, err error)
	MakeEntryPoints(data []byte, spacing int, buffer []byte) (n int, proof uint64, err error)
	PlanHead(head []byte, fileBytes, scan int, g *imagecapi.Geometry, blob []byte,
		ops []imagecapi.AugmentOp, buffer []byte) (n int, err error)
}

// NewPlanner returns a planner that uses the decoder. The caller closes the decoder.
func NewPlanner(s Settings, d sample.Decoder) *Planner {
	plans, _ := d.(planDecoder)
	return &Planner{Settings: s, Entries: NewDecoder(s.Points, d), d: plans}
}

// Plan plans a JPEG whose bytes are on the host. A baseline JPEG needs entry points that are proven
// or trusted. For a progressive JPEG, Plan makes a baseline copy. Plan returns false if the host
// has to decode the image.
func (p *Planner) Plan(m *Image, to *Staging) (Placed, bool) {
	if p.d == nil || p.Entries == nil || m.Info.Format != imagecapi.JPEG {
		return Placed{}, false
	}
	if m.Info.Progressive {
		c := p.Copy(m.Index)
		if c == nil {
			c = p.makeCopy(m)
		}
		if c == nil {
			return Placed{}, false
		}
		return p.PlanCopy(c, m, to)
	}
	e := p.Entries
	blob := e.stored(m.Index)
	if len(blob) == 0 {
		return Placed{}, false
	}
	proof := &e.proof
	if e.points.trusted {
		proof = nil
	} else if e.proof = e.points.proofs[m.Index].Load(); e.proof == 0 {
		return Placed{}, false
	}
	e.blob = blob
	row := p.append(m.Data, m, blob, proof, to)
	return Placed{Row: row, Redo: m.redo()}, row.Bytes > 0
}

// append writes the plan of a file, using the entry points in blob. It returns an empty row if
// there is no room, or if only the host can decode the image or run an operation.
func (p *Planner) append(file []byte, m *Image, blob []byte, proof *uint64, to *Staging) decodeplan.Row {
	if len(m.Ops) > 0 {
		return p.copied(to, func(buffer []byte) (int, error) {
			return p.d.PlanAugmented(file, m.Geometry, blob, proof, m.Ops, buffer)
		})
	}
	at, n, err := p.d.AppendPlan(file, m.Geometry, blob, proof, to.plans.Memory, &to.used)
	if err != nil { // the host reports the image's error
		return decodeplan.Row{}
	}
	return decodeplan.Row{At: at, Bytes: n}
}

// copied calls write with the planner's buffer, which grows as needed, and copies the plan to the
// staging. It returns an empty row if there is no plan or no room.
func (p *Planner) copied(to *Staging, write func(buffer []byte) (n int, err error)) decodeplan.Row {
	plan := p.written(write)
	if len(plan) == 0 {
		return decodeplan.Row{}
	}
	memory, row, _ := to.reserve(decodeplan.Row{Bytes: len(plan)})
	copy(memory, plan)
	return row
}

// written calls write with the planner's buffer, which grows as needed. It returns the plan, which
// is valid until the next call, or nil if there is none.
func (p *Planner) written(write func(buffer []byte) (n int, err error)) []byte {
	for {
		n, err := write(p.plans)
		if err != nil || n == 0 { // the host reports the image's error
			return nil
		}
		if n <= len(p.plans) {
			return p.plans[:n]
		}
		p.plans = alignedBytes(2 * n)
	}
}

// alignedBytes returns memory that is aligned for plans.
func alignedBytes(n int) []byte {
	memory := make([]byte, n+decodeplan.Align)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(memory))) % decodeplan.Align
	return memory[skip:][:n:n]
}

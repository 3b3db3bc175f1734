// Package decodeplan has the types that a source of images and the prefetcher share when the
// prefetcher's GPU decodes the images: the two do not import each other. Packages
// imageloader/decode and serve share them likewise.
package decodeplan

import "context"

// Planner leaves the decoding of a source's images to the prefetcher. A source that has one returns
// it from a method "Planner() decodeplan.Planner", as imageloader.Loader does. The source has two
// fields; its field "images" needs work on the device.
type Planner interface {
	// PlanBytes returns the size of a slot's memory for plans, as far as that can be known: images
	// whose plans have no room are decoded by the source. It returns an error that says why, if no
	// image can be left to a device.
	PlanBytes() (int, error)
	// MemberBytes returns the size of a slot's memory for plans, in the place of PlanBytes, and the
	// device memory that a batch is inflated into (Plans.Rooms), if the device is to inflate the
	// members of the source's archive. The source inflates members without room. 0, 0: it inflates
	// all.
	MemberBytes() (staging, rooms int)
	// StepsOnDevice reports whether the device runs every step on the pixels of every image.
	StepsOnDevice() bool
	// EntryBytes returns the size of a slot's memory for entry points that the device finds. Those
	// without room are found again in a later epoch. 0: the source keeps none.
	EntryBytes() int
	// FillPlans is the source's Fill for a consumer that also lends memory for the plans of a slot.
	// A row with a plan has undefined pixels in the slot; all other rows, and the labels, are as
	// Fill's. The plans describe the pixels that Fill would write, to the bit.
	FillPlans(ctx context.Context, epoch int, to Consumer) error
	// DecodeRow writes the pixels of a row of a batch, whose plan the device could not decode. It
	// decodes on the host. info is the batch's.
	DecodeRow(ctx context.Context, info any, row int, dst []byte) error
	// KeepEntryPoints takes what the device has found in the images of some rows of a batch, whose
	// info it has, and which it could decode: for each row Row.Found bytes. rows and found are not
	// kept.
	KeepEntryPoints(info any, rows []int, found [][]byte)
}

// Slot is the memory of one batch, which a consumer lends to a source.
type Slot struct {
	Images []byte // a row of pixels for each sample
	Labels []byte // the source's other field
	Plans  *Plans // nil: the source decodes all images
}

// Consumer takes the batches of an epoch.
type Consumer interface {
	// Lend returns the memory of the next batch. One goroutine at a time calls it. It may block
	// until memory is free, but not longer than ctx.
	Lend(ctx context.Context) (Slot, error)
	// Deliver takes a batch of n samples in the oldest slot that was lent. The slot is the
	// consumer's again. info travels with the batch.
	Deliver(n int, info any) error
}

// Plans holds the plans of one slot's images. The consumer owns it, and lends it together with the
// slot; the source fills it in until it delivers the batch.
type Plans struct {
	// Memory is where the source writes plans (imagecapi.PlanSegments): pinned memory, aligned to
	// Align bytes.
	Memory []byte
	// Rows has the place of each row's plan, for BatchSize rows.
	Rows []Row
	// Used is the number of bytes from the beginning of Memory that hold plans.
	Used int
	// HostRows is how many of each Group rows of the slot, the first ones, the source decodes
	// itself although it could plan them. The consumer sets it before it lends the slot.
	HostRows int
	// Rooms is the maximum of the sum of Member.Room of the rows. 0: the consumer does not inflate,
	// and no row has a member.
	Rooms int
}

// Row is the place of a row's plan in Plans.Memory. The zero value is that of a row whose pixels
// the source has written. Two rows may have one plan.
type Row struct {
	At, Bytes int
	// Found is the size of the entry points that the consumer finds in the image and hands back
	// (capi.CopyGPUDecoderEntries), in bytes. 0: it finds none, or the source keeps none.
	Found int
	// Member says where the image's compressed data come from if the plan has none
	// (imagecapi.PlanHead). The zero value: the plan has them.
	Member Member
}

// Member is a range of a deflate stream, with an image in it. Places are bytes from the beginning
// of the row's plan, behind the plan; the input's is a multiple of Align.
type Member struct {
	Input, InputBytes   int // compressed bytes, from a checkpoint on; 0 bytes: there is no member
	Window, WindowBytes int // the checkpoint's window, packed as in an index
	SkipBits            int // of the first byte
	Skip                int // bytes of output before the range
	Bytes               int // of the range
	Scan                int // byte of the range where the data of the image's scan begin
	Checksum            uint32
}

// Group is the number of consecutive rows of which a source decodes the first Plans.HostRows
// itself. The rows are contiguous, so that one copy transfers them.
const Group = 64

// Align is the alignment of a plan, in bytes.
const Align = 16

// window is TS_INFLATER_WINDOW_BYTES, and slack the bytes that a decoder wants behind a range.
const window, slack = 32 << 10, 16

// Room returns the bytes of device memory that the member is inflated into.
func (m *Member) Room() int { return Aligned(window + m.Skip + m.Bytes + slack) }

// Span returns the bytes of Plans.Memory from the beginning of the row's plan to the end of what
// belongs to it.
func (r *Row) Span() int {
	if m := &r.Member; m.InputBytes > 0 {
		return max(m.Input+m.InputBytes, m.Window+m.WindowBytes)
	}
	return r.Bytes
}

// Aligned returns the next multiple of Align.
func Aligned(bytes int) int { return (bytes + Align - 1) / Align * Align }

// Gaps calls use with each run of the rows 0 to n-1 that are not in planned, which ascends.
func Gaps(planned []int, n int, use func(first, rows int) error) error {
	first := 0
	for i := 0; i <= len(planned); i++ {
		end := n
		if i < len(planned) {
			end = planned[i]
		}
		if end > first {
			if err := use(first, end-first); err != nil {
				return err
			}
		}
		first = end + 1
	}
	return nil
}

// Package decodeplan has the types that a source of images and a prefetcher share when the
// prefetcher's GPU decodes the images. With it, source and prefetcher need not import each other.
// Packages imageloader/decode and serve share the types in the same way.
package decodeplan

import "context"

// Planner plans the decoding of a source's images for a prefetcher. A source that supports this has
// a method "Planner() decodeplan.Planner", as imageloader.Loader does. Such a source has two
// fields, and its field "images" needs work on the device.
type Planner interface {
	// PlanBytes returns the size of a slot's memory for plans. It is an estimate: the source
	// decodes images whose plans do not fit. If no image can be decoded on a device, the error says
	// why.
	PlanBytes() (int, error)
	// MemberBytes replaces PlanBytes if the device also inflates the members of the source's
	// archive. It returns two sizes: staging is a slot's memory for plans, and rooms is the device
	// memory for the inflated members of a batch (Plans.Rooms). The source inflates members that do
	// not fit. If both sizes are 0, it inflates all members.
	MemberBytes() (staging, rooms int)
	// StepsOnDevice reports whether the device can run every pixel step on every image.
	StepsOnDevice() bool
	// EntryBytes returns the size of a slot's memory for entry points that the device finds. If
	// entry points do not fit, a later epoch searches for them again. If the size is 0, the source
	// keeps no entry points.
	EntryBytes() int
	// Hold keeps host memory of which plans have parts (File.From, Member.From) until release, even
	// if the source is closed. A consumer calls release once, when its devices no longer read the
	// memory.
	Hold() (release func())
	// FillPlans is like the source's Fill, for a consumer that also lends memory for a slot's
	// plans. The pixels of a row with a plan are undefined in the slot; labels and other rows are
	// the same as with Fill. A plan produces the same pixels as Fill, bit for bit.
	FillPlans(ctx context.Context, epoch int, to Consumer) error
	// DecodeRow decodes a row of a batch on the host and writes its pixels to dst. A consumer calls
	// it for rows whose plan the device could not decode. info is the value with which the batch
	// was delivered.
	DecodeRow(ctx context.Context, info any, row int, dst []byte) error
	// KeepEntryPoints receives the entry points that the device found in some rows of a batch,
	// Row.Found bytes for each row. info is the value with which the batch was delivered. rows must
	// have only rows that the device was able to decode. The planner does not retain rows and
	// found.
	KeepEntryPoints(info any, rows []int, found [][]byte)
	// Checked says that no call of DecodeRow will follow for a batch, which may have kept the
	// images' files until now. info is the value with which the batch was delivered. After an error
	// of the batch or of its epoch, the consumer need not call Checked.
	Checked(info any)
}

// Slot is the memory for one batch, lent by a consumer to a source.
type Slot struct {
	Images []byte // a row of pixels for each sample
	Labels []byte // the source's second field
	Plans  *Plans // nil if the source has to decode all images
}

// Consumer receives the batches of an epoch.
type Consumer interface {
	// Lend returns the memory for the next batch. One goroutine at a time calls it. It may block
	// until memory is free or ctx ends.
	Lend(ctx context.Context) (Slot, error)
	// Deliver passes a batch of n samples in the oldest lent slot to the consumer. The consumer
	// then owns the slot again. info is passed along with the batch.
	Deliver(n int, info any) error
}

// Plans holds the plans of one slot's images. The consumer owns it and lends it together with the
// slot. The source may write to it until it delivers the batch.
type Plans struct {
	// Memory receives the plans (imagecapi.PlanSegments). It is pinned memory, aligned to Align
	// bytes.
	Memory []byte
	// Rows has one entry for each of BatchSize rows.
	Rows []Row
	// Used is the number of bytes at the start of Memory that hold plans.
	Used int
	// HostRows is the number of rows that the source decodes itself in each group of Group rows,
	// although it could plan them. They are the first rows of the group. The consumer sets HostRows
	// before it lends the slot.
	HostRows int
	// Register lets the consumer's devices read host memory themselves, such as a mapped file,
	// until release. It pins the memory and is safe for concurrent use. If Register is nil, no row
	// may have a File or a Member.From.
	Register func(memory []byte) (release func() error, err error)
	// Rooms limits the sum of Member.Room over the rows. If it is 0, the consumer does not inflate,
	// and no row has a member.
	Rooms int
}

// Row is the range of a row's plan in Plans.Memory. In the zero value there is no plan: the source
// has written the row's pixels. Two rows may share one plan,
// unless it has a Member or a File.
type Row struct {
	At, Bytes int
	// Found is the size in bytes of the entry points that the consumer finds in the image and
	// returns (capi.CopyGPUDecoderEntries). It is 0 if the consumer does not search for any, or if
	// the source keeps none.
	Found int
	// Member is the image's compressed data, if the plan does not contain the image's data
	// (imagecapi.PlanHead). The zero value means that the plan contains the data.
	Member Member
	// File is the part of the image's file that the consumer reads, if the plan has only room for
	// it (imagecapi.PlanPart). The zero value means that the plan contains the data.
	File File
}

// File is a part of a file in memory for which Plans.Register was called. In the plan, the room for
// the part starts with the digests of the part's pieces (imageloader/internal/digest). A consumer
// that finds another digest cannot decode the image.
type File struct {
	From *byte                // first byte of the part
	Key  *[DigestWords]uint64 // of the digests; the same for all rows of a batch
}

// DigestWords is the size of the key of digests.
const DigestWords = 80

// Member is a range of a deflate stream's output that contains an image. Window and Input are
// offsets in bytes from the start of the row's plan. Both are after the plan. Input is a multiple
// of Align.
type Member struct {
	Input, InputBytes int // compressed bytes, starting at a checkpoint; 0 bytes if there is no member
	// From is the first compressed byte in memory for which Plans.Register was called. The consumer
	// then reads the compressed bytes, for which Plans.Memory has only room. It compares Checksum
	// afterwards, so they have no digests. If From is nil, Plans.Memory has the compressed bytes.
	From                *byte
	Window, WindowBytes int // the checkpoint's window, packed as in an index
	SkipBits            int // bits of the first byte to skip
	Skip                int // bytes of output before the range
	Bytes               int // size of the range
	Scan                int // offset of the image's scan data in the range
	Checksum            uint32
}

// Group is the number of consecutive rows to which one count of Plans.HostRows applies. The host's
// rows of a group are contiguous, so that one copy transfers them.
const Group = 64

// Align is the alignment of a plan, in bytes.
const Align = 16

// window is TS_INFLATER_WINDOW_BYTES. slack is the number of bytes after a range that a decoder may
// read.
const window, slack = 32 << 10, 16

// Room returns the size of the device memory that the member is inflated into, in bytes.
func (m *Member) Room() int { return Aligned(window + m.Skip + m.Bytes + slack) }

// Span returns the size of the row's data in Plans.Memory, from the start of its plan, in bytes.
func (r *Row) Span() int {
	if m := &r.Member; m.InputBytes > 0 {
		return max(m.Input+m.InputBytes, m.Window+m.WindowBytes)
	}
	return r.Bytes
}

// Aligned rounds bytes up to a multiple of Align.
func Aligned(bytes int) int { return (bytes + Align - 1) / Align * Align }

// Gaps calls use for each run of consecutive rows from 0 to n-1 that are not in planned. planned
// must be in ascending order.
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

package torch

import (
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// DLPackOptions say how a tensor goes to another library of the process, or comes from it. The zero
// value is for a library that works on the default stream of the tensor's GPU, as DLPack's
// specification for Python assumes of one that names no stream.
type DLPackOptions struct {
	// Stream is where the other library works on a GPU's memory; cuda.ExternalStream makes one of a
	// cudaStream_t. The zero value, as any default stream, is the default stream of the tensor's
	// GPU. It has no meaning for memory of the host.
	//
	// The other library must not destroy its stream before the struct's deleter is called, which
	// may be later than the Close of an imported tensor, nor before the end of an exported tensor
	// and all that shares its memory: the memory goes back in order with the stream.
	Stream cuda.Stream
	// NoOrder leaves the order to the program: no stream waits for another. The specification's
	// stream -1.
	NoOrder bool
	// Unversioned selects DLPack's struct from before version 1.0, DLManagedTensor, instead of
	// DLManagedTensorVersioned.
	Unversioned bool
	// ReadOnly lets FromDLPack accept memory that the other library has marked as read-only. The
	// program must not write to the tensor: nothing stops an operator that does.
	ReadOnly bool
}

// ToDLPack returns a DLPack struct over the tensor's memory, for another library of the process: a
// *DLManagedTensorVersioned of dlpack.h, in C memory. Nothing is copied, and both sides see the
// changes of either. The memory lives until the struct's deleter is called, also after the tensor's
// Close. The other library calls the deleter; if none takes the struct, [FreeDLPack] does.
//
// Work that is queued on o.Stream from now on starts after the work so far of the tensor's current
// stream, and the memory is not reused before o.Stream's work at the deleter's call is done. If
// this program goes on writing to the tensor, it orders that after o.Stream itself.
//
// ToDLPack refuses, with cuda.ErrInvalidArgument, tensors that require a gradient (Detach them),
// views that negate or conjugate (Clone them), dtypes that DLPack lacks, and tensors of a slot,
// whose memory later batches overwrite (Clone them). In a captured function it returns
// cuda.ErrCapture for a GPU's tensor.
func (t *Tensor) ToDLPack(o DLPackOptions) (managed unsafe.Pointer, err error) {
	err = t.use("ToDLPack", func(c *capi.Tensor) error {
		if err := refuseLent(c); err != nil {
			return err
		}
		var err error
		managed, err = capi.ExportDLPack(c, o.Stream.CAPI(), o.flags(), !o.Unversioned)
		return err
	})
	return managed, err
}

// refuseLent refuses memory that its owner refills, as Keep does.
func refuseLent(c *capi.Tensor) error {
	lent, err := capi.IsLent(c)
	if lent {
		err = invalid("the tensor is in a slot, which later batches overwrite: Clone the tensor")
	}
	return err
}

// FromDLPack returns a tensor over the memory of a DLPack struct: a *DLManagedTensorVersioned, or
// with o.Unversioned a *DLManagedTensor, of another library of the process. If it succeeds, the
// struct belongs to the tensor; otherwise it stays the caller's (see [FreeDLPack]). The caller owns
// the tensor.
//
// Work that is queued on the current stream from now on starts after the work so far of o.Stream.
// When the tensor and everything that shares its memory have gone, o.Stream waits for the work so
// far of the stream that is current now, and of those of [Tensor.RecordStream]; then a thread of
// the library calls the struct's deleter. So the deleter may be a Go function. One thread gives
// back all foreign memory, that of shared tensors ([OpenShared]) too, in the order in which the
// tensors end: a deleter that blocks holds back what follows, and no call of the program.
//
// The struct may be wrong: dimensions, sizes, strides, dtype, alignment, device, and whose memory
// the pointer of a GPU's is are checked before the memory is touched (cuda.ErrInvalidArgument).
// That the memory is as large as the struct says, and that host memory is there, cannot be checked.
// A struct of another major version is cuda.ErrUnsupported. In a captured function FromDLPack
// returns cuda.ErrCapture for a GPU's memory. Copies from pinned memory (kDLCUDAHost) may be
// NonBlocking: end them before the tensor.
func FromDLPack(managed unsafe.Pointer, o DLPackOptions) (*Tensor, error) {
	var c *capi.Tensor
	var err error
	if managed == nil {
		err = invalid("the struct is nil")
	} else {
		c, err = capi.ImportDLPack(managed, o.Stream.CAPI(), o.flags(), !o.Unversioned)
	}
	return made("FromDLPack", c, err)
}

// FreeDLPack calls the deleter of a struct of [Tensor.ToDLPack], or of another library, that nobody
// has taken. nil is accepted. o.Unversioned says what the struct is.
func FreeDLPack(managed unsafe.Pointer, o DLPackOptions) {
	if managed != nil {
		capi.FreeDLPack(managed, !o.Unversioned)
	}
}

func (o DLPackOptions) flags() (f int32) {
	if o.NoOrder {
		f |= capi.DLPackNoOrder
	}
	if o.ReadOnly {
		f |= capi.DLPackReadOnly
	}
	return f
}

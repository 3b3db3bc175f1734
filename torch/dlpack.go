package torch

import (
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// DLPackOptions are the options for exchanging a tensor with another library of the process. The
// zero value is for a library that works on the default stream of the tensor's GPU. DLPack's
// specification for Python assumes this stream if a library names none.
type DLPackOptions struct {
	// Stream is the other library's stream for a GPU's memory. cuda.ExternalStream converts a
	// cudaStream_t. The zero value, like any default stream, is the default stream of the tensor's
	// GPU. It has no meaning for host memory.
	//
	// The return of the memory is also ordered with the work on the stream, so the other library
	// must keep the stream until then. For an imported tensor, it must not destroy the stream
	// before the struct's deleter is called, which may be later than the tensor's Close. For an
	// exported tensor, it must not destroy the stream before the tensor and everything that shares
	// its memory have gone.
	Stream cuda.Stream
	// NoOrder leaves the ordering to the program: no stream waits for another. It is the
	// specification's stream -1.
	NoOrder bool
	// Unversioned selects DLPack's struct from before version 1.0, DLManagedTensor, instead of
	// DLManagedTensorVersioned.
	Unversioned bool
	// ReadOnly lets FromDLPack accept memory that the other library has marked as read-only. The
	// program must not write to the tensor. Operators do not check this.
	ReadOnly bool
}

// ToDLPack returns a DLPack struct over the tensor's memory, for another library of the process: a
// *DLManagedTensorVersioned of dlpack.h, in C memory. Nothing is copied, and each side sees the
// other's changes. The memory lives until the struct's deleter is called, also after the tensor's
// Close. The other library calls the deleter. If no library takes the struct, call [FreeDLPack].
//
// ToDLPack orders o.Stream after the work that is already on the current stream of the tensor's
// GPU. When the deleter is called, the memory is not reused before the work that is then on
// o.Stream is done. If this program continues to write to the tensor, it must order the writes
// after o.Stream itself.
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

// FromDLPack returns a tensor over the memory of a DLPack struct of another library of the process:
// a *DLManagedTensorVersioned, or with o.Unversioned a *DLManagedTensor. If it succeeds, the tensor
// owns the struct. Otherwise the caller still owns it (see [FreeDLPack]). The caller owns the
// tensor.
//
// FromDLPack orders the current stream after the work that is already on o.Stream. When the tensor
// and everything that shares its memory have gone, o.Stream waits for the work that is then on the
// stream of the import (the current stream of the call of FromDLPack) and on the streams of
// [Tensor.RecordStream]. Then a thread of the library calls the struct's deleter, which may be a Go
// function. One thread returns all foreign memory, including shared tensors' ([OpenShared]), in the
// order in which the tensors end. A deleter that blocks delays later deleters, but no call of the
// program.
//
// The struct may be wrong. Before the memory is used, FromDLPack checks dimensions, sizes, strides,
// dtype, alignment and device, and the owner of a GPU's pointer (cuda.ErrInvalidArgument). It
// cannot check that the memory is as large as the struct says, or that host memory exists. A struct
// of another major version is cuda.ErrUnsupported. In a captured function FromDLPack returns
// cuda.ErrCapture for a GPU's memory. Copies from pinned memory (kDLCUDAHost) may be NonBlocking:
// wait for them before closing the tensor.
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

// FreeDLPack calls the deleter of a struct of [Tensor.ToDLPack], or of another library, that has no
// owner yet. nil is accepted. o.Unversioned selects the type of the struct.
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

package torch

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// SharedHandle names a tensor that another process shares. It is a value that processes pass to
// each other as bytes. It is not a secret: the operating system protects the memory from other
// users.
type SharedHandle struct{ h sharedHandle }

type sharedHandle struct {
	pid, fd int32    // the owner's process number, and its descriptor of the control file
	nonce   [16]byte // also in the control file, because process numbers and descriptors are reused
	dtype   int32
	size    []int64
	stride  []int64
	gpu     bool
	// Of a GPU's tensor:
	uuid   [16]byte
	offset int64 // in bytes, from the start of the allocation
	memory capi.IPCHandle
	event  cuda.EventHandle
}

// handleMagic starts the bytes of a handle. It changes with their format.
const handleMagic = "tsshare1"

const maxSharedDims = 64 // LibTorch's maximum

// MarshalBinary returns the handle as bytes, for another process with the same version of this
// library.
func (h SharedHandle) MarshalBinary() ([]byte, error) {
	if err := h.h.check(); err != nil {
		return nil, err
	}
	order := binary.LittleEndian
	b := []byte(handleMagic)
	b = order.AppendUint32(b, uint32(h.h.pid))
	b = order.AppendUint32(b, uint32(h.h.fd))
	b = append(b, h.h.nonce[:]...)
	b = append(b, byte(h.h.dtype), byte(len(h.h.size)), 0)
	for _, n := range slices.Concat(h.h.size, h.h.stride) {
		b = order.AppendUint64(b, uint64(n))
	}
	if h.h.gpu {
		b[len(handleMagic)+4+4+16+2] = 1
		b = append(b, h.h.uuid[:]...)
		b = order.AppendUint64(b, uint64(h.h.offset))
		b = append(b, h.h.memory[:]...)
		b = append(b, h.h.event[:]...)
	}
	return order.AppendUint32(b, crc32.ChecksumIEEE(b)), nil
}

// UnmarshalBinary sets the handle from the bytes of MarshalBinary. For other bytes it returns
// cuda.ErrInvalidArgument and changes nothing.
func (h *SharedHandle) UnmarshalBinary(b []byte) error {
	order := binary.LittleEndian
	const fixed = len(handleMagic) + 4 + 4 + 16 + 3
	if len(b) < fixed+4 || string(b[:len(handleMagic)]) != handleMagic {
		return invalid("%d bytes that are no SharedHandle of this version", len(b))
	}
	body, sum := b[:len(b)-4], order.Uint32(b[len(b)-4:])
	if crc32.ChecksumIEEE(body) != sum {
		return invalid("the bytes of the SharedHandle are damaged: their checksum differs")
	}
	take := func(n int) []byte {
		taken := body[:n]
		body = body[n:]
		return taken
	}
	take(len(handleMagic))
	n := sharedHandle{pid: int32(order.Uint32(take(4))), fd: int32(order.Uint32(take(4)))}
	copy(n.nonce[:], take(16))
	kind := take(3)
	n.dtype, n.gpu = int32(kind[0]), kind[2] == 1
	dims, rest := int(kind[1]), 0
	if n.gpu {
		rest = len(n.uuid) + 8 + len(n.memory) + len(n.event)
	}
	if kind[2] > 1 || dims > maxSharedDims || len(body) != 16*dims+rest {
		return invalid("a SharedHandle of %d bytes cannot have %d dimensions", len(b), dims)
	}
	integers := func(count int) []int64 {
		values := make([]int64, count)
		for i := range values {
			values[i] = int64(order.Uint64(take(8)))
		}
		return values
	}
	n.size, n.stride = integers(dims), integers(dims)
	if n.gpu {
		copy(n.uuid[:], take(len(n.uuid)))
		n.offset = int64(order.Uint64(take(8)))
		copy(n.memory[:], take(len(n.memory)))
		copy(n.event[:], take(len(n.event)))
	}
	if err := n.check(); err != nil {
		return err
	}
	h.h = n
	return nil
}

// check refuses values that Share never makes.
func (h *sharedHandle) check() error {
	switch {
	case h.pid <= 0:
		return invalid("the SharedHandle is zero, or not from Share")
	case h.fd < 0 || h.offset < 0:
		return invalid("the SharedHandle has a negative number")
	case len(h.size) > maxSharedDims || len(h.size) != len(h.stride):
		return invalid("the SharedHandle has %d sizes and %d strides", len(h.size), len(h.stride))
	case !knownDType(DType(h.dtype)):
		return invalid("the SharedHandle has the dtype %d", h.dtype)
	}
	for i := range h.size {
		if h.size[i] < 1 || h.stride[i] < 0 {
			return invalid("the SharedHandle has the sizes %v and strides %v", h.size, h.stride)
		}
	}
	return nil
}

func knownDType(d DType) bool {
	switch d {
	case Uint8, Int8, Int16, Int32, Int64, Bool, Complex64, Complex128:
		return true
	}
	return isFloat(d)
}

// String returns a name for messages: "handle of float32[2 3] in process 123".
func (h SharedHandle) String() string {
	if h.h.pid == 0 {
		return "zero handle of a shared tensor"
	}
	where := ""
	if h.h.gpu {
		where = fmt.Sprintf(" on GPU %x", h.h.uuid)
	}
	return fmt.Sprintf("handle of %v%v%s in process %d", DType(h.h.dtype), h.h.size, where, h.h.pid)
}

// Check reports whether the owner still shares the tensor. The error matches [ErrClosed] if the
// owner has closed the Shared, or has ended. In that case a GPU's tensors of OpenShared must not be
// used any more.
func (h SharedHandle) Check() error {
	if err := h.h.check(); err != nil {
		return err
	}
	file, err := openControl(&h.h)
	if err != nil {
		return err
	}
	defer file.Close()
	return ownerHolds(file, &h.h)
}

func goneOwner(h *sharedHandle) error {
	return closedError(fmt.Sprintf("the tensor is no longer shared: process %d has closed it, or has ended", h.pid))
}

// closeDescriptor closes a descriptor that the C++ side has not taken over.
func closeDescriptor(fd int) { os.NewFile(uintptr(fd), "shared").Close() }

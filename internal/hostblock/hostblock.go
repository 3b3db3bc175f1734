// Package hostblock allocates tensors that live for a short time, such as the weights of a file, in
// one block of host memory.
package hostblock

import (
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// mapped is the size from which a block is mapped, outside of malloc's heaps (kMappedBlock in
// cshim/src/base/heap.h). malloc has a heap for each of several threads, and each would keep what
// its thread has freed. Pages of a block that nothing writes take no memory.
const mapped = 32 << 20

// alignment of each tensor, in bytes.
const alignment = 64

// Bytes returns the size of a block for the tensors.
func Bytes(specs []torch.Spec) int64 {
	sum := int64(0)
	for _, s := range specs {
		sum += aligned(s)
	}
	return sum
}

func aligned(s torch.Spec) int64 { return (s.Bytes() + alignment - 1) / alignment * alignment }

// New returns contiguous tensors on the CPU. Their values are undefined. The scope owns them.
func New(scope *torch.Scope, specs []torch.Spec) ([]*torch.Tensor, error) {
	if len(specs) == 0 {
		return nil, nil
	}
	bytes, err := torch.Empty(cuda.CPU, torch.Uint8, max(Bytes(specs), mapped))
	if err != nil {
		return nil, fmt.Errorf("a block of %d bytes: %w", Bytes(specs), err)
	}
	bytes = scope.Own(bytes).NoGrad()
	all := make([]*torch.Tensor, len(specs))
	start := int64(0)
	for i, s := range specs {
		all[i] = bytes.Narrow(0, start, s.Bytes()).ViewDType(s.DType).View(s.Shape...)
		if err := all[i].Err(); err != nil {
			return nil, fmt.Errorf("tensor %s: %w", s.Name, err)
		}
		start += aligned(s)
	}
	return all, nil
}

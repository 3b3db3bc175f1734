package torch

import (
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// CopyPeer copies every src[i] to dst[i] between two GPUs, with both streams named: the
// destinations are on dstStream's device, the sources on srcStream's. Pairs have the same shape and
// dtype: otherwise it is an error and nothing is enqueued.
//
// The copies run on srcStream, after what both streams have queued so far; what is queued on either
// of the two from now on starts after them. The host does not wait. So a copy runs beside compute
// only if neither stream is the one that computes, and if srcStream is not the default stream,
// which the driver orders against both devices' work:
//
//	side0.Wait(compute0)                          // src is computed there
//	torch.CopyPeer(dst, side1, src, side0)
//	compute1.Wait(side1)                          // before dst is read there
//	compute0.Wait(side0)                          // before src is changed or closed there
//
// The sources must stay as they are until the copies are done. Strides that differ between the two,
// or leave gaps, need memory on the way. Where the one GPU cannot write the other's memory
// ([cuda.Device.CanAccessPeer]), the driver copies through the host. The two devices may be one.
func CopyPeer(dst []*Tensor, dstStream cuda.Stream, src []*Tensor, srcStream cuda.Stream) error {
	all := make([]*Tensor, 0, 16)
	all = append(append(all, dst...), src...)
	if len(dst) != len(src) {
		return opError("CopyPeer", all, invalid("%d destinations and %d sources", len(dst), len(src)))
	}
	return with("CopyPeer", all, func(c []*capi.Tensor) error {
		return capi.CopyPeer(dstStream.CAPI(), c[:len(dst)], srcStream.CAPI(), c[len(dst):])
	})
}

package torch

import (
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// CopyPeer copies every src[i] to dst[i] between two GPUs on two named streams: the destinations
// are on dstStream's device, the sources on srcStream's. Pairs must have the same shape and dtype.
// Otherwise CopyPeer returns an error and enqueues nothing.
//
// The copies run on srcStream, after all work that is already on either stream. Work that is later
// queued on either stream starts after the copies. The host does not wait. For a copy during
// compute, neither stream may be the compute stream, and srcStream must not be the default stream,
// because the driver orders default streams against the work of both devices:
//
//	side0.Wait(compute0)                          // src is computed there
//	torch.CopyPeer(dst, side1, src, side0)
//	compute1.Wait(side1)                          // before dst is read there
//	compute0.Wait(side0)                          // before src is changed or closed there
//
// The sources must stay unchanged until the copies are done. If the strides of source and
// destination differ, or leave gaps, the copy needs temporary memory. If one GPU cannot write the
// other's memory ([cuda.Device.CanAccessPeer]), the driver copies through the host. Both devices
// may be the same.
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

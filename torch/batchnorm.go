package torch

import "github.com/torchstream/torchstream/internal/capi"

// BatchNormReLU computes t.[Tensor.BatchNorm] in training mode, then Add_(residual) unless residual
// is nil, and then ReLU_. weight and bias may be nil, and so may runningMean and runningVar.
//
// On a GPU, BatchNormReLU runs two fused kernels, and two in backward, if three conditions hold:
//
//   - t is float32, float16 or bfloat16 [N C H W], ChannelsLast, with a C that is a multiple of 4
//     (float32) or 8.
//   - residual has the same shape, dtype and memory format.
//   - The other tensors are float32 [C].
//
// The fused kernels save the separate operators' reads and writes of memory. For given statistics,
// the values equal the operators' to the bit. The statistics are summed in another order, which is
// always the same. For other tensors BatchNormReLU calls the operators.
func (t *Tensor) BatchNormReLU(weight, bias, runningMean, runningVar, residual *Tensor, momentum, eps float64) *Tensor {
	e := opBatchNorm.entry()
	in := [...]*Tensor{t, weight, bias, runningMean, runningVar, residual}
	var cs [len(in)]*capi.Tensor
	p, err := e.hold(in[:], nil, cs[:])
	if err != nil {
		return failed(err)
	}
	c, err := capi.BatchNormReLU(&cs, momentum, eps, int32(p.marks))
	letGo(in[:])
	if err != nil {
		return failed(opError("BatchNormReLU", in[:], err))
	}
	if c != nil {
		return opBatchNorm.result(p, in[:], c)
	}
	y := t.BatchNorm(weight, bias, runningMean, runningVar, true, momentum, eps)
	if residual != nil {
		y = y.Add_(residual)
	}
	return y.ReLU_()
}

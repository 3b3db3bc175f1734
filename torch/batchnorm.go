package torch

import "github.com/torchstream/torchstream/internal/capi"

// BatchNormReLU computes t.[Tensor.BatchNorm] in training, Add_(residual) unless residual is nil,
// and ReLU_. weight and bias, and runningMean and runningVar, may be nil.
//
// On a GPU, BatchNormReLU runs two fused kernels, and two in backward, if t is float32, float16 or
// bfloat16 [N C H W], ChannelsLast, with a C that is a multiple of 4 (float32) or 8, residual is
// like t, and the others are float32 [C]. This saves the separate operators' reads and writes of
// memory. Given the statistics, the values have the same bits as the operators'. The statistics are
// summed in another order, which is always the same. For other tensors BatchNormReLU calls the
// operators.
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

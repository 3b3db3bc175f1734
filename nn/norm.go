package nn

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// ErrOneValue reports statistics over a single value per channel, which have no variance. An
// example is a [BatchNorm] in training on one sample of one pixel.
var ErrOneValue = errors.New("the statistics need more than one value per channel")

// BatchNorm is the common part of BatchNorm1d, BatchNorm2d and BatchNorm3d. It normalises each
// channel. In training it uses the mean and variance of the batch, and updates the running
// statistics with them. In evaluation it uses the running statistics.
type BatchNorm struct {
	layer
	switchable
	Weight, Bias *torch.Tensor // [C], initially 1 and 0; nil with NoAffine
	// Running statistics: mean and variance are [C], NumBatches is the int64 count of training
	// batches. Forward in training changes them in place, so two goroutines must not train one
	// module concurrently. They are nil with NoRunningStats.
	RunningMean, RunningVar, NumBatches *torch.Tensor

	momentum, eps float64
	ranks         []int         // the accepted numbers of input dimensions
	shared        BatchNormFunc // set by Synchronize, or nil
	counts        *BatchCounts  // set by NewBatchCounts, or nil
}

func (b *BatchNorm) countWith(c *BatchCounts) { b.counts = c }

// BatchNormFunc computes the output of a [BatchNorm] in training. It normalises x by the mean and
// variance of each channel, and updates the running statistics in place. Each of the other tensors
// is nil if the module lacks it. The output is a new tensor that the function's backward does not
// need: [BatchNorm.ForwardReLU] overwrites it.
type BatchNormFunc func(x, weight, bias, runningMean, runningVar *torch.Tensor, momentum, eps float64) *torch.Tensor

// Synchronize makes the module call fn in training, instead of the operator that normalises by the
// statistics of x alone. A nil fn undoes that. A batch may then have one value per channel, or
// none, since fn can use more data than x: distributed.ConvertSyncBatchNorm passes functions for a
// batch that several ranks share. Parameters, buffers, their names and evaluation do not change. Do
// not call Synchronize while another goroutine uses the module.
func (b *BatchNorm) Synchronize(fn BatchNormFunc) { b.shared = fn }

// BatchNormOptions are the options of NewBatchNorm1d, NewBatchNorm2d and NewBatchNorm3d.
type BatchNormOptions struct {
	Momentum       float64 // the weight of a new batch in the running statistics; 0 stands for 0.1
	Eps            float64 // added to the variance; 0 stands for 1e-5
	NoAffine       bool    // no weight and bias
	NoRunningStats bool    // use the batch's statistics in evaluation too
}

// The options of NewBatchNorm1d, NewBatchNorm2d and NewBatchNorm3d.
type (
	BatchNorm1dOptions = BatchNormOptions
	BatchNorm2dOptions = BatchNormOptions
	BatchNorm3dOptions = BatchNormOptions
)

func (b *BatchNorm) construct(dims, channels int, o BatchNormOptions) {
	kind := fmt.Sprintf("BatchNorm%dd", dims)
	op := "nn.New" + kind
	b.create(kind)
	b.momentum, b.eps = or(o.Momentum, 0.1), or(o.Eps, 1e-5)
	b.ranks = []int{dims + 2}
	if dims == 1 {
		b.ranks = []int{2, 3}
	}
	if bad := positive(op, "channels", channels); bad != nil {
		b.Weight, b.Bias, b.RunningMean, b.RunningVar, b.NumBatches = bad, bad, bad, bad, bad
		return
	}
	b.Weight, b.Bias = affine(op, o.NoAffine, int64(channels))
	if !o.NoRunningStats {
		b.RunningMean, b.RunningVar, b.NumBatches = runningStats(op, channels)
	}
}

// affine returns a weight of ones and a bias of zeros, or nil twice.
func affine(op string, none bool, shape ...int64) (weight, bias *torch.Tensor) {
	if none {
		return nil, nil
	}
	return parameter(op, Constant(1), shape...), parameter(op, Constant(0), shape...)
}

func runningStats(op string, channels int) (mean, variance, count *torch.Tensor) {
	m, err := torch.Zeros(cuda.CPU, torch.Float32, int64(channels))
	mean = buffer(op, m, err)
	v, err := torch.Ones(cuda.CPU, torch.Float32, int64(channels))
	variance = buffer(op, v, err)
	n, err := torch.Zeros(cuda.CPU, torch.Int64)
	return mean, variance, buffer(op, n, err)
}

const batchCount = "num_batches_tracked"

func statistics(mean, variance, count *torch.Tensor) []torch.Named {
	return named(torch.Named{Name: "running_mean", Tensor: mean},
		torch.Named{Name: "running_var", Tensor: variance}, torch.Named{Name: batchCount, Tensor: count})
}

// Forward computes the normalised input. In training a batch with one value per channel is an
// error, [ErrOneValue].
func (b *BatchNorm) Forward(x *torch.Tensor) *torch.Tensor { return b.result(b.normalise(x), x) }

// ForwardReLU computes max(Forward(x) + residual, 0), or max(Forward(x), 0) if residual is nil. A
// residual has the shape of x. In training on a GPU it runs two kernels instead of three operators,
// for the inputs that [torch.Tensor.BatchNormReLU] lists. Otherwise, and with
// [BatchNorm.Synchronize], it runs the separate operators.
func (b *BatchNorm) ForwardReLU(x, residual *torch.Tensor) *torch.Tensor {
	if b.shared == nil && b.training() {
		if bad := b.begin(x); bad != nil {
			return b.result(bad, x)
		}
		return b.result(x.BatchNormReLU(b.Weight, b.Bias, b.RunningMean, b.RunningVar, residual, b.momentum,
			b.eps), x, residual)
	}
	y := b.Forward(x)
	if residual != nil {
		y = y.Add_(residual)
	}
	return y.ReLU_()
}

func (b *BatchNorm) normalise(x *torch.Tensor) *torch.Tensor {
	training := b.training()
	if training {
		if bad := b.begin(x); bad != nil {
			return bad
		}
		if b.shared != nil && x.Err() == nil {
			return b.shared(x, b.Weight, b.Bias, b.RunningMean, b.RunningVar, b.momentum, b.eps)
		}
	}
	own := training || b.RunningMean == nil // the batch's statistics
	return x.BatchNorm(b.Weight, b.Bias, b.RunningMean, b.RunningVar, own, b.momentum, b.eps)
}

// begin checks and counts a training batch. It returns nil, or a failed tensor. A failed x is not
// counted.
func (b *BatchNorm) begin(x *torch.Tensor) *torch.Tensor {
	if x.Err() != nil {
		return nil
	}
	if bad := checkStatistics(b.kind, x.Shape(), b.ranks, b.shared == nil, true); bad != nil {
		return bad
	}
	if b.NumBatches != nil && !b.counts.later(b.NumBatches, x.Scope()) {
		if counted := b.NumBatches.NoGrad().AddInt_(1); counted.Err() != nil {
			return counted
		}
	}
	return nil
}

// checkStatistics checks an input of the given size. It returns a failed tensor if ranks lacks the
// number of dimensions, or if the input's own statistics would have one value per channel and so no
// variance. The statistics are over dimensions 2 and higher, and with batch also over dimension 0.
// ranks is nil if no constructor made the module. size is nil if the input is closed; the operator
// reports that.
func checkStatistics(kind string, size []int64, ranks []int, own, batch bool) *torch.Tensor {
	if ranks == nil || size == nil {
		return nil
	}
	if !slices.Contains(ranks, len(size)) {
		want := strconv.Itoa(ranks[0])
		for _, r := range ranks[1:] {
			want += " or " + strconv.Itoa(r)
		}
		return invalid("nn."+kind, "the input is %v, and it must have %s dimensions", size, want)
	}
	values := int64(1)
	for i, n := range size {
		if i >= 2 || i == 0 && batch {
			values *= n
		}
	}
	if own && values == 1 {
		return invalid("nn."+kind, "%w, and the input is %v: give it more samples, or larger ones", ErrOneValue, size)
	}
	return nil
}

// Parts returns weight and bias, and the running statistics as buffers.
func (b *BatchNorm) Parts() Parts {
	p := weightAndBias(b.Weight, b.Bias)
	p.Buffers = statistics(b.RunningMean, b.RunningVar, b.NumBatches)
	return p
}

// BatchNorm1d normalises the channels of [N C] or [N C L].
type BatchNorm1d struct{ BatchNorm }

// NewBatchNorm1d returns a normalisation of the given number of channels.
func NewBatchNorm1d(channels int, o BatchNorm1dOptions) *BatchNorm1d {
	b := &BatchNorm1d{}
	b.construct(1, channels, o)
	return b
}

// BatchNorm2d normalises the channels of images [N C H W].
type BatchNorm2d struct{ BatchNorm }

// NewBatchNorm2d returns a normalisation of images with the given number of channels.
func NewBatchNorm2d(channels int, o BatchNorm2dOptions) *BatchNorm2d {
	b := &BatchNorm2d{}
	b.construct(2, channels, o)
	return b
}

// BatchNorm3d normalises the channels of volumes [N C D H W].
type BatchNorm3d struct{ BatchNorm }

// NewBatchNorm3d returns a normalisation of volumes with the given number of channels.
func NewBatchNorm3d(channels int, o BatchNorm3dOptions) *BatchNorm3d {
	b := &BatchNorm3d{}
	b.construct(3, channels, o)
	return b
}

// InstanceNorm is the common part of InstanceNorm1d, InstanceNorm2d and InstanceNorm3d. It
// normalises each channel of each sample by the mean and variance of that channel. With
// RunningStats, evaluation uses the running statistics instead.
type InstanceNorm struct {
	layer
	switchable
	Weight, Bias *torch.Tensor // [C], initially 1 and 0; nil without Affine
	// Running statistics, as in BatchNorm; nil without RunningStats. NumBatches stays 0, as in
	// PyTorch.
	RunningMean, RunningVar, NumBatches *torch.Tensor

	momentum, eps float64
	ranks         []int // the accepted numbers of input dimensions
}

// InstanceNormOptions are the options of NewInstanceNorm1d, NewInstanceNorm2d and
// NewInstanceNorm3d.
type InstanceNormOptions struct {
	Momentum     float64 // the weight of a new batch in the running statistics; 0 stands for 0.1
	Eps          float64 // added to the variance; 0 stands for 1e-5
	Affine       bool    // with weight and bias
	RunningStats bool    // keep running statistics, and use them in evaluation
}

// The options of NewInstanceNorm1d, NewInstanceNorm2d and NewInstanceNorm3d.
type (
	InstanceNorm1dOptions = InstanceNormOptions
	InstanceNorm2dOptions = InstanceNormOptions
	InstanceNorm3dOptions = InstanceNormOptions
)

func (n *InstanceNorm) construct(dims, channels int, o InstanceNormOptions) {
	kind := fmt.Sprintf("InstanceNorm%dd", dims)
	op := "nn.New" + kind
	n.create(kind)
	n.momentum, n.eps, n.ranks = or(o.Momentum, 0.1), or(o.Eps, 1e-5), []int{dims + 2}
	if n.Weight = positive(op, "channels", channels); n.Weight != nil {
		return
	}
	n.Weight, n.Bias = affine(op, !o.Affine, int64(channels))
	if o.RunningStats {
		n.RunningMean, n.RunningVar, n.NumBatches = runningStats(op, channels)
	}
}

// Forward computes the normalised input. Without running statistics, and always in training, a
// channel of a single value is an error, [ErrOneValue].
func (n *InstanceNorm) Forward(x *torch.Tensor) *torch.Tensor {
	own := n.training() || n.RunningMean == nil // the input's statistics
	if x.Err() == nil {
		if bad := checkStatistics(n.kind, x.Shape(), n.ranks, own, false); bad != nil {
			return n.result(bad, x)
		}
	}
	return n.result(x.InstanceNorm(n.Weight, n.Bias, n.RunningMean, n.RunningVar, own, n.momentum, n.eps), x)
}

// Parts returns weight and bias, and the running statistics, if any, as buffers.
func (n *InstanceNorm) Parts() Parts {
	p := weightAndBias(n.Weight, n.Bias)
	p.Buffers = statistics(n.RunningMean, n.RunningVar, n.NumBatches)
	return p
}

// InstanceNorm1d normalises the channels of [N C L].
type InstanceNorm1d struct{ InstanceNorm }

// NewInstanceNorm1d returns a normalisation of the given number of channels.
func NewInstanceNorm1d(channels int, o InstanceNorm1dOptions) *InstanceNorm1d {
	n := &InstanceNorm1d{}
	n.construct(1, channels, o)
	return n
}

// InstanceNorm2d normalises the channels of images [N C H W].
type InstanceNorm2d struct{ InstanceNorm }

// NewInstanceNorm2d returns a normalisation of images with the given number of channels.
func NewInstanceNorm2d(channels int, o InstanceNorm2dOptions) *InstanceNorm2d {
	n := &InstanceNorm2d{}
	n.construct(2, channels, o)
	return n
}

// InstanceNorm3d normalises the channels of volumes [N C D H W].
type InstanceNorm3d struct{ InstanceNorm }

// NewInstanceNorm3d returns a normalisation of volumes with the given number of channels.
func NewInstanceNorm3d(channels int, o InstanceNorm3dOptions) *InstanceNorm3d {
	n := &InstanceNorm3d{}
	n.construct(3, channels, o)
	return n
}

// LayerNorm normalises over the last dimensions of its input.
type LayerNorm struct {
	layer
	Weight, Bias *torch.Tensor // of the normalised shape, initially 1 and 0; nil with NoAffine

	shape []int64
	eps   float64
}

// LayerNormOptions are the options of NewLayerNorm.
type LayerNormOptions struct {
	Eps      float64 // added to the variance; 0 stands for 1e-5
	NoAffine bool    // no weight and bias
	NoBias   bool
}

// NewLayerNorm returns a normalisation over the last dimensions of the given shape, such as
// []int{768} for the features of a transformer.
func NewLayerNorm(shape []int, o LayerNormOptions) *LayerNorm {
	const op = "nn.NewLayerNorm"
	l := &LayerNorm{shape: int64s(shape), eps: or(o.Eps, 1e-5)}
	l.create("LayerNorm")
	if l.Weight = normalisedShape(op, shape); l.Weight == nil && !o.NoAffine {
		l.Weight = parameter(op, Constant(1), l.shape...)
		if !o.NoBias {
			l.Bias = parameter(op, Constant(0), l.shape...)
		}
	}
	return l
}

// normalisedShape returns a failed tensor if the shape is empty or has a size below 1.
func normalisedShape(op string, shape []int) *torch.Tensor {
	if len(shape) == 0 {
		return invalid(op, "the shape is empty")
	}
	return positive(op, "sizes", shape...)
}

// Forward computes the normalised input.
func (l *LayerNorm) Forward(x *torch.Tensor) *torch.Tensor {
	return l.result(x.LayerNorm(l.shape, l.Weight, l.Bias, l.eps), x)
}

// Parts returns weight and bias.
func (l *LayerNorm) Parts() Parts { return weightAndBias(l.Weight, l.Bias) }

// RMSNorm divides by the root of the mean square over the last dimensions of its input.
type RMSNorm struct {
	layer
	Weight *torch.Tensor // of the normalised shape, initially 1; nil with NoAffine

	shape []int64
	eps   float64
}

// RMSNormOptions are the options of NewRMSNorm.
type RMSNormOptions struct {
	Eps      float64 // added to the mean square; 0 stands for the machine epsilon of the input's dtype
	NoAffine bool    // no weight
}

// NewRMSNorm returns a normalisation over the last dimensions of the given shape.
func NewRMSNorm(shape []int, o RMSNormOptions) *RMSNorm {
	const op = "nn.NewRMSNorm"
	r := &RMSNorm{shape: int64s(shape), eps: o.Eps}
	r.create("RMSNorm")
	if r.Weight = normalisedShape(op, shape); r.Weight == nil && !o.NoAffine {
		r.Weight = parameter(op, Constant(1), r.shape...)
	}
	return r
}

// Forward computes the normalised input.
func (r *RMSNorm) Forward(x *torch.Tensor) *torch.Tensor {
	return r.result(x.RMSNorm(r.shape, r.Weight, torch.RMSNormOptions{Eps: r.eps}), x)
}

// Parts returns the weight.
func (r *RMSNorm) Parts() Parts { return weightAndBias(r.Weight, nil) }

// GroupNorm normalises groups of channels of each sample [N C ...].
type GroupNorm struct {
	layer
	Weight, Bias *torch.Tensor // [C], initially 1 and 0; nil with NoAffine

	groups int64
	eps    float64
}

// GroupNormOptions are the options of NewGroupNorm.
type GroupNormOptions struct {
	Eps      float64 // added to the variance; 0 stands for 1e-5
	NoAffine bool    // no weight and bias
}

// NewGroupNorm returns a normalisation of the given number of groups. The number of channels must
// be a multiple of it.
func NewGroupNorm(groups, channels int, o GroupNormOptions) *GroupNorm {
	const op = "nn.NewGroupNorm"
	g := &GroupNorm{groups: int64(groups), eps: or(o.Eps, 1e-5)}
	g.create("GroupNorm")
	if g.Weight = positive(op, "groups and channels", groups, channels); g.Weight != nil {
		return g
	}
	if channels%groups != 0 {
		g.Weight = invalid(op, "%d groups do not divide %d channels", groups, channels)
		return g
	}
	g.Weight, g.Bias = affine(op, o.NoAffine, int64(channels))
	return g
}

// Forward computes the normalised input.
func (g *GroupNorm) Forward(x *torch.Tensor) *torch.Tensor {
	return g.result(x.GroupNorm(g.groups, g.Weight, g.Bias, g.eps), x)
}

// Parts returns weight and bias.
func (g *GroupNorm) Parts() Parts { return weightAndBias(g.Weight, g.Bias) }

package distributed

import (
	"errors"
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// ConvertSyncBatchNorm changes every BatchNorm1d, BatchNorm2d and BatchNorm3d of the model. In
// training they then normalise by the mean and variance over the samples of all ranks, as PyTorch's
// SyncBatchNorm does. Modules, parameters, buffers, names and evaluation do not change. Running
// statistics are computed from the whole batch, and are the same on all ranks.
//
//	err := distributed.ConvertSyncBatchNorm(world, net)
//	...
//	parallel, err := distributed.NewDataParallel(world, net, distributed.DataParallelOptions{})
//
// Every rank calls ConvertSyncBatchNorm with the same model. If the ranks' numbers of BatchNorms
// differ, all ranks get an error. The collectives run in a separate subgroup, so that they do not
// mix with the reduction of gradients. The subgroup exists until the job is closed. In a group of
// one rank, and for a model without a BatchNorm, nothing changes.
//
// From then on, each BatchNorm runs one collective in each forward pass in training, and another in
// each backward pass, on the stream of the pass. Therefore all ranks must make the same passes.
// Numbers of samples may differ. A rank without samples also makes its passes, on a batch with zero
// rows, because the other ranks wait for it:
//
//	loss := net.Forward(none).MSELoss(noTargets) // of the shapes [0 3 224 224] and [0 1000]
//	err := parallel.Backward(parallel.Weigh(loss, 0))
//
// All ranks together need more than one value per channel. With fewer values the CPU returns an
// error. A GPU returns NaN, because its host does not know how many values the other ranks have.
// The host never waits for a GPU, and a whole step can be captured in a graph. A BatchNorm inside
// an nn.Graphed is refused. Gradients of gradients (CreateGraph) are an error.
func ConvertSyncBatchNorm(g *Group, m nn.Module) error {
	norms, graphed := batchNorms(m)
	if graphed {
		return fmt.Errorf("distributed.ConvertSyncBatchNorm: a BatchNorm is inside of an nn.Graphed, "+
			"whose graphs one rank may replay while another runs eagerly: "+
			"capture the whole step instead (torch.Graphed, train.StepperOptions.Graph): %w", cuda.ErrInvalidArgument)
	}
	counts, err := AllGatherObject(g, len(norms))
	if err != nil {
		return fmt.Errorf("distributed.ConvertSyncBatchNorm: %w", err)
	}
	for r, n := range counts {
		if n != counts[0] {
			return fmt.Errorf("distributed.ConvertSyncBatchNorm: %w: the model has %d BatchNorms on rank "+
				"0, and %d on rank %d", ErrMismatch, counts[0], n, r)
		}
	}
	if g.Size() == 1 || len(norms) == 0 {
		return nil
	}
	all := make([]int, g.Size())
	for r := range all {
		all[r] = r
	}
	own, err := g.Subgroup(all...)
	if err != nil {
		return fmt.Errorf("distributed.ConvertSyncBatchNorm: %w", err)
	}
	for _, n := range norms {
		n.Synchronize(func(x, weight, bias, mean, variance *torch.Tensor, momentum, eps float64) *torch.Tensor {
			s := syncBatchNorm{g: own, bias: bias != nil, mean: mean, variance: variance, momentum: momentum, eps: eps}
			inputs := []*torch.Tensor{x}
			if s.weight = weight != nil; s.weight {
				inputs = append(inputs, weight)
			}
			if s.bias {
				inputs = append(inputs, bias)
			}
			return torch.Function{Name: "SyncBatchNorm", Forward: s.forward, Backward: s.backward}.Apply1(inputs...)
		})
	}
	return nil
}

// batchNorm is implemented by nn's BatchNorm modules.
type batchNorm interface {
	Synchronize(fn nn.BatchNormFunc)
}

// batchNorms returns the BatchNorms of m and of all modules in it, and whether one is inside an
// nn.Graphed.
func batchNorms(m nn.Module) (found []batchNorm, graphed bool) {
	if m == nil {
		return nil, false
	}
	if n, ok := m.(batchNorm); ok {
		found = append(found, n)
	}
	for _, c := range m.Parts().Modules {
		inside, within := batchNorms(c.Module)
		found, graphed = append(found, inside...), graphed || within
	}
	if _, ok := m.(*nn.Graphed); ok {
		graphed = len(found) > 0
	}
	return found, graphed
}

// syncBatchNorm is one call of a BatchNorm.
type syncBatchNorm struct {
	g              *Group
	weight, bias   bool          // whether the inputs after x include them
	mean, variance *torch.Tensor // running statistics, or nil
	momentum, eps  float64
}

// optional returns the tensor as an optional argument of torch.Call.
func optional(t *torch.Tensor) any {
	if t == nil {
		return nil
	}
	return t
}

// affine returns the weight and the bias from the inputs, or nil.
func (s *syncBatchNorm) affine(inputs []*torch.Tensor) (weight, bias *torch.Tensor) {
	rest := inputs[1:]
	if s.weight {
		weight, rest = rest[0].NoAutocast(), rest[1:]
	}
	if s.bias {
		bias = rest[0].NoAutocast()
	}
	return weight, bias
}

// forward is the Forward of a torch.Function with the inputs x, weight and bias. It saves x, the
// mean and the inverse standard deviation of each channel, each rank's number of values per
// channel, and the weight.
func (s *syncBatchNorm) forward(c *torch.FunctionContext, inputs []*torch.Tensor) ([]*torch.Tensor, error) {
	x := packed(inputs[0].NoAutocast())
	weight, bias := s.affine(inputs)
	normalise := s.onGPU
	if x.Device() == cuda.CPU {
		normalise = s.onCPU
	}
	y, mean, invstd, counts, err := normalise(x, weight, bias)
	if err != nil {
		return nil, err
	}
	c.SaveForBackward(x, mean, invstd, counts)
	if weight != nil {
		c.SaveForBackward(weight)
	}
	return []*torch.Tensor{y}, nil
}

// packed returns x in a memory format that LibTorch's operators support.
func packed(x *torch.Tensor) *torch.Tensor {
	if x.IsContiguous(torch.ChannelsLast) {
		return x
	}
	return x.Contiguous(torch.Contiguous)
}

// wide returns the dtype in which statistics of x are computed.
func wide(x *torch.Tensor) torch.DType {
	if d := x.DType(); d == torch.Float64 {
		return d
	}
	return torch.Float32
}

// noValues replaces a count of zero on a GPU. LibTorch divides by running sums of the counts, and
// the first sum would be zero. LibTorch also adds the counts as integers, and there
// noValues is truncated to 0. So it changes no result.
const noValues = 1e-30

// gather returns the statistics of all ranks, one row for each rank: two numbers for each channel,
// and the count of values per channel. The result, and everything computed from it, belongs to x's
// scope.
func (s *syncBatchNorm) gather(x, first, second *torch.Tensor, count float64) (*torch.Tensor, error) {
	scope := x.Scope()
	n, err := torch.Full(x.Device(), wide(x), count, 1)
	if err != nil {
		return nil, err
	}
	mine := torch.Cat([]*torch.Tensor{first, second, scope.Own(n)}, 0)
	if err := mine.Err(); err != nil {
		return nil, err
	}
	all, err := torch.Empty(x.Device(), wide(x), int64(s.g.Size()), mine.Elements())
	if err != nil {
		return nil, err
	}
	all = scope.Own(all)
	call, err := s.g.begin("SyncBatchNorm.Forward", "", mine, all)
	if err != nil {
		return nil, err
	}
	return all, call.sync([]*torch.Tensor{all, mine}, allGather)
}

// filled returns two tensors [C] in the dtype of x's statistics, filled with a and b.
func filled(x *torch.Tensor, a, b float64) (first, second *torch.Tensor, err error) {
	channels := x.Shape()[1]
	first, err1 := torch.Full(x.Device(), wide(x), a, channels)
	second, err2 := torch.Full(x.Device(), wide(x), b, channels)
	if err := errors.Join(err1, err2); err != nil {
		first.Close()
		second.Close()
		return nil, nil, err
	}
	return x.Scope().Own(first), x.Scope().Own(second), nil
}

// onGPU normalises with the operators of LibTorch that PyTorch's SyncBatchNorm calls.
func (s *syncBatchNorm) onGPU(x, weight, bias *torch.Tensor) (y, mean, invstd, counts *torch.Tensor, err error) {
	fail := func(err error) (y, mean, invstd, counts *torch.Tensor, _ error) { return nil, nil, nil, nil, err }
	channels := x.Shape()[1]
	count := float64(noValues)
	if x.Elements() == 0 {
		mean, invstd, err = filled(x, 0, 1)
	} else {
		count = float64(x.Elements() / channels)
		var stats []*torch.Tensor
		if stats, err = torch.Call("batch_norm_stats", x, s.eps); err == nil {
			mean, invstd = stats[0], stats[1]
		}
	}
	if err != nil {
		return fail(err)
	}
	all, err := s.gather(x, mean, invstd, count)
	if err != nil {
		return fail(err)
	}
	counts = all.Narrow(1, 2*channels, 1).Reshape(-1)
	// The operator requires counts in the dtype of the running statistics. A 16-bit dtype cannot
	// represent large counts.
	running, err := s.running(x)
	if err != nil {
		return fail(err)
	}
	stats, err := torch.Call("batch_norm_gather_stats_with_counts", all, all.Narrow(1, 0, channels),
		all.Narrow(1, channels, channels),
		optional(running[0]), optional(running[1]), s.momentum, s.eps, counts)
	if err == nil {
		err = s.written(running)
	}
	if err != nil {
		return fail(err)
	}
	mean, invstd = stats[0], stats[1]
	if x.Elements() == 0 {
		y = x.EmptyLike()
	} else {
		y = torch.Call1("batch_norm_elemt", x, optional(weight), optional(bias), mean, invstd, s.eps)
	}
	counts = counts.ToDType(torch.Int32)
	return y, mean, invstd, counts, errors.Join(y.Err(), counts.Err())
}

// running returns the running statistics in the dtype of x's statistics. It returns copies if the
// running statistics have a different dtype, and nil if there are none.
func (s *syncBatchNorm) running(x *torch.Tensor) (r [2]*torch.Tensor, err error) {
	for i, t := range []*torch.Tensor{s.mean, s.variance} {
		if t == nil {
			continue
		}
		if r[i] = t.NoGrad(); t.DType() != wide(x) {
			r[i] = x.Scope().Own(r[i].ToDType(wide(x)))
		}
		if err := r[i].Err(); err != nil {
			return r, err
		}
	}
	return r, nil
}

// written stores new running statistics if r holds copies.
func (s *syncBatchNorm) written(r [2]*torch.Tensor) error {
	for i, t := range []*torch.Tensor{s.mean, s.variance} {
		if t != nil && r[i].DType() != t.DType() {
			if err := t.NoGrad().CopyFrom(r[i], torch.CopyOptions{NonBlocking: true}); err != nil {
				return err
			}
		}
	}
	return nil
}

// onCPU normalises without LibTorch's operators for synchronised statistics, which do not exist for
// the CPU. It combines the mean and the sum of squared differences of each rank (Chan, Golub and
// LeVeque, 1979).
func (s *syncBatchNorm) onCPU(x, weight, bias *torch.Tensor) (y, mean, invstd, counts *torch.Tensor, err error) {
	fail := func(err error) (y, mean, invstd, counts *torch.Tensor, _ error) { return nil, nil, nil, nil, err }
	channels, values := x.Shape()[1], x.ToDType(wide(x))
	var squares *torch.Tensor
	count := 0.0
	if x.Elements() == 0 {
		mean, squares, err = filled(x, 0, 0)
	} else {
		count = float64(x.Elements() / channels)
		biased := 0.0
		squares, mean = values.VarMean(torch.VarMeanOptions{Dim: others(x), Correction: &biased})
		squares = squares.MulScalar(count)
		err = squares.Err()
	}
	if err != nil {
		return fail(err)
	}
	all, err := s.gather(x, mean, squares, count)
	if err != nil {
		return fail(err)
	}
	counts = all.Narrow(1, 2*channels, 1)
	total, err := counts.Sum().Float64()
	if err != nil {
		return fail(err)
	}
	if total <= 1 {
		return fail(fmt.Errorf("the ranks have %v values per channel together, and the statistics need "+
			"more than one: %w", total, cuda.ErrInvalidArgument))
	}
	means := all.Narrow(1, 0, channels)
	mean = means.Mul(counts).SumDim([]int64{0}, false).MulScalar(1 / total)
	squares = all.Narrow(1, channels, channels).Add(means.Sub(mean).Square().Mul(counts)).SumDim([]int64{0}, false)
	variance := squares.MulScalar(1 / total)
	running, err := s.running(x)
	if err != nil {
		return fail(err)
	}
	for i, now := range []*torch.Tensor{mean, squares.MulScalar(1 / (total - 1))} {
		if r := running[i]; r != nil {
			if err := errors.Join(r.MulScalar_(1-s.momentum).Err(),
				r.Add_(now.MulScalar(s.momentum)).Err()); err != nil {
				return fail(err)
			}
		}
	}
	if err := s.written(running); err != nil {
		return fail(err)
	}
	invstd = variance.AddScalar(s.eps).Rsqrt()
	y = values.Sub(perChannel(x, mean)).Mul(perChannel(x, invstd))
	if weight != nil {
		y = y.Mul(perChannel(x, weight.ToDType(wide(x))))
	}
	if bias != nil {
		y = y.Add(perChannel(x, bias.ToDType(wide(x))))
	}
	y = y.ToDType(x.DType())
	return y, mean, invstd, counts, y.Err()
}

// others returns all dimensions of x except the channels.
func others(x *torch.Tensor) []int64 {
	dims := []int64{0}
	for d := 2; d < len(x.Shape()); d++ {
		dims = append(dims, int64(d))
	}
	return dims
}

// perChannel reshapes values [C] so that they broadcast over x.
func perChannel(x, values *torch.Tensor) *torch.Tensor {
	shape := make([]int64, len(x.Shape()))
	for d := range shape {
		shape[d] = 1
	}
	shape[1] = -1
	return values.Reshape(shape...)
}

// backward is the Backward of a torch.Function with the inputs x, weight and bias. The gradients of
// weight and bias are from this rank's samples; DataParallel averages them.
func (s *syncBatchNorm) backward(c *torch.FunctionContext, gradients []*torch.Tensor) ([]*torch.Tensor, error) {
	saved := c.SavedTensors()
	if slices.ContainsFunc(saved, (*torch.Tensor).RequiresGrad) {
		return nil, fmt.Errorf("a SyncBatchNorm has no gradients of gradients (CreateGraph): %w",
			cuda.ErrInvalidArgument)
	}
	x, mean, invstd, counts := saved[0], saved[1], saved[2], saved[3]
	var weight *torch.Tensor
	if s.weight {
		weight = saved[4]
	}
	g := packed(gradients[0])
	inputs := make([]*torch.Tensor, 1, 3)
	sums, err := s.reduced(c, g, x, mean, invstd, weight)
	if err != nil {
		return nil, err
	}
	if c.NeedsInputGrad(0) {
		if inputs[0], err = s.inputGradient(g, x, mean, invstd, weight, counts, sums[0], sums[1]); err != nil {
			return nil, err
		}
	}
	if s.weight {
		inputs = append(inputs, sums[2])
	}
	if s.bias {
		inputs = append(inputs, sums[3])
	}
	return inputs, nil
}

// reduced returns four sums for each channel over this rank's samples: the gradient, the gradient
// times the centred x, and the gradients of weight and bias. The last two are nil if not needed.
func (s *syncBatchNorm) reduced(c *torch.FunctionContext, g, x, mean, invstd,
	weight *torch.Tensor) (sums [4]*torch.Tensor, err error) {
	needsWeight, biasAt := s.weight && c.NeedsInputGrad(1), 1
	if s.weight {
		biasAt = 2
	}
	needsBias := s.bias && c.NeedsInputGrad(biasAt)
	switch {
	case x.Elements() == 0:
		sums[0], sums[1], err = filled(x, 0, 0)
		return sums, err
	case x.Device() != cuda.CPU:
		all, err := torch.Call("batch_norm_backward_reduce", g, x, mean, invstd, optional(weight),
			c.NeedsInputGrad(0), needsWeight, needsBias)
		if err != nil {
			return sums, err
		}
		copy(sums[:], all)
	default:
		centred := x.ToDType(wide(x)).Sub(perChannel(x, mean))
		g = g.ToDType(wide(x))
		sums[0], sums[1] = g.SumDim(others(x), false), g.Mul(centred).SumDim(others(x), false)
		if err := errors.Join(sums[0].Err(), sums[1].Err()); err != nil {
			return sums, err
		}
		// autograd converts these sums to the dtypes of weight and bias.
		sums[2], sums[3] = sums[1].Mul(invstd), sums[0]
	}
	if !needsWeight {
		sums[2] = nil
	}
	if !needsBias {
		sums[3] = nil
	}
	return sums, nil
}

// inputGradient adds the sums of all ranks and returns the gradient of x. Its arguments are this
// rank's sums.
func (s *syncBatchNorm) inputGradient(g, x, mean, invstd, weight, counts, sum,
	products *torch.Tensor) (*torch.Tensor, error) {
	channels := x.Shape()[1]
	both := torch.Cat([]*torch.Tensor{sum, products}, 0)
	call, err := s.g.begin("SyncBatchNorm.Backward", "", both)
	if err != nil {
		return nil, err
	}
	if err := call.sync([]*torch.Tensor{both}, allReduce(Sum)); err != nil {
		return nil, err
	}
	if x.Elements() == 0 {
		return nil, nil
	}
	sum, products = both.Narrow(0, 0, channels), both.Narrow(0, channels, channels)
	if weight != nil {
		weight = weight.ToDType(wide(x))
	}
	if x.Device() != cuda.CPU {
		gradient := torch.Call1("batch_norm_backward_elemt", g, x, mean, invstd, optional(weight), sum,
			products, counts)
		return gradient, gradient.Err()
	}
	total, err := counts.Sum().Float64()
	if err != nil {
		return nil, err
	}
	scale := invstd
	if weight != nil {
		scale = scale.Mul(weight)
	}
	along := products.Mul(invstd.Square()).MulScalar(1 / total)
	gradient := g.ToDType(wide(x)).Sub(perChannel(x, sum.MulScalar(1/total))).
		Sub(x.ToDType(wide(x)).Sub(perChannel(x, mean)).Mul(perChannel(x, along))).
		Mul(perChannel(x, scale)).ToDType(x.DType())
	return gradient, gradient.Err()
}

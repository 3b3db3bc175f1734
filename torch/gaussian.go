package torch

import "math"

// GaussianNLLLossOptions are the options of [Tensor.GaussianNLLLoss].
type GaussianNLLLossOptions struct {
	Full      bool    // add the constant log(2 pi) / 2 to each element
	Eps       float64 // the minimum variance; 0 selects 1e-6
	Reduction Reduction
}

// GaussianNLLLoss returns the mean of (log(v) + (t - target)^2 / v) / 2: the negative
// log-likelihood of the target under normal distributions with means t and variances v. target and
// variance have the shape of t, or one that broadcasts to it. As in PyTorch's gaussian_nll_loss, a
// variance below Eps counts as Eps, and keeps its gradient. PyTorch refuses negative variances.
// Here they count as Eps too, since the check would wait for a GPU.
func (t *Tensor) GaussianNLLLoss(target, variance *Tensor, o GaussianNLLLossOptions) *Tensor {
	eps := o.Eps
	if eps == 0 {
		eps = 1e-6
	}
	return Tidy(func(in ...*Tensor) *Tensor {
		t, target, v := in[0], in[1], in[2].Clone()
		if limited := v.NoGrad().ClampMin_(eps); limited.Err() != nil {
			return limited
		}
		loss := v.Log().Add(t.Sub(target).Square().Div(v)).MulScalar(0.5)
		if o.Full {
			loss = loss.AddScalar(0.5 * math.Log(2*math.Pi))
		}
		switch o.Reduction {
		case ReduceNone:
			return loss
		case ReduceSum:
			return loss.Sum()
		case ReduceMean:
			return loss.Mean()
		}
		return failed(opError("GaussianNLLLoss", in, invalid("the reduction is %d", o.Reduction)))
	}, t, target, variance)
}

package nn

import "github.com/torchstream/torchstream/torch"

// Dropout zeroes elements at random in training, and does nothing in evaluation.
type Dropout struct {
	layer
	switchable
	p    float64
	drop func(x *torch.Tensor, p float64, train bool) *torch.Tensor
}

// NewDropout returns a module that zeroes an element with probability p and scales the others by
// 1/(1-p).
func NewDropout(p float64) *Dropout { return newDropout("Dropout", p, (*torch.Tensor).Dropout) }

// NewDropout2d returns a module that zeroes a whole channel of a sample [N C ...] with probability
// p and scales the others by 1/(1-p).
func NewDropout2d(p float64) *Dropout {
	return newDropout("Dropout2d", p, (*torch.Tensor).FeatureDropout)
}

// NewDropout1d is NewDropout2d for sequences [N C L].
func NewDropout1d(p float64) *Dropout {
	return newDropout("Dropout1d", p, (*torch.Tensor).FeatureDropout)
}

// NewDropout3d is NewDropout2d for volumes [N C D H W].
func NewDropout3d(p float64) *Dropout {
	return newDropout("Dropout3d", p, (*torch.Tensor).FeatureDropout)
}

// NewAlphaDropout returns a module that sets an element with probability p to SELU's negative
// limit. It scales and shifts all elements so that mean and variance stay the same. Use it after
// [NewSELU].
func NewAlphaDropout(p float64) *Dropout {
	return newDropout("AlphaDropout", p, (*torch.Tensor).AlphaDropout)
}

// NewStochasticDepth returns a module that zeroes a whole sample [N ...] with probability p and
// scales the others by 1/(1-p). It is torchvision's StochasticDepth in the mode "row". Use it at
// the end of a residual branch.
func NewStochasticDepth(p float64) *Dropout { return newDropout("StochasticDepth", p, dropSamples) }

func dropSamples(x *torch.Tensor, p float64, train bool) *torch.Tensor {
	shape := x.Shape()
	switch {
	case p < 0 || p > 1:
		return invalid("nn.StochasticDepth", "the probability is %v", p)
	case !train || p == 0 || len(shape) == 0:
		return x
	}
	for i := range shape[1:] {
		shape[i+1] = 1
	}
	noise, err := torch.Empty(x.Device(), x.DType(), shape...)
	if err != nil {
		return noise
	}
	defer noise.Close()
	kept := noise.Bernoulli_(1 - p)
	if p < 1 {
		kept = kept.DivScalar_(1 - p)
	}
	return x.Mul(kept)
}

func newDropout(kind string, p float64, drop func(x *torch.Tensor, p float64, train bool) *torch.Tensor) *Dropout {
	d := &Dropout{p: p, drop: drop}
	d.create(kind)
	return d
}

// Forward drops elements in training.
func (d *Dropout) Forward(x *torch.Tensor) *torch.Tensor {
	if d.drop == nil { // not made by a constructor
		return d.result(x.Dropout(d.p, d.training()), x)
	}
	return d.result(d.drop(x, d.p, d.training()), x)
}

// Parts returns nothing.
func (d *Dropout) Parts() Parts { return Parts{} }

package nn

import "github.com/torchstream/torchstream/torch"

// TransformerEncoderLayer is self-attention and a feed-forward network, each with a residual
// connection, normalisation and dropout. Its names are those of PyTorch's
// nn.TransformerEncoderLayer.
type TransformerEncoderLayer struct {
	layer
	SelfAttn         *MultiheadAttention
	Linear1, Linear2 *Linear
	Norm1, Norm2     *LayerNorm

	dropout, dropout1, dropout2 *Dropout
	activation                  Module
	normFirst                   bool
}

// TransformerEncoderLayerOptions are the options of NewTransformerEncoderLayer.
type TransformerEncoderLayerOptions struct {
	Feedforward int     // the hidden size of the feed-forward network; 0 stands for 2048
	Dropout     float64 // 0 stands for 0.1
	NoDropout   bool
	Activation  Module  // nil stands for ReLU; it must have no parameters, and leave no tensor elsewhere
	Eps         float64 // of the normalisations; 0 stands for 1e-5
	NormFirst   bool    // normalise the input of each part rather than its output
	BatchFirst  bool    // sequences are [N L size] rather than PyTorch's default [L N size]
	Causal      bool    // a position attends to itself and those before it
	NoBias      bool    // no biases, in the normalisations too
}

// NewTransformerEncoderLayer returns a layer for vectors of the given size, which the number of
// heads divides.
func NewTransformerEncoderLayer(size, heads int, o TransformerEncoderLayerOptions) *TransformerEncoderLayer {
	hidden, p := o.Feedforward, or(o.Dropout, 0.1)
	if hidden == 0 {
		hidden = 2048
	}
	if o.NoDropout {
		p = 0
	}
	t := &TransformerEncoderLayer{activation: o.Activation, normFirst: o.NormFirst}
	t.create("TransformerEncoderLayer")
	if t.activation == nil {
		t.activation = NewReLU()
	}
	t.SelfAttn = NewMultiheadAttention(size, heads, MultiheadAttentionOptions{
		Dropout: p, NoBias: o.NoBias, BatchFirst: o.BatchFirst, Causal: o.Causal,
	})
	t.Linear1 = NewLinear(size, hidden, LinearOptions{NoBias: o.NoBias})
	t.Linear2 = NewLinear(hidden, size, LinearOptions{NoBias: o.NoBias})
	norm := LayerNormOptions{Eps: o.Eps, NoBias: o.NoBias}
	t.Norm1, t.Norm2 = NewLayerNorm([]int{size}, norm), NewLayerNorm([]int{size}, norm)
	t.dropout, t.dropout1, t.dropout2 = NewDropout(p), NewDropout(p), NewDropout(p)
	return t
}

// Parts returns the parts by PyTorch's names.
func (t *TransformerEncoderLayer) Parts() Parts {
	return Parts{Modules: []Child{
		{"self_attn", t.SelfAttn}, {"linear1", t.Linear1}, {"dropout", t.dropout}, {"linear2", t.Linear2},
		{"norm1", t.Norm1}, {"norm2", t.Norm2}, {"dropout1", t.dropout1}, {"dropout2", t.dropout2},
	}}
}

// Forward returns a tensor of x's shape.
func (t *TransformerEncoderLayer) Forward(x *torch.Tensor) *torch.Tensor {
	return t.result(torch.Tidy(t.forward, x), x)
}

func (t *TransformerEncoderLayer) forward(in ...*torch.Tensor) *torch.Tensor {
	x := in[0]
	if t.normFirst {
		x1 := x.Add(t.attend(t.Norm1.Forward(x)))
		return x1.Add(t.feed(t.Norm2.Forward(x1)))
	}
	x1 := t.Norm1.Forward(x.Add(t.attend(x)))
	return t.Norm2.Forward(x1.Add(t.feed(x1)))
}

func (t *TransformerEncoderLayer) attend(x *torch.Tensor) *torch.Tensor {
	return t.dropout1.Forward(t.SelfAttn.Forward(x))
}

func (t *TransformerEncoderLayer) feed(x *torch.Tensor) *torch.Tensor {
	hidden := t.dropout.Forward(t.activation.Forward(t.Linear1.Forward(x)))
	return t.dropout2.Forward(t.Linear2.Forward(hidden))
}

package nn

import (
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// TransformerEncoderLayer is self-attention and a feed-forward network, each with a residual
// connection, normalisation and dropout. The parameters have the names of PyTorch's
// nn.TransformerEncoderLayer.
type TransformerEncoderLayer struct {
	layer
	SelfAttn         *MultiheadAttention
	Linear1, Linear2 *Linear
	Norm1, Norm2     *LayerNorm

	drop       dropouts
	activation Module
	normFirst  bool
}

// dropouts are the dropouts of a transformer layer. A layer uses one per part.
type dropouts struct {
	hidden               *Dropout // PyTorch's dropout, inside the feed-forward network
	first, second, third *Dropout // PyTorch's dropout1 to dropout3, of each part's output
}

func newDropouts(p float64) dropouts {
	return dropouts{NewDropout(p), NewDropout(p), NewDropout(p), NewDropout(p)}
}

func (d dropouts) copy() dropouts {
	return dropouts{d.hidden.copy(), d.first.copy(), d.second.copy(), d.third.copy()}
}

// TransformerLayerOptions are the options of NewTransformerEncoderLayer and
// NewTransformerDecoderLayer.
type TransformerLayerOptions struct {
	Feedforward int     // the hidden size of the feed-forward network; 0 stands for 2048
	Dropout     float64 // 0 stands for 0.1
	NoDropout   bool
	Activation  Module  // nil stands for ReLU; it must have no parameters and store no tensors
	Eps         float64 // epsilon of the normalisations; 0 stands for 1e-5
	NormFirst   bool    // normalise each part's input rather than its output
	BatchFirst  bool    // sequences are [N L size] rather than PyTorch's default [L N size]
	Causal      bool    // in self-attention, a position attends only to itself and earlier positions
	NoBias      bool    // no biases, in the normalisations too
}

// The options of NewTransformerEncoderLayer and NewTransformerDecoderLayer.
type (
	TransformerEncoderLayerOptions = TransformerLayerOptions
	TransformerDecoderLayerOptions = TransformerLayerOptions
)

// probability returns the probability of dropping an element.
func (o TransformerLayerOptions) probability() float64 {
	if o.NoDropout {
		return 0
	}
	return or(o.Dropout, 0.1)
}

// attention returns an attention layer with these options, causal or not.
func (o TransformerLayerOptions) attention(size, heads int, causal bool) *MultiheadAttention {
	return NewMultiheadAttention(size, heads, MultiheadAttentionOptions{
		Dropout: o.probability(), NoBias: o.NoBias, BatchFirst: o.BatchFirst, Causal: causal,
	})
}

// feed returns the two linear layers of the feed-forward network, and the activation between them.
func (o TransformerLayerOptions) feed(size int) (linear1, linear2 *Linear, activation Module) {
	hidden := o.Feedforward
	if hidden == 0 {
		hidden = 2048
	}
	activation = o.Activation
	if activation == nil {
		activation = NewReLU()
	}
	linear1 = NewLinear(size, hidden, LinearOptions{NoBias: o.NoBias})
	return linear1, NewLinear(hidden, size, LinearOptions{NoBias: o.NoBias}), activation
}

func (o TransformerLayerOptions) norm(size int) *LayerNorm {
	return NewLayerNorm([]int{size}, LayerNormOptions{Eps: o.Eps, NoBias: o.NoBias})
}

// NewTransformerEncoderLayer returns a layer for vectors of the given size. The size must be a
// multiple of the number of heads.
func NewTransformerEncoderLayer(size, heads int, o TransformerEncoderLayerOptions) *TransformerEncoderLayer {
	t := &TransformerEncoderLayer{normFirst: o.NormFirst}
	t.create("TransformerEncoderLayer")
	t.SelfAttn = o.attention(size, heads, o.Causal)
	t.Linear1, t.Linear2, t.activation = o.feed(size)
	t.Norm1, t.Norm2 = o.norm(size), o.norm(size)
	t.drop = newDropouts(o.probability())
	return t
}

// Parts returns the parts under PyTorch's names.
func (t *TransformerEncoderLayer) Parts() Parts {
	return Parts{Modules: []Child{
		{"self_attn", t.SelfAttn}, {"linear1", t.Linear1}, {"dropout", t.drop.hidden}, {"linear2", t.Linear2},
		{"norm1", t.Norm1}, {"norm2", t.Norm2}, {"dropout1", t.drop.first}, {"dropout2", t.drop.second},
	}}
}

// Forward returns a tensor of x's shape.
func (t *TransformerEncoderLayer) Forward(x *torch.Tensor) *torch.Tensor { return t.Encode(x, nil) }

// Encode is Forward with a mask for the self-attention, which may be nil: see [AttentionOptions].
// To exclude padding, pass a bool mask [N 1 1 L] that is true at the padded positions.
func (t *TransformerEncoderLayer) Encode(x, mask *torch.Tensor) *torch.Tensor {
	return t.result(torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor { return t.encode(in[0], mask) }, x), x, mask)
}

func (t *TransformerEncoderLayer) encode(x, mask *torch.Tensor) *torch.Tensor {
	if t.normFirst {
		x1 := x.Add(t.attend(t.Norm1.Forward(x), mask))
		return x1.Add(t.feed(t.Norm2.Forward(x1)))
	}
	x1 := t.Norm1.Forward(x.Add(t.attend(x, mask)))
	return t.Norm2.Forward(x1.Add(t.feed(x1)))
}

func (t *TransformerEncoderLayer) attend(x, mask *torch.Tensor) *torch.Tensor {
	return t.drop.first.Forward(t.SelfAttn.Attend(x, x, x, AttentionOptions{Mask: mask, Causal: t.SelfAttn.o.Causal}))
}

func (t *TransformerEncoderLayer) feed(x *torch.Tensor) *torch.Tensor {
	hidden := t.drop.hidden.Forward(t.activation.Forward(t.Linear1.Forward(x)))
	return t.drop.second.Forward(t.Linear2.Forward(hidden))
}

// copy returns a layer with copies of the parameters.
func (t *TransformerEncoderLayer) copy() *TransformerEncoderLayer {
	c := &TransformerEncoderLayer{
		SelfAttn: t.SelfAttn.copy(), Linear1: t.Linear1.copy(), Linear2: t.Linear2.copy(),
		Norm1: t.Norm1.copy(), Norm2: t.Norm2.copy(),
		drop: t.drop.copy(), activation: t.activation, normFirst: t.normFirst,
	}
	c.like(&t.layer)
	return c
}

// TransformerDecoderLayer is self-attention, attention to the output of an encoder, and a
// feed-forward network, each with a residual connection, normalisation and dropout. The parameters
// have the names of PyTorch's nn.TransformerDecoderLayer.
type TransformerDecoderLayer struct {
	layer
	SelfAttn, MultiheadAttn *MultiheadAttention // the second attends to the encoder's output
	Linear1, Linear2        *Linear
	Norm1, Norm2, Norm3     *LayerNorm

	drop       dropouts
	activation Module
	normFirst  bool
}

// NewTransformerDecoderLayer returns a layer for vectors of the given size. The size must be a
// multiple of the number of heads.
func NewTransformerDecoderLayer(size, heads int, o TransformerDecoderLayerOptions) *TransformerDecoderLayer {
	t := &TransformerDecoderLayer{normFirst: o.NormFirst}
	t.create("TransformerDecoderLayer")
	t.SelfAttn = o.attention(size, heads, o.Causal)
	t.MultiheadAttn = o.attention(size, heads, false)
	t.Linear1, t.Linear2, t.activation = o.feed(size)
	t.Norm1, t.Norm2, t.Norm3 = o.norm(size), o.norm(size), o.norm(size)
	t.drop = newDropouts(o.probability())
	return t
}

// Parts returns the parts under PyTorch's names.
func (t *TransformerDecoderLayer) Parts() Parts {
	return Parts{Modules: []Child{
		{"self_attn", t.SelfAttn}, {"multihead_attn", t.MultiheadAttn},
		{"linear1", t.Linear1}, {"dropout", t.drop.hidden}, {"linear2", t.Linear2},
		{"norm1", t.Norm1}, {"norm2", t.Norm2}, {"norm3", t.Norm3},
		{"dropout1", t.drop.first}, {"dropout2", t.drop.second}, {"dropout3", t.drop.third},
	}}
}

// Forward calls Decode with x as both the input and the encoder's output.
func (t *TransformerDecoderLayer) Forward(x *torch.Tensor) *torch.Tensor {
	return t.Decode(x, x, DecodeMasks{})
}

// DecodeMasks are the masks of a decoder layer's attentions: see [AttentionOptions].
type DecodeMasks struct {
	Mask       *torch.Tensor // for the self-attention; not together with the option Causal
	MemoryMask *torch.Tensor // for the attention to the encoder's output
}

// Decode returns a tensor of x's shape. x is [L N size], and memory, the encoder's output, is [S N
// size]; with BatchFirst, N comes first.
func (t *TransformerDecoderLayer) Decode(x, memory *torch.Tensor, masks DecodeMasks) *torch.Tensor {
	y := torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor { return t.decode(in[0], in[1], masks) }, x, memory)
	return t.result(y, x, memory, masks.Mask, masks.MemoryMask)
}

func (t *TransformerDecoderLayer) decode(x, memory *torch.Tensor, masks DecodeMasks) *torch.Tensor {
	attend := func(x *torch.Tensor) *torch.Tensor {
		return t.drop.first.Forward(t.SelfAttn.Attend(x, x, x,
			AttentionOptions{Mask: masks.Mask, Causal: t.SelfAttn.o.Causal}))
	}
	look := func(x *torch.Tensor) *torch.Tensor {
		return t.drop.second.Forward(t.MultiheadAttn.Attend(x, memory, memory,
			AttentionOptions{Mask: masks.MemoryMask}))
	}
	feed := func(x *torch.Tensor) *torch.Tensor {
		hidden := t.drop.hidden.Forward(t.activation.Forward(t.Linear1.Forward(x)))
		return t.drop.third.Forward(t.Linear2.Forward(hidden))
	}
	if t.normFirst {
		x = x.Add(attend(t.Norm1.Forward(x)))
		x = x.Add(look(t.Norm2.Forward(x)))
		return x.Add(feed(t.Norm3.Forward(x)))
	}
	x = t.Norm1.Forward(x.Add(attend(x)))
	x = t.Norm2.Forward(x.Add(look(x)))
	return t.Norm3.Forward(x.Add(feed(x)))
}

// copy returns a layer with copies of the parameters.
func (t *TransformerDecoderLayer) copy() *TransformerDecoderLayer {
	c := &TransformerDecoderLayer{
		SelfAttn: t.SelfAttn.copy(), MultiheadAttn: t.MultiheadAttn.copy(), Linear1: t.Linear1.copy(),
		Linear2: t.Linear2.copy(),
		Norm1:   t.Norm1.copy(), Norm2: t.Norm2.copy(), Norm3: t.Norm3.copy(),
		drop: t.drop.copy(), activation: t.activation, normFirst: t.normFirst,
	}
	c.like(&t.layer)
	return c
}

// TransformerOptions are the options of NewTransformerEncoder and NewTransformerDecoder.
type TransformerOptions struct {
	Norm Module // applied to the last layer's output, such as a LayerNorm, or nil
}

// The options of NewTransformerEncoder and NewTransformerDecoder.
type (
	TransformerEncoderOptions = TransformerOptions
	TransformerDecoderOptions = TransformerOptions
)

// transformer is the common part of TransformerEncoder and TransformerDecoder.
type transformer[L interface {
	comparable
	Module
}] struct {
	layer
	Layers []L
	Norm   Module // applied to the last layer's output, or nil

	bad *torch.Tensor // why the constructor failed, or nil
}

func (t *transformer[L]) construct(kind string, first L, layers int, o TransformerOptions, another func(L) L) {
	t.create(kind)
	t.Norm = o.Norm
	if t.bad = positive("nn.New"+kind, "layers", layers); t.bad != nil {
		return
	}
	var none L
	if first == none {
		t.bad = torch.Fail("nn.New"+kind, fmt.Errorf("%w: %w", errNoModule, cuda.ErrInvalidArgument))
		return
	}
	t.Layers = []L{first}
	for len(t.Layers) < layers {
		t.Layers = append(t.Layers, another(first))
	}
}

// Parts returns the parts under PyTorch's names: "layers.0" and so on, and "norm".
func (t *transformer[L]) Parts() Parts {
	var p Parts
	if t.bad != nil {
		p.Parameters = []torch.Named{{Name: "layers", Tensor: t.bad}}
	}
	for i, l := range t.Layers {
		p.Modules = append(p.Modules, Child{fmt.Sprint("layers.", i), l})
	}
	if t.Norm != nil {
		p.Modules = append(p.Modules, Child{"norm", t.Norm})
	}
	return p
}

// run passes x through the layers.
func (t *transformer[L]) run(x *torch.Tensor, f func(l L, x *torch.Tensor) *torch.Tensor) *torch.Tensor {
	if t.bad != nil {
		return t.bad
	}
	for _, l := range t.Layers {
		x = f(l, x)
	}
	if t.Norm != nil {
		x = t.Norm.Forward(x)
	}
	return x
}

// TransformerEncoder passes its input through the encoder layers in its field Layers, and then
// through Norm if that is not nil.
type TransformerEncoder struct {
	transformer[*TransformerEncoderLayer]
}

// NewTransformerEncoder returns the layer followed by layers-1 copies. As in PyTorch, their initial
// parameters are equal. Use [Initialise] to give them different ones.
func NewTransformerEncoder(layer *TransformerEncoderLayer, layers int,
	o TransformerEncoderOptions) *TransformerEncoder {
	t := &TransformerEncoder{}
	t.construct("TransformerEncoder", layer, layers, o, (*TransformerEncoderLayer).copy)
	return t
}

// Forward returns a tensor of x's shape.
func (t *TransformerEncoder) Forward(x *torch.Tensor) *torch.Tensor { return t.Encode(x, nil) }

// Encode is Forward with a mask for all layers, which may be nil: see
// [TransformerEncoderLayer.Encode].
func (t *TransformerEncoder) Encode(x, mask *torch.Tensor) *torch.Tensor {
	y := torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
		return t.run(in[0], func(l *TransformerEncoderLayer,
			x *torch.Tensor) *torch.Tensor {
			return l.Encode(x, mask)
		})
	}, x)
	return t.result(y, x, mask)
}

// TransformerDecoder passes its input through the decoder layers in its field Layers, and then
// through Norm if that is not nil.
type TransformerDecoder struct {
	transformer[*TransformerDecoderLayer]
}

// NewTransformerDecoder returns the layer followed by layers-1 copies. As in PyTorch, their initial
// parameters are equal. Use [Initialise] to give them different ones.
func NewTransformerDecoder(layer *TransformerDecoderLayer, layers int,
	o TransformerDecoderOptions) *TransformerDecoder {
	t := &TransformerDecoder{}
	t.construct("TransformerDecoder", layer, layers, o, (*TransformerDecoderLayer).copy)
	return t
}

// Forward calls Decode with x as both the input and the encoder's output.
func (t *TransformerDecoder) Forward(x *torch.Tensor) *torch.Tensor {
	return t.Decode(x, x, DecodeMasks{})
}

// Decode returns a tensor of x's shape, with the masks for all layers: see
// [TransformerDecoderLayer.Decode].
func (t *TransformerDecoder) Decode(x, memory *torch.Tensor, masks DecodeMasks) *torch.Tensor {
	y := torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
		return t.run(in[0], func(l *TransformerDecoderLayer,
			x *torch.Tensor) *torch.Tensor {
			return l.Decode(x, in[1], masks)
		})
	}, x, memory)
	return t.result(y, x, memory, masks.Mask, masks.MemoryMask)
}

package models

import (
	"errors"
	"fmt"
	"math"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// ViT is a vision transformer: it cuts an image into patches, which attend to each other
// (https://arxiv.org/abs/2010.11929).
type ViT struct {
	Head nn.Module // the head: [N 768] to classes; may be replaced

	image      int64
	projection *nn.Conv2d
	classToken *torch.Tensor // [1 1 768]; precedes the patches
	encoder    *vitEncoder
}

// ViTOptions are the options of NewViTB16.
type ViTOptions struct {
	NumClasses int     // 0 stands for 1000
	ImageSize  int     // pixels per side of an image, a multiple of 16; 0 stands for 224
	Dropout    float64 // probability after each part; 0 or less for none, as in the published model
}

// NewViTB16 returns torchvision's vit_b_16. It maps images [N 3 size size] to logits [N classes].
func NewViTB16(o ViTOptions) (*ViT, error) {
	const kind, patch, width, layers, heads = "ViT-B/16", 16, 768, 12, 12
	image := o.ImageSize
	if image == 0 {
		image = 224
	}
	switch {
	case o.NumClasses < 0:
		return nil, invalid(kind, "NumClasses is %d", o.NumClasses)
	case image < 0 || image%patch != 0:
		return nil, invalid(kind, "ImageSize is %d: it must be a multiple of %d", o.ImageSize, patch)
	}
	o.Dropout = probability(o.Dropout, 0)
	side := image / patch
	// The order of these calls is torchvision's, so that the same seed gives the same numbers.
	v := &ViT{
		image:      int64(image),
		projection: nn.NewConv2d(3, width, patch, nn.Conv2dOptions{Stride: patch}),
		classToken: nn.NewParameter(nn.Constant(0), 1, 1, width),
	}
	v.encoder = &vitEncoder{
		positions: nn.NewParameter(nn.Normal(0, 0.02), 1, int64(side*side+1), width),
		dropout:   nn.NewDropout(o.Dropout),
	}
	var err error
	for range layers {
		b, e := newViTBlock(width, heads, o.Dropout)
		v.encoder.blocks, err = append(v.encoder.blocks, b), errors.Join(err, e)
	}
	v.encoder.norm = nn.NewLayerNorm([]int{width}, nn.LayerNormOptions{Eps: 1e-6})
	head := nn.NewLinear(width, classes(o.NumClasses), nn.LinearOptions{})
	v.Head = head
	err = errors.Join(err,
		nn.Initialise(v.projection.Weight, nn.TruncNormal(0, math.Sqrt(1.0/(3*patch*patch)), -2, 2)),
		nn.Initialise(v.projection.Bias, nn.Constant(0)),
		nn.Initialise(head.Weight, nn.Constant(0)),
		nn.Initialise(head.Bias, nn.Constant(0)),
	)
	return checked(kind, v, err)
}

// Forward computes the logits [N classes] of images [N 3 size size].
func (v *ViT) Forward(x *torch.Tensor) *torch.Tensor {
	shape := x.Shape()
	if shape == nil {
		return v.projection.Forward(x) // reports what is wrong with x
	}
	if len(shape) != 4 || shape[2] != v.image || shape[3] != v.image {
		return torch.Fail("models.ViT",
			fmt.Errorf("the input is %v, and the images must have %d x %d pixels: %w", shape, v.image,
				v.image, cuda.ErrInvalidArgument))
	}
	return v.Head.Forward(torch.Tidy(v.features, x))
}

// features computes the head's input vectors [N 768].
func (v *ViT) features(in ...*torch.Tensor) *torch.Tensor {
	patches := v.projection.Forward(in[0]).Flatten(2, -1).Permute(0, 2, 1)
	token := v.classToken.In(in[0].Scope()).Expand(patches.Shape()[0], -1, -1)
	return v.encoder.Forward(torch.Cat([]*torch.Tensor{token, patches}, 1)).Select(1, 0)
}

// Parts returns the modules by torchvision's names.
func (v *ViT) Parts() nn.Parts {
	return nn.Parts{
		Parameters: []torch.Named{{Name: "class_token", Tensor: v.classToken}},
		Modules: []nn.Child{
			{Name: "conv_proj", Module: v.projection},
			{Name: "encoder", Module: v.encoder},
			{Name: "heads.head", Module: v.Head},
		},
	}
}

// vitEncoder adds the embedding of positions, and applies the blocks.
type vitEncoder struct {
	positions *torch.Tensor // [1 1+patches 768]
	dropout   *nn.Dropout
	blocks    []*vitBlock
	norm      *nn.LayerNorm
}

// Forward returns a tensor of x's shape [N 1+patches 768].
func (e *vitEncoder) Forward(x *torch.Tensor) *torch.Tensor {
	x = e.dropout.Forward(x.Add(e.positions))
	for _, b := range e.blocks {
		y := b.Forward(x)
		x.Close()
		x = y
	}
	return e.norm.Forward(x)
}

// Parts returns the parts by torchvision's names.
func (e *vitEncoder) Parts() nn.Parts {
	modules := []nn.Child{{Name: "dropout", Module: e.dropout}}
	for i, b := range e.blocks {
		modules = append(modules, nn.Child{Name: fmt.Sprintf("layers.encoder_layer_%d", i), Module: b})
	}
	return nn.Parts{
		Parameters: []torch.Named{{Name: "pos_embedding", Tensor: e.positions}},
		Modules:    append(modules, nn.Child{Name: "ln", Module: e.norm}),
	}
}

// vitBlock is attention followed by a network of two linear layers. Both are residual: each
// normalises its input, and its result is added to that input.
type vitBlock struct {
	norm1, norm2 *nn.LayerNorm
	attention    *nn.MultiheadAttention
	dropout      *nn.Dropout
	mlp          *nn.Sequential
}

func newViTBlock(width, heads int, dropout float64) (*vitBlock, error) {
	norm := nn.LayerNormOptions{Eps: 1e-6}
	b := &vitBlock{
		norm1:     nn.NewLayerNorm([]int{width}, norm),
		attention: nn.NewMultiheadAttention(width, heads, nn.MultiheadAttentionOptions{BatchFirst: true}),
		dropout:   nn.NewDropout(dropout),
		norm2:     nn.NewLayerNorm([]int{width}, norm),
	}
	up, down := nn.NewLinear(width, 4*width, nn.LinearOptions{}), nn.NewLinear(4*width, width, nn.LinearOptions{})
	b.mlp = nn.NewSequential(up, nn.NewGELU(nn.GELUOptions{}), nn.NewDropout(dropout), down, nn.NewDropout(dropout))
	return b, errors.Join(
		nn.Initialise(up.Weight, nn.XavierUniform()), nn.Initialise(up.Bias, nn.Normal(0, 1e-6)),
		nn.Initialise(down.Weight, nn.XavierUniform()), nn.Initialise(down.Bias, nn.Normal(0, 1e-6)),
	)
}

// Forward returns a tensor of x's shape [N L 768].
func (b *vitBlock) Forward(x *torch.Tensor) *torch.Tensor {
	return torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
		x := in[0]
		x = b.dropout.Forward(b.attention.Forward(b.norm1.Forward(x))).Add(x)
		return x.Add(b.mlp.Forward(b.norm2.Forward(x)))
	}, x)
}

// Parts returns the parts by torchvision's names.
func (b *vitBlock) Parts() nn.Parts {
	return nn.Parts{Modules: []nn.Child{
		{Name: "ln_1", Module: b.norm1},
		{Name: "self_attention", Module: b.attention},
		{Name: "dropout", Module: b.dropout},
		{Name: "ln_2", Module: b.norm2},
		{Name: "mlp", Module: b.mlp},
	}}
}

// String returns the module tree: see [nn.Tree].
func (v *ViT) String() string { return nn.Tree(v) }

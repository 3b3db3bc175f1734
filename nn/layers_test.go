package nn_test

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// gptBlock is a one-layer GPT, as in testdata/make_layers.py.
type gptBlock struct {
	wte, wpe *nn.Embedding
	ln1, ln2 *nn.LayerNorm
	attn     *nn.MultiheadAttention
	mlp      *nn.Sequential
	head     *nn.Linear
}

func newGPTBlock() *gptBlock {
	return &gptBlock{
		wte:  nn.NewEmbedding(11, 8, nn.EmbeddingOptions{}),
		wpe:  nn.NewEmbedding(6, 8, nn.EmbeddingOptions{}),
		ln1:  nn.NewLayerNorm([]int{8}, nn.LayerNormOptions{}),
		attn: nn.NewMultiheadAttention(8, 2, nn.MultiheadAttentionOptions{BatchFirst: true, Causal: true}),
		ln2:  nn.NewLayerNorm([]int{8}, nn.LayerNormOptions{}),
		mlp: nn.NewSequential(nn.NewLinear(8, 32, nn.LinearOptions{}),
			nn.NewGELU(nn.GELUOptions{Tanh: true}), nn.NewLinear(32, 8, nn.LinearOptions{})),
		head: nn.NewLinear(8, 11, nn.LinearOptions{NoBias: true}),
	}
}

func (g *gptBlock) Parts() nn.Parts {
	return nn.Parts{Modules: []nn.Child{
		{Name: "wte", Module: g.wte}, {Name: "wpe", Module: g.wpe}, {Name: "ln_1", Module: g.ln1},
		{Name: "attn", Module: g.attn},
		{Name: "ln_2", Module: g.ln2}, {Name: "mlp", Module: g.mlp}, {Name: "head", Module: g.head},
	}}
}

func (g *gptBlock) Forward(tokens *torch.Tensor) *torch.Tensor { return g.generate(tokens, nil) }

// generate computes the logits of tokens that follow the cached ones.
func (g *gptBlock) generate(tokens *torch.Tensor, cache *nn.KVCache) *torch.Tensor {
	if err := tokens.Err(); err != nil {
		return tokens
	}
	past := 0
	if cache != nil {
		past = cache.Len()
	}
	positions, err := torch.Arange(6)
	if err != nil {
		return torch.Fail("gpt", err)
	}
	defer positions.Close()
	now := positions.In(tokens.Scope()).To(tokens.Device()).Narrow(0, int64(past), tokens.Shape()[1])
	x := g.wte.Forward(tokens).Add(g.wpe.Forward(now))
	h := g.ln1.Forward(x)
	x = x.Add(g.attn.Attend(h, h, h, nn.AttentionOptions{Causal: true, Cache: cache}))
	x = x.Add(g.mlp.Forward(g.ln2.Forward(x)))
	return g.head.Forward(x)
}

// uNet is a U-Net of two levels, as in testdata/make_layers.py.
type uNet struct {
	down1, down2, out *nn.Sequential
	pool, up          nn.Module
	reduce            *nn.ConvTranspose2d
}

func newUNet() *uNet {
	same := nn.Conv2dOptions{Padding: 1}
	return &uNet{
		down1: nn.NewSequential(nn.NewConv2d(2, 4, 3, same), nn.NewGroupNorm(2, 4, nn.GroupNormOptions{}),
			nn.NewSiLU()),
		pool: nn.NewMaxPool2d(2, nn.MaxPool2dOptions{}),
		down2: nn.NewSequential(nn.NewConv2d(4, 8, 3, same),
			nn.NewInstanceNorm2d(8, nn.InstanceNorm2dOptions{Affine: true}),
			nn.NewLeakyReLU(nn.LeakyReLUOptions{NegativeSlope: 0.2})),
		up:     nn.NewUpsample(nn.UpsampleOptions{Scale: 2, Mode: "bilinear"}),
		reduce: nn.NewConvTranspose2d(8, 4, 3, nn.ConvTranspose2dOptions{Padding: 1}),
		out: nn.NewSequential(nn.NewConv2d(8, 4, 3, same), nn.NewBatchNorm2d(4, nn.BatchNorm2dOptions{}),
			nn.NewReLU(), nn.NewConv2d(4, 3, 1, nn.Conv2dOptions{})),
	}
}

func (u *uNet) Parts() nn.Parts {
	return nn.Parts{Modules: []nn.Child{
		{Name: "down1", Module: u.down1}, {Name: "pool", Module: u.pool}, {Name: "down2", Module: u.down2},
		{Name: "up", Module: u.up},
		{Name: "reduce", Module: u.reduce}, {Name: "out", Module: u.out},
	}}
}

func (u *uNet) Forward(x *torch.Tensor) *torch.Tensor {
	a := u.down1.Forward(x)
	b := u.reduce.Forward(u.up.Forward(u.down2.Forward(u.pool.Forward(a))))
	return u.out.Forward(torch.Cat([]*torch.Tensor{a, b}, 1))
}

// newDCGAN returns a generator of images of 16 pixels, as in testdata/make_layers.py.
func newDCGAN() *nn.Sequential {
	twice := nn.ConvTranspose2dOptions{Stride: 2, Padding: 1, NoBias: true}
	return nn.NewSequential(
		nn.NewConvTranspose2d(5, 8, 4, nn.ConvTranspose2dOptions{NoBias: true}),
		nn.NewBatchNorm2d(8, nn.BatchNorm2dOptions{}), nn.NewReLU(),
		nn.NewConvTranspose2d(8, 4, 4, twice), nn.NewBatchNorm2d(4, nn.BatchNorm2dOptions{}), nn.NewReLU(),
		nn.NewConvTranspose2d(4, 3, 4, twice), nn.NewTanh(),
	)
}

// crossAttention attends from the first two positions to all positions. The values are in reverse
// order, and the last key is masked.
type crossAttention struct{ *nn.MultiheadAttention }

func (c crossAttention) Forward(x *torch.Tensor) *torch.Tensor {
	m := mask(x, []byte{0, 0, 1, 0, 0, 1}, 2, 3)
	return c.Attend(x.Narrow(0, 0, 2), x, torch.Call1("flip", x, []int{0}), nn.AttentionOptions{Mask: m})
}

// mask returns a bool mask, which belongs to the scope of x.
func mask(x *torch.Tensor, values []byte, shape ...int64) *torch.Tensor {
	m, err := torch.FromBytes(values, shape...)
	if err != nil {
		return torch.Fail("mask", err)
	}
	defer m.Close()
	return m.In(x.Scope()).To(x.Device()).ToDType(torch.Bool)
}

// maskedEncoder is an encoder for which the last position of the second sequence is padding.
type maskedEncoder struct{ *nn.TransformerEncoder }

func (e maskedEncoder) Forward(x *torch.Tensor) *torch.Tensor {
	return e.Encode(x, mask(x, []byte{0, 0, 0, 0, 0, 1}, 2, 1, 1, 3))
}

// decoder decodes the first two positions. Their attention to the memory, which is all positions,
// has a mask for the last one.
type decoder struct{ *nn.TransformerDecoder }

func (d decoder) Forward(x *torch.Tensor) *torch.Tensor {
	return d.Decode(x.Narrow(0, 0, 2), x, nn.DecodeMasks{MemoryMask: mask(x, []byte{0, 0, 1, 0, 0, 1}, 2, 3)})
}

// cell is a cell with one state.
type cell interface {
	nn.Module
	Step(x, hidden *torch.Tensor) *torch.Tensor
}

// unrolled computes the hidden states of a cell for the sequences x [L N in].
type unrolled struct{ cell }

func (u unrolled) Forward(x *torch.Tensor) *torch.Tensor {
	var states []*torch.Tensor
	var h *torch.Tensor
	for i := range x.Shape()[0] {
		h = u.Step(x.Select(0, i), h)
		states = append(states, h)
	}
	return torch.Stack(states, 0)
}

// unrolledLSTM computes the hidden states of a cell for the sequences x [L N in].
type unrolledLSTM struct{ *nn.LSTMCell }

func (u unrolledLSTM) Forward(x *torch.Tensor) *torch.Tensor {
	var states []*torch.Tensor
	var h, c *torch.Tensor
	for i := range x.Shape()[0] {
		h, c = u.Step(x.Select(0, i), h, c)
		states = append(states, h)
	}
	return torch.Stack(states, 0)
}

// withLengths computes a recurrent layer's outputs and state for sequences of the given lengths,
// and joins them in one vector.
type withLengths struct {
	recurrent
	lengths []int
}

// recurrent is a recurrent layer with one state.
type recurrent interface {
	nn.Module
	RunLengths(x *torch.Tensor, lengths []int, hidden *torch.Tensor) (y, lastHidden *torch.Tensor)
}

func (w withLengths) Forward(x *torch.Tensor) *torch.Tensor {
	y, h := w.RunLengths(x, w.lengths, nil)
	return torch.Cat([]*torch.Tensor{y.Flatten(0, -1), h.Flatten(0, -1)}, 0)
}

type lstmLengths struct{ *nn.LSTM }

func (l lstmLengths) Forward(x *torch.Tensor) *torch.Tensor {
	y, h, c := l.RunLengths(x, []int{2, 5, 1}, nil, nil)
	return torch.Cat([]*torch.Tensor{y.Flatten(0, -1), h.Flatten(0, -1), c.Flatten(0, -1)}, 0)
}

// bags is an EmbeddingBag that computes bags of 3, 0 and 4 indices, with weights.
type bags struct{ *nn.EmbeddingBag }

func (b bags) Forward(x *torch.Tensor) *torch.Tensor {
	offsets, err := torch.FromInt64s([]int64{0, 3, 3})
	if err != nil {
		return torch.Fail("bags", err)
	}
	defer offsets.Close()
	weights, err := torch.FromSlice([]float64{0, 0.25, 0.5, 0.75, 1, 1.25, 1.5})
	if err != nil {
		return torch.Fail("bags", err)
	}
	defer weights.Close()
	s, device := x.Scope(), x.Device()
	return b.Bags(x, offsets.In(s).To(device), weights.In(s).To(device).ToDType(b.Weight.DType()))
}

// layerCases are the modules of testdata/make_layers.py.
func layerCases() map[string]func() nn.Module {
	two := 2
	encoder := nn.TransformerEncoderLayerOptions{Feedforward: 16, NoDropout: true}
	first := encoder
	first.NormFirst, first.BatchFirst, first.Activation = true, true, nn.NewGELU(nn.GELUOptions{})
	tracked := nn.InstanceNorm2dOptions{RunningStats: true}
	return map[string]func() nn.Module{
		"linear": func() nn.Module { return nn.NewLinear(6, 3, nn.LinearOptions{}) },
		"conv1d": func() nn.Module { return nn.NewConv1d(4, 6, 3, nn.Conv1dOptions{Stride: 2, Padding: 1, Groups: 2}) },
		"conv2d": func() nn.Module { return nn.NewConv2d(4, 6, 3, nn.Conv2dOptions{Padding: 2, Dilation: 2}) },
		"conv2d_flat": func() nn.Module {
			return nn.NewConv2d(4, 2, 0, nn.Conv2dOptions{KernelSize: []int{1, 5}, PaddingSize: []int{0, 2}})
		},
		"conv3d":      func() nn.Module { return nn.NewConv3d(4, 2, 2, nn.Conv3dOptions{NoBias: true}) },
		"conv1d_same": func() nn.Module { return nn.NewConv1d(4, 6, 4, nn.Conv1dOptions{Same: true, Dilation: 3}) },
		"conv2d_sizes": func() nn.Module {
			return nn.NewConv2d(4, 6, 0, nn.Conv2dOptions{
				KernelSize: []int{3, 2}, StrideSize: []int{2, 1}, PaddingSize: []int{1, 0}, DilationSize: []int{1, 2},
			})
		},
		"conv2d_reflect": func() nn.Module {
			return nn.NewConv2d(4, 6, 3, nn.Conv2dOptions{Stride: 2, PaddingSize: []int{1, 2}, PaddingMode: "reflect"})
		},
		"conv2d_same_circular": func() nn.Module {
			return nn.NewConv2d(4, 6, 0,
				nn.Conv2dOptions{KernelSize: []int{2, 3}, Same: true, PaddingMode: "circular", Groups: 2})
		},
		"conv3d_same": func() nn.Module {
			return nn.NewConv3d(4, 2, 0, nn.Conv3dOptions{KernelSize: []int{3, 2, 1}, Same: true})
		},
		"conv_transpose2d_sizes": func() nn.Module {
			return nn.NewConvTranspose2d(4, 3, 0, nn.ConvTranspose2dOptions{
				KernelSize: []int{3, 2}, StrideSize: []int{2, 1}, PaddingSize: []int{1, 0},
				OutputPaddingSize: []int{1, 0}, DilationSize: []int{1, 2},
			})
		},
		"conv_transpose1d": func() nn.Module {
			return nn.NewConvTranspose1d(4, 3, 3,
				nn.ConvTranspose1dOptions{Stride: 2})
		},
		"conv_transpose2d": func() nn.Module {
			return nn.NewConvTranspose2d(4, 6, 3,
				nn.ConvTranspose2dOptions{Stride: 2, Padding: 1, OutputPadding: 1, Groups: 2})
		},
		"conv_transpose3d": func() nn.Module {
			return nn.NewConvTranspose3d(4, 2, 2,
				nn.ConvTranspose3dOptions{Dilation: 2})
		},
		"batch_norm1d": func() nn.Module { return nn.NewBatchNorm1d(4, nn.BatchNorm1dOptions{}) },
		"batch_norm1d_flat": func() nn.Module {
			return nn.NewBatchNorm1d(4,
				nn.BatchNorm1dOptions{NoAffine: true, Momentum: 0.3})
		},
		"batch_norm2d": func() nn.Module {
			return nn.NewBatchNorm2d(4,
				nn.BatchNorm2dOptions{Eps: 1e-3})
		},
		"batch_norm2d_eval": func() nn.Module { return nn.NewBatchNorm2d(4, nn.BatchNorm2dOptions{}) },
		"batch_norm2d_untracked_eval": func() nn.Module {
			return nn.NewBatchNorm2d(4,
				nn.BatchNorm2dOptions{NoRunningStats: true})
		},
		"batch_norm3d":    func() nn.Module { return nn.NewBatchNorm3d(4, nn.BatchNorm3dOptions{}) },
		"instance_norm1d": func() nn.Module { return nn.NewInstanceNorm1d(4, nn.InstanceNorm1dOptions{}) },
		"instance_norm2d": func() nn.Module {
			return nn.NewInstanceNorm2d(4,
				nn.InstanceNorm2dOptions{Affine: true})
		},
		"instance_norm2d_tracked":      func() nn.Module { return nn.NewInstanceNorm2d(4, tracked) },
		"instance_norm2d_tracked_eval": func() nn.Module { return nn.NewInstanceNorm2d(4, tracked) },
		"instance_norm3d":              func() nn.Module { return nn.NewInstanceNorm3d(4, nn.InstanceNorm3dOptions{}) },
		"layer_norm":                   func() nn.Module { return nn.NewLayerNorm([]int{7}, nn.LayerNormOptions{}) },
		"layer_norm_two": func() nn.Module {
			return nn.NewLayerNorm([]int{4, 7},
				nn.LayerNormOptions{Eps: 1e-3, NoBias: true})
		},
		"rms_norm": func() nn.Module { return nn.NewRMSNorm([]int{7}, nn.RMSNormOptions{}) },
		"rms_norm_eps": func() nn.Module {
			return nn.NewRMSNorm([]int{7},
				nn.RMSNormOptions{Eps: 0.1, NoAffine: true})
		},
		"group_norm": func() nn.Module { return nn.NewGroupNorm(2, 4, nn.GroupNormOptions{}) },
		"embedding": func() nn.Module {
			return nn.NewEmbedding(7, 3,
				nn.EmbeddingOptions{PaddingIdx: &two})
		},
		"embedding_bag": func() nn.Module { return nn.NewEmbeddingBag(7, 3, nn.EmbeddingBagOptions{}) },
		"embedding_bag_sum": func() nn.Module {
			return nn.NewEmbeddingBag(7, 3, nn.EmbeddingBagOptions{Mode: "sum", PaddingIdx: &two})
		},
		"embedding_bag_max": func() nn.Module { return nn.NewEmbeddingBag(7, 3, nn.EmbeddingBagOptions{Mode: "max"}) },
		"embedding_bags": func() nn.Module {
			return bags{nn.NewEmbeddingBag(7, 3,
				nn.EmbeddingBagOptions{Mode: "sum"})}
		},
		"attention": func() nn.Module { return nn.NewMultiheadAttention(8, 2, nn.MultiheadAttentionOptions{}) },
		"attention_cross": func() nn.Module {
			return crossAttention{nn.NewMultiheadAttention(8, 4, nn.MultiheadAttentionOptions{})}
		},
		"attention_plain": func() nn.Module {
			return nn.NewMultiheadAttention(8, 2, nn.MultiheadAttentionOptions{NoBias: true, BatchFirst: true})
		},
		"encoder":       func() nn.Module { return nn.NewTransformerEncoderLayer(8, 2, encoder) },
		"encoder_first": func() nn.Module { return nn.NewTransformerEncoderLayer(8, 2, first) },
		"encoder_deep": func() nn.Module {
			o := encoder
			o.BatchFirst = true
			layer := nn.NewTransformerEncoderLayer(8, 2, o)
			norm := nn.NewLayerNorm([]int{8}, nn.LayerNormOptions{})
			return maskedEncoder{nn.NewTransformerEncoder(layer, 2, nn.TransformerEncoderOptions{Norm: norm})}
		},
		"decoder": func() nn.Module {
			o := encoder
			o.Causal = true
			return decoder{nn.NewTransformerDecoder(nn.NewTransformerDecoderLayer(8, 2, o), 2,
				nn.TransformerDecoderOptions{})}
		},
		"decoder_first": func() nn.Module {
			o := first
			o.BatchFirst, o.Causal, o.NoBias = false, true, true
			layer := nn.NewTransformerDecoderLayer(8, 2, o)
			norm := nn.NewLayerNorm([]int{8}, nn.LayerNormOptions{})
			return decoder{nn.NewTransformerDecoder(layer, 2, nn.TransformerDecoderOptions{Norm: norm})}
		},
		"lstm": func() nn.Module { return nn.NewLSTM(4, 3, nn.LSTMOptions{}) },
		"lstm_deep": func() nn.Module {
			return nn.NewLSTM(4, 3, nn.LSTMOptions{Layers: 2, Bidirectional: true, BatchFirst: true})
		},
		"gru":       func() nn.Module { return nn.NewGRU(4, 3, nn.GRUOptions{Layers: 2}) },
		"gru_plain": func() nn.Module { return nn.NewGRU(4, 3, nn.GRUOptions{NoBias: true, Bidirectional: true}) },
		"rnn":       func() nn.Module { return nn.NewRNN(4, 3, nn.RNNOptions{}) },
		"rnn_deep": func() nn.Module {
			return nn.NewRNN(4, 3, nn.RNNOptions{Layers: 2, Bidirectional: true, BatchFirst: true})
		},
		"rnn_relu": func() nn.Module { return nn.NewRNN(4, 3, nn.RNNOptions{ReLU: true, NoBias: true}) },
		"lstm_lengths": func() nn.Module {
			return lstmLengths{nn.NewLSTM(4, 3, nn.LSTMOptions{Layers: 2, Bidirectional: true, BatchFirst: true})}
		},
		"gru_lengths": func() nn.Module { return withLengths{nn.NewGRU(4, 3, nn.GRUOptions{}), []int{4, 2}} },
		"rnn_lengths": func() nn.Module { return withLengths{nn.NewRNN(4, 3, nn.RNNOptions{}), []int{1, 5}} },
		"rnn_relu_lengths": func() nn.Module {
			return withLengths{nn.NewRNN(4, 3,
				nn.RNNOptions{ReLU: true}), []int{5, 2, 5}}
		},
		"lstm_cell":       func() nn.Module { return unrolledLSTM{nn.NewLSTMCell(4, 3, nn.LSTMCellOptions{})} },
		"lstm_cell_plain": func() nn.Module { return nn.NewLSTMCell(4, 3, nn.LSTMCellOptions{NoBias: true}) },
		"gru_cell":        func() nn.Module { return unrolled{nn.NewGRUCell(4, 3, nn.GRUCellOptions{})} },
		"gru_cell_plain":  func() nn.Module { return nn.NewGRUCell(4, 3, nn.GRUCellOptions{NoBias: true}) },
		"rnn_cell":        func() nn.Module { return unrolled{nn.NewRNNCell(4, 3, nn.RNNCellOptions{})} },
		"rnn_cell_relu": func() nn.Module {
			return nn.NewRNNCell(4, 3, nn.RNNCellOptions{ReLU: true, NoBias: true})
		},
		"prelu":           func() nn.Module { return nn.NewPReLU(4) },
		"relu":            nn.NewReLU,
		"relu6":           nn.NewReLU6,
		"leaky_relu":      func() nn.Module { return nn.NewLeakyReLU(nn.LeakyReLUOptions{}) },
		"gelu":            func() nn.Module { return nn.NewGELU(nn.GELUOptions{}) },
		"gelu_tanh":       func() nn.Module { return nn.NewGELU(nn.GELUOptions{Tanh: true}) },
		"silu":            nn.NewSiLU,
		"mish":            nn.NewMish,
		"hardswish":       nn.NewHardswish,
		"hardsigmoid":     nn.NewHardsigmoid,
		"sigmoid":         nn.NewSigmoid,
		"tanh":            nn.NewTanh,
		"softmax":         func() nn.Module { return nn.NewSoftmax(1) },
		"log_softmax":     func() nn.Module { return nn.NewLogSoftmax(-1) },
		"elu":             func() nn.Module { return nn.NewELU(nn.ELUOptions{Alpha: 0.5}) },
		"selu":            nn.NewSELU,
		"softplus":        func() nn.Module { return nn.NewSoftplus(nn.SoftplusOptions{Beta: 2, Threshold: 1}) },
		"glu":             func() nn.Module { return nn.NewGLU(1) },
		"celu":            func() nn.Module { return nn.NewCELU(nn.CELUOptions{Alpha: 0.5}) },
		"hardtanh":        func() nn.Module { return nn.NewHardtanh(nn.HardtanhOptions{}) },
		"hardtanh_limits": func() nn.Module { return nn.NewHardtanh(nn.HardtanhOptions{Max: 2}) },
		"log_sigmoid":     nn.NewLogSigmoid,
		"softsign":        nn.NewSoftsign,
		"max_pool1d":      func() nn.Module { return nn.NewMaxPool1d(3, nn.MaxPool1dOptions{Stride: 2, Padding: 1}) },
		"max_pool2d":      func() nn.Module { return nn.NewMaxPool2d(2, nn.MaxPool2dOptions{Stride: 1, Dilation: 2}) },
		"max_pool2d_sizes": func() nn.Module {
			return nn.NewMaxPool2d(0, nn.MaxPool2dOptions{
				KernelSize: []int{3, 2}, StrideSize: []int{2, 1}, PaddingSize: []int{1, 0}, DilationSize: []int{1, 2},
			})
		},
		"avg_pool2d_sizes": func() nn.Module {
			return nn.NewAvgPool2d(0, nn.AvgPool2dOptions{KernelSize: []int{3, 2}, StrideSize: []int{1, 2},
				PaddingSize: []int{1, 0}})
		},
		"max_pool3d": func() nn.Module { return nn.NewMaxPool3d(2, nn.MaxPool3dOptions{}) },
		"avg_pool1d": func() nn.Module { return nn.NewAvgPool1d(3, nn.AvgPool1dOptions{Padding: 1}) },
		"avg_pool2d": func() nn.Module {
			return nn.NewAvgPool2d(3, nn.AvgPool2dOptions{Stride: 2, Padding: 1, ExcludePadding: true})
		},
		"avg_pool3d": func() nn.Module {
			return nn.NewAvgPool3d(3,
				nn.AvgPool3dOptions{Stride: 2, CeilMode: true})
		},
		"adaptive_avg_pool1d":       func() nn.Module { return nn.NewAdaptiveAvgPool1d(3) },
		"adaptive_avg_pool2d":       func() nn.Module { return nn.NewAdaptiveAvgPool2d(4) },
		"adaptive_avg_pool3d":       func() nn.Module { return nn.NewAdaptiveAvgPool3d(3) },
		"adaptive_max_pool1d":       func() nn.Module { return nn.NewAdaptiveMaxPool1d(3) },
		"adaptive_max_pool2d":       func() nn.Module { return nn.NewAdaptiveMaxPool2d(4) },
		"adaptive_max_pool3d":       func() nn.Module { return nn.NewAdaptiveMaxPool3d(3) },
		"adaptive_avg_pool2d_sizes": func() nn.Module { return nn.NewAdaptiveAvgPool2d(1, 4) },
		"adaptive_avg_pool3d_sizes": func() nn.Module { return nn.NewAdaptiveAvgPool3d(1, 2, 3) },
		"adaptive_max_pool2d_sizes": func() nn.Module { return nn.NewAdaptiveMaxPool2d(4, 1) },
		"adaptive_max_pool3d_sizes": func() nn.Module { return nn.NewAdaptiveMaxPool3d(3, 1, 2) },
		"upsample_nearest1d":        func() nn.Module { return nn.NewUpsample(nn.UpsampleOptions{Scale: 2}) },
		"upsample_nearest2d":        func() nn.Module { return nn.NewUpsample(nn.UpsampleOptions{Size: []int{9, 5}}) },
		"upsample_nearest3d":        func() nn.Module { return nn.NewUpsample(nn.UpsampleOptions{Scale: 1.5}) },
		"upsample_linear": func() nn.Module {
			return nn.NewUpsample(nn.UpsampleOptions{Scale: 1.7,
				Mode: "linear"})
		},
		"upsample_bilinear": func() nn.Module {
			return nn.NewUpsample(nn.UpsampleOptions{Scale: 2.3,
				Mode: "bilinear"})
		},
		"upsample_bilinear_corners": func() nn.Module {
			return nn.NewUpsample(nn.UpsampleOptions{Size: []int{8}, Mode: "bilinear", AlignCorners: true})
		},
		"upsample_bicubic": func() nn.Module { return nn.NewUpsample(nn.UpsampleOptions{Scale: 2, Mode: "bicubic"}) },
		"upsample_trilinear": func() nn.Module {
			return nn.NewUpsample(nn.UpsampleOptions{Scale: 2,
				Mode: "trilinear"})
		},
		"pixel_shuffle":   func() nn.Module { return nn.NewPixelShuffle(2) },
		"pixel_unshuffle": func() nn.Module { return nn.NewPixelUnshuffle(2) },
		"pad_zero":        func() nn.Module { return nn.NewPad([]int{1, 2, 0, 3}, nn.PadOptions{}) },
		"pad_constant":    func() nn.Module { return nn.NewPad([]int{1, 2}, nn.PadOptions{Value: 0.5}) },
		"pad_reflect":     func() nn.Module { return nn.NewPad([]int{1, 2, 3, 0}, nn.PadOptions{Mode: "reflect"}) },
		"pad_replicate": func() nn.Module {
			return nn.NewPad([]int{1, 2, 0, 1, 3, 0},
				nn.PadOptions{Mode: "replicate"})
		},
		"pad_circular":       func() nn.Module { return nn.NewPad([]int{1, 2, 3, 0}, nn.PadOptions{Mode: "circular"}) },
		"dropout1d":          func() nn.Module { return nn.NewDropout1d(0.3) },
		"dropout3d":          func() nn.Module { return nn.NewDropout3d(0.3) },
		"alpha_dropout":      func() nn.Module { return nn.NewAlphaDropout(0.3) },
		"alpha_dropout_eval": func() nn.Module { return nn.NewAlphaDropout(0.3) },
		"dropout":            func() nn.Module { return nn.NewDropout(0.3) },
		"dropout2d":          func() nn.Module { return nn.NewDropout2d(0.3) },
		"dropout_eval":       func() nn.Module { return nn.NewDropout(0.5) },
		"dropout2d_eval":     func() nn.Module { return nn.NewDropout2d(0.5) },
		"flatten":            nn.NewFlatten,
		"unflatten":          func() nn.Module { return nn.NewUnflatten(1, 2, -1) },
		"identity":           nn.NewIdentity,
		"gpt":                func() nn.Module { return newGPTBlock() },
		"unet":               func() nn.Module { return newUNet() },
		"dcgan":              func() nn.Module { return newDCGAN() },
	}
}

func openLayers(t *testing.T) peer {
	t.Helper()
	c, err := checkpoint.Open(filepath.Join("testdata", "layers.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return peer{t, c}
}

// with returns the number of the file's tensors that have the prefix.
func (p peer) with(prefix string) int {
	n := 0
	for _, s := range p.c.Tensors() {
		if strings.HasPrefix(s.Name, prefix) {
			n++
		}
	}
	return n
}

func TestLayersMatchPyTorch(t *testing.T) {
	p := openLayers(t)
	cases := layerCases()
	for _, s := range p.c.Tensors() {
		if name, ok := strings.CutSuffix(s.Name, "/x"); ok && cases[name] == nil && !strings.HasPrefix(name, "loss_") {
			t.Errorf("there is no test of %s", name)
		}
	}
	for name, build := range cases {
		t.Run(name, func(t *testing.T) {
			if err := torch.ManualSeed(1); err != nil {
				t.Fatal(err)
			}
			m := build()
			defer nn.Close(m)
			p := peer{t, p.c}
			state := nn.State(m)
			for _, n := range state {
				p.near(name+"/init/"+n.Name, n.Tensor, 0)
			}
			if want := p.with(name + "/init/"); len(state) != want {
				t.Errorf("%d tensors in the state, PyTorch has %d", len(state), want)
			}
			nn.Train(m, !strings.HasSuffix(name, "_eval"))
			// Both passes must start from the same buffers, so restore them after the first pass.
			before := make(map[string]*torch.Tensor)
			for _, b := range nn.NamedBuffers(m) {
				before[b.Name] = b.Tensor.Clone()
				defer before[b.Name].Close()
			}
			p.compareLayer(name, m, cuda.CPU, torch.Float32, "32", 1e-5)
			for _, b := range nn.NamedBuffers(m) {
				if err := b.Tensor.CopyFrom(before[b.Name], torch.CopyOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			p.compareLayer(name, m, cuda.CPU, torch.Float64, "64", 1e-10)
		})
	}
}

func TestLayersMatchPyTorchOnGPU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	p := openLayers(t)
	for name, build := range layerCases() {
		if strings.Contains(name, "dropout") && !strings.HasSuffix(name, "_eval") {
			continue // a GPU draws other numbers
		}
		t.Run(name, func(t *testing.T) {
			if err := torch.ManualSeed(1); err != nil {
				t.Fatal(err)
			}
			m := build()
			defer nn.Close(m)
			nn.Train(m, !strings.HasSuffix(name, "_eval"))
			tolerance := 1e-10
			if strings.HasPrefix(name, "hardsigmoid") || strings.HasPrefix(name, "hardswish") {
				tolerance = 1e-7 // LibTorch's CUDA kernels multiply by a sixth in float32, whatever the dtype
			}
			peer{t, p.c}.compareLayer(name, m, gpu, torch.Float64, "64", tolerance)
		})
	}
}

// compareLayer compares a forward and a backward pass on the device, in the dtype.
func (p peer) compareLayer(name string, m nn.Module, device cuda.Device, dtype torch.DType, bits string,
	tolerance float64) {
	p.t.Helper()
	if err := nn.To(m, device); err != nil {
		p.t.Fatal(err)
	}
	if err := nn.ToDType(m, dtype); err != nil {
		p.t.Fatal(err)
	}
	scope := torch.NewScope(name)
	defer scope.Close()
	x := p.tensor(name + "/x").In(scope).To(device)
	real := x.DType() != torch.Int64
	if real {
		x = x.ToDType(dtype).Detach()
		if err := x.SetRequiresGrad(true); err != nil {
			p.t.Fatal(err)
		}
	}
	if err := torch.ManualSeed(4); err != nil { // for dropout
		p.t.Fatal(err)
	}
	y := m.Forward(x)
	p.near(name+"/y"+bits, y, tolerance)
	if want := p.tensor(name + "/y" + bits).Shape(); !slices.Equal(y.Shape(), want) {
		p.t.Fatalf("the output is %v, PyTorch has %v", y.Shape(), want)
	}
	if err := y.Mul(weights(p.t, y)).Sum().Backward(); err != nil {
		p.t.Fatal(err)
	}
	if real {
		p.near(name+"/dx"+bits, x.Grad(), tolerance)
	}
	for _, n := range nn.NamedParameters(m) {
		p.near(name+"/grad"+bits+"/"+n.Name, n.Tensor.In(scope).Grad(), tolerance)
	}
	for _, n := range nn.NamedBuffers(m) {
		p.near(name+"/buffer"+bits+"/"+n.Name, n.Tensor, tolerance)
	}
}

func TestInitsMatchPyTorch(t *testing.T) {
	p := openLayers(t)
	cases := map[string]nn.Init{
		"normal": nn.Normal(0.5, 0.02), "uniform": nn.Uniform(-2, 3), "constant": nn.Constant(0.25),
		"trunc_normal":   nn.TruncNormal(0.1, 0.5, -0.5, 1),
		"xavier_uniform": nn.XavierUniform(), "xavier_normal": nn.XavierNormal(),
		"orthogonal":      nn.Orthogonal(0.5),
		"kaiming_uniform": nn.KaimingUniform(), "kaiming_normal": nn.KaimingNormal(),
		"kaiming_normal_fan_out": nn.KaimingNormalFanOut(),
	}
	if n := p.with("init_"); n != len(cases) {
		t.Errorf("%d cases, PyTorch has %d", len(cases), n)
	}
	for name, init := range cases {
		t.Run(name, func(t *testing.T) {
			if err := torch.ManualSeed(1); err != nil {
				t.Fatal(err)
			}
			w := nn.NewParameter(init, 3, 4, 2, 2)
			defer w.Close()
			peer{t, p.c}.near("init_"+name, w, 1e-7)
			if err := torch.ManualSeed(1); err != nil {
				t.Fatal(err)
			}
			c := nn.NewConv2d(4, 3, 2, nn.Conv2dOptions{})
			defer nn.Close(c)
			if err := torch.ManualSeed(1); err != nil {
				t.Fatal(err)
			}
			before := torch.LiveTensors()
			if err := nn.Initialise(c.Weight, init); err != nil || !c.Weight.RequiresGrad() {
				t.Fatalf("%v, %v", err, c.Weight)
			}
			if n := torch.LiveTensors() - before; n > 0 {
				t.Errorf("%d tensors more, want 0", n)
			}
			peer{t, p.c}.near("init_"+name, c.Weight, 1e-7)
		})
	}
	for name, init := range map[string]nn.Init{"fans": nn.XavierUniform(), "rows": nn.Orthogonal(1)} {
		if err := nn.NewParameter(init, 3).Err(); !errors.Is(err, cuda.ErrInvalidArgument) {
			t.Errorf("%s of a vector: %v, want cuda.ErrInvalidArgument", name, err)
		}
	}
}

// lossCases are the losses of testdata/make_layers.py.
func lossCases() map[string]func(x, target *torch.Tensor) *torch.Tensor {
	return map[string]func(x, target *torch.Tensor) *torch.Tensor{
		"l1": (*torch.Tensor).L1Loss,
		"l1_sum": func(x, y *torch.Tensor) *torch.Tensor {
			return x.L1LossWith(y, torch.L1LossOptions{Reduction: torch.ReduceSum})
		},
		"mse":       (*torch.Tensor).MSELoss,
		"smooth_l1": (*torch.Tensor).SmoothL1Loss,
		"smooth_l1_beta": func(x, y *torch.Tensor) *torch.Tensor {
			return x.SmoothL1LossWith(y, torch.SmoothL1LossOptions{Beta: 0.5})
		},
		"huber": (*torch.Tensor).HuberLoss,
		"huber_delta": func(x, y *torch.Tensor) *torch.Tensor {
			return x.HuberLossWith(y, torch.HuberLossOptions{Delta: 0.5})
		},
		"kl_div": func(x, y *torch.Tensor) *torch.Tensor { return x.LogSoftmax(1).KLDivLoss(y) },
		"kl_div_batch": func(x, y *torch.Tensor) *torch.Tensor {
			return x.LogSoftmax(1).KLDivLossWith(y.Log(),
				torch.KLDivLossOptions{Reduction: torch.ReduceSum, LogTarget: true}).DivScalar(4)
		},
		"bce":        func(x, y *torch.Tensor) *torch.Tensor { return x.Sigmoid().BCELoss(y) },
		"bce_logits": (*torch.Tensor).BCEWithLogitsLoss,
		"bce_logits_weighted": func(x, y *torch.Tensor) *torch.Tensor {
			three, err := torch.Full(cuda.CPU, x.DType(), 3, 6)
			if err != nil {
				return torch.Fail("test", err)
			}
			defer three.Close()
			return x.BCEWithLogitsLossWith(y, torch.BCEWithLogitsLossOptions{PosWeight: three})
		},
		"cross_entropy": (*torch.Tensor).CrossEntropy,
		"cross_entropy_smooth": func(x, y *torch.Tensor) *torch.Tensor {
			return x.CrossEntropyWith(y, torch.CrossEntropyOptions{LabelSmoothing: 0.1})
		},
		"cross_entropy_soft": (*torch.Tensor).CrossEntropy,
		"nll":                func(x, y *torch.Tensor) *torch.Tensor { return x.LogSoftmax(1).NLLLoss(y) },
		"multi_margin": func(x, y *torch.Tensor) *torch.Tensor {
			return x.MultiMarginLoss(y, torch.MultiMarginLossOptions{})
		},
		"poisson_nll": func(x, y *torch.Tensor) *torch.Tensor {
			return x.PoissonNLLLoss(y, true, false, 1e-8, torch.ReduceMean)
		},
		"soft_margin": func(x, y *torch.Tensor) *torch.Tensor {
			return x.SoftMarginLoss(y, torch.SoftMarginLossOptions{})
		},
		"hinge_embedding": func(x, y *torch.Tensor) *torch.Tensor {
			return x.HingeEmbeddingLoss(y, torch.HingeEmbeddingLossOptions{})
		},
		"margin_ranking": func(x, y *torch.Tensor) *torch.Tensor {
			return x.MarginRankingLoss(x.Flip(0), y, torch.MarginRankingLossOptions{Margin: 0.5})
		},
		"multilabel_margin": func(x, y *torch.Tensor) *torch.Tensor {
			return x.MultilabelMarginLoss(y, torch.MultilabelMarginLossOptions{})
		},
		"cosine_embedding": func(x, y *torch.Tensor) *torch.Tensor {
			return x.CosineEmbeddingLoss(x.Flip(1), y, torch.CosineEmbeddingLossOptions{})
		},
		"triplet_margin": func(x, y *torch.Tensor) *torch.Tensor {
			return x.TripletMarginLoss(y, x.Flip(0), torch.TripletMarginLossOptions{})
		},
		"gaussian_nll": func(x, y *torch.Tensor) *torch.Tensor {
			return x.GaussianNLLLoss(y, x.Flip(0).Square(), torch.GaussianNLLLossOptions{})
		},
		"gaussian_nll_full": func(x, y *torch.Tensor) *torch.Tensor {
			o := torch.GaussianNLLLossOptions{Full: true, Eps: 0.3, Reduction: torch.ReduceSum}
			return x.GaussianNLLLoss(y, x.Narrow(1, 0, 1).Square(), o)
		},
		"ctc": func(x, y *torch.Tensor) *torch.Tensor {
			lengths, err := torch.FromInt64s([]int64{4, 2})
			if err != nil {
				return torch.Fail("test", err)
			}
			defer lengths.Close()
			of := func(i int64) *torch.Tensor { return lengths.In(x.Scope()).Narrow(0, i, 1) }
			return x.LogSoftmax(1).Unsqueeze(1).CTCLoss(y.Narrow(0, 0, 1).Narrow(1, 0, 2), of(0), of(1),
				torch.CTCLossOptions{})
		},
	}
}

func TestLossesMatchPyTorch(t *testing.T) {
	p := openLayers(t)
	cases := lossCases()
	for _, s := range p.c.Tensors() {
		if name, ok := strings.CutPrefix(s.Name, "loss_"); ok && strings.HasSuffix(name, "/x") &&
			cases[strings.TrimSuffix(name, "/x")] == nil {
			t.Errorf("there is no test of %s", name)
		}
	}
	for name, f := range cases {
		t.Run(name, func(t *testing.T) {
			p := peer{t, p.c}
			for bits, c := range map[string]struct {
				dtype     torch.DType
				tolerance float64
			}{"64": {torch.Float64, 1e-10}, "32": {torch.Float32, 1e-5}} {
				scope := torch.NewScope(name)
				defer scope.Close()
				x := p.tensor("loss_" + name + "/x").In(scope).ToDType(c.dtype).Detach()
				target := p.tensor("loss_" + name + "/target").In(scope)
				if target.DType() == torch.Float64 {
					target = target.ToDType(c.dtype)
				}
				if err := x.SetRequiresGrad(true); err != nil {
					t.Fatal(err)
				}
				y := f(x, target)
				p.near("loss_"+name+"/y"+bits, y, c.tolerance)
				if err := y.Backward(); err != nil {
					t.Fatal(err)
				}
				p.near("loss_"+name+"/dx"+bits, x.Grad(), c.tolerance)
			}
		})
	}
}

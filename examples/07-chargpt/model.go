package main

import (
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// gpt is a transformer that predicts the next token from the previous ones.
type gpt struct {
	tokens, places *nn.Embedding
	blocks         []*block
	norm           *nn.LayerNorm
	head           *nn.Linear
	context        int64
}

type block struct {
	norm1, norm2 *nn.LayerNorm
	attention    *nn.MultiheadAttention
	mlp          *nn.Sequential
}

func newGPT(symbols, width, heads, layers, context int) (*gpt, error) {
	g := &gpt{
		tokens: nn.NewEmbedding(symbols, width, nn.EmbeddingOptions{}),
		places: nn.NewEmbedding(context, width, nn.EmbeddingOptions{}),
		norm:   nn.NewLayerNorm([]int{width}, nn.LayerNormOptions{}),
		head:   nn.NewLinear(width, symbols, nn.LinearOptions{}), context: int64(context),
	}
	for range layers {
		g.blocks = append(g.blocks, &block{
			norm1:     nn.NewLayerNorm([]int{width}, nn.LayerNormOptions{}),
			norm2:     nn.NewLayerNorm([]int{width}, nn.LayerNormOptions{}),
			attention: nn.NewMultiheadAttention(width, heads, nn.MultiheadAttentionOptions{BatchFirst: true}),
			mlp: nn.NewSequential(nn.NewLinear(width, 4*width, nn.LinearOptions{}), nn.NewGELU(nn.GELUOptions{}),
				nn.NewLinear(4*width, width, nn.LinearOptions{})),
		})
	}
	// PyTorch's embeddings start with a standard deviation of 1, which drowns the blocks'
	// contributions.
	for _, e := range []*nn.Embedding{g.tokens, g.places} {
		if err := nn.Initialise(e.Weight, nn.Normal(0, 0.02)); err != nil {
			return nil, err
		}
	}
	return g, nn.Err(g)
}

// Parts names the modules, for checkpoints and errors.
func (g *gpt) Parts() nn.Parts {
	p := nn.Parts{Modules: []nn.Child{{Name: "tokens", Module: g.tokens}, {Name: "places", Module: g.places}}}
	for i, b := range g.blocks {
		name := fmt.Sprintf("blocks.%d.", i)
		p.Modules = append(p.Modules, nn.Child{Name: name + "norm1", Module: b.norm1},
			nn.Child{Name: name + "attention", Module: b.attention},
			nn.Child{Name: name + "norm2", Module: b.norm2}, nn.Child{Name: name + "mlp", Module: b.mlp})
	}
	p.Modules = append(p.Modules, nn.Child{Name: "norm", Module: g.norm}, nn.Child{Name: "head", Module: g.head})
	return p
}

// Forward returns the logits [N T symbols] of the tokens [N T].
func (g *gpt) Forward(tokens *torch.Tensor) *torch.Tensor { return g.step(tokens, nil) }

// step is like Forward. With caches, one for each block, tokens follow the cached tokens.
func (g *gpt) step(tokens *torch.Tensor, caches []*nn.KVCache) *torch.Tensor {
	shape := tokens.Shape()
	if len(shape) != 2 {
		return torch.Fail("gpt", fmt.Errorf("the tokens are %v, and must be [N T]: %w", shape, cuda.ErrInvalidArgument))
	}
	past := int64(0)
	if caches != nil {
		past = int64(caches[0].Len())
	}
	// places depends only on parameters, so it must join the batch's scope explicitly.
	places := g.places.Weight
	if s := tokens.Scope(); s != nil {
		places = places.In(s)
	}
	x := g.tokens.Forward(tokens).Add(places.Index(torch.Range(past, past+shape[1])))
	for i, b := range g.blocks {
		o := nn.AttentionOptions{Causal: true}
		if caches != nil {
			o.Cache = caches[i]
		}
		y := b.norm1.Forward(x)
		x = x.Add(b.attention.Attend(y, y, y, o))
		x = x.Add(b.mlp.Forward(b.norm2.Forward(x)))
	}
	return g.head.Forward(g.norm.Forward(x))
}

// generate appends count tokens to the prompt, each drawn from the network's distribution at the
// given temperature. A temperature of 0 selects the most probable token. The keys and values of
// earlier tokens are cached, so each token costs one step of one position. prompt and count
// together must fit into the context.
func (g *gpt) generate(prompt []int64, count int, temperature float64, device cuda.Device) ([]int64, error) {
	if len(prompt) == 0 || count < 0 || int64(len(prompt)+count) > g.context {
		return nil, fmt.Errorf("%d tokens after a prompt of %d: the network has %d positions", count,
			len(prompt), g.context)
	}
	scope := torch.NewScope("generate")
	defer scope.Close()
	caches := make([]*nn.KVCache, len(g.blocks))
	for i := range caches {
		caches[i] = nn.NewKVCache(int(g.context))
		defer caches[i].Close()
	}
	data, err := torch.FromInt64s(prompt, 1, int64(len(prompt)))
	if err != nil {
		return nil, err
	}
	next := scope.Own(data).To(device).NoGrad()
	drawn := []*torch.Tensor{}
	for range count {
		logits := g.step(next, caches).Index(torch.All, -1)
		if temperature > 0 {
			next = logits.DivScalar(temperature).Softmax(1).Multinomial(1, torch.MultinomialOptions{})
		} else {
			next = logits.ArgMax(1, true)
		}
		drawn = append(drawn, next)
	}
	// The host waits only once, for all tokens.
	tokens, err := torch.Cat(drawn, 1).Int64s()
	return append(prompt, tokens...), err
}

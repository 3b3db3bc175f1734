package models

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// GPT2 is OpenAI's GPT-2 with a language-modelling head: Hugging Face's GPT2LMHeadModel
// (https://openai.com/blog/better-language-models). The head shares its weight with the token
// embedding. State lists the weight once, as transformer.wte.weight, like the files of
// save_pretrained. nn.Load also accepts files with lm_head.weight, alone or in addition, and files
// of the model without its head, whose names lack "transformer.".
type GPT2 struct {
	transformer *gpt2Transformer
}

// GPT2Options are the options of NewGPT2. The zero value is the smallest published model, "gpt2".
// The larger ones have Layers, Heads and Width of 24, 16 and 1024 (gpt2-medium), 36, 20 and 1280
// (gpt2-large), and 48, 25 and 1600 (gpt2-xl).
type GPT2Options struct {
	VocabSize int // tokens; 0 stands for 50257
	Positions int // the maximum length of a sequence; 0 stands for 1024
	Layers    int // 0 stands for 12
	Heads     int // of each layer; 0 stands for 12
	Width     int // of an embedding, a multiple of Heads; 0 stands for 768
	// Dropout is the probability of dropout after embeddings, in attention, and after each part of
	// a block. 0 stands for 0.1, a negative value for none.
	Dropout float64
}

// NewGPT2 returns a GPT-2. It maps tokens [N T] of int64 to logits [N T VocabSize], which predict
// the token after each token.
func NewGPT2(o GPT2Options) (*GPT2, error) {
	const kind = "GPT-2"
	for _, size := range []struct {
		name    string
		value   *int
		publish int
	}{{"VocabSize", &o.VocabSize, 50257}, {"Positions", &o.Positions, 1024}, {"Layers", &o.Layers, 12},
		{"Heads", &o.Heads, 12}, {"Width", &o.Width, 768}} {
		if *size.value < 0 {
			return nil, invalid(kind, "%s is %d", size.name, *size.value)
		}
		if *size.value == 0 {
			*size.value = size.publish
		}
	}
	if o.Width%o.Heads != 0 {
		return nil, invalid(kind, "Width %d is not a multiple of Heads %d", o.Width, o.Heads)
	}
	o.Dropout = probability(o.Dropout, 0.1)
	// The order of these calls is Hugging Face's, so that the same seed gives the same numbers.
	t := &gpt2Transformer{
		tokens:    nn.NewEmbedding(o.VocabSize, o.Width, nn.EmbeddingOptions{}),
		positions: nn.NewEmbedding(o.Positions, o.Width, nn.EmbeddingOptions{}),
		dropout:   nn.NewDropout(o.Dropout),
		longest:   int64(o.Positions), vocabulary: int64(o.VocabSize), width: int64(o.Width),
	}
	for range o.Layers {
		t.blocks = append(t.blocks, newGPT2Block(o))
	}
	t.norm = nn.NewLayerNorm([]int{o.Width}, nn.LayerNormOptions{})
	return checked(kind, &GPT2{t}, t.initialise())
}

// Forward computes the logits [N T VocabSize] that predict the token after each of the tokens [N
// T].
func (g *GPT2) Forward(tokens *torch.Tensor) *torch.Tensor {
	return torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
		x, batch := g.transformer.run(in[0], nil)
		return batch.sequences(g.head(x), g.transformer.vocabulary)
	}, tokens)
}

// Embed computes the input of the first block: vectors [N T Width] for the tokens [N T], with
// position embeddings. Embed, the Blocks in order, and Logits together compute the same bits as
// Forward. Call them instead of Forward to do other work between two blocks, for example to copy
// the next block's parameters to the device.
func (g *GPT2) Embed(tokens *torch.Tensor) *torch.Tensor { return g.transformer.embed(tokens, 0) }

// Blocks returns the transformer's layers. Each maps vectors [N T Width] to the same shape. They
// are not copies: they share the model's parameters.
func (g *GPT2) Blocks() []nn.Module {
	blocks := make([]nn.Module, len(g.transformer.blocks))
	for i, b := range g.transformer.blocks {
		blocks[i] = b
	}
	return blocks
}

// Logits computes the logits [N T VocabSize] from the result [N T Width] of the last block.
func (g *GPT2) Logits(x *torch.Tensor) *torch.Tensor {
	return torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor { return g.head(g.transformer.norm.Forward(in[0])) }, x)
}

func (g *GPT2) head(x *torch.Tensor) *torch.Tensor {
	return x.Linear(g.transformer.tokens.Weight, nil)
}

// GenerateOptions are the options of [GPT2.Generate].
type GenerateOptions struct {
	Tokens int // the number of new tokens
	// Temperature divides the logits before a token is drawn from their softmax; 0 takes the most
	// probable token instead.
	Temperature float64
	TopK        int              // draws only among the TopK most probable tokens; 0 for all
	Generator   *torch.Generator // source of the random draws; nil for the device's default generator
}

// Generate continues the sequences of tokens [N T], with T at least 1, and returns tokens [N
// T+Tokens]. They join the scope of the input. T+Tokens must not exceed Positions. Keys and values
// of earlier tokens are cached, so each new token computes one position. Generate does not stop at
// an end token, so on a GPU the host never waits. The model must be in evaluation mode. Nothing is
// recorded for backward.
func (g *GPT2) Generate(tokens *torch.Tensor, o GenerateOptions) *torch.Tensor {
	const op = "models.GPT2.Generate"
	if err := tokens.Err(); err != nil {
		return torch.Fail(op, err)
	}
	shape, t := tokens.Shape(), g.transformer
	if len(shape) != 2 || shape[1] < 1 || o.Tokens < 0 || shape[1]+int64(o.Tokens) > t.longest {
		return torch.Fail(op, fmt.Errorf(
			"%d tokens after %v: want [N T], and T and Tokens together at most %d: %w", o.Tokens, shape,
			t.longest, cuda.ErrInvalidArgument))
	}
	all := torch.NewScope(op)
	defer all.Close()
	caches := make([]*nn.KVCache, len(t.blocks))
	for i := range caches {
		caches[i] = nn.NewKVCache(int(shape[1]) + o.Tokens)
		defer caches[i].Close()
	}
	parts := []*torch.Tensor{tokens}
	for range o.Tokens {
		next := g.next(parts[len(parts)-1], caches, o)
		if err := next.Err(); err != nil {
			return torch.Fail(op, err)
		}
		parts = append(parts, all.Own(next))
	}
	result := all.Own(torch.Cat(parts, 1)).Keep()
	if s := tokens.Scope(); s != nil {
		return s.Own(result)
	}
	return result
}

// next returns the token [N 1] that follows the cached tokens and the argument tokens. The result
// has no scope. All intermediate tensors are closed.
func (g *GPT2) next(tokens *torch.Tensor, caches []*nn.KVCache, o GenerateOptions) *torch.Tensor {
	scope := torch.NewScope("models.GPT2.Generate: a token")
	defer scope.Close()
	x, batch := g.transformer.run(scope.Own(tokens.Keep()).NoGrad(), caches)
	logits := g.head(batch.sequences(x, g.transformer.width).Index(torch.All, -1))
	if o.Temperature <= 0 {
		return logits.ArgMax(1, true).Keep()
	}
	logits = logits.DivScalar(o.Temperature)
	draw := torch.MultinomialOptions{Generator: o.Generator}
	if o.TopK <= 0 {
		return logits.Softmax(1).Multinomial(1, draw).Keep()
	}
	values, tops := logits.TopK(int64(o.TopK), 1)
	return tops.Gather(1, values.Softmax(1).Multinomial(1, draw)).Keep()
}

// Parts returns the transformer.
func (g *GPT2) Parts() nn.Parts {
	return nn.Parts{Modules: []nn.Child{{Name: "transformer", Module: g.transformer}}}
}

// Transformer returns the model without its head: Hugging Face's GPT2Model. It maps tokens [N T] to
// vectors [N T Width]. Its parameter names match the published files. Load these with nn.LoadWith
// and Partial, because they also contain the causal masks (h.0.attn.bias and so on).
func (g *GPT2) Transformer() nn.Module { return g.transformer }

type gpt2Transformer struct {
	tokens, positions *nn.Embedding
	dropout           *nn.Dropout
	blocks            []*gpt2Block
	norm              *nn.LayerNorm
	longest           int64 // positions
	vocabulary, width int64
}

// gpt2Batch is the size of a batch of vectors: n sequences of t tokens. Between the layers the
// vectors are the rows of a matrix [n*t Width], so that matrix products need no views.
type gpt2Batch struct{ n, t int64 }

// rows returns the vectors x [N T size] as the rows of a matrix.
func rows(x *torch.Tensor) (*torch.Tensor, gpt2Batch) {
	shape := x.Shape()
	switch {
	case shape == nil:
		return x, gpt2Batch{}
	case len(shape) != 3:
		return torch.Fail("models.GPT2", fmt.Errorf("the input is %v, and it must be [N T Width]: %w",
			shape, cuda.ErrInvalidArgument)), gpt2Batch{}
	}
	b := gpt2Batch{shape[0], shape[1]}
	return x.Reshape(b.n*b.t, shape[2]), b
}

// sequences returns the rows x of the given size as [N T size].
func (b gpt2Batch) sequences(x *torch.Tensor, size int64) *torch.Tensor {
	return x.View(b.n, b.t, size)
}

// Forward returns the vectors [N T Width] of the tokens [N T].
func (g *gpt2Transformer) Forward(tokens *torch.Tensor) *torch.Tensor {
	return torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
		x, batch := g.run(in[0], nil)
		return batch.sequences(x, g.width)
	}, tokens)
}

// run returns the vectors as rows. If tokens continue cached sequences, caches has one cache for
// each block.
func (g *gpt2Transformer) run(tokens *torch.Tensor, caches []*nn.KVCache) (*torch.Tensor, gpt2Batch) {
	past := int64(0)
	if caches != nil {
		past = int64(caches[0].Len())
	}
	embedded := g.embed(tokens, past)
	x, batch := rows(embedded)
	if x.Err() != nil {
		return x, batch
	}
	embedded.Close()
	for i, b := range g.blocks {
		var cache *nn.KVCache
		if caches != nil {
			cache = caches[i]
		}
		y := b.run(x, batch, cache) // y does not share x's handle, so x can be closed
		x.Close()
		x = y
	}
	return g.norm.Forward(x), batch
}

// embed returns the vectors [N T Width] of the tokens [N T]. The first token's position is past.
func (g *gpt2Transformer) embed(tokens *torch.Tensor, past int64) *torch.Tensor {
	shape := tokens.Shape()
	if shape == nil {
		return g.tokens.Forward(tokens) // reports what is wrong with the tokens
	}
	if len(shape) != 2 {
		return torch.Fail("models.GPT2", fmt.Errorf("the input is %v, and it must be [N T]: %w", shape,
			cuda.ErrInvalidArgument))
	}
	if shape[1] > g.longest {
		return torch.Fail("models.GPT2",
			fmt.Errorf("a sequence has %d tokens, and the model has %d positions: %w", shape[1], g.longest,
				cuda.ErrInvalidArgument))
	}
	return torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
		positions := g.positions.Weight.Narrow(0, past, shape[1])
		defer positions.Close() // it has no scope
		return g.dropout.Forward(g.tokens.Forward(in[0]).Add(positions))
	}, tokens)
}

// Parts returns the parts by Hugging Face's names.
func (g *gpt2Transformer) Parts() nn.Parts {
	modules := []nn.Child{{Name: "wte", Module: g.tokens}, {Name: "wpe", Module: g.positions},
		{Name: "drop", Module: g.dropout}}
	for i, b := range g.blocks {
		modules = append(modules, nn.Child{Name: fmt.Sprintf("h.%d", i), Module: b})
	}
	return nn.Parts{Modules: append(modules, nn.Child{Name: "ln_f", Module: g.norm})}
}

// initialise draws the weights again, in Hugging Face's order. The projections at the end of a
// residual branch have a smaller deviation, because 2*layers of them add up.
func (g *gpt2Transformer) initialise() error {
	const std = 0.02
	small := nn.Normal(0, std/math.Sqrt(float64(2*len(g.blocks))))
	err := errors.Join(nn.Initialise(g.tokens.Weight, nn.Normal(0, std)),
		nn.Initialise(g.positions.Weight, nn.Normal(0, std)))
	for _, b := range g.blocks {
		for _, pair := range [][2]*conv1D{{b.attention.in, b.attention.out}, {b.up, b.down}} {
			err = errors.Join(err,
				nn.Initialise(pair[0].weight, nn.Normal(0, std)),
				nn.Initialise(pair[1].weight, nn.Normal(0, std)),
				nn.Initialise(pair[1].weight, small),
			)
		}
	}
	return err
}

// gpt2Block is causal attention followed by a network of two layers. Both are residual: each
// normalises its input, and its result is added to that input.
type gpt2Block struct {
	norm1, norm2 *nn.LayerNorm
	attention    *gpt2Attention
	up, down     *conv1D
	activation   nn.Module
	dropout      *nn.Dropout
}

func newGPT2Block(o GPT2Options) *gpt2Block {
	return &gpt2Block{
		norm1:      nn.NewLayerNorm([]int{o.Width}, nn.LayerNormOptions{}),
		attention:  newGPT2Attention(o),
		norm2:      nn.NewLayerNorm([]int{o.Width}, nn.LayerNormOptions{}),
		up:         newConv1D(o.Width, 4*o.Width),
		down:       newConv1D(4*o.Width, o.Width),
		activation: nn.NewGELU(nn.GELUOptions{Tanh: true}),
		dropout:    nn.NewDropout(o.Dropout),
	}
}

// Forward returns a tensor of x's shape [N T Width].
func (b *gpt2Block) Forward(x *torch.Tensor) *torch.Tensor {
	return torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
		x, batch := rows(in[0])
		return batch.sequences(b.run(x, batch, nil), b.attention.width)
	}, x)
}

// run implements Forward for rows.
func (b *gpt2Block) run(x *torch.Tensor, batch gpt2Batch, cache *nn.KVCache) *torch.Tensor {
	return torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
		x := in[0]
		x = b.attention.run(b.norm1.Forward(x), batch, cache).Add(x)
		hidden := b.activation.Forward(b.up.rows(b.norm2.Forward(x)))
		return x.Add(b.dropout.Forward(b.down.rows(hidden)))
	}, x)
}

// Parts returns the parts by Hugging Face's names.
func (b *gpt2Block) Parts() nn.Parts {
	return nn.Parts{Modules: []nn.Child{
		{Name: "ln_1", Module: b.norm1},
		{Name: "attn", Module: b.attention},
		{Name: "ln_2", Module: b.norm2},
		{Name: "mlp.c_fc", Module: b.up},
		{Name: "mlp.c_proj", Module: b.down},
		{Name: "mlp.dropout", Module: b.dropout},
	}}
}

// gpt2Attention lets each token attend to itself and to earlier tokens. Its projections are stored
// transposed, so nn.MultiheadAttention could not load them.
type gpt2Attention struct {
	in, out    *conv1D
	heads      int64
	width      int64
	p          float64 // of dropping an attention weight
	dropout    *nn.Dropout
	evaluating atomic.Bool
}

func newGPT2Attention(o GPT2Options) *gpt2Attention {
	return &gpt2Attention{
		in:      newConv1D(o.Width, 3*o.Width),
		out:     newConv1D(o.Width, o.Width),
		heads:   int64(o.Heads),
		width:   int64(o.Width),
		p:       o.Dropout,
		dropout: nn.NewDropout(o.Dropout),
	}
}

// Forward returns a tensor of x's shape [N T Width].
func (a *gpt2Attention) Forward(x *torch.Tensor) *torch.Tensor {
	x, batch := rows(x)
	return batch.sequences(a.run(x, batch, nil), a.width)
}

// run implements Forward for rows. If cache is not nil, the rows follow the positions in the cache.
// If the cache is not empty, each sequence has one position.
func (a *gpt2Attention) run(x *torch.Tensor, batch gpt2Batch, cache *nn.KVCache) *torch.Tensor {
	// One view before the split saves a view for each part after it.
	parts, err := a.in.rows(x).View(batch.n, batch.t, 3*a.heads, a.width/a.heads).Split(a.heads, 2)
	if err != nil {
		return torch.Fail("models.GPT2", err)
	}
	for i, part := range parts { // [N T heads Width/heads] to [N heads T Width/heads]
		parts[i] = part.Transpose(1, 2)
	}
	// A single position after cached positions attends to all of them.
	o := torch.ScaledDotProductAttentionOptions{IsCausal: cache == nil || cache.Len() == 0}
	if cache != nil {
		if parts[1], parts[2], err = cache.Append(parts[1], parts[2]); err != nil {
			return torch.Fail("models.GPT2", err)
		}
	}
	if !a.evaluating.Load() {
		o.DropoutP = a.p
	}
	y := parts[0].ScaledDotProductAttention(parts[1], parts[2], o)
	return a.dropout.Forward(a.out.rows(y.Transpose(1, 2).Reshape(batch.n*batch.t, a.width)))
}

// Parts returns the parts by Hugging Face's names.
func (a *gpt2Attention) Parts() nn.Parts {
	return nn.Parts{
		Modules: []nn.Child{
			{Name: "c_attn", Module: a.in},
			{Name: "c_proj", Module: a.out},
			{Name: "resid_dropout", Module: a.dropout},
		},
		Unused: []string{"bias", "masked_bias"}, // causal masks, which older files have
	}
}

// SetTraining switches the dropping of attention weights on or off.
func (a *gpt2Attention) SetTraining(training bool) { a.evaluating.Store(!training) }

// conv1D is Hugging Face's Conv1D: a linear layer whose weight is transposed.
type conv1D struct {
	weight *torch.Tensor // [in out]
	bias   *torch.Tensor // [out]
}

func newConv1D(in, out int) *conv1D {
	return &conv1D{
		weight: nn.NewParameter(nn.Normal(0, 0.02), int64(in), int64(out)),
		bias:   nn.NewParameter(nn.Constant(0), int64(out)),
	}
}

// Forward returns x * weight + bias: [... in] gives [... out].
func (c *conv1D) Forward(x *torch.Tensor) *torch.Tensor {
	shape := x.Shape()
	if len(shape) < 3 {
		return c.rows(x)
	}
	return c.rows(x.Flatten(0, -2)).Unflatten(0, shape[:len(shape)-1])
}

// rows implements Forward for rows [M in].
func (c *conv1D) rows(x *torch.Tensor) *torch.Tensor {
	return c.bias.AddMM(x, c.weight, torch.AddMMOptions{})
}

// Parts returns weight and bias.
func (c *conv1D) Parts() nn.Parts {
	return nn.Parts{Parameters: []torch.Named{{Name: "weight", Tensor: c.weight}, {Name: "bias", Tensor: c.bias}}}
}

// String returns the module tree: see [nn.Tree].
func (g *GPT2) String() string { return nn.Tree(g) }

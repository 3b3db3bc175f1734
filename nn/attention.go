package nn

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// MultiheadAttention is attention with several heads. From projections of query, key and value,
// each head computes softmax(q * k^T / sqrt(d)) * v with LibTorch's scaled_dot_product_attention.
// The parameters have the names and shapes of PyTorch's nn.MultiheadAttention.
type MultiheadAttention struct {
	layer
	switchable
	InProjWeight *torch.Tensor // [3*size size]: the projections of query, key and value
	InProjBias   *torch.Tensor // [3*size], nil with NoBias
	OutProj      *Linear       // from size to size

	size, heads int64
	o           MultiheadAttentionOptions
}

// MultiheadAttentionOptions are the options of NewMultiheadAttention.
type MultiheadAttentionOptions struct {
	Dropout    float64 // the probability of dropping an attention weight in training
	NoBias     bool
	BatchFirst bool // sequences are [N L size] rather than PyTorch's default [L N size]
	Causal     bool // in Forward, a position attends only to itself and earlier positions
}

// NewMultiheadAttention returns an attention over vectors of the given size. The size must be a
// multiple of the number of heads.
func NewMultiheadAttention(size, heads int, o MultiheadAttentionOptions) *MultiheadAttention {
	const op = "nn.NewMultiheadAttention"
	a := &MultiheadAttention{size: int64(size), heads: int64(heads), o: o}
	a.create("MultiheadAttention")
	if a.InProjWeight = positive(op, "size and heads", size, heads); a.InProjWeight != nil {
		return a
	}
	if size%heads != 0 {
		a.InProjWeight = invalid(op, "%d heads do not divide the size %d", heads, size)
		return a
	}
	// PyTorch initialises the output projection first and then sets its bias to zero.
	a.OutProj = NewLinear(size, size, LinearOptions{NoBias: o.NoBias})
	a.InProjWeight = parameter(op, XavierUniform(), 3*a.size, a.size)
	if o.NoBias {
		return a
	}
	a.InProjBias = parameter(op, Constant(0), 3*a.size)
	if bias := a.OutProj.Bias; bias.Err() == nil {
		if zeroed := bias.NoGrad().Zero_(); zeroed.Err() != nil {
			a.InProjBias = zeroed
		}
	}
	return a
}

// Parts returns the parameters under PyTorch's names.
func (a *MultiheadAttention) Parts() Parts {
	p := Parts{Parameters: named(torch.Named{Name: "in_proj_weight", Tensor: a.InProjWeight},
		torch.Named{Name: "in_proj_bias", Tensor: a.InProjBias})}
	if a.OutProj != nil {
		p.Modules = []Child{{"out_proj", a.OutProj}}
	}
	return p
}

// Forward computes self-attention over x. The output has the shape of x: [L N size], or [N L size]
// with BatchFirst.
func (a *MultiheadAttention) Forward(x *torch.Tensor) *torch.Tensor {
	return a.Attend(x, x, x, AttentionOptions{Causal: a.o.Causal})
}

// AttentionOptions are the options of [MultiheadAttention.Attend].
type AttentionOptions struct {
	// Mask, if not nil, broadcasts to [N heads L S], for L queries and S keys. As in PyTorch's
	// nn.MultiheadAttention, a bool mask is true where a query must not see a key; a floating-point
	// mask is added to the products.
	Mask *torch.Tensor
	// Causal lets a query see only the keys up to its own position. Causal and Mask cannot be
	// combined.
	Causal bool
	// Cache, if not nil, keeps the keys and values for later calls. The queries attend to all
	// cached keys; the positions of query and key follow the cached ones. The inputs must not
	// require gradients. A failed call does not change the cache's positions.
	Cache *KVCache
}

// Attend computes the attention from L queries to S keys and values. query is [L N size], key and
// value are [S N size], and the result is [L N size]. With BatchFirst, N comes first.
func (a *MultiheadAttention) Attend(query, key, value *torch.Tensor, o AttentionOptions) *torch.Tensor {
	return a.result(a.attend(query, key, value, o), query, key, value)
}

func (a *MultiheadAttention) attend(query, key, value *torch.Tensor, o AttentionOptions) *torch.Tensor {
	const op = "nn.MultiheadAttention"
	if a.OutProj == nil {
		return a.InProjWeight // the constructor failed
	}
	if o.Causal && o.Mask != nil {
		return invalid(op, "Causal excludes Mask")
	}
	projected, err := a.project(query, key, value)
	if err != nil {
		return torch.Fail(op, err)
	}
	q, k, v := a.split(projected[0]), a.split(projected[1]), a.split(projected[2])
	s := torch.ScaledDotProductAttentionOptions{AttnMask: visible(query, o.Mask), IsCausal: o.Causal}
	if a.training() {
		s.DropoutP = a.o.Dropout
	}
	past := int64(0)
	if o.Cache != nil {
		past = o.Cache.n
		if k, v, err = o.Cache.Append(k, v); err != nil {
			return torch.Fail(op, err)
		}
		if o.Causal && past > 0 {
			s.IsCausal = false
			if s.AttnMask, err = causalAfter(query, q.Shape(), past); err != nil {
				o.Cache.n = past
				return torch.Fail(op, err)
			}
		}
	}
	y := a.OutProj.Forward(a.join(q.ScaledDotProductAttention(k, v, s)))
	if o.Cache != nil && y.Err() != nil {
		o.Cache.n = past
	}
	return y
}

// project applies the projections of query, key and value, each [... size].
func (a *MultiheadAttention) project(query, key, value *torch.Tensor) ([]*torch.Tensor, error) {
	if query == key && key == value {
		return query.Linear(a.InProjWeight, a.InProjBias).Chunk(3, -1)
	}
	out := make([]*torch.Tensor, 3)
	for i, x := range []*torch.Tensor{query, key, value} {
		if err := x.Err(); err != nil {
			return nil, err
		}
		weight := within(x, a.InProjWeight).Narrow(0, int64(i)*a.size, a.size)
		var bias *torch.Tensor
		if a.InProjBias != nil {
			bias = within(x, a.InProjBias).Narrow(0, int64(i)*a.size, a.size)
		}
		out[i] = x.Linear(weight, bias)
		weight.Close()
		bias.Close()
	}
	return out, nil
}

// split turns [L N size] (or [N L size]) into the heads [N heads L size/heads].
func (a *MultiheadAttention) split(x *torch.Tensor) *torch.Tensor {
	shape := x.Shape()
	if x.Err() == nil && len(shape) != 3 {
		return invalid("nn.MultiheadAttention", "an input has the shape %v, and it must have 3 dimensions", shape)
	}
	if shape == nil {
		return x
	}
	heads := x.View(shape[0], shape[1], a.heads, a.size/a.heads)
	if a.o.BatchFirst {
		return heads.Transpose(1, 2)
	}
	return heads.Permute(1, 2, 0, 3)
}

// join is the inverse of split.
func (a *MultiheadAttention) join(heads *torch.Tensor) *torch.Tensor {
	if a.o.BatchFirst {
		return heads.Transpose(1, 2).Flatten(2, 3)
	}
	return heads.Permute(2, 0, 1, 3).Flatten(2, 3)
}

// visible converts a mask of PyTorch's module to a mask of the operator, where true means visible.
func visible(x, mask *torch.Tensor) *torch.Tensor {
	if mask == nil || mask.DType() != torch.Bool {
		return mask
	}
	seen := mask.LogicalNot()
	if s := x.Scope(); s != nil {
		return s.Own(seen)
	}
	return seen
}

// causalAfter returns the bool mask [L past+L] for L queries that follow past keys. It returns nil
// for a single query, which sees all keys.
func causalAfter(x *torch.Tensor, queries []int64, past int64) (*torch.Tensor, error) {
	if len(queries) != 4 || queries[2] == 1 {
		return nil, nil
	}
	all, err := torch.Ones(x.Device(), torch.Bool, queries[2], past+queries[2])
	if err != nil {
		return nil, err
	}
	if s := x.Scope(); s != nil {
		all = s.Own(all)
	}
	return all.Tril(past), nil
}

// KVCache keeps the keys and values that a MultiheadAttention has computed, so that generating the
// next token computes only the keys and values of that token. Each MultiheadAttention needs a
// separate cache. Only one goroutine at a time may use a cache.
//
//	for range tokens {
//		y := attention.Attend(x, x, x, nn.AttentionOptions{Causal: true, Cache: cache})
//		...
//	}
type KVCache struct {
	keys, values *torch.Tensor // [N heads max size/heads], nil until the first use
	max, n       int64
}

var errCacheGradients = errors.New("a KVCache is for generation: mark the input NoGrad")

// NewKVCache returns an empty cache for max positions. Its memory is allocated at the first use, on
// the device of the keys and with their dtype: 2*N*max*size elements.
func NewKVCache(max int) *KVCache { return &KVCache{max: int64(max)} }

// Len returns the number of positions in the cache.
func (c *KVCache) Len() int { return int(c.n) }

// Reset forgets all positions. The memory stays for sequences of the same batch size, device and
// dtype.
func (c *KVCache) Reset() { c.n = 0 }

// Close frees the memory. The cache is then empty and usable.
func (c *KVCache) Close() error {
	c.keys.Close()
	c.values.Close()
	c.keys, c.values, c.n = nil, nil, 0
	return nil
}

// Append adds the keys and values [N heads L d] of the next L positions. It returns the keys and
// values of all positions so far. They are views that belong to the scopes of k and v, and the next
// Append does not change them. MultiheadAttention calls Append; custom attention modules may call
// it too. k and v must not require gradients. A failed call adds nothing.
func (c *KVCache) Append(k, v *torch.Tensor) (keys, values *torch.Tensor, err error) {
	if err := errors.Join(k.Err(), v.Err()); err != nil {
		return nil, nil, err
	}
	if k.RequiresGrad() || v.RequiresGrad() {
		return nil, nil, fmt.Errorf("%w: %w", errCacheGradients, cuda.ErrInvalidArgument)
	}
	shape := k.Shape()
	if len(shape) != 4 {
		return nil, nil, fmt.Errorf("keys of shape %v: %w", shape, cuda.ErrInvalidArgument)
	}
	if c.n+shape[2] > c.max {
		return nil, nil, fmt.Errorf("the KVCache has %d of %d positions, and %d more do not fit: %w",
			c.n, c.max, shape[2], cuda.ErrInvalidArgument)
	}
	if c.keys == nil {
		if err := c.allocate(k, shape); err != nil {
			return nil, nil, err
		}
	}
	// Without this check, the copy would broadcast and convert.
	if has := c.keys.Shape(); has[0] != shape[0] || c.keys.DType() != k.DType() || c.keys.Device() != k.Device() {
		return nil, nil, fmt.Errorf("the KVCache is for %d sequences of %v on %v, and the keys are %d of "+
			"%v on %v: Close it before other sequences: %w",
			has[0], c.keys.DType(), c.keys.Device(), shape[0], k.DType(), k.Device(), cuda.ErrInvalidArgument)
	}
	for _, p := range [][2]*torch.Tensor{{c.keys, k}, {c.values, v}} {
		slot := p[0].NoGrad().Narrow(2, c.n, shape[2])
		err := slot.CopyFrom(p[1], torch.CopyOptions{NonBlocking: true})
		slot.Close()
		if err != nil {
			return nil, nil, err
		}
	}
	c.n += shape[2]
	return within(k, c.keys).Narrow(2, 0, c.n), within(v, c.values).Narrow(2, 0, c.n), nil
}

func (c *KVCache) allocate(k *torch.Tensor, shape []int64) (err error) {
	if c.keys, err = torch.Empty(k.Device(), k.DType(), shape[0], shape[1], c.max, shape[3]); err == nil {
		c.values, err = torch.Empty(k.Device(), k.DType(), shape[0], shape[1], c.max, shape[3])
	}
	if err != nil {
		c.Close()
	}
	return err
}

package nn

import (
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Embedding is a table of vectors.
type Embedding struct {
	layer
	Weight *torch.Tensor // [rows size], initially normal

	o torch.EmbeddingOptions
}

// EmbeddingOptions are the options of NewEmbedding.
type EmbeddingOptions struct {
	// PaddingIdx, if not nil, is a row that is initially zero and gets no gradient.
	PaddingIdx *int
}

// NewEmbedding returns a table of rows vectors of the given size.
func NewEmbedding(rows, size int, o EmbeddingOptions) *Embedding {
	e := &Embedding{}
	e.create("Embedding")
	e.Weight, e.o.PaddingIdx = table("nn.NewEmbedding", rows, size, o.PaddingIdx)
	return e
}

// table returns a weight [rows size] with normal values and a zero padding row, and the index of
// that row.
func table(op string, rows, size int, paddingIdx *int) (weight *torch.Tensor, padding *int64) {
	if bad := positive(op, "rows and size", rows, size); bad != nil {
		return bad, nil
	}
	if paddingIdx != nil {
		i := int64(*paddingIdx)
		if i < 0 || i >= int64(rows) {
			return invalid(op, "the padding row %d is not one of the %d rows", i, rows), nil
		}
		padding = &i
	}
	return parameter(op, func(t *torch.Tensor) *torch.Tensor {
		filled := t.Normal_(0, 1)
		if padding == nil || filled.Err() != nil {
			return filled
		}
		row := t.Select(0, *padding)
		defer row.Close()
		if zeroed := row.Zero_(); zeroed.Err() != nil {
			return zeroed
		}
		return filled
	}, int64(rows), int64(size)), padding
}

// Forward returns the rows at the indices: an int64 or int32 tensor [...] gives [... size].
func (e *Embedding) Forward(indices *torch.Tensor) *torch.Tensor {
	return e.result(torch.EmbeddingWith(e.Weight, indices, e.o), indices)
}

// Parts returns the weight.
func (e *Embedding) Parts() Parts { return weightAndBias(e.Weight, nil) }

// EmbeddingBag looks up several vectors and reduces them to one, for example one vector per text.
type EmbeddingBag struct {
	layer
	Weight *torch.Tensor // [rows size], initially normal

	mode    int
	padding any // an int64, or nil for none
}

// EmbeddingBagOptions are the options of NewEmbeddingBag.
type EmbeddingBagOptions struct {
	// Mode is the reduction of a bag's vectors: "mean" (also ""), "sum" or "max".
	Mode string
	// PaddingIdx, if not nil, is a row that is initially zero, does not count in a bag, and gets no
	// gradient.
	PaddingIdx *int
}

// NewEmbeddingBag returns a table of rows vectors of the given size.
func NewEmbeddingBag(rows, size int, o EmbeddingBagOptions) *EmbeddingBag {
	const op = "nn.NewEmbeddingBag"
	e := &EmbeddingBag{}
	e.create("EmbeddingBag")
	switch o.Mode {
	case "sum":
		e.mode = 0
	case "", "mean":
		e.mode = 1
	case "max":
		e.mode = 2
	default:
		e.Weight = invalid(op, "the mode is %q, and it must be mean, sum or max", o.Mode)
		return e
	}
	var padding *int64
	if e.Weight, padding = table(op, rows, size, o.PaddingIdx); padding != nil {
		e.padding = *padding
	}
	return e
}

// Forward returns a vector for each row of indices, an int64 or int32 tensor [N L]: [N size].
func (e *EmbeddingBag) Forward(indices *torch.Tensor) *torch.Tensor {
	return e.result(torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
		shape := in[0].Shape()
		if len(shape) != 2 {
			return torch.Fail("nn.EmbeddingBag", fmt.Errorf("the indices are %v, and they must have 2 "+
				"dimensions; Bags takes those of bags of different sizes: %w",
				shape, cuda.ErrInvalidArgument))
		}
		offsets, err := torch.TensorOptions{Device: in[0].Device(), DType: in[0].DType()}.Arange(shape[0])
		if err != nil {
			return torch.Fail("nn.EmbeddingBag", err)
		}
		defer offsets.Close()
		starts := offsets.In(in[0].Scope()).MulInt(shape[1])
		return e.bags(in[0].Reshape(-1), starts, nil)
	}, indices), indices)
}

// Bags returns one vector per bag, [N size]. indices concatenates the indices of all bags: an int64
// or int32 tensor of one dimension. Bag i starts at offsets[i]; offsets has the dtype of indices.
// weights, if not nil, has a factor for each index, and requires the mode "sum".
func (e *EmbeddingBag) Bags(indices, offsets, weights *torch.Tensor) *torch.Tensor {
	return e.result(e.bags(indices, offsets, weights), indices, offsets, weights)
}

func (e *EmbeddingBag) bags(indices, offsets, weights *torch.Tensor) *torch.Tensor {
	out, _ := torch.Call("embedding_bag.padding_idx", e.Weight, indices, offsets, false, e.mode, false,
		weights, false, e.padding)
	for _, t := range out[1:] {
		t.Close() // autograd keeps what backward needs
	}
	return out[0]
}

// Parts returns the weight.
func (e *EmbeddingBag) Parts() Parts { return weightAndBias(e.Weight, nil) }

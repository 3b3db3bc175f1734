package nn

import "github.com/torchstream/torchstream/torch"

// Embedding is a table of vectors.
type Embedding struct {
	layer
	Weight *torch.Tensor // [rows size], initially normal

	o torch.EmbeddingOptions
}

// EmbeddingOptions are the options of NewEmbedding.
type EmbeddingOptions struct {
	// PaddingIdx is a row that is initially zero and gets no gradient, if not nil.
	PaddingIdx *int
}

// NewEmbedding returns a table of rows vectors of the given size.
func NewEmbedding(rows, size int, o EmbeddingOptions) *Embedding {
	const op = "nn.NewEmbedding"
	e := &Embedding{}
	e.create("Embedding")
	if e.Weight = positive(op, "rows and size", rows, size); e.Weight != nil {
		return e
	}
	if o.PaddingIdx != nil {
		i := int64(*o.PaddingIdx)
		if i < 0 || i >= int64(rows) {
			e.Weight = invalid(op, "the padding row %d is not one of the %d rows", i, rows)
			return e
		}
		e.o.PaddingIdx = &i
	}
	e.Weight = parameter(op, e.fill, int64(rows), int64(size))
	return e
}

func (e *Embedding) fill(t *torch.Tensor) *torch.Tensor {
	filled := t.Normal_(0, 1)
	if e.o.PaddingIdx == nil || filled.Err() != nil {
		return filled
	}
	row := t.Select(0, *e.o.PaddingIdx)
	defer row.Close()
	if zeroed := row.Zero_(); zeroed.Err() != nil {
		return zeroed
	}
	return filled
}

// Forward returns the rows at the indices: an int64 or int32 tensor [...] gives [... size].
func (e *Embedding) Forward(indices *torch.Tensor) *torch.Tensor {
	return e.result(torch.EmbeddingWith(e.Weight, indices, e.o), indices)
}

// Parts returns the weight.
func (e *Embedding) Parts() Parts { return weightAndBias(e.Weight, nil) }

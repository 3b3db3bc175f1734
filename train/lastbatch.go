package train

import (
	"errors"

	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// stepOrRefuse trains on a batch. refused is set if the batch is a single sample, is not the first
// batch of its epoch, and a normalisation layer cannot compute statistics for it. The model is then
// unchanged.
func (r *runner) stepOrRefuse(batch *prefetcher.Batch) (refused, err error) {
	if batch.N != 1 || r.at.Batches == 0 {
		return nil, r.step(batch)
	}
	before, err := copyBuffers(r.Model)
	defer before.close()
	if err != nil {
		return nil, err
	}
	if err = r.step(batch); !errors.Is(err, nn.ErrOneValue) {
		return nil, err
	}
	return err, before.restore()
}

// sayLeftOut logs once that the last batch of an epoch is left out, if refused is not nil.
func (r *runner) sayLeftOut(refused error) {
	if refused == nil || r.leftOut {
		return
	}
	r.leftOut = true
	if r.Log != nil {
		r.Log.Warn("train: the last batch of an epoch is one sample and is left out, because the model "+
			"normalizes over batches: to train on every sample, choose another batch size",
			"epoch", r.at.Epoch+1, "reason", refused)
	}
}

// bufferCopies holds copies of a model's buffers, such as BatchNorm's running statistics. A forward
// pass changes the buffers of its first layers even if a later layer fails.
type bufferCopies struct{ buffers, copies []*torch.Tensor }

// copyBuffers copies a model's buffers. The caller closes the copies, even after an error.
func copyBuffers(m nn.Module) (bufferCopies, error) {
	var c bufferCopies
	for _, n := range nn.NamedBuffers(m) {
		copied := n.Tensor.NoGrad().Clone()
		c.buffers, c.copies = append(c.buffers, n.Tensor), append(c.copies, copied)
		if err := copied.Err(); err != nil {
			return c, err
		}
	}
	return c, nil
}

func (c bufferCopies) restore() error {
	for i, b := range c.buffers {
		if err := b.NoGrad().Copy_(c.copies[i]).Err(); err != nil {
			return err
		}
	}
	return nil
}

func (c bufferCopies) close() {
	for _, t := range c.copies {
		t.Close()
	}
}

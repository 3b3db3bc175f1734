package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// weights is a prefetcher source of a network's blocks. A sample is a block, and its fields are the
// block's parameters. The blocks repeat endlessly. They are in mapped files, which the system reads
// when a block is first copied.
type weights struct {
	specs  []torch.Spec
	blocks [][]*torch.Tensor // indexed by block and field
	bytes  [][][]byte        // the memory of blocks
}

// openWeights maps the parameters of the given number of blocks, named h.0 and so on in the file.
// Each must have the shapes of block. Close the source after the prefetcher.
func openWeights(file *checkpoint.File, block nn.Module, layers int) (*weights, error) {
	w := &weights{}
	for _, p := range nn.State(block) {
		w.specs = append(w.specs, torch.Spec{Name: p.Name, DType: p.Tensor.DType(), Shape: p.Tensor.Shape()})
	}
	for i := range layers {
		var tensors []*torch.Tensor
		var memory [][]byte
		for _, spec := range w.specs {
			t, err := mapTensor(file, fmt.Sprintf("h.%d.%s", i, spec.Name), spec)
			if err == nil {
				tensors = append(tensors, t)
				var b []byte
				b, err = t.Bytes()
				memory = append(memory, b)
			}
			if err != nil {
				w.blocks = append(w.blocks, tensors)
				return nil, errors.Join(err, w.Close())
			}
		}
		w.blocks, w.bytes = append(w.blocks, tensors), append(w.bytes, memory)
	}
	return w, nil
}

// mapTensor returns a tensor of the file, which must have the dtype and shape of spec.
func mapTensor(file *checkpoint.File, name string, spec torch.Spec) (*torch.Tensor, error) {
	t, err := file.Map(name)
	if err != nil {
		return nil, err
	}
	if t.DType() != spec.DType || !slices.Equal(t.Shape(), spec.Shape) {
		defer t.Close()
		return nil, fmt.Errorf("%s: tensor %s is %v%v, and the model has %v%v: give the sizes of the "+
			"model in the file, or another file",
			file.Path(), name, t.DType(), t.Shape(), spec.DType, spec.Shape)
	}
	return t, nil
}

// Fields returns the parameters of a block.
func (w *weights) Fields() []torch.Spec { return w.specs }

// BatchSize returns 1: a slot holds one block.
func (w *weights) BatchSize() int { return 1 }

const piece = 16 << 20 // bytes copied per goroutine

// Fill delivers the blocks in turn until ctx ends, each with its number. The first block of a pass
// is therefore copied while the last block of the previous pass computes.
func (w *weights) Fill(ctx context.Context, _ int, lend func(context.Context) ([][]byte, error),
	deliver func(int, any) error) error {
	for i := 0; ; i = (i + 1) % len(w.bytes) {
		slot, err := lend(ctx) // waits until the slot's earlier block has been copied
		if err != nil {
			return err
		}
		var copies sync.WaitGroup // one core copies more slowly than the bus
		for field, memory := range slot {
			from := w.bytes[i][field]
			for at := 0; at < len(from); at += piece {
				copies.Go(func() { copy(memory[at:], from[at:min(at+piece, len(from))]) })
			}
		}
		copies.Wait()
		if err := deliver(1, i); err != nil {
			return err
		}
	}
}

// Close unmaps the files.
func (w *weights) Close() error {
	var errs []error
	for _, tensors := range w.blocks {
		for _, t := range tensors {
			errs = append(errs, t.Close())
		}
	}
	return errors.Join(errs...)
}

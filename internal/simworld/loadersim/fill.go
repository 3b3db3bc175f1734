package loadersim

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"iter"

	"github.com/torchstream/torchstream/imageloader"
)

// fill yields the batches of an epoch as Loader.Epoch does, from memory that it lends to the loader
// as a prefetcher does. The memory has other bytes before.
func (r *rank) fill(ctx context.Context, l *imageloader.Loader) iter.Seq2[*imageloader.Batch, error] {
	const slots, pixels = 2, 3 * side * side
	return func(yield func(*imageloader.Batch, error) bool) {
		free, lent := make(chan [][]byte, slots), make(chan [][]byte, slots)
		for range slots {
			free <- [][]byte{make([]byte, r.model.Batch*pixels), make([]byte, r.model.Batch*8)}
		}
		left := errors.New("the loop was left")
		err := l.Fill(ctx, r.epoch, func(ctx context.Context) ([][]byte, error) {
			select {
			case fields := <-free:
				for _, f := range fields {
					copy(f, bytes.Repeat([]byte{0xee}, len(f)))
				}
				lent <- fields
				return fields, nil
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}, func(n int, info any) error {
			fields, batch := <-lent, info.(imageloader.Info)
			b := &imageloader.Batch{N: n, Images: fields[0][:n*pixels], Samples: batch.Samples, State: batch.State}
			for row := range n {
				b.Labels = append(b.Labels, int64(binary.LittleEndian.Uint64(fields[1][8*row:])))
			}
			if !yield(b, nil) {
				return left
			}
			free <- fields
			return nil
		})
		if err != nil && !errors.Is(err, left) {
			yield(nil, err)
		}
	}
}

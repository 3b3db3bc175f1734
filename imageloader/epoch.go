package imageloader

import (
	"context"
	"encoding/binary"
	"iter"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/box"
	"github.com/torchstream/torchstream/imageloader/internal/epoch"
	"github.com/torchstream/torchstream/tensor"
)

// hostSlots is the number of batches that Epoch keeps in memory. The consumer uses one while the
// workers fill the others. The batches are on Go's heap, so the last batch of a loop stays valid
// while the program refers to it.
const hostSlots = 3

// Epoch yields the batches of one epoch without a prefetcher or LibTorch, for previews, tests and
// measurements. If an error ends the epoch, the last pair holds the error and no batch. Leaving the
// loop stops the epoch's goroutines and waits for them. The sequence can be ranged over several
// times. Each range starts at the first batch.
func (l *Loader) Epoch(ctx context.Context, epoch int) iter.Seq2[*Batch, error] {
	return l.epoch(ctx, epoch, hostSlots)
}

// spareSlots keeps the slots of finished epochs for later epochs, because allocating fresh memory
// takes longer than writing the batches.
type spareSlots struct {
	mu     sync.Mutex
	slots  [][][]byte
	closed bool // the loader is closed, so give frees slots
}

// close releases the slots.
func (s *spareSlots) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slots, s.closed = nil, true
}

// take returns a slot, or nil if there is none.
func (s *spareSlots) take() [][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.slots)
	if n == 0 {
		return nil
	}
	slot := s.slots[n-1]
	s.slots = s.slots[:n-1]
	return slot
}

// give puts slots back. At most hostSlots slots are kept.
func (s *spareSlots) give(slots [][][]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.slots = append(s.slots, slots[:min(len(slots), hostSlots-min(hostSlots, len(s.slots)))]...)
}

func (l *Loader) epoch(ctx context.Context, number, slots int) iter.Seq2[*Batch, error] {
	return func(yield func(*Batch, error) bool) {
		o := &l.o
		pixels, labels := 3*o.Transform.Size*o.Transform.Size, l.labels(nil)
		type filled struct {
			fields [][]byte
			info   Info
		}
		var (
			free  = make(chan [][]byte, slots)
			full  = make(chan filled, slots)
			ended = make(chan error, 1)
		)
		unused := make([][][]byte, 0, slots) // all except the slot that the consumer keeps
		for range slots {
			fields := l.spare.take()
			if fields == nil {
				fields = [][]byte{make([]byte, o.BatchSize*pixels), make([]byte, o.BatchSize*labels.Bytes())}
			}
			unused = append(unused, fields)
			free <- fields
		}
		ctx, cancel := context.WithCancel(ctx)
		defer func() { // runs however the loop is left
			cancel()
			for range full { // closed when Fill has stopped everything
			}
			l.spare.give(unused)
		}()
		go func() {
			lent := make(chan [][]byte, slots) // lent to Fill, oldest first
			err := l.Fill(ctx, number, func(ctx context.Context) ([][]byte, error) {
				select {
				case fields := <-free:
					lent <- fields
					return fields, nil
				case <-ctx.Done():
					return nil, context.Cause(ctx)
				}
			}, func(n int, info any) error {
				full <- filled{<-lent, info.(Info)}
				return nil
			})
			ended <- err
			close(full)
		}()
		batch := Batch{Labels: make([]int64, o.BatchSize)}
		waiting := time.Now()
		for f := range full {
			l.counters.Times.ConsumerWait.Add(int64(time.Since(waiting)))
			n := len(f.info.Samples)
			batch.N, batch.Images, batch.Labels = n, f.fields[0][:n*pixels], batch.Labels[:n]
			batch.Samples, batch.State = f.info.Samples, f.info.State
			for i := range batch.Labels {
				batch.Labels[i] = int64(f.info.Samples[i].Label)
			}
			switch labels.Kind {
			case epoch.Mask:
				batch.Masks = f.fields[1][:n*labels.Bytes()]
			case epoch.Boxes:
				batch.Boxes = readBoxes(f.fields[1][:n*labels.Bytes()], n)
			case epoch.Soft, epoch.Target:
				batch.Soft = append(batch.Soft[:0], make([]float32, n*labels.Width)...)
				for i := range batch.Soft {
					batch.Soft[i] = math.Float32frombits(binary.LittleEndian.Uint32(f.fields[1][4*i:]))
				}
			}
			// If the loop ends early, also by a panic, this batch stays valid: its fields are not
			// unused.
			unused = slices.DeleteFunc(unused, func(u [][]byte) bool { return &u[0] == &f.fields[0] })
			if !yield(&batch, nil) {
				return
			}
			unused = append(unused, f.fields)
			free <- f.fields
			waiting = time.Now()
		}
		if err := <-ended; err != nil {
			yield(nil, err)
		}
	}
}

// Fields describes the output of Fill for one sample. "images" is uint8 [Size, Size, 3] (rows,
// columns, RGB). "labels" is int64 [], or float32 [classes] with Transform.Mix. With Options.Masks
// the second field is "masks" instead, of Masks.DType [Size, Size]. With Options.Boxes it is
// "boxes", float32 [Boxes.Max, 5]: see Boxes. With Options.Target "labels" is float32
// [TargetWidth], and with Options.MultiLabel float32 [classes].
func (l *Loader) Fields() []tensor.Spec {
	size := int64(l.o.Transform.Size)
	return []tensor.Spec{
		{Name: "images", DType: tensor.Uint8, Shape: []int64{size, size, 3}},
		l.target(),
	}
}

// target describes the training target of a sample.
func (l *Loader) target() tensor.Spec {
	labels, size := l.labels(nil), int64(l.o.Transform.Size)
	switch labels.Kind {
	case epoch.Mask:
		return tensor.Spec{Name: "masks", DType: labels.DType, Shape: []int64{size, size}}
	case epoch.Boxes:
		return tensor.Spec{Name: "boxes", DType: labels.DType, Shape: []int64{int64(labels.Boxes.Max), box.Numbers}}
	case epoch.Index:
		return tensor.Spec{Name: "labels", DType: labels.DType}
	}
	return tensor.Spec{Name: "labels", DType: labels.DType, Shape: []int64{int64(labels.Width)}}
}

// Outputs describes the fields for one sample on the device, after the operations of Finishes.
// "images" is [3, Size, Size] of Transform.DType, normalised (or uint8 with Transform.Bytes), in
// channels-last memory unless Transform.Contiguous is set. The second field is the same as in
// Fields.
func (l *Loader) Outputs() []tensor.Spec {
	t := &l.o.Transform
	size := int64(t.Size)
	format := tensor.ChannelsLast
	if t.Contiguous {
		format = tensor.Contiguous
	}
	return []tensor.Spec{
		{Name: "images", DType: t.DType, Shape: []int64{3, size, size}, MemoryFormat: format},
		l.target(),
	}
}

// Finishes describes how the prefetcher makes Outputs from Fields.
func (l *Loader) Finishes() []tensor.Finish {
	t := &l.o.Transform
	if t.Bytes {
		return make([]tensor.Finish, 2)
	}
	return []tensor.Finish{{Mean: slices.Clone(t.Mean[:]), Std: slices.Clone(t.Std[:])}, {}}
}

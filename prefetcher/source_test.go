//go:build linux

package prefetcher

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"syscall"

	"github.com/torchstream/torchstream/torch"
)

const side = 16 // pixels per side of the test's images

// value returns the value of all pixels of a sample. It is also the sample's label modulo 251. No
// two batches in flight share a value.
func value(epoch, sample int) byte { return byte((epoch*97 + sample*13) % 251) }

func label(epoch, sample int) int64 { return int64(epoch)*1_000_000 + int64(sample) }

// rawSource produces images of one colour. It is not a Finisher.
type rawSource struct {
	batch, samples int
	side           int // 0 stands for the constant side
	ahead          int // number of slots that it holds at once; 0 stands for 1
	before         func(ctx context.Context, batch int) error
}

func (s *rawSource) size() int {
	if s.side > 0 {
		return s.side
	}
	return side
}

func (s *rawSource) BatchSize() int { return s.batch }

func (s *rawSource) Fields() []torch.Spec {
	n := int64(s.size())
	return []torch.Spec{{Name: "images", DType: torch.Uint8, Shape: []int64{n, n, 3}},
		{Name: "labels", DType: torch.Int64}}
}

func (s *rawSource) Fill(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, error),
	deliver func(int, any) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	batches := (s.samples + s.batch - 1) / s.batch
	type job struct {
		n    int
		done chan struct{}
	}
	var jobs []job // oldest first
	var fillers sync.WaitGroup
	defer fillers.Wait()
	next := 0
	for b := range batches {
		for next < batches && len(jobs) < max(1, s.ahead) {
			if s.before != nil {
				if err := s.before(ctx, next); err != nil {
					return err
				}
			}
			slot, err := lend(ctx)
			if err != nil {
				return err
			}
			j := job{min(s.batch, s.samples-next*s.batch), make(chan struct{})}
			first := next * s.batch
			fillers.Go(func() {
				defer close(j.done)
				s.fill(slot, epoch, first, j.n)
			})
			jobs = append(jobs, j)
			next++
		}
		<-jobs[0].done
		if err := deliver(jobs[0].n, fmt.Sprintf("epoch %d batch %d", epoch, b)); err != nil {
			return err
		}
		jobs = jobs[1:]
	}
	return nil
}

func (s *rawSource) fill(slot [][]byte, epoch, first, n int) {
	pixels := s.size() * s.size() * 3
	for i := range slot[0] { // poison: bytes that are not written below must not be seen
		slot[0][i] = 255
	}
	for i := range n {
		v := value(epoch, first+i)
		row := slot[0][i*pixels : (i+1)*pixels]
		for p := range row {
			row[p] = v
		}
		binary.NativeEndian.PutUint64(slot[1][i*8:], uint64(label(epoch, first+i)))
	}
}

// floatSource's images become float32 [3 H W] with the values divided by 255, computed by the
// shim's kernel.
type floatSource struct {
	rawSource
	mu      sync.Mutex
	threads map[int]int // Finish calls by thread
	finish  func() error
}

func (s *floatSource) Outputs() []torch.Spec {
	n := int64(s.size())
	return []torch.Spec{{Name: "images", DType: torch.Float32, Shape: []int64{3, n, n},
		MemoryFormat: torch.ChannelsLast}, {Name: "labels", DType: torch.Int64}}
}

func (s *floatSource) Finish(dst, src []*torch.Tensor) error {
	s.mu.Lock()
	if s.threads == nil {
		s.threads = map[int]int{}
	}
	s.threads[syscall.Gettid()]++
	s.mu.Unlock()
	if s.finish != nil {
		if err := s.finish(); err != nil {
			return err
		}
	}
	if dst[1] != src[1] {
		return fmt.Errorf("a field without work has two tensors")
	}
	return torch.NormalizeImages(dst[0], src[0], []float32{0, 0, 0}, []float32{1, 1, 1})
}

package order

import "math/rand/v2"

// Shuffler is a shuffle buffer for a stream. It holds a limited number of elements and bytes. When
// it is full, random elements leave before another one is added. The order depends only on the seed
// and the sizes. A stream that fits into the buffer is shuffled uniformly. A Shuffler belongs to
// one goroutine.
type Shuffler[T any] struct {
	// Ramp makes one element leave for every two that are added, as long as the buffer fills. If a
	// stream is much larger than the buffer, its first element then leaves at once, but its first
	// elements are mixed with fewer others.
	Ramp bool

	max      int
	maxBytes int64
	added    int
	held     []sized[T]
	bytes    int64
	rng      *rand.Rand
}

type sized[T any] struct {
	value T
	bytes int64
}

// NewShuffler returns a buffer for up to max elements and maxBytes bytes.
func NewShuffler[T any](max int, maxBytes int64, seed uint64, epoch int) *Shuffler[T] {
	var g rand.PCG
	Seed(&g, seed, OfEpoch, epoch, 0)
	return &Shuffler[T]{max: max, maxBytes: maxBytes, rng: rand.New(&g)}
}

// Len returns the number of elements in the buffer.
func (s *Shuffler[T]) Len() int { return len(s.held) }

// Full reports whether an element must leave before an element of this size is added. An empty
// buffer is never full, even for an element over the limit.
func (s *Shuffler[T]) Full(bytes int64) bool {
	n := len(s.held)
	return n > 0 && (n >= s.max || s.bytes+bytes > s.maxBytes || s.Ramp && 2*n > s.added)
}

// Add adds an element.
func (s *Shuffler[T]) Add(v T, bytes int64) {
	s.held = append(s.held, sized[T]{v, bytes})
	s.bytes += bytes
	s.added++
}

// Take removes a random element. The buffer must not be empty.
func (s *Shuffler[T]) Take() T {
	i := s.rng.IntN(len(s.held))
	e := s.held[i]
	last := len(s.held) - 1
	s.held[i] = s.held[last]
	s.held[last] = sized[T]{} // releases its memory
	s.held = s.held[:last]
	s.bytes -= e.bytes
	return e.value
}

// Through returns the order in which elements 0 to n-1, added in ascending order, leave an empty
// buffer s. size returns an element's size in bytes.
func Through(s *Shuffler[int32], n int, size func(i int) int64) []int32 {
	order := make([]int32, 0, n)
	for i := range n {
		bytes := size(i)
		for s.Full(bytes) {
			order = append(order, s.Take())
		}
		s.Add(int32(i), bytes)
	}
	for s.Len() > 0 {
		order = append(order, s.Take())
	}
	return order
}

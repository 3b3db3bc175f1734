package imageloader

import "math/rand/v2"

// Every random choice is drawn from a PCG generator that is seeded from (Options.Seed, purpose, epoch, sample index) by chaining splitmix64's finalizer. No
// generator is shared by two samples, so neither the number of workers nor the order of their work can change a batch, and an epoch can begin anywhere.
const (
	purposeOrder   = 1 // of the samples in an epoch; index 0
	purposeAugment = 2 // crop and flip of one sample
)

func mix64(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

func seedGenerator(g *rand.PCG, seed uint64, purpose, epoch, index int) {
	s := mix64(mix64(mix64(mix64(seed)^uint64(purpose))^uint64(epoch)) ^ uint64(index))
	g.Seed(s, mix64(s))
}

// permutation is the order of n samples in an epoch, for an archive with random access.
func permutation(n int, seed uint64, epoch int) []int32 {
	order := make([]int32, n)
	for i := range order {
		order[i] = int32(i)
	}
	var g rand.PCG
	seedGenerator(&g, seed, purposeOrder, epoch, 0)
	rand.New(&g).Shuffle(n, func(i, j int) { order[i], order[j] = order[j], order[i] })
	return order
}

// shuffler is a shuffle buffer for a stream of samples: it holds up to limit samples and limitBytes bytes; when one more comes, random ones leave. What leaves
// when depends on the seed and on the samples' sizes alone. An archive that fits in is shuffled evenly.
type shuffler struct {
	limit      int
	limitBytes int64
	// ramp lets a sample leave for every two that come, before the buffer is full: an archive that is much larger than the buffer begins at once, instead of after
	// the buffer was filled, and its first samples are mixed with fewer others.
	ramp  bool
	added int
	held  []item
	bytes int64
	rng   *rand.Rand
}

func newShuffler(limit int, limitBytes int64, seed uint64, epoch int) *shuffler {
	var g rand.PCG
	seedGenerator(&g, seed, purposeOrder, epoch, 0)
	return &shuffler{limit: limit, limitBytes: limitBytes, rng: rand.New(&g)}
}

// full says that one has to leave before size more bytes come.
func (s *shuffler) full(size int64) bool {
	return len(s.held) > 0 && (len(s.held) >= s.limit || s.bytes+size > s.limitBytes || s.ramp && 2*len(s.held) > s.added)
}

func (s *shuffler) add(it item) {
	s.held = append(s.held, it)
	s.bytes += it.weight()
	s.added++
}

// take removes a random sample; there must be one.
func (s *shuffler) take() item {
	i := s.rng.IntN(len(s.held))
	it := s.held[i]
	last := len(s.held) - 1
	s.held[i] = s.held[last]
	s.held[last] = item{}
	s.held = s.held[:last]
	s.bytes -= it.weight()
	return it
}

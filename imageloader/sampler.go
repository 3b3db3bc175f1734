package imageloader

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"math/rand/v2"
	"sort"
)

// Every random choice is drawn from a PCG generator that is seeded from (Options.Seed, purpose, epoch, sample index) by chaining splitmix64's finalizer. No
// generator is shared by two samples, so neither the number of workers nor the order of their work can change a batch, and an epoch can begin anywhere.
const (
	purposeOrder   = 1 // of the samples in an epoch; index 0
	purposeAugment = 2 // crop and flip of one sample
	purposeMix     = 4 // of a batch; the index is that of its first sample
	purposeDraw    = 3 // which sample a weighted draw takes; the index is the draw's position
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

// seedAgain is seedGenerator for a sample that comes more than once in an epoch: again is different each time, and 0 is seedGenerator.
func seedAgain(g *rand.PCG, seed uint64, purpose, epoch, index int, again uint64) {
	if again == 0 {
		seedGenerator(g, seed, purpose, epoch, index)
		return
	}
	s := mix64(mix64(mix64(mix64(mix64(seed)^uint64(purpose))^uint64(epoch))^uint64(index)) ^ again)
	g.Seed(s, mix64(s))
}

// orderKind is how the samples of an epoch are put into sequence. A loader has one, which is part of its State, so that a run goes on as it began.
type orderKind string

const (
	archiveOrder orderKind = "archive"     // as they lie in the archive
	permuted     orderKind = "permutation" // needs random access
	buffered     orderKind = "buffer"      // through a shuffle buffer, as they come out of a stream
	drawn        orderKind = "draws"       // weighted, with replacement; needs random access
)

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

// throughBuffer is the order in which n samples leave a shuffle buffer. item makes the i-th one: the sizes matter.
func throughBuffer(n int, b *shuffler, item func(i int) item) []int32 {
	order := make([]int32, 0, n)
	for i := range n {
		it := item(i)
		for b.full(it.weight()) {
			order = append(order, int32(b.take().sample.Index))
		}
		b.add(it)
	}
	for len(b.held) > 0 {
		order = append(order, int32(b.take().sample.Index))
	}
	return order
}

// weights draws samples with replacement.
type weights struct {
	sums   []float64 // of the weights up to and including each sample's
	digest string    // of sums
}

// newWeights checks what a caller says about samples; n is how many there are.
func newWeights(n int, weight func(i int) float64) (*weights, error) {
	w := &weights{sums: make([]float64, n)}
	sum := 0.0
	h := sha256.New()
	for i := range n {
		v := weight(i)
		if !(v >= 0) || math.IsInf(v, 0) {
			return nil, fmt.Errorf("the weight of sample %d is %v, not a number from 0 up", i, v)
		}
		sum += v
		w.sums[i] = sum
		var bits [8]byte
		binary.LittleEndian.PutUint64(bits[:], math.Float64bits(sum))
		h.Write(bits[:])
	}
	if !(sum > 0) || math.IsInf(sum, 0) {
		return nil, fmt.Errorf("the sum of all weights is %v", sum)
	}
	w.digest = hex.EncodeToString(h.Sum(nil)[:16])
	return w, nil
}

// draw is a pure function: the sample at a position of an epoch.
func (w *weights) draw(seed uint64, epoch, position int) int {
	var g rand.PCG
	seedGenerator(&g, seed, purposeDraw, epoch, position)
	x := rand.New(&g).Float64() * w.sums[len(w.sums)-1]
	// The first sample whose sum is over x: one of weight 0 has the sum of the one before it, and is never the first.
	i := sort.Search(len(w.sums), func(i int) bool { return w.sums[i] > x })
	return min(i, len(w.sums)-1)
}

// sequence says which sample stands at each position of an epoch, for archives with random access. It has rounds (Options.Repeat) of perRound positions.
type sequence struct {
	kind     orderKind
	seed     uint64
	epoch    int
	rounds   int
	perRound int
	weights  *weights                // drawn
	shuffled func(epoch int) []int32 // permuted and buffered

	round int // that order is of; -1: none yet
	order []int32
}

// at returns the sample at a position; its choices are drawn for the given epoch (round j of epoch e is what epoch e*rounds+j would be without rounds), and again
// tells apart several draws of the same sample.
func (s *sequence) at(position int) (index, epoch int, again uint64) {
	round, i := position/s.perRound, position%s.perRound
	epoch = s.epoch*s.rounds + round
	switch s.kind {
	case drawn:
		return s.weights.draw(s.seed, epoch, i), epoch, uint64(i) + 1
	case archiveOrder:
		return i, epoch, 0
	}
	if s.order == nil || s.round != round {
		s.order, s.round = s.shuffled(epoch), round
	}
	return int(s.order[i]), epoch, 0
}

// positions is a set of positions of an epoch: all before next, and those in ahead, which are sorted, larger than next, and few.
type positions struct {
	next  int
	ahead []int
}

// without returns the j-th position that is not in the set, counted from 0.
func (s *positions) without(j int) int {
	k := sort.Search(len(s.ahead), func(k int) bool { return s.ahead[k]-s.next-k > j })
	return s.next + j + k
}

// rank returns how many positions before p are not in the set, and whether p is in it.
func (s *positions) rank(p int) (j int, in bool) {
	if p < s.next {
		return 0, true
	}
	k := sort.SearchInts(s.ahead, p)
	return p - s.next - k, k < len(s.ahead) && s.ahead[k] == p
}

func (s *positions) size() int { return s.next + len(s.ahead) }

// unknown is a number of positions that only the end of the archive tells.
const unknown = math.MaxInt

// deal says which positions of an epoch a rank takes. Those that are not in done are numbered 0, 1, 2, ... and dealt in turn: number rank + t*world is the
// rank's turn t. When all are dealt, the numbers go on with the first position again: padding.
//
// How many turns a rank takes is the same on all ranks. A rank that skips a bad sample takes a turn more, so that it has as many batches as the others.
type deal struct {
	done        positions
	left        int // positions that are not in done, or unknown
	rank, world int
	turns       int // that are wanted of this rank since done, if no sample is bad; or unknown
	fixed       bool
}

// newDeal deals what is left of an epoch with the given number of positions, or unknown.
func newDeal(o *Options, total int, done positions) deal {
	d := deal{done: done, left: unknown, rank: o.Rank, world: o.World, turns: unknown, fixed: o.World > 1 || o.PadLast}
	if total == unknown {
		return d
	}
	d.left = max(0, total-done.size())
	d.turns = d.left / o.World
	if short := d.turns % o.BatchSize; d.fixed && o.DropLast {
		d.turns -= short
		return d
	}
	if d.left%o.World != 0 {
		d.turns++
	}
	if short := d.turns % o.BatchSize; o.PadLast && short != 0 {
		d.turns += o.BatchSize - short
	}
	return d
}

// batches is how many batches that makes.
func (d *deal) batches(o *Options) int {
	n := d.turns / o.BatchSize
	if d.turns%o.BatchSize != 0 && !o.DropLast {
		n++
	}
	return n
}

// most is how many turns a rank may take in all, bad samples included: so many of them are bad beyond it that the archive should be looked at.
func (d *deal) most() int {
	if d.fixed && d.left < unknown {
		return d.turns + d.left
	}
	return d.turns
}

// at returns the position of a turn, and how often it was dealt before.
func (d *deal) at(turn int) (position, before int) {
	number := d.rank + turn*d.world
	return d.done.without(number % d.left), number / d.left
}

// turn is the inverse, for those who go through the positions in order: the turn in which the rank takes a position that was dealt so often before.
func (d *deal) turn(position, before int) (turn int, mine bool) {
	number, done := d.done.rank(position)
	if done {
		return 0, false
	}
	if d.left < unknown {
		number += before * d.left
	}
	if number < d.rank || (number-d.rank)%d.world != 0 {
		return 0, false
	}
	return (number - d.rank) / d.world, true
}

// take adds to done what every rank has taken of the deal; turns has one number for each.
func (d *deal) take(turns []int) (positions, error) {
	first := d.left // the smallest number that was not taken
	for rank, t := range turns {
		first = min(first, rank+t*d.world)
	}
	out := positions{next: d.done.next + d.left + len(d.done.ahead)}
	if first < d.left {
		out.next = d.done.without(first)
	}
	const most = 1 << 20
	for _, p := range d.done.ahead {
		if p > out.next {
			out.ahead = append(out.ahead, p)
		}
	}
	for rank, t := range turns {
		from := 0
		if first > rank {
			from = (first - rank + d.world - 1) / d.world
		}
		for i := from; i < t && rank+i*d.world < d.left; i++ {
			if len(out.ahead) == most {
				return out, fmt.Errorf("the ranks are more than %d samples apart", most)
			}
			out.ahead = append(out.ahead, d.done.without(rank+i*d.world))
		}
	}
	sort.Ints(out.ahead)
	return out, nil
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

package loadersim

import (
	"math"
	"math/rand/v2"
	"sort"
)

// This file is the model: what an epoch of package imageloader has for a rank. It follows the
// documentation of imageloader.Options and internal/order, and calls neither.

// Policy says what happens to bad samples.
type Policy int

// The policies.
const (
	Fail Policy = iota
	Skip
	Substitute
)

// Order is an order of the samples in an epoch.
type Order int

// The orders.
const (
	InArchive Order = iota
	Permuted
	Drawn
	Buffered
)

// Model is an archive and the options of a training run.
type Model struct {
	Archive
	Order   Order
	Seed    uint64
	Repeat  int       // rounds in an epoch
	Draws   int       // positions in a round of Drawn
	Weights []float64 // for Drawn
	Policy  Policy
	Share

	Buffer, BufferBytes int // of Buffered
}

// Archive has the samples in the archive's order.
type Archive struct {
	Names        []string
	Labels       []int
	Sizes        []int
	Bad          []bool
	ArchiveBytes int // size of the archive's files
}

// Share is the part of an epoch that a rank gets.
type Share struct {
	World, Batch      int
	DropLast, PadLast bool
}

// Draw identifies the random choices of one occurrence of a sample: equal draws have equal pixels.
type Draw struct {
	Index, Epoch, Position, Pass int
}

// Row is a row of a batch.
type Row struct {
	Draw
	Name  string
	Label int

	turn int // in which the rank has taken it
}

// Ending is the end of an epoch.
type Ending struct {
	Bad       int  // the sample that ended it, or -1
	NoSamples bool // there was nothing to deliver, or not enough
}

// Batches returns the batches of an epoch for a rank. rest has the positions of the epoch that were
// not taken before the epoch was dealt, or is nil for all. before is the number of batches of the
// epoch that were delivered before that.
func (m *Model) Batches(epoch, rank int, rest []int, before int) ([][]Row, Ending) {
	if rest == nil {
		rest = m.positions()
	}
	turns, fixed := m.turns(len(rest))
	rows, end := m.rows(epoch, rank, rest)
	var batches [][]Row
	for len(rows) > 0 && (len(rows) >= m.Batch || !m.DropLast) {
		batch := rows[:min(m.Batch, len(rows))]
		if bad := m.substitute(batch); bad >= 0 {
			return batches, Ending{Bad: bad}
		}
		batches, rows = append(batches, batch), rows[len(batch):]
	}
	if end.Bad < 0 {
		delivered := len(batches)*m.Batch + len(rows)
		if n := len(batches); n > 0 {
			delivered += len(batches[n-1]) - m.Batch
		}
		end.NoSamples = before+len(batches) == 0 || fixed && m.Policy == Skip && delivered < turns
	}
	return batches, end
}

// Count returns the number of batches of a whole epoch, if no sample is bad.
func (m *Model) Count() int {
	n, _ := m.turns(m.perRound() * m.Repeat)
	if n%m.Batch != 0 && !m.DropLast {
		n += m.Batch
	}
	return n / m.Batch
}

// rows returns the rows that a rank takes of an epoch, in order. Under Substitute they include bad
// samples. Under Fail they end before the first bad one.
func (m *Model) rows(epoch, rank int, rest []int) (rows []Row, end Ending) {
	turns, fixed := m.turns(len(rest))
	last := turns
	if fixed && m.Policy == Skip && turns > 0 { // later samples replace bad ones
		last += len(rest)
	}
	for turn := 0; turn < last && len(rows) < turns; turn++ {
		number := rank + turn*m.World
		row := m.row(epoch, rest[number%len(rest)], number/len(rest))
		row.turn = turn
		switch bad := m.Bad[row.Index]; {
		case bad && m.Policy == Skip:
		case bad && m.Policy == Fail:
			return rows, Ending{Bad: row.Index}
		default:
			rows = append(rows, row)
		}
	}
	return rows, Ending{Bad: -1}
}

// positions lists the positions of an epoch.
func (m *Model) positions() []int {
	list := make([]int, m.perRound()*m.Repeat)
	for i := range list {
		list[i] = i
	}
	return list
}

func (m *Model) perRound() int {
	if m.Order == Drawn && m.Draws > 0 {
		return m.Draws
	}
	return len(m.Names)
}

// turns returns how many samples a rank delivers of an epoch with a number of positions. fixed says
// that bad samples do not lessen the number.
func (m *Model) turns(positions int) (n int, fixed bool) {
	fixed = m.World > 1 || m.PadLast
	switch n = positions / m.World; {
	case fixed && m.DropLast:
		return n - n%m.Batch, fixed
	case positions%m.World != 0:
		n++
	}
	if m.PadLast && n%m.Batch != 0 {
		n += m.Batch - n%m.Batch
	}
	return n, fixed
}

// substitute replaces the bad rows of a batch by the good row before them, or else the first good
// one. It returns -1, or the batch's last sample if all are bad.
func (m *Model) substitute(batch []Row) int {
	from := -1
	for i := len(batch) - 1; i >= 0; i-- {
		if !m.Bad[batch[i].Index] {
			from = i
		}
	}
	if from < 0 {
		return batch[len(batch)-1].Index
	}
	for i := range batch {
		if !m.Bad[batch[i].Index] {
			from = i
		}
		batch[i] = batch[from]
	}
	return -1
}

// row returns the sample at a position of an epoch. pass counts how often the position was dealt
// before, as padding.
func (m *Model) row(epoch, position, pass int) Row {
	round, i := position/m.perRound(), position%m.perRound()
	epoch = epoch*m.Repeat + round
	d := Draw{Index: i, Epoch: epoch, Pass: pass}
	switch m.Order {
	case Permuted:
		d.Index = permutation(len(m.Names), m.Seed, epoch)[i]
	case Buffered:
		d.Index = m.buffered(epoch)[i]
	case Drawn:
		d.Index, d.Position = m.drawn(epoch, i), i+1
	}
	return Row{Draw: d, Name: m.Names[d.Index], Label: m.Labels[d.Index]}
}

// generator returns the random numbers for a purpose of a sample: 1 is the order of an epoch, 3 a
// weighted draw.
func generator(seed, purpose uint64, epoch, index int) *rand.Rand {
	s := mix(mix(mix(mix(seed)^purpose)^uint64(epoch)) ^ uint64(index))
	return rand.New(rand.NewPCG(s, mix(s)))
}

// mix is a step of splitmix64.
func mix(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z ^= z >> 30
	z *= 0xbf58476d1ce4e5b9
	z ^= z >> 27
	z *= 0x94d049bb133111eb
	return z ^ z>>31
}

// Crop is the part of an image that a draw takes.
type Crop struct {
	X, Y, Width, Height int
	Flip                bool
}

// Crop draws what torchvision's RandomResizedCrop and RandomHorizontalFlip draw: an area of 8 % to
// 100 % with a ratio of 3/4 to 4/3, ten times until one fits, and then a flip.
func (m *Model) Crop(d Draw, width, height int) (c Crop) {
	s := mix(mix(mix(mix(m.Seed)^2)^uint64(d.Epoch)) ^ uint64(d.Index))
	if repeat := uint64(d.Position) + uint64(d.Pass)<<40; repeat > 0 {
		s = mix(s ^ repeat)
	}
	r := rand.New(rand.NewPCG(s, mix(s)))
	defer func() { c.Flip = r.Float64() < 0.5 }()
	low, high := math.Log(3.0/4), math.Log(4.0/3)
	for range 10 {
		area := float64(width*height) * (0.08 + r.Float64()*(1-0.08))
		ratio := math.Exp(low + r.Float64()*(high-low))
		w, h := int(math.RoundToEven(math.Sqrt(area*ratio))), int(math.RoundToEven(math.Sqrt(area/ratio)))
		if w > 0 && w <= width && h > 0 && h <= height {
			y := int(r.Int32N(int32(height - h + 1)))
			return Crop{X: int(r.Int32N(int32(width - w + 1))), Y: y, Width: w, Height: h}
		}
	}
	w, h := width, height // the middle, as much as the ratio allows
	switch ratio := float64(width) / float64(height); {
	case ratio < 3.0/4:
		h = max(1, int(math.RoundToEven(float64(width)/(3.0/4))))
	case ratio > 4.0/3:
		w = max(1, int(math.RoundToEven(float64(height)*(4.0/3))))
	}
	return Crop{X: (width - w) / 2, Y: (height - h) / 2, Width: w, Height: h}
}

// permutation is a shuffle of Fisher and Yates, from the last place down.
func permutation(n int, seed uint64, epoch int) []int {
	r := generator(seed, 1, epoch, 0)
	list := make([]int, n)
	for i := range list {
		list[i] = i
	}
	for i := n - 1; i > 0; i-- {
		j := int(r.Uint64N(uint64(i + 1)))
		list[i], list[j] = list[j], list[i]
	}
	return list
}

// buffered sends the samples through a buffer. Random ones leave it when the next one does not fit.
// If the archive is larger than the buffer, one also leaves for every two that enter.
func (m *Model) buffered(epoch int) (list []int) {
	r := generator(m.Seed, 1, epoch, 0)
	var held []int
	bytes := 0
	leave := func() {
		k := r.IntN(len(held))
		i := held[k]
		held[k] = held[len(held)-1]
		held = held[:len(held)-1]
		bytes -= m.Sizes[i]
		list = append(list, i)
	}
	for i := range m.Names {
		for len(held) > 0 && (len(held) >= m.Buffer || bytes+m.Sizes[i] > m.BufferBytes ||
			m.ArchiveBytes > m.BufferBytes && 2*len(held) > i) {
			leave()
		}
		held = append(held, i)
		bytes += m.Sizes[i]
	}
	for len(held) > 0 {
		leave()
	}
	return list
}

// drawn returns the sample of a weighted draw.
func (m *Model) drawn(epoch, position int) int {
	sums := make([]float64, len(m.Weights))
	sum := 0.0
	for i, w := range m.Weights {
		sum += w
		sums[i] = sum
	}
	x := generator(m.Seed, 3, epoch, position).Float64() * sum
	i := sort.Search(len(sums), func(i int) bool { return sums[i] > x })
	return min(i, len(sums)-1)
}

// Rest returns the positions that are left of rest (nil: of all positions of an epoch), after each
// rank has taken a number of whole batches.
func (m *Model) Rest(epoch int, rest []int, batches int) []int {
	if rest == nil {
		rest = m.positions()
	}
	taken := map[int]bool{} // places in rest
	for rank := range m.World {
		rows, _ := m.rows(epoch, rank, rest)
		for turn := range m.turnOf(rows, batches*m.Batch) {
			taken[rank+turn*m.World] = true
		}
	}
	left := []int{}
	for i, p := range rest {
		if !taken[i] {
			left = append(left, p)
		}
	}
	return left
}

// turnOf returns the number of turns in which a rank has got its first n rows, and the bad samples
// before the last of them.
func (m *Model) turnOf(rows []Row, n int) int {
	if n = min(n, len(rows)); n == 0 {
		return 0
	}
	return rows[n-1].turn + 1
}

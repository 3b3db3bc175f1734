package racecheck

import (
	"cmp"
	"slices"
)

// maxAccesses is the maximum number of accesses that a block remembers. It forgets the oldest
// first.
const maxAccesses = 64

// maxBlocks is the maximum number of blocks.
const maxBlocks = 1 << 20

// Shape describes a tensor, for reports.
type Shape struct {
	DType int32
	NDim  int32
	Sizes [6]int64 // the first NDim
}

// access is a read or write of memory that later accesses may have to be ordered after.
type access struct {
	region Region
	queue  Queue
	write  bool
	time   uint64
	place  *Place // nil: the allocation
	shape  Shape
}

// block is a piece of memory: a device allocation, or host memory that a device reads or writes.
// Blocks of a device do not overlap.
type block struct {
	device   int32
	begin    uintptr
	end      uintptr
	owner    Queue // the stream that allocated the memory; Host if unknown
	made     *Place
	shape    Shape
	accesses []access
	uses     []Queue // streams passed to RecordStream
	captured bool    // allocated in a capture: memory of a graph
	pinned   bool    // host memory that the program holds until Free
	serial   uint64  // distinguishes blocks at the same address
}

// trim removes accesses that precede every later launch, and the oldest accesses above the limit.
func (b *block) trim(known clock) (forgotten int) {
	if len(b.accesses) < maxAccesses {
		return 0
	}
	b.accesses = slices.DeleteFunc(b.accesses, func(a access) bool { return a.time <= known.at(a.queue) })
	if n := len(b.accesses) - maxAccesses + 1; n > 0 {
		b.accesses = slices.Delete(b.accesses, 0, n)
		return n
	}
	return 0
}

// space finds the blocks of one device by address. It keeps them sorted in short lists, so that an
// insertion moves few blocks.
type space struct {
	exact map[uintptr]*block // by first byte
	lists [][]*block
	count int
}

const maxList = 512

// list returns the index of the list for a block that starts at the address.
func (s *space) list(begin uintptr) int {
	i, found := slices.BinarySearchFunc(s.lists, begin,
		func(l []*block, at uintptr) int { return cmp.Compare(l[0].begin, at) })
	if !found && i > 0 {
		i--
	}
	return i
}

func within(l []*block, begin uintptr) (int, bool) {
	return slices.BinarySearchFunc(l, begin, func(b *block, at uintptr) int { return cmp.Compare(b.begin, at) })
}

func (s *space) add(b *block) {
	if s.exact == nil {
		s.exact = map[uintptr]*block{}
	}
	s.exact[b.begin] = b
	s.count++
	if len(s.lists) == 0 {
		s.lists = [][]*block{{b}}
		return
	}
	i := s.list(b.begin)
	at, _ := within(s.lists[i], b.begin)
	l := slices.Insert(s.lists[i], at, b)
	s.lists[i] = l
	if len(l) > maxList {
		half := len(l) / 2
		s.lists[i] = slices.Clip(l[:half])
		s.lists = slices.Insert(s.lists, i+1, slices.Clone(l[half:]))
	}
}

func (s *space) remove(b *block) {
	if s.exact[b.begin] != b {
		return
	}
	delete(s.exact, b.begin)
	s.count--
	i := s.list(b.begin)
	at, _ := within(s.lists[i], b.begin)
	if s.lists[i] = slices.Delete(s.lists[i], at, at+1); len(s.lists[i]) == 0 {
		s.lists = slices.Delete(s.lists, i, i+1)
	}
}

// find returns a block that shares a byte with [begin, end), or nil.
func (s *space) find(begin, end uintptr) *block {
	if b := s.exact[begin]; b != nil {
		return b
	}
	if len(s.lists) == 0 {
		return nil
	}
	i := s.list(begin)
	at, _ := within(s.lists[i], begin)
	if at > 0 && s.lists[i][at-1].end > begin {
		return s.lists[i][at-1]
	}
	if at == len(s.lists[i]) {
		if i++; i == len(s.lists) {
			return nil
		}
		at = 0
	}
	if b := s.lists[i][at]; b.begin < end {
		return b
	}
	return nil
}

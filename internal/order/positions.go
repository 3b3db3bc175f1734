package order

import (
	"math"
	"sort"
)

// Unknown stands for a number of positions that is known only at the end of the archive.
const Unknown = math.MaxInt

// Positions is a set of positions of an epoch. The zero value is empty.
type Positions struct {
	Next  int   // all positions before Next are in the set
	Ahead []int // further positions in the set: few, ascending, all greater than Next
}

// Len returns the size of the set.
func (s *Positions) Len() int { return s.Next + len(s.Ahead) }

// Without returns the j-th position, from 0, that is not in the set.
func (s *Positions) Without(j int) int {
	k := sort.Search(len(s.Ahead), func(k int) bool { return s.Ahead[k]-s.Next-k > j })
	return s.Next + j + k
}

// Rank returns the number of positions before p that are not in the set, and whether p is in the
// set. The number is 0 if p is before Next.
func (s *Positions) Rank(p int) (j int, in bool) {
	if p < s.Next {
		return 0, true
	}
	k := sort.SearchInts(s.Ahead, p)
	return p - s.Next - k, k < len(s.Ahead) && s.Ahead[k] == p
}

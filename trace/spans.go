package trace

import (
	"cmp"
	"slices"
	"time"
)

// span is the half-open time interval from start up to, but excluding, end. A span that ends at or
// before its start is empty.
type span struct{ start, end time.Duration }

func (s span) duration() time.Duration { return max(0, s.end-s.start) }

// spans are sorted, disjoint, non-adjacent and non-empty. nil is the empty set.
type spans []span

// union returns the time that at least one span of the list covers. It reorders the list.
func union(list []span) spans {
	slices.SortFunc(list, func(a, b span) int { return cmp.Compare(a.start, b.start) })
	var out spans
	for _, s := range list {
		switch n := len(out); {
		case s.end <= s.start:
		case n > 0 && s.start <= out[n-1].end:
			out[n-1].end = max(out[n-1].end, s.end)
		default:
			out = append(out, s)
		}
	}
	return out
}

func (a spans) total() time.Duration {
	var sum time.Duration
	for _, s := range a {
		sum += s.end - s.start
	}
	return sum
}

// and returns the intersection of a and b.
func (a spans) and(b spans) spans {
	var out spans
	for len(a) > 0 && len(b) > 0 {
		if both := (span{max(a[0].start, b[0].start), min(a[0].end, b[0].end)}); both.end > both.start {
			out = append(out, both)
		}
		if a[0].end < b[0].end {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return out
}

// without returns the time in a that is not in b.
func (a spans) without(b spans) spans {
	var out spans
	for _, s := range a {
		for len(b) > 0 && b[0].end <= s.start {
			b = b[1:]
		}
		for _, cut := range b {
			if cut.start >= s.end {
				break
			}
			if cut.start > s.start {
				out = append(out, span{s.start, cut.start})
			}
			s.start = cut.end
		}
		if s.end > s.start {
			out = append(out, s)
		}
	}
	return out
}

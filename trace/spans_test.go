package trace

import (
	"slices"
	"testing"
	"time"
)

func TestSpans(t *testing.T) {
	for _, c := range []struct {
		name             string
		a, b             []span
		or, and, without spans
	}{
		{"nothing", nil, nil, nil, nil, nil},
		{"empty spans have no time", []span{{3, 3}, {5, 4}}, []span{{0, 9}}, spans{{0, 9}}, nil, nil},
		{"apart", []span{{0, 2}}, []span{{4, 6}}, spans{{0, 2}, {4, 6}}, nil, spans{{0, 2}}},
		{"touching", []span{{0, 2}}, []span{{2, 6}}, spans{{0, 6}}, nil, spans{{0, 2}}},
		{"crossing", []span{{0, 4}}, []span{{2, 6}}, spans{{0, 6}}, spans{{2, 4}}, spans{{0, 2}}},
		{"within", []span{{0, 9}}, []span{{2, 3}, {5, 6}}, spans{{0, 9}}, spans{{2, 3}, {5, 6}},
			spans{{0, 2}, {3, 5}, {6, 9}}},
		{"covered", []span{{2, 3}, {5, 6}}, []span{{0, 9}}, spans{{0, 9}}, spans{{2, 3}, {5, 6}}, nil},
		{"one cut over two", []span{{0, 3}, {5, 8}}, []span{{2, 6}}, spans{{0, 8}}, spans{{2, 3}, {5, 6}},
			spans{{0, 2}, {6, 8}}},
		{"out of order and double", []span{{5, 8}, {0, 3}, {0, 3}, {1, 2}}, []span{{0, 1}},
			spans{{0, 3}, {5, 8}}, spans{{0, 1}}, spans{{1, 3}, {5, 8}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := union(slices.Clone(c.a)), union(slices.Clone(c.b))
			if got := union(slices.Concat(c.a, c.b)); !slices.Equal(got, c.or) {
				t.Errorf("union: %v, want %v", got, c.or)
			}
			if got := a.and(b); !slices.Equal(got, c.and) {
				t.Errorf("and: %v, want %v", got, c.and)
			}
			if got := a.without(b); !slices.Equal(got, c.without) {
				t.Errorf("without: %v, want %v", got, c.without)
			}
		})
	}
}

// FuzzSpans compares the set operations with sets of 256 instants. Two bytes make a span; the first
// half of the input is a, the second half is b.
func FuzzSpans(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 4, 2, 6})
	f.Add([]byte{1, 1, 9, 3, 0, 255, 5, 6, 6, 7, 8, 9, 9, 10, 0, 0})
	type instants [256]bool
	parse := func(data []byte) (list []span, set instants) {
		for ; len(data) >= 2; data = data[2:] {
			s := span{time.Duration(data[0]), time.Duration(data[1])}
			list = append(list, s)
			for i := s.start; i < s.end; i++ {
				set[i] = true
			}
		}
		return list, set
	}
	check := func(t *testing.T, name string, got spans, want func(i int) bool) {
		t.Helper()
		var set instants
		total := 0
		for n, s := range got {
			if s.end <= s.start || n > 0 && s.start <= got[n-1].end {
				t.Errorf("%s: %v is not in order, or has an empty or a touching span", name, got)
			}
			for i := s.start; i < s.end; i++ {
				set[i] = true
			}
		}
		for i, in := range set {
			if in != want(i) {
				t.Fatalf("%s: %v: instant %d is %v, want %v", name, got, i, in, want(i))
			}
			if in {
				total++
			}
		}
		if got.total() != time.Duration(total) {
			t.Errorf("%s: total of %v is %d, want %d", name, got, got.total(), total)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		half := len(data) / 4 * 2
		listA, inA := parse(data[:half])
		listB, inB := parse(data[half:])
		a, b := union(slices.Clone(listA)), union(slices.Clone(listB))
		keepA, keepB := slices.Clone(a), slices.Clone(b)
		check(t, "a", a, func(i int) bool { return inA[i] })
		check(t, "a or b", union(slices.Concat(listA, listB)), func(i int) bool { return inA[i] || inB[i] })
		check(t, "a and b", a.and(b), func(i int) bool { return inA[i] && inB[i] })
		check(t, "a without b", a.without(b), func(i int) bool { return inA[i] && !inB[i] })
		if !slices.Equal(a, keepA) || !slices.Equal(b, keepB) {
			t.Errorf("the operands became %v and %v, want %v and %v as before", a, b, keepA, keepB)
		}
	})
}

package cuda

import (
	"testing"
)

// Ranges and marks work on any goroutine, and a range may end elsewhere and more than once. Without
// a listener they allocate nothing.
func TestRangeEndsAnywhere(t *testing.T) {
	end := Range("a range")
	done := make(chan struct{})
	go func() { defer close(done); end(); end() }()
	<-done
	Mark("a mark")
	if n := testing.AllocsPerRun(100, func() { Range("no listener")(); Mark("no listener") }); n != 0 {
		t.Errorf("%v allocations per range, want 0", n)
	}
}

func BenchmarkRange(b *testing.B) {
	for b.Loop() {
		Range("no listener")()
	}
}

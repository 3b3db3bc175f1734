package cuda

import "testing"

// Ranges and marks can be made anywhere and ended elsewhere, more than once; while nobody listens
// they make no garbage.
func TestRange(t *testing.T) {
	end := Range("a range")
	done := make(chan struct{})
	go func() { defer close(done); end(); end() }()
	<-done
	Mark("a mark")
	if n := testing.AllocsPerRun(100, func() { Range("nobody listens")(); Mark("nobody listens") }); n != 0 {
		t.Errorf("%v allocations a range", n)
	}
}

func BenchmarkRange(b *testing.B) {
	for b.Loop() {
		Range("nobody listens")()
	}
}

package devplan

import "testing"

// Numbers of 10 and 30 bytes have a mean of 20, and a standard deviation of 10.
func TestBatchHasRoomForFourDeviations(t *testing.T) {
	var s spread
	for range 50 {
		s.add(10)
		s.add(30)
	}
	if got, want := s.ofBatch(1<<20), 20<<20+4*10<<10; got != want {
		t.Errorf("a batch has %d bytes, want %d", got, want)
	}
}

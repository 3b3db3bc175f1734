package cudatest

import (
	"testing"

	"github.com/torchstream/torchstream/cuda"
)

// Stream returns an exclusive stream on the device for this test, with no work on it. When the test
// ends, Stream's cleanup waits for the stream's work, fails the test if the work failed, and closes
// the stream. To make it the current stream, use [cuda.WithStream].
func Stream(t testing.TB, d cuda.Device) cuda.Stream {
	t.Helper()
	s, err := cuda.NewOwnedStream(d, cuda.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Synchronize(); err != nil {
			t.Errorf("work on the test's stream %v failed: %v", s.Stream, err)
		}
		if err := s.Close(); err != nil {
			t.Errorf("closing the test's stream: %v", err)
		}
	})
	return s.Stream
}

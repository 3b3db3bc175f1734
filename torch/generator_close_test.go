package torch

import (
	"errors"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
)

// A call may wait for the end of a capture whose function uses the same generator. So Close waits
// for no call, and does not make later calls wait: the last call frees the generator.
func TestGeneratorCloseDoesNotWaitForCalls(t *testing.T) {
	g, err := NewGenerator(cuda.CPU, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.acquire(); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error)
	go func() { closed <- errors.Join(g.Close(), g.Close()) }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Close has not returned after 10 s, want it not to wait for a call")
	}
	if _, err := g.acquire(); !errors.Is(err, ErrClosed) {
		t.Errorf("a call after Close: %v, want ErrClosed", err)
	}
	if g.c == nil {
		t.Error("the generator was freed during a call, want it kept until the call's end")
	}
	g.release()
	if g.c != nil {
		t.Error("the generator is not freed after the last call, want it freed")
	}
}

package main

import (
	"testing"
	"time"
)

// TestSimulate runs seeds that nobody has run before. go run ./internal/simworld -seed N repeats
// one that fails.
func TestSimulate(t *testing.T) {
	r := runner{out: t.Output(), jobs: 2}
	seeds := uint64(4000)
	if testing.Short() {
		seeds = 400
	}
	if err := r.run(uint64(time.Now().UnixMicro()), seeds, nil); err != nil {
		t.Error(err)
	}
}

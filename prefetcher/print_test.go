package prefetcher

import (
	"fmt"
	"testing"
	"time"
)

func TestStrings(t *testing.T) {
	for _, c := range []struct {
		value fmt.Stringer
		want  string
	}{
		{(*Prefetcher)(nil), "no prefetcher"},
		{&Prefetcher{device: 1, slots: &slots{layout: layout{batch: 256}, depth: 2}},
			"prefetcher on cuda:1 with 2 slots of 256 samples"},
		{(*Batch)(nil), "no batch"},
		{&Batch{N: 256, Epoch: 0, Index: 3, Slot: 1}, "batch 3 of epoch 0: 256 samples in slot 1"},
		{Stats{Batches: 40, Images: 10240, Bytes: 1470 << 20, CopyTime: 31 * time.Millisecond, HostWait: time.Second},
			"40 batches of 10240 samples, 1470 MiB copied in 31ms, consumer waited 0s, loop 1s, source 0s"},
	} {
		if got := fmt.Sprint(c.value); got != c.want {
			t.Errorf("%T: got %q, want %q", c.value, got, c.want)
		}
	}
}

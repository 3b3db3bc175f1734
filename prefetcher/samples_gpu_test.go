//go:build linux

package prefetcher

import (
	"slices"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// On a GPU functions write pinned memory, and the tensors on the device have their samples in the
// order of an epoch without a GPU.
func TestGPUSamplesReachTheDevice(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	nothingLeft(t, func() {
		o := SamplesOptions{BatchSize: 64, Shuffle: true, Seed: 2, Workers: 4}
		want := slices.Concat(rowsOf(t, mustEpoch(t, table(t, 5000, o, nil), 3))...)
		feed, err := New(table(t, 5000, o, nil), Options{Depth: 3})
		if err != nil {
			t.Fatal(err)
		}
		defer feed.Close()
		var got []int
		for b, err := range feed.Epoch(t.Context(), 3) {
			if err != nil {
				t.Fatal(err)
			}
			values, err := b.Tensors()[0].Select(1, 2).ToDType(torch.Int64).Int64s()
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range values {
				got = append(got, int(v))
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("the device has %d samples in another order than the host's %d", len(got), len(want))
		}
	})
}

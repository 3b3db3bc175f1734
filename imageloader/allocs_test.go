package imageloader

import (
	"context"
	"fmt"
	"runtime"
	"testing"
)

// TestAllocations: once an epoch was seen, another one takes memory from Go's heap for its batches and for itself, not for its images.
func TestAllocations(t *testing.T) {
	const images, batch = 512, 64
	var photos [16][]byte
	for i := range photos {
		photos[i] = photo(t, uint64(i))
	}
	var members []tarMember
	for i := range images {
		members = append(members, tarMember{name: fmt.Sprintf("train/class%d/%d.jpg", i%4, i), data: string(photos[i%len(photos)])})
	}
	packed := tarBytes(t, members...)
	for _, c := range []struct {
		name string
		file string
		data []byte
		o    Options
	}{
		{"tar", "a.tar", packed, Options{Shuffle: true}},
		{"tgz by its index", "a.tgz", gzipBytes(t, packed), Options{Shuffle: true, ShuffleBytes: 1 << 20}},
		{"tgz in memory", "a.tgz", gzipBytes(t, packed), Options{Shuffle: true}},
		{"tgz as a stream", "a.tgz", gzipBytes(t, packed), Options{Shuffle: true, ShuffleBytes: 1 << 20, NoIndex: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.o.BatchSize, c.o.Transform, c.o.Workers = batch, Train(224), 2
			l, err := Open(writeFile(t, c.file, c.data), c.o)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			epoch := func(epoch int) (mallocs uint64) {
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				n := 0
				for batch, err := range l.Epoch(context.Background(), epoch) {
					if err != nil {
						t.Fatal(err)
					}
					n += batch.N
				}
				runtime.ReadMemStats(&after)
				if n != images {
					t.Fatalf("%d images, want %d", n, images)
				}
				return after.Mallocs - before.Mallocs
			}
			epoch(0)
			epoch(1)
			const perBatch, perEpoch = 16, 300 // below one for each image together
			if n := epoch(2); n > perBatch*images/batch+perEpoch {
				t.Errorf("%d pieces of memory for %d images in %d batches, want at most %d a batch and %d for the epoch", n, images, images/batch, perBatch, perEpoch)
			} else {
				t.Logf("%d pieces of memory for %d images", n, images)
			}
		})
	}
}

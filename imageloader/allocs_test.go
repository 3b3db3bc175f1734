package imageloader

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// TestEpochsAllocateNothingForImages: from the second epoch on, an epoch allocates on Go's heap for
// its batches and its own bookkeeping, not for its images.
func TestEpochsAllocateNothingForImages(t *testing.T) {
	const images, batch = 512, 64
	var photos [16][]byte
	for i := range photos {
		photos[i] = archivetest.Photo(t, uint64(i))
	}
	var members []archivetest.Member
	for i := range images {
		members = append(members, archivetest.Member{Name: fmt.Sprintf("train/class%d/%d.jpg", i%4, i),
			Data: string(photos[i%len(photos)])})
	}
	packed := archivetest.Tar(t, members...)
	zipped := archivetest.Gzip(t, packed)
	for _, c := range []struct {
		name string
		file string
		data []byte
		o    Options
	}{
		{"tar", "a.tar", packed, Options{Shuffle: true}},
		{"tgz by its index", "a.tgz", zipped, Options{Shuffle: true, ShuffleBytes: 1 << 20}},
		{"tgz in memory", "a.tgz", zipped, Options{Shuffle: true}},
		{"tgz as a stream", "a.tgz", zipped, Options{Shuffle: true, ShuffleBytes: 1 << 20, NoIndex: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.o.BatchSize, c.o.Transform, c.o.Workers = batch, Train(224), 2
			l, err := Open(archivetest.WriteFile(t, c.file, c.data), c.o)
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
			const perBatch, perEpoch = 16, 300 // together below one for each image
			if n := epoch(2); n > perBatch*images/batch+perEpoch {
				t.Errorf("%d allocations for %d images in %d batches, want at most %d a batch and %d for "+
					"the epoch", n, images, images/batch, perBatch, perEpoch)
			} else {
				t.Logf("%d allocations for %d images", n, images)
			}
		})
	}
}

// TestEpochsReuseSlots: an epoch reuses the memory of the epoch before, except for the batch that
// was current when the consumer left the loop.
func TestEpochsReuseSlots(t *testing.T) {
	photos := [2]string{string(archivetest.Photo(t, 1)), string(archivetest.Photo(t, 2))}
	var members []archivetest.Member
	for i := range 16 {
		members = append(members, archivetest.Member{Name: fmt.Sprintf("train/class%d/%d.jpg", i%2, i),
			Data: photos[i%2]})
	}
	l, err := Open(archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...)),
		Options{BatchSize: 2, Transform: Train(32)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	seen := map[*byte]bool{}
	var kept *Batch
	var was []byte
	for epoch := range 4 {
		for batch, err := range l.Epoch(context.Background(), epoch) {
			if err != nil {
				t.Fatal(err)
			}
			if kept != nil && &batch.Images[0] == &kept.Images[0] {
				t.Fatalf("epoch %d reuses the memory of a kept batch, want other memory", epoch)
			}
			seen[&batch.Images[0]] = true
			if epoch == 1 {
				kept, was = batch, bytes.Clone(batch.Images)
				break
			}
		}
	}
	if !bytes.Equal(kept.Images, was) {
		t.Errorf("a kept batch has changed: %s; want the bytes it had",
			archivetest.Difference(kept.Images, was))
	}
	if len(seen) > hostSlots+1 {
		t.Errorf("%d slots for batches, want %d and one that was kept", len(seen), hostSlots)
	}
}

package imagefeed

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/prefetcher"
)

const photos = "../examples/data/photos-test.tgz"

// A feed has the batches of its loader.
func TestFeedHasTheBatchesOfTheArchive(t *testing.T) {
	o := imageloader.Options{BatchSize: 50, Transform: imageloader.Eval(40, 32), NoIndex: true}
	loader, err := imageloader.Open(photos, o)
	if err != nil {
		t.Fatal(err)
	}
	defer loader.Close()
	var want []int64
	for b, err := range loader.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, b.Labels...)
	}
	feed, err := Open(t.Context(), photos, Options{Loader: o, Prefetcher: prefetcher.Options{Device: cuda.CPU}})
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for b, err := range feed.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		if err := feed.Close(); !errors.Is(err, prefetcher.ErrRunning) {
			t.Errorf("Close during an epoch: got %v, want ErrRunning", err)
		}
		labels, err := b.Labels.Int64s()
		if err != nil {
			t.Fatal(err)
		}
		for i, l := range labels {
			if l != want[rows+i] {
				t.Fatalf("label %d is %d, want %d", rows+i, l, want[rows+i])
			}
		}
		rows += b.N
	}
	if rows != len(want) || len(feed.Loader.Classes()) != len(loader.Classes()) {
		t.Errorf("%d rows, %d classes, want %d, %d", rows, len(feed.Loader.Classes()), len(want), len(loader.Classes()))
	}
	if err := feed.Close(); err != nil {
		t.Error(err)
	}
	if err := feed.Loader.Restore(t.Context()); !errors.Is(err, imageloader.ErrClosed) {
		t.Errorf("the loader after Close: got %v, want ErrClosed", err)
	}
}

func TestOpenFailsAsItsPartsDo(t *testing.T) {
	if _, err := Open(t.Context(), "none.tgz", Options{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v, want fs.ErrNotExist", err)
	}
	o := Options{Loader: imageloader.Options{NoIndex: true}, Prefetcher: prefetcher.Options{Device: cuda.CPU, Depth: -1}}
	if _, err := Open(t.Context(), photos, o); err == nil {
		t.Error("Depth -1: got no error, want one")
	}
}

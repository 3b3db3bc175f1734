package imagefeed

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
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
	var names []string
	var places []int
	for b, err := range loader.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, b.Labels...)
		for _, s := range b.Samples {
			names = append(names, s.Name)
		}
		places = append(places, b.State.Batches())
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
		if len(b.Info.Samples) != b.N || b.Info.State.Batches() != places[b.Index] {
			t.Fatalf("%v: got %d samples and the place %d, want %d, %d", b, len(b.Info.Samples), b.Info.State.Batches(),
				b.N, places[b.Index])
		}
		for i, l := range labels {
			if s := b.Info.Samples[i]; l != want[rows+i] || s.Name != names[rows+i] {
				t.Fatalf("row %d is %s with the label %d, want %s, %d", rows+i, s.Name, l, names[rows+i], want[rows+i])
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

// An error of the source, such as an ended context, is the last pair of the epoch.
func TestEpochEndsWithTheErrorOfTheSource(t *testing.T) {
	feed, err := Open(t.Context(), photos, Options{
		Loader:     imageloader.Options{BatchSize: 8, Transform: imageloader.Eval(40, 32), NoIndex: true},
		Prefetcher: prefetcher.Options{Device: cuda.CPU}})
	if err != nil {
		t.Fatal(err)
	}
	defer feed.Close()
	ended, end := context.WithCancelCause(t.Context())
	defer end(nil)
	reason := errors.New("enough")
	var last error
	batches := 0
	for b, err := range feed.Epoch(ended, 0) {
		if last = err; err != nil {
			if b != nil {
				t.Errorf("got %v with the error, want no batch", b)
			}
			continue
		}
		batches++
		end(reason)
	}
	if batches == 0 || !errors.Is(last, reason) {
		t.Errorf("got %d batches, then %v, want one or more, then %v", batches, last, reason)
	}
	for b := range feed.Epoch(t.Context(), 0) { // leaving the loop ends the epoch
		if b == nil {
			t.Error("got no batch after an ended epoch, want one")
		}
		break
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

// Several devices of one process share a pass over an archive: each has a feed, as a rank of the
// devices. Their rows in turn are the rows of one feed.
func TestFeedsOfOneProcessDealAnEpoch(t *testing.T) {
	const devices, batch = 2, 8
	options := imageloader.Options{BatchSize: batch, Transform: imageloader.Train(32), Shuffle: true, Seed: 5, NoIndex: true}
	rows := func(o imageloader.Options) (list []string) {
		feed, err := Open(t.Context(), photos, Options{Loader: o, Prefetcher: prefetcher.Options{Device: cuda.CPU}})
		if err != nil {
			t.Error(err)
			return nil
		}
		defer func() {
			if err := feed.Close(); err != nil {
				t.Error(err)
			}
		}()
		for b, err := range feed.Epoch(t.Context(), 0) {
			if err != nil {
				t.Error(err)
				return nil
			}
			pixels, err := b.Images.Contiguous(torch.Contiguous).Bytes()
			if err != nil {
				t.Error(err)
				return nil
			}
			for i, s := range b.Info.Samples {
				size := len(pixels) / b.N
				list = append(list, fmt.Sprintf("%s %x", s.Name, sha256.Sum256(pixels[i*size:(i+1)*size])))
			}
		}
		return list
	}
	want := rows(options)
	parts := make([][]string, devices)
	var running sync.WaitGroup
	for device := range devices {
		o := options
		o.Rank, o.World, o.ShareOnHost = device, devices, true
		running.Go(func() { parts[device] = rows(o) })
	}
	running.Wait()
	if got, least := len(parts[0])+len(parts[1]), len(want); got < least || len(parts[0]) != len(parts[1]) {
		t.Fatalf("the devices got %d and %d rows, want the same number, and %d together", len(parts[0]), len(parts[1]), least)
	}
	for i, row := range want {
		if got := parts[i%devices][i/devices]; got != row {
			t.Fatalf("row %d: device %d has %s, want %s", i, i%devices, got, row)
		}
	}
}

package prefetcher

import (
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
)

// sameEpochs compares the epochs of two prefetchers, from first to last, and ends one of the second
// early.
func sameEpochs(t *testing.T, host, device *Prefetcher, first, last int) {
	t.Helper()
	for epoch := first; epoch <= last; epoch++ {
		if epoch == first+1 {
			for b, err := range device.Epoch(t.Context(), epoch) {
				if err != nil {
					t.Fatal(err)
				}
				if b.Index == 1 {
					break
				}
			}
		}
		want, wantLabels := epochValues(t, host, epoch)
		got, gotLabels := epochValues(t, device, epoch)
		if len(got) != len(want) {
			t.Fatalf("epoch %d has %d batches, want %d", epoch, len(got), len(want))
		}
		for i := range want {
			if !slices.Equal(got[i], want[i]) || !slices.Equal(gotLabels[i], wantLabels[i]) {
				t.Errorf("batch %d of epoch %d is another one", i, epoch)
			}
		}
	}
}

// TestCPUDecodeInflates: the members of a .tgz that the device inflates give the host's batches.
func TestCPUDecodeInflates(t *testing.T) { decodeInflates(t, inflatingOnCPU) }

func TestGPUDecodeInflates(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeInflates(t, inflatingOnGPU)
}

// inflatingOnGPU is a decoderFeed whose device inflates, too.
func inflatingOnGPU(t *testing.T, source Source) *Prefetcher {
	t.Helper()
	p, err := open(source, Options{Decode: Device}, func(device ringDevice) ringDevice {
		d := device.(*gpuDevice)
		d.decode.inflate(int(d.batch))
		return d
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// memberOptions keeps no archive in memory, so that every epoch reads it.
func memberOptions(policy imageloader.BadSamplePolicy, trust bool) imageloader.Options {
	return imageloader.Options{Transform: imageloader.Train(64), BadSamples: policy, TrustIndex: trust, ShuffleBytes: 1 << 16}
}

func decodeInflates(t *testing.T, decoder decoderFeed) {
	path := decodeArchiveOf(t, 60, "set.tgz")
	for _, test := range []struct {
		name   string
		policy imageloader.BadSamplePolicy
		trust  bool
	}{{"skip", imageloader.Skip, false}, {"substitute, trusted index", imageloader.Substitute, true}} {
		t.Run(test.name, func(t *testing.T) {
			o := memberOptions(test.policy, test.trust)
			plain, l := newLoader(t, path, o), newLoader(t, path, o)
			nothingLeft(t, func() {
				host, device := newFeed(t, plain, Options{}), decoder(t, l)
				// The first epoch finds the entry points, the second the heads of files.
				sameEpochs(t, host, device, 0, 3)
				if st, n := device.Stats(), device.slots.decode.inflates.Load(); n < 60 || st.DecodedAgain != 0 {
					t.Errorf("%d members are inflated, %d images decoded again", n, st.DecodedAgain)
				}
				closeFeed(t, host)
				closeFeed(t, device)
			})
		})
	}
}

// TestCPUDecodeHandsDamagedMembersBack: images whose compressed members are damaged on their way to
// the device are decoded again, and disturb no neighbour.
func TestCPUDecodeHandsDamagedMembersBack(t *testing.T) {
	decodeHandsDamagedMembersBack(t, inflatingOnCPU)
}

func TestGPUDecodeHandsDamagedMembersBack(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeHandsDamagedMembersBack(t, inflatingOnGPU)
}

func decodeHandsDamagedMembersBack(t *testing.T, decoder decoderFeed) {
	path := decodeArchiveOf(t, 60, "set.tgz")
	o := memberOptions(imageloader.Skip, false)
	plain, l := newLoader(t, path, o), newLoader(t, path, o)
	source := &corruptingSource{Loader: l, rng: rand.New(rand.NewPCG(3, 4)), rows: func(batch, row int) bool { return row%3 == batch%3 }}
	nothingLeft(t, func() {
		host, device := newFeed(t, plain, Options{}), decoder(t, source)
		sameEpochs(t, host, device, 0, 3)
		if st := device.Stats(); source.members < 10 || st.DecodedAgain < int64(source.members) {
			t.Errorf("%d members are damaged, and %d images decoded again", source.members, st.DecodedAgain)
		}
		closeFeed(t, host)
		closeFeed(t, device)
	})
}

// TestCPUDecodeFindsAChangedArchive: members that change in place, with the archive's size and
// time, end the epoch with an error as on the host, and no batch has other bytes before that.
func TestCPUDecodeFindsAChangedArchive(t *testing.T) {
	path := decodeArchiveOf(t, 60, "set.tgz")
	o := memberOptions(imageloader.Skip, false)
	l := newLoader(t, path, o)
	plain := newLoader(t, path, o)
	host, device := newFeed(t, plain, Options{}), inflatingOnCPU(t, l)
	sameEpochs(t, host, device, 0, 2)
	want, _ := epochValues(t, host, 3)
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := len(data) / 3; i < len(data)*2/3; i += 5000 {
		data[i] ^= 0x55
	}
	// In place: the loader has the file open.
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, before.ModTime(), before.ModTime()); err != nil {
		t.Fatal(err)
	}
	seen := 0
	var last error
	for b, err := range device.Epoch(t.Context(), 3) {
		if last = err; err != nil {
			break
		}
		v, err := b.Images.Float32s()
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(v, want[seen]) {
			t.Errorf("batch %d has other images", seen)
		}
		seen++
	}
	if last == nil || seen == len(want) {
		t.Errorf("%d batches of %d, then %v", seen, len(want), last)
	}
	closeFeed(t, host)
	closeFeed(t, device)
}

//go:build linux

package prefetcher

import (
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// sameEpochs compares the epochs first to last of two prefetchers. It also leaves one epoch of the
// second prefetcher early.
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
				t.Errorf("batch %d of epoch %d has other images or labels, want the host's", i, epoch)
			}
		}
	}
}

// TestCPUDecodeInflates: the members of a .tgz that the device inflates give the host's batches.
func TestCPUDecodeInflates(t *testing.T) { decodeInflates(t, onCPU) }

func TestGPUDecodeInflates(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeInflates(t, onGPU)
}

// memberOptions returns options that keep no archive in memory, so that every epoch reads it.
func memberOptions(policy imageloader.BadSamplePolicy, trust bool) imageloader.Options {
	return imageloader.Options{Transform: imageloader.Train(64), BadSamples: policy, TrustIndex: trust,
		ShuffleBytes: 1 << 16}
}

func decodeInflates(t *testing.T, decoder decoderFeed) {
	path := decodeArchiveOf(t, 60, "set.tgz")
	for _, test := range []struct {
		name   string
		policy imageloader.BadSamplePolicy
		trust  bool
		ops    []transform.Op
	}{
		{"skip", imageloader.Skip, false, nil}, {"substitute, trusted index", imageloader.Substitute, true, nil},
		{"operations", imageloader.Skip, false, deviceOps},
		{"operations of both", imageloader.Substitute, true, mixedOps},
	} {
		t.Run(test.name, func(t *testing.T) {
			if testing.Short() && test.name != "operations of both" {
				t.Skip("its goroutines are those of the other rows")
			}
			o := memberOptions(test.policy, test.trust)
			o.Transform.Ops = test.ops
			plain, l := newLoader(t, path, o), newLoader(t, path, o)
			nothingLeft(t, func() {
				host, device := newFeed(t, plain, Options{}), decoder(t, l)
				// The first epoch finds the entry points and the files' headers.
				sameEpochs(t, host, device, 0, 3)
				min, max := int64(120), int64(4*60)
				if test.name == "operations of both" {
					min, max = 3*20, 3*48
				}
				// In the first epoch, the device searched the other images for entry points. In
				// every epoch it searches small ones.
				if st := device.Stats(); st.Inflated < min || st.Inflated > max ||
					st.Decoded-st.Inflated > 60+5*6 || st.DecodedAgain != 0 {
					t.Errorf("%d members of %d images are inflated, %d images decoded again, want "+
						"st.Inflated from %v to %v, st.Decoded - st.Inflated at most %v, st.DecodedAgain = 0",
						st.Inflated, st.Decoded, st.DecodedAgain, min, max, 60+5*6)
				}
				closeFeed(t, host)
				closeFeed(t, device)
				l.Close() // it pins the archive for the device
			})
		})
	}
}

// TestCPUDecodeHandsDamagedMembersBack: images whose compressed members are damaged on their way to
// the device are decoded again, and disturb no neighbour.
func TestCPUDecodeHandsDamagedMembersBack(t *testing.T) {
	decodeHandsDamagedMembersBack(t, onCPU)
}

func TestGPUDecodeHandsDamagedMembersBack(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeHandsDamagedMembersBack(t, onGPU)
}

func decodeHandsDamagedMembersBack(t *testing.T, decoder decoderFeed) {
	path := decodeArchiveOf(t, 60, "set.tgz")
	if !testing.Short() { // its goroutines are those of the other case
		t.Run("plain", func(t *testing.T) { decodeHandsMembersOfBack(t, decoder, path, nil) })
	}
	t.Run("operations", func(t *testing.T) { decodeHandsMembersOfBack(t, decoder, path, deviceOps) })
}

func decodeHandsMembersOfBack(t *testing.T, decoder decoderFeed, path string, ops []transform.Op) {
	o := memberOptions(imageloader.Skip, false)
	o.Transform.Ops = ops
	plain, l := newLoader(t, path, o), newLoader(t, path, o)
	source := &corruptingSource{Loader: l, rng: rand.New(rand.NewPCG(3, 4)),
		rows: func(batch, row int) bool { return row%3 == batch%3 }}
	nothingLeft(t, func() {
		host, device := newFeed(t, plain, Options{}), decoder(t, source)
		sameEpochs(t, host, device, 0, 3)
		st := device.Stats()
		if source.members < 10 || st.DecodedAgain < int64(source.members) {
			t.Errorf("%d members are damaged, and %d images decoded again", source.members, st.DecodedAgain)
		}
		if st.Inflated >= st.Decoded {
			t.Errorf("%d of %d images are inflated: the device is given what it handed back", st.Inflated, st.Decoded)
		}
		closeFeed(t, host)
		closeFeed(t, device)
		l.Close() // it pins the archive for the device
	})
}

// TestCPUDecodeFindsAChangedArchive: members change in place while the archive keeps its size and
// time. The epoch ends with an error as on the host, and no batch before the error has wrong bytes.
func TestCPUDecodeFindsAChangedArchive(t *testing.T) {
	path := decodeArchiveOf(t, 60, "set.tgz")
	o := memberOptions(imageloader.Skip, false)
	l := newLoader(t, path, o)
	plain := newLoader(t, path, o)
	host, device := newFeed(t, plain, Options{}), onCPU(t, l)
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
	// In place, because the loader has the file open.
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
			t.Errorf("batch %d has other images, want those of the uninterrupted epoch", seen)
		}
		seen++
	}
	if last == nil || seen == len(want) {
		t.Errorf("%d batches of %d, then %v, want last not nil, seen not %v",
			seen, len(want), last, len(want))
	}
	closeFeed(t, host)
	closeFeed(t, device)
}

// TestSanitizerOfInflatedMembers: the stream sanitizer finds nothing when the device inflates. On
// devices that compute nothing, nearly every member has a wrong checksum, and the host decodes it
// again. Such devices find no entry points either, so the host finds them.
func TestSanitizerOfInflatedMembers(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for _, name := range []string{"set.tgz", "deflated.zip"} {
		t.Run(name, func(t *testing.T) { sanitizeInflatedMembers(t, decodeArchiveOf(t, 60, name)) })
	}
}

func sanitizeInflatedMembers(t *testing.T, path string) {
	l := newLoader(t, path, memberOptions(imageloader.Skip, false))
	cudatest.NoFindings(t)
	for _, err := range l.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
	}
	p := onGPU(t, l)
	for epoch := range 4 {
		for b, err := range p.Epoch(t.Context(), epoch) {
			if err != nil {
				t.Fatal(err)
			}
			if epoch == 1 && b.Index == 1 {
				break
			}
			sum := b.Images.Sum() // on the consumer's stream
			if err := sum.Err(); err != nil {
				t.Fatal(err)
			}
			sum.Close()
		}
	}
	st := p.Stats()
	closeFeed(t, p)
	if st.Inflated < 40 || st.DecodedAgain > st.Decoded {
		t.Errorf("%+v", st)
	}
}

// TestDecoderBytesCountRooms: the memory for inflated members is reported, and is part of the
// decoders' memory: a .tar and a zip of stored members need
// none.
func TestDecoderBytesCountRooms(t *testing.T) {
	for name, inflates := range map[string]bool{"set.tgz": true, "set.tar": false, "deflated.zip": true,
		"stored.zip": false} {
		l := newLoader(t, decodeArchiveOf(t, 20, name), memberOptions(imageloader.Skip, false))
		p := onCPU(t, l)
		d := p.slots.decode
		plans, err := plannerOf(l).PlanBytes()
		if err != nil {
			t.Fatal(err)
		}
		staging, rooms := plannerOf(l).MemberBytes()
		if (rooms > 0) != inflates || d.sizes.rooms != rooms || d.sizes.plans != max(plans, staging) ||
			p.Stats().DecoderBytes < int64(d.sizes.staging()+d.sizes.rooms) {
			t.Errorf("%s: %d bytes of plans, %d of rooms: %d are reported", name, d.sizes.plans,
				d.sizes.rooms, p.Stats().DecoderBytes)
		}
		closeFeed(t, p)
	}
}

//go:build linux

package prefetcher

import (
	"errors"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/system"
)

// awaitMapped runs epochs until the device reads all images that it can: the file is registered in
// the background, so the host reads some epochs. It returns the number of the next epoch, and the
// number of images that the device reads in an epoch.
func awaitMapped(t *testing.T, p *Prefetcher) (epoch int, images int64) {
	t.Helper()
	for epoch < 20 {
		before := p.Stats().Mapped
		epochValues(t, p, epoch)
		epoch++
		last := images
		if images = p.Stats().Mapped - before; images > 50 && images == last {
			return epoch, images
		}
	}
	t.Fatalf("the device has read %d images in %d epochs, want over 50 in each of the last two", p.Stats().Mapped, epoch)
	return 0, 0
}

// mappedArchives are names for decodeArchiveOf. The value says that devices inflate the archive's
// images.
var mappedArchives = map[string]bool{"set.tar": false, "stored.zip": false, "set.parquet": false, "set.tgz": true,
	"deflated.zip": true}

// TestCPUDecodeReadsMappings: images that the device reads from the mapping of the archive give the
// host's batches.
func TestCPUDecodeReadsMappings(t *testing.T) { decodeReadsMappings(t, onCPU) }

func TestGPUDecodeReadsMappings(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeReadsMappings(t, onGPU)
}

func decodeReadsMappings(t *testing.T, decoder decoderFeed) {
	for name, inflates := range mappedArchives {
		t.Run(name, func(t *testing.T) {
			path := decodeArchiveOf(t, 90, name)
			o := memberOptions(imageloader.Skip, false)
			host, device := newFeed(t, newLoader(t, path, o), Options{}), decoder(t, newLoader(t, path, o))
			first, _ := awaitMapped(t, device)
			before := device.Stats()
			sameEpochs(t, host, device, first, first+2)
			st := device.Stats()
			if st.DecodedAgain != 0 {
				t.Errorf("%d images were decoded again, want none", st.DecodedAgain)
			}
			mapped, inflated := st.Mapped-before.Mapped, st.Inflated-before.Inflated
			if (inflated == mapped) != inflates || !inflates && inflated != 0 {
				t.Errorf("the device has read %d images and inflated %d, want all inflated: %t", mapped, inflated, inflates)
			}
			closeFeed(t, host)
			closeFeed(t, device)
		})
	}
}

// TestCPUDecodeHandsMappingsBack: an image whose part of the file has another digest, or whose
// inflated member has another checksum, is decoded by the host, and disturbs no neighbour. In the
// next epoch the host reads its file.
func TestCPUDecodeHandsMappingsBack(t *testing.T) { decodeHandsMappingsBack(t, onCPU) }

func TestGPUDecodeHandsMappingsBack(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeHandsMappingsBack(t, onGPU)
}

func decodeHandsMappingsBack(t *testing.T, decoder decoderFeed) {
	for name := range mappedArchives {
		t.Run(name, func(t *testing.T) { decodeHandsMappingsOfBack(t, decoder, decodeArchiveOf(t, 90, name)) })
	}
}

func decodeHandsMappingsOfBack(t *testing.T, decoder decoderFeed, path string) {
	o := memberOptions(imageloader.Skip, false)
	damage := false
	source := &corruptingSource{Loader: newLoader(t, path, o), rng: rand.New(rand.NewPCG(3, 4)),
		rows: func(batch, row int) bool { return damage && row%2 == batch%2 }}
	host, device := newFeed(t, newLoader(t, path, o), Options{}), decoder(t, source)
	first, mapped := awaitMapped(t, device)
	damage = true
	sameEpochs(t, host, device, first, first)
	damage = false
	st := device.Stats()
	if st.DecodedAgain == 0 || st.DecodedAgain != int64(source.hits) {
		t.Errorf("%d images are decoded again, want the %d changed ones", st.DecodedAgain, source.hits)
	}
	sameEpochs(t, host, device, first+1, first+1)
	if after := device.Stats(); after.Mapped-st.Mapped != mapped-st.DecodedAgain {
		t.Errorf("the device reads %d images of the next epoch, want %d without the %d changed ones",
			after.Mapped-st.Mapped, mapped-st.DecodedAgain, st.DecodedAgain)
	}
	closeFeed(t, host)
	closeFeed(t, device)
}

// TestCPUDecodeLeavesAChangedMappingToTheHost: devices read the pages of the time of their
// registration. So the host reads a file that was written since, and finds what has changed.
func TestCPUDecodeLeavesAChangedMappingToTheHost(t *testing.T) {
	for name := range mappedArchives {
		t.Run(name, func(t *testing.T) { leavesAChangedMappingToTheHost(t, decodeArchiveOf(t, 90, name)) })
	}
}

func leavesAChangedMappingToTheHost(t *testing.T, path string) {
	device := onCPU(t, newLoader(t, path, memberOptions(imageloader.Skip, false)))
	first, _ := awaitMapped(t, device)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := len(data) / 3; i < len(data)*2/3; i += 500 {
		data[i] ^= 0x55
	}
	if err := errors.Join(os.WriteFile(path, data, 0o600),
		os.Chtimes(path, info.ModTime(), info.ModTime())); err != nil {
		t.Fatal(err)
	}
	before := device.Stats().Mapped
	for _, err := range device.Epoch(t.Context(), first) {
		if err != nil {
			break // what the loader makes of changed members is tested there
		}
	}
	if after := device.Stats().Mapped; after != before {
		t.Errorf("the device has read %d images of a changed file, want 0", after-before)
	}
	closeFeed(t, device)
}

// TestSanitizerOfMappings: a prefetcher keeps the mappings of a closed loader until its decoders'
// streams are done, and releases the memory then.
func TestSanitizerOfMappings(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for name, inflates := range mappedArchives {
		t.Run(name, func(t *testing.T) {
			if inflates && nullLog(t) != "" {
				t.Skip("devices that compute nothing hand all members back before they are mapped")
			}
			sanitizeMappings(t, decodeArchiveOf(t, 90, name))
		})
	}
}

func sanitizeMappings(t *testing.T, path string) {
	l := newLoader(t, path, memberOptions(imageloader.Skip, false))
	cudatest.NoFindings(t)
	for _, err := range l.Epoch(t.Context(), 0) { // finds the entry points, which not all devices do
		if err != nil {
			t.Fatal(err)
		}
	}
	before := cuda.PinnedBytes()
	p := onGPU(t, l)
	next, _ := awaitMapped(t, p)
	slots := cuda.PinnedBytes()
	for b, err := range p.Epoch(t.Context(), next) {
		if err != nil {
			t.Fatal(err)
		}
		if b.Index == 1 {
			break // batches are queued, and nobody waits for them
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if pinned := cuda.PinnedBytes(); pinned != slots {
		t.Errorf("%d bytes are pinned after the loader is closed, want the %d of before: decoders may read them",
			pinned, slots)
	}
	closeFeed(t, p)
	if pinned := cuda.PinnedBytes(); pinned != before {
		t.Errorf("%d bytes are pinned at the end, want %d", pinned, before)
	}
}

// mappedPage returns a mapping of the first page of a file until the test ends.
func mappedPage(t *testing.T, path string) []byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page, err := system.MapFile(f.Fd(), os.Getpagesize())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := system.UnmapFile(page); err != nil {
			t.Error(err)
		}
	})
	return page
}

// TestMaxMappedBytesLimitsMappings: with a negative value the host reads all files, and a part over
// the limit is refused before its pages are read.
func TestMaxMappedBytesLimitsMappings(t *testing.T) {
	r := fileRegistrar{max: 100}
	if _, err := r.register(make([]byte, 101)); err == nil || !strings.Contains(err.Error(), "MaxMappedBytes") {
		t.Errorf("101 bytes of at most 100: %v, want an error with Options.MaxMappedBytes", err)
	}
	cudatest.RequireGPUs(t, 1)
	path := decodeArchive(t, 30)
	r.max = int64(os.Getpagesize())
	for i := range 2 { // a part that is released does not count
		release, err := r.register(mappedPage(t, path))
		if err == nil {
			err = release()
		}
		if err != nil {
			t.Errorf("part %d of a page, of at most a page: %v, want no error", i, err)
		}
	}
	l := newLoader(t, path, imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip})
	p := newFeed(t, l, Options{Decode: Device, MaxMappedBytes: -1})
	for epoch := range 5 {
		epochValues(t, p, epoch)
	}
	if st := p.Stats(); st.Mapped != 0 || st.Decoded == 0 {
		t.Errorf("the device decodes %d images and reads %d itself, want some and 0", st.Decoded, st.Mapped)
	}
	closeFeed(t, p)
}

//go:build linux

package prefetcher

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/torch"
)

// streamed returns options with which Open leaves reading a .tgz to the first epoch. The images do
// not stay in memory.
func streamed(o imageloader.Options) imageloader.Options {
	o.Classes, o.ShuffleBytes = []string{"a", "b", "c", "d"}, 1<<18
	return o
}

// packed returns the path of a gzip file with the content of another file.
func packed(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "set.tgz")
	if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestCPUDecodeReadsStreams: the device decodes the first pass over a .tgz without an index. It
// gives the host's batches, and the pass writes the host's index.
func TestCPUDecodeReadsStreams(t *testing.T) { decodeReadsStreams(t, onCPU) }

func TestGPUDecodeReadsStreams(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeReadsStreams(t, onGPU)
}

func decodeReadsStreams(t *testing.T, decoder decoderFeed) {
	path := packed(t, decodeArchive(t, 80))
	for _, test := range []struct {
		name    string
		o       imageloader.Options
		ops     []transform.Op
		decoded int64 // minimum number of images that the device decodes in the first pass
	}{
		{"skip", imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip}, nil, 60},
		{"substitute", imageloader.Options{Transform: imageloader.Eval(90, 72),
			BadSamples: imageloader.Substitute}, nil, 60},
		{"operations", imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip}, deviceOps, 60},
		{"operations of both", imageloader.Options{Transform: imageloader.Train(64),
			BadSamples: imageloader.Substitute}, mixedOps, 20},
		{"no index", imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip,
			NoIndex: true}, nil, 60},
		{"refused damage", imageloader.Options{Transform: imageloader.Train(64),
			BadSamples: imageloader.Skip, Damaged: imageloader.Refuse}, nil, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			if testing.Short() && test.name != "operations of both" {
				t.Skip("its goroutines are those of the other rows")
			}
			o := streamed(test.o)
			o.Transform.Ops = test.ops
			plain, plainSide := indexedLoader(t, path, filepath.Join(t.TempDir(), "index"), o)
			l, side := indexedLoader(t, path, filepath.Join(t.TempDir(), "index"), o)
			nothingLeft(t, func() {
				host, device := newFeed(t, plain, Options{}), decoder(t, l)
				if l.Len() >= 0 {
					t.Fatalf("Open has read the archive, want the first epoch to read it")
				}
				sameEpochs(t, host, device, 0, 0)
				st := device.Stats()
				if st.Decoded < test.decoded || test.decoded == 0 && st.Decoded > 0 || st.DecodedAgain != 0 {
					t.Errorf("the device decodes %d images, and %d again on the host, want at least %d and 0",
						st.Decoded, st.DecodedAgain, test.decoded)
				}
				if !test.o.NoIndex {
					sameFiles(t, plainSide, side) // before later epochs store entry points
				}
				sameEpochs(t, host, device, 1, 2)
				closeFeed(t, host)
				closeFeed(t, device)
				l.Close() // it pins the archive for the device
			})
		})
	}
}

// TestCPUDecodeHandsDamageOfStreamsBack: images of a first pass that the device can't decode are
// decoded again from the batch's copy of the file. Bad samples and warnings are the host's.
func TestCPUDecodeHandsDamageOfStreamsBack(t *testing.T) { decodeHandsDamageOfStreamsBack(t, onCPU) }

func TestGPUDecodeHandsDamageOfStreamsBack(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeHandsDamageOfStreamsBack(t, onGPU)
}

func decodeHandsDamageOfStreamsBack(t *testing.T, decoder decoderFeed) {
	path := packed(t, damagedArchive(t, 300))
	for _, damaged := range []imageloader.DamagePolicy{imageloader.Warned, imageloader.Partial} {
		for _, policy := range []imageloader.BadSamplePolicy{imageloader.Skip, imageloader.Substitute} {
			t.Run(fmt.Sprintf("%v, %v", damaged, policy), func(t *testing.T) {
				if testing.Short() && (damaged != imageloader.Warned || policy != imageloader.Skip) {
					t.Skip("its goroutines are those of the other rows")
				}
				o := streamed(imageloader.Options{Transform: imageloader.Train(32), BadSamples: policy, Damaged: damaged})
				plain, l := newLoader(t, path, o), newLoader(t, path, o)
				host, device := newFeed(t, plain, Options{}), decoder(t, l)
				sameEpochs(t, host, device, 0, 0)
				want, got, st := plain.Stats(), l.Stats(), device.Stats()
				if got.Bad != want.Bad || got.Warned != want.Warned || got.Samples != want.Samples || want.Bad < 10 {
					t.Errorf("%d bad samples of %d, %d warnings, want %d of %d, %d", got.Bad, got.Samples,
						got.Warned, want.Bad, want.Samples, want.Warned)
				}
				if st.DecodedAgain < 20 || st.Decoded < 2*st.DecodedAgain {
					t.Errorf("the device decodes %d images, and %d again on the host, want at least 20 again, "+
						"and fewer than half", st.Decoded, st.DecodedAgain)
				}
				sameEpochs(t, host, device, 1, 1)
				closeFeed(t, host)
				closeFeed(t, device)
			})
		}
	}
}

// TestCPUDecodeEndsDamagedStreams: a damaged .tgz ends its first epoch with the host's error, after
// the host's batches.
func TestCPUDecodeEndsDamagedStreams(t *testing.T) { decodeEndsDamagedStreams(t, onCPU) }

func TestGPUDecodeEndsDamagedStreams(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeEndsDamagedStreams(t, onGPU)
}

func decodeEndsDamagedStreams(t *testing.T, decoder decoderFeed) {
	whole, err := os.ReadFile(packed(t, decodeArchive(t, 80)))
	if err != nil {
		t.Fatal(err)
	}
	o := streamed(imageloader.Options{Transform: imageloader.Train(48), BadSamples: imageloader.Skip})
	for _, test := range []struct {
		name string
		data []byte
	}{
		{"cut", whole[:len(whole)*2/3]},
		{"another checksum", append(slices.Clone(whole[:len(whole)-8]), make([]byte, 8)...)},
		{"another byte", append(append(slices.Clone(whole[:len(whole)/2]), whole[len(whole)/2]^0x10), whole[len(whole)/2+1:]...)},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "set.tgz")
			if err := os.WriteFile(path, test.data, 0o644); err != nil {
				t.Fatal(err)
			}
			host, device := newFeed(t, newLoader(t, path, o), Options{}), decoder(t, newLoader(t, path, o))
			var batches [2][][]float32
			var errs [2]string
			for i, p := range []*Prefetcher{host, device} {
				for b, err := range p.Epoch(t.Context(), 0) {
					if err != nil {
						errs[i] = err.Error()
						break
					}
					v, err := b.Images.ToDType(torch.Float32).Float32s()
					if err != nil {
						t.Fatal(err)
					}
					batches[i] = append(batches[i], v)
				}
			}
			if errs[0] == "" || errs[1] != errs[0] {
				t.Errorf("the epoch ends with %q, want %q", errs[1], errs[0])
			}
			if !slices.EqualFunc(batches[0], batches[1], slices.Equal) {
				t.Errorf("%d batches before the error, or other images; want the %d of the host",
					len(batches[1]), len(batches[0]))
			}
			closeFeed(t, host)
			closeFeed(t, device)
		})
	}
}

// TestCPUDecodeLeavesStreamsEarly: a first pass that is left early leaves nothing behind, and the
// next one starts at the archive's first byte.
func TestCPUDecodeLeavesStreamsEarly(t *testing.T) {
	path := packed(t, decodeArchive(t, 80))
	o := streamed(imageloader.Options{Transform: imageloader.Train(48), BadSamples: imageloader.Skip})
	nothingLeft(t, func() {
		host, device := newFeed(t, newLoader(t, path, o), Options{Device: cuda.CPU}), onCPU(t, newLoader(t, path, o))
		for stop := range 3 {
			for b, err := range device.Epoch(t.Context(), 0) {
				if err != nil {
					t.Fatal(err)
				}
				if b.Index == stop {
					break
				}
			}
		}
		sameEpochs(t, host, device, 0, 0)
		closeFeed(t, host)
		closeFeed(t, device)
	})
}

//go:build linux

package prefetcher

import (
	"archive/zip"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// TestCPUDecodeReadsZips: a zip gives the host's batches. The device decodes its photographs from
// the first epoch on, and inflates the deflated ones from the second epoch on.
func TestCPUDecodeReadsZips(t *testing.T) { decodeReadsZips(t, onCPU) }

func TestGPUDecodeReadsZips(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeReadsZips(t, onGPU)
}

func decodeReadsZips(t *testing.T, decoder decoderFeed) {
	stored, deflated := decodeArchiveOf(t, 60, "stored.zip"), decodeArchiveOf(t, 60, "deflated.zip")
	for _, test := range []struct {
		name, path string
		o          imageloader.Options
		ops        []transform.Op
		decoded    int64 // the minimum number of images that the device decodes in the first epoch
		least      int64 // the minimum number of members that it inflates in the three other epochs
		most       int64
	}{
		{name: "stored", path: stored, decoded: 48},
		{name: "stored, no index", path: stored, o: imageloader.Options{NoIndex: true}, decoded: 48},
		{name: "deflated", path: deflated, decoded: 48, least: 3 * 45, most: 4 * 60},
		{name: "deflated, no index", path: deflated, o: imageloader.Options{NoIndex: true}, decoded: 48,
			least: 3 * 45, most: 4 * 60},
		{name: "deflated, substitute, trusted", path: deflated, decoded: 48, least: 3 * 45, most: 4 * 60,
			o: imageloader.Options{BadSamples: imageloader.Substitute, TrustIndex: true}},
		{name: "deflated, operations of both", path: deflated, ops: mixedOps, decoded: 20, least: 3 * 15,
			most: 4 * 60},
		{name: "deflated, refused damage", path: deflated, least: 2 * 45, most: 4 * 60,
			o: imageloader.Options{Damaged: imageloader.Refuse}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if testing.Short() && test.name != "deflated, operations of both" {
				t.Skip("its goroutines are those of another row")
			}
			o := test.o
			o.Transform = imageloader.Train(64)
			o.Transform.Ops = test.ops
			if o.BadSamples == imageloader.Fail {
				o.BadSamples = imageloader.Skip
			}
			plain, l := newLoader(t, test.path, o), newLoader(t, test.path, o)
			nothingLeft(t, func() {
				host, device := newFeed(t, plain, Options{}), decoder(t, l)
				sameEpochs(t, host, device, 0, 0)
				if st := device.Stats(); st.Decoded < test.decoded || st.Inflated != 0 || st.DecodedAgain != 0 {
					t.Errorf("in the first epoch the device decodes %d images, inflates %d and hands %d back, want "+
						"at least %d, 0 and 0", st.Decoded, st.Inflated, st.DecodedAgain, test.decoded)
				}
				sameEpochs(t, host, device, 1, 3)
				if st := device.Stats(); st.Inflated < test.least || st.Inflated > test.most ||
					st.DecodedAgain != 0 {
					t.Errorf("the device inflates %d members and hands %d images back, want from %d to %d, and 0",
						st.Inflated, st.DecodedAgain, test.least, test.most)
				}
				closeFeed(t, host)
				closeFeed(t, device)
				l.Close() // it pins the archive for the device
			})
		})
	}
}

// zipMakers are the zips of imageloader/testdata/make_zips.py.
var zipMakers = []string{"infozip", "7zip", "python-1", "python-9"}

// TestCPUDecodeInflatesZipsOfAllMakers: the device inflates what each maker's deflate has written.
func TestCPUDecodeInflatesZipsOfAllMakers(t *testing.T) { decodeInflatesZipsOfAllMakers(t, onCPU) }

func TestGPUDecodeInflatesZipsOfAllMakers(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeInflatesZipsOfAllMakers(t, onGPU)
}

func decodeInflatesZipsOfAllMakers(t *testing.T, decoder decoderFeed) {
	const photos = 5
	for _, name := range zipMakers {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join("testdata", "zip", name+".zip")
			o := imageloader.Options{Transform: imageloader.Train(64)}
			host, device := newFeed(t, newLoader(t, path, o), Options{}), decoder(t, newLoader(t, path, o))
			sameEpochs(t, host, device, 0, 0)
			sameEpochs(t, host, device, 1, 1)
			sameEpochs(t, host, device, 2, 2)
			if st := device.Stats(); st.Decoded != 3*photos || st.Inflated != 2*photos || st.DecodedAgain != 0 {
				t.Errorf("in three epochs the device decodes %d images, inflates %d and hands %d back, want "+
					"%d, %d and 0", st.Decoded, st.Inflated, st.DecodedAgain, 3*photos, 2*photos)
			}
			closeFeed(t, host)
			closeFeed(t, device)
		})
	}
}

// TestCPUDecodeHandsDamagedZipMembersBack: deflated members that are damaged on their way to the
// device are decoded again, and disturb no neighbour.
func TestCPUDecodeHandsDamagedZipMembersBack(t *testing.T) {
	decodeHandsDamagedZipMembersBack(t, onCPU)
}

func TestGPUDecodeHandsDamagedZipMembersBack(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeHandsDamagedZipMembersBack(t, onGPU)
}

func decodeHandsDamagedZipMembersBack(t *testing.T, decoder decoderFeed) {
	decodeHandsMembersOfBack(t, decoder, decodeArchiveOf(t, 60, "deflated.zip"), nil)
}

// damageZip damages the content of every n-th member of a zip in place, so that the file keeps its
// size and the loaders that have it open see the damage. It returns the names of the members.
func damageZip(t *testing.T, path string, n int) map[string]bool {
	t.Helper()
	r, err := zip.OpenReader(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	before, err := file.Stat()
	if err != nil {
		t.Fatal(err)
	}
	damaged := map[string]bool{}
	for i, f := range r.File {
		if i%n != n-1 {
			continue
		}
		at, err := f.DataOffset()
		if err != nil {
			t.Fatal(err)
		}
		packed := make([]byte, f.CompressedSize64)
		if _, err := file.ReadAt(packed, at); err != nil {
			t.Fatal(err)
		}
		for k := len(packed) / 2; k < len(packed); k += 97 {
			packed[k] ^= 0x55
		}
		if _, err := file.WriteAt(packed, at); err != nil {
			t.Fatal(err)
		}
		damaged[f.Name] = true
	}
	if err := os.Chtimes(path, before.ModTime(), before.ModTime()); err != nil {
		t.Fatal(err)
	}
	return damaged
}

// TestCPUDecodeJudgesDamagedZipMembersAsTheHost: damaged members are bad samples, in the first
// epoch and later, and under Fail the epoch ends with the host's error.
func TestCPUDecodeJudgesDamagedZipMembersAsTheHost(t *testing.T) {
	decodeJudgesDamagedZipMembers(t, onCPU)
}

func TestGPUDecodeJudgesDamagedZipMembersAsTheHost(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeJudgesDamagedZipMembers(t, onGPU)
}

func decodeJudgesDamagedZipMembers(t *testing.T, decoder decoderFeed) {
	for _, name := range []string{"stored.zip", "deflated.zip"} {
		path := decodeArchiveOf(t, 60, name)
		damageZip(t, path, 7)
		for _, policy := range []imageloader.BadSamplePolicy{imageloader.Skip, imageloader.Substitute} {
			o := imageloader.Options{Transform: imageloader.Train(64), BadSamples: policy}
			host, device := newFeed(t, newLoader(t, path, o), Options{}), decoder(t, newLoader(t, path, o))
			sameEpochs(t, host, device, 0, 2)
			if st := device.Stats(); st.Decoded == 0 || st.DecodedAgain != 0 {
				t.Errorf("%s: the device decodes %d images and hands %d back, want some and 0", name, st.Decoded,
					st.DecodedAgain)
			}
			closeFeed(t, host)
			closeFeed(t, device)
		}
		o := imageloader.Options{Transform: imageloader.Train(64)}
		host, device := newFeed(t, newLoader(t, path, o), Options{}), decoder(t, newLoader(t, path, o))
		want, got := epochError(t, host, 0), epochError(t, device, 0)
		var bad *imageloader.SampleError
		if !errors.As(got, &bad) || got.Error() != want.Error() {
			t.Errorf("%s: the epoch ends with %v, want the host's %v", name, got, want)
		}
		closeFeed(t, host)
		closeFeed(t, device)
	}
}

// epochError returns the error that ends an epoch.
func epochError(t *testing.T, p *Prefetcher, epoch int) error {
	t.Helper()
	for _, err := range p.Epoch(t.Context(), epoch) {
		if err != nil {
			return err
		}
	}
	t.Fatalf("epoch %d has no error, want one", epoch)
	return nil
}

// TestCPUDecodeNamesAChangedZipMember: deflated members change after their first epoch, while the
// zip keeps its size and time. The epoch ends with the host's error, which names the file and the
// member.
func TestCPUDecodeNamesAChangedZipMember(t *testing.T) { decodeNamesAChangedZipMember(t, onCPU) }

func TestGPUDecodeNamesAChangedZipMember(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeNamesAChangedZipMember(t, onGPU)
}

func decodeNamesAChangedZipMember(t *testing.T, decoder decoderFeed) {
	path := decodeArchiveOf(t, 60, "deflated.zip")
	o := imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip}
	host, device := newFeed(t, newLoader(t, path, o), Options{}), decoder(t, newLoader(t, path, o))
	sameEpochs(t, host, device, 0, 0)
	inflated := device.Stats().Inflated
	damaged := damageZip(t, path, 5)
	err := epochError(t, device, 1)
	var damage *imageloader.ArchiveError
	if !errors.As(err, &damage) || damage.File != path || !damaged[damage.Member] {
		t.Errorf("the epoch ends with %v, want an error with the file %s and one of the members %v", err, path,
			damaged)
	}
	if st := device.Stats(); inflated != 0 || st.Inflated == 0 || st.DecodedAgain == 0 {
		t.Errorf("the device inflates %d members at first and %d in all, and hands %d back, want 0, some and some",
			inflated, st.Inflated, st.DecodedAgain)
	}
	closeFeed(t, host)
	closeFeed(t, device)
}

// newZipWriter returns functions that add a member to a zip and that finish it.
func newZipWriter(to io.Writer, method uint16) (add func(name string, data []byte) error, finish func() error) {
	w := zip.NewWriter(to)
	return func(name string, data []byte) error {
		member, err := w.CreateHeader(&zip.FileHeader{Name: name, Method: method})
		if err == nil {
			_, err = io.Copy(member, bytes.NewReader(data))
		}
		return err
	}, w.Close
}

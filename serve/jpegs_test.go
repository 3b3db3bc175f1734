package serve_test

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

// A jpegRoute says where a kind of JPEG is decoded if the device is requested.
type jpegRoute int

const (
	onDevice jpegRoute = iota
	onHost
	copied  // the loader sends the device a baseline copy; package serve decodes on the host
	refused // an error that names the reason
)

// jpegKinds names the files of testdata/jpegs by route. The tests compare the list with the folder.
var jpegKinds = map[jpegRoute][]string{
	onDevice: {
		"444", "422", "420", "411", "440", "410", "luma-1x4", "luma-3x1", "luma-1x3", "all-2x1",
		"chroma-2x1-of-2x2", "chroma-larger", "chroma-differs",
		"420-odd-size", "422-odd-size", "extended-sequential", "optimised-codes", "restart-each-mcu",
		"restart-each-row", "grey", "grey-2x2",
		"rgb-adobe-0", "rgb-adobe-0-ids-1-2-3", "rgb-ids", "rgb-ids-420", "rgb-adobe-0-third-smaller",
		"jfif-adobe-0", "jfif-adobe-1", "jfif-ids-r-g-b", "adobe-1", "adobe-1-ids-r-g-b",
		"adobe-before-jfif", "no-app", "no-app-ids-0-1-2",
		"orientation-1", "orientation-2", "orientation-3", "orientation-4", "orientation-5",
		"orientation-6", "orientation-7", "orientation-8",
		"no-huffman-tables", "two-pictures",
	},
	onHost:  {"three-scans", "two-scans", "arithmetic", "adobe-2", "cmyk-adobe", "cmyk", "ycck-adobe"},
	copied:  {"progressive", "grey-progressive", "rgb-progressive", "arithmetic-progressive"},
	refused: {"12-bits", "lossless"},
}

// jpegFile is a file of testdata/jpegs: a square image.
type jpegFile struct {
	name string
	data []byte
	side int
}

func jpegFiles(t *testing.T, names []string) (files []jpegFile) {
	t.Helper()
	for _, name := range names {
		data, err := os.ReadFile(filepath.Join("testdata/jpegs", name+".jpg"))
		if err != nil {
			t.Fatal(err)
		}
		side := 128
		if strings.HasSuffix(name, "-odd-size") {
			side = 117
		}
		files = append(files, jpegFile{name, data, side})
	}
	return files
}

// wholeJPEG is a transform that keeps all pixels of an upright square image with the given side.
func wholeJPEG(side int) transform.Transform {
	return transform.Transform{Resize: side, Size: side, Bytes: true, ApplyEXIFOrientation: true}
}

// computes reports whether a device's kernels compute. The kernels of tools/null-device.sh do not.
func computes(device cuda.Device) bool {
	return device == cuda.CPU || !strings.Contains(os.Getenv("LD_PRELOAD"), "libnull_runtime")
}

// TestHostReadsJPEGsAsPillow checks the host's pixels, which are the reference for the device.
func TestHostReadsJPEGsAsPillow(t *testing.T) {
	text, err := os.ReadFile("testdata/jpegs/pixels.json")
	if err != nil {
		t.Fatal(err)
	}
	pillow := map[string]*uint32{} // the CRC-32 of the RGB bytes, nil if Pillow refuses the file
	if err := json.Unmarshal(text, &pillow); err != nil {
		t.Fatal(err)
	}
	var listed []string
	for route, names := range jpegKinds {
		for _, f := range jpegFiles(t, names) {
			listed = append(listed, f.name+".jpg")
			d, err := decode.New(decode.Options{Transform: wholeJPEG(f.side)})
			if err != nil {
				t.Fatal(err)
			}
			pixels := make([]byte, d.Bytes())
			err = d.Decode(t.Context(), pixels, f.data)
			d.Close()
			want := pillow[f.name+".jpg"]
			switch {
			case route == refused:
				if err == nil || !strings.Contains(err.Error(), "not supported") {
					t.Errorf("%s: the error is %v, want \"... is not supported\"", f.name, err)
				}
			case err != nil || want == nil:
				t.Errorf("%s: error %v, CRC-32 of Pillow's pixels %v, want both to read it", f.name, err, want)
			case crc32.ChecksumIEEE(pixels) != *want:
				t.Errorf("%s: the pixels' CRC-32 is %d, want Pillow's %d", f.name, crc32.ChecksumIEEE(pixels), *want)
			}
		}
	}
	if want := slices.Sorted(maps.Keys(pillow)); !slices.Equal(slices.Sorted(slices.Values(listed)), want) {
		t.Errorf("the table has %v, want the files of testdata/jpegs: %v", listed, want)
	}
}

// TestDeviceJPEGsEqualHost decodes every kind of JPEG with serve.Options.OnDevice and with
// prefetcher.Options.Decode. The pixels must equal the host's, and jpegKinds says where each kind
// must be decoded. On devices that compute nothing, it only checks where each kind is decoded.
func TestDeviceJPEGsEqualHost(t *testing.T) {
	for _, device := range devices() {
		for _, side := range []int{128, 117} {
			t.Run(fmt.Sprintf("serve %d on %v", side, device), func(t *testing.T) { servesJPEGs(t, device, side) })
		}
	}
	t.Run("prefetcher", func(t *testing.T) {
		device := cudatest.RequireGPUs(t, 1)[0]
		for route, names := range jpegKinds {
			t.Run(fmt.Sprintf("route %d", route),
				func(t *testing.T) { prefetchesJPEGs(t, device, route, jpegFiles(t, names)) })
		}
	})
}

// servesJPEGs compares a request for each file with the given side to the host's result.
func servesJPEGs(t *testing.T, device cuda.Device, side int) {
	t.Helper()
	o := serve.Options{Device: device, Decode: decode.Options{Transform: wholeJPEG(side)}}
	plain, d := newDecoder(t, o), newUnitDecoder(t, o)
	for route, names := range jpegKinds {
		onIt := int64(0)
		if route == onDevice {
			onIt = 1
		}
		for _, f := range jpegFiles(t, names) {
			if f.side != side {
				continue
			}
			before := d.Stats()
			want, wantErr := plain.Batch(t.Context(), nil, f.data)
			got, gotErr := d.Batch(t.Context(), nil, f.data)
			if computes(device) {
				same(t, f.name, got, want, gotErr, wantErr)
			}
			for _, x := range []*torch.Tensor{got, want} {
				if x != nil {
					x.Close()
				}
			}
			if (gotErr != nil) != (route == refused) {
				t.Errorf("%s: the error is %v, want one: %v", f.name, gotErr, route == refused)
			}
			st := d.Stats()
			if n, again := st.Decoded-before.Decoded, st.DecodedAgain-before.DecodedAgain; n != onIt || again != 0 {
				t.Errorf("%s: the device got %d images and handed %d back, want %d and 0", f.name, n, again, onIt)
			}
		}
	}
}

// prefetchesJPEGs compares two epochs with epochs that the host decodes. In the first epoch the
// index has no entry points.
func prefetchesJPEGs(t *testing.T, device cuda.Device, route jpegRoute, files []jpegFile) {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	members := files
	if route == refused { // a batch needs an image
		members = append(members, jpegFiles(t, []string{"arithmetic"})...)
	}
	for _, f := range members {
		if err := w.WriteHeader(&tar.Header{Name: "set/a/" + f.name + ".jpg", Mode: 0o644,
			Size: int64(len(f.data))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(f.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "set.tar")
	if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	onIt, bad := int64(0), int64(0)
	switch route {
	case onDevice, copied:
		onIt = int64(len(files))
	case refused:
		bad = int64(len(files))
	}
	host, _ := jpegEpochs(t, path, prefetcher.Options{Device: device}, bad)
	got, st := jpegEpochs(t, path, prefetcher.Options{Device: device, Decode: prefetcher.Device}, bad)
	if computes(device) && !bytes.Equal(got, host) {
		t.Errorf("%d bytes of two epochs differ from the host's %d", len(got), len(host))
	}
	if st.Decoded != 2*onIt || st.DecodedAgain != 0 {
		t.Errorf("the device got %d images in two epochs and handed %d back, want %d and 0", st.Decoded,
			st.DecodedAgain, 2*onIt)
	}
}

// jpegEpochs returns the pixels of two epochs over the archive.
func jpegEpochs(t *testing.T, path string, o prefetcher.Options, bad int64) (pixels []byte, st prefetcher.Stats) {
	t.Helper()
	l, err := imageloader.Open(path, imageloader.Options{
		Transform: wholeJPEG(128), BatchSize: 8, BadSamples: imageloader.Skip,
		IndexFile: filepath.Join(t.TempDir(), "index"),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	feed, err := prefetcher.New(l, o)
	if err != nil {
		t.Fatal(err)
	}
	defer feed.Close()
	for epoch := range 2 {
		for batch, err := range feed.Epoch(t.Context(), epoch) {
			if err != nil {
				t.Fatal(err)
			}
			pixels = append(pixels, contents(t, batch.Images)...)
		}
	}
	if n := l.Stats().Bad; n != 2*bad {
		t.Errorf("%d bad samples in two epochs, want %d", n, 2*bad)
	}
	return pixels, feed.Stats()
}

//go:build linux

package prefetcher

import (
	"bytes"
	"fmt"
	"image"
	"image/color"
	imagedraw "image/draw"
	"image/jpeg"
	"math/rand/v2"
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

// boxArchive writes an archive of photographs with a red rectangle, and of files with its box.
func boxArchive(t *testing.T, photos int, name string) string {
	t.Helper()
	rng := rand.New(rand.NewPCG(7, 8))
	path := filepath.Join(t.TempDir(), name)
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	add, finish := newMemberWriter(t, file, name)
	for i := range photos {
		width, height := 200+rng.IntN(200), 150+rng.IntN(250)
		m := image.NewRGBA(image.Rect(0, 0, width, height))
		for p := range m.Pix {
			m.Pix[p] = byte(rng.IntN(60))
		}
		x, y := rng.IntN(width/2), rng.IntN(height/2)
		r := image.Rect(x, y, x+width/3, y+height/3)
		imagedraw.Draw(m, r, &image.Uniform{color.RGBA{255, 0, 0, 255}}, image.Point{}, imagedraw.Src)
		var b bytes.Buffer
		if err := jpeg.Encode(&b, m, &jpeg.Options{Quality: 90}); err != nil {
			t.Fatal(err)
		}
		text := fmt.Sprintf(`[{"bbox": [%d, %d, %d, %d], "label": %d}]`, x, y, r.Dx(), r.Dy(), i)
		if err := add(fmt.Sprintf("%03d.jpg", i), b.Bytes()); err != nil {
			t.Fatal(err)
		}
		if err := add(fmt.Sprintf("%03d.json", i), []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := finish(); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestGPUDecodeKeepsBoxes: images that a GPU decodes have the same boxes as if the host decodes
// them, and the boxes are where the rectangles are.
func TestGPUDecodeKeepsBoxes(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeKeepsBoxes(t, onGPU, cuda.Device(0))
}

// TestCPUDecodeKeepsBoxes is TestGPUDecodeKeepsBoxes with the kernels' arithmetic on the CPU.
func TestCPUDecodeKeepsBoxes(t *testing.T) { decodeKeepsBoxes(t, onCPU, cuda.CPU) }

func decodeKeepsBoxes(t *testing.T, decoder decoderFeed, device cuda.Device) {
	const photos = 40
	tr := imageloader.Train(64)
	tr.Bytes, tr.DType, tr.Scale = true, 0, [2]float64{0.3, 1}
	tr.Ops = []transform.Op{&transform.RandomVerticalFlip{}, transform.RandomRotation{Degrees: [2]float64{90, 90}}}
	for _, name := range []string{"set.tar", "set.tgz", "set.zip"} {
		t.Run(name, func(t *testing.T) {
			path := boxArchive(t, photos, name)
			o := imageloader.Options{Transform: tr, Boxes: imageloader.Boxes{Image: "*.jpg", File: "*.json", Max: 2}}
			plain, l := newLoader(t, path, o), newLoader(t, path, o)
			host, feed := newFeed(t, plain, Options{Device: device}), decoder(t, l)
			for epoch := range 3 { // the entry points become known
				wantPixels, want := boxedEpoch(t, host, epoch)
				gotPixels, got := boxedEpoch(t, feed, epoch)
				if !slices.Equal(gotPixels, wantPixels) || !slices.Equal(got, want) || len(got) != photos*2*5 {
					t.Errorf("epoch %d: other pixels or boxes: %.10v, want %.10v", epoch, got, want)
				}
				for i := range photos {
					checkRectangle(t, gotPixels[i*3*64*64:][:3*64*64], got[i*10:][:5])
				}
			}
			if st := feed.Stats(); st.Decoded < photos || st.DecodedAgain != 0 {
				t.Errorf("%+v, want st.Decoded at least %d, st.DecodedAgain = 0", st, photos)
			}
			closeFeed(t, host)
			closeFeed(t, feed)
		})
	}
}

// boxedEpoch returns the pixels [N 3 64 64] and the boxes [N 2 5] of an epoch.
func boxedEpoch(t *testing.T, p *Prefetcher, epoch int) (pixels []byte, boxes []float32) {
	t.Helper()
	for b, err := range p.Epoch(t.Context(), epoch) {
		if err != nil {
			t.Fatal(err)
		}
		image, err := b.Images.To(cuda.CPU).Contiguous(torch.Contiguous).Bytes()
		if err != nil {
			t.Fatal(err)
		}
		rows, err := b.Tensors()[1].Float32s()
		if err != nil {
			t.Fatal(err)
		}
		pixels, boxes = append(pixels, image...), append(boxes, rows...)
	}
	return pixels, boxes
}

// checkRectangle compares a box with the red pixels of an image [3 64 64].
func checkRectangle(t *testing.T, pixels []byte, box []float32) {
	t.Helper()
	var found image.Rectangle
	for i, red := range pixels[:64*64] {
		if red >= 158 { // halfway between the red of the rectangle and of the noise
			found = found.Union(image.Rect(i%64, i/64, i%64+1, i/64+1))
		}
	}
	if box[4] < 0 { // the crop has at most an edge of the rectangle
		if min(found.Dx(), found.Dy()) > 3 {
			t.Errorf("the rectangle %v has no box", found)
		}
		return
	}
	for i, edge := range []int{found.Min.X, found.Min.Y, found.Max.X, found.Max.Y} {
		if d := float32(edge) - box[i]; (d < -2 || d > 2) && min(box[2]-box[0], box[3]-box[1]) > 4 {
			t.Errorf("the rectangle %v has the box %v", found, box)
			return
		}
	}
}

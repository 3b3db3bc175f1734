package main

import (
	"bytes"
	"context"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/torch"
)

// After a short training the network's images are brighter in the middle than at the border, like
// drawings and unlike noise.
func TestTheImagesBecomeDrawings(t *testing.T) {
	o := options{device: "cpu", picture: filepath.Join(t.TempDir(), "gan.png"), steps: 240, batch: 24,
		width: 8, seed: 1}
	before := torch.LiveTensors()
	var out bytes.Buffer
	r, err := run(context.Background(), o, &out)
	if err != nil {
		t.Fatal(err)
	}
	border, middle := brightness(r.made)
	realBorder, realMiddle := brightness(r.real)
	if middle < 0.15 || border > middle/2 {
		t.Errorf("brightness %.2f on the border and %.2f in the middle; of drawings %.2f and %.2f", border,
			middle, realBorder, realMiddle)
	}
	if !(r.critic > 0 && r.critic < 4) || !strings.HasPrefix(out.String(), "step 200: ") ||
		!strings.Contains(out.String(), "step 240: ") {
		t.Errorf("losses %v and %v\n%s", r.critic, r.generator, &out)
	}
	f, err := os.Open(o.picture)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if img, err := png.Decode(f); err != nil || img.Bounds().Dx() != 12*(4*side+2)-2 ||
		img.Bounds().Dy() != 4*(4*side+2)-2 {
		t.Errorf("the picture: %v, %v, want %v, %v, nil",
			img.Bounds(), err, 12*(4*side+2)-2, 4*(4*side+2)-2)
	}
	if n := torch.LiveTensors(); n > before {
		t.Errorf("%d tensors are left, want none", n-before)
	}
}

// brightness returns the means of the outermost pixels and of the central 4 x 4 pixels.
func brightness(images []float32) (border, middle float64) {
	var borders, middles int
	for i, v := range images {
		x, y := i%side, i/side%side
		switch {
		case x == 0 || y == 0 || x == side-1 || y == side-1:
			border += float64(v)
			borders++
		case x >= side/2-2 && x < side/2+2 && y >= side/2-2 && y < side/2+2:
			middle += float64(v)
			middles++
		}
	}
	return border / float64(max(borders, 1)), middle / float64(max(middles, 1))
}

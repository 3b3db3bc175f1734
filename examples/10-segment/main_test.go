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

func TestTheNetworkFindsShapes(t *testing.T) {
	o := options{device: "cpu", picture: filepath.Join(t.TempDir(), "segment.png"), images: 128, epochs: 5,
		width: 8, seed: 1}
	before := torch.LiveTensors()
	var out bytes.Buffer
	overlaps, err := run(context.Background(), o, &out)
	if err != nil {
		t.Fatal(err)
	}
	// A network that predicts only background gets about 0.2.
	if len(overlaps) != 5 || overlaps[4] < 0.35 || !strings.HasPrefix(out.String(), "epoch 1: ") ||
		!strings.Contains(out.String(), "\nepoch 5: ") {
		t.Errorf("overlaps %v, want 5, the last at least 0.35, and a line an epoch in\n%s", overlaps, &out)
	}
	f, err := os.Open(o.picture)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if img, err := png.Decode(f); err != nil || img.Bounds().Dy() != 3*(2*side+2)-2 {
		t.Errorf("the picture: %v, %v, want %v, nil", img.Bounds(), err, 3*(2*side+2)-2)
	}
	if n := torch.LiveTensors(); n > before {
		t.Errorf("%d tensors are left, want none", n-before)
	}
}

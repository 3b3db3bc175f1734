package main

import (
	"bytes"
	"context"
	"image/png"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

func TestTheNetworkFindsBoxes(t *testing.T) {
	o := options{device: "cpu", picture: filepath.Join(t.TempDir(), "detect.png"), images: 192, epochs: 8,
		width: 12, seed: 1}
	before := torch.LiveTensors()
	var out bytes.Buffer
	precisions, err := run(context.Background(), o, &out)
	if err != nil {
		t.Fatal(err)
	}
	// Without training it is below 0.01.
	if len(precisions) != 8 || precisions[7] < 0.3 || !strings.HasPrefix(out.String(), "epoch 1: ") ||
		!strings.Contains(out.String(), "\nepoch 8: ") {
		t.Errorf("precisions %v, want 8, the last at least 0.3, and a line an epoch in\n%s", precisions, &out)
	}
	f, err := os.Open(o.picture)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if img, err := png.Decode(f); err != nil || img.Bounds().Dy() != 2*(2*side+2)-2 {
		t.Errorf("the picture: %v, %v, want a height of %v", img, err, 2*(2*side+2)-2)
	}
	if n := torch.LiveTensors(); n > before {
		t.Errorf("%d tensors are left, want none", n-before)
	}
}

// A network that predicts the targets has no loss of boxes, and finds the boxes.
func TestTargetsAreTheBoxes(t *testing.T) {
	d, err := newDetector(2, cuda.CPU)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	rows := []float32{
		10, 8, 30, 31, 2, 40, 40, 52, 50, 0, 0, 0, 0, 0, -1,
		12, 12, 36, 36, 1, 20, 20, 26, 26, 0, 0, 0, 0, 0, -1, // the small box is in the large one
	}
	boxes, err := torch.FromSlice(rows, 2, 3, 5)
	if err != nil {
		t.Fatal(err)
	}
	scope := torch.NewScope("targets")
	defer scope.Close()
	defer boxes.Close()
	target := d.assign(boxes.In(scope))
	// The logits of a certain network, and the logarithms of the distances.
	logits := target.classes.MulScalar(40).SubScalar(20)
	output := torch.Cat([]*torch.Tensor{logits, target.distances.DivScalar(unit).Log()}, 2).Permute(0, 2, 1)
	output = output.Reshape(2, classes+4, points, points)
	if loss, err := d.loss(output, boxes.In(scope)).Float64(); err != nil || math.Abs(loss) > 1e-4 {
		t.Errorf("loss %v, %v, want 0", loss, err)
	}
	found, err := d.detect(output)
	if err != nil {
		t.Fatal(err)
	}
	truth := [][]detection{labelled(rows[:15]), labelled(rows[15:])}
	for i, want := range truth {
		if len(found[i]) != len(want) {
			t.Errorf("image %d: found %v, want %v", i, found[i], want)
		}
	}
	if got := meanAveragePrecision(truth, found); math.Abs(got-1) > 1e-9 {
		t.Errorf("mean average precision %v of %v, want 1", got, found)
	}
	if got := meanAveragePrecision(truth, make([][]detection, 2)); got != 0 {
		t.Errorf("mean average precision %v of no detection, want 0", got)
	}
}

// The precision of a known list: of two boxes of class 0, one is found first, a wrong one second,
// and the other box third; class 1 is found once too often, class 2 has no box.
func TestAveragePrecisionIsTheAreaBelowTheCurve(t *testing.T) {
	box := func(at float32, class int, score float32) detection {
		return detection{at, 0, at + 10, 10, class, score}
	}
	truth := [][]detection{{box(0, 0, 1), box(20, 0, 1)}, {box(0, 1, 1)}}
	found := [][]detection{{box(1, 0, 0.9), box(40, 0, 0.8), box(21, 0, 0.7)}, {box(0, 1, 0.9), box(0.5, 1, 0.8)}}
	want := ((1+2./3)/2 + 1) / classes
	if got := meanAveragePrecision(truth, found); math.Abs(got-want) > 1e-9 {
		t.Errorf("got %v, want %v", got, want)
	}
}

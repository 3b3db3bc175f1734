package imageloader

import (
	"math"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/tensor"
)

// TestMixedLabelsFollowThePixels: labels follow the pixels, and batches are the same at any number
// of workers. Without Mix nothing changes.
func TestMixedLabelsFollowThePixels(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 33, func(i int) bool { return i == 9 }))
	load := func(workers int, mix ...transform.BatchOp) (images [][]byte, soft [][]float32, samples [][]Sample) {
		l := openFake(t, path, Options{BatchSize: 8, Workers: workers, Shuffle: true, Seed: 4,
			BadSamples: Skip, Transform: Transform{Size: 8, Resize: 8, Mix: mix}})
		for b, err := range l.Epoch(t.Context(), 2) {
			if err != nil {
				t.Fatal(err)
			}
			images, soft, samples = append(images, slices.Clone(b.Images)), append(soft,
				slices.Clone(b.Soft)), append(samples, b.Samples)
		}
		return images, soft, samples
	}
	const classes, row = 5, 3 * 8 * 8
	plain, none, _ := load(3)
	if len(none[0]) != 0 {
		t.Errorf("without Mix a batch has %d soft labels, want 0", len(none[0]))
	}
	for name, mix := range map[string][]transform.BatchOp{"MixUp": {transform.MixUp{}},
		"CutMix": {transform.CutMix{}}, "both": {transform.MixUp{Alpha: 0.2}, transform.CutMix{}}} {
		images, soft, samples := load(1, mix...)
		for b := range images {
			n := len(samples[b])
			for i, s := range samples[b] {
				label, before := soft[b][classes*i:classes*(i+1)], samples[b][(i+n-1)%n].Label
				share := float64(label[s.Label])
				sum := float32(0)
				for c, v := range label {
					sum += v
					if v != 0 && c != s.Label && c != before {
						t.Errorf("%s: class %d is in %v", name, c, label)
					}
				}
				if math.Abs(float64(sum)-1) > 1e-5 {
					t.Errorf("%s: labels sum up to %v", name, sum)
				}
				if before == s.Label {
					continue
				}
				// Pixels and labels agree on the share and the neighbour.
				own, other := plain[b][row*i:row*(i+1)], plain[b][row*((i+n-1)%n):][:row]
				same := 0
				for k, v := range images[b][row*i : row*(i+1)] {
					switch {
					case name == "CutMix" && v == own[k]:
						same++
					case name == "CutMix" && v != other[k]:
						t.Fatalf("%s: byte %d is from neither image", name, k)
					case name == "MixUp" && math.Abs(
						share*float64(own[k])+(1-share)*float64(other[k])-float64(v)) > 1.01:
						t.Fatalf("%s: byte %d is %d of %d and %d with share %v", name, k, v, own[k], other[k], share)
					}
				}
				if name == "CutMix" && math.Abs(float64(same)/row-share) > 0.03 { // some bytes are equal by chance
					t.Errorf("%s: %v of the pixels, but a share of %v", name, float64(same)/row, share)
				}
			}
		}
		again, softAgain, _ := load(7, mix...)
		if !slices.EqualFunc(images, again, slices.Equal) || !slices.EqualFunc(soft, softAgain, slices.Equal) {
			t.Errorf("%s: other batches with other workers", name)
		}
	}
}

func TestMixMakesLabelsFloat32(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 10, nil))
	l := openFake(t, path, Options{Transform: Transform{Size: 8, Resize: 8,
		Mix: []transform.BatchOp{transform.MixUp{}}}})
	for _, specs := range [][]tensor.Spec{l.Fields(), l.Outputs()} {
		if s := specs[1]; s.DType != tensor.Float32 || !slices.Equal(s.Shape, []int64{5}) {
			t.Errorf("%+v, want s.DType = %v, s.Shape = %+v", s, tensor.Float32, []int64{5})
		}
	}
}

package transform

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"
)

// TestNoise: RandomErasing with random values is standard normal after normalisation, only inside
// its box. GaussianNoise has the requested deviation. Both are the same at every run.
func TestNoise(t *testing.T) {
	run := func(op Op, fill byte) []byte {
		a := newAugmenter(t, Transform{Size: 200, Ops: []Op{op}})
		pixels := bytes.Repeat([]byte{fill}, 3*200*200)
		if err := a.Apply(rand.New(rand.NewPCG(1, 2)), pixels); err != nil {
			t.Fatal(err)
		}
		return pixels
	}
	erasing := RandomErasing{P: 1, Scale: [2]float64{0.3, 0.3}, Random: true}
	first, second := run(erasing, 77), run(erasing, 78)
	var erased, others int
	var values []float64
	for i := range first {
		switch {
		case first[i] == second[i]: // the noise
			erased++
			if z := (float64(first[i])/255 - float64(imageNetMean[i%3])) / float64(imageNetStd[i%3]); i%3 == 0 {
				values = append(values, z)
			}
		case first[i] == 77 && second[i] == 78:
			others++
		}
	}
	if erased+others != len(first) || math.Abs(float64(erased)/float64(len(first))-0.3) > 0.01 {
		t.Errorf("%d bytes are erased and %d are not, of %d", erased, others, len(first))
	}
	// A level is 0.0171 deviations of red, and 0 and 255 take the values beyond them.
	distance := kolmogorov(values, func(z float64) float64 {
		if z >= (1-0.485)/0.229-1e-6 {
			return 1
		}
		return 0.5 * math.Erfc(-(math.Floor(z*0.229*255+0.485*255+1e-3)+0.5-0.485*255)/255/0.229/math.Sqrt2)
	})
	if limit := ksLimit * math.Sqrt(manyDraws/float64(len(values))); distance > limit {
		t.Errorf("the distribution is off by %.4f, want at most %.4f", distance, limit)
	}

	gaussian := GaussianNoise{Mean: 0.02, Sigma: 0.05}
	noisy := run(gaussian, 120)
	if again := run(gaussian, 120); !bytes.Equal(noisy, again) {
		t.Errorf("two runs with the same seed begin with\n%v, want\n%v", again[:8], noisy[:8])
	}
	var sum, squares float64
	for _, b := range noisy {
		sum += float64(b)
		squares += float64(b) * float64(b)
	}
	n := float64(len(noisy))
	mean := sum / n
	// Cutting towards zero takes up to half a level off.
	if deviation := math.Sqrt(squares/n - mean*mean); math.Abs(mean-(120+0.02*255)) > 0.5 ||
		deviation > 0.05*255 || deviation < 0.05*255-0.5 {
		t.Errorf("mean %v, deviation %v", mean, deviation)
	}
}

package transform

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/order"
)

// golden holds torchvision's results (cshim/test/image/make_augment.py).
type golden struct {
	Width, Height, Seed int
	Steps               [][6]any // policy, operation, bin, sign, magnitude, CRC-32 of the result
	Rotations           [][6]any // angle, width, height, interpolation, fill, CRC-32
	Policies            map[string][][2][3]any
	Centres             [][8]any // angle, width, height, interpolation, fill, centre, CRC-32 of rotate and of affine
	Augmixes            [][3]any // weights, chains of operation, bin and sign, CRC-32
	// angle, width, height, interpolation, fill, width and height of the result, CRC-32 of its
	// upper left corner
	Expansions [][8]any
}

func readGolden(t *testing.T) *golden {
	t.Helper()
	data, err := os.ReadFile("testdata/augment.json")
	if err != nil {
		t.Fatal(err)
	}
	g := &golden{}
	if err := json.Unmarshal(data, g); err != nil {
		t.Fatal(err)
	}
	return g
}

// numbered returns the picture that make_augment.py makes from a number.
func numbered(seed uint64, w, h int) []byte {
	out := make([]byte, 0, 3*w*h)
	state := seed
	for y := range h {
		for x := range w {
			for c := range 3 {
				state = state*6364136223846793005 + 1442695040888963407
				noise := int(state >> 56)
				slope := (x*7 + y*5 + c*40) % 256
				if slope < 128 {
					slope *= 2
				} else {
					slope = 510 - 2*slope
				}
				out = append(out, byte([]int{slope*7/8 + noise/8, noise, 100 + noise/16, slope*7/8 + noise/8}[seed%4]))
			}
		}
	}
	return out
}

// checksum runs a program on a numbered picture.
func checksum(t *testing.T, seed uint64, w, h int, draw func(p *program)) string {
	t.Helper()
	c, err := imagecapi.NewAugmenter()
	if err != nil {
		t.Fatal(err)
	}
	defer imagecapi.FreeAugmenter(c)
	p := program{width: w, height: h}
	draw(&p)
	pixels := numbered(seed, w, h)
	if err := imagecapi.Augment(c, pixels, w, h, 3*w, p.ops); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%08x", crc32.ChecksumIEEE(pixels))
}

func colorOf(v any) Color {
	fill := v.([]any)
	return Color{uint8(fill[0].(float64)), uint8(fill[1].(float64)), uint8(fill[2].(float64))}
}

// draws collects n programs of one step, as the loader seeds them.
func draws(op Op, w, h, n int, visit func(p *program)) {
	var source rand.PCG
	rng := rand.New(&source)
	for i := range n {
		order.Seed(&source, 9, order.OfSample, 1, i)
		p := program{width: w, height: h}
		op.draw(rng, &p)
		visit(&p)
	}
}

// kolmogorov returns the largest distance between the distribution of values and cdf. values must
// be sorted. If the values have steps, cdf must have the same steps.
func kolmogorov(values []float64, cdf func(float64) float64) float64 {
	slices.Sort(values)
	worst, n := 0.0, float64(len(values))
	for i := 0; i < len(values); {
		j := i
		for j < len(values) && values[j] == values[i] {
			j++
		}
		worst = math.Max(worst, math.Abs(cdf(values[i])-float64(j)/n))
		if i > 0 {
			worst = math.Max(worst, math.Abs(cdf(math.Nextafter(values[i], math.Inf(-1)))-float64(i)/n))
		}
		i = j
	}
	return worst
}

const (
	manyDraws = 100_000
	// ksLimit is passed by chance once in 10,000 tests of 100,000 draws: sqrt(ln(2/1e-4)/2/n).
	ksLimit = 0.00704
)

func uniformCDF(low, high float64) func(float64) float64 {
	return func(x float64) float64 { return math.Min(math.Max((x-low)/(high-low), 0), 1) }
}

// stepsCDF is the distribution of an integer that is uniform in low to high, both included.
func stepsCDF(low, high int) func(float64) float64 {
	return func(x float64) float64 {
		return math.Min(math.Max((math.Floor(x)-float64(low)+1)/float64(high-low+1), 0), 1)
	}
}

// roundedCDF is the distribution of round(u), u uniform in -most to most.
func roundedCDF(most float64) func(float64) float64 {
	return func(x float64) float64 { return math.Min(math.Max((math.Floor(x)+0.5+most)/(2*most), 0), 1) }
}

func meanStd(v []float64) (mean, std float64) {
	for _, x := range v {
		mean += x
	}
	mean /= float64(len(v))
	for _, x := range v {
		std += (x - mean) * (x - mean)
	}
	return mean, math.Sqrt(std / float64(len(v)-1))
}

// newAugmenter makes an augmenter that the end of the test closes.
func newAugmenter(t *testing.T, transform Transform) *Augmenter {
	t.Helper()
	compiled, err := Compile(transform)
	if err != nil {
		t.Fatal(err)
	}
	a, err := compiled.NewAugmenter()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	return a
}

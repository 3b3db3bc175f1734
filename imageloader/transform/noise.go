package transform

import (
	"fmt"
	"math/rand/v2"
)

// GaussianNoise adds noise to every byte. The noise has a normal distribution with mean 255*Mean
// and standard deviation 255*Sigma (0: 0.1), truncated to an integer. Samples with this step are
// decoded on the host.
type GaussianNoise struct{ Mean, Sigma float64 }

func (o GaussianNoise) check(w, h int) (int, int, error) {
	if !(o.Mean >= -1 && o.Mean <= 1 && o.Sigma >= 0 && o.Sigma <= 10) {
		return 0, 0, fmt.Errorf("fields Mean and Sigma are %v and %v, not in -1 to 1 and 0 to 10", o.Mean, o.Sigma)
	}
	return w, h, nil
}

func (o GaussianNoise) draw(_ *rand.Rand, p *program) {
	mean, sigma := 255*o.Mean, 255*probability(o.Sigma, 0.1)
	p.call(func(rng *rand.Rand, image *Pixels) error {
		for y := range image.Height {
			row := image.Pix[y*image.Stride:][:3*image.Width]
			for i := range row {
				row[i] = byte(min(max(int(row[i])+int(mean+sigma*rng.NormFloat64()), 0), 255))
			}
		}
		return nil
	})
}

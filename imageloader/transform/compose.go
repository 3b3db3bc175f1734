package transform

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
)

// RandomApply applies all of Ops, with probability P (0: 1/2), or none of them. Together they must
// keep the image's size. The step also runs on a GPU that decodes. If an applied operation cannot
// run on the GPU, the sample is decoded on the host.
type RandomApply struct {
	Ops []Op
	P   float64
}

func (o RandomApply) check(w, h int) (int, int, error) {
	if err := checkP(o.P); err != nil {
		return 0, 0, err
	}
	return w, h, checkOps(o.Ops, w, h)
}

func (o RandomApply) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		for _, op := range o.Ops {
			op.draw(rng, p)
		}
	}
}

// RandomChoice applies one of Ops. Each of them must keep the image's size. P has their
// probabilities, which are divided by their sum. If P is empty, all are equally likely. The step
// also runs on a GPU that decodes. If the chosen operation cannot run on the GPU, the sample is
// decoded on the host.
type RandomChoice struct {
	Ops []Op
	P   []float64
}

func (o RandomChoice) check(w, h int) (int, int, error) {
	if len(o.Ops) == 0 {
		return 0, 0, errors.New("field Ops is empty")
	}
	sum := 0.
	for _, p := range o.P {
		if !(p >= 0) {
			sum = math.NaN()
		}
		sum += p
	}
	if len(o.P) > 0 && (len(o.P) != len(o.Ops) || !(sum > 0) || math.IsInf(sum, 0)) {
		return 0, 0, fmt.Errorf("field P is %v, not a probability for each of %d Ops", o.P, len(o.Ops))
	}
	return w, h, checkEach(o.Ops, w, h)
}

func (o RandomChoice) draw(rng *rand.Rand, p *program) {
	if len(o.P) == 0 {
		o.Ops[rng.IntN(len(o.Ops))].draw(rng, p)
		return
	}
	sum := 0.
	for _, p := range o.P {
		sum += p
	}
	at, last := rng.Float64()*sum, 0
	for i, p := range o.P {
		if p > 0 {
			last = i
			if at -= p; at < 0 {
				break
			}
		}
	}
	o.Ops[last].draw(rng, p)
}

// RandomOrder applies all of Ops in random order. Each of them must keep the image's size. The step
// also runs on a GPU that decodes. If an applied operation cannot run on the GPU, the sample is
// decoded on the host.
type RandomOrder struct{ Ops []Op }

func (o RandomOrder) check(w, h int) (int, int, error) { return w, h, checkEach(o.Ops, w, h) }

func (o RandomOrder) draw(rng *rand.Rand, p *program) {
	for _, i := range rng.Perm(len(o.Ops)) {
		o.Ops[i].draw(rng, p)
	}
}

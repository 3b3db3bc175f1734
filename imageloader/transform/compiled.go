package transform

import (
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Compiled is a checked Transform with its defaults filled in, for package imageloader. Programs
// that load images do not need it. A Compiled is immutable, so it can be shared.
type Compiled struct{ t Transform }

// Compile checks a transform. The error names the wrong field and its valid values.
func Compile(t Transform) (*Compiled, error) {
	t = t.withDefaults()
	if err := t.check(); err != nil {
		return nil, err
	}
	return &Compiled{t}, nil
}

// StepsOnDevice reports whether a GPU that decodes can run all steps of Ops, whatever parameters
// are drawn.
func (p *Compiled) StepsOnDevice() bool { return onDevice(p.t.Ops, p.t.Size) }

// Transform returns the transform with its defaults filled in.
func (p *Compiled) Transform() Transform { return p.t }

// Geometry draws the crop and the flip for an image with this header, and writes them to g. It
// returns an error if the image is too narrow for any crop.
func (p *Compiled) Geometry(rng *rand.Rand, info *imagecapi.Info, g *imagecapi.Geometry) error {
	width, height, orientation := info.Width, info.Height, int32(0)
	if p.t.ApplyEXIFOrientation && info.Orientation > 1 {
		if orientation = info.Orientation; orientation >= 5 { // the image is stored on its side
			width, height = height, width
		}
	}
	err := p.t.geometry(rng, width, height, g)
	g.Orientation = orientation
	return err
}

// Augmenter runs Transform.Ops. It belongs to one goroutine.
type Augmenter struct {
	t       *Transform
	c       *imagecapi.Augmenter
	program program
	moved   []imagecapi.AugmentOp // scratch of ApplyMoves
}

// NewAugmenter returns an Augmenter, which the caller closes. It returns nil if the transform has
// no Ops.
func (p *Compiled) NewAugmenter() (*Augmenter, error) {
	if len(p.t.Ops) == 0 {
		return nil, nil
	}
	c, err := imagecapi.NewAugmenter()
	if err != nil {
		return nil, err
	}
	return &Augmenter{t: &p.t, c: c}, nil
}

// Close frees the augmenter's resources. On a nil augmenter it does nothing.
func (a *Augmenter) Close() {
	if a != nil {
		imagecapi.FreeAugmenter(a.c)
	}
}

// FuncError is an error from a [Func], or its panic.
type FuncError struct{ Err error }

func (e FuncError) Error() string { return e.Err.Error() }
func (e FuncError) Unwrap() error { return e.Err }

// Draw draws the parameters of the Ops for one image from rng. With a nil augmenter it does
// nothing.
func (a *Augmenter) Draw(rng *rand.Rand) {
	if a == nil {
		return
	}
	a.program.reset(a.t)
	for _, op := range a.t.Ops {
		op.draw(rng, &a.program)
	}
}

// Apply calls Draw and Run.
func (a *Augmenter) Apply(rng *rand.Rand, pixels []byte) error {
	a.Draw(rng)
	return a.Run(rng, pixels)
}

// Operations returns the operations from the last Draw. They are valid until the next Draw. ok is
// false if they include Go code, which only Run can execute.
func (a *Augmenter) Operations() (ops []imagecapi.AugmentOp, ok bool) {
	return a.program.ops, len(a.program.calls) == 0
}

// Run applies the operations from the last Draw to Size x Size x 3 bytes, in place. rng must be the
// generator that was passed to Draw. An error from a Func is a [FuncError], after which the pixels
// are undefined. With a nil augmenter it does nothing.
func (a *Augmenter) Run(rng *rand.Rand, pixels []byte) error {
	if a == nil {
		return nil
	}
	t, done := a.t, 0
	for _, c := range a.program.calls {
		if err := a.run(pixels, a.program.ops[done:c.after]); err != nil {
			return err
		}
		done = c.after
		if err := c.run.call(rng, &Pixels{Pix: pixels, Width: t.Size, Height: t.Size, Stride: 3 * t.Size}); err != nil {
			return FuncError{err}
		}
	}
	return a.run(pixels, a.program.ops[done:])
}

func (a *Augmenter) run(pixels []byte, ops []imagecapi.AugmentOp) error {
	return imagecapi.Augment(a.c, pixels, a.t.Size, a.t.Size, 3*a.t.Size, ops)
}

// Mixer runs Transform.Mix. It belongs to one goroutine.
type Mixer struct {
	t       *Transform
	scratch []byte
}

// NewMixer returns a Mixer, or nil if the transform has no Mix.
func (p *Compiled) NewMixer() *Mixer {
	if len(p.t.Mix) == 0 {
		return nil
	}
	return &Mixer{t: &p.t}
}

// Mix mixes n samples of Size x Size x 3 bytes, in place: each with the previous sample, and the
// first with the last. It draws the operation and its parameters from rng. It returns the share,
// from 0 to 1, that each sample keeps of its own pixels.
func (m *Mixer) Mix(rng *rand.Rand, images []byte, n int) (share float64) {
	op := m.t.Mix[rng.IntN(len(m.t.Mix))]
	return op.mix(rng, images, n, m.t.Size, &m.scratch)
}

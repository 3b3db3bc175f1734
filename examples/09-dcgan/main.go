// Command 09-dcgan trains a deep convolutional generative adversarial network on drawings of discs,
// squares and crosses. Its source draws them during the training.
//
//	09-dcgan -picture shapes.png     draw the network's images below real ones
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/examples/internal/study"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

const (
	side  = 16 // side of an image in pixels
	noise = 32 // input numbers per image
)

type options struct {
	device, picture     string
	steps, batch, width int
	seed                uint64
}

func main() {
	var o options
	flag.StringVar(&o.device, "device", "", "cpu or cuda:N (default: the first GPU, or the CPU)")
	flag.StringVar(&o.picture, "picture", "", "draw real images, and the network's below them, to this PNG `file`")
	flag.IntVar(&o.steps, "steps", 1500, "steps of training")
	flag.IntVar(&o.batch, "batch", 32, "images in a batch")
	flag.IntVar(&o.width, "width", 24, "channels of the widest images")
	flag.Uint64Var(&o.seed, "seed", 1, "of parameters, drawings and noise")
	lesson.Usage(flag.CommandLine, "09-dcgan [options]",
		"Trains an adversarial network that draws discs, squares and crosses.")
	flag.Parse()
	lesson.Run("09-dcgan", func(ctx context.Context) error {
		_, err := run(ctx, o, os.Stdout)
		return err
	})
}

// drawings is a source of images, uint8 [side side 1], with one shape each.
type drawings struct {
	batch, batches int
	seed           uint64
}

func (d drawings) Fields() []torch.Spec {
	return []torch.Spec{{Name: "images", DType: torch.Uint8, Shape: []int64{side, side, 1}}}
}

func (d drawings) BatchSize() int { return d.batch }

// Outputs and Finishes let the device convert the bytes to numbers in [-1, 1].
func (d drawings) Outputs() []torch.Spec {
	return []torch.Spec{{Name: "images", DType: torch.Float32, Shape: []int64{1, side, side}}}
}

func (d drawings) Finishes() []tensor.Finish {
	return []tensor.Finish{{Mean: []float32{0.5}, Std: []float32{0.5}}}
}

// Fill draws the epoch's batches.
func (d drawings) Fill(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, error),
	deliver func(int, any) error) error {
	rng := rand.New(rand.NewPCG(d.seed, uint64(epoch)))
	for range d.batches {
		memory, err := lend(ctx)
		if err != nil {
			return err
		}
		for i := range d.batch {
			draw(rng, memory[0][i*side*side:][:side*side])
		}
		if err := deliver(d.batch, nil); err != nil {
			return err
		}
	}
	return nil
}

// draw draws a disc, a square or a cross with random position, size and brightness.
func draw(rng *rand.Rand, pixels []byte) {
	radius := 3 + rng.IntN(3)
	cx, cy := radius+1+rng.IntN(side-2*radius-2), radius+1+rng.IntN(side-2*radius-2)
	kind, ink := rng.IntN(3), byte(160+rng.IntN(96))
	for i := range pixels {
		x, y := i%side-cx, i/side-cy
		inside := max(x, -x) <= radius && max(y, -y) <= radius
		switch kind {
		case 0:
			inside = x*x+y*y <= radius*radius
		case 1:
			inside = inside && (max(x, -x) <= 1 || max(y, -y) <= 1)
		}
		pixels[i] = 0
		if inside {
			pixels[i] = ink
		}
	}
}

// newGenerator turns noise [N noise 1 1] into images [N 1 16 16].
func newGenerator(width int) *nn.Sequential {
	up := func(in, out int) nn.Module {
		return nn.NewSequential(nn.NewConvTranspose2d(in, out, 4,
			nn.ConvTranspose2dOptions{Stride: 2, Padding: 1, NoBias: true}),
			nn.NewBatchNorm2d(out, nn.BatchNorm2dOptions{}), nn.NewReLU())
	}
	return nn.NewSequential(
		nn.NewConvTranspose2d(noise, 4*width, 4, nn.ConvTranspose2dOptions{NoBias: true}),
		nn.NewBatchNorm2d(4*width, nn.BatchNorm2dOptions{}), nn.NewReLU(),
		up(4*width, 2*width),
		nn.NewConvTranspose2d(2*width, 1, 4, nn.ConvTranspose2dOptions{Stride: 2, Padding: 1}), nn.NewTanh(),
	)
}

// newCritic turns each image [N 1 16 16] into one logit, above 0 for a real image.
func newCritic(width int) *nn.Sequential {
	down := func(in, out int) *nn.Conv2d {
		return nn.NewConv2d(in, out, 4, nn.Conv2dOptions{Stride: 2, Padding: 1, NoBias: true})
	}
	return nn.NewSequential(
		down(1, width), nn.NewLeakyReLU(nn.LeakyReLUOptions{NegativeSlope: 0.2}),
		down(width, 2*width), nn.NewBatchNorm2d(2*width, nn.BatchNorm2dOptions{}),
		nn.NewLeakyReLU(nn.LeakyReLUOptions{NegativeSlope: 0.2}),
		nn.NewConv2d(2*width, 1, 4, nn.Conv2dOptions{NoBias: true}), nn.NewFlatten(),
	)
}

// gan trains both networks.
type gan struct {
	device            cuda.Device
	generator, critic *nn.Sequential
	forge, judge      optim.Optimizer
}

func newGAN(o options, device cuda.Device) (g *gan, err error) {
	g = &gan{device: device, generator: newGenerator(o.width), critic: newCritic(o.width)}
	for _, net := range []nn.Module{g.generator, g.critic} {
		if err := nn.To(net, device); err != nil {
			return g, err
		}
		for _, p := range nn.Parameters(net) {
			if len(p.Shape()) > 1 { // DCGAN's initialisation
				if err := nn.Initialise(p, nn.Normal(0, 0.02)); err != nil {
					return g, err
				}
			}
		}
	}
	options := optim.AdamOptions{LR: 5e-4, Betas: &[2]float64{0.5, 0.999}}
	if g.forge, err = optim.NewAdam(nn.Parameters(g.generator), options); err != nil {
		return g, err
	}
	g.judge, err = optim.NewAdam(nn.Parameters(g.critic), options)
	return g, err
}

func (g *gan) close() {
	if g.forge != nil {
		g.forge.Close()
	}
	if g.judge != nil {
		g.judge.Close()
	}
	nn.Close(g.generator)
	nn.Close(g.critic)
}

// make returns n images from new noise. The scope owns them.
func (g *gan) make(scope *torch.Scope, n int64) *torch.Tensor {
	z, err := torch.TensorOptions{Device: g.device, DType: torch.Float32, Scope: scope}.Randn(n, noise, 1, 1)
	if err != nil {
		return torch.Fail("gan.make", err)
	}
	return g.generator.Forward(z)
}

// step trains the critic on real and generated images, and then the generator against the critic.
func (g *gan) step(real *torch.Tensor) (critic, generator *torch.Tensor, err error) {
	made := g.make(real.Scope(), real.Shape()[0])
	verdict := func(x *torch.Tensor, truth float64) *torch.Tensor {
		y := g.critic.Forward(x)
		return y.BCEWithLogitsLoss(y.FullLike(truth))
	}
	critic = verdict(real, 0.9).Add(verdict(made.Detach(), 0)) // 0.9, because an overconfident critic teaches nothing
	if err := critic.Backward(); err != nil {
		return nil, nil, err
	}
	if err := g.judge.Step(); err != nil {
		return nil, nil, err
	}
	generator = verdict(made, 1)
	if err := generator.Backward(); err != nil {
		return nil, nil, err
	}
	if err := g.forge.Step(); err != nil {
		return nil, nil, err
	}
	return critic, generator, torch.ClearGrads(nn.Parameters(g.critic)...) // the generator's loss has left gradients there
}

// result holds the images, [N 1 side side] from 0 to 1 as one slice, and the last losses.
type result struct {
	made, real        []float32
	critic, generator float64
}

func run(ctx context.Context, o options, out io.Writer) (*result, error) {
	device, err := study.Device(o.device)
	if err == nil {
		err = study.Positive(map[string]int{"steps": o.steps, "batch": o.batch, "width": o.width})
	}
	if err != nil {
		return nil, err
	}
	if err := torch.ManualSeed(o.seed); err != nil {
		return nil, err
	}
	feed, err := prefetcher.New(drawings{o.batch, o.steps, o.seed}, prefetcher.Options{Device: device})
	if err != nil {
		return nil, err
	}
	defer feed.Close()
	g, err := newGAN(o, device)
	defer g.close()
	if err != nil {
		return nil, err
	}
	r := &result{}
	for batch, err := range feed.Epoch(ctx, 0) {
		if err != nil {
			return nil, err
		}
		critic, generator, err := g.step(batch.Images)
		if err != nil {
			return nil, err
		}
		step := batch.Index + 1
		if step != o.steps && step%200 != 0 {
			continue
		}
		if r.critic, err = critic.Float64(); err != nil {
			return nil, err
		}
		if r.generator, err = generator.Float64(); err != nil {
			return nil, err
		}
		fmt.Fprintf(out, "step %d: loss of the critic %.2f, of the generator %.2f\n", step, r.critic, r.generator)
		if step == o.steps {
			if err := g.show(o, batch.Images, r); err != nil {
				return nil, err
			}
		}
	}
	return r, nil
}

// show generates images and draws them below real ones. Normalisations use the statistics of these
// images, as in training.
func (g *gan) show(o options, real *torch.Tensor, r *result) (err error) {
	n := min(int64(24), real.Shape()[0])
	visible := func(x *torch.Tensor) *torch.Tensor { return x.NoGrad().AddScalar(1).DivScalar(2) }
	drawn, made := visible(real.Index(torch.Until(n))), visible(g.make(real.Scope(), n))
	if r.real, err = drawn.Float32s(); err != nil {
		return err
	}
	if r.made, err = made.Float32s(); err != nil {
		return err
	}
	if o.picture == "" {
		return nil
	}
	return study.Grid(o.picture, torch.Cat([]*torch.Tensor{drawn, made}, 0), 12, 4)
}

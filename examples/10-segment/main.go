// Command 10-segment finds discs, squares and crosses in noisy pictures, pixel by pixel, with a
// small U-Net. It first draws an archive of images and masks, and then reads it with the loader.
//
//	10-segment -picture segment.png    draw images, their masks, and the predicted masks
package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/examples/internal/study"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

const (
	side    = 48 // side of an image in pixels
	classes = 4  // per pixel: background, disc, square, cross
)

type options struct {
	device, picture       string
	images, epochs, width int
	seed                  uint64
}

func main() {
	var o options
	flag.StringVar(&o.device, "device", "", "cpu or cuda:N (default: the first GPU, or the CPU)")
	flag.StringVar(&o.picture, "picture", "", "draw test images, their masks and the network's to this PNG `file`")
	flag.IntVar(&o.images, "images", 384, "images of training")
	flag.IntVar(&o.epochs, "epochs", 20, "epochs of training")
	flag.IntVar(&o.width, "width", 12, "channels at full size")
	flag.Uint64Var(&o.seed, "seed", 1, "of images, parameters and batches")
	lesson.Usage(flag.CommandLine, "10-segment [options]",
		"Trains a U-Net that finds discs, squares and crosses in noisy pictures, pixel by pixel.")
	flag.Parse()
	lesson.Run("10-segment", func(ctx context.Context) error {
		_, err := run(ctx, o, os.Stdout)
		return err
	})
}

// writeArchive writes a tar of images/N.png and masks/N.png. A mask's pixels are the classes of the
// image's pixels.
func writeArchive(path string, images int, rng *rand.Rand) error {
	var b bytes.Buffer
	archive := tar.NewWriter(&b)
	for i := range images {
		picture, mask := draw(rng)
		for _, member := range []struct {
			folder string
			image  image.Image
		}{{"images", picture}, {"masks", mask}} {
			var data bytes.Buffer
			if err := png.Encode(&data, member.image); err != nil {
				return err
			}
			header := &tar.Header{Name: fmt.Sprintf("%s/%04d.png", member.folder, i), Mode: 0o644,
				Size: int64(data.Len())}
			if err := archive.WriteHeader(header); err != nil {
				return err
			}
			if _, err := archive.Write(data.Bytes()); err != nil {
				return err
			}
		}
	}
	if err := archive.Close(); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o600)
}

// draw draws three shapes with random colours on noise.
func draw(rng *rand.Rand) (image.Image, image.Image) {
	picture, mask := image.NewRGBA(image.Rect(0, 0, side, side)), image.NewGray(image.Rect(0, 0, side, side))
	type shape struct {
		kind, x, y, radius int
		ink                [3]int
	}
	var shapes [3]shape
	for i := range shapes {
		shapes[i] = shape{1 + rng.IntN(3), 8 + rng.IntN(side-16), 8 + rng.IntN(side-16), 5 + rng.IntN(5),
			[3]int{rng.IntN(200), rng.IntN(200), rng.IntN(200)}}
	}
	for y := range side {
		for x := range side {
			ink := [3]int{110, 110, 110}
			for _, s := range shapes {
				dx, dy := max(x-s.x, s.x-x), max(y-s.y, s.y-y)
				box := max(dx, dy) <= s.radius
				if s.kind == 1 && dx*dx+dy*dy <= s.radius*s.radius || s.kind == 2 && box || s.kind == 3 &&
					box && min(dx, dy) <= 2 {
					ink = s.ink
					mask.SetGray(x, y, color.Gray{Y: uint8(s.kind)})
				}
			}
			c := color.RGBA{A: 0xff}
			for i, p := range []*uint8{&c.R, &c.G, &c.B} {
				*p = uint8(ink[i] + rng.IntN(50))
			}
			picture.SetRGBA(x, y, c)
		}
	}
	return picture, mask
}

// unet halves the image twice and doubles it again. Each doubling step also gets the intermediate
// images of the halving steps, which hold the exact positions.
type unet struct {
	down [2]nn.Module
	deep nn.Module
	up   [2]*nn.ConvTranspose2d
	fuse [2]nn.Module
	head nn.Module
}

func newUNet(width int) *unet {
	block := func(in, out int) nn.Module {
		return nn.NewSequential(nn.NewConv2d(in, out, 3, nn.Conv2dOptions{Padding: 1, NoBias: true}),
			nn.NewBatchNorm2d(out, nn.BatchNorm2dOptions{}), nn.NewReLU())
	}
	up := func(in, out int) *nn.ConvTranspose2d {
		return nn.NewConvTranspose2d(in, out, 2, nn.ConvTranspose2dOptions{Stride: 2})
	}
	return &unet{
		down: [2]nn.Module{block(3, width), block(width, 2*width)},
		deep: block(2*width, 4*width),
		up:   [2]*nn.ConvTranspose2d{up(4*width, 2*width), up(2*width, width)},
		fuse: [2]nn.Module{block(4*width, 2*width), block(2*width, width)},
		head: nn.NewConv2d(width, classes, 1, nn.Conv2dOptions{}),
	}
}

// Forward returns the logits [N classes H W] for images [N 3 H W]. H and W must be multiples of 4.
func (u *unet) Forward(x *torch.Tensor) *torch.Tensor {
	halve := func(x *torch.Tensor) *torch.Tensor {
		return x.MaxPool2d([]int64{2}, torch.MaxPool2dOptions{})
	}
	full := u.down[0].Forward(x)
	half := u.down[1].Forward(halve(full))
	x = u.deep.Forward(halve(half))
	x = u.fuse[0].Forward(torch.Cat([]*torch.Tensor{u.up[0].Forward(x), half}, 1))
	x = u.fuse[1].Forward(torch.Cat([]*torch.Tensor{u.up[1].Forward(x), full}, 1))
	return u.head.Forward(x)
}

// Parts names the parts, for checkpoints and errors.
func (u *unet) Parts() nn.Parts {
	return nn.Parts{Modules: []nn.Child{
		{Name: "down.0", Module: u.down[0]}, {Name: "down.1", Module: u.down[1]}, {Name: "deep", Module: u.deep},
		{Name: "up.0", Module: u.up[0]}, {Name: "up.1", Module: u.up[1]},
		{Name: "fuse.0", Module: u.fuse[0]}, {Name: "fuse.1", Module: u.fuse[1]},
		{Name: "head", Module: u.head},
	}}
}

// trainEpoch takes a step for each batch of the epoch.
func trainEpoch(ctx context.Context, net *unet, feed *prefetcher.Prefetcher, epoch int, opt optim.Optimizer,
	rates *optim.Scheduler) error {
	nn.Train(net, true)
	for batch, err := range feed.Epoch(ctx, epoch) {
		if err != nil {
			return err
		}
		if err := net.Forward(batch.Images).CrossEntropy(masks(batch)).Backward(); err != nil {
			return err
		}
		if err := opt.Step(); err != nil {
			return err
		}
		if err := rates.Step(); err != nil {
			return err
		}
	}
	return nil
}

func run(ctx context.Context, o options, out io.Writer) (overlaps []float64, err error) {
	device, err := study.Device(o.device)
	if err == nil {
		err = study.Positive(map[string]int{"images": o.images, "epochs": o.epochs, "width": o.width})
	}
	if err != nil {
		return nil, err
	}
	if err := torch.ManualSeed(o.seed); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "segment")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	open := func(name string, images int, t imageloader.Transform, seed uint64) (*imageloader.Loader,
		*prefetcher.Prefetcher, error) {
		path := filepath.Join(dir, name)
		if err := writeArchive(path, images, rand.New(rand.NewPCG(o.seed, seed))); err != nil {
			return nil, nil, err
		}
		loader, err := imageloader.OpenContext(ctx, path, imageloader.Options{
			BatchSize: 16, Transform: t, Shuffle: seed == 1, Seed: o.seed,
			Masks: imageloader.Masks{Image: "images/*.png", Mask: "masks/*.png", DType: tensor.Int64},
		})
		if err != nil {
			return nil, nil, err
		}
		feed, err := prefetcher.New(loader, prefetcher.Options{Device: device})
		return loader, feed, errors.Join(err, closeUnless(err == nil, loader))
	}
	train := imageloader.Train(side)
	train.Scale = [2]float64{0.5, 1} // of the image's area; the mask gets the same crop and flip
	loader, feed, err := open("train.tar", o.images, train, 1)
	if err != nil {
		return nil, err
	}
	defer loader.Close()
	defer feed.Close()
	tests, test, err := open("test.tar", 32, transform.Eval(side, side), 2)
	if err != nil {
		return nil, err
	}
	defer tests.Close()
	defer test.Close()

	net := newUNet(o.width)
	defer nn.Close(net)
	if err := nn.To(net, device); err != nil {
		return nil, err
	}
	opt, err := optim.NewAdamW(nn.Parameters(net), optim.AdamWOptions{LR: 1e-2})
	if err != nil {
		return nil, err
	}
	defer opt.Close()
	if least := 4; o.epochs*loader.Batches() < least {
		return nil, fmt.Errorf("-epochs %d with -images %d are %d steps: at least %d are needed", o.epochs,
			o.images, o.epochs*loader.Batches(), least)
	}
	rates, err := optim.NewScheduler(opt, optim.OneCycleLR{Steps: o.epochs * loader.Batches()})
	if err != nil {
		return nil, err
	}
	for epoch := range o.epochs {
		if err := trainEpoch(ctx, net, feed, epoch, opt, rates); err != nil {
			return nil, err
		}
		overlap, err := evaluate(ctx, net, test, device, "")
		if err != nil {
			return nil, err
		}
		overlaps = append(overlaps, overlap)
		fmt.Fprintf(out, "epoch %d: mean intersection over union %.2f\n", epoch+1, overlap)
	}
	if o.picture != "" {
		_, err = evaluate(ctx, net, test, device, o.picture)
	}
	return overlaps, err
}

func closeUnless(ok bool, loader *imageloader.Loader) error {
	if ok {
		return nil
	}
	return loader.Close()
}

// masks returns the batch's masks [N H W], which are the second field, after the images.
func masks(batch *prefetcher.Batch) *torch.Tensor { return batch.Tensors()[1] }

// evaluate returns the intersection over union, averaged over the classes. If picture is not "", it
// draws the first images to that file.
func evaluate(ctx context.Context, net nn.Module, feed *prefetcher.Prefetcher, device cuda.Device,
	picture string) (float64, error) {
	nn.Train(net, false)
	// Entry label*classes+prediction counts pixels.
	confusion, err := torch.Zeros(device, torch.Int64, classes*classes)
	if err != nil {
		return 0, err
	}
	defer confusion.Close()
	for batch, err := range feed.Epoch(ctx, 0) {
		if err != nil {
			return 0, err
		}
		found, truth := net.Forward(batch.Images.NoGrad()).ArgMax(1, false), masks(batch)
		pairs := truth.MulInt(classes).Add(found).Flatten(0, -1)
		if err := confusion.Add_(
			pairs.BinCount(torch.BinCountOptions{Minlength: classes * classes})).Err(); err != nil {
			return 0, err
		}
		if picture != "" && batch.Index == 0 {
			if err := show(picture, batch.Images, truth, found); err != nil {
				return 0, err
			}
		}
	}
	scope := torch.NewScope("overlap")
	defer scope.Close()
	m := confusion.In(scope).View(classes, classes).ToDType(torch.Float64)
	hits := m.Diagonal(0, 0, 1)
	union := m.SumDim([]int64{0}, false).Add(m.SumDim([]int64{1}, false)).Sub(hits)
	return hits.Div(union.ClampMin(1)).Mean().Float64()
}

// show draws images, their masks and the predicted masks in three rows.
func show(path string, images, truth, found *torch.Tensor) error {
	const n = 8
	// This undoes the normalisation by ImageNet's mean and standard deviation.
	std, err := torch.FromSlice([]float32{0.229, 0.224, 0.225}, 3, 1, 1)
	if err != nil {
		return err
	}
	defer std.Close()
	mean, err := torch.FromSlice([]float32{0.485, 0.456, 0.406}, 3, 1, 1)
	if err != nil {
		return err
	}
	defer mean.Close()
	first := torch.Until(n)
	rows := []*torch.Tensor{images.NoGrad().Index(first).To(cuda.CPU).Mul(std).Add(mean)}
	for _, classes := range []*torch.Tensor{truth, found} {
		// Each class except the background gets a colour: red, green, blue.
		colours := classes.Index(first).OneHot(4).Index(torch.Ellipsis, torch.From(1)).Permute(0, 3, 1, 2)
		rows = append(rows, colours.ToDType(torch.Float32).To(cuda.CPU))
	}
	return study.Grid(path, torch.Cat(rows, 0), n, 2)
}

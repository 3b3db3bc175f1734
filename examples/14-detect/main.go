// Command 14-detect finds discs, squares and crosses in noisy pictures: a bounding box and a class
// for each. It first draws an archive of images and their boxes, and then reads it with the loader.
//
//	14-detect -picture detect.png    draw images with their boxes, and with the boxes that were found
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
	"github.com/torchstream/torchstream/imagefeed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

const (
	side     = 64 // side of an image in pixels
	classes  = 3  // disc, square, cross
	perImage = 3  // shapes of an image
)

type options struct {
	device, picture       string
	images, epochs, width int
	seed                  uint64
}

func main() {
	var o options
	flag.StringVar(&o.device, "device", "", "cpu or cuda:N (default: the first GPU, or the CPU)")
	flag.StringVar(&o.picture, "picture", "", "draw test images with their boxes and the network's to this PNG `file`")
	flag.IntVar(&o.images, "images", 512, "images of training")
	flag.IntVar(&o.epochs, "epochs", 12, "epochs of training")
	flag.IntVar(&o.width, "width", 16, "channels at full size")
	flag.Uint64Var(&o.seed, "seed", 1, "of images, parameters and batches")
	lesson.Usage(flag.CommandLine, "14-detect [options]",
		"Trains a small detector that finds discs, squares and crosses in noisy pictures.")
	flag.Parse()
	lesson.Run("14-detect", func(ctx context.Context) error {
		_, err := run(ctx, o, os.Stdout)
		return err
	})
}

// writeArchive writes a tar of images/N.png and labels/N.txt. A line of a text has the class of a
// shape, and the centre and size of its box as fractions of the image, as YOLO writes it.
func writeArchive(path string, images int, rng *rand.Rand) error {
	var b bytes.Buffer
	archive := tar.NewWriter(&b)
	add := func(name string, data []byte) error {
		if err := archive.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data))}); err != nil {
			return err
		}
		_, err := archive.Write(data)
		return err
	}
	for i := range images {
		picture, text := draw(rng)
		var data bytes.Buffer
		if err := png.Encode(&data, picture); err != nil {
			return err
		}
		if err := errors.Join(add(fmt.Sprintf("images/%04d.png", i), data.Bytes()),
			add(fmt.Sprintf("labels/%04d.txt", i), []byte(text))); err != nil {
			return err
		}
	}
	if err := archive.Close(); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o600)
}

// shape is a disc, a square or a cross.
type shape struct {
	kind, x, y, radius int
	ink                [3]int
}

// covers reports whether the pixel (x, y) belongs to the shape.
func (s *shape) covers(x, y int) bool {
	dx, dy := max(x-s.x, s.x-x), max(y-s.y, s.y-y)
	switch s.kind {
	case 0:
		return dx*dx+dy*dy <= s.radius*s.radius
	case 1:
		return max(dx, dy) <= s.radius
	}
	return max(dx, dy) <= s.radius && min(dx, dy) <= s.radius/3
}

// draw draws shapes that do not overlap, with random colours on noise. It returns the text with
// their boxes.
func draw(rng *rand.Rand) (picture image.Image, text string) {
	var shapes []shape
	for len(shapes) < perImage {
		r := 5 + rng.IntN(7)
		s := shape{rng.IntN(classes), r + rng.IntN(side-2*r), r + rng.IntN(side-2*r), r,
			[3]int{rng.IntN(200), rng.IntN(200), rng.IntN(200)}}
		apart := true
		for _, o := range shapes {
			apart = apart && max(s.x-o.x, o.x-s.x, s.y-o.y, o.y-s.y) > s.radius+o.radius
		}
		if !apart {
			continue
		}
		shapes = append(shapes, s)
		size := float64(2*r+1) / side
		text += fmt.Sprintln(s.kind, (float64(s.x)+0.5)/side, (float64(s.y)+0.5)/side, size, size)
	}
	m := image.NewRGBA(image.Rect(0, 0, side, side))
	for y := range side {
		for x := range side {
			ink := [3]int{110, 110, 110}
			for i := range shapes {
				if shapes[i].covers(x, y) {
					ink = shapes[i].ink
				}
			}
			m.SetRGBA(x, y, color.RGBA{uint8(ink[0] + rng.IntN(50)), uint8(ink[1] + rng.IntN(50)),
				uint8(ink[2] + rng.IntN(50)), 0xff})
		}
	}
	return m, text
}

func run(ctx context.Context, o options, out io.Writer) (precisions []float64, err error) {
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
	dir, err := os.MkdirTemp("", "detect")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	open := func(name string, images int, t imageloader.Transform, seed uint64) (*imagefeed.Feed, error) {
		path := filepath.Join(dir, name)
		if err := writeArchive(path, images, rand.New(rand.NewPCG(o.seed, seed))); err != nil {
			return nil, err
		}
		return imagefeed.Open(ctx, path, imagefeed.Options{
			Loader: imageloader.Options{BatchSize: 16, Transform: t, Shuffle: seed == 1, Seed: o.seed,
				// Boxes of shapes of which the crop has only an edge are left out.
				Boxes: imageloader.Boxes{Image: "images/*.png", File: "labels/*.txt", Max: perImage, MinSize: 4}},
			Prefetcher: prefetcher.Options{Device: device}})
	}
	augmented := imageloader.Train(side)
	augmented.Scale = [2]float64{0.5, 1} // of the image's area; the boxes get the same crop and flip
	train, err := open("train.tar", o.images, augmented, 1)
	if err != nil {
		return nil, err
	}
	defer train.Close()
	test, err := open("test.tar", 48, transform.Eval(side, side), 2)
	if err != nil {
		return nil, err
	}
	defer test.Close()

	net, err := newDetector(o.width, device)
	if err != nil {
		return nil, err
	}
	defer net.close()
	opt, err := optim.NewAdamW(nn.Parameters(net.layers), optim.AdamWOptions{LR: 1e-2})
	if err != nil {
		return nil, err
	}
	defer opt.Close()
	steps := o.epochs * train.Loader.Batches()
	if least := 4; steps < least {
		return nil, fmt.Errorf("-epochs %d with -images %d are %d steps: at least %d are needed", o.epochs,
			o.images, steps, least)
	}
	rates, err := optim.NewScheduler(opt, optim.OneCycleLR{Steps: steps})
	if err != nil {
		return nil, err
	}
	for epoch := range o.epochs {
		if err := trainEpoch(ctx, net, train, epoch, opt, rates); err != nil {
			return nil, err
		}
		precision, err := evaluate(ctx, net, test, "")
		if err != nil {
			return nil, err
		}
		precisions = append(precisions, precision)
		fmt.Fprintf(out, "epoch %d: mean average precision %.2f\n", epoch+1, precision)
	}
	if o.picture != "" {
		_, err = evaluate(ctx, net, test, o.picture)
	}
	return precisions, err
}

// trainEpoch takes a step for each batch of the epoch.
func trainEpoch(ctx context.Context, net *detector, feed *imagefeed.Feed, epoch int, opt optim.Optimizer,
	rates *optim.Scheduler) error {
	nn.Train(net.layers, true)
	for batch, err := range feed.Epoch(ctx, epoch) {
		if err != nil {
			return err
		}
		if err := net.loss(net.layers.Forward(batch.Images), boxes(batch)).Backward(); err != nil {
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

// boxes returns the batch's boxes [N perImage 5], which are the second field, after the images.
func boxes(batch *imagefeed.Batch) *torch.Tensor { return batch.Tensors()[1] }

// evaluate returns the mean of the classes' average precision at an intersection over union of 1/2.
// If picture is not "", it draws the first images to that file.
func evaluate(ctx context.Context, net *detector, feed *imagefeed.Feed, picture string) (float64, error) {
	nn.Train(net.layers, false)
	var truth, found [][]detection // of each image
	for batch, err := range feed.Epoch(ctx, 0) {
		if err != nil {
			return 0, err
		}
		first := len(truth)
		rows, err := boxes(batch).Float32s()
		if err != nil {
			return 0, err
		}
		for i := 0; i < len(rows); i += 5 * perImage {
			truth = append(truth, labelled(rows[i:i+5*perImage]))
		}
		predicted, err := net.detect(net.layers.Forward(batch.Images.NoGrad()))
		if err != nil {
			return 0, err
		}
		found = append(found, predicted...)
		if picture != "" && first == 0 {
			if err := show(picture, batch.Images, truth, found); err != nil {
				return 0, err
			}
		}
	}
	return meanAveragePrecision(truth, found), nil
}

// show draws images with their boxes, and with the boxes that were found, in two rows.
func show(path string, images *torch.Tensor, truth, found [][]detection) error {
	const n = 8
	pixels, err := images.NoGrad().Index(torch.Until(n)).To(cuda.CPU).Float32s()
	if err != nil {
		return err
	}
	// This undoes the normalisation by ImageNet's mean and standard deviation.
	mean, std := [3]float32{0.485, 0.456, 0.406}, [3]float32{0.229, 0.224, 0.225}
	for i := range pixels {
		channel := i / (side * side) % 3
		pixels[i] = pixels[i]*std[channel] + mean[channel]
	}
	const size = 3 * side * side
	all := append(append([]float32{}, pixels...), pixels...)
	for i := range n {
		for _, d := range truth[i] {
			d.outline(all[size*i : size*(i+1)])
		}
		for _, d := range found[i] {
			if d.score > 0.3 {
				d.outline(all[size*(n+i) : size*(n+i+1)])
			}
		}
	}
	grid, err := torch.FromSlice(all, 2*n, 3, side, side)
	if err != nil {
		return err
	}
	defer grid.Close()
	return study.Grid(path, grid, n, 2)
}

// outline draws the box of d on an image [3 side side]: discs red, squares green, crosses blue.
func (d *detection) outline(pixels []float32) {
	at := func(v float32) int { return min(max(int(v), 0), side-1) }
	x1, y1, x2, y2 := at(d.left), at(d.top), at(d.right), at(d.bottom)
	set := func(x, y int) {
		for channel := range 3 {
			pixels[channel*side*side+y*side+x] = 0
		}
		pixels[d.class*side*side+y*side+x] = 1
	}
	for x := x1; x <= x2; x++ {
		set(x, y1)
		set(x, y2)
	}
	for y := y1; y <= y2; y++ {
		set(x1, y)
		set(x2, y)
	}
}

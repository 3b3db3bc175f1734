package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strconv"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/nn"
)

// newNet returns a plain convolutional network for square colour images of any size: five
// convolutions, each followed by batch normalisation and ReLU, then the mean over the remaining
// pixels, and a linear layer. width is the number of channels of the first layer.
func newNet(classes, width int) nn.Module {
	block := func(in, out, stride int) nn.Module {
		return nn.NewSequential(
			nn.NewConv2d(in, out, 3, nn.Conv2dOptions{Stride: stride, Padding: 1, NoBias: true}),
			nn.NewBatchNorm2d(out, nn.BatchNorm2dOptions{}),
			nn.NewReLU(),
		)
	}
	return nn.NewSequential(
		block(3, width, 2),
		block(width, 2*width, 2),
		block(2*width, 4*width, 2),
		block(4*width, 4*width, 1),
		block(4*width, 8*width, 2),
		nn.NewAdaptiveAvgPool2d(1),
		nn.NewFlatten(),
		nn.NewLinear(8*width, classes, nn.LinearOptions{}),
	)
}

// resizeFor returns the size of the shorter side to which a test image is resized before its centre
// is cropped: 8/7 of the crop, like 256 for 224.
func resizeFor(size int) int { return size * 8 / 7 }

// settings describes a checkpoint's network. It is stored with the weights.
type settings struct {
	Classes []string
	Size    int // side of an image in pixels
	Width   int
}

// format marks the checkpoints of this program: predict rejects other safetensors files.
const format = "torchstream 01-train 1"

// saveCheckpoint writes a safetensors file: weights under PyTorch's state_dict names, and the
// settings as text. The images are normalised with ImageNet's mean and standard deviation.
func saveCheckpoint(path string, net nn.Module, s settings) error {
	classes, err := json.Marshal(s.Classes)
	if err != nil {
		return err
	}
	return nn.Save(path, net, map[string]string{
		"format": format, "classes": string(classes), "size": strconv.Itoa(s.Size), "width": strconv.Itoa(s.Width),
	})
}

// loadCheckpoint returns the network of a checkpoint, with its weights and settings.
func loadCheckpoint(path string) (nn.Module, settings, error) {
	var s settings
	file, err := checkpoint.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, s, fmt.Errorf("%s: no such checkpoint: `01-train train` writes one", path)
	}
	if err != nil {
		return nil, s, err
	}
	meta := file.Metadata()
	if err := file.Close(); err != nil {
		return nil, s, err
	}
	if meta["format"] != format {
		if meta["model"] != "" { // torchstream train sets it
			return nil, s, fmt.Errorf("%s is a checkpoint of torchstream train: `torchstream predict` "+
				"takes it, docs/serving.md has a program that serves it, and this one takes those of "+
				"`01-train train`", path)
		}
		return nil, s, fmt.Errorf("%s is not a checkpoint of this program: its format is %q, not %q", path,
			meta["format"], format)
	}
	if err := json.Unmarshal([]byte(meta["classes"]), &s.Classes); err != nil {
		return nil, s, fmt.Errorf("%s: classes: %w", path, err)
	}
	if s.Size, err = strconv.Atoi(meta["size"]); err != nil {
		return nil, s, fmt.Errorf("%s: size: %w", path, err)
	}
	if s.Width, err = strconv.Atoi(meta["width"]); err != nil {
		return nil, s, fmt.Errorf("%s: width: %w", path, err)
	}
	if len(s.Classes) < 1 || s.Size < 1 || s.Width < 1 {
		return nil, s, fmt.Errorf(
			"%s describes an impossible network: %d classes, width %d, images of %d pixels", path,
			len(s.Classes), s.Width, s.Size)
	}
	net := newNet(len(s.Classes), s.Width)
	if _, err := nn.Load(path, net); err != nil {
		return nil, s, err
	}
	return net, s, nil
}

func evalTransform(size int) imageloader.Transform { return imageloader.Eval(resizeFor(size), size) }

//go:build linux && cgo

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/aoti"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// networkOptions holds the options that choose an image network: a package of tools/export.py, or a
// checkpoint of torchstream train.
type networkOptions struct {
	path, device, output string
	resize               int
	mean, std            string // three numbers; "": the package's
	instances            int    // of a package
	features             bool   // for a checkpoint: compute the input of the last layer instead of the logits
	usual                string // the output of a package with several outputs if -output is not given
}

// register adds the options to a command.
func (o *networkOptions) register(set *flag.FlagSet) {
	set.StringVar(&o.path, "model", filepath.Join("trained", "best.pt"),
		"`FILE`: a package (.pt2) of tools/export.py, or a checkpoint of torchstream train. A package has native code, "+
			"which this command runs: take it only from where you take programs")
	set.StringVar(&o.output, "output", "", "`NAME` of the package's output to use (default: the only one)")
	set.StringVar(&o.device, "device", "", "cpu, cuda or cuda:N (default: the package's; a GPU if there is one)")
	set.IntVar(&o.resize, "resize", 0, "with a package: pixels of an image's shorter side before the crop to the "+
		"network's size (default: the package's, or 8/7 of the network's size)")
	set.StringVar(&o.mean, "mean", "", "with a package: `R,G,B` to subtract, from 0 to 1 (default: the package's, or "+
		"ImageNet's)")
	set.StringVar(&o.std, "std", "", "with a package: `R,G,B` to divide by (default: the package's, or ImageNet's)")
}

// network is an open image network. Several goroutines may run it at once.
type network struct {
	path      string
	device    cuda.Device
	classes   []string        // nil: the file does not name them
	about     models.Metadata // of a checkpoint
	model     *aoti.Model     // of a package
	transform transform.Transform
	batch     aoti.Dim // how many images a run accepts
	width     int64    // numbers in a row of the output; 0: unknown, or the output has other dimensions
	run       func(ctx context.Context, x *torch.Tensor) (*torch.Tensor, error)
	close     func() error
}

// isPackage reports whether a path names a package rather than a checkpoint.
func isPackage(path string) bool { return strings.EqualFold(filepath.Ext(path), ".pt2") }

// open opens the file of -model.
func (o *networkOptions) open() (*network, error) {
	device, err := cli.PickDevice(o.device)
	if err != nil {
		return nil, err
	}
	if isPackage(o.path) {
		return o.openPackage(device)
	}
	if o.resize != 0 || o.mean != "" || o.std != "" || o.output != "" {
		return nil, cli.UsageError{Message: "-resize, -mean, -std and -output are for packages (.pt2): a checkpoint of " +
			"torchstream train has its own transform and one output"}
	}
	file, err := openTrained(o.path)
	if err != nil {
		return nil, modelFlag(err)
	}
	defer file.Close()
	if err := cli.CheckSize(file.about.Size, 1); err != nil {
		return nil, fmt.Errorf("%s: its metadata: %w", printable.Name(o.path), err)
	}
	net, err := file.about.Load(file.File, device)
	if err != nil {
		return nil, err
	}
	used := net
	if o.features {
		if used, err = models.Features(net); err != nil {
			return nil, errors.Join(err, nn.Close(net))
		}
	}
	return &network{path: o.path, device: device, classes: file.about.Classes, about: file.about,
		transform: file.about.Transform(), batch: aoti.Dim{Min: 1}, width: int64(len(file.about.Classes)),
		close: func() error { return nn.Close(net) },
		run: func(_ context.Context, x *torch.Tensor) (*torch.Tensor, error) {
			y := used.Forward(x.NoGrad())
			return y, y.Err()
		}}, nil
}

// modelFlag replaces -checkpoint by -model in an error's text.
func modelFlag(err error) error {
	if text := err.Error(); strings.Contains(text, "-checkpoint") {
		return errors.New(strings.ReplaceAll(text, "-checkpoint", "-model"))
	}
	return err
}

// openPackage loads a package.
func (o *networkOptions) openPackage(device cuda.Device) (*network, error) {
	m, err := aoti.Load(o.path, aoti.Options{Device: device, Instances: o.instances})
	if err != nil {
		return nil, err
	}
	n, err := o.describe(m)
	if err == nil && o.device != "" && device != m.Device() {
		err = cli.Usagef("-device %s: %s was compiled for the CPU: leave the option out, or export the model again",
			o.device, printable.Name(o.path))
	}
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return n, nil
}

// describe returns the network of a loaded package.
func (o *networkOptions) describe(m *aoti.Model) (*network, error) {
	wrong := func(format string, args ...any) error {
		return fmt.Errorf("%s: %w", printable.Name(o.path), fmt.Errorf(format, args...))
	}
	if len(m.Inputs) != 1 || m.Inputs[0].DType == "" {
		return nil, wrong("it has %s, and no description of one batch of images: export it with tools/export.py",
			printable.Counted(len(m.Inputs), "input", "inputs"))
	}
	in := m.Inputs[0]
	dtype, float := map[string]tensor.DType{"float32": tensor.Float32, "float16": tensor.Float16,
		"bfloat16": tensor.BFloat16}[in.DType]
	square := len(in.Shape) == 4 && in.Shape[1] == aoti.Dim{Min: 3, Max: 3} && in.Shape[2] == in.Shape[3] &&
		in.Shape[2].Min == in.Shape[2].Max
	if !float || !square {
		return nil, wrong("its input is %v, and this command gives float images [N 3 size size] of a fixed size", in)
	}
	output, err := o.chooseOutput(m.Outputs)
	if err != nil {
		return nil, wrong("%w", err)
	}
	n := &network{path: o.path, device: m.Device(), model: m, batch: in.Shape[0], close: m.Close,
		transform: transform.Eval(0, int(in.Shape[2].Min)),
		run: func(ctx context.Context, x *torch.Tensor) (*torch.Tensor, error) {
			outputs, err := m.Run(ctx, x)
			if err != nil {
				return nil, err
			}
			return outputs[output], nil
		}}
	if shape := m.Outputs[output].Shape; len(shape) == 2 && shape[1].Min == shape[1].Max {
		n.width = shape[1].Min
	}
	n.transform.DType, n.transform.Contiguous = dtype, in.MemoryFormat == "contiguous"
	if err := o.setImages(n, m.Metadata); err != nil {
		return nil, wrong("%w", err)
	}
	return n, nil
}

// chooseOutput returns the index of -output.
func (o *networkOptions) chooseOutput(outputs []aoti.Value) (int, error) {
	var names []string
	name := cmp.Or(o.output, o.usual)
	for i, v := range outputs {
		if v.Name == name || o.output == "" && len(outputs) == 1 {
			return i, nil
		}
		names = append(names, printable.Name(v.Name))
	}
	if o.output == "" {
		return 0, fmt.Errorf("it has %d outputs: choose one with -output: %s", len(outputs), strings.Join(names, ", "))
	}
	return 0, fmt.Errorf("it has no output %s; it has %s", printable.Name(o.output), strings.Join(names, ", "))
}

// packageImages is the JSON in a package's metadata about the images of its network.
type packageImages struct {
	Resize        int        `json:"resize"`
	Interpolation string     `json:"interpolation"`
	Mean          [3]float32 `json:"mean"`
	Std           [3]float32 `json:"std"`
}

// setImages sets the transform and the classes, by the options and the metadata of a package.
func (o *networkOptions) setImages(n *network, metadata map[string]string) error {
	var images packageImages
	for key, to := range map[string]any{"images": &images, "classes": &n.classes} {
		if text := metadata[key]; text != "" {
			if err := json.Unmarshal([]byte(text), to); err != nil {
				return fmt.Errorf("its metadata %q: %w", key, err)
			}
		}
	}
	t := &n.transform
	var err error
	if t.Interpolation, err = transform.ParseInterpolation(images.Interpolation); err != nil {
		return fmt.Errorf("its metadata \"images\": %w: export the model with one of these", err)
	}
	t.Resize = cmp.Or(o.resize, images.Resize, t.Size*8/7)
	if t.Resize < t.Size {
		return fmt.Errorf("-resize %d is less than the %d pixels of the network", t.Resize, t.Size)
	}
	if images.Std != [3]float32{} {
		t.Mean, t.Std = images.Mean, images.Std
	}
	return cmp.Or(setColours(&t.Mean, "mean", o.mean), setColours(&t.Std, "std", o.std))
}

// setUpright applies -upright. A checkpoint already says whether images are turned upright, so a
// contradicting -upright is an error.
func (n *network) setUpright(set *flag.FlagSet, upright bool) error {
	trained := &n.transform.ApplyEXIFOrientation
	if !isPackage(n.path) && given(set, "upright") && upright != *trained {
		return cli.Usagef("-upright=%v: %s was trained with -upright=%v: leave the option out", upright,
			printable.Name(n.path), *trained)
	}
	*trained = *trained || upright
	return nil
}

// setColours parses -mean or -std.
func setColours(to *[3]float32, option, text string) error {
	if text == "" {
		return nil
	}
	parts := strings.Split(text, ",")
	for i, part := range parts {
		value, err := strconv.ParseFloat(strings.TrimSpace(part), 32)
		if len(parts) != len(to) || err != nil || option == "std" && value <= 0 {
			return cli.Usagef("-%s %q: want three numbers for red, green and blue, such as 0.5,0.5,0.5", option, text)
		}
		to[i] = float32(value)
	}
	return nil
}

// probabilities is a serve.Run that returns the probability of each class.
func (n *network) probabilities(ctx context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
	y, err := n.run(ctx, x)
	if err != nil {
		return nil, err
	}
	y = n.about.Probabilities(y.ToDType(torch.Float32))
	return []*torch.Tensor{y}, y.Err()
}

// forward runs the network on a batch x with the given number of images, and returns as many rows.
// If the network needs more images, copies of the first image fill up the batch.
func (n *network) forward(ctx context.Context, x *torch.Tensor, images int64) (*torch.Tensor, error) {
	missing := n.batch.Min - images
	if missing > 0 {
		shape := x.Shape()
		format := torch.ChannelsLast
		if n.transform.Contiguous {
			format = torch.Contiguous
		}
		filler := x.Narrow(0, 0, 1).Expand(append([]int64{missing}, shape[1:]...)...)
		x = torch.Cat([]*torch.Tensor{x, filler}, 0).Contiguous(format)
	}
	y, err := n.run(ctx, x)
	if err != nil || missing <= 0 {
		return y, err
	}
	y = y.Narrow(0, 0, images)
	return y, y.Err()
}

package train

import (
	"context"
	"fmt"
	"runtime"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// EvaluateOptions configures Evaluate. The zero value is for classifiers that compute in the dtype
// of their parameters.
type EvaluateOptions struct {
	// Loader is the image loader that the feed's source reads from. nil means the source itself, if
	// it is an *imageloader.Loader. A model with fewer outputs than the loader has classes is an
	// error. Without an image loader, only the device detects a label that is too large for the
	// number of outputs. On a GPU such a label makes CUDA unusable in this process.
	Loader *imageloader.Loader
	// Loss computes the mean loss of a batch, a scalar. nil means the cross-entropy of output and
	// batch.Labels.
	Loss func(output *torch.Tensor, batch *prefetcher.Batch) *torch.Tensor
	// MultiLabel is for samples with any number of labels: see Config.MultiLabel.
	MultiLabel bool
	// Autocast runs the forward passes under autocast to BFloat16 or Float16. 0 means none.
	Autocast torch.DType
}

// Evaluate measures a model on the feed's epoch 0, as Run does after every epoch with Config.Eval.
// The model must be on the feed's device. Its input is Batch.Images or, if the batches have none,
// their first tensor. Evaluate puts all modules into evaluation mode and leaves them in it: call
// nn.Train before you continue training. It computes no gradients, changes no parameters, and keeps
// no tensors.
//
// Labels come from the feed. A loader numbers the classes that it finds, so set
// imageloader.Options.Classes to the classes on which the model was trained.
//
// Evaluate locks its OS thread, because LibTorch plans cuDNN's convolutions once per thread. It
// blocks until the device has the result, and stops when ctx ends. A feed without samples and a
// loss that is not finite are errors.
func Evaluate(ctx context.Context, model nn.Module, feed *prefetcher.Prefetcher, o EvaluateOptions) (*Metrics, error) {
	const call = "train.Evaluate"
	if model == nil || feed == nil {
		return nil, fmt.Errorf("%s: needs a model and a feed: %w", call, cuda.ErrInvalidArgument)
	}
	if err := nn.Err(model); err != nil {
		return nil, err
	}
	loader := o.Loader
	if loader == nil {
		loader = sourceLoader(feed)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c := criterion{call: call, own: o.Loss, multi: o.MultiLabel}
	if loader != nil {
		c.classes = len(loader.Classes())
	}
	m, err := evaluate(ctx, model, feed, o.Autocast, c, &job{})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", call, err)
	}
	return m, nil
}

// evaluate measures the model on the feed's epoch 0. In a job, every rank returns the metrics of
// all ranks.
func evaluate(ctx context.Context, model nn.Module, feed *prefetcher.Prefetcher, dtype torch.DType,
	c criterion, j *job) (*Metrics, error) {
	nn.Train(model, false)
	m, err := newMeter(feed.Device(), sums{}, c.multi)
	if err != nil {
		return nil, err
	}
	defer m.close()
	var padding once
	for batch, err := range feed.Epoch(j.feedContext(ctx), 0) {
		if err != nil {
			return nil, err
		}
		counted := batch.N
		if j.size() > 1 {
			if counted, err = padding.count(batch); err != nil {
				return nil, err
			}
		}
		if err := measure(m, model, batch, counted, dtype, c); err != nil {
			return nil, err
		}
		if j.world != nil {
			if err := j.stopped(ctx); err != nil {
				return nil, err
			}
		}
	}
	const of = "evaluation"
	sum, err := j.add(m.tally(of))
	if err != nil {
		return nil, err
	}
	return sum.metrics(of)
}

// measure adds samples of a batch to a meter: the first ones, as many as counted says. If the
// program has its own loss, that loss covers the whole batch.
func measure(m *meter, model nn.Module, batch *prefetcher.Batch, counted int, dtype torch.DType, c criterion) error {
	if counted == 0 {
		return nil
	}
	output, labels := model.Forward(autocast(input(batch).NoGrad(), dtype)), batch.Labels
	loss := c.loss(output, batch)
	if counted < batch.N {
		output = output.Narrow(0, 0, int64(counted))
		if labels != nil {
			labels = labels.Narrow(0, 0, int64(counted))
		}
		if c.own == nil {
			loss = c.of(output, labels)
		}
	}
	return m.add(output, loss, labels, counted, true)
}

// autocast marks a model's input for autocast, unless dtype is 0.
func autocast(x *torch.Tensor, dtype torch.DType) *torch.Tensor {
	if dtype == 0 {
		return x
	}
	return x.Autocast(dtype)
}

// criterion computes losses.
type criterion struct {
	call string // for errors
	// own is the program's loss function, or nil for the cross-entropy.
	own func(output *torch.Tensor, batch *prefetcher.Batch) *torch.Tensor
	// classes is the minimum number of outputs, or 0 if it is not known.
	classes int
	multi   bool // MultiLabel
}

// of returns the mean of the default loss, for programs that set none.
func (c criterion) of(output, labels *torch.Tensor) *torch.Tensor {
	if !c.multi {
		return output.CrossEntropy(labels)
	}
	if err := checkMultiLabel(output, labels); err != nil {
		return torch.Fail(c.call, err)
	}
	return output.BCEWithLogitsLoss(labels)
}

// loss returns the mean loss of a batch.
func (c criterion) loss(output *torch.Tensor, batch *prefetcher.Batch) *torch.Tensor {
	if c.own != nil {
		return c.own(output, batch)
	}
	if batch.Labels == nil {
		return torch.Fail(c.call, fmt.Errorf("the batches have no field \"labels\": set Loss: %w",
			cuda.ErrInvalidArgument))
	}
	if c.classes > 0 && output.Err() == nil {
		// On a GPU a label that is too large for the number of outputs fails an assertion, which
		// makes CUDA unusable in the process.
		if shape := output.Shape(); len(shape) == 2 && shape[1] < int64(c.classes) {
			return torch.Fail(c.call, fmt.Errorf("the model has %d outputs, and the loader %d classes: "+
				"give the model's last layer %d outputs: %w",
				shape[1], c.classes, c.classes, cuda.ErrInvalidArgument))
		}
	}
	loss := c.of(output, batch.Labels)
	// On the CPU such a label is an error here. LibTorch's error names only the label, so add the
	// number of outputs.
	if err := loss.Err(); err != nil && !c.multi && output.Err() == nil && output.Device() == cuda.CPU {
		if _, outputs := classLabels(output, batch.Labels); outputs > 0 {
			return torch.Fail(c.call, fmt.Errorf("the model has %d outputs, for the labels 0 to %d: %w",
				outputs, outputs-1, err))
		}
	}
	return loss
}

// input returns the model's input from a batch.
func input(batch *prefetcher.Batch) *torch.Tensor {
	if batch.Images != nil {
		return batch.Images
	}
	return batch.Tensors()[0]
}

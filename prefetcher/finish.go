package prefetcher

import (
	"fmt"

	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// finishes returns the function that executes a Describer's finish. fields, outputs and finishes
// are the values that the Describer returns. work[i] says whether field i needs work. The returned
// function allocates nothing on the device.
func finishes(fields, outputs []tensor.Spec, finishes []tensor.Finish,
	work []bool) (func(dst, src []*torch.Tensor) error, error) {
	if len(finishes) != len(fields) {
		return nil, fmt.Errorf("the source has %d fields and %d finishes: there must be one finish for "+
			"each field", len(fields), len(finishes))
	}
	for i, f := range finishes {
		if !work[i] {
			continue
		}
		if err := checkFinish(fields[i], outputs[i], f); err != nil {
			return nil, fmt.Errorf("the source's field %q: %w", fields[i].Name, err)
		}
	}
	return func(dst, src []*torch.Tensor) error {
		for i, f := range finishes {
			if !work[i] {
				continue
			}
			if err := finishField(dst[i], src[i], f); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// checkFinish checks that shapes and dtypes satisfy the rules of tensor.Finish.
func checkFinish(field, output tensor.Spec, f tensor.Finish) error {
	if field.DType != tensor.Uint8 || len(field.Shape) != 3 || field.MemoryFormat != tensor.Contiguous {
		return fmt.Errorf("a finish needs uint8 [H W C], not %v %v", field.DType, field.Shape)
	}
	h, w, c := field.Shape[0], field.Shape[1], field.Shape[2]
	if s := output.Shape; len(s) != 3 || s[0] != c || s[1] != h || s[2] != w {
		return fmt.Errorf("the output of a field of shape %v has the shape [%d %d %d], not %v", field.Shape, c, h, w, s)
	}
	if len(f.Mean) == 0 && len(f.Std) == 0 {
		if output.DType != tensor.Uint8 {
			return fmt.Errorf("an output of type %v needs Mean and Std", output.DType)
		}
		return nil
	}
	if int64(len(f.Mean)) != c || int64(len(f.Std)) != c {
		return fmt.Errorf("%d values of Mean and %d of Std for %d channels", len(f.Mean), len(f.Std), c)
	}
	if c > 4 {
		return fmt.Errorf("a Mean and a Std of %d channels: there are 1 to 4", c)
	}
	switch output.DType {
	case tensor.Float32, tensor.Float16, tensor.BFloat16:
		return nil
	}
	return fmt.Errorf("with Mean and Std the output is float32, float16 or bfloat16, not %v", output.DType)
}

// finishField queues the work for n rows of one field on the current stream.
func finishField(dst, src *torch.Tensor, f tensor.Finish) error {
	if len(f.Mean) > 0 {
		return torch.NormalizeImages(dst, src, f.Mean, f.Std)
	}
	channelsFirst := src.Permute(0, 3, 1, 2)
	defer channelsFirst.Close()
	return dst.CopyFrom(channelsFirst, torch.CopyOptions{})
}

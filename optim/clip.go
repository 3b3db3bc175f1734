package optim

import (
	"fmt"
	"math"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// ClipOptions are the options of [ClipGradNorm]. The zero value selects the Euclidean norm.
type ClipOptions struct {
	NormType float64 // order of the norm; 0 stands for 2; 1 and math.Inf(1) are also common
	// Whole, if not nil, computes the norm of all gradients when other processes hold other shards
	// of the parameters. It gets the norm of this process's gradients, a scalar, and the order of
	// the norm. It is called even if there are no gradients. ClipGradNorm owns the result.
	// distributed.FullyShardedDataParallel.ClipGradNorm sets Whole.
	Whole func(norm *torch.Tensor, order float64) *torch.Tensor
}

// ClipGradNorm scales the gradients of the parameters in place, all by one factor. Afterwards their
// norm, over all elements of all gradients, is at most maxNorm. Gradients with a smaller norm stay
// as they are, except for rounding. The formula is PyTorch's (torch.nn.utils.clip_grad_norm_): the
// factor is min(1, maxNorm/(norm+1e-6)).
//
// It returns the norm before scaling, as a scalar tensor. The tensor joins the youngest scope of
// the parameters; without a scope the caller closes it. The call reads nothing back: it computes
// and applies the factor on the device, in a few kernels for all gradients of one dtype. It can
// therefore be captured in a graph. Parameters without a gradient are ignored. Without any gradient
// the norm is 0, on the CPU. All gradients must be on one device; otherwise ClipGradNorm returns an
// error before it changes anything. A norm that is not finite makes the gradients not finite.
func ClipGradNorm(params []*torch.Tensor, maxNorm float64, o ClipOptions) (*torch.Tensor, error) {
	if o.NormType == 0 {
		o.NormType = 2
	}
	if math.IsNaN(maxNorm) || maxNorm < 0 || math.IsNaN(o.NormType) || o.NormType < 0 {
		return nil, fmt.Errorf("optim.ClipGradNorm: maxNorm %v, NormType %v: neither may be negative or "+
			"NaN: %w", maxNorm, o.NormType, cuda.ErrInvalidArgument)
	}
	var temporary handles
	defer temporary.close()
	grads, err := gradients("ClipGradNorm", params, &temporary)
	if err != nil {
		return nil, err
	}
	total, err := totalNorm(grads, o, &temporary)
	if err != nil || len(grads) == 0 {
		return total, err
	}
	shifted := temporary.add(total.AddScalar(1e-6))
	factor := temporary.add(temporary.add(temporary.add(shifted.Reciprocal()).MulScalar(maxNorm)).ClampMax(1))
	if err := factor.Err(); err != nil {
		total.Close()
		return nil, err
	}
	if err := torch.ForeachMulTensor_(grads, factor); err != nil {
		total.Close()
		return nil, err
	}
	return total, nil
}

// totalNorm returns the norm of all gradients.
func totalNorm(grads []*torch.Tensor, o ClipOptions, temporary *handles) (total *torch.Tensor, err error) {
	if len(grads) == 0 {
		total, err = torch.Zeros(cuda.CPU, torch.Float32)
	} else {
		var norms []*torch.Tensor
		norms, err = torch.ForeachNorm(grads, o.NormType)
		*temporary = append(*temporary, norms...)
		if err == nil {
			// Gradients on several devices fail here, before any gradient has changed.
			total = temporary.add(torch.Stack(norms, 0)).NormOrd(o.NormType)
			err = total.Err()
		}
	}
	if err != nil || o.Whole == nil {
		return total, err
	}
	total = o.Whole(temporary.add(total), o.NormType)
	return total, total.Err()
}

// ClipGradValue clamps every element of the parameters' gradients to [-maxValue, maxValue], in
// place (torch.nn.utils.clip_grad_value_). NaN stays NaN. Like [ClipGradNorm], it does not wait for
// the device and can be captured in a graph; the gradients may be on several devices.
func ClipGradValue(params []*torch.Tensor, maxValue float64) error {
	if math.IsNaN(maxValue) || maxValue < 0 {
		return fmt.Errorf("optim.ClipGradValue: maxValue %v: it may not be negative or NaN: %w", maxValue,
			cuda.ErrInvalidArgument)
	}
	var temporary handles
	defer temporary.close()
	grads, err := gradients("ClipGradValue", params, &temporary)
	if err != nil || len(grads) == 0 {
		return err
	}
	if err := torch.ForeachClampMin_(grads, -maxValue); err != nil {
		return err
	}
	return torch.ForeachClampMax_(grads, maxValue)
}

// gradients collects the parameters' gradients, skips missing ones, and adds them to the handles.
func gradients(name string, params []*torch.Tensor, open *handles) ([]*torch.Tensor, error) {
	grads := make([]*torch.Tensor, 0, len(params))
	for i, p := range params {
		if err := p.Err(); err != nil {
			return nil, fmt.Errorf("optim.%s: parameter %d: %w", name, i, err)
		}
		g := p.NoGrad().Grad()
		if g == nil {
			continue
		}
		if err := g.Err(); err != nil {
			return nil, fmt.Errorf("optim.%s: parameter %d: %w", name, i, err)
		}
		grads = append(grads, open.add(g))
	}
	return grads, nil
}

// handles are tensors to close together.
type handles []*torch.Tensor

func (h *handles) add(t *torch.Tensor) *torch.Tensor {
	*h = append(*h, t)
	return t
}

func (h *handles) close() {
	for _, t := range *h {
		t.Close()
	}
}

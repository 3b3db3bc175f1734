package optim

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// GradScaler scales losses, so that float16 gradients do not underflow to zero, and skips steps
// whose gradients are infinite or NaN (torch.amp.GradScaler). bfloat16 has float32's range and
// needs no scaler.
//
//	loss := net.Forward(batch.Images.Autocast(torch.Float16)).CrossEntropy(batch.Labels)
//	err := scaler.Backward(loss)
//	...
//	err = scaler.Step(opt)
//	...
//	err = scaler.Update()
//
// The scale and the flag for gradients that are not finite are in device memory. With [Adam],
// [AdamW], and [SGD] without Dampening, the device itself skips a step. No call waits then, and the
// calls can be captured in a graph after one step outside it. With other optimizers, with
// parameters on several devices, and with parameters on another device than the scaler, Step waits
// for the flag and cannot be captured.
//
// A skipped step leaves parameters, state and step counts unchanged, and drops the gradients as any
// Step does. A schedule counts the skipped step. Only one goroutine at a time may use a GradScaler.
//
// An optimizer whose gradients are sharded among processes has a method AgreeOnFound, which
// combines the flags of all processes: see distributed.FullyShardedOptimizer.
type GradScaler struct {
	o      GradScalerOptions
	device cuda.Device
	scale  *torch.Tensor // float32 []
	good   *torch.Tensor // int32 []: steps in a row without infinities
	steps  map[Optimizer]*scaledStep
}

// scaledStep is the state of an optimizer's step.
type scaledStep struct {
	found    *torch.Tensor // float32 []: 1 if a gradient was not finite since Update
	unscaled bool
}

// GradScalerOptions are the options of [NewGradScaler]. Zero values stand for PyTorch's defaults.
type GradScalerOptions struct {
	InitScale      float64 // 0 stands for 65536
	GrowthFactor   float64 // over 1; 0 stands for 2
	BackoffFactor  float64 // below 1; 0 stands for 0.5
	GrowthInterval int     // steps without infinities before the scale grows; 0 stands for 2000
}

// NewGradScaler returns a scaler for losses on the device. The caller closes it.
func NewGradScaler(device cuda.Device, o GradScalerOptions) (*GradScaler, error) {
	o.InitScale, o.GrowthFactor = orDefault(o.InitScale, 65536), orDefault(o.GrowthFactor, 2)
	o.BackoffFactor = orDefault(o.BackoffFactor, 0.5)
	if o.GrowthInterval == 0 {
		o.GrowthInterval = 2000
	}
	if !finite(o.InitScale) || o.InitScale <= 0 || !finite(o.GrowthFactor) || o.GrowthFactor <= 1 ||
		!(o.BackoffFactor > 0 && o.BackoffFactor < 1) || o.GrowthInterval < 1 {
		return nil, fmt.Errorf("optim.NewGradScaler: %+v: InitScale must be over 0, GrowthFactor over 1, "+
			"BackoffFactor between 0 and 1, GrowthInterval at least 1: %w",
			o, cuda.ErrInvalidArgument)
	}
	s := &GradScaler{o: o, device: device, steps: map[Optimizer]*scaledStep{}}
	var err, err2 error
	s.scale, err = torch.Full(device, torch.Float32, o.InitScale)
	s.good, err2 = torch.Zeros(device, torch.Int32)
	if err := errors.Join(err, err2); err != nil {
		s.Close()
		return nil, fmt.Errorf("optim.NewGradScaler: %w", err)
	}
	return s, nil
}

// Backward computes the gradients of the scaled loss, a scalar on the scaler's device.
func (s *GradScaler) Backward(loss *torch.Tensor) error {
	if s.scale == nil {
		return fmt.Errorf("optim.GradScaler.Backward: %w", torch.ErrClosed)
	}
	scaled := loss.Mul(s.scale)
	err := scaled.Backward()
	if scaled.Scope() == nil {
		scaled.Close()
	}
	return err
}

// Unscale divides the gradients of the optimizer's parameters by the scale, in place, and records
// whether all are finite. Call it before clipping; otherwise Step unscales. A second call before
// Update is an error. Unscale refuses float16 gradients, because they underflow to zero: keep the
// parameters in float32, under autocast.
func (s *GradScaler) Unscale(o Optimizer) error {
	step, err := s.of("Unscale", o)
	if err != nil {
		return err
	}
	if step.unscaled {
		return fmt.Errorf("optim.GradScaler.Unscale: the gradients are unscaled already: call Update "+
			"after Step: %w", cuda.ErrInvalidArgument)
	}
	return s.unscale(o, step)
}

func (s *GradScaler) unscale(o Optimizer, step *scaledStep) error {
	var open handles
	defer open.close()
	byKind := map[gradKind][]*torch.Tensor{}
	index := 0
	for _, g := range o.Groups() {
		grads, err := gradients("GradScaler", g.Params, &open)
		if err != nil {
			return err
		}
		for _, grad := range grads {
			k := gradKind{grad.Device(), grad.DType()}
			if k.dtype == torch.Float16 {
				return fmt.Errorf("optim.GradScaler: gradient %d is of float16, where unscaling makes "+
					"zeros: keep the parameters in float32: %w",
					index, cuda.ErrInvalidArgument)
			}
			byKind[k] = append(byKind[k], grad)
			index++
		}
	}
	// Compute the inverse in float64, as PyTorch does.
	wide := open.add(s.scale.ToDType(torch.Float64))
	inverse := open.add(open.add(wide.Reciprocal()).ToDType(torch.Float32))
	for _, k := range slices.SortedFunc(maps.Keys(byKind), gradKind.compare) {
		if err := s.unscaleOn(k.device, byKind[k], step.found, inverse, &open); err != nil {
			return err
		}
	}
	if d, ok := o.(interface {
		AgreeOnFound(found *torch.Tensor) error
	}); ok {
		if err := d.AgreeOnFound(step.found); err != nil {
			return err
		}
	}
	step.unscaled = true
	return nil
}

// gradKind identifies the gradients of one operator call.
type gradKind struct {
	device cuda.Device
	dtype  torch.DType
}

func (k gradKind) compare(o gradKind) int {
	return cmp.Or(cmp.Compare(k.device, o.device), cmp.Compare(k.dtype, o.dtype))
}

// unscaleOn multiplies gradients of one device and dtype by the inverse of the scale, and sets
// found to 1 if one is not finite. found and inverse are on the scaler's device.
func (s *GradScaler) unscaleOn(device cuda.Device, grads []*torch.Tensor, found, inverse *torch.Tensor,
	open *handles) error {
	const unscale = "_amp_foreach_non_finite_check_and_unscale_"
	if device == s.device {
		_, err := torch.Call(unscale, grads, found, inverse)
		return err
	}
	there, err := torch.Zeros(device, torch.Float32)
	if err != nil {
		return err
	}
	open.add(there)
	if _, err := torch.Call(unscale, grads, there, open.add(inverse.To(device))); err != nil {
		return err
	}
	either := open.add(found.Maximum(open.add(there.To(s.device))))
	return found.CopyFrom(either, torch.CopyOptions{})
}

// of returns the state of the optimizer's step.
func (s *GradScaler) of(call string, o Optimizer) (*scaledStep, error) {
	switch {
	case s.scale == nil:
		return nil, fmt.Errorf("optim.GradScaler.%s: %w", call, torch.ErrClosed)
	case o == nil:
		return nil, fmt.Errorf("optim.GradScaler.%s: the optimizer is nil: %w", call, cuda.ErrInvalidArgument)
	}
	step := s.steps[o]
	if step == nil {
		found, err := torch.Zeros(s.device, torch.Float32)
		if err != nil {
			return nil, err
		}
		step = &scaledStep{found: found}
		s.steps[o] = step
	}
	return step, nil
}

// stepper is an optimizer of this package.
type stepper interface {
	step(found *torch.Tensor) error
}

// Step unscales the gradients, unless Unscale has done so. It then steps the optimizer if all
// gradients are finite.
func (s *GradScaler) Step(o Optimizer) error {
	step, err := s.of("Step", o)
	if err != nil {
		return err
	}
	if !step.unscaled {
		if err := s.unscale(o, step); err != nil {
			return err
		}
	}
	err = step.step(o)
	if err != nil {
		// A failed attempt to capture a step computed nothing, so the next attempt unscales again.
		step.unscaled = false
	}
	return err
}

// step steps the optimizer if the gradients are finite. They are already unscaled.
func (s *scaledStep) step(o Optimizer) error {
	if of, ok := o.(stepper); ok {
		return of.step(s.found)
	}
	found, err := s.found.Float64()
	if err != nil {
		return err
	}
	if found != 0 {
		return o.ZeroGrad()
	}
	return o.Step()
}

// Update adapts the scale. Call it after the Steps of all optimizers. If a gradient was not finite,
// Update multiplies the scale by BackoffFactor. After GrowthInterval steps in a row with finite
// gradients, it multiplies the scale by GrowthFactor. Update does not wait for the device.
func (s *GradScaler) Update() error {
	if s.scale == nil {
		return fmt.Errorf("optim.GradScaler.Update: %w", torch.ErrClosed)
	}
	var open handles
	defer open.close()
	var found *torch.Tensor
	for _, step := range s.steps {
		if !step.unscaled {
			continue
		}
		if found == nil {
			found = step.found
		} else {
			found = open.add(found.Add(step.found))
		}
	}
	if found == nil {
		return fmt.Errorf("optim.GradScaler.Update: no optimizer stepped since the last Update: %w",
			cuda.ErrInvalidArgument)
	}
	if _, err := torch.Call("_amp_update_scale_", s.scale, s.good, found, s.o.GrowthFactor,
		s.o.BackoffFactor, s.o.GrowthInterval); err != nil {
		return err
	}
	for _, step := range s.steps {
		if err := step.found.Fill_(0).Err(); err != nil {
			return err
		}
		step.unscaled = false
	}
	return nil
}

// Abandon discards the results of Unscale and Step for the optimizer since Update. Call it after a
// step that failed, before the next Backward. The scale stays. Abandon does not drop the
// gradients; the caller does. It does not wait for the device.
func (s *GradScaler) Abandon(o Optimizer) error {
	step := s.steps[o]
	if step == nil {
		return nil
	}
	step.unscaled = false
	return step.found.Fill_(0).Err()
}

// Scale returns the current scale. It waits for the device.
func (s *GradScaler) Scale() (float64, error) {
	if s.scale == nil {
		return 0, fmt.Errorf("optim.GradScaler.Scale: %w", torch.ErrClosed)
	}
	return s.scale.Float64()
}

// GradScalerState is the state of a GradScaler between Update and the next Backward, by PyTorch's
// names. It does not include the scaler's options.
type GradScalerState struct {
	Scale         float64 `json:"scale"`
	GrowthTracker int64   `json:"_growth_tracker"` // steps without infinities since the scale changed
}

// State returns the state. It waits for the device.
func (s *GradScaler) State() (GradScalerState, error) {
	scale, err := s.Scale()
	if err != nil {
		return GradScalerState{}, err
	}
	good, err := s.good.Int64()
	return GradScalerState{Scale: scale, GrowthTracker: good}, err
}

// LoadState restores a state. The tensors keep their memory, so that captured graphs stay valid.
func (s *GradScaler) LoadState(state GradScalerState) error {
	switch {
	case s.scale == nil:
		return fmt.Errorf("optim.GradScaler.LoadState: %w", torch.ErrClosed)
	case !finite(state.Scale) || state.Scale <= 0 || state.GrowthTracker < 0:
		return fmt.Errorf("optim.GradScaler.LoadState: %+v is no state of a scaler: %w", state, cuda.ErrInvalidArgument)
	}
	return errors.Join(s.scale.Fill_(state.Scale).Err(), s.good.Fill_(float64(state.GrowthTracker)).Err())
}

// Close frees the scaler's memory. The error is always nil.
func (s *GradScaler) Close() error {
	for _, step := range s.steps {
		step.found.Close()
	}
	s.scale.Close()
	s.good.Close()
	s.scale, s.good, s.steps = nil, nil, nil
	return nil
}

package optim

import (
	"fmt"
	"math"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// rule is the formula of an optimizer.
type rule interface {
	// states returns PyTorch's names of a parameter's state tensors. The tensor "step", if there is
	// one, is a float32 scalar.
	states() []string
	// start fills the state of a parameter before its first step.
	start(g *group, s *slot) error
	// step updates the parameters of a batch, whose state has started.
	step(b *batch) error
	// dense reports whether step calls fused operators, which need parameters without gaps between
	// their elements.
	dense(fused bool) bool
	// skips reports whether step obeys engine.found on the device, for this batch.
	skips(b *batch) bool
	// options returns the options by PyTorch's names in param_groups.
	options() map[string]any
}

// engine is the code that all optimizers share: parameter groups, collecting gradients, state that
// follows the parameters, learning rates in device memory, saving and loading.
type engine struct {
	name      string // "SGD"
	common    common
	groups    []*group
	params    []*torch.Tensor // of all groups
	batches   []batch         // kept between steps for their memory
	open      handles         // temporary tensors of a step
	gradients *torch.Scope    // of a step; nil outside of one
	found     *torch.Tensor   // during a GradScaler's step: a scalar on the device, which is 1 to skip the step; otherwise nil
}

// common are the options that all optimizers share.
type common struct {
	lr, decay                  float64
	keep, capturable, maximize bool
	masters                    bool
}

// group is a Group with its formula and its current learning rate.
type group struct {
	rule     rule
	params   []*torch.Tensor
	marked   []*torch.Tensor // the parameters under NoGrad
	base, lr float64         // learning rates: the first and the current one
	decay    float64
	rate     *torch.Tensor // Capturable's learning rate, on the parameters' device; nil before the first step
	slots    []*slot
	steps    int // index of "step" in the state, or -1
}

// slot is one parameter.
type slot struct {
	index  int // in the order of all groups
	param  *torch.Tensor
	marked *torch.Tensor   // the same tensor under NoGrad
	master *torch.Tensor   // the float32 copy that is updated, with MasterWeights; nil without
	state  []*torch.Tensor // in the order of rule.states; nil before the first step
	device cuda.Device     // of the state
	dtype  torch.DType     // of the state
}

// init makes the engine of an optimizer with one formula.
func (e *engine) init(name string, c common, r rule, params []*torch.Tensor, groups []Group) error {
	e.name, e.common = name, c
	if err := e.add(r, c, all(params, groups)...); err != nil {
		return err
	}
	return e.build()
}

// add appends groups with one formula. A zero learning rate or weight decay of a Group becomes the
// formula's.
func (e *engine) add(r rule, c common, groups ...Group) error {
	for _, from := range groups {
		g := &group{rule: r, params: append([]*torch.Tensor(nil), from.Params...), steps: -1}
		at := fmt.Sprintf("group %d: ", len(e.groups))
		if err := check(e.name, option{at + "LR", from.LR, 0},
			option{at + "WeightDecay", from.WeightDecay, 0}); err != nil {
			return err
		}
		var err error
		if g.decay, err = decoupled(e.name, from.WeightDecay, from.NoWeightDecay, c.decay); err != nil {
			return err
		}
		g.base = orDefault(from.LR, c.lr)
		g.lr = g.base
		names := r.states()
		for i, name := range names {
			if name == stepName {
				g.steps = i
			}
		}
		for _, p := range from.Params {
			g.slots = append(g.slots, &slot{index: len(e.params), param: p, state: make([]*torch.Tensor, len(names))})
			e.params = append(e.params, p)
		}
		e.groups = append(e.groups, g)
	}
	return nil
}

// build checks the parameters of all groups that add appended.
func (e *engine) build() error {
	if len(e.params) == 0 {
		return fmt.Errorf("optim.New%s: no parameters: %w", e.name, cuda.ErrInvalidArgument)
	}
	seen := make(map[*torch.Tensor]bool, len(e.params))
	trained := false
	for i, p := range e.params {
		if err := p.Err(); err != nil {
			return fmt.Errorf("optim.New%s: parameter %d: %w", e.name, i, err)
		}
		if seen[p] {
			return fmt.Errorf("optim.New%s: parameter %d is in the list twice: %w", e.name, i, cuda.ErrInvalidArgument)
		}
		seen[p] = true
		trained = trained || p.RequiresGrad()
	}
	if !trained {
		return fmt.Errorf("optim.New%s: none of the %d parameters requires gradients: call nn.Unfreeze "+
			"with the part of the model to train: %w", e.name, len(e.params), cuda.ErrInvalidArgument)
	}
	for _, g := range e.groups {
		for _, s := range g.slots {
			s.marked = s.param.NoGrad()
			g.marked = append(g.marked, s.marked)
		}
	}
	return nil
}

// all returns an optimizer's groups. The first holds the parameters that have no group.
func all(params []*torch.Tensor, groups []Group) []Group {
	if len(params) == 0 {
		return groups
	}
	return append([]Group{{Params: params}}, groups...)
}

// option is an option's name, value and exclusive upper bound, 0 for none.
type option struct {
	name  string
	value float64
	below float64
}

// check refuses options that are negative, not finite or out of bounds, by their names.
func check(name string, options ...option) error {
	for _, o := range options {
		want := ""
		switch {
		case !finite(o.value):
			want = "must be finite"
		case o.value < 0:
			want = "must not be negative"
		case o.below != 0 && o.value >= o.below:
			want = fmt.Sprintf("must be below %v", o.below)
		default:
			continue
		}
		return fmt.Errorf("optim.New%s: %s is %v: it %s: %w", name, o.name, o.value, want, cuda.ErrInvalidArgument)
	}
	return nil
}

// decoupled evaluates the options WeightDecay and NoWeightDecay. If none (NoWeightDecay) is set, it
// returns 0, or an error if decay is set too. Otherwise it returns decay, or the default def if
// decay is zero.
func decoupled(name string, decay float64, none bool, def float64) (float64, error) {
	switch {
	case none && decay != 0:
		return 0, fmt.Errorf("optim.New%s: WeightDecay is %v beside NoWeightDecay: %w", name, decay,
			cuda.ErrInvalidArgument)
	case none:
		return 0, nil
	}
	return orDefault(decay, def), nil
}

func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// orDefault returns value, or the default if value is zero.
func orDefault(value, def float64) float64 {
	if value == 0 {
		return def
	}
	return value
}

// Groups returns the optimizer's groups with their initial learning rates and weight decays.
// Schedules start from these rates.
func (e *engine) Groups() []Group {
	groups := make([]Group, len(e.groups))
	for i, g := range e.groups {
		groups[i] = Group{Params: append([]*torch.Tensor(nil), g.params...), LR: g.base,
			WeightDecay: g.decay, NoWeightDecay: g.decay == 0}
	}
	return groups
}

// LR returns the current learning rate of the first group.
func (e *engine) LR() float64 {
	if len(e.groups) == 0 {
		return 0
	}
	return e.groups[0].lr
}

// LRs returns the current learning rate of each group.
func (e *engine) LRs() []float64 {
	rates := make([]float64, len(e.groups))
	for i, g := range e.groups {
		rates[i] = g.lr
	}
	return rates
}

// SetLR sets the learning rate from the next step on: one rate for all groups, or one for each
// group. 0 is allowed; a negative or infinite rate or NaN is an error and changes nothing. With
// Capturable, SetLR enqueues the new rates on the current stream: call it on the stream that
// replays the graph.
func (e *engine) SetLR(rates ...float64) error {
	if len(rates) != 1 && len(rates) != len(e.groups) {
		return fmt.Errorf("optim.%s.SetLR: %d rates for %d groups: give one for all or one for each: %w",
			e.name, len(rates), len(e.groups), cuda.ErrInvalidArgument)
	}
	for _, lr := range rates {
		if !finite(lr) || lr < 0 {
			return fmt.Errorf("optim.%s.SetLR: %v: a learning rate must be finite and not negative: %w",
				e.name, lr, cuda.ErrInvalidArgument)
		}
	}
	for i, g := range e.groups {
		lr := rates[i%len(rates)]
		if g.rate != nil {
			if err := g.rate.Fill_(lr).Err(); err != nil {
				return err
			}
		}
		g.lr = lr
	}
	return nil
}

// momentumRule is a formula with a momentum.
type momentumRule interface {
	rule
	momentum() float64
	withMomentum(m float64) (rule, error)
}

// setMomentum implements SetMomentum for optimizers whose formulas are momentumRules.
func (e *engine) setMomentum(m float64) error {
	refuse := func(why string) error {
		return fmt.Errorf("optim.%s.SetMomentum: %v: %s: %w", e.name, m, why, cuda.ErrInvalidArgument)
	}
	switch {
	case !finite(m) || m < 0:
		return refuse("a momentum must be finite and not negative")
	case e.common.capturable:
		return refuse("with Capturable, captured steps would keep the momentum of their capture")
	}
	rules := make([]rule, len(e.groups))
	for i, g := range e.groups {
		var err error
		if rules[i], err = g.rule.(momentumRule).withMomentum(m); err != nil {
			return refuse(err.Error())
		}
	}
	for i, g := range e.groups {
		g.rule = rules[i]
	}
	return nil
}

// firstMomentum returns the momentum of the first group.
func (e *engine) firstMomentum() float64 {
	if len(e.groups) == 0 {
		return 0
	}
	return e.groups[0].rule.(momentumRule).momentum()
}

// Capturable reports whether the learning rates are in device memory, so that a captured Step
// follows SetLR.
func (e *engine) Capturable() bool { return e.common.capturable }

// KeepsGradients reports whether the option KeepGradients is set: Step then keeps the gradients.
func (e *engine) KeepsGradients() bool { return e.common.keep }

// ZeroGrad drops the gradients of all parameters.
func (e *engine) ZeroGrad() error { return torch.ClearGrads(e.params...) }

// Step updates the parameters from their gradients and then drops the gradients, unless
// KeepGradients is set. A parameter without a gradient, such as a frozen one, stays unchanged; if
// no parameter has one, Step returns [ErrNoGradients]. The state follows parameters that moved to
// another device (nn.To). Step enqueues its work on the current stream, in a few calls for all
// parameters of a group, dtype and device. It does not wait for the device and leaves no memory to
// the garbage collector. Step checks its arguments before it changes anything; after any other
// error some parameters may be updated and others not. On a CPU, optimizers that call fused
// operators refuse a parameter that is a view with gaps.
func (e *engine) Step() error { return e.step(nil) }

// step performs a Step. found is nil or a float32 scalar. If it is 1, step changes nothing. step
// waits for found only if a formula cannot check found on the device.
func (e *engine) step(found *torch.Tensor) error {
	defer e.release()
	e.found = found
	if err := e.collect(); err != nil {
		return err
	}
	if len(e.batches) == 0 {
		return fmt.Errorf("optim.%s.Step: %w (of %d): call Backward first, on a loss that depends on them",
			e.name, ErrNoGradients, len(e.params))
	}
	for i := range e.batches {
		if err := e.prepare(&e.batches[i]); err != nil {
			return err
		}
	}
	if skip, err := e.skip(); err != nil {
		return err
	} else if !skip {
		for i := range e.batches {
			if err := e.batches[i].step(); err != nil {
				return err
			}
		}
	}
	if e.common.keep {
		return nil
	}
	return e.ZeroGrad()
}

// skip reports whether the step must be skipped. If some formula cannot decide that on the device,
// skip waits for the device.
func (e *engine) skip() (bool, error) {
	if e.found == nil {
		return false, nil
	}
	onDevice := true
	for i := range e.batches {
		b := &e.batches[i]
		onDevice = onDevice && b.g.rule.skips(b) && b.device == e.found.Device()
	}
	if onDevice {
		return false, nil
	}
	v, err := e.found.Float64()
	e.found = nil
	if err != nil {
		return false, fmt.Errorf(
			"optim.%s.Step: whether the gradients are finite, which this optimizer reads on the host: %w", e.name, err)
	}
	return v != 0, nil
}

// release closes the temporary tensors of a step and keeps the memory of the slices.
func (e *engine) release() {
	e.open.close()
	clear(e.open)
	e.open = e.open[:0]
	e.gradients.Close()
	e.gradients = nil
	e.batches = e.batches[:0]
	e.found = nil
}

// collect sorts the parameters that have a gradient into batches.
func (e *engine) collect() error {
	e.gradients = torch.NewScope("gradients of a step")
	for _, g := range e.groups {
		first := len(e.batches)
		all, err := torch.Gradients(e.gradients, g.marked...)
		if err != nil {
			return err
		}
		slots, grads := g.slots, all
		if slices.Contains(all, nil) {
			slots, grads = nil, nil
			for i, grad := range all {
				if grad != nil {
					slots, grads = append(slots, g.slots[i]), append(grads, grad)
				}
			}
		}
		devices, dtypes, err := torch.DevicesAndDTypes(grads...)
		if err != nil {
			return err
		}
		for i, s := range slots {
			grad, device, dtype := grads[i], devices[i], dtypes[i]
			if device == cuda.CPU {
				var err error
				if grad, err = e.arrange(g, s, grad); err != nil {
					return err
				}
			}
			params, err := e.masterOf(s, device, dtype)
			if err != nil {
				return fmt.Errorf("optim.%s.Step: the float32 copy of parameter %d: %w", e.name, s.index, err)
			}
			b := e.batch(g, first, device, dtype, s.master != nil)
			if other := &e.batches[first]; e.common.capturable && b.device != other.device {
				return fmt.Errorf("optim.%s.Step: the gradients of parameters %d and %d are on %v and "+
					"%v, and Capturable needs those of a group on one device: use one group per device: %w",
					e.name, other.slots[0].index, s.index, other.device, b.device, cuda.ErrInvalidArgument)
			}
			b.slots, b.params, b.grads = append(b.slots, s), append(b.params, params), append(b.grads, grad)
		}
	}
	return nil
}

// arrange returns the gradient in the parameter's memory layout. On a CPU, LibTorch's fused
// operators walk the memory of parameter, gradient and state in parallel and ignore strides. On a
// GPU they refuse strides that differ. Backward's gradients have the layout already.
func (e *engine) arrange(g *group, s *slot, grad *torch.Tensor) (*torch.Tensor, error) {
	if g.rule.dense(e.common.capturable || e.found != nil) && !isDense(s.marked) {
		return nil, fmt.Errorf("optim.%s.Step: parameter %d has the shape %v and the strides %v, with "+
			"gaps in memory or overlapping elements: use a Contiguous copy as parameter: %w",
			e.name, s.index, s.marked.Shape(), s.marked.Strides(), cuda.ErrInvalidArgument)
	}
	if sameLayout(grad, s.marked) {
		return grad, nil
	}
	arranged := e.open.add(s.marked.ZerosLike())
	return arranged, arranged.CopyFrom(grad, torch.CopyOptions{})
}

// isDense reports whether a tensor's elements fill its memory without gaps, in any order.
func isDense(t *torch.Tensor) bool {
	if t.IsContiguous(torch.Contiguous) {
		return true
	}
	shape, strides := t.Shape(), t.Strides()
	elements, next := int64(1), int64(1)
	for _, n := range shape {
		elements *= n
	}
	for next < elements {
		k := -1
		for i, n := range shape {
			if n > 1 && strides[i] == next {
				k = i
			}
		}
		if k < 0 {
			return false
		}
		next *= shape[k]
	}
	return true
}

// sameLayout reports whether the elements of two tensors of one shape have the same order in
// memory.
func sameLayout(a, b *torch.Tensor) bool {
	x, y := a.Strides(), b.Strides()
	if slices.Equal(x, y) {
		return true
	}
	for i, n := range b.Shape() {
		if n > 1 && i < len(x) && x[i] != y[i] {
			return false
		}
	}
	return true
}

// batch returns the batch of a device and a gradient's dtype among the group's batches, which
// start at index first. Parameters with masters have separate batches.
func (e *engine) batch(g *group, first int, device cuda.Device, dtype torch.DType, masters bool) *batch {
	if masters {
		dtype = torch.Float32
	}
	for i := first; i < len(e.batches); i++ {
		if b := &e.batches[i]; b.device == device && b.dtype == dtype && b.masters == masters {
			return b
		}
	}
	if len(e.batches) < cap(e.batches) {
		e.batches = e.batches[:len(e.batches)+1] // reuse the slices of an earlier step
	} else {
		e.batches = append(e.batches, batch{})
	}
	b := &e.batches[len(e.batches)-1]
	*b = batch{e: e, g: g, device: device, dtype: dtype, slots: b.slots[:0], params: b.params[:0],
		grads: b.grads[:0], private: !e.common.keep, masters: masters}
	return b
}

// prepare starts the state of new parameters, and moves state and learning rate to the parameters'
// current device.
func (e *engine) prepare(b *batch) error {
	for _, s := range b.slots {
		if err := b.g.follow(s, b.device, b.dtype); err != nil {
			return fmt.Errorf("optim.%s.Step: the state of parameter %d: %w", e.name, s.index, err)
		}
	}
	if !e.common.capturable {
		return nil
	}
	if b.g.rate == nil {
		rate, err := torch.Full(b.device, torch.Float32, b.g.lr)
		if err != nil {
			return err // the next Step tries again
		}
		b.g.rate = rate
		return nil
	}
	if b.g.rate.Device() == b.device {
		return nil
	}
	moved := b.g.rate.To(b.device)
	if err := moved.Err(); err != nil {
		return err
	}
	b.g.rate.Close()
	b.g.rate = moved
	return nil
}

// follow starts a parameter's state. If there is state, follow gives it the parameter's device,
// dtype and, on a CPU, memory layout.
func (g *group) follow(s *slot, device cuda.Device, dtype torch.DType) error {
	if !s.started() {
		s.device, s.dtype = device, dtype
		if err := g.rule.start(g, s); err != nil {
			s.close()
			return err
		}
		return nil
	}
	if s.device == device && s.dtype == dtype && (device != cuda.CPU || g.arranged(s)) {
		return nil
	}
	old := s.state
	s.state = make([]*torch.Tensor, len(old))
	was := slot{device: s.device, dtype: s.dtype, state: old}
	s.device, s.dtype = device, dtype
	for k, t := range old {
		if t == nil {
			continue
		}
		if err := g.fill(s, k, t); err != nil {
			s.close()
			s.device, s.dtype, s.state = was.device, was.dtype, was.state
			return err
		}
	}
	was.close()
	return nil
}

// arranged reports whether the state has the parameter's memory layout (see arrange). The program
// may have changed the parameter's layout.
func (g *group) arranged(s *slot) bool {
	for k, t := range s.state {
		if k != g.steps && t != nil && !sameLayout(t, s.target()) {
			return false
		}
	}
	return true
}

// fill copies a value into state tensor k. If there is none, it makes one like the parameter.
func (g *group) fill(s *slot, k int, value *torch.Tensor) error {
	if s.state[k] == nil {
		t, err := g.empty(s, k)
		if err != nil {
			return err
		}
		s.state[k] = t
	}
	return s.state[k].CopyFrom(value, torch.CopyOptions{})
}

// empty returns a zero tensor for state k, with the parameter's strides and dtype, or a step count.
func (g *group) empty(s *slot, k int) (*torch.Tensor, error) {
	if k == g.steps {
		return torch.Zeros(s.device, torch.Float32)
	}
	t := s.target().ZerosLike()
	return t, t.Err()
}

// zeros starts all state of a parameter with zeros.
func (g *group) zeros(s *slot) error {
	for k := range s.state {
		t, err := g.empty(s, k)
		if err != nil {
			return err
		}
		s.state[k] = t
	}
	return nil
}

// narrow reports whether MasterWeights applies to a dtype.
func narrow(d torch.DType) bool { return d == torch.BFloat16 || d == torch.Float16 }

// masterOf returns the tensor that a step updates. It is the parameter, or, for a 16-bit parameter
// with MasterWeights, its master, which masterOf makes or moves to the device. A parameter that no
// longer has 16 bits loses its master.
func (e *engine) masterOf(s *slot, device cuda.Device, dtype torch.DType) (*torch.Tensor, error) {
	if !e.common.masters || !narrow(dtype) {
		s.master.Close()
		s.master = nil
		return s.marked, nil
	}
	switch {
	case s.master == nil:
		m := s.marked.ToDType(torch.Float32)
		if err := m.Err(); err != nil {
			return nil, err
		}
		s.master = m.Keep()
		if m.Scope() == nil {
			m.Close()
		}
		return s.master, s.master.Err()
	case s.master.Device() != device:
		moved := s.master.To(device)
		if err := moved.Err(); err != nil {
			return nil, err
		}
		s.master.Close()
		s.master = moved
	}
	return s.master, nil
}

// target returns the tensor that a step updates.
func (s *slot) target() *torch.Tensor {
	if s.master != nil {
		return s.master
	}
	return s.marked
}

// started reports whether the parameter has state.
func (s *slot) started() bool {
	for _, t := range s.state {
		if t != nil {
			return true
		}
	}
	return false
}

func (s *slot) close() {
	for k, t := range s.state {
		t.Close()
		s.state[k] = nil
	}
}

// Close frees the state and the learning rates in device memory. The next Step starts without
// state.
func (e *engine) Close() error {
	for _, g := range e.groups {
		for _, s := range g.slots {
			s.close()
			s.master.Close()
			s.master = nil
		}
		g.rate.Close()
		g.rate = nil
	}
	return nil
}

package optim

import (
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// EMAOptions are the options of [NewEMA].
type EMAOptions struct {
	Decay float64 // from 0 to 1; 0 stands for 0.999
}

// EMA keeps exponential moving averages of a network's tensors, which often generalise better than
// the tensors themselves:
//
//	average = Decay*average + (1-Decay)*tensor
//
// It matches torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn and use_buffers=True.
// PyTorch copies the tensors in the first update; NewEMA copies them at once. So the two match if
// PyTorch's first update precedes training. For integer tensors Update copies the values, and
// PyTorch stores truncated averages. An average has its tensor's dtype. 16 bits are too few for a
// Decay near 1: average the float32 masters instead. Only one goroutine at a time may use an EMA.
type EMA struct {
	decay   float64
	names   []string
	tensors []*torch.Tensor // under NoGrad
	average []*torch.Tensor
	swapped bool            // the tensors have the averages
	spare   []*torch.Tensor // while swapped: one like each tensor, for swapping back; or nil
}

// NewEMA returns averages that start as copies of the tensors, usually nn.State(net). The caller
// keeps ownership of the tensors, and closes the EMA.
func NewEMA(tensors []torch.Named, o EMAOptions) (*EMA, error) {
	o.Decay = orDefault(o.Decay, 0.999)
	if !(o.Decay >= 0 && o.Decay <= 1) {
		return nil, fmt.Errorf("optim.NewEMA: Decay is %v: it must be from 0 to 1: %w", o.Decay,
			cuda.ErrInvalidArgument)
	}
	if len(tensors) == 0 {
		return nil, fmt.Errorf("optim.NewEMA: no tensors: %w", cuda.ErrInvalidArgument)
	}
	e := &EMA{decay: o.Decay}
	for _, n := range tensors {
		t := n.Tensor.NoGrad()
		a := t.Clone()
		if err := a.Err(); err != nil {
			e.Close()
			return nil, fmt.Errorf("optim.NewEMA: %s: %w", n.Name, err)
		}
		e.names, e.tensors, e.average = append(e.names, n.Name), append(e.tensors, t), append(e.average, a)
	}
	return e, nil
}

// pairs are tensors and their averages, all of one device and dtype.
type pairs struct {
	device           cuda.Device
	dtype            torch.DType
	tensors, average []*torch.Tensor
	at               []int // indexes in the EMA
}

// pairs sorts the tensors by device and dtype. If a tensor has moved to another device, its average
// follows.
func (e *EMA) pairs() ([]*pairs, error) {
	if len(e.average) == 0 {
		return nil, fmt.Errorf("optim.EMA: %w", torch.ErrClosed)
	}
	var all []*pairs
	for i, t := range e.tensors {
		device, dtype := t.Device(), t.DType()
		if e.average[i].Device() != device {
			moved := e.average[i].To(device)
			if err := moved.Err(); err != nil {
				return nil, fmt.Errorf("optim.EMA: %s: %w", e.names[i], err)
			}
			e.average[i].Close()
			e.average[i] = moved
		}
		k := slices.IndexFunc(all, func(p *pairs) bool { return p.device == device && p.dtype == dtype })
		if k < 0 {
			k = len(all)
			all = append(all, &pairs{device: device, dtype: dtype})
		}
		all[k].tensors, all[k].average = append(all[k].tensors, t), append(all[k].average, e.average[i])
		all[k].at = append(all[k].at, i)
	}
	return all, nil
}

// Update moves the averages towards the tensors. Call it after Step. It enqueues a few kernels on
// the current stream and does not wait, so it can be captured in a graph.
func (e *EMA) Update() error {
	all, err := e.pairs()
	if err != nil {
		return err
	}
	for _, p := range all {
		switch p.dtype {
		case torch.Float16, torch.BFloat16, torch.Float32, torch.Float64:
			err = torch.ForeachLerp_(p.average, p.tensors, 1-e.decay)
		default:
			err = torch.ForeachCopy_(p.average, p.tensors)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Swap exchanges tensors and averages, so that the network computes with the averages. Call Swap
// again, before training continues, to exchange them back:
//
//	if err := ema.Swap(); err != nil {
//		return err
//	}
//	accuracy, err := evaluate(net)
//	return errors.Join(err, ema.Swap())
//
// Swap enqueues copies on the current stream. The first Swap allocates a copy of the tensors,
// which the second uses and frees, so swapping back needs no memory. A Swap that runs out of
// memory has exchanged nothing. After another error, some tensors may be exchanged.
func (e *EMA) Swap() error {
	all, err := e.pairs()
	if err != nil {
		return err
	}
	if err := e.reserve(); err != nil {
		return err
	}
	for _, s := range e.spare {
		if d := s.Device(); d != cuda.CPU { // the first Swap may have run on another stream
			stream, err := cuda.GetCurrentCUDAStream(d)
			if err == nil {
				err = s.RecordStream(stream)
			}
			if err != nil {
				return err
			}
		}
	}
	for _, p := range all {
		spare := make([]*torch.Tensor, len(p.at))
		for k, i := range p.at {
			spare[k] = e.spare[i]
		}
		if err := swap(p.tensors, p.average, spare); err != nil {
			return err
		}
	}
	if e.swapped = !e.swapped; !e.swapped {
		e.free()
	}
	return nil
}

// reserve gives each tensor a spare of the tensor's shape and dtype. If a tensor moved since the
// first Swap, it gets a new spare.
func (e *EMA) reserve() error {
	spare := make([]*torch.Tensor, len(e.tensors))
	var made handles
	for i, t := range e.tensors {
		if e.spare != nil && e.spare[i].Device() == t.Device() && e.spare[i].DType() == t.DType() {
			spare[i] = e.spare[i]
			continue
		}
		spare[i] = made.add(t.Clone())
		if err := spare[i].Err(); err != nil {
			made.close()
			return fmt.Errorf("optim.EMA: %s: %w", e.names[i], err)
		}
	}
	for i, old := range e.spare {
		if old != spare[i] {
			old.Close()
		}
	}
	e.spare = spare
	return nil
}

// free closes the tensors of reserve.
func (e *EMA) free() {
	(*handles)(&e.spare).close()
	e.spare = nil
}

// swap exchanges a and b, using spare for the copy.
func swap(a, b, spare []*torch.Tensor) error {
	if err := torch.ForeachCopy_(spare, a); err != nil {
		return err
	}
	if err := torch.ForeachCopy_(a, b); err != nil {
		return err
	}
	return torch.ForeachCopy_(b, spare)
}

// State returns the averages by the tensors' names. They belong to the EMA, and the next Update,
// Swap or Close changes them. checkpoint.Save writes them to a file that nn.Load reads into the
// network, or LoadState into an EMA.
func (e *EMA) State() []torch.Named {
	state := make([]torch.Named, len(e.average))
	for i, a := range e.average {
		state[i] = torch.Named{Name: e.names[i], Tensor: a}
	}
	return state
}

// LoadState copies averages that State returned into the EMA, which must have the same names. It
// checks the names before it changes anything.
func (e *EMA) LoadState(state []torch.Named) error {
	given := make(map[string]*torch.Tensor, len(state))
	for _, n := range state {
		given[n.Name] = n.Tensor
	}
	if len(state) != len(e.names) {
		return fmt.Errorf("optim.EMA.LoadState: %d tensors, and the averages are %d: %w", len(state),
			len(e.names), cuda.ErrInvalidArgument)
	}
	for i, name := range e.names {
		switch t := given[name]; {
		case t.Err() != nil:
			return fmt.Errorf("optim.EMA.LoadState: %s is missing or has failed: %w", name, t.Err())
		case fmt.Sprint(t.Shape()) != fmt.Sprint(e.average[i].Shape()):
			return fmt.Errorf("optim.EMA.LoadState: %s has shape %v, and should have %v: %w", name,
				t.Shape(), e.average[i].Shape(), cuda.ErrInvalidArgument)
		}
	}
	for i, name := range e.names {
		if err := e.average[i].CopyFrom(given[name], torch.CopyOptions{}); err != nil {
			return fmt.Errorf("optim.EMA.LoadState: %s: %w", name, err)
		}
	}
	return nil
}

// Close frees the averages. Between two calls of Swap it frees the tensors' values instead, and
// the network keeps the averages. The error is always nil.
func (e *EMA) Close() error {
	for _, a := range e.average {
		a.Close()
	}
	e.average, e.names = nil, nil
	e.free()
	return nil
}

package optim

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// PyTorch returns the state as the dict of PyTorch's Optimizer.state_dict, for
// [checkpoint.SavePyTorch]. The dict shares the tensors of s.
//
//	s, err := opt.State()
//	...
//	dict, err := s.PyTorch()
//	...
//	values := map[string]any{"state_dict": nn.State(net), "optimizer": dict}
//	err = checkpoint.SavePyTorch("checkpoint.pt", values)
//
// [Load] reads the optimizer from such a file.
func (s State) PyTorch() (map[string]any, error) {
	state := map[any]any{}
	for _, n := range s.Tensors {
		i, name, ok := splitName(n.Name)
		if !ok {
			return nil, fmt.Errorf("optim: tensor %q is the state of no parameter: %w", n.Name, cuda.ErrInvalidArgument)
		}
		index := int64(i)
		if state[index] == nil {
			state[index] = map[string]any{}
		}
		state[index].(map[string]any)[name] = n.Tensor
	}
	var groups []any
	d := json.NewDecoder(strings.NewReader(s.Metadata[groupsKey]))
	d.UseNumber()
	if err := d.Decode(&groups); err != nil {
		return nil, fmt.Errorf("optim: %s: %w", groupsKey, err)
	}
	return map[string]any{"state": state, groupsKey: numbers(groups)}, nil
}

// numbers replaces JSON's numbers by int64, or by float64 if they are not integers.
func numbers(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = numbers(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = numbers(v[k])
		}
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return n
		}
		f, _ := v.Float64() // JSON's grammar has no other number
		return f
	}
	return v
}

// pytorch reads the state from a PyTorch file. The state is the file's dict itself, or the dict
// under the key "optimizer", "optimizer_state_dict" or "optim".
func (f *stateFile) pytorch() (State, error) {
	v, err := f.c.Value()
	if err != nil {
		return State{}, err
	}
	root, _ := v.(map[any]any)
	for _, candidate := range []any{v, root["optimizer"], root["optimizer_state_dict"], root["optim"]} {
		m, _ := candidate.(map[any]any)
		state, ok1 := m["state"].(map[any]any)
		groups, ok2 := m[groupsKey].([]any)
		if !ok1 || !ok2 {
			continue
		}
		text, err := f.groupsText(groups)
		if err != nil {
			return State{}, err
		}
		tensors, err := f.stateTensors(state)
		return State{Tensors: tensors, Metadata: map[string]string{groupsKey: text}}, err
	}
	return State{}, f.invalid(
		fmt.Errorf("there is no state of an optimizer in the file: a dict of \"state\" and %q: %w",
			groupsKey, cuda.ErrInvalidArgument))
}

// groupsText returns the rates and the parameters of groups as JSON.
func (f *stateFile) groupsText(groups []any) (string, error) {
	saved := make([]savedGroup, len(groups))
	for i, g := range groups {
		m, _ := g.(map[any]any)
		lr, err := f.scalar(m["lr"])
		if err != nil {
			return "", fmt.Errorf("%w (lr of group %d)", err, i)
		}
		saved[i].LR = &lr
		params, _ := m["params"].([]any)
		for _, p := range params {
			index, ok := p.(int64)
			if !ok {
				return "", f.invalid(fmt.Errorf("group %d: a parameter is %v: %w", i, p, cuda.ErrInvalidArgument))
			}
			saved[i].Params = append(saved[i].Params, int(index))
		}
	}
	text, err := json.Marshal(saved)
	if err != nil {
		err = f.invalid(err)
	}
	return string(text), err
}

// scalar returns a number, or a tensor's element: PyTorch keeps a rate in a tensor if it captures
// graphs.
func (f *stateFile) scalar(v any) (float64, error) {
	switch v := v.(type) {
	case float64:
		return v, nil
	case int64:
		return float64(v), nil
	case *checkpoint.StoredTensor:
		if n := v.Spec().Elements(); n != 1 {
			return 0, f.invalid(fmt.Errorf("a tensor of %d elements is no number: %w", n, cuda.ErrInvalidArgument))
		}
		t, err := v.Read()
		if err != nil {
			return 0, err
		}
		defer t.Close()
		return t.Float64()
	}
	return 0, f.invalid(fmt.Errorf("%v is no number: %w", v, cuda.ErrInvalidArgument))
}

// stateTensors reads the tensors of the parameters' states. PyTorch before 1.12 counts steps with
// an integer, and writes None for missing state.
func (f *stateFile) stateTensors(state map[any]any) ([]torch.Named, error) {
	if err := f.checkSize(state); err != nil {
		return nil, err
	}
	var named []torch.Named
	for index, v := range state {
		values, ok := v.(map[any]any)
		if !ok {
			return nil, f.invalid(fmt.Errorf("the state of parameter %v is no dict: %w", index,
				cuda.ErrInvalidArgument))
		}
		for key, v := range values {
			name := fmt.Sprintf("%s%v.%v", statePrefix, index, key)
			if v == nil {
				continue
			}
			t, err := f.readState(name, v)
			if err != nil {
				return nil, err
			}
			if t != nil {
				named = append(named, torch.Named{Name: name, Tensor: t})
			}
		}
	}
	return named, nil
}

// checkSize refuses a file whose tensors share so much memory that reading them would need a
// multiple of the file's size. No optimizer shares memory between its state tensors.
func (f *stateFile) checkSize(state map[any]any) error {
	size, err := f.c.Size()
	if err != nil {
		return err
	}
	limit := 4 * max(size, 1<<20) // compressed files are smaller than their tensors
	left := limit
	for _, v := range state {
		values, _ := v.(map[any]any)
		for _, v := range values {
			t, ok := v.(*checkpoint.StoredTensor)
			if !ok {
				continue
			}
			n := t.Spec().Bytes()
			if n > left {
				return f.invalid(fmt.Errorf("the tensors have more than %d bytes and the file has %d: "+
					"they share memory, so clone them before torch.save: %w",
					limit, size, cuda.ErrInvalidArgument))
			}
			left -= n
		}
	}
	return nil
}

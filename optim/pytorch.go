package optim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// PyTorch returns the state as the dict of PyTorch's Optimizer.state_dict, for [nn.SavePyTorch].
// The tensors are those of s.
//
//	s, err := opt.State()
//	...
//	dict, err := s.PyTorch()
//	...
//	err = nn.SavePyTorch("checkpoint.pt", map[string]any{"state_dict": nn.State(net), "optimizer": dict})
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

// numbers replaces JSON's numbers by int64, or by float64 where they are no integers.
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

// readPyTorch reads the state from a PyTorch file: its dict itself, or the one under the key
// "optimizer", "optimizer_state_dict" or "optim". The tensors are added to read.
func readPyTorch(c *nn.Checkpoint, read *handles) (State, error) {
	v, err := c.Value()
	if err != nil {
		return State{}, err
	}
	root, _ := v.(map[any]any)
	var state map[any]any
	var groups []any
	for _, candidate := range []any{v, root["optimizer"], root["optimizer_state_dict"], root["optim"]} {
		m, _ := candidate.(map[any]any)
		var ok1, ok2 bool
		state, ok1 = m["state"].(map[any]any)
		groups, ok2 = m[groupsKey].([]any)
		if ok1 && ok2 {
			s := State{Metadata: map[string]string{}}
			if s.Metadata[groupsKey], err = groupsText(groups); err == nil {
				s.Tensors, err = stateTensors(state, read)
			}
			return s, err
		}
	}
	return State{}, fmt.Errorf("there is no state of an optimizer in the file: a dict of \"state\" and %q: %w", groupsKey, cuda.ErrInvalidArgument)
}

// groupsText returns the rates and the parameters of groups as JSON.
func groupsText(groups []any) (string, error) {
	saved := make([]savedGroup, len(groups))
	for i, g := range groups {
		m, _ := g.(map[any]any)
		lr, err := scalar(m["lr"])
		if err != nil {
			return "", fmt.Errorf("group %d: lr: %w", i, err)
		}
		saved[i].LR = &lr
		params, _ := m["params"].([]any)
		for _, p := range params {
			index, ok := p.(int64)
			if !ok {
				return "", fmt.Errorf("group %d: a parameter is %v: %w", i, p, cuda.ErrInvalidArgument)
			}
			saved[i].Params = append(saved[i].Params, int(index))
		}
	}
	var text bytes.Buffer
	err := json.NewEncoder(&text).Encode(saved)
	return text.String(), err
}

// scalar returns a number, or the element of a tensor: PyTorch keeps a rate in one for graphs.
func scalar(v any) (float64, error) {
	switch v := v.(type) {
	case float64:
		return v, nil
	case int64:
		return float64(v), nil
	case *nn.StoredTensor:
		t, err := v.Read()
		if err != nil {
			return 0, err
		}
		defer t.Close()
		return t.Float64()
	}
	return 0, fmt.Errorf("%v is no number: %w", v, cuda.ErrInvalidArgument)
}

// stateTensors reads the tensors of the parameters' states. PyTorch before 1.12 counts steps with
// an integer, and writes None for what a parameter does not have yet.
func stateTensors(state map[any]any, read *handles) ([]nn.Named, error) {
	var named []nn.Named
	for index, v := range state {
		values, ok := v.(map[any]any)
		if !ok {
			return nil, fmt.Errorf("the state of parameter %v is no dict: %w", index, cuda.ErrInvalidArgument)
		}
		for key, v := range values {
			var t *torch.Tensor
			var err error
			switch v := v.(type) {
			case *nn.StoredTensor:
				t, err = v.Read()
			case int64:
				t, err = torch.Full(cuda.CPU, torch.Float32, float64(v))
			case nil:
				continue
			default:
				err = fmt.Errorf("%v is no tensor: %w", v, cuda.ErrInvalidArgument)
			}
			name := fmt.Sprintf("%s%v.%v", statePrefix, index, key)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			named = append(named, nn.Named{Name: name, Tensor: read.add(t)})
		}
	}
	return named, nil
}

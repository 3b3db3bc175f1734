package aoti

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/internal/capi"
)

// readStructure names the inputs and outputs of a package without a description. It takes the names
// from PyTorch's record of nested lists and dictionaries (torch.utils._pytree).
func (m *Model) readStructure() error {
	arguments, results, err := capi.ModelStructure(m.instances[0])
	if err != nil {
		return err
	}
	if m.Inputs, err = leaves(arguments); err != nil {
		return malformed("the structure of its arguments: %v", err)
	}
	for i := range m.Inputs {
		// The root is the pair of positional and keyword arguments.
		name := m.Inputs[i].Name
		if position, ok := strings.CutPrefix(name, "0."); ok {
			name = "argument " + position
		}
		m.Inputs[i].Name = strings.TrimPrefix(name, "1.")
	}
	if m.Outputs, err = leaves(results); err != nil {
		return malformed("the structure of its results: %v", err)
	}
	return nil
}

// node is a part of a structure: a leaf if Type is nil.
type node struct {
	Type     *string `json:"type"`
	Context  *string `json:"context"`
	Children []node  `json:"children_spec"`
}

// maxDepth bounds the nesting of a structure.
const maxDepth = 100

// leaves returns the tensors of a structure in order, with their paths as names.
func leaves(text string) ([]Value, error) {
	var versioned []json.RawMessage
	if err := json.Unmarshal([]byte(text), &versioned); err != nil {
		return nil, err
	}
	if len(versioned) != 2 || string(versioned[0]) != "1" {
		return nil, fmt.Errorf("its version is not 1")
	}
	var root node
	if err := json.Unmarshal(versioned[1], &root); err != nil {
		return nil, err
	}
	found := []Value{}
	err := root.walk("", 0, func(name string) { found = append(found, Value{Name: name}) })
	return found, err
}

func (n node) walk(name string, depth int, leaf func(name string)) error {
	if depth > maxDepth {
		return fmt.Errorf("more than %d levels", maxDepth)
	}
	if n.Type == nil {
		leaf(name)
		return nil
	}
	var keys []any
	if strings.HasSuffix(*n.Type, "dict") || strings.HasSuffix(*n.Type, "Dict") {
		if n.Context == nil || json.Unmarshal([]byte(*n.Context), &keys) != nil || len(keys) != len(n.Children) {
			keys = nil // numbers name the children
		}
	}
	for i, child := range n.Children {
		path := strconv.Itoa(i)
		if keys != nil {
			path = fmt.Sprint(keys[i])
		}
		if name != "" {
			path = name + "." + path
		}
		if err := child.walk(path, depth+1, leaf); err != nil {
			return err
		}
	}
	return nil
}

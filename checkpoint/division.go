package checkpoint

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/torchstream/torchstream/torch"
)

// Division says how the ranks of a job divide a tensor.
type Division struct {
	// Shape and Strides describe the whole tensor. Its elements fill one contiguous range of
	// memory.
	Shape, Strides []int64
	// First has the index of each rank's first element, in memory order, followed by the number of
	// elements: rank r has the elements First[r] to First[r+1]-1.
	First []int64
}

// Divided has the Division of each part that this rank holds. A part is a row with the rank's
// elements of the tensor in memory order, and may be empty.
type Divided map[*torch.Tensor]Division

// Parts returns the divided tensors of a value for [SavePyTorch], without duplicates. A tensor's
// name is its place in the value. Ranks whose values have the same keys get the same names.
func (d Divided) Parts(value any) []torch.Named {
	var parts []torch.Named
	seen := map[*torch.Tensor]bool{}
	var visit func(path string, value any, depth int)
	below := func(path string, key any) string {
		if path == "" {
			return fmt.Sprint(key)
		}
		return fmt.Sprint(path, ".", key)
	}
	visit = func(path string, value any, depth int) {
		if depth > maxDepth {
			return // SavePyTorch refuses the value
		}
		switch v := value.(type) {
		case *torch.Tensor:
			if _, ok := d[v]; ok && !seen[v] {
				seen[v] = true
				parts = append(parts, torch.Named{Name: path, Tensor: v})
			}
		case []torch.Named:
			for _, n := range v {
				visit(below(path, n.Name), n.Tensor, depth+1)
			}
		case []any:
			for i, x := range v {
				visit(below(path, i), x, depth+1)
			}
		case map[string]any:
			for _, key := range slices.Sorted(maps.Keys(v)) {
				visit(below(path, key), v[key], depth+1)
			}
		case map[any]any:
			byText := func(a, b any) int { return cmp.Compare(fmt.Sprint(a), fmt.Sprint(b)) }
			for _, key := range slices.SortedFunc(maps.Keys(v), byText) {
				visit(below(path, key), v[key], depth+1)
			}
		}
	}
	visit("", value, 0)
	return parts
}

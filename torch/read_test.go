package torch_test

import (
	"testing"

	"github.com/torchstream/torchstream/torch"
)

func TestCopyFromLeavesTheLeaf(t *testing.T) {
	w := leaf(t, []float32{0, 0, 0, 0}, 2, 2)
	if err := w.CopyFrom(ints(t, []int64{1, 2}), torch.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	wantValues(t, w, 1, 2, 1, 2)
	if !w.RequiresGrad() || w.CopyFrom(ints(t, []int64{1, 2, 3}), torch.CopyOptions{}) == nil || w.CopyFrom(nil, torch.CopyOptions{}) == nil {
		t.Error("the leaf lost its mark, or a copy of another shape succeeded")
	}
}

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
	if !w.RequiresGrad() {
		t.Error("RequiresGrad() of the leaf after CopyFrom = false, want true")
	}
	if w.CopyFrom(ints(t, []int64{1, 2, 3}), torch.CopyOptions{}) == nil {
		t.Error("CopyFrom of another shape: got no error, want one")
	}
	if w.CopyFrom(nil, torch.CopyOptions{}) == nil {
		t.Error("CopyFrom(nil): got no error, want one")
	}
}

//go:build linux

package checkpoint_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/torch"
)

// written has folders of files that earlier versions of this package wrote, all with the same
// values: the first version wrote no checksums.
const written = "testdata/written"

// ascending returns n numbers from first.
func ascending(t *testing.T, first float32, n int, dtype torch.DType, shape ...int64) *torch.Tensor {
	t.Helper()
	values := make([]float32, n)
	for i := range values {
		values[i] = first + float32(i)
	}
	x, err := torch.FromSlice(values, shape...)
	if err != nil {
		t.Fatal(err)
	}
	scope := torch.NewScope("ascending")
	t.Cleanup(func() { scope.Close() })
	return scope.Own(x).ToDType(dtype)
}

// writtenTensors returns the tensors of the files in written.
func writtenTensors(t *testing.T) []torch.Named {
	return []torch.Named{
		{Name: "conv.weight", Tensor: ascending(t, 1, 24, torch.Float32, 2, 3, 4)},
		{Name: "conv.bias", Tensor: ascending(t, -3, 2, torch.Float16, 2)},
		{Name: "count", Tensor: ascending(t, 7, 1, torch.Int64, 1).View()},
		{Name: "empty", Tensor: ascending(t, 0, 0, torch.BFloat16, 0)},
	}
}

// requireTensors fails unless the file has exactly these tensors.
func requireTensors(t *testing.T, f *checkpoint.File, want []torch.Named) {
	t.Helper()
	if len(f.Tensors()) != len(want) {
		t.Errorf("%s has %d tensors, want %d", f.Path(), len(f.Tensors()), len(want))
	}
	for _, n := range want {
		got, err := f.Read(n.Name)
		if err != nil {
			t.Error(err)
			continue
		}
		same, err := got.Equal(n.Tensor)
		if err != nil || !same || got.DType() != n.Tensor.DType() || !slices.Equal(got.Shape(), n.Tensor.Shape()) {
			t.Errorf("%s: tensor %s is %v, want %v, %v", f.Path(), n.Name, got, n.Tensor, err)
		}
		got.Close()
	}
}

func TestFilesOfEarlierVersionsAreRead(t *testing.T) {
	for _, version := range []string{"without-checksums", "with-checksums"} {
		for _, name := range []string{"whole.safetensors", "whole.pt", "sharded.safetensors.index.json"} {
			f := openCheckpoint(t, filepath.Join(written, version, name))
			requireTensors(t, f, writtenTensors(t))
			if got := f.Metadata()["classes"]; got != "cat,dog" {
				t.Errorf("%s has the classes %q, want %q", f.Path(), got, "cat,dog")
			}
		}
		f := openCheckpoint(t, filepath.Join(written, version, "ranks.pt"))
		requireTensors(t, f, []torch.Named{{Name: "weight",
			Tensor: ascending(t, 100, 10, torch.Float32, 2, 5)}, writtenTensors(t)[1]})
		if epoch, err := f.Value("epoch"); err != nil || !reflect.DeepEqual(epoch, int64(3)) {
			t.Errorf("%s has the epoch %v, want 3, %v", f.Path(), epoch, err)
		}
	}
}

// Saving the same values gives the same bytes as in the last version.
func TestSavedFilesEqualTheLastVersions(t *testing.T) {
	for _, name := range []string{"whole.safetensors", "whole.pt"} {
		path := filepath.Join(t.TempDir(), name)
		if err := checkpoint.Save(path, writtenTensors(t), map[string]string{"classes": "cat,dog"}); err != nil {
			t.Fatal(err)
		}
		want, err1 := os.ReadFile(filepath.Join(written, "with-checksums", name))
		got, err2 := os.ReadFile(path)
		if err := errors.Join(err1, err2); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s has %d bytes, want the %d of testdata, %v", name, len(got), len(want), err)
		}
	}
}

// The file names and the bytes of ranks depend only on the checkpoint's id.
func TestRankFilesEqualTheLastVersions(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "ranks.pt")
	lead, err := checkpoint.NewRankWriter(path, 2)
	if err != nil {
		t.Fatal(err)
	}
	parts := []*torch.Tensor{ascending(t, 100, 6, torch.Float32, 6), ascending(t, 106, 4, torch.Float32, 4)}
	division := checkpoint.Division{Shape: []int64{2, 5}, Strides: []int64{5, 1}, First: []int64{0, 6, 10}}
	value := func(rank int) map[string]any {
		return map[string]any{"state_dict": []torch.Named{{Name: "weight", Tensor: parts[rank]},
			writtenTensors(t)[1]}, "epoch": 3}
	}
	for rank, part := range parts {
		if err := lead.Write(rank, checkpoint.Divided{part: division}.Parts(value(rank))); err != nil {
			t.Fatal(err)
		}
	}
	if err := lead.Commit(value(0), checkpoint.Divided{parts[0]: division}); err != nil {
		t.Fatal(err)
	}
	const oldID = "b0ef06d63f1d"
	for _, rank := range []string{"0", "1"} {
		name := "-rank0000" + rank + "-of-00002.safetensors"
		want, err1 := os.ReadFile(filepath.Join(written, "with-checksums", "ranks.pt-"+oldID+name))
		got, err2 := os.ReadFile(path + "-" + lead.ID() + name)
		want = bytes.ReplaceAll(want, []byte(oldID), []byte(lead.ID()))
		if err := errors.Join(err1, err2); err != nil || !bytes.Equal(got, want) {
			t.Errorf("the file of rank %s has %d bytes, want the %d of testdata, %v", rank, len(got), len(want), err)
		}
	}
}

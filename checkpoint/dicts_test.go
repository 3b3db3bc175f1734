//go:build linux

package checkpoint_test

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/torch"
)

// dictNames returns the paths and the tensors of dicts, as "path: name name".
func dictNames(dicts ...checkpoint.Dict) []string {
	var all []string
	for _, d := range dicts {
		text := d.Path + ":"
		for _, s := range d.Tensors {
			text += " " + s.Spec().Name
		}
		all = append(all, text)
	}
	return all
}

func TestDictsOfAPyTorchFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.pt")
	w, b := ascending(t, 1, 4, torch.Float32, 2, 2), ascending(t, 9, 2, torch.Float32, 2)
	err := checkpoint.SavePyTorch(path, map[string]any{
		"state_dict": []torch.Named{{Name: "w", Tensor: w}, {Name: "b", Tensor: b}},
		"optimizer":  map[string]any{"ema": map[string]any{"w": w}},
		"generators": map[string]any{"cpu": ascending(t, 1, 3, torch.Uint8, 3)}, // no weights
		"epoch":      3,
	})
	if err != nil {
		t.Fatal(err)
	}
	f := openCheckpoint(t, path)
	want := []string{"optimizer.ema: w", "state_dict: w b"} // a map's keys are sorted
	if got := dictNames(f.Dicts()...); !slices.Equal(got, want) {
		t.Errorf("dicts %q, want %q", got, want)
	}
	for path, want := range map[string]struct {
		names    string
		averages bool
	}{
		"":              {"state_dict: w b", false},
		"state_dict":    {"state_dict: w b", false},
		"optimizer.ema": {"optimizer.ema: w", true},
	} {
		d, err := f.Dict(path)
		if got := dictNames(d)[0]; err != nil || got != want.names || d.Averages() != want.averages {
			t.Errorf("Dict(%q) is %q, averages %t, %v, want %q, %t", path, got, d.Averages(), err,
				want.names, want.averages)
		}
	}
	const text = `there is no dict of tensors "ema"; the file has "optimizer.ema" (1 tensors), "state_dict" (2 tensors)`
	if _, err := f.Dict("ema"); err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v, want %q", err, text)
	}
}

func TestSafetensorsFileHasNoDicts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.safetensors")
	if err := checkpoint.Save(path,
		[]torch.Named{{Name: "w", Tensor: ascending(t, 1, 2, torch.Float32, 2)}}, nil); err != nil {
		t.Fatal(err)
	}
	f := openCheckpoint(t, path)
	d, err := f.Dict("")
	if got := dictNames(d); err != nil || got[0] != ": w" || f.Dicts() != nil {
		t.Errorf("Dict is %q, Dicts %v, %v, want all tensors and none", got, f.Dicts(), err)
	}
	if _, err := f.Dict("w"); err == nil || !strings.Contains(err.Error(), `there is no dict of tensors "w"`) {
		t.Errorf("error %v, want that there is no dict", err)
	}
	if d.Tensors[0].TiedTo(d.Tensors[0]) {
		t.Error("a tensor of a safetensors file is tied, want none")
	}
}

// Tied tensors have the same elements, not only the same memory.
func TestTiedTensorsOfAPyTorchFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.pt")
	w := ascending(t, 1, 4, torch.Float32, 2, 2)
	err := checkpoint.Save(path, []torch.Named{{Name: "a", Tensor: w}, {Name: "b", Tensor: w},
		{Name: "c", Tensor: ascending(t, 1, 4, torch.Float32, 2, 2)}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	stored := func(f *checkpoint.File, name string) *checkpoint.StoredTensor {
		s, err := f.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	f, views := openCheckpoint(t, path), openFixture(t, "views.pt")
	for _, c := range []struct {
		f    *checkpoint.File
		a, b string
		tied bool
	}{{f, "a", "b", true}, {f, "a", "c", false}, {views, "row", "column", false}, {views, "row", "row", true}} {
		if got := stored(c.f, c.a).TiedTo(stored(c.f, c.b)); got != c.tied {
			t.Errorf("%s and %s: tied %t, want %t", c.a, c.b, got, c.tied)
		}
	}
}

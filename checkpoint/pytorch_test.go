//go:build linux

package checkpoint_test

import (
	"archive/zip"
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// fixtures has files of torch.save: see make_fixtures.py there.
const fixtures = "internal/ptfile/testdata"

func openFixture(t *testing.T, name string) *checkpoint.File {
	t.Helper()
	return openCheckpoint(t, filepath.Join(fixtures, name))
}

func openCheckpoint(t *testing.T, path string) *checkpoint.File {
	t.Helper()
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func readFloats(t *testing.T, c *checkpoint.File, name string) []float64 {
	t.Helper()
	x, err := c.Read(name)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	v, err := x.Float64s()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// fixtureNet is the network of checkpoint.pt and state_dict.pth.
func fixtureNet(t *testing.T) nn.Module {
	t.Helper()
	net := nn.NewSequential(nn.NewConv2d(1, 2, 3, nn.Conv2dOptions{NoBias: true}),
		nn.NewBatchNorm2d(2, nn.BatchNorm2dOptions{}))
	t.Cleanup(func() { nn.Close(net) })
	return net
}

func TestLoadReadsPyTorchFiles(t *testing.T) {
	var loaded [][]float64
	for _, name := range []string{"state_dict.pth", "checkpoint.pt", "protocol4.pt"} {
		net := fixtureNet(t)
		if _, err := nn.Load(filepath.Join(fixtures, name), net); err != nil {
			t.Fatal(err)
		}
		var values []float64
		for _, n := range nn.State(net) {
			v, err := n.Tensor.Float64s()
			if err != nil {
				t.Fatal(err)
			}
			values = append(values, v...)
		}
		loaded = append(loaded, values)
		c := openFixture(t, name)
		if got := readFloats(t, c, "1.num_batches_tracked"); !reflect.DeepEqual(got, []float64{2}) {
			t.Errorf("%s: num_batches_tracked is %v, want [2]", name, got)
		}
		names := []string{}
		for _, s := range c.Tensors() {
			names = append(names, s.Name)
		}
		want := []string{"0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
		if !reflect.DeepEqual(names, want) {
			t.Errorf("%s: tensors %v, want %v", name, names, want)
		}
	}
	if !reflect.DeepEqual(loaded[0], loaded[1]) || !reflect.DeepEqual(loaded[0], loaded[2]) {
		t.Errorf("the same state was loaded as %v, want three equal ones", loaded)
	}
}

func TestStridesOfPyTorchFiles(t *testing.T) {
	c := openFixture(t, "views.pt")
	for name, want := range map[string][]float64{
		"row":          {12, 13, 14, 15, 16, 17},
		"column":       {3, 9, 15, 21},
		"element":      {23},
		"every second": {6, 8, 10, 12, 14, 16, 18, 20, 22},
		"transposed":   {0, 6, 12, 18, 1, 7, 13, 19, 2, 8, 14, 20, 3, 9, 15, 21, 4, 10, 16, 22, 5, 11, 17, 23},
		"expanded":     {0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5},
	} {
		if got := readFloats(t, c, name); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	if got := readFloats(t, c, "channels_last"); len(got) != 24 || got[0] != 0 || got[1] != 1 || got[23] != 23 {
		t.Errorf("channels_last: %v, want length 24, 0, 1, 23", got)
	}
}

func TestValuesOfPyTorchFiles(t *testing.T) {
	c := openFixture(t, "checkpoint.pt")
	for _, x := range []struct {
		path []any
		want any
	}{
		{[]any{"epoch"}, int64(3)},
		{[]any{"arch"}, "net é"},
		{[]any{"none"}, nil},
		{[]any{"flags"}, []any{true, false}},
		{[]any{"flags", 1}, false},
		{[]any{"bytes"}, []byte("\x00\xff text")},
		{[]any{"size"}, []any{int64(2), int64(3)}},
		{[]any{"size", 0}, int64(2)},
		{[]any{"device"}, "cuda:1"},
		{[]any{"dtype"}, "torch.bfloat16"},
		{[]any{7, 1, 0}, int64(1)},
		{[]any{"optimizer", "param_groups", 0, "betas"}, []any{0.8, 0.99}},
		{[]any{"optimizer", "param_groups", 0, "params", 2}, int64(2)},
		{[]any{"scheduler", "milestones"}, map[any]any{int64(3): int64(1), int64(5): int64(2)}},
	} {
		if got, err := c.Value(x.path...); err != nil || !reflect.DeepEqual(got, x.want) {
			t.Errorf("%v is %#v, want %#v, %v", x.path, got, x.want, err)
		}
	}
	for _, path := range [][]any{{"none of these"}, {"epoch", "x"}, {"flags", 2}, {"flags", -1},
		{"flags", "x"}, {"size", 2}, {[]int{1}}} {
		if v, err := c.Value(path...); err == nil || !strings.Contains(err.Error(), "checkpoint.pt") {
			t.Errorf("%v is %v, %v, want an error with \"checkpoint.pt\"", path, v, err)
		}
	}
	all, err := c.Value()
	if err != nil {
		t.Fatal(err)
	}
	stored := all.(map[any]any)["best"].(*checkpoint.StoredTensor)
	best, err := stored.Read()
	if err != nil {
		t.Fatal(err)
	}
	defer best.Close()
	if v, err := best.Float64(); err != nil || v != 0.75 || stored.Spec().DType != torch.Float32 ||
		len(stored.Spec().Shape) != 0 {
		t.Errorf("best is %v %v, %v, want 0.75 of float32 without dimensions, nil", v, stored.Spec(), err)
	}
	averages, err := c.Value("optimizer", "state", 0, "exp_avg")
	if err != nil || !reflect.DeepEqual(averages.(*checkpoint.StoredTensor).Spec().Shape, []int64{2, 1, 3, 3}) {
		t.Errorf("exp_avg is %v, %v, want the shape [2 1 3 3], nil", averages, err)
	}
	if v, err := openFixture(t, "tensor.pt").Value(); err != nil || v.(*checkpoint.StoredTensor).Spec().Shape[0] != 3 {
		t.Errorf("a file of one tensor: %v, %v, want 3 rows, nil", v, err)
	}
	if _, err := openCheckpoint(t, write(t, safetensors("{}", 0))).Value("epoch"); err == nil ||
		!strings.Contains(err.Error(), "Metadata") {
		t.Errorf("a value of a safetensors file: %v, want an error with \"Metadata\"", err)
	}
}

// The pickle is small: a tuple of two references to a tuple of two references, 20 deep. As a tree
// it has 2^20 leaves. The string next to it raises ptfile's limit enough.
func TestValueSharesContainers(t *testing.T) {
	pad := strings.Repeat(" ", 1<<18)
	pickle := "\x80\x02X\x00\x00\x04\x00" + pad + ")q\x00" + strings.Repeat("h\x00\x86q\x00", 20) + "\x86."
	path := filepath.Join(t.TempDir(), "x.pt")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	z := zip.NewWriter(file)
	w, err := z.CreateHeader(&zip.FileHeader{Name: "x/data.pkl"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte(pickle)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	c := openCheckpoint(t, path)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	v, err := c.Value()
	runtime.ReadMemStats(&after)
	if took := after.TotalAlloc - before.TotalAlloc; err != nil || took > 1<<20 {
		t.Errorf("Value took %d bytes, %v, want at most %v, nil", took, err, 1<<20)
	}
	depth := 0
	for pair := v.([]any)[1].([]any); len(pair) == 2; depth++ {
		pair = pair[0].([]any)
	}
	if depth != 20 {
		t.Errorf("the tree is %d deep, want 20", depth)
	}
}

func TestRefusedPyTorchFiles(t *testing.T) {
	for name, text := range map[string]string{
		"module.pt": "refused: all of the file is one object, torch.nn.modules.linear.Linear: in Python, " +
			"save model.state_dict()",
		"legacy.pt": "torch.save(torch.load(path, weights_only=True), path)",
	} {
		if _, err := checkpoint.Open(filepath.Join(fixtures, name)); err == nil ||
			!strings.Contains(err.Error(), text) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v does not say %q", name, err, text)
		}
	}
	net := fixtureNet(t)
	if _, err := nn.Load(filepath.Join(fixtures, "tensor.pt"), net); err == nil ||
		!strings.Contains(err.Error(), "0.weight is not in the file") {
		t.Errorf("a file without a dict: %v, want an error with \"0.weight is not in the file\"", err)
	}
}

// A value that is not read is an error only when requested. The error has the value's path in the
// file.
func TestUnreadValuesAreErrorsByPath(t *testing.T) {
	c := openFixture(t, "opaque/nested.pt")
	if got := readFloats(t, c, "bias"); !reflect.DeepEqual(got, []float64{4, 5}) {
		t.Errorf("bias is %v, want [4 5]", got)
	}
	if eps, err := c.Value("value", "groups", 0, "eps"); err != nil || eps != 1e-8 {
		t.Errorf("eps is %v, want 1e-8, %v", eps, err)
	}
	const args = "value.args: argparse.Namespace is not read: in Python, save vars(args) instead"
	const lr = "value.groups.0.lr: numpy._core.multiarray.scalar is not read: in Python, save x.item()"
	for want, path := range map[string][]any{args: {"value", "args"}, args + " ": {"value", "args", "lr"},
		lr: {"value", "groups", 0, "lr"}} {
		v, err := c.Value(path...)
		var unread *checkpoint.UnreadError
		if !errors.As(err, &unread) || !strings.Contains(err.Error(), strings.TrimSpace(want)) ||
			!strings.Contains(err.Error(), "nested.pt") {
			t.Errorf("%v is %v, %v, want the error %q", path, v, err, want)
		}
	}
	all, err := c.Value()
	if err != nil {
		t.Fatal(err)
	}
	value := all.(map[any]any)["value"].(map[any]any)
	for want, got := range map[string]any{args: value["args"], lr: value["groups"].([]any)[0].(map[any]any)["lr"]} {
		if unread, ok := got.(*checkpoint.UnreadError); !ok || !strings.HasPrefix(unread.Error(), want) {
			t.Errorf("%v, want %q", got, want)
		}
	}
	if err := checkpoint.SavePyTorch(filepath.Join(t.TempDir(), "x.pt"), all); err == nil ||
		!strings.Contains(err.Error(), "is not read") {
		t.Errorf("values that are not read were written: %v, want an error with \"is not read\"", err)
	}
	keys, err := openFixture(t, "opaque/tuple_key.pt").Value("value")
	if err != nil {
		t.Fatal(err)
	}
	for key, v := range keys.(map[any]any) {
		if unread, ok := key.(*checkpoint.UnreadError); (!ok ||
			!strings.HasPrefix(unread.Error(), "value: a tuple is not read: it is the key of a dict") ||
			v != int64(2)) && (key != "b" || v != int64(3)) {
			t.Errorf("%v: %v", key, v)
		}
	}
}

// A tensor of a state_dict that cannot be read, or whose dtype package torch does not support, is
// an error that names it.
func TestUnreadTensorsAreErrorsByName(t *testing.T) {
	for file, want := range map[string]string{
		"sparse.pt": "s: torch._utils._rebuild_sparse_tensor is not read: in Python, save " +
			"tensor.to_dense() instead",
		"quantized.pt":    "q: torch._utils._rebuild_qtensor is not read: in Python, save tensor.dequantize() instead",
		"conjugate.pt":    "c: a tensor with the bit conj set is not read",
		"other_dtypes.pt": "tensor u: dtype uint16 is not handled",
	} {
		c := openFixture(t, file)
		name := strings.TrimPrefix(want, "tensor ")[:1]
		if _, err := c.Read(name); err == nil || !strings.Contains(err.Error(), file) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", file, err, want)
		}
	}
	c := openFixture(t, "other_dtypes.pt")
	if got := readFloats(t, c, "ok"); !reflect.DeepEqual(got, []float64{1}) {
		t.Errorf("the tensor beside one of uint16 is %v, want [1]", got)
	}
	for _, s := range c.Tensors() {
		if s.Name == "u" && (s.DType.Known() || s.DType.String() != "uint16") {
			t.Errorf("u has the dtype %v, want uint16", s.DType)
		}
	}
}

func TestSaveAndLoadPyTorchFiles(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{filepath.Join(dir, "net.pt"), filepath.Join(dir, "net.PTH")} {
		for _, meta := range []map[string]string{{}, {"classes": "cat\ndog \"é\"", "": "empty key"}} {
			net, other := fixtureNet(t), fixtureNet(t)
			for _, n := range nn.State(net) {
				if n.Tensor.DType() == torch.Float32 {
					n.Tensor.NoGrad().Normal_(0, 1)
				} else {
					n.Tensor.NoGrad().AddInt_(41)
				}
			}
			if err := nn.Save(path, net, meta); err != nil {
				t.Fatal(err)
			}
			got, err := nn.Load(path, other)
			if err != nil || !reflect.DeepEqual(got, meta) {
				t.Fatalf("metadata %v, %v, want %v, nil", got, err, meta)
			}
			want := nn.State(net)
			for i, n := range nn.State(other) {
				a, err := n.Tensor.Float64s()
				if err != nil {
					t.Fatal(err)
				}
				b, err := want[i].Tensor.Float64s()
				if err != nil || !reflect.DeepEqual(a, b) {
					t.Errorf("%s: %v, want %v, %v", n.Name, a, b, err)
				}
			}
			first, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := nn.Save(path, other, meta); err != nil {
				t.Fatal(err)
			}
			if second, err := os.ReadFile(path); err != nil || !bytes.Equal(first, second) {
				t.Errorf("the same state gave another file, %v", err)
			}
		}
	}
}

func TestAllTypesRoundTripInPyTorchFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.pt")
	var named []torch.Named
	for _, d := range []torch.DType{torch.Bool, torch.Uint8, torch.Int8, torch.Int16, torch.Int32,
		torch.Int64, torch.Float16, torch.BFloat16, torch.Float32, torch.Float64,
		torch.Complex64, torch.Complex128} {
		for name, shape := range map[string][]int64{"/scalar": {}, "/odd": {3, 1}, "/empty": {0, 2}} {
			x, err := torch.Ones(cuda.CPU, d, shape...)
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			named = append(named, torch.Named{Name: d.String() + name, Tensor: x})
		}
	}
	if err := checkpoint.Save(path, named, nil); err != nil {
		t.Fatal(err)
	}
	c := openCheckpoint(t, path)
	for _, n := range named {
		x, err := c.Read(n.Name)
		if err != nil {
			t.Fatal(err)
		}
		defer x.Close()
		a, _ := x.Complex128s()
		b, err := n.Tensor.Complex128s()
		if err != nil || x.DType() != n.Tensor.DType() || !reflect.DeepEqual(x.Shape(), n.Tensor.Shape()) ||
			!reflect.DeepEqual(a, b) {
			t.Errorf("%s: %v became %v, %v", n.Name, n.Tensor, x, err)
		}
	}
}

func TestSavePyTorch(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x.pt")
	weight, err := torch.Ones(cuda.CPU, torch.Float32, 1000)
	if err != nil {
		t.Fatal(err)
	}
	defer weight.Close()
	state := []torch.Named{{Name: "b", Tensor: weight}, {Name: "a", Tensor: weight}}
	value := map[string]any{
		"state_dict": state, "epoch": 3, "rates": []any{0.5, nil, true, "x", []byte("y")},
		"optimizer": map[any]any{"step": weight, int64(-1): int64(2), int64(10): map[string]any{}},
	}
	if err := checkpoint.SavePyTorch(path, value); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Size() > 6000 {
		t.Errorf("%d bytes for one tensor of 4000, %v, want at most 6000, nil", info.Size(), err)
	}
	c := openCheckpoint(t, path)
	if specs := c.Tensors(); len(specs) != 2 || specs[0].Name != "b" || specs[1].Name != "a" {
		t.Errorf("tensors %v, want b, a", specs)
	}
	all, err := c.Value()
	if err != nil {
		t.Fatal(err)
	}
	m := all.(map[any]any)
	if !reflect.DeepEqual(m["epoch"], int64(3)) ||
		!reflect.DeepEqual(m["rates"], []any{0.5, nil, true, "x", []byte("y")}) {
		t.Errorf("values %v", m)
	}
	// The result of Value can be written again.
	again := filepath.Join(dir, "again.pt")
	m["epoch"] = int64(4)
	if err := checkpoint.SavePyTorch(again, all); err != nil {
		t.Fatal(err)
	}
	if v, err := openCheckpoint(t, again).Value("optimizer", "step"); err != nil ||
		v.(*checkpoint.StoredTensor).Spec().Shape[0] != 1000 {
		t.Errorf("got %v, %v, want 1000 rows, nil", v, err)
	}
}

func TestFailedSavePyTorchLeavesTheOldFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "net.pt")
	net := fixtureNet(t)
	if err := nn.Save(path, net, nil); err != nil {
		t.Fatal(err)
	}
	old, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	closed, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	loop := []any{nil}
	loop[0] = loop
	one := nn.Parameters(net)[0]
	for name, value := range map[string]any{
		"closed": []torch.Named{{Name: "a", Tensor: closed}},
		"failed": torch.Fail("x", errors.ErrUnsupported), "nil": []torch.Named{{Name: "a"}},
		"twice":     []torch.Named{{Name: "a", Tensor: one}, {Name: "a", Tensor: one}},
		"not UTF-8": []torch.Named{{Name: "\xff", Tensor: one}},
		"float32":   []any{float32(1)}, "key": map[any]any{1.5: 1}, "loop": loop,
		"nil tensor": (*checkpoint.StoredTensor)(nil), "type": []any{struct{}{}},
	} {
		if err := checkpoint.SavePyTorch(path, value); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, want an error with %q", name, err, path)
		}
	}
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(old, now) {
		t.Errorf("the old file changed, %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("files left: %v, %v, want length 1, nil", left, err)
	}
	if err := nn.Save(filepath.Join(dir, "none", "x.pt"), net, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing folder: %v, want fs.ErrNotExist", err)
	}
	// Neither kind of checkpoint replaces the other, nor another zip archive.
	tensors := filepath.Join(dir, "net.safetensors")
	if err := nn.Save(tensors, net, nil); err != nil {
		t.Fatal(err)
	}
	for _, file := range []struct{ from, to string }{{tensors, "other.pt"}, {path, "other.safetensors"}} {
		to := filepath.Join(dir, file.to)
		if err := os.Rename(file.from, to); err != nil {
			t.Fatal(err)
		}
		if err := nn.Save(to, net, nil); err == nil || !strings.Contains(err.Error(), "a file of another kind") {
			t.Errorf("saving over %s: %v, want an error with \"a file of another kind\"", to, err)
		}
	}
}

// TestPyTorchLoadsCheckpoints lets PyTorch load a saved network and a saved checkpoint.
func TestPyTorchLoadsCheckpoints(t *testing.T) {
	program := os.Getenv("TORCHSTREAM_PYTHON")
	if program == "" {
		program = "python3"
	}
	if out, err := exec.Command(program, "-c", "import torch").CombinedOutput(); err != nil {
		t.Skipf("%s cannot import torch: set TORCHSTREAM_PYTHON to a Python that can: %v %.200s", program, err, out)
	}
	dir := t.TempDir()
	net := fixtureNet(t)
	nn.Parameters(net)[0].NoGrad().Fill_(0.5)
	if err := nn.Save(filepath.Join(dir, "net.pt"), net, nil); err != nil {
		t.Fatal(err)
	}
	if err := checkpoint.SavePyTorch(filepath.Join(dir, "checkpoint.pt"),
		map[string]any{"state_dict": nn.State(net), "epoch": 3, "classes": []any{"cat", "é"}}); err != nil {
		t.Fatal(err)
	}
	const script = `
import sys, torch
from torch import nn
net = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2))
state = torch.load(sys.argv[1] + "/net.pt", weights_only=True)
print(type(state).__name__, net.load_state_dict(state), net[0].weight.sum().item())
c = torch.load(sys.argv[1] + "/checkpoint.pt", weights_only=True)
net.load_state_dict(c["state_dict"])
print(c["epoch"], c["classes"] == ["cat", "\u00e9"], list(c))
`
	out, err := exec.Command(program, "-c", script, dir).Output()
	want := "OrderedDict <All keys matched successfully> 9.0\n3 True ['classes', 'epoch', 'state_dict']\n"
	if err != nil || string(out) != want {
		t.Errorf("got %v\n%s\nwant\n%s", err, out, want)
	}
}

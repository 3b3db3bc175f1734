package ptfile_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint/internal/ptfile"
	"github.com/torchstream/torchstream/tensor"
)

func open(data []byte) (*ptfile.File, error) {
	return ptfile.Open(bytes.NewReader(data), int64(len(data)))
}

func fixture(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func dict(t *testing.T, v any) *ptfile.Dict {
	t.Helper()
	d, ok := v.(*ptfile.Dict)
	if !ok {
		t.Fatalf("%T is no dict", v)
	}
	return d
}

// description is a value in the format of expected.json, which make_fixtures.py documents.
type description struct {
	numbers map[*ptfile.Storage]int
}

func (d *description) items(t *testing.T, items []any) []any {
	out := make([]any, len(items))
	for i, v := range items {
		out[i] = d.of(t, v)
	}
	return out
}

func (d *description) of(t *testing.T, v any) any {
	t.Helper()
	switch v := v.(type) {
	case nil, bool, string:
		return v
	case float64:
		if math.IsNaN(v) { // NaN equals nothing
			return fmt.Sprintf("NaN %x", math.Float64bits(v))
		}
		return v
	case int64:
		return map[string]any{"int": strconv.FormatInt(v, 10)}
	case []byte:
		return map[string]any{"bytes": hex.EncodeToString(v)}
	case ptfile.Name:
		return map[string]any{"name": string(v)}
	case *ptfile.List:
		return map[string]any{"list": d.items(t, v.Items)}
	case *ptfile.Tuple:
		return map[string]any{"tuple": d.items(t, v.Items)}
	case *ptfile.Dict:
		pairs := []any{}
		for k, x := range v.All() {
			pairs = append(pairs, []any{d.of(t, k), d.of(t, x)})
		}
		return map[string]any{"dict": pairs, "ordered": v.Ordered}
	case *ptfile.Tensor:
		return d.tensor(t, v)
	}
	t.Fatalf("a value of type %T", v)
	return nil
}

func (d *description) tensor(t *testing.T, x *ptfile.Tensor) any {
	t.Helper()
	number, ok := d.numbers[x.Storage]
	if !ok {
		number = len(d.numbers)
		d.numbers[x.Storage] = number
	}
	b := make([]byte, x.Bytes())
	if err := x.ReadBytes(b); err != nil {
		t.Fatal(err)
	}
	floats := func(n []int64) []any {
		out := make([]any, len(n))
		for i, v := range n {
			out[i] = float64(v)
		}
		return out
	}
	return map[string]any{
		"tensor": x.DType().String(), "shape": floats(x.Shape), "stride": floats(x.Strides),
		"offset": float64(x.Offset), "grad": x.RequiresGrad,
		"parameter": x.Parameter, "storage": float64(number), "bytes": hex.EncodeToString(b),
	}
}

func expected(t *testing.T) map[string]any {
	t.Helper()
	var all map[string]any
	if err := json.Unmarshal(fixture(t, "expected.json"), &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// compare reports the first difference between two descriptions.
func compare(t *testing.T, path string, got, want any) {
	t.Helper()
	if g, ok := got.(map[string]any); ok {
		if w, ok := want.(map[string]any); ok && len(g) == len(w) {
			for k := range w {
				compare(t, path+"/"+k, g[k], w[k])
			}
			return
		}
	}
	if g, ok := got.([]any); ok {
		if w, ok := want.([]any); ok && len(g) == len(w) {
			for i := range w {
				compare(t, fmt.Sprint(path, "/", i), g[i], w[i])
			}
			return
		}
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s is %v, want %v", path, got, want)
	}
}

func TestReadsWhatPyTorchWrites(t *testing.T) {
	for name, want := range expected(t) {
		t.Run(name, func(t *testing.T) {
			f, err := open(fixture(t, name))
			if err != nil {
				t.Fatal(err)
			}
			d := description{map[*ptfile.Storage]int{}}
			compare(t, "", d.of(t, f.Root), want)
		})
	}
}

func TestRefusesWhatIsNoTensorOrValue(t *testing.T) {
	for name, text := range map[string]string{
		"legacy.pt": "PyTorch before 1.6",
		"module.pt": "refused: all of the file is one object, torch.nn.modules.linear.Linear: in Python, " +
			"save model.state_dict()",
		"script.pt": "TorchScript",
	} {
		if _, err := open(fixture(t, name)); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v does not say %q", name, err, text)
		}
	}
	for name, want := range map[string]string{
		"system.pt":        "evil: posix.system",
		"conjugate.pt":     "c: a tensor with the bit conj set",
		"sparse.pt":        "s: torch._utils._rebuild_sparse_tensor",
		"quantized.pt":     "q: torch._utils._rebuild_qtensor",
		"large_integer.pt": "seed: the integer 9223372036854775808",
	} {
		f, err := open(fixture(t, name))
		if err != nil {
			t.Fatal(err)
		}
		if got := firstOpaque(f.Root, ""); got != want {
			t.Errorf("%s has %q, want %q", name, got, want)
		}
	}
	f, err := open(fixture(t, "other_dtypes.pt"))
	if err != nil {
		t.Fatal(err)
	}
	for key, dtype := range map[string]string{"z": "complex64", "u": "uint16", "f": "float8_e4m3fn", "ok": ""} {
		v, _ := dict(t, f.Root).Get(key)
		x := v.(*ptfile.Tensor)
		err := x.ReadBytes(make([]byte, x.Bytes()))
		if x.DType().Known() != (err == nil) || err != nil &&
			!strings.Contains(err.Error(), "dtype "+dtype+" is not handled") {
			t.Errorf("%s: %v", key, err)
		}
	}
}

func TestRefusesToReadRepeatedElements(t *testing.T) {
	f, err := open(fixture(t, "views.pt"))
	if err != nil {
		t.Fatal(err)
	}
	small := ptfile.Tensor{}
	for _, v := range dict(t, f.Root).All() {
		small = *v.(*ptfile.Tensor)
		break
	}
	for _, shape := range [][]int64{{5, 6}, {1 << 40}, {25}} {
		x := small
		x.Shape, x.Strides = shape, make([]int64, len(shape))
		if err := x.Check(); err == nil || !strings.Contains(err.Error(), "repeats elements") {
			t.Errorf("%v: %v, want an error with \"repeats elements\"", shape, err)
		}
	}
}

// TestWrittenFileHoldsTheSame copies each of PyTorch's files with Write and reads the copy.
func TestWrittenFileHoldsTheSame(t *testing.T) {
	for name, want := range expected(t) {
		if name == "big_endian.pt" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			f, err := open(fixture(t, name))
			if err != nil {
				t.Fatal(err)
			}
			dropNames(f.Root, want)
			var out bytes.Buffer
			if err := ptfile.Write(&out, f.Root, ""); err != nil {
				t.Fatal(err)
			}
			again, err := open(out.Bytes())
			if err != nil {
				t.Fatal(err)
			}
			d := description{map[*ptfile.Storage]int{}}
			compare(t, "", d.of(t, again.Root), want)
		})
	}
}

// dropNames replaces dtypes and devices at the top level of a dict, because Write does not accept
// them.
func dropNames(root, want any) {
	d, ok := root.(*ptfile.Dict)
	if !ok {
		return
	}
	i := 0
	for k, v := range d.All() {
		if _, ok := v.(ptfile.Name); ok {
			d.Set(k, nil)
			want.(map[string]any)["dict"].([]any)[i].([]any)[1] = nil
		}
		i++
	}
}

func TestWrittenMembersAreAligned(t *testing.T) {
	pattern := bytes.Repeat([]byte{0xab, 0xcd}, 10)
	x := filled(t, tensor.Uint8, pattern, 20)
	y := filled(t, tensor.Int16, pattern, 2, 5)
	var out bytes.Buffer
	if err := ptfile.Write(&out, &ptfile.List{Items: []any{x, y, x}}, ""); err != nil {
		t.Fatal(err)
	}
	found := 0
	for at := 0; ; found++ {
		n := bytes.Index(out.Bytes()[at:], pattern)
		if n < 0 {
			break
		}
		if at += n; at%64 != 0 {
			t.Errorf("a storage starts at byte %d", at)
		}
		at += len(pattern)
	}
	if found != 2 {
		t.Errorf("%d storages, want 2: the first tensor's is shared", found)
	}
}

func filled(t *testing.T, dtype tensor.DType, data []byte, shape ...int64) *ptfile.Tensor {
	t.Helper()
	x, err := ptfile.NewTensor(dtype, shape, func(b []byte) error { copy(b, data); return nil })
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// Tensors of a dtype without a storage class are read as they were written.
func TestWriteUntypedStorages(t *testing.T) {
	for _, dtype := range []tensor.DType{tensor.Float8E5M2, tensor.Float8E4M3FN, tensor.DType(27)} {
		size := int(map[tensor.DType]int64{27: 2}[dtype])
		data := []byte{1, 2, 3, 4, 5, 6, 7, 8}
		rows := int64(len(data) / max(size, 1) / 2)
		var written bytes.Buffer
		if err := ptfile.Write(&written, &ptfile.List{Items: []any{filled(t, dtype, data, rows, 2)}}, ""); err != nil {
			t.Fatal(err)
		}
		f, err := ptfile.Open(bytes.NewReader(written.Bytes()), int64(written.Len()))
		if err != nil {
			t.Fatal(err)
		}
		x := f.Root.(*ptfile.List).Items[0].(*ptfile.Tensor)
		if x.DType() != dtype || !slices.Equal(x.Shape, []int64{rows, 2}) {
			t.Errorf("%v: %v%v", dtype, x.DType(), x.Shape)
		}
		got := make([]byte, len(data))
		if err := x.ReadBytes(got); dtype.Known() && (err != nil || !bytes.Equal(got, data)) {
			t.Errorf("%v: %v, %v", dtype, got, err)
		}
	}
}

// Open can read every file that Write writes, whatever its size. Otherwise Write refuses it.
func TestWriteKeepsTheLimitsOfOpen(t *testing.T) {
	many := &ptfile.List{Items: make([]any, 1<<20+1)}
	var written bytes.Buffer
	if err := ptfile.Write(&written, many, ""); err != nil {
		t.Fatal(err)
	}
	f, err := ptfile.Open(bytes.NewReader(written.Bytes()), int64(written.Len()))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(f.Root.(*ptfile.List).Items); n != len(many.Items) {
		t.Errorf("%d items of %d", n, len(many.Items))
	}
	long := strings.Repeat("x", 33<<20)
	written.Reset()
	if err := ptfile.Write(&written, &ptfile.List{Items: []any{long, long}}, ""); err == nil || written.Len() > 0 {
		t.Errorf("got %v, and %d bytes, want an error, 0", err, written.Len())
	}
}

func TestWriteRefuses(t *testing.T) {
	loop := &ptfile.List{}
	loop.Items = []any{loop}
	failing, err := ptfile.NewTensor(tensor.Float32, []int64{2}, func([]byte) error { return os.ErrClosed })
	if err != nil {
		t.Fatal(err)
	}
	big, err := open(fixture(t, "big_endian.pt"))
	if err != nil {
		t.Fatal(err)
	}
	for name, root := range map[string]any{
		"contains itself": loop, "float32": float32(1), "not UTF-8": "\xff", "file already closed": failing,
		"big-endian": big.Root, "string": map[string]any{},
	} {
		if err := ptfile.Write(new(bytes.Buffer), root, ""); err == nil ||
			!strings.Contains(err.Error(), name) && name != "string" {
			t.Errorf("%s: %v", name, err)
		}
	}
	floats, err := ptfile.NewTensor(tensor.Float32, []int64{1}, func([]byte) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	integers, err := ptfile.NewTensor(tensor.Int32, []int64{1}, nil)
	if err != nil {
		t.Fatal(err)
	}
	integers.Storage = floats.Storage // as possible in a file with _rebuild_tensor_v3
	err = ptfile.Write(new(bytes.Buffer), &ptfile.List{Items: []any{floats, integers}}, "")
	if err == nil || !strings.Contains(err.Error(), "float32 and int32 that share memory") {
		t.Errorf("two dtypes of one storage: %v,"+
			" want an error with \"float32 and int32 that share memory\"", err)
	}
	for _, shape := range [][]int64{{-1}, {math.MaxInt64, 2}, {math.MaxInt64}, make([]int64, 65), {0, -1}} {
		if _, err := ptfile.NewTensor(tensor.Float32, shape, nil); err == nil {
			t.Errorf("NewTensor with the shape %v: got no error, want one", shape)
		}
	}
	if _, err := ptfile.NewTensor(tensor.DType(9), nil, nil); err != nil &&
		!strings.Contains(err.Error(), "cannot be written") {
		t.Error(err)
	}
}

func TestDict(t *testing.T) {
	var d ptfile.Dict
	if v, ok := d.Get("a"); ok || d.Len() != 0 {
		t.Errorf("an empty Dict: Get = %v, %v, Len = %d, want nil, false, 0", v, ok, d.Len())
	}
	for _, key := range []any{"b", int64(1), "a", nil, true, 1.5} {
		if !d.Set(key, "first") || !d.Set(key, key) {
			t.Errorf("%v is no key", key)
		}
		if v, ok := d.Get(key); !ok || v != key {
			t.Errorf("%v has the value %v", key, v)
		}
	}
	for _, key := range []any{math.NaN(), []byte("x"), &ptfile.List{}, 1} {
		if _, ok := d.Get(key); ok || d.Set(key, 1) {
			t.Errorf("%v is a key", key)
		}
	}
	var keys []any
	for k := range d.All() {
		keys = append(keys, k)
	}
	if !reflect.DeepEqual(keys, []any{"b", int64(1), "a", nil, true, 1.5}) || d.Len() != 6 {
		t.Errorf("keys %v, want [b 1 a <nil> true 1.5]", keys)
	}
	for range d.All() {
		break
	}
}

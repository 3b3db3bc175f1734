package ptfile_test

import (
	"encoding/binary"
	"errors"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint/internal/ptfile"
)

// opaqueValues maps the names of files in testdata/opaque to their first Opaque. make_opaque.py
// describes the files. "" means no Opaque.
var opaqueValues = map[string]string{
	"seed":                "the integer 9223372036854775809",
	"negative_seed":       "the integer -9223372036854775809",
	"long_integer":        "an integer of 501 bytes",
	"generator":           "state.state: the integer 207833532711051698738587646355624148094",
	"namespace":           "argparse.Namespace",
	"nested":              "args: argparse.Namespace",
	"numpy_scalar":        "numpy._core.multiarray.scalar",
	"numpy_array":         "numpy._core.multiarray._reconstruct",
	"set":                 "builtins.set",
	"set_protocol5":       "builtins.set",
	"frozenset":           "builtins.frozenset",
	"frozenset_protocol5": "builtins.frozenset",
	"bytearray":           "builtins.bytearray",
	"bytearray_protocol5": "builtins.bytearray",
	"complex":             "builtins.complex",
	"tuple_key":           "a tuple",
	"not_a_number_key":    "a float",
	"deque":               "collections.deque",
	"defaultdict":         "collections.defaultdict",
	"path":                "pathlib.PurePosixPath",
	"enum":                "__main__.Phase",
	"class":               "collections.OrderedDict",
	"function":            "torch.nn.functional.relu",
	"object":              "__main__.Config",
	"slots_protocol5":     "__main__.Slots",
	"recursive_protocol5": "__main__.Slots",
	"surrogate":           "a string that is not UTF-8",
	"sparse":              "torch._utils._rebuild_sparse_tensor",
	"compressed_rows":     "torch._utils._rebuild_sparse_tensor",
	"quantized":           "torch._utils._rebuild_qtensor",
	"meta":                "torch._utils._rebuild_meta_tensor_no_storage",
	"conjugate":           "a tensor with the bit conj set",
	"float4":              "torch.float4_e2m1fn_x2",
	"subclass":            "__main__.Weight",
	"module":              "torch.nn.modules.linear.Linear",
	"buffer":              "",
	"attribute":           "",
}

// firstOpaque returns the path and name of a value's first Opaque.
func firstOpaque(v any, path string) string {
	switch v := v.(type) {
	case *ptfile.Opaque:
		return path + v.What
	case *ptfile.Dict:
		for k, x := range v.All() {
			if o, ok := k.(*ptfile.Opaque); ok {
				return path + o.What
			}
			name, _ := k.(string)
			if found := firstOpaque(x, path+name+": "); found != "" {
				return strings.Replace(found, ": state: ", ".state: ", 1)
			}
		}
	}
	return ""
}

// A value that the reader does not build does not block access to the file's other values.
func TestOpaqueValueLeavesTheOthers(t *testing.T) {
	files, err := filepath.Glob("testdata/opaque/*.pt")
	if err != nil || len(files) != len(opaqueValues) {
		t.Fatalf("%d files, want %d, %v", len(files), len(opaqueValues), err)
	}
	for name, want := range opaqueValues {
		t.Run(name, func(t *testing.T) {
			f, err := open(fixture(t, filepath.Join("opaque", name+".pt")))
			if err != nil {
				t.Fatal(err)
			}
			root := dict(t, f.Root)
			state, _ := root.Get("state_dict")
			for key, numbers := range map[string][]float32{"weight": {0, 1, 2, 3}, "bias": {4, 5}} {
				x, _ := dict(t, state).Get(key)
				stored, ok := x.(*ptfile.Tensor)
				if !ok {
					t.Fatalf("%s is %T", key, x)
				}
				b := make([]byte, stored.Bytes())
				if err := stored.ReadBytes(b); err != nil {
					t.Fatal(err)
				}
				for i, number := range numbers {
					if got := math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])); got != number {
						t.Errorf("%s[%d] is %v, want %v", key, i, got, number)
					}
				}
			}
			value, ok := root.Get("value")
			if got := firstOpaque(value, ""); got != want || !ok {
				t.Errorf("the value has %q, want %q", got, want)
			}
		})
	}
}

// A tensor with attributes, such as an nn.Buffer, is read as a tensor.
func TestTensorsWithAttributesAreRead(t *testing.T) {
	for _, name := range []string{"buffer", "attribute"} {
		f, err := open(fixture(t, filepath.Join("opaque", name+".pt")))
		if err != nil {
			t.Fatal(err)
		}
		value, _ := dict(t, f.Root).Get("value")
		x, ok := value.(*ptfile.Tensor)
		if !ok {
			t.Fatalf("%s is %T", name, value)
		}
		b := make([]byte, 8)
		if err := x.ReadBytes(b); err != nil || binary.LittleEndian.Uint64(b) != 0x3f800000_3f800000 {
			t.Errorf("%s is %x, want two ones: %v", name, b, err)
		}
	}
}

// An Opaque's error names a replacement to save.
func TestOpaqueSaysWhatToSaveInstead(t *testing.T) {
	for name, want := range map[string]string{
		"numpy_scalar": "numpy._core.multiarray.scalar is not read: in Python, save x.item()",
		"namespace":    "argparse.Namespace is not read: in Python, save vars(args)",
		"seed": "the integer 9223372036854775809 is not read: it is over 64 bits: in Python, " +
			"save it as text instead",
		"conjugate": "a tensor with the bit conj set is not read: in Python, save " +
			"tensor.resolve_conj().resolve_neg() instead",
		"sparse":    "torch._utils._rebuild_sparse_tensor is not read: in Python, save tensor.to_dense()",
		"quantized": "torch._utils._rebuild_qtensor is not read: in Python, save tensor.dequantize()",
		"module":    "torch.nn.modules.linear.Linear is not read: in Python, save model.state_dict()",
		"set":       "builtins.set is not read: in Python, save tensors, numbers, text, lists and dicts instead",
	} {
		f, err := open(fixture(t, filepath.Join("opaque", name+".pt")))
		if err != nil {
			t.Fatal(err)
		}
		value, _ := dict(t, f.Root).Get("value")
		var o *ptfile.Opaque
		if err, _ := value.(error); !errors.As(err, &o) || !strings.HasPrefix(o.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
}

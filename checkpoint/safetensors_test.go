//go:build linux

package checkpoint_test

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
)

// safetensorsCase is a file and the safetensors package's result for it: see make_safetensors.py.
type safetensorsCase struct {
	Name    string
	File    []byte
	Opens   bool
	Tensors map[string]string
}

func safetensorsCases(t testing.TB) []safetensorsCase {
	t.Helper()
	text, err := os.ReadFile("testdata/safetensors.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []safetensorsCase
	if err := json.Unmarshal(text, &cases); err != nil || len(cases) < 40 {
		t.Fatalf("%d files, %v, want at least 40, nil", len(cases), err)
	}
	return cases
}

func TestOpensWhatSafetensorsOpens(t *testing.T) {
	for _, c := range safetensorsCases(t) {
		t.Run(c.Name, func(t *testing.T) {
			file, err := checkpoint.Open(write(t, c.File))
			if err == nil {
				file.Close()
			}
			if (err == nil) != c.Opens {
				t.Errorf("%v, want that it opens: %v", err, c.Opens)
			}
		})
	}
}

// unreadTypes maps files to dtypes. Each file has a tensor "a" of a dtype that package torch lacks.
var unreadTypes = map[string]string{
	"uint16": "U16", "uint32": "U32", "uint64": "U64", "float8_e8m0fnu": "F8_E8M0",
	"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
	"float4_e2m1fn_x2": "F4", "F4": "F4", "F6_E2M3": "F6_E2M3", "F6_E3M2": "F6_E3M2",
}

// If a dtype is not supported, only the tensors of that dtype cannot be read.
func TestUnknownDTypeRefusesItsTensorAlone(t *testing.T) {
	found := 0
	for _, c := range safetensorsCases(t) {
		dtype, ok := unreadTypes[c.Name]
		if !ok {
			continue
		}
		found++
		t.Run(c.Name, func(t *testing.T) {
			file := openCheckpoint(t, write(t, c.File))
			names := ""
			for _, s := range file.Tensors() {
				names += s.Name
				if s.DType.Known() != (s.Name == "z") {
					t.Errorf("tensor %s has the dtype %v", s.Name, s.DType)
				}
			}
			if names != "az" && names != "za" {
				t.Errorf("the file has %q, want a and z", names)
			}
			want := "tensor a: dtype " + dtype + " is not handled"
			stored, err := file.Tensor("a")
			if err != nil {
				t.Fatal(err)
			}
			_, read := file.Read("a")
			_, mapped := file.Map("a")
			_, part := stored.ReadPart(nil, 0, 1)
			for _, err := range []error{read, mapped, part, checkpoint.SavePyTorch(t.TempDir()+"/x.pt", stored)} {
				if err == nil || !strings.Contains(err.Error(), strings.TrimPrefix(want, "tensor a: ")) {
					t.Errorf("%v, want %q", err, want)
				}
			}
			if read == nil || !strings.Contains(read.Error(), want) {
				t.Errorf("%v, want %q", read, want)
			}
			z, err := file.Read("z")
			if err != nil {
				t.Fatal(err)
			}
			z.Close()
		})
	}
	if found != len(unreadTypes) {
		t.Errorf("%d of %d files", found, len(unreadTypes))
	}
}

// An error names the format of files that other libraries wrote, and says how to make a checkpoint
// from them.
func TestForeignFilesAreNamed(t *testing.T) {
	const pickle = "a pickle that torch.save did not write: save its tensors with torch.save, or as safetensors"
	for file, want := range map[string]string{
		"named.onnx":   "a model of ONNX: save the state_dict() of the PyTorch model",
		"unnamed.onnx": "a model of ONNX: save the state_dict() of the PyTorch model",
		"program.pt2": "a program of torch.export (.pt2), which holds code: in Python, " +
			"torch.save(torch.export.load(path).state_dict",
		"arrays.npz":    "arrays of NumPy (.npz): in Python, safetensors.numpy.save_file(dict(numpy.load(path))",
		"array.npy":     "a NumPy file (.npy): save its arrays as safetensors",
		"weights.h5":    "an HDF5 file (.h5, of Keras and others): save its tensors as safetensors",
		"model.gguf":    "a GGUF file, of llama.cpp: take the safetensors of the same model",
		"protocol0.pkl": pickle, "protocol1.pkl": pickle, "protocol2.pkl": pickle, "protocol3.pkl": pickle,
		"protocol4.pkl": pickle, "protocol5.pkl": pickle,
		"../../" + fixtures + "/script.pt": "a TorchScript archive, which holds code: in Python, " +
			"torch.save(torch.jit.load(path).state_dict()",
	} {
		t.Run(filepath.Base(file), func(t *testing.T) {
			c, err := checkpoint.Open(filepath.Join("testdata/foreign", file))
			if err == nil {
				c.Close()
				t.Fatalf("Open: got no error, want one with %q", want)
			}
			if !strings.Contains(err.Error(), filepath.Base(file)) || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %q", err, want)
			}
		})
	}
}

// A dtype of a later version of the format, and a tensor with more dimensions than LibTorch
// supports, are refused like a known but unsupported dtype.
func TestTensorThatCannotBeReadLeavesTheOthers(t *testing.T) {
	for want, a := range map[string]string{
		"tensor a: dtype X9 is not handled": `"dtype":"X9","shape":[3]`,
		"tensor a: 1000 dimensions are more than LibTorch's 64": `"dtype":"U8","shape":[2` +
			strings.Repeat(",1", 999) + `]`,
		"tensor a: dtype " + strings.Repeat("x", 100) + "... is not": `"dtype":"` + strings.Repeat("x",
			10_000) + `","shape":[3]`,
	} {
		file := openCheckpoint(t,
			write(t, safetensors(`{"a":{`+a+
				`,"data_offsets":[0,2]},"z":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}`, 3)))
		if _, err := file.Read("a"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		z, err := file.Read("z")
		if err != nil {
			t.Fatal(err)
		}
		z.Close()
	}
}

// Files of the safetensors package are read bit for bit where package torch supports the dtype.
func TestReadsWhatSafetensorsWrote(t *testing.T) {
	read := 0
	for _, c := range safetensorsCases(t) {
		for name, want := range c.Tensors {
			if _, unread := unreadTypes[c.Name]; unread && name == "a" {
				continue
			}
			x, err := openCheckpoint(t, write(t, c.File)).Read(name)
			if err != nil {
				t.Fatal(err)
			}
			b, err := x.Bytes()
			if got := hex.EncodeToString(b); err != nil || got != want {
				t.Errorf("%s: %s is %s, want %s, %v", c.Name, name, got, want, err)
			}
			x.Close()
			read++
		}
	}
	if read != 13 {
		t.Errorf("%d tensors read, want 13", read)
	}
}

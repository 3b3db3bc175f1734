package nn_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// loadedState is the result of PyTorch's load_state_dict for a file of testdata/loading.
type loadedState struct {
	DType string
	State map[string][]float64
}

func loading(name string) string { return filepath.Join("testdata", "loading", name) }

func expectedLoads(t *testing.T) map[string]loadedState {
	t.Helper()
	text, err := os.ReadFile(loading("expected.json"))
	if err != nil {
		t.Fatal(err)
	}
	var all map[string]loadedState
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// loadingNet returns the network of testdata/loading with every number set to 9.
func loadingNet(t *testing.T) *nn.Sequential {
	t.Helper()
	net := nn.NewSequential(nn.NewLinear(3, 4, nn.LinearOptions{}),
		nn.NewBatchNorm1d(4, nn.BatchNorm1dOptions{}), nn.NewLinear(4, 2, nn.LinearOptions{}))
	t.Cleanup(func() { nn.Close(net) })
	fillState(t, net)
	return net
}

func fillState(t *testing.T, m nn.Module) {
	t.Helper()
	for _, n := range nn.State(m) {
		if err := n.Tensor.NoGrad().Fill_(9).Err(); err != nil {
			t.Fatal(err)
		}
	}
}

func stateNumbers(t *testing.T, m nn.Module) map[string][]float64 {
	t.Helper()
	all := map[string][]float64{}
	for _, n := range nn.State(m) {
		wide := n.Tensor.NoGrad().ToDType(torch.Float64)
		v, err := wide.Float64s()
		wide.Close()
		if err != nil {
			t.Fatal(err)
		}
		all[n.Name] = v
	}
	return all
}

func checkState(t *testing.T, name string, m nn.Module, want map[string][]float64) {
	t.Helper()
	if len(want) == 0 {
		t.Fatalf("%s: expected.json has no such state", name)
	}
	got := stateNumbers(t, m)
	for key, values := range want {
		if !reflect.DeepEqual(got[key], values) {
			t.Errorf("%s: %s is %v, and PyTorch has %v", name, key, got[key], values)
		}
	}
}

var dtypesByName = map[string]torch.DType{"float16": torch.Float16, "bfloat16": torch.BFloat16,
	"float32": torch.Float32, "float64": torch.Float64}

func TestLoadConvertsDTypesAsPyTorch(t *testing.T) {
	cases := 0
	for name, want := range expectedLoads(t) {
		file, _, _ := strings.Cut(name, " into ")
		if name == "network" || strings.HasPrefix(name, "tied") {
			continue
		}
		cases++
		for _, partial := range []bool{false, true} {
			net := loadingNet(t)
			if err := nn.ToDType(net, dtypesByName[want.DType]); err != nil {
				t.Fatal(err)
			}
			r, err := nn.LoadWith(loading(file), net, nn.LoadOptions{Partial: partial})
			if err != nil {
				t.Errorf("%s, partial %v: %v, want no error", name, partial, err)
				continue
			}
			checkState(t, name, net, want.State)
			converted := differentDTypes(t, loading(file), net)
			if r.Parameters != 6 || r.AllParameters != 6 || r.Elements != 43 || r.Share() != 1 ||
				len(r.Converted) != converted {
				t.Errorf("%s, partial %v: got %d of %d parameters, %d of %d numbers, %d converted; want "+
					"6 of 6, 43 of 43, %d converted",
					name, partial, r.Parameters, r.AllParameters, r.Elements, r.AllElements,
					len(r.Converted), converted)
			}
			if d := nn.Parameters(net)[0].DType().String(); d != want.DType {
				t.Errorf("%s: the parameters have become %s, want %v", name, d, want.DType)
			}
		}
	}
	if cases != 13 {
		t.Errorf("expected.json has %d cases of dtypes, want 13", cases)
	}
}

// differentDTypes counts the tensors that have another dtype in the file than in the module.
func differentDTypes(t *testing.T, path string, m nn.Module) (n int) {
	t.Helper()
	own := map[string]torch.DType{}
	for _, s := range nn.State(m) {
		own[s.Name] = s.Tensor.DType()
	}
	f, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, s := range f.Tensors() {
		if own[s.Name] != s.DType {
			n++
		}
	}
	return n
}

func TestReportCountsConvertedTensors(t *testing.T) {
	r, err := nn.LoadWith(loading("all_half.safetensors"), loadingNet(t), nn.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := "9 tensors loaded: 6 of 6 parameters, 100 % of the numbers\ntensors converted: 8 from " +
		"float16 to float32, 1 from float16 to int64"
	if r.String() != want {
		t.Errorf("got %q, want %q", r, want)
	}
}

// A batch count that float16 cannot represent is infinite in the file. PyTorch turns it into -2^63;
// Load keeps the module's count.
func TestLoadKeepsACountThatTheFileLost(t *testing.T) {
	net := loadingNet(t)
	r, err := nn.LoadWith(loading("infinite_count.safetensors"), net, nn.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := expectedLoads(t)["all_half.safetensors"].State
	want["1.num_batches_tracked"] = []float64{9}
	checkState(t, "infinite_count", net, want)
	if len(r.Mismatched) != 1 || r.Mismatched[0].Name != "1.num_batches_tracked" ||
		slices.Contains(r.Loaded, "1.num_batches_tracked") || r.Elements != 42 {
		t.Errorf("got the report %+v, want the count among Mismatched and 42 numbers", r)
	}
}

func TestLoadRefusesIntegersInPlaceOfNumbers(t *testing.T) {
	net := loadingNet(t)
	_, err := nn.Load(loading("int8_weight.safetensors"), net)
	const want = "tensor 0.weight is int8[4 3] in the file and float32[4 3] in the module"
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
	for name, v := range stateNumbers(t, net) {
		if v[0] != 9 {
			t.Errorf("a refused file changed %s to %v, want 9", name, v)
		}
	}
	r, err := nn.LoadWith(loading("int8_weight.safetensors"), net, nn.LoadOptions{Partial: true})
	if err != nil || len(r.Mismatched) != 1 || r.Parameters != 5 {
		t.Errorf("partial: got %v, %v, want 5 parameters and a mismatch", r, err)
	}
}

// Numbers that an integer tensor cannot represent must not change silently.
func TestLoadRefusesNumbersThatIntegersLack(t *testing.T) {
	for _, c := range []struct {
		value float64
		fits  bool
	}{{3, true}, {-128, true}, {128, false}, {2.5, false}, {math.NaN(), false}, {math.Inf(1), false}} {
		of := func(dtype torch.DType, value float64) nn.Module {
			wide, err := torch.FromSlice([]float64{1, value})
			if err != nil {
				t.Fatal(err)
			}
			x := wide.ToDType(dtype).Keep()
			t.Cleanup(func() { x.Close() })
			return masked{parts: nn.Parts{Buffers: []torch.Named{{Name: "table", Tensor: x}}}}
		}
		path := filepath.Join(t.TempDir(), "table.safetensors")
		if err := nn.Save(path, of(torch.Float64, c.value), nil); err != nil {
			t.Fatal(err)
		}
		into := of(torch.Int8, 7)
		_, err := nn.Load(path, into)
		got := stateNumbers(t, into)["table"]
		if c.fits && (err != nil || got[1] != c.value) {
			t.Errorf("%v: got %v, %v", c.value, got, err)
		}
		if !c.fits && (err == nil || !strings.Contains(err.Error(), "tensor table") || got[1] != 7) {
			t.Errorf("%v: got %v, %v; want an error that names the tensor, and the module unchanged", c.value, got, err)
		}
	}
}

func TestPartialLoadOfNoParameterIsAnError(t *testing.T) {
	net := loadingNet(t)
	path := filepath.Join(t.TempDir(), "counts.safetensors")
	buffers := nn.NamedBuffers(net)
	if err := checkpoint.Save(path, buffers, nil); err != nil {
		t.Fatal(err)
	}
	_, err := nn.LoadWith(path, net, nn.LoadOptions{Partial: true})
	for _, want := range []string{"it has no parameter of the module", "tensor 0.weight is not in the file",
		`the file has 3 tensors: "1.num_batches_tracked", "1.running_mean", "1.running_var"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestSaveAndLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "net.safetensors")
	net, other := parityNet(t), parityNet(t)
	for _, n := range nn.State(net) {
		if n.Tensor.DType() == torch.Float32 {
			n.Tensor.NoGrad().Normal_(0, 1)
		} else {
			n.Tensor.NoGrad().AddInt_(41)
		}
	}
	meta := map[string]string{"classes": "cat\ndog \"é\"", "": "empty key"}
	for range 2 { // the second pass replaces an existing file
		if err := nn.Save(path, net, meta); err != nil {
			t.Fatal(err)
		}
	}
	got, err := nn.Load(path, other)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, meta) {
		t.Errorf("metadata %v, want %v", got, meta)
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
	if !nn.Parameters(other)[0].RequiresGrad() {
		t.Error("RequiresGrad() of a loaded parameter = false, want true")
	}
	// Saving the same state gives the same file, and its data is aligned.
	first, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := nn.Save(path, other, meta); err != nil {
		t.Fatal(err)
	}
	second, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(first, second) {
		t.Errorf("the same state gave another file, %v", err)
	}
	if n := binary.LittleEndian.Uint64(first); n%8 != 0 {
		t.Errorf("the header has %d bytes, want a multiple of 8", n)
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) != 1 {
		t.Errorf("files left: %v, %v, want length 1, nil", left, err)
	}
}

func TestLoadReportsEveryMismatch(t *testing.T) {
	path := filepath.Join(t.TempDir(), "net.safetensors")
	saved := nn.NewSequential(nn.NewLinear(3, 2, nn.LinearOptions{}), nn.NewReLU(),
		nn.NewLinear(2, 2, nn.LinearOptions{}))
	defer nn.Close(saved)
	if err := nn.Save(path, saved, nil); err != nil {
		t.Fatal(err)
	}
	net := nn.NewSequential(nn.NewLinear(4, 2, nn.LinearOptions{}), nn.NewLinear(2, 2, nn.LinearOptions{}))
	defer nn.Close(net)
	before, err := nn.Parameters(net)[1].Float32s()
	if err != nil {
		t.Fatal(err)
	}
	_, err = nn.Load(path, net)
	if err == nil {
		t.Fatal("Load of another network's file: got no error, want one")
	}
	for _, text := range []string{path,
		"tensor 0.weight is float32[2 3] in the file and float32[2 4] in the module",
		"tensor 1.weight is not in the file", "tensor 2.bias is not in the module"} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%v does not say %q", err, text)
		}
	}
	if after, err := nn.Parameters(net)[1].Float32s(); err != nil || !reflect.DeepEqual(before, after) {
		t.Errorf("a refused file changed the module: %v to %v, %v", before, after, err)
	}
}

// A file whose last tensor is damaged leaves the module unchanged.
func TestLoadChangesNothingIfATensorIsDamaged(t *testing.T) {
	weight, err := torch.Ones(cuda.CPU, torch.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer weight.Close()
	mask, err := torch.Zeros(cuda.CPU, torch.Bool, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer mask.Close()
	net := masked{nn.Func(nil), nn.Parts{Parameters: []torch.Named{{Name: "a", Tensor: weight}},
		Buffers: []torch.Named{{Name: "b", Tensor: mask}}}}
	const header = `{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"BOOL","shape":[3],"data_offsets":[4,7]}}`
	file := slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), []byte(header), make([]byte, 7))
	path := filepath.Join(t.TempDir(), "x.safetensors")
	load := func() error {
		if err := os.WriteFile(path, file, 0o644); err != nil {
			return err
		}
		_, err := nn.Load(path, net)
		return err
	}
	file[len(file)-1] = 2
	if err := load(); err == nil || !strings.Contains(err.Error(), "element 2 is the byte 2") {
		t.Errorf("got %v, want an error with \"element 2 is the byte 2\"", err)
	}
	if v, err := weight.Float64(); err != nil || v != 1 {
		t.Errorf("the first tensor became %v, %v, want 1, nil", v, err)
	}
	file[len(file)-1] = 1
	if err := load(); err != nil {
		t.Error(err)
	}
	if v, err := weight.Float64(); err != nil || v != 0 {
		t.Errorf("the first tensor is %v, %v after a load of zeros, want 0, nil", v, err)
	}
}

type masked struct {
	nn.Func
	parts nn.Parts
}

func (m masked) Parts() nn.Parts { return m.parts }

// An open file can be loaded even after another file has replaced it at its path, or after its path
// was removed.
func TestLoadFrom(t *testing.T) {
	net := nn.NewLinear(3, 2, nn.LinearOptions{})
	defer nn.Close(net)
	path := filepath.Join(t.TempDir(), "m.pt")
	if err := nn.Save(path, net, nil); err != nil {
		t.Fatal(err)
	}
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	report, err := nn.LoadFrom(c, net, nn.LoadOptions{})
	if err != nil || len(report.Loaded) != 2 || c.Path() != path {
		t.Errorf("%+v of %s, %v, want 2 loaded, %s, nil", report, c.Path(), err, path)
	}
}

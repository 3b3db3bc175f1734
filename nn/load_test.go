package nn_test

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

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
	net := nn.NewSequential(nn.NewLinear(3, 4, nn.LinearOptions{}), nn.NewBatchNorm1d(4, nn.BatchNorm1dOptions{}), nn.NewLinear(4, 2, nn.LinearOptions{}))
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

var dtypesByName = map[string]torch.DType{"float16": torch.Float16, "bfloat16": torch.BFloat16, "float32": torch.Float32, "float64": torch.Float64}

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
				t.Errorf("%s, partial %v: %v", name, partial, err)
				continue
			}
			checkState(t, name, net, want.State)
			converted := differentDTypes(t, loading(file), net)
			if r.Parameters != 6 || r.AllParameters != 6 || r.Elements != 43 || r.Share() != 1 || len(r.Converted) != converted {
				t.Errorf("%s, partial %v: got %d of %d parameters, %d of %d numbers, %d converted; want 6 of 6, 43 of 43, %d converted",
					name, partial, r.Parameters, r.AllParameters, r.Elements, r.AllElements, len(r.Converted), converted)
			}
			if d := nn.Parameters(net)[0].DType().String(); d != want.DType {
				t.Errorf("%s: the parameters have become %s", name, d)
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
	for _, s := range openCheckpoint(t, path).Tensors() {
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
	want := "9 tensors loaded: 6 of 6 parameters, 100 % of the numbers\ntensors converted: 8 from float16 to float32, 1 from float16 to int64"
	if r.String() != want {
		t.Errorf("got %q, want %q", r, want)
	}
}

// A count that float16 cannot represent is infinite in the file. PyTorch turns it into -2^63.
func TestLoadKeepsACountThatTheFileLost(t *testing.T) {
	net := loadingNet(t)
	r, err := nn.LoadWith(loading("infinite_count.safetensors"), net, nn.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := expectedLoads(t)["all_half.safetensors"].State
	want["1.num_batches_tracked"] = []float64{9}
	checkState(t, "infinite_count", net, want)
	if len(r.Mismatched) != 1 || r.Mismatched[0].Name != "1.num_batches_tracked" || slices.Contains(r.Loaded, "1.num_batches_tracked") || r.Elements != 42 {
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
			t.Errorf("a refused file changed %s to %v", name, v)
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
	if err := nn.SaveTensors(path, buffers, nil); err != nil {
		t.Fatal(err)
	}
	_, err := nn.LoadWith(path, net, nn.LoadOptions{Partial: true})
	for _, want := range []string{"it has no parameter of the module", "tensor 0.weight is not in the file", `the file has 3 tensors: "1.num_batches_tracked", "1.running_mean", "1.running_var"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

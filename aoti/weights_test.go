package aoti

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/resident"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// tinyShapes are the entries of tiny.pt2's state_dict in its order.
var tinyShapes = []torch.Spec{
	{Name: "scale", Shape: []int64{3}},
	{Name: "first.weight", Shape: []int64{8, 4}},
	{Name: "first.bias", Shape: []int64{8}},
	{Name: "second.weight", Shape: []int64{3, 8}},
	{Name: "second.bias", Shape: []int64{3}},
	{Name: "same.weight", Shape: []int64{3, 8}},
	{Name: "same.bias", Shape: []int64{3}},
	{Name: "unused.weight", Shape: []int64{2, 2}},
	{Name: "unused.bias", Shape: []int64{2}},
}

// tinyState returns the state_dict that make_packages.py makes with fill(net, shift). second and
// same are one module, so the values of same remain.
func tinyState(t testing.TB, shift int) map[string]*torch.Tensor {
	t.Helper()
	state := map[string]*torch.Tensor{}
	for i, s := range tinyShapes {
		values := make([]float32, s.Elements())
		for j := range values {
			values[j] = float32(math.Sin(float64(j + i + shift)))
		}
		x, err := torch.FromSlice(values, s.Shape...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { x.Close() })
		state[s.Name] = x
	}
	state["second.weight"], state["second.bias"] = state["same.weight"], state["same.bias"]
	return state
}

// swapped returns PyTorch's outputs of tiny.pt2 with the weights of fill(net, 100).
func swapped(t *testing.T) map[string][]float64 {
	t.Helper()
	r := results(t)
	return map[string][]float64{"logits": r["swapped_logits"], "sums": r["swapped_sums"]}
}

// check compares a run with PyTorch's outputs.
func check(t *testing.T, m *Model, want map[string][]float64) {
	t.Helper()
	x, mask := inputs(t)
	got, err := run(m, x, mask)
	if err != nil {
		t.Fatal(err)
	}
	near(t, got, want)
}

func TestWeightsHaveTheNamesOfTheStateDict(t *testing.T) {
	m := loadTiny(t, Options{})
	got := fmt.Sprint(m.Weights())
	const want = "[{first.bias float32 [8] contiguous} {first.weight float32 [8 4] contiguous} {scale float32 [3] contiguous} " +
		"{second.bias float32 [3] contiguous} {second.weight float32 [3 8] contiguous}]"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	for name, x := range tinyState(t, 0) {
		y, err := m.Weight(name)
		if strings.HasPrefix(name, "unused.") {
			if err == nil || !strings.Contains(err.Error(), "no weight") {
				t.Errorf("%s: got the error %v, want that the model has no such weight", name, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if same, err := x.Sub(y).Abs().Max().Float64(); err != nil || same > 1e-6 {
			t.Errorf("%s differs by %v (error %v) from the exported one, want at most 1e-6", name, same, err)
		}
		y.Close()
	}
}

// The order of runs and swaps: LibTorch's container fails if its weights are swapped before the
// first run, or a swap follows another without a run.
func TestSwappedWeightsEqualPyTorch(t *testing.T) {
	for _, runs := range []string{"", "0", "01", "0110", "1001"} {
		m := loadTiny(t, Options{Instances: 2})
		want := results(t)
		states := []map[string]*torch.Tensor{tinyState(t, 0), tinyState(t, 100)}
		for _, c := range runs {
			i := int(c - '0')
			if err := m.ReplaceWeights(context.Background(), states[i]); err != nil {
				t.Fatal(err)
			}
			want = []map[string][]float64{results(t), swapped(t)}[i]
			check(t, m, want)
		}
		for range 3 { // both instances
			check(t, m, want)
		}
	}
	m := loadTiny(t, Options{})
	for range 3 {
		if err := m.ReplaceWeights(context.Background(), tinyState(t, 100)); err != nil {
			t.Fatal(err)
		}
	}
	check(t, m, swapped(t))
	check(t, m, swapped(t))
}

// The tensors are copied: the caller may change them afterwards.
func TestReplaceWeightsCopies(t *testing.T) {
	m := loadTiny(t, Options{})
	state := tinyState(t, 100)
	if err := m.ReplaceWeights(context.Background(), state); err != nil {
		t.Fatal(err)
	}
	for _, x := range state {
		if err := x.Zero_().Err(); err != nil {
			t.Fatal(err)
		}
	}
	check(t, m, swapped(t))
	y, err := m.Weight("scale")
	if err != nil {
		t.Fatal(err)
	}
	if err := y.Zero_().Err(); err != nil {
		t.Fatal(err)
	}
	y.Close()
	check(t, m, swapped(t))
}

func TestReplaceWeightsConvertsFloatingPointNumbers(t *testing.T) {
	m := loadTiny(t, Options{})
	for _, dtype := range []torch.DType{torch.Float64, torch.BFloat16, torch.Float16} {
		state, rounded := map[string]*torch.Tensor{}, map[string]*torch.Tensor{}
		for name, x := range tinyState(t, 100) {
			state[name] = x.ToDType(dtype)
			rounded[name] = state[name].ToDType(torch.Float32)
		}
		state["same.weight"], state["same.bias"] = state["second.weight"], state["second.bias"]
		if err := m.ReplaceWeights(context.Background(), state); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"first.weight", "scale"} {
			got, err := m.Weight(name)
			if err != nil {
				t.Fatal(err)
			}
			if same, err := got.Equal(rounded[name]); err != nil || !same {
				t.Errorf("%v %s: got other values than the conversion of the tensor (error %v)", dtype, name, err)
			}
			got.Close()
		}
	}
}

// A set that does not fit changes nothing, and the error names each difference.
func TestWeightsThatDoNotFitAreRefused(t *testing.T) {
	m := loadTiny(t, Options{})
	made := func(dtype torch.DType, shape ...int64) *torch.Tensor {
		y, err := torch.Zeros(cuda.CPU, dtype, shape...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { y.Close() })
		return y
	}
	closed := made(torch.Float32, 3)
	closed.Close()
	for _, c := range []struct {
		change func(state map[string]*torch.Tensor)
		want   []string
	}{
		{func(s map[string]*torch.Tensor) { delete(s, "scale"); delete(s, "first.bias") }, []string{"missing: first.bias, scale"}},
		{func(s map[string]*torch.Tensor) { delete(s, "second.bias"); delete(s, "same.bias") }, []string{"missing: second.bias"}},
		{func(s map[string]*torch.Tensor) { s["head.weight"], s["a"] = s["scale"], s["scale"] },
			[]string{"not in the model: a, head.weight"}},
		{func(s map[string]*torch.Tensor) {
			s["scale"], s["first.weight"] = made(torch.Float32, 4), made(torch.Float32, 4, 8)
		},
			[]string{"scale: got float32[4], want float32[3]", "first.weight: got float32[4 8], want float32[8 4]"}},
		{func(s map[string]*torch.Tensor) { s["scale"] = made(torch.Int64, 3) }, []string{"scale: got int64[3], want float32[3]"}},
		{func(s map[string]*torch.Tensor) { s["same.bias"] = made(torch.Float32, 3) },
			[]string{"second.bias: same.bias is a name of the same weight, and has other values"}},
		{func(s map[string]*torch.Tensor) { s["same.bias"] = made(torch.Float32, 4) },
			[]string{"same.bias: got float32[4], want float32[3]"}},
		{func(s map[string]*torch.Tensor) { s["second.bias"] = closed }, []string{"second.bias: got "}},
		{func(s map[string]*torch.Tensor) { s["scale"] = closed }, []string{"scale"}},
		{func(s map[string]*torch.Tensor) { s["scale"] = nil }, []string{"scale"}},
		{func(s map[string]*torch.Tensor) { clear(s) }, []string{"missing: first.bias, first.weight, scale, second.bias, second.weight"}},
	} {
		state := tinyState(t, 100)
		c.change(state)
		err := m.ReplaceWeights(context.Background(), state)
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "aoti: the model: ReplaceWeights") {
				t.Errorf("got the error %v, want one of ReplaceWeights with %q", err, want)
			}
		}
	}
	check(t, m, results(t))
	// One name of two for the same tensor is enough, and nobody needs the unused ones.
	state := tinyState(t, 100)
	for _, name := range []string{"second.weight", "same.bias", "unused.weight", "unused.bias"} {
		delete(state, name)
	}
	if err := m.ReplaceWeights(context.Background(), state); err != nil {
		t.Error(err)
	}
	check(t, m, swapped(t))
}

func TestReplaceWeightsEndsWithItsContextAndModel(t *testing.T) {
	m := loadTiny(t, Options{})
	ctx, cancel := context.WithCancelCause(context.Background())
	cause := errors.New("the program ends")
	m.swapping <- struct{}{} // another swap
	cancel(cause)
	if err := m.ReplaceWeights(ctx, tinyState(t, 100)); !errors.Is(err, cause) {
		t.Errorf("got the error %v, want %v", err, cause)
	}
	<-m.swapping
	if err := m.ReplaceWeights(ctx, tinyState(t, 100)); !errors.Is(err, cause) {
		t.Errorf("without another swap: got the error %v, want %v", err, cause)
	}
	check(t, m, results(t))
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := m.ReplaceWeights(context.Background(), tinyState(t, 100)); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: got the error %v, want ErrClosed", err)
	}
	if _, err := m.Weight("scale"); !errors.Is(err, ErrClosed) {
		t.Errorf("Weight after Close: got the error %v, want ErrClosed", err)
	}
}

// Close frees the instances that a swap changes.
func TestCloseWaitsForASwap(t *testing.T) {
	m := loadTiny(t, Options{})
	synctest.Test(t, func(t *testing.T) {
		m.closed, m.swapping, m.idle = make(chan struct{}), make(chan struct{}, 1), make(chan *capi.Model, 1)
		m.idle <- m.instances[0]
		m.swapping <- struct{}{} // a swap
		ended := make(chan error, 1)
		go func() { ended <- m.Close() }()
		synctest.Wait()
		select {
		case err := <-ended:
			t.Errorf("Close returned %v during a swap, want that it waits", err)
		default:
			<-m.swapping
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	})
}

// Close frees the instances, so Weight borrows one.
func TestWeightBorrowsAnInstance(t *testing.T) {
	m := loadTiny(t, Options{})
	idle, closed := m.idle, m.closed
	defer func() { m.idle, m.closed = idle, closed }()
	synctest.Test(t, func(t *testing.T) {
		m.idle, m.closed = make(chan *capi.Model, 1), make(chan struct{})
		ended := make(chan error, 1)
		go func() {
			x, err := m.Weight("scale")
			ended <- errors.Join(err, x.Close())
		}()
		synctest.Wait()
		select {
		case err := <-ended:
			t.Errorf("Weight returned %v while a run had the only instance, want that it waits", err)
		default:
			m.idle <- m.instances[0]
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	})
}

// A Model that Load has not made returns errors, and never waits.
func TestZeroModelReturnsErrClosed(t *testing.T) {
	var m Model
	_, run := m.Run(t.Context())
	_, weight := m.Weight("scale")
	_, load := m.LoadWeights(t.Context(), "w.safetensors", nn.LoadOptions{})
	for name, err := range map[string]error{"Run": run, "Weight": weight, "LoadWeights": load,
		"ReplaceWeights": m.ReplaceWeights(t.Context(), nil)} {
		if !errors.Is(err, ErrClosed) {
			t.Errorf("%s: got the error %v, want ErrClosed", name, err)
		}
	}
	if err := m.Close(); err != nil {
		t.Errorf("Close: %v, want no error", err)
	}
}

// Another replacement may happen between the reading of a partial file and its replacement.
func TestPartialLoadKeepsTheLatestWeights(t *testing.T) {
	m := loadTiny(t, Options{})
	path := filepath.Join(t.TempDir(), "part.safetensors")
	scale := tinyState(t, 7)["scale"]
	if err := checkpoint.Save(path, []torch.Named{{Name: "scale", Tensor: scale}}, nil); err != nil {
		t.Fatal(err)
	}
	scope := torch.NewScope("file")
	defer scope.Close()
	f, err := m.readFile(t.Context(), scope, path, nn.LoadOptions{Partial: true})
	if err != nil {
		t.Fatal(err)
	}
	want := tinyState(t, 100)
	if err := m.ReplaceWeights(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	if err := m.replace(t.Context(), f.places, f.values); err != nil {
		t.Fatal(err)
	}
	want["scale"] = scale
	for _, w := range m.Weights() {
		got, err := m.Weight(w.Name)
		if err != nil {
			t.Fatal(err)
		}
		if same, err := got.Equal(want[w.Name]); err != nil || !same {
			t.Errorf("%s is not the latest value (error %v)", w.Name, err)
		}
		got.Close()
	}
}

// A file with two values for one weight is ambiguous.
func TestLoadWeightsRefusesTiedWeightsThatDiffer(t *testing.T) {
	m := loadTiny(t, Options{})
	state := tinyState(t, 100)
	state["same.bias"] = tinyState(t, 101)["same.bias"]
	var tensors []torch.Named
	for _, name := range slices.Sorted(maps.Keys(state)) {
		tensors = append(tensors, torch.Named{Name: "module." + name, Tensor: state[name]})
	}
	path := filepath.Join(t.TempDir(), "w.safetensors")
	if err := checkpoint.Save(path, tensors, nil); err != nil {
		t.Fatal(err)
	}
	_, err := m.LoadWeights(t.Context(), path, nn.LoadOptions{})
	for _, want := range []string{"aoti: the model: LoadWeights: " + path, "same.bias", "second.bias", "has other values"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got the error %v, want one with %q", err, want)
		}
	}
	check(t, m, results(t))
	nan, err := torch.FromSlice([]float32{float32(math.NaN()), 1, 2}, 3)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nan.Close() })
	tied := weight{Spec: torch.Spec{DType: torch.Float32, Shape: []int64{3}}}
	other := nan.Clone()
	t.Cleanup(func() { other.Close() })
	if err := tied.equal("first", nan, other); err != nil {
		t.Errorf("NaN in both: got the error %v, want none", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = m.LoadWeights(ctx, path, nn.LoadOptions{})
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "LoadWeights") {
		t.Errorf("got the error %v, want context.Canceled of LoadWeights", err)
	}
}

func TestOneWeightHasOneNewValue(t *testing.T) {
	m := loadTiny(t, Options{})
	w := m.weights.list[0]
	x := tinyState(t, 100)[w.Name]
	err := m.replace(t.Context(), []int64{w.places[0], w.places[0]}, []*torch.Tensor{x, x})
	if err == nil || !strings.Contains(err.Error(), "weight "+w.Name+" has two new values") {
		t.Errorf("got the error %v, want that %s has two new values", err, w.Name)
	}
	check(t, m, results(t))
}

// Files of both kinds, in two dtypes, with the names of a DistributedDataParallel.
func TestLoadWeightsReadsCheckpoints(t *testing.T) {
	dir := t.TempDir()
	var tensors []torch.Named
	value := map[string]any{}
	state := tinyState(t, 100)
	for _, name := range slices.Sorted(maps.Keys(state)) {
		tensors = append(tensors, torch.Named{Name: name, Tensor: state[name]})
		value["module."+name] = state[name].ToDType(torch.Float64)
	}
	safetensors, pt := filepath.Join(dir, "w.safetensors"), filepath.Join(dir, "w.pt")
	if err := checkpoint.Save(safetensors, tensors, nil); err != nil {
		t.Fatal(err)
	}
	if err := checkpoint.SavePyTorch(pt, value); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{safetensors, pt} {
		m := loadTiny(t, Options{})
		if _, err := m.LoadWeights(context.Background(), path, nn.LoadOptions{}); err != nil {
			t.Fatal(err)
		}
		check(t, m, swapped(t))
	}
	m := loadTiny(t, Options{})
	part := filepath.Join(dir, "part.safetensors")
	if err := checkpoint.Save(part, []torch.Named{{Name: "scale", Tensor: state["scale"]}}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := m.LoadWeights(context.Background(), part, nn.LoadOptions{}); err == nil ||
		!strings.Contains(err.Error(), "first.weight is not in the file") || !strings.Contains(err.Error(), part) {
		t.Errorf("a file with one weight: got the error %v, want one that names the file and first.weight", err)
	}
	check(t, m, results(t))
	report, err := m.LoadWeights(context.Background(), part, nn.LoadOptions{Partial: true})
	if err != nil || len(report.Loaded) != 1 {
		t.Fatalf("with Partial: got the report %+v, error %v, want one loaded weight", report, err)
	}
	for name, want := range map[string]*torch.Tensor{"scale": state["scale"],
		"first.bias": tinyState(t, 0)["first.bias"]} {
		got, err := m.Weight(name)
		if err != nil {
			t.Fatal(err)
		}
		if d, err := got.Sub(want).Abs().Max().Float64(); err != nil || d > 1e-6 {
			t.Errorf("with Partial %s differs by %v (error %v), want at most 1e-6", name, d, err)
		}
		got.Close()
	}
}

// Code that PyTorch 2.11 has compiled keeps every tensor that it is given as a weight. A set of
// tiny.pt2 and its tensors take some KB.
func TestSwapsKeepMemoryFlat(t *testing.T) {
	m := loadTiny(t, Options{Instances: 2})
	states := []map[string]*torch.Tensor{tinyState(t, 0), tinyState(t, 100)}
	swap := func(n int) int64 {
		for i := range n {
			if err := m.ReplaceWeights(context.Background(), states[i%2]); err != nil {
				t.Fatal(err)
			}
		}
		runtime.GC()
		bytes, err := resident.Bytes()
		if err != nil {
			t.Skip("the system does not tell the process's memory: ", err)
		}
		return bytes
	}
	before := swap(1000)
	const most = 4 << 20 // 8000 leaked sets take more than 7 MB
	if grown := swap(8000) - before; grown > most {
		t.Errorf("8000 swaps took %d bytes, want at most %d", grown, int64(most))
	}
	check(t, m, swapped(t))
}

// Inductor writes small weights into the code, and freezing computes weights from others. Such a
// package runs, but a swap would leave the old values in the code.
func TestCompiledWeightsAreRefused(t *testing.T) {
	conv := capi.ModelWeight{Name: "conv.weight", DType: 6, Shape: []int64{8, 3, 3, 3}}
	states := []state{{Name: "conv.weight", Used: true}, {Name: "bn.weight", Used: true}, {Name: "bn.num_batches_tracked"}}
	for name, all := range map[string][]capi.ModelWeight{
		"a small weight":    {conv},
		"frozen":            {conv, {Name: "_frozen_param3", DType: 6}},
		"an opaque one":     {conv, {Name: "bn.weight", DType: 6, Fixed: true}},
		"a frozen one only": {{Name: "_frozen_param3", DType: 6}},
	} {
		w, err := newWeights(all, states)
		if err != nil {
			t.Fatal(err)
		}
		const says = "bn.weight: export it with tools/export.py --replaceable"
		if !errors.Is(w.fixed, ErrFixedWeights) || !strings.Contains(w.fixed.Error(), says) {
			t.Errorf("%s: got the error %v, want ErrFixedWeights with the weight and --replaceable", name, w.fixed)
		}
	}
	w, err := newWeights([]capi.ModelWeight{conv, {Name: "bn.weight"}, {Name: "_tensor_constant0"}}, states)
	if err != nil || w.fixed != nil || len(w.list) != 2 || !w.unused["bn.num_batches_tracked"] {
		t.Errorf("a whole package: got %+v, error %v, want two weights and an unused one", w, err)
	}
	m := loadChanged(t, withMetadata(t, func(metadata map[string]string) {
		metadata[descriptionKey] = strings.Replace(metadata[descriptionKey], `"name": "scale"`, `"name": "gain"`, 1)
	}), Options{})
	if err := m.ReplaceWeights(context.Background(), nil); !errors.Is(err, ErrFixedWeights) || !strings.Contains(err.Error(), "gain") {
		t.Errorf("got the error %v, want ErrFixedWeights with gain", err)
	}
	if _, err := m.LoadWeights(context.Background(), "w.safetensors", nn.LoadOptions{}); !errors.Is(err, ErrFixedWeights) {
		t.Errorf("LoadWeights: got the error %v, want ErrFixedWeights", err)
	}
	check(t, m, results(t))
}

// The code may have a constant for each name of one tensor. All of them get the new value.
func TestTiedWeightsMayHaveSeveralConstants(t *testing.T) {
	states := []state{{Name: "embed.weight", Used: true}, {Name: "head.weight", Tied: "embed.weight", Used: true}}
	embed := capi.ModelWeight{Name: "embed.weight", DType: 6, Shape: []int64{5, 2}}
	head := embed
	head.Name = "head.weight"
	w, err := newWeights([]capi.ModelWeight{embed, head}, states)
	if err != nil {
		t.Fatal(err)
	}
	x, err := torch.Zeros(cuda.CPU, torch.Float32, 5, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	places, values, err := w.match(map[string]*torch.Tensor{"head.weight": x})
	if err != nil || !slices.Equal(places, []int64{0, 1}) || !slices.Equal(values, []*torch.Tensor{x, x}) {
		t.Errorf("got the places %v with %d values, error %v, want 0 and 1 with the same tensor", places, len(values), err)
	}
	head.Fixed = true
	if w, err = newWeights([]capi.ModelWeight{embed, head}, states); err != nil || !errors.Is(w.fixed, ErrFixedWeights) {
		t.Errorf("one constant is fixed: got %v, error %v, want ErrFixedWeights", w.fixed, err)
	}
	head.Fixed, head.DType = false, 7
	if _, err = newWeights([]capi.ModelWeight{embed, head}, states); !errors.Is(err, ErrFormat) {
		t.Errorf("another dtype: got the error %v, want ErrFormat", err)
	}
	if _, err = newWeights([]capi.ModelWeight{embed}, append(states, states[0])); !errors.Is(err, ErrFormat) {
		t.Errorf("a name twice: got the error %v, want ErrFormat", err)
	}
}

// A package without a description has the names that PyTorch recorded.
func TestWeightsOfAPackageWithoutADescription(t *testing.T) {
	m := loadChanged(t, withMetadata(t, func(metadata map[string]string) { delete(metadata, descriptionKey) }), Options{})
	state := map[string]*torch.Tensor{}
	whole := tinyState(t, 100)
	for _, w := range m.Weights() {
		state[w.Name] = whole[w.Name]
	}
	if len(state) != 5 {
		t.Errorf("got %d weights, want 5", len(state))
	}
	if err := m.ReplaceWeights(context.Background(), state); err != nil {
		t.Fatal(err)
	}
	check(t, m, swapped(t))
	if err := m.ReplaceWeights(context.Background(), whole); err == nil || !strings.Contains(err.Error(), "not in the model") {
		t.Errorf("names that the package lacks: got the error %v, want that they are not in the model", err)
	}
	guessed := guessStates([]capi.ModelWeight{{Name: "bn.running_mean"}, {Name: "_tensor_constant0"}, {Name: "lifted_tensor_1"}})
	if got, want := fmt.Sprint(guessed), "[{bn.running_mean  true} {bn.num_batches_tracked  false}]"; got != want {
		t.Errorf("got the states %s, want %s", got, want)
	}
}

// The stress tests swap swapCount times. runsPerSwap runs end between two swaps.
const (
	swapCount   = 100
	runsPerSwap = 16
)

var swapEvery = flag.Duration("swap-every", 0, "shortest `time` between two swaps of the stress tests")

// scaledSets returns sets of weights. Set i multiplies the outputs of base by i + 1. The factors of
// two layers differ too, with the product 1, so that outputs of a mixed set are neither.
func scaledSets(t *testing.T, base map[string]*torch.Tensor) []map[string]*torch.Tensor {
	t.Helper()
	sets := make([]map[string]*torch.Tensor, swapCount)
	for i := range sets {
		sets[i] = map[string]*torch.Tensor{}
		scope := torch.NewScope("set")
		t.Cleanup(func() { scope.Close() })
		grow := math.Ldexp(1, i%17)
		for name, f := range map[string]float64{"first.weight": grow, "first.bias": grow, "second.weight": 1 / grow,
			"second.bias": 1, "scale": float64(i + 1)} {
			sets[i][name] = base[name].In(scope).MulScalar(f)
			if err := sets[i][name].Err(); err != nil {
				t.Fatal(err)
			}
		}
	}
	return sets
}

// 64 goroutines run the model while its weights are swapped. Every answer belongs to one set of
// weights. A run that starts after a swap has its weights.
func TestEveryRunHasOneSetOfWeights(t *testing.T) {
	m := loadTiny(t, Options{Instances: 4})
	x, mask := inputs(t)
	want := swapped(t)
	s := stress{model: m, sets: scaledSets(t, tinyState(t, 100)), want: slices.Concat(want["logits"], want["sums"]), bound: 1e-4}
	s.run(t, func(int) ([]float32, error) { return run(m, x, mask) })
}

// stress swaps sets of weights while 64 goroutines run the model. Set i gives want times i + 1.
type stress struct {
	model *Model
	sets  []map[string]*torch.Tensor
	want  []float64
	bound float64 // of relative errors

	mu     sync.Mutex
	change sync.Cond // on mu: of the following fields
	done   int       // the latest set whose ReplaceWeights has returned
	runs   int       // that have ended
	failed bool
	seen   map[int]bool // the sets of runs
}

// run calls one of each goroutine, with the goroutine's number.
func (s *stress) run(t *testing.T, one func(g int) ([]float32, error)) {
	t.Helper()
	s.seen, s.change.L = map[int]bool{}, &s.mu
	if err := s.model.ReplaceWeights(context.Background(), s.sets[0]); err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	for g := range 64 {
		running.Go(func() {
			for last := false; !last; {
				before := s.latest()
				last = before == len(s.sets)-1
				got, err := one(g)
				if err == nil {
					err = s.check(got, before)
				}
				s.ended(err)
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i := 1; i < len(s.sets); i++ {
		s.wait(runsPerSwap, time.Now().Add(*swapEvery))
		if err := s.model.ReplaceWeights(context.Background(), s.sets[i]); err != nil {
			t.Error(err)
		}
		s.mu.Lock()
		s.done = i
		s.mu.Unlock()
	}
	running.Wait()
	t.Logf("%d runs had %d of %d sets", s.runs, len(s.seen), len(s.sets))
	if !s.seen[len(s.sets)-1] && !t.Failed() {
		t.Error("no run had the last set")
	}
}

// wait waits for the end of n runs and the first one after a time, or a failed one.
func (s *stress) wait(n int, until time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n += s.runs; (s.runs < n || time.Now().Before(until)) && !s.failed; {
		s.change.Wait()
	}
}

func (s *stress) ended(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.runs++
	s.failed = s.failed || err != nil
	s.change.Broadcast()
}

func (s *stress) latest() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.done
}

// check finds the set of a run from the largest value, and compares the other values with it.
func (s *stress) check(got []float32, before int) error {
	if len(got) != len(s.want) {
		return fmt.Errorf("got %d values, want %d", len(got), len(s.want))
	}
	largest := 0
	for i, v := range s.want {
		if math.Abs(v) > math.Abs(s.want[largest]) {
			largest = i
		}
	}
	set := int(math.Round(float64(got[largest])/s.want[largest])) - 1
	if set < before || set >= len(s.sets) {
		return fmt.Errorf("a run after the swap to set %d has the value %v, of set %d", before, got[largest], set)
	}
	for i, v := range s.want {
		w := v * float64(set+1)
		if allowed := s.bound * math.Abs(s.want[largest]) * float64(set+1); math.Abs(float64(got[i])-w) > allowed {
			return fmt.Errorf("value %d is %v, want %v, as value %d is of set %d", i, got[i], w, largest, set)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[set] = true
	return nil
}

// A Batcher serves while its model's weights are swapped.
func TestBatcherServesWhileWeightsAreSwapped(t *testing.T) {
	m := loadTiny(t, Options{Instances: 2})
	x, _ := inputs(t)
	mask, err := torch.Zeros(cuda.CPU, torch.Bool, 64, 3)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mask.Close() })
	b, err := serve.NewBatcher(serve.BatcherOptions{
		Model: func(cuda.Device) (serve.Run, error) {
			return func(ctx context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
				return m.Run(ctx, x, mask.In(x.Scope()).Narrow(0, 0, x.Shape()[0]))
			}, nil
		},
		Devices: []cuda.Device{cuda.CPU}, Workers: 2, MaxBatch: 16, Queue: 64,
		Input: tensor.Spec{DType: torch.Float32, Shape: []int64{4}},
	})
	if err != nil {
		t.Fatal(err)
	}
	row, err := x.Narrow(0, 0, 1).Float32s()
	if err != nil {
		t.Fatal(err)
	}
	s := stress{model: m, sets: scaledSets(t, tinyState(t, 100)), want: swapped(t)["sums"][:1], bound: 1e-4}
	s.run(t, func(int) ([]float32, error) {
		a, err := b.Do(context.Background(), serve.Request{Row: serve.RowOf(row)})
		if err != nil {
			return nil, err
		}
		return a.Outputs[1].Values, nil
	})
	if err := b.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

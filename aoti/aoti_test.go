package aoti

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/torch"
)

func TestMain(m *testing.M) { cudatest.Main(m) }

const tiny = "testdata/tiny.pt2" // testdata/make_packages.py wrote it

// results returns the outputs that PyTorch computed with tiny.pt2.
func results(t *testing.T) map[string][]float64 {
	t.Helper()
	text, err := os.ReadFile("testdata/expected.json")
	if err != nil {
		t.Fatal(err)
	}
	var r map[string][]float64
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

func loadTiny(t *testing.T, o Options) *Model {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	m, err := Load(tiny, o)
	if runtime.GOARCH != "amd64" && err != nil {
		t.Skip("the package has code for amd64: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*"))
		if len(left) > 0 {
			t.Errorf("Close left %v, want nothing", left)
		}
	})
	return m
}

// inputs returns the inputs of make_packages.py.
func inputs(t *testing.T) (x, mask *torch.Tensor) {
	t.Helper()
	values := make([]float32, 20)
	for i := range values {
		values[i] = float32(math.Cos(float64(i)))
	}
	x, err := torch.FromSlice(values, 5, 4)
	if err != nil {
		t.Fatal(err)
	}
	keep := make([]bool, 15)
	for i := range keep {
		keep[i] = i%4 != 0
	}
	if mask, err = torch.FromSlice(keep, 5, 3); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close(); mask.Close() })
	return x, mask
}

// run runs the model once, and returns all outputs as one slice.
func run(m *Model, x, mask *torch.Tensor) ([]float32, error) {
	scope := torch.NewScope("test")
	defer scope.Close()
	outputs, err := m.Run(context.Background(), x.In(scope), mask)
	if err != nil {
		return nil, err
	}
	var all []float32
	for _, y := range outputs {
		values, err := y.Float32s()
		if err != nil {
			return nil, err
		}
		all = append(all, values...)
	}
	return all, nil
}

// near compares outputs with PyTorch's.
func near(t *testing.T, got []float32, want map[string][]float64) {
	t.Helper()
	all := slices.Concat(want["logits"], want["sums"])
	if len(got) != len(all) {
		t.Errorf("got %d values, want %d", len(got), len(all))
		return
	}
	for i, w := range all {
		if math.Abs(float64(got[i])-w) > 1e-5*math.Max(1, math.Abs(w)) {
			t.Errorf("value %d is %v, want %v", i, got[i], w)
		}
	}
}

func TestOpenDescribesThePackage(t *testing.T) {
	p, err := Open(tiny)
	if err != nil {
		t.Fatal(err)
	}
	m := p.Models[0]
	got := fmt.Sprintln(len(p.Models), m.Name, m.CUDA, m.CPU, m.LibTorch, m.Inputs, m.Outputs)
	const want = "1 model false AVX2 2.11.0 [float32[1..64 4] bool[1..64 3]] [float32[1..64 3] float32[1..64]]\n"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	for i, want := range []string{"x", "mask"} {
		if got := p.Models[0].Inputs[i].Name; got != want {
			t.Errorf("input %d is %q, want %q", i, got, want)
		}
	}
	for i, want := range []string{"logits", "sums"} {
		if got := p.Models[0].Outputs[i].Name; got != want {
			t.Errorf("output %d is %q, want %q", i, got, want)
		}
	}
}

func TestRunEqualsPyTorch(t *testing.T) {
	m := loadTiny(t, Options{})
	x, mask := inputs(t)
	got, err := run(m, x, mask)
	if err != nil {
		t.Fatal(err)
	}
	near(t, got, results(t))
}

// PyTorch's tracer takes dynamic sizes to be at least 2. The range of tiny.pt2 starts at 1.
func TestSmallestSizeRuns(t *testing.T) {
	m := loadTiny(t, Options{})
	x, mask := inputs(t)
	scope := torch.NewScope("first row")
	defer scope.Close()
	outputs, err := m.Run(context.Background(), x.In(scope).Narrow(0, 0, 1), mask.In(scope).Narrow(0, 0, 1))
	if err != nil {
		t.Fatal(err)
	}
	got, err := outputs[1].Float64s()
	if err != nil {
		t.Fatal(err)
	}
	if want := results(t)["sums"][0]; len(got) != 1 || math.Abs(got[0]-want) > 1e-5*math.Max(1, math.Abs(want)) {
		t.Errorf("the first row alone has the sum %v, want %v", got, want)
	}
}

func TestOutputsJoinTheScopeOfTheInputs(t *testing.T) {
	m := loadTiny(t, Options{})
	x, mask := inputs(t)
	scope := torch.NewScope("request")
	outputs, err := m.Run(context.Background(), x.In(scope), mask)
	if err != nil {
		t.Fatal(err)
	}
	if err := scope.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := outputs[0].Float32s(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("after the scope's end the output gives the error %v, want ErrClosed", err)
	}
}

func TestWrongInputsAreRefused(t *testing.T) {
	m := loadTiny(t, Options{})
	x, mask := inputs(t)
	made := func(dtype torch.DType, shape ...int64) *torch.Tensor {
		y, err := torch.Zeros(cuda.CPU, dtype, shape...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { y.Close() })
		return y
	}
	for _, c := range []struct {
		inputs []*torch.Tensor
		want   string
	}{
		{[]*torch.Tensor{x}, "1 inputs, want 2: x float32[1..64 4], mask bool[1..64 3]"},
		{[]*torch.Tensor{made(torch.Float32, 5, 3), mask}, "input x: got float32[5 3], want float32[1..64 4]"},
		{[]*torch.Tensor{made(torch.Float32, 65, 4), mask}, "input x: got float32[65 4], want float32[1..64 4]"},
		{[]*torch.Tensor{made(torch.Float32, 0, 4), mask}, "input x: got float32[0 4]"},
		{[]*torch.Tensor{made(torch.Float64, 5, 4), mask}, "input x: got float64[5 4]"},
		{[]*torch.Tensor{made(torch.Float32, 20), mask}, "input x: got float32[20]"},
		{[]*torch.Tensor{x.T().Contiguous(torch.Contiguous).T(), mask}, "input x: got strides [1 5], want a contiguous"},
		{[]*torch.Tensor{x, nil}, "input mask"},
	} {
		_, err := m.Run(context.Background(), c.inputs...)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got the error %v, want one with %q", err, c.want)
		}
	}
}

// The compiled code checks conditions that the description cannot express: sizes that must be
// equal, and strides.
func TestCompiledCodeChecksItsInputs(t *testing.T) {
	m := loadTiny(t, Options{})
	x, mask := inputs(t)
	m.Inputs[0].DType, m.Inputs[1].DType = "", "" // looks like a package without a description
	for name, c := range map[string][2]*torch.Tensor{
		"size":    {x.Narrow(1, 0, 3), mask},
		"strides": {x.T().Contiguous(torch.Contiguous).T(), mask},
		"dtype":   {x.ToDType(torch.Float64), mask},
	} {
		if _, err := m.Run(context.Background(), c[0], c[1]); err == nil ||
			!strings.Contains(err.Error(), "standard error") ||
			!strings.HasPrefix(err.Error(), "aoti: the model: ") || !strings.Contains(err.Error(), "--batch") {
			t.Errorf("another %s: got the error %v, want one of \"the model\" that says where the reason is and names --batch", name, err)
		}
	}
	if got, err := run(m, x, mask); err != nil {
		t.Errorf("after refused inputs: %v", err)
	} else {
		near(t, got, results(t))
	}
}

// Eight goroutines share three instances.
func TestRunsOfManyGoroutinesEqualPyTorch(t *testing.T) {
	m := loadTiny(t, Options{Instances: 3})
	x, mask := inputs(t)
	want := results(t)
	var running sync.WaitGroup
	for range 8 {
		running.Go(func() {
			for range 50 {
				got, err := run(m, x, mask)
				if err != nil {
					t.Error(err)
					return
				}
				near(t, got, want)
			}
		})
	}
	running.Wait()
}

// Autocast around a run changes nothing: the compiled code has fixed dtypes.
func TestAutocastChangesNothing(t *testing.T) {
	m := loadTiny(t, Options{})
	x, mask := inputs(t)
	got, err := run(m, x.Autocast(torch.BFloat16), mask)
	if err != nil {
		t.Fatal(err)
	}
	near(t, got, results(t))
}

func TestContextEndsTheWaitForAnInstance(t *testing.T) {
	m := loadTiny(t, Options{})
	x, mask := inputs(t)
	instance := <-m.idle
	ctx, cancel := context.WithCancelCause(context.Background())
	cause := errors.New("the client left")
	cancel(cause)
	if _, err := m.Run(ctx, x, mask); !errors.Is(err, cause) {
		t.Errorf("got the error %v, want %v", err, cause)
	}
	m.idle <- instance
}

func TestClosedModelReturnsErrClosed(t *testing.T) {
	m := loadTiny(t, Options{})
	x, mask := inputs(t)
	for range 2 {
		if err := m.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	if _, err := m.Run(context.Background(), x, mask); !errors.Is(err, ErrClosed) {
		t.Errorf("Run: got %v, want ErrClosed", err)
	}
}

func TestOperatorRefusesAnAddressThatIsNoModel(t *testing.T) {
	x, mask := inputs(t)
	_, err := torch.Call("torchstream::run_model", int64(4096), []*torch.Tensor{x, mask})
	if err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("got the error %v, want one that says that the model is closed", err)
	}
}

func TestHashIsCheckedBeforeAnythingRuns(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	_, err := Load(tiny, Options{SHA256: strings.Repeat("0", 64)})
	if err == nil || !strings.Contains(err.Error(), "Options.SHA256") {
		t.Errorf("got the error %v, want one about Options.SHA256", err)
	}
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*")); len(left) > 0 {
		t.Errorf("Load left %v, want nothing", left)
	}
}

func TestLoadRemovesFoldersOfKilledProcesses(t *testing.T) {
	m := loadTiny(t, Options{})
	stale := filepath.Join(os.TempDir(), "torchstream-aoti-stale")
	held := filepath.Join(t.TempDir(), "torchstream-aoti-held")
	for _, dir := range []string{stale, held} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(stale, claimName), []byte("in use by process 1"), 0o600); err != nil {
		t.Fatal(err)
	}
	hourAgo := time.Now().Add(-time.Hour)
	if err := os.Chtimes(filepath.Join(stale, claimName), hourAgo, hourAgo); err != nil {
		t.Fatal(err)
	}
	claim, err := safefile.NewClaim(filepath.Join(held, claimName))
	if err != nil {
		t.Fatal(err)
	}
	defer claim.Release()
	removeStale(filepath.Dir(stale))
	removeStale(filepath.Dir(held))
	if _, err := os.Stat(stale); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder of a killed process: got %v, want that it does not exist", err)
	}
	for _, dir := range []string{held, m.files.path} {
		if _, err := os.Stat(dir); err != nil {
			t.Errorf("a folder in use: %v", err)
		}
	}
}

func TestPackageOfAnotherKindIsNamed(t *testing.T) {
	write := func(names ...string) string {
		var b bytes.Buffer
		w := zip.NewWriter(&b)
		for _, name := range names {
			text := "{}"
			if strings.HasSuffix(name, "wrapper_metadata.json") {
				text = `{"AOTI_DEVICE_KEY": "xpu"}`
			}
			f, err := w.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Store})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(f, text); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "x.pt2")
		if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const in = "x/data/aotinductor/model/"
	for _, c := range []struct {
		path string
		is   error
		want string
	}{
		{write("x/models/model.json"), ErrFormat, "tools/export.py"},
		{write("x/data.pkl"), ErrFormat, "package checkpoint"},
		{write("x/y"), ErrFormat, "without the folder data/aotinductor"},
		{write(in+"a.wrapper.cpp", in+"a.wrapper_metadata.json"), ErrUnsupported, "no compiled library"},
		{write(in+"a.so", in+"b.so", in+"a.wrapper_metadata.json"), ErrFormat, "two shared libraries"},
		{write(in + "a.so"), ErrFormat, "no metadata"},
		{write(in+"a.so", in+"a.blob", in+"a.wrapper_metadata.json"), ErrUnsupported, "a.blob"},
		{write(in+"a.so", in+"a.wrapper_metadata.json"), ErrUnsupported, `"xpu"`},
		{write(in+"..", in+"a.so"), ErrFormat, "none of a file"},
		{"testdata/expected.json", ErrFormat, "zip"},
		{"testdata", ErrFormat, "not a regular file"},
		{"absent.pt2", os.ErrNotExist, "absent.pt2"},
	} {
		_, err := Open(c.path)
		if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), c.path) {
			t.Errorf("got the error %v, want %v with %q and the path %s", err, c.is, c.want, c.path)
		}
	}
}

func TestModelForOtherInstructionsIsRefused(t *testing.T) {
	for _, c := range []struct {
		d    Description
		gpu  cuda.Device
		want string
	}{
		{Description{CUDA: true}, cuda.CPU, "Options.Device is the CPU"},
		{Description{CUDA: true, ComputeCapability: "10"}, 0, ""},
	} {
		if _, err := deviceFor(c.d, c.gpu); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v on %v: got the error %v, want one with %q", c.d, c.gpu, err, c.want)
		}
	}
	if got := missingInstructions("AVX2 SOMETHING_NEW"); runtime.GOARCH == "amd64" && got != "" {
		t.Errorf("got that %s is missing, want nothing: AVX2 is everywhere, and the other is unknown", got)
	}
}

// A model's library that is statically linked with the C++ library would end the process.
func TestLibraryWithItsOwnCXXLibraryIsRefused(t *testing.T) {
	program, err := os.Executable() // does not import the C++ library
	if err != nil {
		t.Fatal(err)
	}
	if err := checkLibrary(program); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), cxxLibrary) {
		t.Errorf("got the error %v, want ErrUnsupported with %s", err, cxxLibrary)
	}
	if err := checkLibrary("testdata/expected.json"); !errors.Is(err, ErrFormat) {
		t.Errorf("a file that is no library: got the error %v, want ErrFormat", err)
	}
}

func FuzzStructure(f *testing.F) {
	f.Add(`[1, {"type": "builtins.dict", "context": "[\"a\"]", "children_spec": [{"type": null}]}]`)
	f.Add(`[1, {"type": null}]`)
	f.Fuzz(func(t *testing.T, text string) { _, _ = leaves(text) })
}

func TestStructureNamesLeaves(t *testing.T) {
	const text = `[1, {"type": "builtins.tuple", "context": "null", "children_spec": [
		{"type": "builtins.list", "context": "null", "children_spec": [{"type": null}, {"type": "builtins.dict",
		 "context": "[\"boxes\", 3]", "children_spec": [{"type": null}, {"type": null}]}]}, {"type": null}]}]`
	found, err := leaves(text)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, v := range found {
		got = append(got, v.Name)
	}
	if want := []string{"0.0", "0.1.boxes", "0.1.3", "1"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

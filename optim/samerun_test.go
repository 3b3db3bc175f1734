package optim_test

import (
	"errors"
	"fmt"
	"math"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/capi"
)

// On a GPU, every optimizer's 20 steps match PyTorch's on the same GPU.
func TestTwentyStepsOnTheGPUMatchPyTorch(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	matchPyTorch(t, gpu)
}

// The comparison of TestTwentyStepsOnTheGPUMatchPyTorch holds on a CPU too.
func TestTwentyStepsMatchPyTorchInTheSameRun(t *testing.T) { matchPyTorch(t, cuda.CPU) }

// matchPyTorch runs PyTorch's steps on the device and compares all cases with them. If one fails,
// it prints the largest differences of all cases.
func matchPyTorch(t *testing.T, device cuda.Device) {
	f := stepsOfPyTorch(t, device)
	cases := parityCases()
	largest := make([]difference, len(cases))
	equal := 0
	for i, c := range cases {
		largest[i] = difference{what: "stopped", share: math.Inf(1)}
		t.Run(c.String(), func(t *testing.T) {
			p := newProblemOn(t, f, c.dtype, device)
			p.elementwise = p.elementwise || wellConditioned(c.name)
			prefix := c.dtype + "/" + c.name + "/"
			if c.capturable {
				prefix += "capturable/"
			}
			largest[i] = c.compare(t, f, p, prefix, c.sameRunTolerance(device))
		})
		if largest[i].share == 0 {
			equal++
		}
	}
	t.Logf("%d of %d cases equal PyTorch's to the last bit; the largest difference is %.2g of its bound",
		equal, len(cases), slices.MaxFunc(largest, bySize).share)
	if t.Failed() {
		t.Log("\n" + differenceTable(cases, largest, device))
	}
}

// stepsOfPyTorch runs make_parity.py on the device, with the Python that TORCHSTREAM_PYTHON names,
// or python3. Without PyTorch, of LibTorch's version and with the device, it skips the test.
func stepsOfPyTorch(t *testing.T, device cuda.Device) file {
	t.Helper()
	program := python()
	path := filepath.Join(t.TempDir(), "steps.pt")
	out, err := exec.Command(program, filepath.Join("testdata", "make_parity.py"), "--device",
		device.String(), "--out", path).CombinedOutput()
	const skip = 77 // make_parity.py's exit status if PyTorch does not fit
	var exit *exec.ExitError
	if errors.Is(err, exec.ErrNotFound) || errors.As(err, &exit) && exit.ExitCode() == skip {
		t.Skipf("%s has no PyTorch for %v: set TORCHSTREAM_PYTHON to a Python that has: %v %.200s", program,
			device, err, out)
	}
	if err != nil {
		t.Fatalf("%s testdata/make_parity.py: %v, want no error\n%s", program, err, out)
	}
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if version := c.Metadata()["torch"]; version != capi.LibTorchVersion() {
		t.Skipf("%s has PyTorch %s, not %s: set TORCHSTREAM_PYTHON to a Python that has", program, version,
			capi.LibTorchVersion())
	}
	return file{c: c}
}

// wellConditioned reports whether make_parity.py lists a case by this name, with the reasons.
func wellConditioned(name string) bool {
	return strings.HasPrefix(name, "muon") || name == "rmsprop-momentum"
}

// sameRunTolerance is the bound for a case that runs on PyTorch's device. The learning rates have
// the same dtype as PyTorch's, so only bfloat16 depends on the operators.
func (c parityCase) sameRunTolerance(device cuda.Device) float64 {
	return tolerance(c.name, c.dtype, c.dtype == "bfloat16" && !c.sameOperators(device))
}

// sameOperators reports whether the optimizer calls the operators that make_parity.py chooses.
func (c parityCase) sameOperators(device cuda.Device) bool {
	onCPU := device == cuda.CPU
	kind, _, _ := strings.Cut(c.name, "-")
	switch kind {
	case "sgd": // on a CPU, LibTorch has no fused operator for 16 bits
		return !c.capturable || !onCPU || c.dtype != "bfloat16"
	case "rmsprop": // PyTorch divides the divisor of the update by the rate, and without Capturable multiplies by it
		momentum := c.name == "rmsprop-momentum" || c.name == "rmsprop-both"
		return !c.capturable || !onCPU && momentum
	case "adagrad": // PyTorch has no fused Adagrad for a GPU
		return onCPU
	case "lamb", "muon": // make_parity.py's formula, and PyTorch multiplies single matrices
		return false
	}
	return true // adam, adamw
}

// differenceTable lists the largest difference of every case, in descending order.
func differenceTable(cases []parityCase, largest []difference, device cuda.Device) string {
	order := make([]int, len(cases))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return bySize(largest[b], largest[a]) })
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "case\tof bound\tbound\tvalue\tours\tPyTorch's")
	for _, i := range order {
		d := largest[i]
		fmt.Fprintf(w, "%v\t%.3g\t%.0e\t%s\t%.10g\t%.10g\n", cases[i], d.share,
			cases[i].sameRunTolerance(device), d.what, d.got, d.want)
	}
	w.Flush()
	return text.String()
}

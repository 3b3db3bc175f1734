package cudatest

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// brokenVariable makes this program one whose kernel fails.
const brokenVariable = "CUDATEST_TEST_BROKEN"

// A kernel that fails breaks CUDA for its process, so it runs in a copy of this program. There
// every call of the test succeeds, and Stream finds the error at the end of the test.
func TestStreamFailsATestWhoseWorkFailed(t *testing.T) {
	gpu := RequireGPUs(t, 1)[0]
	if os.Getenv(brokenVariable) == "" {
		c := exec.Command(os.Args[0], "-test.run=^TestStreamFailsATestWhoseWorkFailed$", "-test.count=1", "-test.v")
		c.Env = append(os.Environ(), brokenVariable+"=1")
		text, err := c.CombinedOutput()
		if err == nil || !strings.Contains(string(text), "every call succeeded") ||
			!strings.Contains(string(text), "work on the test's stream") {
			t.Errorf("%v: the output does not say that the work failed:\n%s", err, text)
		}
		return
	}
	x := ones(t, gpu)
	index, err := torch.Full(gpu, torch.Int64, 1_000_000, 1) // only the kernel sees that x has no such row
	if err != nil {
		t.Fatal(err)
	}
	if err := gpu.Synchronize(); err != nil {
		t.Fatal(err)
	}
	s := Stream(t, gpu)
	if err := cuda.WithStream(s, func() error { return x.IndexSelect(0, index).Err() }); err != nil {
		t.Fatal(err)
	}
	t.Log("every call succeeded")
}

package cudatest

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// mainVariable makes this program one whose tests are run by Main: "race" or "ordered".
const mainVariable = "CUDATEST_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(mainVariable) != "" {
		os.Exit(Main(m))
	}
	os.Exit(m.Run())
}

// Two streams write to a tensor. Without an order between them all tests pass, and Main reports the
// sanitizer's finding.
func TestMainFailsAfterAFinding(t *testing.T) {
	gpu := RequireGPUs(t, 1)[0]
	mode := os.Getenv(mainVariable)
	if mode == "" {
		for mode, want := range map[string]int{"race": 66, "ordered": 0} {
			c := exec.Command(os.Args[0], "-test.run=^TestMainFailsAfterAFinding$", "-test.count=1", "-test.v")
			c.Env = append(os.Environ(), mainVariable+"="+mode, "TORCHSTREAM_SANITIZE=1",
				"TORCHSTREAM_SANITIZE_IGNORE=",
				"TORCHSTREAM_SANITIZE_DIR="+t.TempDir())
			text, err := c.CombinedOutput()
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				t.Fatal(err)
			}
			if got := c.ProcessState.ExitCode(); got != want || !strings.Contains(string(text), "--- PASS") {
				t.Errorf("%s: exit status %d, want %d:\n%s", mode, got, want, text)
			}
		}
		return
	}
	a, b := Stream(t, gpu), Stream(t, gpu)
	x, err := torch.Zeros(gpu, torch.Float32, 1000)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	fill := func(s cuda.Stream) {
		if err := cuda.WithStream(s, func() error { return x.Fill_(1).Err() }); err != nil {
			t.Fatal(err)
		}
	}
	// This wait comes before the first write. The sanitizer must not let it order the two writes.
	if err := gpu.Synchronize(); err != nil {
		t.Fatal(err)
	}
	fill(a)
	if mode == "ordered" {
		if err := b.Wait(a); err != nil {
			t.Fatal(err)
		}
	}
	fill(b)
	if err := gpu.Synchronize(); err != nil {
		t.Fatal(err)
	}
}

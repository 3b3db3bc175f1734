package cudatest

import (
	"errors"
	"os"
	"strconv"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// RequireVariable is the environment variable with the number of GPUs that the machine must have.
const RequireVariable = "TORCHSTREAM_REQUIRE_GPUS"

// RequireGPUs returns the first n GPUs. On a machine with fewer it skips the test, or fails it if
// [RequireVariable] is n or more. A value that is not a number fails the test, and so does a shim
// that is missing or cannot be loaded. A program that was built for another system than Linux, or
// without cgo, has no GPUs. n must be at least 1.
func RequireGPUs(t testing.TB, n int) []cuda.Device {
	t.Helper()
	if err := capi.Check(); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		t.Fatal(err)
	}
	return requireGPUs(t, n, cuda.DeviceCount(), os.Getenv(RequireVariable))
}

// RequireLibrary skips the test if the program cannot call LibTorch, because it was built for
// another system than Linux, or without cgo. A shim that is missing or cannot be loaded fails the
// test.
func RequireLibrary(t testing.TB) {
	t.Helper()
	switch err := capi.Check(); {
	case errors.Is(err, errors.ErrUnsupported):
		t.Skip(err)
	case err != nil:
		t.Fatal(err)
	}
}

func requireGPUs(t testing.TB, n, have int, promised string) []cuda.Device {
	t.Helper()
	if n < 1 {
		t.Fatalf("cudatest.RequireGPUs: %d GPUs: ask for 1 or more", n)
	}
	if have < n {
		if promised != "" {
			switch must, err := strconv.Atoi(promised); {
			case err != nil || must < 0:
				t.Fatalf("%s is %q: set it to the number of GPUs that this machine must have",
					RequireVariable, promised)
			case must >= n:
				t.Fatalf("needs %d GPU(s), this machine has %d usable, and %s=%d promises more: see torchstream doctor",
					n, have, RequireVariable, must)
			}
		}
		t.Skipf("needs %d GPU(s), this machine has %d usable", n, have)
	}
	gpus := make([]cuda.Device, n)
	for i := range gpus {
		gpus[i] = cuda.Device(i)
	}
	return gpus
}

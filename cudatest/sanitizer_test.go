package cudatest

import (
	"errors"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// A sanitizer runs from the call to the end of the test. Only one runs at a time.
func TestStartSanitizerUntilTheEndOfTheTest(t *testing.T) {
	if cuda.RunningSanitizer() != nil {
		t.Skip("the environment has started a sanitizer")
	}
	for _, start := range []func(t testing.TB){NoFindings, func(t testing.TB) { StartSanitizer(t) }} {
		inner(t, func(t testing.TB) {
			start(t)
			if cuda.RunningSanitizer() == nil {
				t.Error("RunningSanitizer() = nil, want the test's sanitizer")
			}
			second := inner(t.(*record).TB.(*testing.T), start)
			if !second.skipped || second.failed {
				t.Errorf("a second sanitizer: %s", second.text())
			}
		}).mustPass(t)
		if got := cuda.RunningSanitizer(); got != nil {
			t.Errorf("RunningSanitizer() after its test = %v, want nil", got)
		}
	}
}

// If a stream reads memory without waiting for the stream that writes it, the test fails, also on a
// device that computes nothing. With the wait the test passes.
func TestNoFindingsReportsARace(t *testing.T) {
	gpu := RequireGPUs(t, 1)[0]
	if cuda.RunningSanitizer() != nil {
		t.Skip("the environment has started a sanitizer")
	}
	program := func(wait bool) func(t testing.TB) {
		return func(t testing.TB) {
			NoFindings(t)
			writes, reads := Stream(t, gpu), Stream(t, gpu)
			x, err := torch.Zeros(gpu, torch.Float32, 4)
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			err = errors.Join(gpu.Synchronize(), cuda.WithStream(writes, func() error { return x.AddScalar_(1).Err() }))
			if wait {
				err = errors.Join(err, reads.Wait(writes))
			}
			err = errors.Join(err, cuda.WithStream(reads, func() error { return x.AddScalar_(1).Err() }),
				gpu.Synchronize())
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	inner(t, program(false)).mustFail(t, "found in a correct program", "sanitizer_test.go")
	inner(t, program(true)).mustPass(t)
}

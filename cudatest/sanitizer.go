package cudatest

import (
	"testing"

	"github.com/torchstream/torchstream/cuda"
)

// StartSanitizer starts the stream sanitizer, and stops it at the end of the test if the test does
// not. It skips the test while a sanitizer runs: a process has only one, and a sanitizer that the
// environment has started (TORCHSTREAM_SANITIZE=1) is for the other tests. It sees the whole
// process, so such tests must not run in parallel with others.
func StartSanitizer(t testing.TB) *cuda.Sanitizer {
	t.Helper()
	if cuda.RunningSanitizer() != nil {
		t.Skipf("a stream sanitizer runs already, and a process has one")
	}
	s, err := cuda.StartSanitizer(cuda.SanitizerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// NoFindings starts the stream sanitizer as [StartSanitizer] does. It fails the test if the
// sanitizer has found anything worse than notes. It looks at the end of the test, after the
// cleanups that the test has added after this call.
func NoFindings(t testing.TB) {
	t.Helper()
	s := StartSanitizer(t)
	t.Cleanup(func() {
		t.Helper()
		for _, f := range s.Findings() {
			if !f.Kind.Note() {
				t.Errorf("found in a correct program:\n%v", &f)
			}
		}
	})
}

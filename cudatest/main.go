package cudatest

import (
	"fmt"
	"os"
	"testing"

	"github.com/torchstream/torchstream/cuda"
)

// Main runs the tests, and returns the exit status for os.Exit. The status is 66 if the tests pass
// and the stream sanitizer that the environment has started (TORCHSTREAM_SANITIZE=1) found an
// error, so that go test fails:
//
//	func TestMain(m *testing.M) { os.Exit(cudatest.Main(m)) }
func Main(m *testing.M) int {
	code := m.Run()
	if s := cuda.RunningSanitizer(); code == 0 && s.Errors() > 0 {
		fmt.Fprintf(os.Stderr, "the stream sanitizer has %d findings\n", s.Errors())
		return 66
	}
	return code
}

package optim_test

import (
	"os"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/settle"
	"github.com/torchstream/torchstream/torch"
)

func TestMain(m *testing.M) { os.Exit(cudatest.Main(m)) }

// settled waits until the garbage collector has freed the tensors of earlier tests, and returns the
// number of references.
func settled(t testing.TB) int64 {
	t.Helper()
	return settle.Wait(t, torch.LiveTensors)
}

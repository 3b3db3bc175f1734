package checkpoint_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

func TestMain(m *testing.M) {
	if err := torch.SetNumThreads(1); err != nil { // the tensors here are tiny
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(cudatest.Main(m))
}

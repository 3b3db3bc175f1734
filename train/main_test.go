package train_test

import (
	"os"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
)

func TestMain(m *testing.M) { os.Exit(cudatest.Main(m)) }

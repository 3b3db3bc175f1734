package cudatest_test

import (
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// TestHandover is an example of another module's test: one stream hands its work to another.
func TestHandover(t *testing.T) {
	cudatest.NoLeaks(t)
	gpu := cudatest.RequireGPUs(t, 1)[0]
	writer, reader := cudatest.Stream(t, gpu), cudatest.Stream(t, gpu)
	x, err := torch.Zeros(gpu, torch.Float32, 1000)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	y, err := torch.Zeros(gpu, torch.Float32, 1000)
	if err != nil {
		t.Fatal(err)
	}
	defer y.Close()
	cudatest.Poison(t, x, y)
	if err := gpu.Synchronize(); err != nil {
		t.Fatal(err)
	}

	// The writer is late. Without the Wait the reader would copy the poison.
	cudatest.Delay(t, writer, 20*time.Millisecond)
	if err := cuda.WithStream(writer, func() error { return x.Fill_(1).Err() }); err != nil {
		t.Fatal(err)
	}
	if err := reader.Wait(writer); err != nil {
		t.Fatal(err)
	}
	if err := cuda.WithStream(reader, func() error { return y.Copy_(x).Err() }); err != nil {
		t.Fatal(err)
	}
	if err := reader.Synchronize(); err != nil {
		t.Fatal(err)
	}
	cudatest.Equal(t, y, x, cudatest.Tolerance{Exact: true})
}

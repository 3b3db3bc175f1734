package train_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// badWay is the name of the job that trains on an archive with bad samples.
const badWay = "bad samples"

// damage writes an archive in which image n is unreadable if bad(n) is true.
func damage(t *testing.T, path string, bad func(n int) bool) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	r := tar.NewReader(bytes.NewReader(data))
	for n := 0; ; n++ {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if bad(n) {
			content = []byte("no image")
		}
		h.Size = int64(len(content))
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "damaged.tar")
	if err := os.WriteFile(to, out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return to
}

// trainOnBadSamples trains for two epochs and prints the number of batches and a digest of the
// weights.
func trainOnBadSamples(t *testing.T, world *distributed.Group) {
	loader, err := imageloader.Open(os.Getenv(jobPath),
		imageloader.Options{BatchSize: 4, Transform: imageloader.Eval(8, 8),
			BadSamples: imageloader.Skip, Rank: world.Rank(), World: world.Size(), NoIndex: true})
	if err != nil {
		t.Fatal(err)
	}
	defer loader.Close()
	if err := train.CheckRanks(world, loader); err != nil {
		t.Fatal(err)
	}
	feed, err := prefetcher.New(loader, prefetcher.Options{Device: world.Device()})
	if err != nil {
		t.Fatal(err)
	}
	defer feed.Close()
	if err := torch.ManualSeed(7); err != nil {
		t.Fatal(err)
	}
	net := nn.NewSequential(nn.NewFlatten(), nn.NewLinear(3*8*8, classes, nn.LinearOptions{}))
	defer nn.Close(net)
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.01})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	parallel, err := distributed.NewDataParallel(world, net, distributed.DataParallelOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer parallel.Close()
	batches := 0
	for epoch := range 2 {
		for batch, err := range feed.Epoch(t.Context(), epoch) {
			if err != nil {
				t.Fatal(err)
			}
			if err := parallel.Backward(net.Forward(batch.Images).CrossEntropy(batch.Labels)); err != nil {
				t.Fatal(err)
			}
			if err := opt.Step(); err != nil {
				t.Fatal(err)
			}
			batches++
		}
	}
	fmt.Println("batches", batches, "weights", digest(t, nn.State(net)...))
}

// A job ends normally even if some ranks have more bad samples than others and the ranks cannot
// divide the samples evenly. All ranks get the same number of batches and the same weights. If a
// rank has no good sample, every rank ends with an error that names that rank.
func TestJobWithBadSamples(t *testing.T) {
	whole := archive(t)
	for name, c := range map[string]struct {
		bad   func(n int) bool
		empty string // the rank without a good sample
	}{
		"one":              {func(n int) bool { return n == 5 }, ""},
		"half of rank 1's": {func(n int) bool { return n%6 == 1 }, ""},
		"the last ones":    {func(n int) bool { return n > classes*perC*2/3 }, ""},
		"all of rank 1":    {func(n int) bool { return n%3 == 1 }, "rank 1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := damage(t, whole, c.bad)
			if c.empty == "" {
				said := startJob(t, 3, badWay, path, 0)
				for rank, text := range said {
					if got, want := line(t, text, "batches"), line(t, said[0], "batches"); got != want ||
						strings.HasPrefix(got, "batches 0 ") {
						t.Errorf("rank %d says %q, and rank 0 %q", rank, got, want)
					}
				}
				return
			}
			said, errs := runJob(t, 3, badWay, path, 0)
			for rank, text := range said {
				if errs[rank] == nil || !strings.Contains(text, c.empty+" of 3 can't fill its batches") &&
					!strings.Contains(text, c.empty+" (pid ") {
					t.Errorf("rank %d: %v\n%s", rank, errs[rank], text)
				}
			}
		})
	}
}

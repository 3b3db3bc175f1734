package dist

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// torchrun serves the store in its own process, and keeps it when it restarts the ranks.
func TestStoreOfALauncher(t *testing.T) {
	port := freePort(t)
	store, err := capi.ConnectStore("127.0.0.1", port, true, "", patience)
	if err != nil {
		t.Fatal(err)
	}
	defer capi.FreeStore(store)
	for attempt := range 2 {
		errs := make([]error, 2)
		var all sync.WaitGroup
		for rank := range errs {
			all.Go(func() {
				o := quick
				o.CPU = true
				o.Environment = &Environment{Launcher: "torchrun", Rank: rank, Size: 2, LocalRank: rank, LocalSize: 2, Address: "127.0.0.1", Port: port,
					AgentStore: true, Attempt: attempt}
				g, err := Init(t.Context(), o)
				if err == nil {
					err = exercise(g, cuda.CPU)
				}
				if err == nil {
					err = g.Close()
				}
				errs[rank] = err
			})
		}
		all.Wait()
		requireNone(t, errs)
	}
}

func init() {
	workers["torchrun"] = func(ctx context.Context) error {
		g, err := Init(ctx, patient)
		if err != nil {
			return err
		}
		if err := exercise(g, cuda.CPU); err != nil {
			return err
		}
		return g.Close()
	}
}

// The test needs a Python that has torch: the wheels of the shim's LibTorch are for another version
// of Python than most machines have.
func TestTorchrunLaunches(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3")
	}
	if out, err := exec.Command(python, "-c", "import torch.distributed.run").CombinedOutput(); err != nil {
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		t.Skipf("needs a python3 with torch: %s", lines[len(lines)-1])
	}
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	run := exec.CommandContext(ctx, python, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "--no-python", os.Args[0])
	run.Env = append(os.Environ(), workerVariable+"=torchrun")
	if out, err := run.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

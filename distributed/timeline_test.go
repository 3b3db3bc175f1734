//go:build linux

package distributed_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/trace"
)

func init() { distributed.AddWorker("record a straggler", recordAStraggler) }

// recordAStraggler records collectives that rank 1 enters late. Before each collective, the other
// ranks tell rank 1 through a pipe that they are about to enter, and rank 1 waits for that.
func recordAStraggler(ctx context.Context) error {
	world, err := distributed.Init(ctx, distributed.Options{CPU: true})
	if err != nil {
		return err
	}
	others, err := os.OpenFile(os.Getenv(pathVariable), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer others.Close()
	rec, err := trace.Start(trace.Options{})
	if err != nil {
		return err
	}
	x, err := torch.Ones(cuda.CPU, torch.Float32, 1000)
	if err != nil {
		return err
	}
	for range 8 { // the group's thread may end the last collective's record after Stop, so there are several collectives
		if world.Rank() == 1 {
			if _, err := io.ReadFull(others, make([]byte, world.Size()-1)); err != nil {
				return err
			}
			work(1 << 17) // tens of milliseconds
		} else if _, err := others.Write([]byte{0}); err != nil {
			return err
		}
		if err := world.AllReduce(x, distributed.Average); err != nil {
			return err
		}
	}
	tr, err := rec.Stop()
	if err != nil {
		return err
	}
	offset, _, err := distributed.ClockOffset(world)
	if err != nil {
		return err
	}
	tr.Begin = tr.Begin.Add(offset)
	all, err := distributed.AllGatherObject(world, tr)
	if err != nil {
		return err
	}
	waits := trace.Ranks(all).Waits()
	if rank, share := trace.Ranks(all).Straggler(); rank != 1 {
		return fmt.Errorf("rank %d is the straggler with %v: %+v", rank, share, waits)
	}
	if len(trace.Ranks(all).Collectives()) < 5 {
		return fmt.Errorf("%d collectives", len(trace.Ranks(all).Collectives()))
	}
	fmt.Printf("%+v\n", waits)
	return errors.Join(x.Close(), world.Close())
}

// The recordings of all ranks name the rank that the others wait for.
func TestTimelineNamesTheStraggler(t *testing.T) {
	path := filepath.Join(t.TempDir(), "others")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	distributed.RequireSuccess(t, distributed.LaunchJob(t, 3, "record a straggler", pathVariable+"="+path))
}

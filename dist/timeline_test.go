package dist_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/dist"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/trace"
)

func init() { dist.AddWorker("record a straggler", recordAStraggler) }

// recordAStraggler records collectives to which rank 1 comes late.
func recordAStraggler(ctx context.Context) error {
	world, err := dist.Init(ctx, dist.Options{CPU: true})
	if err != nil {
		return err
	}
	rec, err := trace.Start(trace.Options{})
	if err != nil {
		return err
	}
	x, err := torch.Ones(cuda.CPU, torch.Float32, 1000)
	if err != nil {
		return err
	}
	for range 6 { // the group's thread may end the record of the last one after Stop
		if world.Rank() == 1 {
			work(1 << 17) // tens of milliseconds
		}
		if err := world.AllReduce(x, dist.Average); err != nil {
			return err
		}
	}
	tr, err := rec.Stop()
	if err != nil {
		return err
	}
	offset, _, err := dist.ClockOffset(world)
	if err != nil {
		return err
	}
	tr.Begin = tr.Begin.Add(offset)
	all, err := dist.AllGatherObject(world, tr)
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

// The recordings of all ranks name the one that the others wait for.
func TestTimelineNamesTheStraggler(t *testing.T) {
	for rank, p := range dist.LaunchJob(t, 3, "record a straggler") {
		<-p.Ended()
		if !p.ProcessState.Success() {
			t.Errorf("rank %d: %s", rank, p.Text())
		}
	}
}

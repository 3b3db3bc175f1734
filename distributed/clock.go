package distributed

import (
	"errors"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// clockRounds is the number of times that each rank asks rank 0 for the time.
const clockRounds = 16

// ClockOffset measures the offset from this rank's clock to the clock of the group's rank 0. Add
// offset to a local time to get rank 0's time. The uncertainty is half of the shortest round trip.
// ClockOffset is a collective, and blocks. Host clocks drift apart by up to about a millisecond a
// minute, so measure the offset close to the times that you compare. trace.Ranks uses the offset to
// put recordings on one clock.
func ClockOffset(g *Group) (offset, uncertainty time.Duration, err error) {
	now, err := torch.Zeros(cuda.CPU, torch.Int64, 1)
	if err != nil {
		return 0, 0, err
	}
	defer now.Close()
	for rank := 1; rank < g.Size(); rank++ {
		for round := range clockRounds {
			switch g.Rank() {
			case 0:
				err = answerTime(g, now, rank)
			case rank:
				var off, far time.Duration
				if off, far, err = askTime(g, now); round == 0 || far < uncertainty {
					offset, uncertainty = off, far
				}
			}
			if err != nil {
				return 0, 0, err
			}
		}
	}
	return offset, uncertainty, g.Barrier()
}

// askTime asks rank 0 for its time once.
func askTime(g *Group, now *torch.Tensor) (offset, uncertainty time.Duration, err error) {
	asked := time.Now()
	if err := g.Send(now, 0); err != nil {
		return 0, 0, err // rank 0 got no question, so it will send no answer
	}
	if err := g.Receive(now, 0); err != nil {
		return 0, 0, err
	}
	took := time.Since(asked)
	theirs, err := now.Int64()
	return time.Duration(theirs - asked.UnixNano() - int64(took/2)), took / 2, err
}

// answerTime tells a rank the time once.
func answerTime(g *Group, now *torch.Tensor, rank int) error {
	if err := g.Receive(now, rank); err != nil {
		return err
	}
	t, err := torch.FromInt64s([]int64{time.Now().UnixNano()}, 1)
	if err != nil {
		return err
	}
	return errors.Join(g.Send(t, rank), t.Close())
}

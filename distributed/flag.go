package distributed

import (
	"errors"
	"sync/atomic"

	"github.com/torchstream/torchstream/torch"
)

// Flag can be raised on any rank at any time. All ranks see the raised flag after the same step. A
// signal to one rank can thus stop training on all ranks after the same batch, with a checkpoint.
//
//	terminated := make(chan os.Signal, 1)
//	signal.Notify(terminated, syscall.SIGTERM)
//	flag := distributed.NewFlag(world)
//	defer flag.Close()
//	go func() {
//		<-terminated
//		flag.Raise()
//	}()
//	for ... {
//		// a training step
//		if up, err := flag.Sync(); err != nil || up {
//			return errors.Join(err, save()) // on every rank, after the same step
//		}
//	}
type Flag struct {
	g      *Group
	raised atomic.Bool
	up     bool
	state  *torch.Tensor // reduced by the previous Sync
	work   *Work
}

// NewFlag returns a flag of the group's ranks. The caller closes it before the group.
func NewFlag(g *Group) *Flag { return &Flag{g: g} }

// Raise raises the flag. Any goroutine may call it, any number of times. A C signal handler must
// not call it.
func (f *Flag) Raise() { f.raised.Store(true) }

// Sync reports whether any rank raised the flag before its previous call of Sync. All ranks thus
// see a raised flag one Sync later. All ranks must call Sync equally often, and in the same place
// among their collectives. All ranks get the same result. A raised flag stays raised. Sync starts
// an all-reduce of one number on the CPU, and waits for the all-reduce that the previous Sync
// started, which ran during the step between the two calls. Sync does not wait for the GPU. It
// returns the same errors as a collective.
func (f *Flag) Sync() (bool, error) {
	if f.up {
		return true, nil
	}
	if f.work != nil {
		err := f.work.Wait()
		var values []int64
		if err == nil {
			values, err = f.state.Int64s()
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return false, err
		}
		if f.up = values[0] > 0; f.up {
			return true, nil
		}
	}
	var mine int64
	if f.raised.Load() {
		mine = 1
	}
	state, err := torch.FromInt64s([]int64{mine}, 1)
	if err != nil {
		return false, err
	}
	work, err := f.g.AllReduceAsync(state, Max)
	if err != nil {
		return false, errors.Join(err, state.Close())
	}
	f.state, f.work = state, work
	return false, nil
}

// Close waits for the all-reduce that the last Sync started, and frees it. The goroutine that
// calls Sync must also call Close.
func (f *Flag) Close() error {
	if f.work == nil {
		return nil
	}
	err := errors.Join(f.work.Close(), f.state.Close())
	f.work, f.state = nil, nil
	return err
}

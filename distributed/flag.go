package distributed

import (
	"errors"
	"sync/atomic"

	"github.com/torchstream/torchstream/torch"
)

// Flag is raised on any rank at any moment, and seen by all ranks after the same step: a signal
// that one rank gets can so end a training on all ranks behind the same batch, with a checkpoint.
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
	state  *torch.Tensor // of the Sync before
	work   *Work
}

// NewFlag returns a flag of the group's ranks. The caller closes it before the group.
func NewFlag(g *Group) *Flag { return &Flag{g: g} }

// Raise raises the flag. It may be called on any goroutine, any number of times, and not in a
// handler of C signals.
func (f *Flag) Raise() { f.raised.Store(true) }

// Sync reports whether the flag was raised on any rank before that rank's previous Sync. It returns
// the same on all ranks, which call it equally often, in the same order as their collectives; a
// flag that is up stays up. Sync starts an all-reduce of one number over the CPU and waits for that
// of the previous call, which a step has hidden. It does not wait for the GPU. Its errors are those
// of a collective.
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

// Close frees what the last Sync has started, and waits for it. It is called on the goroutine of
// Sync.
func (f *Flag) Close() error {
	if f.work == nil {
		return nil
	}
	err := errors.Join(f.work.Close(), f.state.Close())
	f.work, f.state = nil, nil
	return err
}

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/torch"
)

// experiment holds the tensors and the streams. The computation runs on the default streams.
type experiment struct {
	workload
	sender, receiver cuda.Device
	a, b, dst        *torch.Tensor  // a is copied to dst; b is the receiver's operand
	side             [2]cuda.Stream // side streams of the sender and of the receiver
	toClose          []func() error // called in reverse order
}

func newExperiment(sender, receiver cuda.Device, w workload) (_ *experiment, err error) {
	e := &experiment{workload: w, sender: sender, receiver: receiver}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	n := int64(w.MiB) << 18
	for _, t := range []struct {
		to    **torch.Tensor
		on    cuda.Device
		value float64
	}{{&e.a, sender, 1}, {&e.b, receiver, 1}, {&e.dst, receiver, 0}} {
		if *t.to, err = torch.Full(t.on, torch.Float32, t.value, n); err != nil {
			return nil, err
		}
		e.toClose = append(e.toClose, (*t.to).Close)
	}
	for i, d := range []cuda.Device{sender, receiver} {
		own, err := cuda.NewOwnedStream(d, cuda.StreamOptions{})
		if err != nil {
			return nil, err
		}
		e.side[i] = own.Stream
		e.toClose = append(e.toClose, own.Close)
	}
	return e, e.synchronize()
}

func (e *experiment) close() error {
	errs := []error{e.synchronize()}
	for i := len(e.toClose) - 1; i >= 0; i-- {
		errs = append(errs, e.toClose[i]())
	}
	return errors.Join(errs...)
}

func (e *experiment) synchronize() error {
	return errors.Join(e.sender.Synchronize(), e.receiver.Synchronize())
}

// streams returns the copy's streams on the sender and on the receiver.
func (e *experiment) streams(senderSide, receiverSide bool) (from, to cuda.Stream) {
	from, to = cuda.DefaultStream(e.sender), cuda.DefaultStream(e.receiver)
	if senderSide {
		from = e.side[0]
	}
	if receiverSide {
		to = e.side[1]
	}
	return from, to
}

func (e *experiment) copyPeer(from, to cuda.Stream) error {
	for range e.Copies {
		if err := torch.CopyPeer([]*torch.Tensor{e.dst}, to, []*torch.Tensor{e.a}, from); err != nil {
			return err
		}
	}
	return nil
}

func (e *experiment) copyFrom(from, to cuda.Stream, o torch.CopyOptions) error {
	return cuda.WithStreams([]cuda.Stream{from, to}, func() error {
		for range e.Copies {
			if err := e.dst.CopyFrom(e.a, o); err != nil {
				return err
			}
		}
		return nil
	})
}

// compute multiplies on the default streams of the operands' devices. The kernels are bound by
// memory, like most kernels of a network.
func (e *experiment) compute(operands ...*torch.Tensor) error {
	for _, x := range operands {
		for range e.Products {
			scope := torch.NewScope("product")
			x := x.In(scope)
			err := x.Mul(x).Mul(x).Mul(x).Err()
			scope.Close()
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// median returns the median time of fn in milliseconds. A time starts with idle devices and ends
// when both are idle again.
func (e *experiment) median(ctx context.Context, fn func() error) (float64, error) {
	const warm = 3
	var took []float64
	for round := range warm + e.Rounds {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		if err := e.synchronize(); err != nil {
			return 0, err
		}
		start := time.Now()
		if err := errors.Join(fn(), e.synchronize()); err != nil {
			return 0, err
		}
		if round >= warm {
			took = append(took, float64(time.Since(start))/float64(time.Millisecond))
		}
	}
	return lesson.Median(took), nil
}

func (e *experiment) measure(ctx context.Context) (*report, error) {
	r := &report{Workload: e.workload}
	var err error
	if r.GPU, err = device(e.sender); err != nil {
		return nil, err
	}
	if r.Direct, err = e.sender.CanAccessPeer(e.receiver); err != nil {
		return nil, err
	}
	// This is LibTorch's own copy, with no other work.
	raw, err := e.median(ctx,
		func() error { return e.copyFrom(e.side[0], e.side[1], torch.CopyOptions{NonBlocking: true}) })
	if err != nil {
		return nil, err
	}
	r.Raw = e.bytes() / raw / 1e6
	if r.Copy, err = e.median(ctx, func() error { return e.copyPeer(e.side[0], e.side[1]) }); err != nil {
		return nil, err
	}
	r.Link = e.bytes() / r.Copy / 1e6
	r.OfRaw = r.Link / r.Raw
	if err := e.verify(); err != nil {
		return nil, err
	}
	for _, c := range []struct {
		on       string
		operands []*torch.Tensor
	}{{"receiver", []*torch.Tensor{e.b}}, {"both", []*torch.Tensor{e.a, e.b}}} {
		computes := compute{On: c.on}
		if computes.Alone, err = e.median(ctx, func() error { return e.compute(c.operands...) }); err != nil {
			return nil, err
		}
		for _, sides := range [][2]bool{{false, false}, {false, true}, {true, false}, {true, true}} {
			from, to := e.streams(sides[0], sides[1])
			one := choice{Sender: sides[0], Receiver: sides[1]}
			for figure, copies := range map[*float64]func() error{
				&one.CopyPeer:    func() error { return e.copyPeer(from, to) },
				&one.Blocking:    func() error { return e.copyFrom(from, to, torch.CopyOptions{}) },
				&one.NonBlocking: func() error { return e.copyFrom(from, to, torch.CopyOptions{NonBlocking: true}) },
			} {
				if *figure, err = e.median(ctx,
					func() error { return errors.Join(copies(), e.compute(c.operands...)) }); err != nil {
					return nil, err
				}
			}
			one.Hidden = hidden(r.Copy, computes.Alone, one.CopyPeer)
			computes.Choices = append(computes.Choices, one)
		}
		r.Computes = append(r.Computes, computes)
	}
	return r, nil
}

// verify checks that the values were copied correctly.
func (e *experiment) verify() error {
	scope := torch.NewScope("verify")
	defer scope.Close()
	got := e.dst.In(scope)
	lowest, err := got.Min().Float64()
	if err != nil {
		return err
	}
	highest, err := got.Max().Float64()
	if err != nil {
		return err
	}
	if lowest != 1 || highest != 1 {
		return fmt.Errorf("the copy arrived with values from %v to %v instead of 1", lowest, highest)
	}
	return nil
}

// both runs the two combinations that the timeline shows.
func (e *experiment) both() error {
	for _, side := range []bool{false, true} {
		end := cuda.Range("sender " + name(side) + ", receiver " + name(side))
		from, to := e.streams(side, side)
		err := errors.Join(e.copyPeer(from, to), e.compute(e.a, e.b), e.synchronize())
		end()
		if err != nil {
			return err
		}
	}
	return nil
}

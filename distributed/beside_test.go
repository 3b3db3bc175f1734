//go:build linux

package distributed

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

func init() { workers["barrier beside"] = barrierBesideForEver }

// Barriers of BarrierBeside are not ordered with collectives: one rank enters its barriers before
// its collectives, and another rank after them.
func TestBarrierBesideIsNotOrderedWithCollectives(t *testing.T) {
	var arrived atomic.Int32
	requireNone(t, inProcess(t, 3, quick, func(g *Group) error {
		met := make(chan error, 1)
		beside := func() error {
			for range 5 {
				arrived.Add(1)
				if err := g.BarrierBeside("files"); err != nil {
					return err
				}
				if n := arrived.Load(); n < 3 {
					return fmt.Errorf("the barrier ended when %d ranks had come", n)
				}
			}
			return nil
		}
		collectives := func() error {
			x := full(cuda.CPU, torch.Float32, 1, 100)
			defer x.Close()
			var errs []error
			for range 5 {
				errs = append(errs, g.AllReduce(x, Average), g.Barrier())
			}
			return errors.Join(errs...)
		}
		switch g.Rank() {
		case 0:
			go func() { met <- beside() }()
			return errors.Join(collectives(), <-met)
		case 1:
			err := collectives()
			return errors.Join(err, beside())
		}
		go func() { met <- collectives() }()
		return errors.Join(beside(), <-met)
	}))
}

// A reserved barrier pairs with the barrier of the same sequence number on other ranks, in whatever
// order the goroutines enter the barriers. It ends only when all ranks have entered it.
func TestReservedBarriersKeepTheirPlaces(t *testing.T) {
	const rounds = 20
	var arrived [rounds][2]atomic.Int32
	requireNone(t, inProcess(t, 2, quick, func(g *Group) error {
		met := make(chan error, 2)
		for round := range rounds {
			barriers := [2]func() error{g.ReserveBeside("files"), g.ReserveBeside("files")}
			come := func(i int) {
				arrived[round][i].Add(1)
				err := barriers[i]()
				if n := arrived[round][i].Load(); err == nil && n < 2 {
					err = fmt.Errorf("round %d: barrier %d ended when %d ranks had come", round, i, n)
				}
				met <- err
			}
			first := g.Rank()
			go come(first)
			if err := g.Barrier(); err != nil { // by now the first barriers have most likely been entered
				return err
			}
			go come(1 - first)
			if err := errors.Join(<-met, <-met); err != nil {
				return err
			}
		}
		return nil
	}))
}

// The error of BarrierBeside names the late rank and the barrier.
func TestBarrierBesideNamesTheLateRank(t *testing.T) {
	errs := inProcess(t, 2, quick, func(g *Group) error {
		if g.Rank() == 1 {
			<-g.job.member.Failed()
			return nil
		}
		g.job.o.Timeout = 50 * time.Millisecond // only for the barrier, not for Init
		return g.BarrierBeside("files")
	})
	var e *Error
	if !errors.As(errs[0], &e) || e.Culprit != 1 || !errors.Is(e, ErrTimeout) ||
		!strings.Contains(e.Error(), "BarrierBeside(files) #1 at beside_test.go") {
		t.Error(errs[0])
	}
}

// barrierBesideForEver repeats BarrierBeside until it fails, and prints the error.
func barrierBesideForEver(ctx context.Context) error {
	g, err := Init(ctx, patient)
	if err != nil {
		return err
	}
	for n := 0; err == nil; n++ {
		if n == 10 {
			fmt.Println("running")
		}
		err = g.BarrierBeside("files")
	}
	return failedWith(g, err)
}

func TestBarrierBesideNamesTheLostRank(t *testing.T) {
	t.Parallel()
	all := launchJob(t, 2, "barrier beside")
	all[0].expect(t, "running")
	all[1].Process.Kill()
	all[0].wait(t)
	if text := all[0].output.String(); !strings.Contains(text, "culprit 1 lost=true") ||
		!strings.Contains(text, "BarrierBeside(files) #") {
		t.Error(text)
	}
}

package dist

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

// Barriers beside collectives have no place in their order: one rank makes its barriers before its
// collectives, and another one after them.
func TestBarrierBesideCollectives(t *testing.T) {
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

// A rank that does not come to a barrier beside is named, with the barrier.
func TestBarrierBesideNamesTheLateRank(t *testing.T) {
	o := quick
	o.Timeout = 2 * time.Second
	errs := inProcess(t, 2, o, func(g *Group) error {
		if g.Rank() == 1 {
			<-g.job.member.Failed()
			return nil
		}
		return g.BarrierBeside("files")
	})
	var e *Error
	if !errors.As(errs[0], &e) || e.Culprit != 1 || !errors.Is(e, ErrTimeout) || !strings.Contains(e.Error(), "BarrierBeside(files) #1 at beside_test.go") {
		t.Error(errs[0])
	}
}

// barrierBesideForEver makes barriers beside until one fails, and says how.
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
	if text := all[0].output.String(); !strings.Contains(text, "culprit 1 lost=true") || !strings.Contains(text, "BarrierBeside(files) #") {
		t.Error(text)
	}
}

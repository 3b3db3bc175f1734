package distributed

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Ranks on one host share a clock, so an offset is at most as large as its uncertainty.
func TestClockOffset(t *testing.T) {
	requireNone(t, inProcess(t, 3, quick, func(g *Group) error {
		offset, uncertainty, err := ClockOffset(g)
		if err != nil {
			return err
		}
		if offset.Abs() > uncertainty || g.Rank() == 0 && offset != 0 || g.Rank() > 0 && uncertainty <= 0 ||
			uncertainty > time.Minute {
			return fmt.Errorf("offset %v, uncertainty %v", offset, uncertainty)
		}
		return nil
	}))
}

// If askTime cannot send its request, it does not wait for an answer.
func TestClockOffsetEndsWithItsFirstError(t *testing.T) {
	requireNone(t, inProcess(t, 2, quick, func(g *Group) error {
		now, err := torch.Zeros(cuda.CPU, torch.Int64, 1)
		if err != nil {
			return err
		}
		defer now.Close()
		if err := g.Close(); err != nil {
			return err
		}
		_, _, err = askTime(g, now)
		if !errors.Is(err, torch.ErrClosed) || strings.Count(err.Error(), "distributed:") != 1 {
			return fmt.Errorf("got %w, want the error of one call", err)
		}
		return nil
	}))
}

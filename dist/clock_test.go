package dist

import (
	"fmt"
	"testing"
	"time"
)

// Ranks of one host share a clock, so the offsets are as small as the measurement says.
func TestClockOffset(t *testing.T) {
	requireNone(t, inProcess(t, 3, quick, func(g *Group) error {
		offset, uncertainty, err := ClockOffset(g)
		if err != nil {
			return err
		}
		if offset.Abs() > uncertainty || g.Rank() == 0 && offset != 0 || g.Rank() > 0 && uncertainty <= 0 || uncertainty > time.Minute {
			return fmt.Errorf("offset %v, uncertainty %v", offset, uncertainty)
		}
		return nil
	}))
}

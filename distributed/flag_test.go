package distributed

import (
	"fmt"
	"testing"
)

// If one rank raises a flag, all ranks see the raised flag after the same number of steps.
func TestFlagIsUpOnAllRanksAtOnce(t *testing.T) {
	for _, size := range []int{1, 3} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			const raisedAt = 4
			requireNone(t, inProcess(t, size, quick, func(g *Group) error {
				f := NewFlag(g)
				defer f.Close()
				for step := range 20 {
					if step == raisedAt && g.Rank() == size-1 {
						f.Raise()
					}
					up, err := f.Sync()
					if err != nil {
						return err
					}
					if want := step > raisedAt; up != want {
						return fmt.Errorf("step %d: up is %v", step, up)
					}
				}
				return nil
			}))
		})
	}
}

// A rank may close its flag without using the result of its last Sync. Nothing leaks, and the other
// ranks finish.
func TestFlagClosesWithUnreadSync(t *testing.T) {
	requireNone(t, inProcess(t, 2, quick, func(g *Group) error {
		f := NewFlag(g)
		for range 2 {
			if up, err := f.Sync(); up || err != nil {
				return fmt.Errorf("up is %v: %w", up, err)
			}
		}
		if err := f.Close(); err != nil {
			return err
		}
		return f.Close()
	}))
}

package savesim

import (
	"errors"
	"sync"
	"time"
)

// errLost is the error of collectives after a rank has ended.
var errLost = errors.New("a rank is lost")

// group connects the ranks of a job, as distributed.Group does. The lock is for a goroutine that is
// preempted (world.World).
type group struct {
	mu     sync.Mutex
	rounds []*round
	next   []int         // by rank, the number of its next round
	failed chan struct{} // closed when a rank has ended early
	broken bool
	since  time.Time // when it broke
}

// round is one collective.
type round struct {
	texts   []string
	arrived int
	done    chan struct{}
}

func newGroup(ranks int) *group {
	return &group{next: make([]int, ranks), failed: make(chan struct{})}
}

// fail ends all collectives with an error.
func (g *group) fail() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.broken {
		g.broken, g.since = true, time.Now()
		close(g.failed)
	}
}

// lost reports whether a rank has ended before now: a loss of power ends all at once.
func (g *group) lost() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.broken && time.Now().After(g.since)
}

// gather returns the texts of all ranks, by rank.
func (g *group) gather(rank int, text string) ([]string, error) {
	r := g.arrive(rank, text)
	select {
	case <-r.done:
	case <-g.failed:
		g.mu.Lock()
		defer g.mu.Unlock()
		if r.arrived < len(g.next) {
			return nil, errLost
		}
	}
	return r.texts, nil
}

// arrive adds a rank's text to its next round.
func (g *group) arrive(rank int, text string) *round {
	g.mu.Lock()
	defer g.mu.Unlock()
	k := g.next[rank]
	g.next[rank]++
	if k == len(g.rounds) {
		g.rounds = append(g.rounds, &round{texts: make([]string, len(g.next)), done: make(chan struct{})})
	}
	r := g.rounds[k]
	r.texts[rank] = text
	if r.arrived++; r.arrived == len(g.next) {
		close(r.done)
	}
	return r
}

//go:build simworld

// Package seeds runs scenarios of a simulated machine. Its tests need the overlay that
// internal/simworld writes.
package seeds

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/torchstream/torchstream/internal/simworld/controlsim"
	"github.com/torchstream/torchstream/internal/simworld/loadersim"
	"github.com/torchstream/torchstream/internal/simworld/savesim"
	"github.com/torchstream/torchstream/internal/simworld/world"
)

var (
	first    = flag.Uint64("sim.first", 1, "first seed")
	count    = flag.Uint64("sim.count", 100, "number of seeds")
	only     = flag.String("sim.scenario", "", "run this `scenario` alone")
	choices  = flag.String("sim.choices", "", "a `file` with the choices of one run, as world.Format writes them")
	tell     = flag.Bool("sim.story", false, "print the story of each run")
	trace    = flag.Bool("sim.trace", false, "print each choice when it is made")
	fault    = flag.Int("sim.fault", 0, "the `number` of a planted fault")
	progress = flag.Bool("sim.progress", false, "print each seed before its run")
)

// scenarios are run in turn, one for each seed.
var scenarios = []struct {
	name string
	run  func(w *world.World) error
}{
	{"loader", loadersim.Run},
	{"save", savesim.Run},
	{"control", controlsim.Run},
}

// scenarioNamed returns the function of a scenario.
func scenarioNamed(t *testing.T, name string) func(w *world.World) error {
	for _, s := range scenarios {
		if s.name == name {
			return s.run
		}
	}
	t.Fatalf("there is no scenario %q", name)
	return nil
}

// Run runs a scenario in a bubble with its own clock. replay is nil, or has the only choices that
// are not 0.
func Run(t *testing.T, seed uint64, scenario func(*world.World) error, replay []world.Choice) (story world.Story, err error) {
	synctest.Test(t, func(*testing.T) {
		w := world.New(seed, replay)
		if *trace {
			w.Trace = func(c world.Choice) { fmt.Printf("choice %s=%d\n", c.Name, c.Value) }
		}
		before := runtime.NumGoroutine()
		err = scenario(w)
		synctest.Wait()
		if left := runtime.NumGoroutine() - before; left > 0 && err == nil {
			text := make([]byte, 1<<20)
			text = text[:runtime.Stack(text, true)]
			err = fmt.Errorf("%d goroutines are left:\n%s", left, text)
		}
		story = w.Story()
		if err != nil { // the bubble panics if a goroutine is blocked
			fmt.Printf("\n%s\nerror: %v\n", story, err)
		}
	})
	return story, err
}

// TestSeeds runs the seeds that the flags name.
func TestSeeds(t *testing.T) {
	runtime.GOMAXPROCS(1)
	world.Plant(*fault)
	var replay []world.Choice
	if *choices != "" {
		text, err := os.ReadFile(*choices)
		if err == nil {
			replay, err = world.Parse(strings.TrimSpace(string(text)))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	began, calls, simulated := time.Now(), 0, time.Duration(0)
	for seed := *first; seed < *first+*count; seed++ {
		s := scenarios[seed%uint64(len(scenarios))]
		if *only != "" {
			s.name, s.run = *only, scenarioNamed(t, *only)
		}
		if *progress {
			fmt.Printf("\nseed %d of %s\n", seed, s.name)
		}
		story, err := Run(t, seed, s.run, replay)
		calls += story.Calls
		simulated += story.Simulated
		if *tell && err == nil {
			fmt.Printf("\n%s", story)
		}
		if err != nil {
			fmt.Printf("\nfailure %d %s\n%s\nerror: %v\n", seed, world.Format(story.Choices), story, err)
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	took := time.Since(began)
	fmt.Printf("\n%d seeds, %d calls, %v simulated in %v\n", *count, calls, simulated.Round(time.Second), took.Round(time.Millisecond))
}

// TestRegressions runs the seeds that found faults.
func TestRegressions(t *testing.T) {
	runtime.GOMAXPROCS(1)
	for _, r := range Regressions() {
		replay, err := world.Parse(r.Choices)
		if err != nil {
			t.Fatal(err)
		}
		if story, err := Run(t, r.Seed, scenarioNamed(t, r.Scenario), replay); err != nil {
			t.Errorf("%s: %v\n%s", r.Name, err, story)
		}
	}
}

// TestSeedsReplay checks that a seed decides everything: a second run tells the same story.
func TestSeedsReplay(t *testing.T) {
	runtime.GOMAXPROCS(1)
	for _, s := range scenarios {
		for seed := *first; seed < *first+*count; seed++ {
			once, err := Run(t, seed, s.run, nil)
			if err != nil {
				t.Fatal(err)
			}
			again, err := Run(t, seed, s.run, nil)
			if err != nil {
				t.Fatal(err)
			}
			if a, b := once.String(), again.String(); a != b {
				t.Errorf("%s, seed %d: the second run has another story:\n%s\nwant\n%s", s.name, seed, b, a)
			}
		}
	}
}

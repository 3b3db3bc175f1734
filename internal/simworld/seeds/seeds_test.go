//go:build simworld

// Package seeds runs scenarios of a simulated machine. Its tests need the overlay that
// internal/simworld writes.
package seeds

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
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
	})
	return story, err
}

// TestSeeds runs the seeds that the flags name.
func TestSeeds(t *testing.T) {
	runtime.GOMAXPROCS(1)
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
		if *progress {
			fmt.Printf("\nseed %d\n", seed)
		}
		s := scenarios[seed%uint64(len(scenarios))]
		if *only != "" {
			i := slices.IndexFunc(scenarios, func(c struct {
				name string
				run  func(w *world.World) error
			}) bool {
				return c.name == *only
			})
			if i < 0 {
				t.Fatalf("there is no scenario %q", *only)
			}
			s = scenarios[i]
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

// regressions are the choices of runs that once found a fault of the product.
var regressions = []struct{ name, choices string }{
	{"an archive changes between two rounds of a stream", "samples#0=11;size#0=593;size#23=489;format#0=5;repeat#0=3;" +
		"order#0=3;buffer#0=4;buffer bytes#0=1;archive changes#13=2"},
}

// TestRegressions runs the seeds that found faults.
func TestRegressions(t *testing.T) {
	runtime.GOMAXPROCS(1)
	for _, r := range regressions {
		replay, err := world.Parse(r.choices)
		if err != nil {
			t.Fatal(err)
		}
		if story, err := Run(t, 1, loadersim.Run, replay); err != nil {
			t.Errorf("%s: %v\n%s", r.name, err, story)
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

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

// regressions are the choices of runs that once found a fault of the product, or of its model.
var regressions = []struct {
	scenario func(*world.World) error
	name     string
	seed     uint64
	choices  string
}{
	{loadersim.Run, "an archive changes between two rounds of a stream", 1,
		"samples#0=11;size#0=593;size#23=489;format#0=5;repeat#0=3;" +
			"order#0=3;buffer#0=4;buffer bytes#0=1;archive changes#13=2"},
	{loadersim.Run, "a rank resumes after a batch that bad samples have cut short", 30001075,
		"samples#0=2;classes#0=2;damage#0=1;payload#0=235;size#0=317;bad#0=5;spoil#0=2;payload#1=119;" +
			"size#1=169;bad#1=3;format#0=3;remote#0=3;deflate#1=1;give classes#0=1;batch#0=4;world#0=2;" +
			"seed#0=105;policy#0=1;last#0=2;epochs#0=1;no index#0=2;order#0=1;rare names#0=2;rare syncs#0=3;" +
			"rare responses#0=2;rare leaves#0=3;network disk#0=2;deal again#0=1;rank 0 killed#0=1;" +
			"rank 0 call#0=18;rank 0 loses power#0=1;rank 2 workers#0=1;leave#2=3;rank 0 killed#1=2;" +
			"rank 0 call#1=3;rank 0 loses power#1=2;rank 0 workers#1=1;rank 0 killed#2=2;rank 0 call#2=14;" +
			"rank 0 loses power#2=3;leave#3=2;rank 0 workers#3=2;rank 2 killed#1=1;rank 2 call#0=28;" +
			"rank 2 loses power#0=2;rank 2 workers#1=1"},
	{loadersim.Run, "a server compresses a range to as many bytes, and bad samples are skipped", 1,
		"samples#0=3;size#0=600;size#1=600;size#2=600;format#0=3;remote#0=3;policy#0=1;" +
			"rare responses#0=1;fault get train.zip#9=12"},
	{loadersim.Run, "another file replaces a stream that has had enough good samples", 1,
		"samples#0=11;format#0=1;no index#0=3;give classes#0=1;policy#0=1;last#0=2;epochs#0=1;" +
			"held bytes#0=1;archive changes#0=5"},
	{loadersim.Run, "reading fails while the shuffle buffer has enough samples", 130001391,
		"samples#0=11;damage#0=2;payload#0=190;size#0=500;bad#0=5;payload#1=189;size#1=325;bad#1=3;" +
			"payload#2=111;size#2=190;bad#2=2;payload#3=166;size#3=430;bad#3=3;payload#4=162;size#4=167;" +
			"bad#4=5;payload#5=169;size#5=206;bad#5=5;payload#6=121;size#6=347;bad#6=4;payload#7=176;" +
			"size#7=445;payload#8=202;size#8=437;bad#8=3;payload#9=255;size#9=136;bad#9=2;payload#10=128;" +
			"size#10=75;payload#11=169;size#11=385;bad#11=5;payload#12=105;size#12=612;bad#12=1;" +
			"payload#13=132;size#13=359;bad#13=2;payload#14=68;size#14=131;bad#14=1;payload#15=197;" +
			"size#15=450;bad#15=3;payload#16=12;size#16=110;bad#16=1;payload#17=48;size#17=182;bad#17=5;" +
			"payload#18=253;size#18=659;payload#19=160;size#19=597;bad#19=5;payload#20=100;size#20=37;" +
			"bad#20=4;payload#21=232;size#21=176;bad#21=4;payload#22=250;size#22=486;bad#22=3;payload#23=66;" +
			"size#23=140;bad#23=1;payload#24=141;size#24=426;bad#24=5;format#0=5;remote#0=3;flush#0=1;" +
			"batch#0=1;repeat#0=1;seed#0=518;policy#0=1;last#0=2;no index#0=2;order#0=3;buffer#0=1;" +
			"buffer bytes#0=1;rare reads#0=3;rare syncs#0=3;rare locks#0=2;rare responses#0=1;rare stops#0=3;" +
			"index#0=5;deal again#0=1;index process#0=2;rank 0 killed#0=2;rank 0 call#0=85;" +
			"rank 0 workers#0=2;fault readat train.remote.tsidx#8=1;fault readat train.remote.tsidx#15=1;" +
			"fault get train-1.tgz#5=10;archive changes#7=2"},
	{loadersim.Run, "another stream replaces one whose epoch a bad sample has ended", 1795918556766,
		"samples#0=11;damage#0=1;bad#4=5;format#0=5;give classes#0=1;epochs#0=2;archive changes#1=9"},
	{loadersim.Run, "another process removes the index while one looks at it", 5002118,
		"samples#0=8;damage#0=1;bad#6=5;remote#0=3;batch#0=2;world#0=1;policy#0=1;rare responses#0=3;" +
			"index#0=6;deal again#0=1;index process#0=5;index process waits#0=1;fault get train.tar#2=6;" +
			"fault get train.tar#6=10;fault get train.tar#19=4;other world#0=1;rank 0 killed#2=1;" +
			"rank 0 call#0=5;rank 0 loses power#0=3;index before a process#5=4"},
	{loadersim.Run, "a server does not answer the calls that remove the lock of an index", 1795947169972947,
		"remote#0=3;rare names#0=2;fault rename train.remote.tsidx#0=5;calls without an answer#0=3"},
	{loadersim.Run, "a sample that is read out of the archive's order ends an epoch", 1795947169906843,
		"size#1=510;size#4=615;size#5=404;format#0=5;remote#0=3;give classes#0=1;epochs#0=1;order#0=3;" +
			"buffer#0=5;buffer bytes#0=1;rare responses#0=2;fault get train-1.tgz#12=12"},
	{savesim.Run, "a loss of power brings back files that an index has replaced", 6,
		"kind#0=3;saves#0=2;tensors#0=2;lives#0=4;rank 0 killed#0=1;rank 0 killed#1=1;" +
			"rank 0 loses power#1=2;crash name last-000000000004-00001-of-00002.safetensors#0=1"},
	{savesim.Run, "a loss of power brings back ranks' files that a checkpoint has replaced", 363,
		"saves#0=1;tensors#0=3;ranks#0=1;rank 1 killed#0=1;rank 1 loses power#0=2;" +
			"crash name last.pt-000000000001-rank00000-of-00002.safetensors#0=1"},
	{savesim.Run, "two hosts save, and one takes the other's new index for a leftover", 2973,
		"kind#0=3;saves#0=1;starts without a checkpoint#0=1;network disk#0=3;ranks#0=3;rank 1 killed#0=1;" +
			"rank 1 call#0=32;rank 1 loses power#0=2"},
	{savesim.Run, "a file that cannot be removed is forgotten", 2465,
		"kind#0=3;saves#0=2;tensors#0=1;size#0=6;rare moves#0=3;rare syncs#0=2;lives#0=1;" +
			"fault remove last-000000000007-00001-of-00002.safetensors#0=1;fault sync ckpt#10=1;" +
			"fault rename last.safetensors.index.json#3=1;" +
			"fault remove last-000000000015-00001-of-00002.safetensors#0=1"},
	{savesim.Run, "a loss of power leaves an index under both names", 214,
		"kind#0=3;saves#0=2;rare names#0=2;rare syncs#0=3;lives#0=3;ranks#0=3;rank 1 killed#0=1;" +
			"rank 1 call#0=22;fault sync ckpt#6=1;rank 0 killed#1=1;rank 0 call#0=36;rank 0 killed#2=1;" +
			"rank 0 call#1=108;rank 0 is killed after a rename#1=2;rank 0 rename#0=2;" +
			"power fails after a life#2=2;crash name last.safetensors.index.json.tmp-00000000000f#0=1;" +
			"fault open last-000000000011-00001-of-00001.safetensors.tmp-000000000012#0=3"},
	{savesim.Run, "a folder that cannot be synced is no error", 83,
		"saves#0=1;rare names#0=2;ranks#0=1;fault open ckpt#7=2;power fails after a life#0=2;" +
			"crash name last.pt#0=1"},
	{savesim.Run, "a killed rank leaves a temporary file of a part", 56,
		"starts without a checkpoint#0=1;lives#0=2;ranks#0=1;ranks part#0=5;rank 1 killed#0=1;" +
			"ranks#1=3;rank 1 killed#1=1;ranks#2=1;rank 1 killed#2=1;rank 1 call#2=10"},
	{savesim.Run, "a loss of power brings back a part of a failed save", 3520,
		"kind#0=3;starts without a checkpoint#0=1;rare writes#0=3;lives#0=1;rank 0 killed#0=1;" +
			"rank 0 call#0=7;" +
			"fault write last-000000000004-00001-of-00001.safetensors.tmp-000000000005#1=1;" +
			"power fails after a life#1=2;" +
			"crash name last-000000000004-00001-of-00001.safetensors.tmp-000000000005#1=1"},
	{savesim.Run, "a loss of power keeps parts without their main file", 476,
		"kind#0=3;starts without a checkpoint#0=1;rank 0 killed#0=1;rank 0 call#0=18;" +
			"rank 0 loses power#0=2;crash name last.safetensors.index.json.tmp-000000000003#0=1"},
	{savesim.Run, "a save cannot read the index that it replaces", 122,
		"kind#0=3;saves#0=1;tensors#0=2;size#0=5;size#1=6;size#2=1;rare reads#0=3;rare writes#0=5;" +
			"rare names#0=4;rare moves#0=4;rare syncs#0=4;rare locks#0=3;network disk#0=1;ranks#0=2;" +
			"ranks part#0=4;fault lock last-000000000009-00002-of-00003.safetensors.tmp-00000000000b#0=1;" +
			"fault read last.safetensors.index.json#4=2;bytes before a bad sector#0=220;" +
			"fault readat last.safetensors.index.json#2=1"},
	{controlsim.Run, "a rank that was stopped blames rank 0", 257,
		"clock#1=3;steps#0=5;work#0=3107;work#1=3719;work#2=6133;work#3=5347;fault#0=4;" +
			"fault of rank#0=1;fault at#0=18588;fault for#0=11999;jitter#4=291"},
	{controlsim.Run, "a hub that was stopped blames the others", 583,
		"silence#0=6;clock#0=3;steps#0=2;work#0=590;work#2=5875;fault#0=4;fault for#0=21991"},
	{controlsim.Run, "a rank aborts the job and closes at once", 1646,
		"fault#0=12;closes after Abort#0=1"},
	{controlsim.Run, "a rank that frees its collectives for long finds the hub silent", 18,
		"ranks#0=3;lingers after Part#2=3;lingers after Part for#0=11999"},
	{controlsim.Run, "a rank behind a cut link finds no hub in place of the verdict", 1796118510054,
		"silence#0=3;ranks#0=3;clock#3=3;work#0=7070;faults#0=3;fault#0=6;fault of rank#0=1;" +
			"fault at#0=9905;fault for#0=2514;fault#1=4;fault of rank#1=2;fault at#1=3444;" +
			"an early fault#1=3;fault for#1=17412"},
	{controlsim.Run, "a rank behind a cut link finds no hub after an early leave", 1796118573490,
		"ranks#0=3;barrier#0=2;faults#0=3;fault#0=11;fault#1=6;fault of rank#1=2;fault at#1=3011;" +
			"an early fault#1=3;fault for#1=1579"},
}

// TestRegressions runs the seeds that found faults.
func TestRegressions(t *testing.T) {
	runtime.GOMAXPROCS(1)
	for _, r := range regressions {
		replay, err := world.Parse(r.choices)
		if err != nil {
			t.Fatal(err)
		}
		if story, err := Run(t, r.seed, r.scenario, replay); err != nil {
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

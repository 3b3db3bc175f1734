// Simworld runs the product's own code on simulated machines. A seed decides everything about a
// machine that is not given: its disk and its faults, its processes, and which goroutine continues.
//
//	go run ./internal/simworld -seeds 1000     run 1,000 seeds; prints the first, which is the time of day
//	go run ./internal/simworld -seed 17        run one seed; if it fails, shorten it and tell its story
//	go run ./internal/simworld -faults X       plant the faults that match X: 1,000 seeds must find each
//
// The packages below it replace os, sync, internal/system and internal/imagecapi in the product's
// files, which are compiled with an overlay. A run needs neither LibTorch nor the image library.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/torchstream/torchstream/internal/simworld/world"
)

const tag = "simworld"

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "simworld:", err)
		os.Exit(1)
	}
}

// run parses the flags and runs seeds.
func run() error {
	r := runner{out: os.Stdout}
	var seeds, first, seed uint64
	flag.Uint64Var(&seeds, "seeds", 1000, "number of seeds")
	flag.Uint64Var(&first, "first", 0, "first seed; 0: by the time of day")
	flag.Uint64Var(&seed, "seed", 0, "run this seed alone, shorten it if it fails, and print its story")
	flag.StringVar(&r.scenario, "scenario", "", "run this `scenario` alone")
	flag.IntVar(&r.jobs, "jobs", runtime.NumCPU(), "number of processes")
	build := flag.String("build", "", "only build the program, with the faults of -faults, into this `folder`, for -program")
	flag.StringVar(&r.program, "program", "", "run this `file`, which -build has made")
	plant := flag.String("faults", "",
		"plant the faults whose parts and names match this `regexp`, one after the other: -seeds seeds must find each")
	limit := flag.Duration("time", 0, "run seeds for this time, and list all that fail")
	flag.Parse()
	if first == 0 {
		first = uint64(time.Now().UnixMicro())
	}
	if seed != 0 {
		first, seeds = seed, 1
	}
	work := *build
	if work == "" {
		var err error
		if work, err = os.MkdirTemp("", "torchstream-simworld"); err != nil {
			return err
		}
		defer os.RemoveAll(work)
	} else if err := os.MkdirAll(work, 0o777); err != nil {
		return err
	}
	var list map[int]*plantedFault
	if *plant != "" {
		var err error
		if list, err = chosen(*plant); err != nil {
			return err
		}
	}
	if r.program == "" {
		if err := r.buildPlanted(work, list); err != nil || *build != "" {
			return err
		}
	} else {
		path, err := filepath.Abs(r.program)
		if err != nil {
			return err
		}
		if r.program, err = exec.LookPath(path); err != nil {
			return fmt.Errorf("-program: %w: make it with -build", err)
		}
	}
	switch {
	case *plant != "" && seed != 0:
		if len(list) != 1 {
			return fmt.Errorf("%d faults match %q: one seed runs one fault", len(list), *plant)
		}
		for number, f := range list {
			r.fault, r.scenario = number, f.scenario
		}
	case *plant != "":
		return r.plant(list, first, seeds)
	case *limit > 0:
		return r.runFor(*limit, first)
	}
	return r.run(work, first, seeds)
}

// runner runs seeds in separate processes, because a panic of the product ends the process.
type runner struct {
	out      io.Writer
	scenario string
	jobs     int
	program  string
	fault    int // the number of a planted fault; 0: none
}

// run runs seeds. The program has been built; work is a folder for temporary files.
func (r *runner) run(work string, first, seeds uint64) error {
	fmt.Fprintf(r.out, "%d seeds from %d on\n", seeds, first)
	if seeds == 1 {
		if text, err := r.execute(first, 1, "-sim.story"); err == nil {
			fmt.Fprint(r.out, text)
			return nil
		}
	}
	began := time.Now()
	seed, err := r.all(first, seeds)
	if err == nil {
		took := time.Since(began).Seconds()
		fmt.Fprintf(r.out, "no failure in %.1f s, %.0f seeds a second\n", took, float64(seeds)/took)
		return nil
	}
	story := r.shorten(work, seed)
	return fmt.Errorf("seed %d fails: %w\n%s\nrun it again: %s", seed, err, story, again(seed, err))
}

// again returns the command that repeats a failing seed. The error has the seed's scenario.
func again(seed uint64, err error) string {
	command := "go run ./internal/simworld"
	if m := regexp.MustCompile(fmt.Sprintf(`(?m)^seed %d of (\w+)$`, seed)).FindStringSubmatch(err.Error()); m != nil {
		command += " -scenario " + m[1]
	}
	return fmt.Sprintf("%s -seed %d", command, seed)
}

// build compiles the program that runs seeds.
func (r *runner) build(work string, changed map[string]string) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	overlay, err := writeOverlay(root, work, changed)
	if err != nil {
		return err
	}
	r.program = filepath.Join(work, "seeds.test")
	_, err = output(root, "go", "test", "-c", "-o", r.program, "-gcflags", "-e", "-ldflags", "-s -w",
		"-tags", tag, "-overlay", overlay, own+"seeds")
	return err
}

// moduleRoot returns the folder of the repository.
func moduleRoot() (string, error) {
	file, err := output("", "go", "env", "GOMOD")
	return filepath.Dir(strings.TrimSpace(file)), err
}

// progressEvery is the time between two lines that tell how many seeds have run.
const progressEvery = 10 * time.Second

// all runs seeds on all processors. It returns a seed that fails, and why.
func (r *runner) all(first, seeds uint64) (seed uint64, err error) {
	const share = 500 // seeds of one process
	var mu sync.Mutex
	var running sync.WaitGroup
	next, end := first, first+seeds
	began, told, done := time.Now(), time.Now(), uint64(0)
	for range max(1, r.jobs) {
		running.Go(func() {
			for {
				mu.Lock()
				from, n := next, min(share, end-next)
				next += n
				failed := err != nil
				mu.Unlock()
				if n == 0 || failed {
					return
				}
				at, e := r.some(from, n)
				mu.Lock()
				if e != nil && err == nil {
					seed, err = at, e
				}
				done += n
				if time.Since(told) >= progressEvery && done < seeds {
					told = time.Now()
					fmt.Fprintf(r.out, "%d of %d seeds, %.0f a second\n", done, seeds, float64(done)/time.Since(began).Seconds())
				}
				mu.Unlock()
			}
		})
	}
	running.Wait()
	return seed, err
}

// runFor runs seeds until a time has passed. It is an error if seeds fail: the output lists all.
func (r *runner) runFor(limit time.Duration, first uint64) error {
	const share = 200 // seeds of one process
	var mu sync.Mutex
	var running sync.WaitGroup
	began, next, done, failed := time.Now(), first, uint64(0), 0
	jobs := max(1, r.jobs)
	for range jobs {
		running.Go(func() {
			for time.Since(began) < limit {
				mu.Lock()
				from := next
				next += share
				mu.Unlock()
				for at := from; at < from+share; {
					seed, err := r.some(at, from+share-at)
					if err == nil {
						break
					}
					mu.Lock()
					failed++
					fmt.Fprintf(r.out, "seed %d fails: %s\n", seed, reason(err))
					mu.Unlock()
					at = seed + 1
				}
				mu.Lock()
				done += share
				mu.Unlock()
			}
		})
	}
	running.Wait()
	took := time.Since(began).Seconds()
	fmt.Fprintf(r.out, "%s: %d seeds from %d on, %d fail, %.0f s, %.0f seeds a second on each of %d processors\n",
		cmp.Or(r.scenario, "all"), done, first, failed, took, float64(done)/took/float64(jobs), jobs)
	if failed > 0 {
		return fmt.Errorf("%d seeds fail", failed)
	}
	return nil
}

// some runs seeds in one process. It returns the seed that fails, and why. A seed that never fails
// again is printed alone: on a busy machine, the runtime stops goroutines where no seed decides it.
func (r *runner) some(first, seeds uint64) (seed uint64, err error) {
	for end := first + seeds; first < end; first = seed + 1 {
		text, err := r.execute(first, end-first, "-sim.progress")
		if err == nil {
			return 0, nil
		}
		seed = first
		for line := range strings.Lines(text) {
			var at uint64
			if n, _ := fmt.Sscanf(line, "seed %d of", &at); n == 1 {
				seed = at
			}
		}
		if at := strings.LastIndex(text, fmt.Sprintf("\nseed %d of ", seed)); at >= 0 {
			text = text[at+1:]
		}
		if half := 10_000; len(text) > 2*half { // the error is at the end
			text = text[:half] + "\n...\n" + text[len(text)-half:]
		}
		err = fmt.Errorf("%w\n%s", err, text)
		for range 3 {
			if _, again := r.execute(seed, 1); again != nil {
				return seed, err
			}
		}
		fmt.Fprintf(r.out, "seed %d has failed once in four runs: %s\n", seed, reason(err))
	}
	return 0, nil
}

// execute runs the program on some seeds.
func (r *runner) execute(first, seeds uint64, flags ...string) (string, error) {
	flags = append([]string{"-sim.first", strconv.FormatUint(first, 10), "-sim.count", strconv.FormatUint(seeds, 10),
		"-sim.scenario", r.scenario, "-sim.fault", strconv.Itoa(r.fault)}, flags...)
	return r.test("TestSeeds", flags...)
}

// maxTime is the maximum time of a process, because a seed may have no end.
const maxTime = 5 * time.Minute

// test runs a test of the program.
func (r *runner) test(name string, flags ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), maxTime)
	defer cancel()
	flags = append([]string{"-test.timeout", "2m", "-test.run", "^" + name + "$"}, flags...)
	c := exec.CommandContext(ctx, r.program, flags...)
	c.Env = append(os.Environ(), "GOMAXPROCS=1", "GODEBUG=asyncpreemptoff=1", "GOGC=400")
	text, err := c.CombinedOutput()
	return string(text), err
}

// shorten sets choices of a failing seed to 0 as long as it fails, and returns the story of the
// shortest run that it finds.
func (r *runner) shorten(work string, seed uint64) string {
	text, err := "", error(nil)
	for range 5 { // a select among several ready channels is not decided by the seed
		if text, err = r.execute(seed, 1, "-sim.trace"); err != nil {
			break
		}
	}
	if err == nil {
		return "it does not fail again: its run depends on more than the seed\n" + text
	}
	list := traced(text)
	file := filepath.Join(work, "choices")
	fails := func(list []world.Choice) (string, bool) {
		if err := os.WriteFile(file, []byte(world.Format(list)), 0o666); err != nil {
			return "", false
		}
		text, err := r.execute(seed, 1, "-sim.choices", file)
		var exit *exec.ExitError
		return text, errors.As(err, &exit)
	}
	last, ok := fails(list)
	if !ok {
		return "it does not fail with its own choices\n" + text
	}
	began := time.Now()
	for size := len(list); size > 0 && time.Since(began) < time.Minute; size /= 2 {
		for at := 0; at < len(list) && time.Since(began) < time.Minute; {
			fewer := slices.Concat(list[:at], list[min(at+size, len(list)):])
			if text, ok := fails(fewer); ok {
				list, last = fewer, text
				continue
			}
			at += size
		}
	}
	return fmt.Sprintf("with %d choices:\n%s", len(list), last[:min(len(last), 20_000)])
}

// traced returns the choices that a run has printed.
func traced(text string) (list []world.Choice) {
	lines := bufio.NewScanner(bytes.NewReader([]byte(text)))
	for lines.Scan() {
		if c, ok := strings.CutPrefix(lines.Text(), "choice "); ok {
			if some, err := world.Parse(c); err == nil {
				list = append(list, some...)
			}
		}
	}
	return list
}

// output runs a command in a folder, without cgo.
func output(folder, name string, arguments ...string) (string, error) {
	c := exec.Command(name, arguments...)
	c.Dir = folder
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	var said bytes.Buffer
	c.Stderr = &said
	text, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(arguments, " "), err, said.Bytes())
	}
	return string(text), nil
}

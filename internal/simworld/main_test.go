package main

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// TestSimulate runs the seeds that once found a fault, and the first seeds. They are the same in
// every run. make simulate, a step of .ci/run, draws seeds that nobody has run before.
func TestSimulate(t *testing.T) {
	r := runner{out: t.Output(), jobs: 2}
	work := t.TempDir()
	if err := r.build(work, nil); err != nil {
		t.Fatal(err)
	}
	if err := r.run(work, 1, 300); err != nil {
		t.Fatal(err)
	}
	if text, err := r.test("TestRegressions"); err != nil || !strings.Contains(text, "PASS") {
		t.Errorf("TestRegressions: %v\n%s", err, text)
	}
}

// A failing seed is shortened to few choices, and the error has its story and how to repeat it. The
// program has all planted faults, and without one of them it is the product.
func TestFailingSeedIsShortened(t *testing.T) {
	all, err := chosen(".")
	if err != nil {
		t.Fatal(err)
	}
	r := runner{out: t.Output(), jobs: 2, scenario: "loader"}
	work := t.TempDir()
	if err := r.buildPlanted(work, all); err != nil {
		t.Fatal(err)
	}
	if seed, err := r.all(1, 20); err != nil {
		t.Fatalf("no fault is planted, and seed %d fails: %v", seed, err)
	}
	r.fault = 1
	seed, err := r.all(1, 100)
	if err == nil {
		t.Fatalf("100 seeds do not find: %s", all[1].name)
	}
	if got, want := again(seed, err), fmt.Sprintf("go run ./internal/simworld -scenario loader -seed %d", seed); got != want {
		t.Errorf("the command that repeats seed %d is %q, want %q", seed, got, want)
	}
	story := r.shorten(work, seed)
	m := regexp.MustCompile(`^with (\d+) choices:`).FindStringSubmatch(story)
	if m == nil {
		t.Fatalf("the story is %s, want one that starts with the number of choices", story)
	}
	if n, err := strconv.Atoi(m[1]); err != nil || n > 5 || !strings.Contains(story, "\nerror: ") {
		t.Errorf("the story is %s, want one of at most 5 choices with the error", story)
	}
}

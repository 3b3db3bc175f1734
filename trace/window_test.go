package trace

import (
	"fmt"
	"strings"
	"testing"
)

func TestParseWindow(t *testing.T) {
	for text, want := range map[string]Window{
		"step.svg":                             {File: "step.svg"},
		"a/b.JSON,epoch=1,first=100,batches=8": {File: "a/b.JSON", Epoch: 1, First: 100, Batches: 8},
		"x.png,first=0":                        {File: "x.png", First: -1},
	} {
		t.Run(text, func(t *testing.T) {
			if got, err := parseWindow(text); err != nil || got != want {
				t.Errorf("got %+v, %v, want %+v", got, err, want)
			}
		})
	}
	for text, problem := range map[string]string{
		"step.pdf":           "must end in",
		"step.svg,from=3":    "is none of",
		"step.svg,first=two": "not a number",
		"step.svg,batches":   "not a number",
		"step.svg,first=-7":  "First is -7",
	} {
		t.Run(text, func(t *testing.T) {
			if _, err := parseWindow(text); err == nil || !strings.Contains(err.Error(), problem) {
				t.Errorf("got %v, want %q", err, problem)
			}
		})
	}
}

func TestTurnsHasDefaults(t *testing.T) {
	for _, c := range []struct {
		window     Window
		first, end int
	}{{Window{}, 2, 6}, {Window{First: -1, Batches: 1}, 0, 1}, {Window{First: 9, Batches: 3}, 9, 12}} {
		t.Run(fmt.Sprintf("first %d, %d batches", c.window.First, c.window.Batches), func(t *testing.T) {
			if first, end := c.window.Turns(); first != c.first || end != c.end {
				t.Errorf("got %d to %d, want %d to %d", first, end, c.first, c.end)
			}
		})
	}
}

// The first prefetcher of a program that asks gets the window; later prefetchers get none.
func TestEnvironmentIsTakenOnce(t *testing.T) {
	taken.Store(false)
	t.Cleanup(func() { taken.Store(false) })
	t.Setenv(Environment, "")
	if w, err := FromEnvironment(); err != nil || w != (Window{}) {
		t.Error(w, err)
	}
	t.Setenv(Environment, "step.svg,batches=2")
	if w, err := FromEnvironment(); err != nil || w.File != "step.svg" || w.Batches != 2 {
		t.Error(w, err)
	}
	if w, err := FromEnvironment(); err != nil || w != (Window{}) {
		t.Error(w, err)
	}
}

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/simworld/seeds"
)

// The text of each planted fault is in its file once, in a function that can have a copy.
func TestPlantedFaultsHaveTheirText(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for i, f := range faults() {
		text, err := os.ReadFile(filepath.Join(root, f.file))
		if err != nil {
			t.Error(err)
		}
		if _, err := withFaults(f.file, string(text), map[int]*plantedFault{i + 1: &f}); err != nil {
			t.Error(err)
		}
		if names[f.name] {
			t.Errorf("two faults are called %q", f.name)
		}
		names[f.name] = true
	}
}

// Each regression fails with its planted fault.
func TestRegressionsFindTheirFaults(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds a program with faults: leave out -short")
	}
	numbers := map[string]int{}
	unfound := map[string]bool{}
	for i, f := range faults() {
		numbers[f.name] = i + 1
		unfound[f.name] = f.missed == rare
	}
	all, err := chosen(".")
	if err != nil {
		t.Fatal(err)
	}
	r := runner{out: t.Output(), jobs: 1}
	work := t.TempDir()
	if err := r.buildPlanted(work, all); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(work, "choices")
	for _, row := range seeds.Regressions() {
		if row.Fault == "" {
			continue
		}
		if numbers[row.Fault] == 0 {
			t.Errorf("%s: no planted fault is called %q", row.Name, row.Fault)
			continue
		}
		if err := os.WriteFile(file, []byte(row.Choices), 0o666); err != nil {
			t.Fatal(err)
		}
		r.scenario, r.fault = row.Scenario, numbers[row.Fault]
		if text, err := r.execute(row.Seed, 1, "-sim.choices", file); err == nil || !strings.Contains(text, "\nerror: ") {
			t.Errorf("%s: got no failing run with the fault %q, want one: %v\n%s", row.Name, row.Fault, err, text)
		}
		unfound[row.Fault] = false
	}
	for name, is := range unfound {
		if is {
			t.Errorf("%s: no regression has this rare fault, want one", name)
		}
	}
}

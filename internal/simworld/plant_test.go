package main

import (
	"os"
	"path/filepath"
	"testing"
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

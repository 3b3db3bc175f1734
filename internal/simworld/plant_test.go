package main

import "testing"

// The text of each planted fault is in its file once.
func TestPlantedFaultsHaveTheirText(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, f := range faults() {
		if text, err := f.planted(root); err != nil || text == "" {
			t.Error(err)
		}
		if names[f.name] {
			t.Errorf("two faults are called %q", f.name)
		}
		names[f.name] = true
	}
}

package main

import (
	"path/filepath"
	"testing"
)

// A run that stops after a batch and the run that loads its state print the lines of an undisturbed
// run, also if the program left the first epoch early.
func TestResumeContinuesAnInterruptedRun(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	run := func(args ...string) string {
		t.Helper()
		status, stdout, stderr := command(t, append([]string{"resume", "-archive", photos, "-batch", "64"}, args...)...)
		if status != 0 {
			t.Fatalf("resume %q: got status %d, %s, want 0", args, status, stderr)
		}
		return stdout
	}
	for _, leave := range []string{"0", "1"} {
		want := run("-leave", leave)
		got := run("-leave", leave, "-stop", "2", "-save", state) + run("-load", state)
		if got != want {
			t.Errorf("-leave %s: got\n%s\nwant\n%s", leave, got, want)
		}
	}
}

//go:build linux

package cuda

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// One sanitizer runs at a time, and another one may follow.
func TestStartSanitizer(t *testing.T) {
	if RunningSanitizer() != nil {
		t.Skip("the environment has started a sanitizer")
	}
	dir := filepath.Join(t.TempDir(), "findings")
	for range 2 {
		s := must[*Sanitizer](t)(StartSanitizer(SanitizerOptions{Dir: dir}))
		if _, err := StartSanitizer(SanitizerOptions{}); !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("a second sanitizer: got %v, want ErrInvalidArgument", err)
		}
		running := RunningSanitizer()
		if running == nil || running.Errors() != 0 || len(running.Findings()) != 0 {
			t.Errorf("the running sanitizer is %v", running)
		}
		running.Stop() // does nothing
		if RunningSanitizer() == nil {
			t.Error("RunningSanitizer after Stop of another handle = nil, want the sanitizer")
		}
		s.Stop()
		s.Stop()
		if got := RunningSanitizer(); got != nil {
			t.Errorf("RunningSanitizer after Stop = %v, want nil", got)
		}
	}
	if _, err := os.Stat(dir); err != nil {
		t.Error(err)
	}
	var none *Sanitizer
	none.Stop()
	if n := none.Errors(); n != 0 {
		t.Errorf("Errors of a nil Sanitizer = %d, want 0", n)
	}
}

// StartSanitizer refuses a folder that cannot be created.
func TestStartSanitizerWithoutItsFolder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	check(t, os.WriteFile(file, nil, 0o666))
	if _, err := StartSanitizer(SanitizerOptions{Dir: filepath.Join(file, "findings")}); err == nil {
		t.Error("StartSanitizer with a folder below a file: got no error, want one")
	}
}

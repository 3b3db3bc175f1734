package main

import (
	"context"
	"errors"
	"io"
	"os/exec"
	"testing"
)

// What two ranks write at once is kept whole, and the last line is the reason of their failure.
func TestRanksThatFailGiveTheirReason(t *testing.T) {
	for range 20 {
		var complaint lockedBuffer
		err := startRanks(t.Context(), 2, func(ctx context.Context) *exec.Cmd {
			return exec.CommandContext(ctx, "sh", "-c", "echo no module >&2")
		}, io.Discard, &complaint)
		if text := string(complaint.Bytes()); err != nil || text != "no module\nno module\n" {
			t.Fatalf("%v, %q", err, text)
		}
	}
	if _, ok := any(&lockedBuffer{}).(io.ReaderFrom); ok {
		t.Error("io.Copy writes to the buffer without its lock")
	}
}

func TestPythonFailure(t *testing.T) {
	failed := errors.New("exit status 1")
	for complaint, want := range map[string]string{
		"":                       "python3: exit status 1, without a message",
		"\n":                     "python3: exit status 1, without a message",
		"Traceback\nno module\n": "python3: exit status 1: no module",
	} {
		if err := pythonFailure("python3", failed, []byte(complaint)); err.Error() != want || !errors.Is(err, failed) {
			t.Errorf("%q: %v, want %s", complaint, err, want)
		}
	}
}

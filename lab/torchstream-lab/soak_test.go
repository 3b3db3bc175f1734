package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func soakCommand(t *testing.T, options string) []string {
	t.Helper()
	models := t.TempDir()
	for _, name := range []string{"resnet18.safetensors", "resnet18-other.safetensors"} {
		if err := os.WriteFile(filepath.Join(models, name), nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return []string{"soak", "-models", models, "-package", "none", "-archive", photos, "-images", "3", "-torchstream",
		testProgram(t), "-serve-options", options, "-clients", "2", "-minutes", "0.025", "-every", "50ms", "-json"}
}

// The memory and the threads of a server may grow in its first second, and descriptors may not.
func TestSoakOfAServerThatAnswersRight(t *testing.T) {
	_, stdout, stderr := command(t, append(soakCommand(t, ""), "-swap-every", "20ms")...)
	var r soakReport
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		t.Fatalf("%v: %s%s", err, stdout, stderr)
	}
	if c := r.Counts; c.Answered < 10 || c.Bad < 10 || c.Wrong+c.BadLost+c.Unswapped > 0 || c.Swaps < 2 || len(r.Samples) == 0 {
		t.Errorf("got %+v and %d samples, want answers, refused uploads and swaps", c, len(r.Samples))
	}
	for _, problem := range r.Problems {
		if !strings.HasPrefix(problem, "memory") && !strings.HasPrefix(problem, "threads") && !strings.HasPrefix(problem, "only") {
			t.Errorf("got the problem %q, want none", problem)
		}
	}
}

func TestSoakFindsWrongAnswers(t *testing.T) {
	status, stdout, stderr := command(t, soakCommand(t, "-changing")...)
	if status != 1 || !strings.Contains(stderr, "had class") {
		t.Errorf("got status %d, %s%s, want 1 and the changed class", status, stdout, stderr)
	}
}

func TestSoakFindsFailedSwaps(t *testing.T) {
	for options, want := range map[string]string{
		"-damaged": "the weights are not replaced error=damaged",
		"-late":    "had class",
	} {
		status, stdout, stderr := command(t, append(soakCommand(t, options), "-swap-every", "20ms")...)
		if status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%s: got status %d, %s%s, want 1 and %q", options, status, stdout, stderr, want)
		}
	}
}

func TestSoakNeedsTheServersStatus(t *testing.T) {
	status, stdout, stderr := command(t, soakCommand(t, "-failing")...)
	if status != 1 || !strings.Contains(stderr, "after SIGTERM the server ended with exit status 3") {
		t.Errorf("got status %d, %s%s, want 1 and the server's status", status, stdout, stderr)
	}
}

func TestSoakFindsGrowingDescriptors(t *testing.T) {
	status, stdout, stderr := command(t, soakCommand(t, "-leak")...)
	if status != 1 || !strings.Contains(stderr, "descriptors: ") {
		t.Errorf("got status %d, %s%s, want 1 and the descriptors' growth", status, stdout, stderr)
	}
}

func TestGrowthComparesQuarters(t *testing.T) {
	flat := func() []soakSample {
		samples := make([]soakSample, 40)
		for i := range samples {
			samples[i] = soakSample{MemoryMB: 500, Threads: 20, Descriptors: 30 + i%5}
		}
		return samples
	}
	for name, c := range map[string]struct {
		change func(i int, s *soakSample)
		want   string // in the only problem; "" for none
	}{
		"flat":              {func(int, *soakSample) {}, ""},
		"growth at first":   {func(i int, s *soakSample) { s.MemoryMB = 500 - max(0, float64(10-i)*40) }, ""},
		"one peak":          {func(i int, s *soakSample) { s.Descriptors += max(0, 100*(i-38)) }, ""},
		"memory grows":      {func(i int, s *soakSample) { s.MemoryMB += float64(i) }, "memory: 515.0 MB"},
		"threads grow":      {func(i int, s *soakSample) { s.Threads += i / 5 }, "threads: 23.0"},
		"descriptors grow":  {func(i int, s *soakSample) { s.Descriptors += i }, "descriptors: 47.0"},
		"too few to decide": {nil, "only 3 readings"},
	} {
		samples := flat()
		if c.change == nil {
			samples = samples[:3]
		}
		for i := range samples {
			if c.change != nil {
				c.change(i, &samples[i])
			}
		}
		got := strings.Join(growth(samples), "; ")
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

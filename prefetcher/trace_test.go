package prefetcher

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/trace"
)

// recorded runs an epoch of eight batches, with an operator on each, and returns the names in the file that it wrote.
func recorded(t *testing.T, p *Prefetcher, file string, epoch, leaveAt int) []string {
	t.Helper()
	for b, err := range p.Epoch(t.Context(), epoch) {
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Labels.Add(b.Labels).Err(); err != nil {
			t.Fatal(err)
		}
		if b.Index == leaveAt {
			break
		}
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	var events struct {
		TraceEvents []struct{ Name, Cat string }
	}
	if err := json.Unmarshal(text, &events); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range events.TraceEvents {
		if e.Cat == "range" || e.Name == "aten::add" {
			names = append(names, e.Name)
		}
	}
	return names
}

func TestTraceRecordsTheBatchesOfTheWindow(t *testing.T) {
	onDevices(t, func(t *testing.T, device cuda.Device) {
		for _, c := range []struct {
			name    string
			window  trace.Window
			leaveAt int
			want    []string
		}{
			{"default", trace.Window{}, -1, []string{"batch 2", "batch 3", "batch 4", "batch 5"}},
			{"first", trace.Window{First: -1, Batches: 1}, -1, []string{"batch 0"}},
			{"up to the last", trace.Window{First: 6, Batches: 9}, -1, []string{"batch 6", "batch 7"}},
			{"left", trace.Window{First: 2, Batches: 3}, 3, []string{"batch 2"}},
		} {
			t.Run(c.name, func(t *testing.T) {
				c.window.File = filepath.Join(t.TempDir(), "step.json")
				c.window.Epoch = 1
				p, err := New(&rawSource{batch: 4, samples: 32}, Options{Device: device, Trace: c.window})
				if err != nil {
					t.Fatal(err)
				}
				if names := recorded(t, p, c.window.File, 0, -1); names != nil {
					t.Errorf("epoch 0 was recorded: %v", names)
				}
				var ranges []string
				adds := 0
				for _, name := range recorded(t, p, c.window.File, 1, c.leaveAt) {
					if name == "aten::add" {
						adds++
					} else {
						ranges = append(ranges, name)
					}
				}
				if !slices.Equal(ranges, c.want) || adds < len(c.want) {
					t.Errorf("got %v and %d operators, want %v", ranges, adds, c.want)
				}
				if err := p.Close(); err != nil {
					t.Error(err)
				}
			})
		}
	})
}

// A recording that was asked for and did not happen is an error of Close, once, and of nothing else.
func TestTraceThatFailsIsSaidByClose(t *testing.T) {
	for name, c := range map[string]struct {
		window trace.Window
		want   string
	}{
		"no such batch":  {trace.Window{File: filepath.Join(t.TempDir(), "a.svg"), First: 100}, "nothing was recorded"},
		"no such folder": {trace.Window{File: filepath.Join(t.TempDir(), "no", "a.svg")}, "no such file or directory"},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := New(&rawSource{batch: 4, samples: 32}, Options{Device: cuda.CPU, Trace: c.window})
			if err != nil {
				t.Fatal(err)
			}
			recorded(t, p, c.window.File, 0, -1)
			if err := p.Close(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if err := p.Close(); err != nil {
				t.Errorf("a second Close: %v", err)
			}
		})
	}
	if _, err := New(&rawSource{batch: 4, samples: 32}, Options{Device: cuda.CPU, Trace: trace.Window{File: "a.pdf"}}); err == nil {
		t.Error("a name that says no format was accepted")
	}
}

func TestTraceOfTheEnvironment(t *testing.T) {
	file := filepath.Join(t.TempDir(), "step.json")
	t.Setenv(trace.Environment, file+",batches=1")
	first, err := New(&rawSource{batch: 4, samples: 32}, Options{Device: cuda.CPU})
	if err != nil {
		t.Fatal(err)
	}
	second, err := New(&rawSource{batch: 4, samples: 4}, Options{Device: cuda.CPU})
	if err != nil {
		t.Fatal(err)
	}
	if names := recorded(t, first, file, 0, -1); !slices.Contains(names, "batch 2") || slices.Contains(names, "batch 3") {
		t.Errorf("recorded %v", names)
	}
	for _, p := range []*Prefetcher{first, second} {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}

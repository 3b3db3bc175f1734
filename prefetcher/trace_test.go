//go:build linux

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

// recorded runs an epoch of eight batches, with one operator on each, and returns the names in the
// recorded file.
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
	return named(t, file)
}

// named returns the names of the ranges and operators in a recording, without the prefetcher's own
// ranges. It returns nil if the file does not exist.
func named(t *testing.T, file string) []string {
	t.Helper()
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
		if e.Cat == "range" && !strings.HasPrefix(e.Name, "prefetcher: ") || e.Name == "aten::add" {
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
			{"left", trace.Window{First: 2, Batches: 3}, 3, []string{"batch 2", "batch 3"}},
		} {
			t.Run(c.name, func(t *testing.T) {
				c.window.File = filepath.Join(t.TempDir(), "step.json")
				c.window.Epoch = 1
				p, err := New(&rawSource{batch: 4, samples: 32}, Options{Device: device, Trace: c.window})
				if err != nil {
					t.Fatal(err)
				}
				if names := recorded(t, p, c.window.File, 0, -1); names != nil {
					t.Errorf("epoch 0 was recorded: %v, want nil", names)
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

// A consumer that panics in its turn leaves no range open: the recording would omit an open range.
func TestPanickingConsumerClosesItsRange(t *testing.T) {
	window := trace.Window{File: filepath.Join(t.TempDir(), "step.json"), First: -1, Batches: 4}
	p, err := New(&rawSource{batch: 4, samples: 32}, Options{Device: cuda.CPU, Trace: window})
	if err != nil {
		t.Fatal(err)
	}
	func() {
		defer func() { recover() }()
		for b := range p.Epoch(t.Context(), 0) {
			if b.Index == 1 {
				panic("on purpose")
			}
		}
	}()
	if got, want := named(t, window.File), []string{"batch 0", "batch 1"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// Close returns the error of a recording that was requested and failed, once. No other call does.
func TestTraceErrorIsReturnedByClose(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gone")
	for name, c := range map[string]struct {
		window trace.Window
		want   string
	}{
		"no such batch": {trace.Window{File: filepath.Join(t.TempDir(), "a.svg"), First: 100},
			"nothing was recorded"},
		"a removed folder": {trace.Window{File: filepath.Join(dir, "a.svg")}, "no such file or directory"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.MkdirAll(dir, 0o777); err != nil {
				t.Fatal(err)
			}
			p, err := New(&rawSource{batch: 4, samples: 32}, Options{Device: cuda.CPU, Trace: c.window})
			if err != nil {
				t.Fatal(err)
			}
			// The folder is empty: checking whether a file can be written leaves none behind.
			if err := os.Remove(dir); err != nil {
				t.Fatal(err)
			}
			recorded(t, p, c.window.File, 0, -1)
			if err := p.Close(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if err := p.Close(); err != nil {
				t.Errorf("a second Close: %v, want no error", err)
			}
		})
	}
}

// New reports a file that cannot be written, so that no training run ends without its recording.
func TestNewRefusesUnwritableTraceFile(t *testing.T) {
	photo := filepath.Join(t.TempDir(), "photo.png")
	if err := os.WriteFile(photo, []byte("\xff\xd8\xff a JPEG"), 0o666); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ file, want string }{
		"no such folder": {filepath.Join(t.TempDir(), "no", "a.svg"), "no such file or directory"},
		"a folder":       {t.TempDir() + "/.svg", ""},
		"no format":      {"a.pdf", "a.pdf"},
		"another file":   {photo, "a file of another kind"},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "a folder" {
				if err := os.Mkdir(c.file, 0o777); err != nil {
					t.Fatal(err)
				}
				c.want = "is a directory"
			}
			_, err := New(&rawSource{batch: 4, samples: 32},
				Options{Device: cuda.CPU, Trace: trace.Window{File: c.file}})
			if err == nil || !strings.Contains(err.Error(), c.want) ||
				!strings.Contains(err.Error(), filepath.Base(c.file)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
	// New leaves an existing file unchanged until there is a recording to write.
	file := filepath.Join(t.TempDir(), "a.svg")
	if err := os.WriteFile(file, []byte("<svg>last week's"), 0o666); err != nil {
		t.Fatal(err)
	}
	p, err := New(&rawSource{batch: 4, samples: 32},
		Options{Device: cuda.CPU, Trace: trace.Window{File: file, First: 100}})
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	if text, err := os.ReadFile(file); string(text) != "<svg>last week's" {
		t.Errorf("the file has %q, %v, want %q", text, err, "<svg>last week's")
	}
}

// The picture's title names the recorded batches.
func TestTraceTitle(t *testing.T) {
	for _, c := range []struct {
		name    string
		window  trace.Window
		leaveAt int
		want    string
	}{
		{"default", trace.Window{}, -1, "epoch 0, batches 2 to 5"},
		{"up to the last", trace.Window{First: 6, Batches: 9}, -1, "epoch 0, batches 6 to 7"},
		{"one batch", trace.Window{First: 6}, 6, "epoch 0, batch 6"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.window.File = filepath.Join(t.TempDir(), "a.svg")
			p, err := New(&rawSource{batch: 4, samples: 32}, Options{Device: cuda.CPU, Trace: c.window})
			if err != nil {
				t.Fatal(err)
			}
			for b, err := range p.Epoch(t.Context(), 0) {
				if err != nil {
					t.Fatal(err)
				}
				if b.Index == c.leaveAt {
					break
				}
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			if text, err := os.ReadFile(c.window.File); err != nil || !strings.Contains(string(text), ">"+c.want+"<") {
				t.Errorf("no title %q in %.300s (%v), want no error, string(text) with %q",
					c.want, text, err, ">"+c.want+"<")
			}
		})
	}
}

func TestEnvironmentStartsTrace(t *testing.T) {
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
	if names := recorded(t, first, file, 0, -1); !slices.Contains(names, "batch 2") ||
		slices.Contains(names, "batch 3") {
		t.Errorf("recorded %v", names)
	}
	for _, p := range []*Prefetcher{first, second} {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}

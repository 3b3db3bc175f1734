package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
)

// Every row exists. Figures that this machine can measure are positive, the others are null.
func TestBenchStreams(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if err := benchStreams(t.Context(), []string{"-json", "-repeats", "2", "-python", ""}, &stdout,
		&stderr); err != nil {
		t.Fatal(err)
	}
	var report streamsReport
	decoder := json.NewDecoder(&stdout)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&report); err != nil {
		t.Fatal(err)
	}
	gpu := cuda.DeviceCount() > 0
	if len(report.Calls) != len(callNames) || len(report.Operators) != len(operatorNames) {
		t.Errorf("got %d calls and %d operators, want %v, %v",
			len(report.Calls), len(report.Operators), len(callNames), len(operatorNames))
	}
	measured := func(name string, f *figure, want bool) {
		if (f != nil) != want {
			t.Errorf("%s: measured is %v, want %v", name, f != nil, want)
		} else if want && (f.Min <= 0 || f.Median < f.Min) {
			t.Errorf("%s: got %+v", name, *f)
		}
	}
	for _, name := range callNames {
		c := report.Calls[name]
		if c == nil {
			t.Fatalf("%s is missing", name)
		}
		measured(name, c.Go, gpu || name == "empty_cgo_call" || name == "lock_unlock")
		measured(name+" in Python", c.Python, false)
	}
	for _, name := range operatorNames {
		o := report.Operators[name]
		if o == nil {
			t.Fatalf("%s is missing", name)
		}
		for kind, f := range map[string]*figure{"call": o.Call, "tensor": o.Tensor, "C++": o.CPP} {
			measured(name+" "+kind, f, true)
		}
		measured(name+" in Python", o.Python, false)
	}
	if said := strings.Contains(stderr.String(), "no usable GPU"); said == gpu {
		t.Errorf("with a GPU: %v; on stderr: %q", gpu, stderr.String())
	}
}

func TestBenchStreamsTable(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if err := benchStreams(t.Context(), []string{"-repeats", "1", "-python", "/nonexistent/python"},
		&stdout, &stderr); err != nil {
		t.Fatal(err)
	}
	for _, want := range append([]string{"over an empty call", "/nonexistent/python"},
		append(callNames, operatorNames...)...) {
		if !strings.Contains(stdout.String(), want) {
			t.Errorf("%q is not in the table:\n%s", want, stdout.String())
		}
	}
}

func TestSummary(t *testing.T) {
	for name, c := range map[string]struct {
		means       []float64
		median, min float64
	}{
		"one":  {[]float64{5}, 5, 5},
		"odd":  {[]float64{9, 1, 5}, 5, 1},
		"even": {[]float64{8, 2, 4, 6}, 5, 2},
	} {
		t.Run(name, func(t *testing.T) {
			if got := summary(c.means); got.Median != c.median || got.Min != c.min {
				t.Errorf("summary(%v) is %+v", c.means, *got)
			}
		})
	}
}

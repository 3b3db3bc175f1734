package main

import (
	"math"
	"strings"
	"testing"
)

func TestTable(t *testing.T) {
	ours := figures{}
	for _, name := range order {
		ours[name] = times{Alone: []float64{100, 400, 200}, InTurn: 700, Parallel: 440}
	}
	r := result{Microseconds: ours, PyTorch: figures{"rows graph": {Alone: []float64{500}, InTurn: 500, Parallel: 500}}}
	r.OverCritical = r.Microseconds.ratios()
	if got := r.OverCritical["convs eager"]; math.Abs(got-1.1) > 1e-9 {
		t.Errorf("parallel over the longest: %v, want 1.1", got)
	}
	table := r.table()
	if len(table) != 6 {
		t.Fatalf("%d rows, want 6", len(table))
	}
	for i, want := range map[int]string{1: "rows eager|400|700|440|+10.0 %|1.59",
		3: "  PyTorch|500|500|500|+0.0 %|1.00"} {
		if got := strings.Join(table[i], "|"); got != want {
			t.Errorf("row %d: %s, want %s", i, got, want)
		}
	}
	if got := (figures)(nil).ratios(); got != nil {
		t.Errorf("ratios of no figures = %v, want nil", got)
	}
}

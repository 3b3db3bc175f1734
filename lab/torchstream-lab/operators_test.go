package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/cli"
)

// Every operator of the table has a C++ peer, runs without an error and has a positive time.
func TestBenchOperators(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if err := benchOperators(t.Context(), []string{"-json", "-repeats", "1", "-rounds", "1"}, &stdout,
		&stderr); err != nil {
		t.Fatal(err)
	}
	var report operatorReport
	decoder := json.NewDecoder(&stdout)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&report); err != nil {
		t.Fatal(err)
	}
	typed, seen := 0, map[string]bool{}
	for _, row := range report.Rows {
		if row.CPP <= 0 || row.Go <= 0 {
			t.Errorf("%+v, want CPP more than 0, Go more than 0", row)
		}
		if row.Generic {
			continue
		}
		if seen[row.Operator] {
			t.Errorf("%s is measured twice", row.Operator)
		}
		seen[row.Operator] = true
		typed++
	}
	if typed < 50 || typed == len(report.Rows) {
		t.Errorf("%d typed operators of %d: want 50 at least, and some by name", typed, len(report.Rows))
	}
	var table bytes.Buffer
	if err := report.table(&table); err != nil || !strings.Contains(table.String(), "torch.Call1") {
		t.Errorf("%v, want it to contain \"torch.Call1\", nil\n%s", err, table.String())
	}
}

func TestBenchOperatorsArguments(t *testing.T) {
	for _, args := range [][]string{{"-repeats", "0"}, {"-rounds", "0"}, {"-device", "gpu"}} {
		var wrong cli.UsageError
		if err := benchOperators(t.Context(), args, &bytes.Buffer{}, &bytes.Buffer{}); !errors.As(err, &wrong) {
			t.Errorf("%v: %v", args, err)
		}
	}
}

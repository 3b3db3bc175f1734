package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
)

// Every row has positive figures, and PyTorch's where this machine has it.
func TestBenchTrain(t *testing.T) {
	var stdout, stderr bytes.Buffer
	args := []string{"-json", "-models", "resnet18", "-batches", "2", "-size", "32", "-seconds", "0.001"}
	if _, err := exec.LookPath("python3"); err != nil {
		args = append(args, "-python", "")
	}
	if err := benchTrain(t.Context(), args, &stdout, &stderr); err != nil {
		t.Fatal(err)
	}
	var report trainReport
	decoder := json.NewDecoder(&stdout)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&report); err != nil {
		t.Fatal(err)
	}
	modes := []string{"eager"}
	if cuda.DeviceCount() > 0 {
		modes = append(modes, "graph")
	}
	var got []string
	for _, row := range report.Rows {
		got = append(got, row.Mode)
		figures := []*trainFigure{row.Go}
		if report.PythonNote == "" {
			figures = append(figures, row.PyTorch)
		}
		for _, f := range figures {
			if f == nil || f.ImagesPerSecond <= 0 || f.StepMS <= 0 || f.IssueMS <= 0 {
				t.Errorf("%s: %+v", row.Mode, f)
			}
		}
	}
	if !slices.Equal(got, modes) {
		t.Errorf("modes %v, want %v", got, modes)
	}
	var table bytes.Buffer
	if err := report.table(&table); err != nil || !strings.Contains(table.String(), "resnet18") {
		t.Errorf("%v\n%s", err, table.String())
	}
	t.Log(report.PythonNote)
}

func TestBenchTrainArguments(t *testing.T) {
	for _, args := range [][]string{{"-models", "gpt2"}, {"-models", "resnet19"}, {"-batches", "1"}, {"-batches", "8,x"}, {"-size", "8"}, {"-seconds", "0"}} {
		var wrong usageError
		if err := benchTrain(t.Context(), args, &bytes.Buffer{}, &bytes.Buffer{}); !errors.As(err, &wrong) {
			t.Errorf("%v: %v", args, err)
		}
	}
}

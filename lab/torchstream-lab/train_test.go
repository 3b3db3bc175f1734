package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/clitest"
)

// Every row has positive figures, including PyTorch's if this machine has it.
func TestBenchTrain(t *testing.T) {
	var stdout, stderr bytes.Buffer
	archive := clitest.FewPhotos(t, map[string]int{"a": 8, "b": 8})
	args := []string{"-json", "-table", "-models", "resnet18", "-batches", "4,2", "-size", "32", "-seconds",
		"0.001", "-archive", archive, "-workers", "1"}
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
			if f == nil || f.PerSecond <= 0 || f.StepMS <= 0 || f.CPUMS <= 0 {
				t.Errorf("%s: %+v", row.Mode, f)
			}
		}
	}
	if !slices.Equal(got, append(modes, modes...)) {
		t.Errorf("modes %v, want twice %v", got, modes)
	}
	var issued []string
	for _, row := range report.Issue {
		issued = append(issued, row.Mode)
		if row.Go.IssueMS <= 0 || row.Go.DrainMS < 0 || report.PythonNote == "" && row.Ratio <= 0 {
			t.Errorf("issue time: %+v", row)
		}
	}
	if cuda.DeviceCount() > 0 && !slices.Equal(issued, modes) || cuda.DeviceCount() == 0 && issued != nil {
		t.Errorf("issue times of %v", issued)
	}
	if fed := report.Fed; len(fed) != 1 || fed[0].ImagesPerSecond <= 0 || fed[0].Share <= 0 || fed[0].Workers != 1 ||
		fed[0].HostCores <= 0 || fed[0].ResidentHostCores <= 0 {
		t.Errorf("fed: %+v", fed)
	}
	said := strings.Split(stderr.String(), "\n")
	for _, row := range report.Rows {
		if want := fmt.Sprintf("measuring resnet18, batch %d, %s", row.Batch, row.Mode); !slices.Contains(said, want) {
			t.Errorf("%q is not on standard error", want)
		}
	}
	if want := "measuring resnet18, batch 4, fed from " + archive; !slices.Contains(said, want) {
		t.Errorf("%q is not on standard error", want)
	}
	if table := stderr.String(); !strings.Contains(table, "resnet18") || !strings.Contains(table, archive) {
		t.Errorf("the table:\n%s\nwant it to contain \"resnet18\", %q", table, archive)
	}
	t.Log(report.PythonNote)
}

// This runs on a GPU, or on devices that do nothing with a fake nvJPEG.
func TestBenchTrainBesideEngines(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	var out, stderr bytes.Buffer
	if err := benchTrain(t.Context(), []string{"-json", "-table", "-python", "", "-models", "resnet18",
		"-batches", "4", "-size", "32", "-seconds", "0.05", "-archive", photos,
		"-workers", "1", "-engines"}, &out, &stderr); err != nil {
		t.Fatal(err)
	}
	var report trainReport
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		t.Fatal(err)
	}
	if len(report.Fed) != 1 || report.Fed[0].Engines == nil ||
		!strings.Contains(stderr.String(), "resnet18 beside the JPEG engines") {
		t.Fatalf("fed: %+v\n%s", report.Fed, &stderr)
	}
	e := *report.Fed[0].Engines
	if e.WhyNot != "" {
		t.Skip(e.WhyNot)
	}
	if e.ImagesPerSecond <= 0 || e.Decoded <= 0 || e.Share <= 0 {
		t.Errorf("%+v, want ImagesPerSecond more than 0, Decoded more than 0, Share more than 0", e)
	}
}

// A new process of this program runs a step and reports it.
func TestBenchTrainFirstStep(t *testing.T) {
	command, stderr := clitest.Process(t, "train", "-one-step", "-device", "cpu", "-models", "resnet18",
		"-batches", "2", "-size", "32")
	out, err := command.Output()
	if err != nil || string(out) != oneStepDone+"\n" {
		t.Errorf("it printed %q: %v\n%s\nwant %v, nil", out, err, stderr, oneStepDone+"\n")
	}
}

func TestBenchTrainArguments(t *testing.T) {
	for _, args := range [][]string{{"-models", "gpt3"}, {"-models", "resnet19"}, {"-batches", "1"},
		{"-batches", "8,x"}, {"-size", "8"}, {"-seconds", "0"},
		{"-seconds", "NaN"}, {"-context", "2000"}, {"-first", "-1"}, {"-models", "vit_b_16", "-size", "40"},
		{"-decode-sms", "16"}, {"-decode", "device", "-decode-sms", "-1"}} {
		var wrong cli.UsageError
		if err := benchTrain(t.Context(), args, &bytes.Buffer{}, &bytes.Buffer{}); !errors.As(err, &wrong) {
			t.Errorf("%v: %v", args, err)
		}
	}
}

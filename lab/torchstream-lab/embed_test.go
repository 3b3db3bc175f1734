package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
)

const testPackage = "../../aoti/testdata/images.pt2"

// embedCommand returns the command line of embed, for a program with these lines of shell.
func embedCommand(t *testing.T, lines string, more ...string) []string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	text := fmt.Sprintf("#!/bin/sh\nif test \"$1\" != embed; then exit 1; fi\n%s\n", lines)
	if err := os.WriteFile(program, []byte(text), 0o777); err != nil {
		t.Fatal(err)
	}
	return append([]string{"embed", "-model", testPackage, "-archive", photos, "-torchstream", program, "-time", "20ms",
		"-batch", "2", "-json"}, more...)
}

func TestEmbedIsComparedWithTheModelAlone(t *testing.T) {
	status, stdout, stderr := command(t, embedCommand(t, "echo 'v.npy: 192 vectors of 4 numbers, 300.0 images/s; names in v.csv'")...)
	var r embedReport
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 {
		t.Fatalf("got status %d, %v, %s%s, want 0", status, err, stdout, stderr)
	}
	if r.Embed != 300 || r.Images != 192 || r.Resident <= 0 || r.Rounds != 3 || r.Share <= 0 {
		t.Errorf("got %+v, want 300 images/s of 192 images, and a share of the model's rate", r)
	}
}

func TestEmbedOfACheckpointIsComparedWithItsNetwork(t *testing.T) {
	about := models.Metadata{Model: "resnet18", Classes: []string{"a", "b"}, Size: 32}
	net, err := about.NewModel()
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	path := filepath.Join(t.TempDir(), "best.safetensors")
	if err := checkpoint.Save(path, nn.State(net), about.Strings()); err != nil {
		t.Fatal(err)
	}
	status, stdout, stderr := command(t, embedCommand(t, "echo 'v.npy: 192 vectors of 512 numbers, 300.0 images/s'", "-model", path,
		"-rounds", "1")...)
	var r embedReport
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 {
		t.Fatalf("got status %d, %v, %s%s, want 0", status, err, stdout, stderr)
	}
	if r.Embed != 300 || r.Resident <= 0 || r.Share != 300/r.Resident {
		t.Errorf("got %+v, want 300 images/s as a share of the network's rate", r)
	}
}

func TestEmbedWithoutARateIsAnError(t *testing.T) {
	status, _, stderr := command(t, embedCommand(t, "echo 'v.npy: 192 vectors of 4 numbers; names in v.csv'")...)
	if status != 1 || !strings.Contains(stderr, "printed no rate") {
		t.Errorf("got status %d, %s, want 1 and that no rate was printed", status, stderr)
	}
	if status, _, stderr := command(t, "embed", "-archive", photos); status != 2 || !strings.Contains(stderr, "needs -model") {
		t.Errorf("got status %d, %s, want 2", status, stderr)
	}
}

// The rate between the lines leaves out the start, which the rate in the report includes.
func TestEmbedIsMeasuredWithoutItsStart(t *testing.T) {
	lines := "for i in 1 2 3 4 5; do echo \"${i}00 of 500 images\"; sleep 0.05; done; " +
		"echo 'v.npy: 500 vectors of 4 numbers, 1.0 images/s; names in v.csv'"
	status, stdout, stderr := command(t, embedCommand(t, lines, "-rounds", "1")...)
	var r embedReport
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 {
		t.Fatalf("got status %d, %v, %s%s, want 0", status, err, stdout, stderr)
	}
	if r.Embed != 1 || r.Steady <= 1 || r.Steady > 100/0.05 || r.SteadyShare <= r.Share {
		t.Errorf("got %+v, want 1 image/s, and without the start more, but at most 2000", r)
	}
}

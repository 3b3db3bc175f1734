package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"io"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/examples/internal/lesson"
)

func TestHidden(t *testing.T) {
	for name, c := range map[string]struct{ copy, compute, together, want float64 }{
		"none":                          {10, 16, 26, 0},
		"all of a shorter copy":         {10, 16, 16, 1},
		"all of a shorter compute":      {16, 10, 16, 1},
		"half":                          {10, 16, 21, 0.5},
		"slower than one after another": {10, 16, 30, 0},
		"faster than either alone":      {10, 16, 15, 1},
	} {
		t.Run(name, func(t *testing.T) {
			if got := hidden(c.copy, c.compute, c.together); got != c.want {
				t.Errorf("copy %v, compute %v, together %v: %v, want %v", c.copy, c.compute, c.together, got, c.want)
			}
		})
	}
}

// One of the four choices overlaps. The output explains each choice.
func TestWhy(t *testing.T) {
	for _, on := range []string{"receiver", "both"} {
		overlaps := 0
		for _, c := range []choice{{}, {Receiver: true}, {Sender: true}, {Sender: true, Receiver: true}} {
			text := why(on, c)
			if strings.HasPrefix(text, "overlaps") {
				overlaps++
				if !c.Sender || !c.Receiver {
					t.Errorf("compute on %s, %+v: %q", on, c, text)
				}
			}
		}
		if overlaps != 1 {
			t.Errorf("compute on %s: %d choices overlap, want 1", on, overlaps)
		}
	}
}

func sample() *report {
	choices := []choice{{CopyPeer: 26.7}, {Receiver: true, CopyPeer: 26.6}, {Sender: true, CopyPeer: 26.5},
		{Sender: true, Receiver: true, CopyPeer: 16.9, Hidden: 0.9}}
	return &report{
		Workload: workload{1024, 4, 8, 9}, GPU: "a GPU", Direct: true, Raw: 394, Copy: 10.9, Link: 393, OfRaw: 0.997,
		Computes: []compute{{On: "receiver", Alone: 15.8, Choices: choices},
			{On: "both", Alone: 15.9, Choices: choices}},
	}
}

func TestPrint(t *testing.T) {
	var out bytes.Buffer
	r := sample()
	r.PeerNote = "no PyTorch here"
	if err := r.print(&lesson.Lesson{Out: &out}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"99.7 % of the 394.0 GB/s of LibTorch", "Compute on receiver: alone 15.8",
		"Compute on both", "side, side           16.90    90 %", "no PyTorch here"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in\n%s", want, out.String())
		}
	}
}

// The table shows PyTorch's figures in the same rows.
func TestPrintWithPeer(t *testing.T) {
	r := sample()
	text := `{"copy_ms": 10.9, "workloads": [` +
		strings.Repeat(`{"compute_ms": 15.8, "choices": [{"blocking_ms": 26.71, "non_blocking_ms": 26.72},
		{"blocking_ms": 26.73, "non_blocking_ms": 26.74}, {"blocking_ms": 26.75, "non_blocking_ms": 26.76},
		{"blocking_ms": 17.01, "non_blocking_ms": 17.02}]},`, 2)
	r.Peer = &peerJSON{}
	if err := json.Unmarshal([]byte(strings.TrimSuffix(text, ",")+"]}"), r.Peer); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := r.print(&lesson.Lesson{Out: &out}); err != nil {
		t.Fatal(err)
	}
	for row := range strings.SplitSeq(out.String(), "\n") {
		if strings.HasPrefix(row, "side, side ") &&
			!(strings.Contains(row, "17.01") && strings.Contains(row, "17.02")) {
			t.Errorf("got %q", row)
		}
	}
}

func TestWorkloadIsChecked(t *testing.T) {
	if err := (&workload{MiB: 1, Copies: 1, Products: 0, Rounds: 1}).run(t.Context(),
		&lesson.Lesson{}); err == nil || !strings.Contains(err.Error(), "-products") {
		t.Errorf("got %v, want an error with \"-products\"", err)
	}
}

// The experiment uses the flags' values after Parse. Without two GPUs it fails for another reason.
func TestFlagsReachTheExperiment(t *testing.T) {
	var w workload
	flags := flag.NewFlagSet("03-p2p", flag.ContinueOnError)
	w.flags(flags)
	run := w.run
	if err := flags.Parse(strings.Fields("-mib 1 -copies 1 -products 1 -rounds 1")); err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), &lesson.Lesson{Out: io.Discard}); err != nil &&
		strings.Contains(err.Error(), "-products") {
		t.Error(err)
	}
}

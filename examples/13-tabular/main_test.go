package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/torch"
)

func small() options {
	return options{label: "species", device: "cpu", epochs: 12, batch: 64, width: 32, val: 0.2, seed: 1}
}

func TestTheNetworkLearnsTheTable(t *testing.T) {
	before := torch.LiveTensors()
	var out bytes.Buffer
	got, err := run(context.Background(), small(), &out)
	if err != nil {
		t.Fatal(err)
	}
	if got < 0.9 { // chance is 1/3, and single features give about 2/3
		t.Errorf("accuracy %.2f on held-out rows, want at least 0.9\n%s", got, &out)
	}
	if !strings.Contains(out.String(), "1500 rows of 4 features, 3 classes; 300 rows are held out") {
		t.Errorf("the output %q does not describe the table", &out)
	}
	if n := torch.LiveTensors(); n > before {
		t.Errorf("%d tensors are left, want none", n-before)
	}
}

// A run that stops after some epochs and resumes gives the same network as one without a stop.
func TestResumedTrainingEqualsTheUndisturbedOne(t *testing.T) {
	o := small()
	o.epochs, o.dir = 4, filepath.Join(t.TempDir(), "whole")
	want, err := run(context.Background(), o, &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	o.dir = filepath.Join(t.TempDir(), "parts")
	for _, epochs := range []int{2, 4} {
		o.epochs = epochs
		got, err := run(context.Background(), o, &bytes.Buffer{})
		if err != nil {
			t.Fatal(err)
		}
		if o.resume && got != want {
			t.Errorf("resumed: accuracy %v, want %v", got, want)
		}
		o.resume = true
	}
}

func TestTablesAreRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.csv")
	for text, want := range map[string]string{
		"":                       "no header",
		"a,b\n1,2\n":             `no column "species"`,
		"a,species\n1,x\n2,x\n":  "has 1 classes in 2 rows",
		"a,species\n1,x\nno,y\n": `a.csv:3: column "a" has "no"`,
		"a,species\n1,x\n2\n":    "wrong number of fields",
		"a,species\n1,x\n2,y\n":  "-val 0.2 of 2 rows",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		o := small()
		o.csv = file
		if _, err := run(context.Background(), o, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want an error with %q", text, err, want)
		}
	}
	table, err := readTable(strings.NewReader("species,a,b\ny,1,\nx,3,5\n"), "table", "species")
	if err != nil {
		t.Fatal(err)
	}
	table.normalise([]int{0, 1})
	if table.labels[0] != 1 || table.labels[1] != 0 || table.cells[0][1] != 5 || table.mean[0] != 2 || table.deviation[0] != 1 {
		t.Errorf("got %+v, want the labels 1 and 0, the empty cell 5, mean 2 and deviation 1", table)
	}
}

package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/torch"
)

func small() options {
	return options{train: "../data/photos-train.tgz", test: "../data/photos-test.tgz", device: "cpu",
		size: 16, width: 8, pretrain: 3, epochs: 2, seed: 1}
}

func TestTheFrozenTrunkIsAheadOfNothing(t *testing.T) {
	o := small()
	o.picture = filepath.Join(t.TempDir(), "finetune.svg")
	before := torch.LiveTensors()
	var out bytes.Buffer
	r, err := run(context.Background(), o, &out)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.tuned) != 3 || len(r.scratch) != 3 || r.tuned[1] <= r.scratch[1] || r.tuned[2] < 0.5 {
		t.Errorf("accuracies %v with the trunk, %v without", r.tuned, r.scratch)
	}
	if !strings.Contains(out.String(), "second task, after epoch 2: ") {
		t.Errorf("printed, want it to contain \"second task, after epoch 2: \"\n%s", &out)
	}
	if len(r.report.Mismatched) != 2 || len(r.report.Missing) != 0 || len(r.report.Loaded) == 0 {
		t.Errorf("the report %+v, want the head's two tensors to differ in shape", r.report)
	}
	if picture, err := os.ReadFile(o.picture); err != nil || !bytes.Contains(picture, []byte("frozen trunk")) {
		t.Errorf("the picture: %v", err)
	}
	if n := torch.LiveTensors(); n > before {
		t.Errorf("%d tensors are left, want none", n-before)
	}
}

func TestMistakesSayWhatToDo(t *testing.T) {
	for want, change := range map[string]func(*options){
		"-epochs 0: want 1": func(o *options) { o.epochs = 0 },
		"none.tgz":          func(o *options) { o.train = "none.tgz" },
		"from its root: run 08-finetune there, or name another with -archive FILE": func(
			o *options) {
			o.train = lesson.TrainArchive
		},
		"from its root: run 08-finetune there, or name another with -test FILE": func(
			o *options) {
			o.test = lesson.TestArchive
		},
		"none.safetensors": func(o *options) { o.checkpoint = "none.safetensors" },
	} {
		o := small()
		change(&o)
		if _, err := run(context.Background(), o, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

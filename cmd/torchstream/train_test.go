//go:build linux && cgo

package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/png"
	"io"
	"io/fs"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/clitest"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// quick returns arguments of trainSmall for tests of the images that train reads: one epoch of a
// network whose checkpoints have a tenth of a ResNet-18's bytes.
func quick(args ...string) []string {
	return append([]string{"-model", "mobilenet_v3_small", "-epochs", "1"}, args...)
}

// trainSmall trains a ResNet-18 on images of 32 pixels for two epochs.
func trainSmall(t *testing.T, archive, out string, args ...string) string {
	t.Helper()
	args = append([]string{"train", "-archive", archive, "-size", "32", "-batch", "4", "-epochs", "2",
		"-device", "cpu", "-o", out}, args...)
	status, stdout, stderr := command(t, args...)
	if status != 0 {
		t.Fatalf("%q: status %d, %s, want 0", args, status, stderr)
	}
	return stdout
}

func TestTrain(t *testing.T) {
	archive := clitest.FewPhotos(t, map[string]int{"cat": 5, "dog": 5})
	out := filepath.Join(t.TempDir(), "out")
	test := clitest.FewPhotos(t, map[string]int{"cat": 5, "dog": 5})
	stdout := trainSmall(t, archive, out, "-test", test)
	for _, want := range []string{"10 images in 2 classes", "\n    0       5  cat",
		"resnet18: 11177538 parameters", "test top-1", "6 steps, ",
		"torchstream predict -checkpoint " + filepath.Join(out, "best.pt"), "torch.load"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("got\n%s\nwant it to contain %q", stdout, want)
		}
	}
	if strings.Contains(stdout, "typo") {
		t.Errorf("a class is suspicious:\n%s\nwant it without %q", stdout, "typo")
	}
	for _, name := range []string{"best.pt", "last.pt"} {
		net, err := models.ByName("resnet18", models.Options{NumClasses: 2})
		if err != nil {
			t.Fatal(err)
		}
		metadata, err := nn.Load(filepath.Join(out, name), net)
		if err != nil {
			t.Fatal(err)
		}
		var classes []string
		if err := json.Unmarshal([]byte(metadata["classes"]), &classes); err != nil ||
			!reflect.DeepEqual(classes, []string{"cat", "dog"}) {
			t.Errorf("classes %v, %v, want no error, classes = %+v", classes, err, []string{"cat", "dog"})
		}
		for _, n := range nn.State(net) {
			n.Tensor.Close()
		}
	}

	// An explicit weight decay of 0 is not replaced by the optimizer's default.
	args := []string{"train", "-archive", archive, "-size", "32", "-batch", "4", "-epochs", "2", "-device",
		"cpu", "-o", out, "-resume", "-weight-decay", "0"}
	if status, _, stderr := command(t, args...); status != 1 ||
		!strings.Contains(stderr, "weight-decay 0.01, not 0: resume") {
		t.Errorf("status %d, %s, want status 1, stderr with %q",
			status, stderr, "weight-decay 0.01, not 0: resume")
	}

	// Resuming a finished run reports that it is finished, and changes nothing.
	last, err := os.ReadFile(filepath.Join(out, "last.pt"))
	if err != nil {
		t.Fatal(err)
	}
	stdout = trainSmall(t, archive, out, "-test", test, "-resume")
	for _, want := range []string{
		filepath.Join(out, "last.pt") +
			" is of a run that is finished (2 of 2 epochs, 6 steps), so there was nothing to train; the best epoch is ",
		"-o DIR -pretrained " + filepath.Join(out, "best.pt") + " trains its result further\n",
		"torchstream predict -checkpoint ",
	} {
		if !strings.Contains(stdout, want) {
			t.Errorf("got\n%s\nwant it to contain %q", stdout, want)
		}
	}
	if now, err := os.ReadFile(filepath.Join(out, "last.pt")); err != nil || !bytes.Equal(now, last) {
		t.Errorf("last.pt has changed: %v", err)
	}

	// An existing run in the folder does not hide that the archive is missing.
	missing := filepath.Join(t.TempDir(), "missing.tgz")
	for says, archives := range map[string][]string{"-archive: stat " + missing: {missing},
		"-test: stat " + missing: {archive, "-test", missing}} {
		args := append([]string{"train", "-device", "cpu", "-o", out, "-archive"}, archives...)
		if status, stdout, stderr := command(t, args...); status != 1 || stdout != "" ||
			!strings.Contains(stderr, says) {
			t.Errorf("%q: status %d, %s%s, want status 1, stdout \"\", stderr with %q",
				args, status, stdout, stderr, says)
		}
	}

	// The same folder is allowed only with -resume and the same options.
	same := []string{"train", "-archive", archive, "-size", "32", "-batch", "4", "-epochs", "2", "-device",
		"cpu", "-o", out, "-test", test}
	for says, args := range map[string][]string{
		"has an earlier run (2 of 2 epochs): -o DIR": same,
		"batch 4, not 5; epochs 2, not 3: resume":    append(same, "-resume", "-batch", "5", "-epochs", "3"),
		"best.pt -o DIR starts from its result":      append(same, "-resume", "-lr", "0.5"),
	} {
		if status, _, stderr := command(t, args...); status != 1 || !strings.Contains(stderr, says) {
			t.Errorf("%q: status %d, %s, want status 1, stderr with %q", args, status, stderr, says)
		}
	}

	// With a different number of classes the head starts untrained. With -freeze only the head is
	// trained.
	more := clitest.FewPhotos(t, map[string]int{"cat": 4, "dog": 4, "hen": 4})
	fine := filepath.Join(t.TempDir(), "fine")
	stdout = trainSmall(t, more, fine, "-pretrained", filepath.Join(out, "best.pt"), "-freeze",
		"-optimizer", "sgd", "-ema", "0.5")
	if !strings.Contains(stdout, "resnet18: 1539 parameters to train") || !strings.Contains(stdout, "fc.weight") {
		t.Errorf("fine-tuning printed\n%s\nwant stdout with %q and %q",
			stdout, "resnet18: 1539 parameters to train", "fc.weight")
	}
	requireOnlyHeadTrained(t, filepath.Join(out, "best.pt"), filepath.Join(fine, "last.pt"))

	// With the same classes the head starts from the checkpoint.
	again := filepath.Join(t.TempDir(), "again")
	stdout = trainSmall(t, archive, again, "-pretrained", filepath.Join(out, "best.pt"), "-freeze", "-lr",
		"1e-6", "-weight-decay", "0")
	if !strings.Contains(stdout, "resnet18: 1026 parameters to train") || strings.Contains(stdout, "fc.weight") {
		t.Errorf("training the head further printed\n%s\nwant stdout with %q, without %q",
			stdout, "resnet18: 1026 parameters to train", "fc.weight")
	}
	requireOnlyHeadTrained(t, filepath.Join(out, "best.pt"), filepath.Join(again, "last.pt"))
	before, after := tensorBits(t, filepath.Join(out, "best.pt"))["fc.weight"], tensorBits(t,
		filepath.Join(again, "last.pt"))["fc.weight"]
	for i := range before {
		if math.Abs(float64(after[i]-before[i])) > 1e-5 {
			t.Fatalf("element %d of the head begins near %v, not at the checkpoint's %v", i, after[i], before[i])
		}
	}
}

// requireOnlyHeadTrained requires that two checkpoints of a ResNet differ exactly in the head's
// tensors.
func requireOnlyHeadTrained(t *testing.T, from, to string) {
	t.Helper()
	before, after := tensorBits(t, from), tensorBits(t, to)
	for name, values := range before {
		if same := reflect.DeepEqual(values, after[name]); same == strings.HasPrefix(name, "fc.") {
			t.Errorf("%s: unchanged %v", name, same)
		}
	}
}

// train refuses a checkpoint of another network. If the metadata names the network, it does so
// before it reads the archive. Otherwise, with -freeze, it compares the tensors below the head.
func TestTrainRefusesAnotherNetwork(t *testing.T) {
	archive := clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2})
	save := func(model string, metadata map[string]string) string {
		net, err := models.ByName(model, models.Options{NumClasses: 3})
		if err != nil {
			t.Fatal(err)
		}
		defer nn.Close(net)
		path := filepath.Join(t.TempDir(), "other.pt")
		if err := nn.Save(path, net, metadata); err != nil {
			t.Fatal(err)
		}
		return path
	}
	args := []string{"train", "-archive", archive, "-size", "32", "-batch", "4", "-epochs", "1", "-device",
		"cpu", "-o", filepath.Join(t.TempDir(), "out"), "-pretrained"}
	named := save("mobilenet_v3_small", map[string]string{"model": "mobilenet_v3_small"})
	says := "-pretrained " + named + " is a checkpoint of a mobilenet_v3_small, and -model is resnet18: " +
		"train it further with -model mobilenet_v3_small, or"
	if status, stdout, stderr := command(t, append(args, named)...); status != 1 || stdout != "" ||
		!strings.Contains(stderr, says) {
		t.Errorf("status %d, %s%s, want status 1, stdout \"\", stderr with %q",
			status, stdout, stderr, says)
	}
	// Every tensor of a ResNet-18 except the head is also in a ResNet-34, which has 8 more blocks
	// of 12 tensors each. The model in this file's metadata is not one of ours.
	deeper := save("resnet34", map[string]string{"model": "mine"})
	status, stdout, stderr := command(t, append(args, deeper, "-freeze")...)
	if status != 1 || !strings.Contains(stderr,
		"-freeze trains the head alone, and 80 tensors of "+deeper+
			" and this resnet18 differ below it: layer1.2.conv1.weight, ") {
		t.Errorf("status %d, %s, want status 1, stderr with %q", status, stderr,
			"-freeze trains the head alone, and 80 tensors of "+deeper+
				" and this resnet18 differ below it: layer1.2.conv1.weight, ")
	}
	if !strings.Contains(stdout, "is not in the module\nand 88 more differences\n\n") ||
		strings.Count(stdout, "tensor layer") != 8 {
		t.Errorf("printed\n%s", stdout)
	}
	// Without -freeze all tensors are trained, so their origin does not matter.
	if stdout := trainSmall(t, archive, filepath.Join(t.TempDir(), "out"), "-epochs", "1", "-pretrained",
		deeper); !strings.Contains(stdout, "\n1 step, ") {
		t.Errorf("printed\n%s\nwant it with %q", stdout, "\n1 step, ")
	}
	// In the other direction, the checkpoint of a ResNet-18 lacks blocks of a ResNet-34, or has
	// different blocks under the same names.
	shallow := save("resnet18", nil)
	for model, first := range map[string]string{"resnet34": "layer1.2.conv1.weight",
		"resnet50": "layer1.0.conv3.weight"} {
		if status, _, stderr := command(t, append(args, shallow, "-freeze", "-model", model)...); status != 1 ||
			!strings.Contains(stderr, " and this "+model+" differ below it: "+first+", ") {
			t.Errorf("status %d, %s, want status 1, stderr with %q",
				status, stderr, " and this "+model+" differ below it: "+first+", ")
		}
	}
}

// In every model family, the head that -freeze trains is the layer whose size depends on the number
// of classes.
func TestFreezeKnowsTheHead(t *testing.T) {
	for _, model := range []string{"resnet18", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "vit_b_16"} {
		t.Run(model, func(t *testing.T) {
			net, err := newModel(model, 2, 32)
			if err != nil {
				t.Fatal(err)
			}
			defer nn.Close(net)
			path := filepath.Join(t.TempDir(), "two.safetensors")
			if err := nn.Save(path, net, nil); err != nil {
				t.Fatal(err)
			}
			other, err := newModel(model, 3, 32)
			if err != nil {
				t.Fatal(err)
			}
			defer nn.Close(other)
			report, err := nn.LoadWith(path, other, nn.LoadOptions{Partial: true})
			if err != nil || len(report.Mismatched) != 2 {
				t.Fatal(report, err)
			}
			if unfit := belowHead(other, report); len(unfit) != 0 {
				t.Error(unfit)
			}
		})
	}
}

// tensorBits returns the float32 tensors of a checkpoint.
func tensorBits(t *testing.T, path string) map[string][]float32 {
	t.Helper()
	file, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	all := map[string][]float32{}
	for _, spec := range file.Tensors() {
		tensor, err := file.Read(spec.Name)
		if err != nil {
			t.Fatal(err)
		}
		if values, err := tensor.Float32s(); err == nil {
			all[spec.Name] = values
		}
		tensor.Close()
	}
	return all
}

// interrupter cancels a context when a certain text is written to it.
type interrupter struct {
	bytes.Buffer
	text   string
	cancel func()
}

func (w *interrupter) Write(p []byte) (int, error) {
	if strings.Contains(string(p), w.text) {
		w.cancel()
	}
	return w.Buffer.Write(p)
}

// An interrupted run says how to resume. With -resume it ends with the parameters of an
// uninterrupted run.
func TestTrainInterruptedAndResumed(t *testing.T) {
	archive := clitest.FewPhotos(t, map[string]int{"cat": 5, "dog": 5})
	whole, out := filepath.Join(t.TempDir(), "whole"), filepath.Join(t.TempDir(), "out")
	trainSmall(t, archive, whole)
	ctx, cancel := context.WithCancel(context.Background())
	stdout, stderr := &interrupter{text: "samples/s", cancel: cancel}, &bytes.Buffer{} // in epoch 1's line
	args := []string{"train", "-archive", archive, "-size", "32", "-batch", "4", "-epochs", "2", "-device",
		"cpu", "-o", out}
	if status := program().Run(ctx, args, stdout, stderr); status != 130 ||
		stderr.String() != "torchstream: interrupted in epoch 2 after step 3: the same command with "+
			"-resume goes on from "+filepath.Join(out, "last.pt")+"\n" {
		t.Fatalf("status %d, %s", status, stderr)
	}
	if !strings.Contains(stdout.String(), "lr at end") || !strings.Contains(stdout.String(), "memory  best\n") {
		t.Errorf("the table has other headings:\n%s\nwant stdout with %q and %q",
			stdout, "lr at end", "memory  best\n")
	}
	stdout, stderr = &interrupter{text: "parameters to train", cancel: func() {}}, &bytes.Buffer{}
	early, stop := context.WithCancel(context.Background())
	stdout.cancel = stop
	if status := program().Run(early, append(args, "-o", filepath.Join(t.TempDir(), "early")), stdout,
		stderr); status != 130 ||
		stderr.String() != "torchstream: interrupted before the first step: nothing is saved, run the "+
			"same command again\n" {
		t.Errorf("status %d, %s", status, stderr)
	}
	if status, stdout, stderr := command(t, args...); status != 1 || stdout != "" ||
		!strings.Contains(stderr, "has an earlier run (1 of 2 epochs): -resume to go on") {
		t.Errorf("status %d, %s%s", status, stdout, stderr)
	}
	if resumed := trainSmall(t, archive, out, "-resume"); !strings.Contains(resumed,
		"resumes in epoch 2 of 2, after step 3") {
		t.Errorf("the resumed run printed\n%s\nwant it with %q",
			resumed, "resumes in epoch 2 of 2, after step 3")
	}
	if !reflect.DeepEqual(tensorBits(t, filepath.Join(out, "last.pt")),
		tensorBits(t, filepath.Join(whole, "last.pt"))) {
		t.Error("the resumed run's last.pt has other tensors, want the bits of the whole run's")
	}
}

// A run that -patience has ended is finished. It continues with a larger -patience.
func TestTrainEndedByPatience(t *testing.T) {
	var out bytes.Buffer
	o := trainOptions{out: "run1", epochs: 9}
	report := &train.Report{Stopped: true, Steps: 12, Epochs: []train.Epoch{{Epoch: 1, Best: true}, {Epoch: 2}}}
	if err := o.finish(report, 0, nil, &out); err != nil ||
		!strings.Contains(out.String(), "run1/last.pt is of a run that is finished (2 of 9 epochs, 12 steps)") ||
		!strings.Contains(out.String(), "\n-patience ended it: -resume with a larger one goes on\n") {
		t.Errorf("%v, %s", err, out.String())
	}
}

// Mixed precision, memory order, graphs (absent on the CPU), event files and a profile work
// together. A run resumes only with the same precision.
func TestTrainOptions(t *testing.T) {
	archive := clitest.FewPhotos(t, map[string]int{"cat": 5, "dog": 5})
	out := filepath.Join(t.TempDir(), "out")
	profile := filepath.Join(t.TempDir(), "step.json")
	stdout := trainSmall(t, archive, out, "-amp", "bf16", "-channels-last", "-graph", "-patience", "5",
		"-tensorboard", "-profile", profile, "-save-steps", "2")
	if !strings.Contains(stdout, "6 steps, ") || strings.Contains(stdout, "replayed") ||
		!strings.Contains(stdout, "-graph has no effect on the CPU") {
		t.Error(stdout)
	}
	events, err := filepath.Glob(filepath.Join(out, "events.out.tfevents.*"))
	if err != nil || len(events) != 1 {
		t.Errorf("event files %v, %v, want no error, len(events) = 1", events, err)
	}
	for _, path := range []string{filepath.Join(out, "curves.png"), profile} {
		if info, err := os.Stat(path); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v, %v", path, info, err)
		}
	}
	args := []string{"train", "-archive", archive, "-size", "32", "-batch", "4", "-epochs", "2", "-device",
		"cpu", "-o", out, "-resume", "-channels-last"}
	if status, _, stderr := command(t, args...); status != 1 || !strings.Contains(stderr, "amp bf16, not ") {
		t.Errorf("status %d, %s, want status 1, stderr with %q", status, stderr, "amp bf16, not ")
	}
}

func TestTrainMistakes(t *testing.T) {
	for says, args := range map[string][]string{
		"train needs -archive":               {},
		"want one of resnet18":               {"-archive", photos, "-model", "gpt2"},
		"did you mean resnet18? want one of": {"-archive", photos, "-model", "resnet81"},
		"want adamw or sgd":                  {"-archive", photos, "-optimizer", "lion"},
		"-size 31: must be from 32 to 28672": {"-archive", photos, "-size", "31"},
		"-ema 1: must be from 0":             {"-archive", photos, "-ema", "1"},
		"-pretrained-dict needs":             {"-archive", photos, "-pretrained-dict", "ema"},
		"-freeze needs":                      {"-archive", photos, "-freeze"},
		"want bf16 or fp16":                  {"-archive", photos, "-amp", "fp8"},
		"-lr -1: must be more":               {"-archive", photos, "-lr", "-1"},
		"-lr 0: must be more":                {"-archive", photos, "-lr", "0"},
		"-weight-decay -1: must be":          {"-archive", photos, "-weight-decay", "-1"},
		"-workers -1: must be at":            {"-archive", photos, "-workers", "-1"},
		"use -decode auto or host": {"-archive", photos, "-decode", "device",
			"-device", "cpu"},
		"-bad-samples \"ignore\": want fail, skip or subst": {"-archive", photos, "-bad-samples", "ignore"},
		"-decode-sms -1: want": {"-archive", photos, "-decode", "auto",
			"-decode-sms", "-1"},
		"-decode-sms 8: want":                       {"-archive", photos, "-decode-sms", "8"},
		"-profile: trace: \"x.foo\": the name":      {"-archive", photos, "-profile", "x.foo"},
		"-patience -1: must be":                     {"-archive", photos, "-patience", "-1"},
		"-size \"ab\\\"c\": want a whole number of": {"-archive", photos, "-size", "ab\"c"},
		"-seed \"-1\": want a whole number of at":   {"-archive", photos, "-seed", "-1"},
		"-lr \"x\": want a number":                  {"-archive", photos, "-lr", "x"},
		"-graph \"x\": want true or false":          {"-archive", photos, "-graph=x"},
		"-size 100: vit_b_16 divides images into squares of 16 pixels: want a multiple of 16": {"-archive",
			photos, "-model", "vit_b_16", "-size", "100"},
		"-lr NaN: must be":                                     {"-archive", photos, "-lr", "nan"},
		"-ema NaN: must be":                                    {"-archive", photos, "-ema", "nan"},
		"-warmup +Inf: must":                                   {"-archive", photos, "-warmup", "inf"},
		"CPU: use -amp bf16":                                   {"-archive", photos, "-amp", "fp16", "-device", "cpu"},
		"-device \"tpu\"":                                      {"-archive", photos, "-device", "tpu"},
		"did you mean -archive x y.tgz -epochs 3?":             {"x y.tgz", "-epochs", "3"},
		"did you mean -archive \"x\\x1b\"?":                    {"x\x1b"},
		"train takes options only, and no argument: " + photos: {"-archive", photos, photos},
	} {
		if status, stdout, stderr := command(t, append([]string{"train"}, args...)...); status != 2 ||
			stdout != "" || !strings.Contains(stderr, says) {
			t.Errorf("%q: status %d, stdout %q, stderr %q, want status 2, no stdout, stderr with %q",
				args, status, stdout, stderr, says)
		}
	}
	target, err := filepath.Abs(photos)
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link.tgz")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	for _, test := range []string{photos, link} {
		if status, stdout, stderr := command(t, "train", "-archive", photos, "-test", test, "-device",
			"cpu", "-o", filepath.Join(t.TempDir(), "out")); status != 2 ||
			stdout != "" || !strings.Contains(stderr, "-test "+test+" is -archive, so the accuracy") {
			t.Errorf("status %d, %s%s, want status 2, stdout \"\", stderr with %q",
				status, stdout, stderr, "-test "+test+" is -archive, so the accuracy")
		}
	}
	missing := filepath.Join(t.TempDir(), "missing.tgz")
	if status, _, stderr := command(t, "train", "-archive", missing, "-device", "cpu"); status != 1 ||
		!strings.Contains(stderr, missing) {
		t.Errorf("status %d, %s, want status 1, stderr with %q", status, stderr, missing)
	}
	if status, stdout, stderr := command(t, "train", "-archive", photos, "-test", missing, "-device",
		"cpu"); status != 1 || stdout != "" ||
		!strings.Contains(stderr, "-test: stat "+missing) {
		t.Errorf("status %d, %s%s, want status 1, stdout \"\", stderr with %q",
			status, stdout, stderr, "-test: stat "+missing)
	}
	folder := t.TempDir()
	if status, stdout, stderr := command(t, "train", "-archive", photos, "-pretrained", folder, "-device",
		"cpu"); status != 1 || stdout != "" ||
		!strings.Contains(stderr, "-pretrained "+folder+" is a folder, without a checkpoint") {
		t.Errorf("status %d, %s%s, want status 1, stdout \"\", stderr with %q",
			status, stdout, stderr, "-pretrained "+folder+" is a folder, without a checkpoint")
	}
	// The test archive has a class that the training archive lacks.
	archive, test := clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2}), clitest.FewPhotos(t,
		map[string]int{"cat": 1, "cta": 1})
	out := filepath.Join(t.TempDir(), "out")
	if status, _, stderr := command(t, "train", "-archive", archive, "-test", test, "-size", "32",
		"-device", "cpu", "-epochs", "1", "-o", out); status != 1 ||
		!strings.Contains(stderr, "-test: "+test+" has 1 class that "+archive+" has not: cta: rename") {
		t.Errorf("status %d, %s, want status 1, stderr with %q",
			status, stderr, "-test: "+test+" has 1 class that "+archive+" has not: cta: rename")
	}
	if status, _, stderr := command(t, "train", "-archive", photos, "-size", "32", "-batch",
		"1"); status != 2 || !strings.Contains(stderr, "-batch 1: BatchNorm can compute no statistics of one image") {
		t.Errorf("status %d, %s", status, stderr)
	}
	// The test archive is damaged.
	cut := filepath.Join(t.TempDir(), "cut.tgz")
	if err := os.WriteFile(cut, []byte("\x1f\x8b"), 0o666); err != nil {
		t.Fatal(err)
	}
	if status, _, stderr := command(t, "train", "-archive", archive, "-test", cut, "-size", "32", "-device",
		"cpu", "-epochs", "1", "-o", out); status != 1 ||
		!strings.Contains(stderr, "-test: ") || !strings.Contains(stderr, cut) {
		t.Errorf("status %d, %s, want status 1, stderr with %q and %q", status, stderr, "-test: ", cut)
	}
}

// train allocates memory for at most as many rows as the archive has images: the 1 << 30 rows of
// this -batch would be terabytes.
func TestTrainBatchIsAtMostTheArchive(t *testing.T) {
	archive, test := clitest.FewPhotos(t, map[string]int{"cat": 3, "dog": 2}), clitest.FewPhotos(t,
		map[string]int{"cat": 1, "dog": 1})
	stdout := trainSmall(t, archive, filepath.Join(t.TempDir(), "out"), "-test", test, "-batch", "1073741824")
	for _, want := range []string{"-batch 1073741824 is more than the archive has: a step has all of the " +
		"5 images\n", "batches of 5, on cpu", "2 steps, "} {
		if !strings.Contains(stdout, want) {
			t.Errorf("got\n%s\nwant it to contain %q", stdout, want)
		}
	}
}

// -decode-sms is passed to the decoders. The test requests a single multiprocessor, which only the
// driver refuses.
func TestTrainBoundsMultiprocessors(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	archive := clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2})
	status, _, stderr := command(t, "train", "-archive", archive, "-size", "32", "-device", "cuda",
		"-decode", "device", "-decode-sms", "1", "-epochs", "1",
		"-o", filepath.Join(t.TempDir(), "out"))
	if status != 1 || !strings.Contains(stderr, "multiprocessors") {
		t.Errorf("status %d, %s, want status 1, stderr with %q", status, stderr, "multiprocessors")
	}
}

// Training on a truncated archive is refused. The error names the command that lists the readable
// part.
func TestTrainDamagedArchive(t *testing.T) {
	data, err := os.ReadFile(photos)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "cut.tgz")
	if err := os.WriteFile(path, data[:len(data)/2], 0o644); err != nil {
		t.Fatal(err)
	}
	status, stdout, stderr := command(t, "train", "-device", "cpu", "-archive", path)
	if status != 1 || stdout != "" ||
		!strings.HasSuffix(stderr, "fetch it again (`torchstream inspect "+path+"` lists what is readable)\n") {
		t.Errorf("status %d, %s%s, want status 1, stdout \"\", stderr ending with %q", status, stdout,
			stderr, "fetch it again (`torchstream inspect "+path+"` lists what is readable)\n")
	}
}

// The error for a bad image names the command that removes it, instead of options for Go programs.
// The texts of other errors are unchanged.
func TestTrainBadImage(t *testing.T) {
	var encoded bytes.Buffer
	if err := png.Encode(&encoded, image.NewGray(image.Rect(0, 0, 40, 40))); err != nil {
		t.Fatal(err)
	}
	good := encoded.String()
	archive := clitest.WriteTar(t, map[string]string{"a/1.png": good, "b/1.png": good, "b/bad.png": good[:50]})
	out := filepath.Join(t.TempDir(), "out")
	status, _, stderr := command(t, "train", "-archive", archive, "-size", "32", "-device", "cpu",
		"-epochs", "1", "-o", out)
	if fileExists(out) {
		t.Errorf("the refused archive left %s, want no folder", out)
	}
	says := "(`torchstream inspect -fix OUT.tgz " + archive +
		"` writes an archive without the bad members, -bad-samples skip leaves them out)\n"
	if status != 1 || !strings.Contains(stderr, `"b/bad.png": damaged: `) ||
		!strings.HasSuffix(stderr, says) || strings.Contains(stderr, "Options.") ||
		// no name of a C function, and no word twice
		strings.Contains(stderr, "ts_image") || strings.Contains(stderr, "damaged image") {
		t.Errorf("status %d, %s", status, stderr)
	}
	bad := &imageloader.SampleError{File: "x.tar", Name: "a/1.png", Reason: imageloader.Empty}
	err := errors.Join(fmt.Errorf("train: %w (Go)", bad), errors.New("disk is full"))
	if got, want := cli.Advised(err, "train"), "train: "+bad.Error()+
		" (`torchstream inspect -fix OUT.tgz x.tar` writes an archive without the bad members)\ndisk is full"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// At the peak there are two copies of last.pt besides best.pt. Files that already exist need no
// additional space.
func TestPeakSpaceCountsTwoLastCheckpoints(t *testing.T) {
	folder := t.TempDir()
	for _, c := range []struct {
		name string // a new file of 40 bytes, which stays for the following cases
		want int64
	}{{"", 2*100 + 40}, {"last.pt", 2*100 + 40 - 40}, {"best.pt", 2*100 + 40 - 80}} {
		if c.name != "" {
			if err := os.WriteFile(filepath.Join(folder, c.name), make([]byte, 40), 0o666); err != nil {
				t.Fatal(err)
			}
		}
		if got := peakBytes(folder, 100, 40); got != c.want {
			t.Errorf("with %q: %d bytes, want %d", c.name, got, c.want)
		}
	}
}

// The check for free space uses the sizes of the checkpoints that a run writes.
func TestFreeSpaceCheckKnowsCheckpointSizes(t *testing.T) {
	archive := clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2})
	for _, args := range [][]string{{"-optimizer", "sgd"}, {"-optimizer", "adamw", "-ema", "0.9"}} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "out")
			trainSmall(t, archive, out, append(args, "-model", "mobilenet_v3_small", "-epochs", "1")...)
			net, err := models.ByName("mobilenet_v3_small", models.Options{NumClasses: 2})
			if err != nil {
				t.Fatal(err)
			}
			defer nn.Close(net)
			c := train.Config{Model: net}
			if len(args) > 2 {
				if c.EMA, err = optim.NewEMA(nn.State(net), optim.EMAOptions{Decay: 0.9}); err != nil {
					t.Fatal(err)
				}
				defer c.EMA.Close()
			}
			last, best := checkpointBytes(&c, args[1])
			for name, asked := range map[string]int64{"last.pt": last, "best.pt": best} {
				info, err := os.Stat(filepath.Join(out, name))
				if err != nil {
					t.Fatal(err)
				}
				if wrote := info.Size(); asked < wrote || asked > wrote+wrote/10 {
					t.Errorf("%s: the check asks for %d bytes, want at least the %d of the file and at "+
						"most a tenth more", name, asked, wrote)
				}
			}
		})
	}
}

// With -bad-samples, train leaves bad images out of training and evaluation, or replaces them in
// training. The summary counts and names the bad images.
func TestTrainSkipsBadImages(t *testing.T) {
	var encoded bytes.Buffer
	if err := png.Encode(&encoded, image.NewGray(image.Rect(0, 0, 40, 40))); err != nil {
		t.Fatal(err)
	}
	good := encoded.String()
	archive := clitest.WriteTar(t,
		map[string]string{"a/1.png": good, "a/2.png": good, "a/text.png": "Photographs", "b/1.png": good,
			"b/2.png": good, "b/bad.png": good[:50]})
	test := clitest.WriteTar(t, map[string]string{"a/1.png": good, "b/1.png": good, "b/cut.png": good[:50]})
	next := ": `torchstream inspect -fix OUT.tgz %s` writes an archive without\n"
	for policy, says := range map[string]string{"skip": "4 bad images left out",
		"substitute": "4 bad images replaced by others"} {
		// Two epochs have two bad images each. A batch has all images, so one of them is good.
		stdout := trainSmall(t, archive, filepath.Join(t.TempDir(), "out"), "-test", test, "-batch", "6",
			"-bad-samples", policy)
		for _, want := range []string{
			archive + ": " + says + ", each counted in every epoch: ", "a/text.png", "b/bad.png",
			fmt.Sprintf(next, archive),
			test + ": 2 bad images left out, each counted in every epoch: b/cut.png" + fmt.Sprintf(next,
				test), " of 2 held-back images\n",
		} {
			if !strings.Contains(stdout, want) {
				t.Errorf("%s: %q is not in\n%s", policy, want, stdout)
			}
		}
	}
	if stdout := trainSmall(t, test, filepath.Join(t.TempDir(), "out"), "-epochs", "1", "-bad-samples",
		"skip"); !strings.Contains(stdout, ": 1 bad image left out") {
		t.Errorf("printed\n%s\nwant it with %q", stdout, ": 1 bad image left out")
	}
}

// A last batch of one good image is left out, because BatchNorm cannot compute statistics for one
// image of 32 pixels. This also holds if the last batch is only that short because other images
// were bad. If the good images fill all batches, nothing is left out.
func TestTrainDropsLastBatchOfOneImage(t *testing.T) {
	var encoded bytes.Buffer
	if err := png.Encode(&encoded, image.NewGray(image.Rect(0, 0, 40, 40))); err != nil {
		t.Fatal(err)
	}
	good := encoded.String()
	for name, c := range map[string]struct {
		good, bad int
		said      bool
	}{"one good image is left": {5, 1, true}, "one image is left, and it or another is bad": {4, 1, false},
		"one image is left": {5, 0, true}} {
		t.Run(name, func(t *testing.T) {
			files := map[string]string{}
			for n := range c.good {
				files[fmt.Sprintf("%c/%d.png", 'a'+n%2, n)] = good
			}
			for n := range c.bad {
				files[fmt.Sprintf("a/bad%d.png", n)] = good[:50]
			}
			out := filepath.Join(t.TempDir(), "out")
			status, stdout, stderr := command(t, "train", "-archive", clitest.WriteTar(t, files), "-size",
				"32", "-batch", "4", "-epochs", "2", "-device", "cpu", "-o", out,
				"-model", "mobilenet_v3_small", "-bad-samples", "skip")
			if status != 0 || !strings.Contains(stdout, "\n2 steps, ") {
				t.Errorf("status %d, want 0 and 2 steps\n%s%s", status, stdout, stderr)
			}
			want := 0
			if c.said {
				want = 1
			}
			if n := strings.Count(stderr, "the last batch of an epoch is one sample and is left out"); n != want {
				t.Errorf("the log says %d times, want %d, that a batch is left out:\n%s", n, want, stderr)
			}
			for _, file := range []string{"last.pt", "best.pt"} {
				if !fileExists(filepath.Join(out, file)) {
					t.Errorf("%s is not there, want it", file)
				}
			}
		})
	}
}

// Classes without an image in -test are flagged. If a run resumes with other classes, the error
// names them.
func TestTrainOtherClasses(t *testing.T) {
	archive, test := clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2}), clitest.FewPhotos(t,
		map[string]int{"cat": 2})
	out := filepath.Join(t.TempDir(), "out")
	if stdout := trainSmall(t, archive, out, "-test", test, "-epochs", "1"); !strings.Contains(stdout,
		"has no image of 1 of the 2 classes") ||
		!strings.Contains(stdout, "says nothing about them: dog\n") {
		t.Errorf("printed\n%s\nwant stdout with %q and %q",
			stdout, "has no image of 1 of the 2 classes", "says nothing about them: dog\n")
	}
	other := clitest.FewPhotos(t, map[string]int{"cat": 2, "emu": 2})
	args := []string{"train", "-archive", other, "-size", "32", "-batch", "4", "-epochs", "1", "-device",
		"cpu", "-o", out, "-resume"}
	if status, _, stderr := command(t, args...); status != 1 ||
		!strings.Contains(stderr, "2 classes, and this archive has 2, lacks dog, has the new emu") ||
		strings.Contains(stderr, "[") {
		t.Errorf("status %d, %s", status, stderr)
	}
	if got := otherClasses(`["a","b"]`, `["b","a"]`); !strings.HasSuffix(got, "in another order") {
		t.Error(got)
	}
}

// A single class is an error, and inspect flags it.
func TestTrainOneClass(t *testing.T) {
	archive, out := clitest.FewPhotos(t, map[string]int{"cat": 3}), filepath.Join(t.TempDir(), "out")
	if status, stdout, stderr := command(t, "train", "-archive", archive, "-device", "cpu", "-o", out); status != 1 ||
		!strings.Contains(stdout, "3 images in 1 class\n") || !strings.Contains(stderr, "has one class: "+
		"nothing to tell apart; the directory of a file is its class, so move the images of each class "+
		"to a folder (cat)") {
		t.Errorf("status %d, %s%s", status, stdout, stderr)
	}
	if fileExists(out) {
		t.Errorf("the refused archive left %s, want no folder", out)
	}
	if status, stdout, _ := command(t, "inspect", archive); status != 0 ||
		!strings.Contains(stdout, "3 in 1 class,") || !strings.Contains(stdout, "\none class: nothing to tell apart") {
		t.Errorf("status %d, %s, want status 0, stdout with %q and %q",
			status, stdout, "3 in 1 class,", "\none class: nothing to tell apart")
	}
	if _, stdout, _ := command(t, "inspect",
		clitest.FewPhotos(t, map[string]int{"cat": 1, "dog": 1})); strings.Contains(stdout, "one class") {
		t.Error(stdout)
	}
}

// If another run is writing to the folder, train refuses it before any work. The error names that
// run's process.
func TestTrainRefusesAFolderInUse(t *testing.T) {
	archive, out := clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2}), filepath.Join(t.TempDir(), "out")
	trainSmall(t, archive, out, "-epochs", "1")
	claim, err := safefile.NewClaim(filepath.Join(out, "run.lock"))
	if err != nil {
		t.Fatal(err)
	}
	for _, more := range [][]string{{}, {"-resume"}} {
		status, stdout, stderr := command(t,
			append([]string{"train", "-archive", archive, "-size", "32", "-device", "cpu", "-o", out}, more...)...)
		if want := fmt.Sprintf("-o %s: another run writes to it: process %d on ", out,
			os.Getpid()); status != 1 || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("%q: status %d, %q and %q; want status 1, %q alone", more, status, stdout, stderr, want)
		}
	}
	if err := claim.Release(); err != nil {
		t.Fatal(err)
	}
	trainSmall(t, archive, out, "-epochs", "1", "-resume")
}

// train prints the classes of a directory as it does for an archive, and those without an image in
// -test.
func TestTrainDirectory(t *testing.T) {
	folders := map[string]string{"archive": t.TempDir(), "test": t.TempDir()}
	var file bytes.Buffer
	if err := png.Encode(&file, image.NewGray(image.Rect(0, 0, 8, 8))); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"archive/cat/1.png", "archive/cat/2.png", "archive/dog/1.png", "test/dog/1.png"} {
		kind, name, _ := strings.Cut(path, "/")
		path = filepath.Join(folders[kind], name)
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, file.Bytes(), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	stdout := trainSmall(t, folders["archive"], filepath.Join(t.TempDir(), "out"), quick("-test", folders["test"])...)
	for _, want := range []string{
		"3 images in 2 classes\n", "\n    0       2  cat", "\n    1       1  dog",
		"says nothing about them: cat\n", "\n1 step, ", "of 1 held-back image\n",
		"-batch 4 is more than the archive has: a step has all of the 3 images\n",
	} {
		if !strings.Contains(stdout, want) {
			t.Errorf("got\n%s\nwant it to contain %q", stdout, want)
		}
	}
}

// If the folder cannot be made, train fails before it reads the archive, and creates nothing.
func TestTrainUnwritable(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, out := range []string{file, filepath.Join(file, "a", "b")} {
		if status, stdout, stderr := command(t, "train", "-archive", photos, "-device", "cpu", "-o",
			out); status != 1 || stdout != "" ||
			!strings.Contains(stderr, "torchstream: -o "+out+": ") || !strings.Contains(stderr, "not a directory") {
			t.Errorf("status %d, %s%s, want status 1, stdout \"\", stderr with %q and %q",
				status, stdout, stderr, "torchstream: -o "+out+": ", "not a directory")
		}
	}
	parent := t.TempDir()
	if err := checkWritable(filepath.Join(parent, "a", "b")); err != nil || fileExists(filepath.Join(parent, "a")) {
		t.Error(err)
	}
	if err := checkSpace(filepath.Join(parent, "a", "b"), 1); err != nil {
		t.Error(err)
	}
	if err := checkSpace(filepath.Join(parent, "a", "b"), 1<<60); err == nil ||
		!strings.Contains(err.Error(),
			" are free, and the checkpoints of this training take 1152921504606.8 MB at their peak") {
		t.Error(err)
	}
	if os.Geteuid() == 0 {
		t.Skip("root writes to every directory")
	}
	if err := os.Chmod(parent, 0o555); err != nil {
		t.Fatal(err)
	}
	if err := checkWritable(filepath.Join(parent, "a")); err == nil ||
		!strings.Contains(err.Error(), "cannot write to the directory "+parent) {
		t.Error(err)
	}
}

// Every command refuses a -size that is too large before any other work, with the exit status of a
// wrong option. The maximum is the largest size that an evaluation transform supports.
func TestSizesThatAreTooLarge(t *testing.T) {
	for _, args := range [][]string{
		{"train", "-archive", photos}, {"preview", "-archive", photos}, {"bench", "loader", "-archive", photos},
	} {
		if status, stdout, stderr := command(t, append(args, "-size", "28673")...); status != 2 ||
			stdout != "" || !strings.Contains(stderr, "-size 28673: must be from ") {
			t.Errorf("%q: status %d, %s%s, want status 2, stdout \"\", stderr with %q",
				args, status, stdout, stderr, "-size 28673: must be from ")
		}
	}
	for size, known := range map[int]bool{cli.MaxSize: true, cli.MaxSize + 1: false} {
		decoder, err := decode.New(decode.Options{Transform: imageloader.Eval(size*8/7, size)})
		if (err == nil) != known {
			t.Errorf("%d: %v", size, err)
		}
		if err == nil {
			decoder.Close()
		}
	}
}

// A file system that does not report its size, such as some in user space, is not treated as full.
func TestCheckSpaceWithoutASize(t *testing.T) {
	const folder = "/proc"
	var disk unix.Statfs_t
	if err := unix.Statfs(folder, &disk); err != nil || disk.Blocks != 0 {
		t.Skipf("%s has %d blocks: %v", folder, disk.Blocks, err)
	}
	if err := checkSpace(folder, 1); err != nil {
		t.Error(err)
	}
}

// tarFiles returns the members of a tar stream.
func tarFiles(t *testing.T, data []byte) fs.FS {
	t.Helper()
	files := fstest.MapFS{}
	r := tar.NewReader(bytes.NewReader(data))
	for {
		header, err := r.Next()
		if err == io.EOF {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[header.Name] = &fstest.MapFile{Data: content, Mode: 0o644}
	}
}

// Commands read every kind of archive that their help names.
func TestKindsOfArchives(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir()) // for the index of a URL
	tarFile := clitest.FewPhotos(t, map[string]int{"cat": 3, "dog": 3})
	data, err := os.ReadFile(tarFile)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	if err := os.CopyFS(folder, tarFiles(t, data)); err != nil {
		t.Fatal(err)
	}
	shards := t.TempDir()
	write(t, filepath.Join(shards, "train-0.tar"), string(data))
	write(t, filepath.Join(shards, "train-1.tar"), string(data))
	var gz, zst bytes.Buffer
	zipped := gzip.NewWriter(&gz)
	packed, err := zstd.NewWriter(&zst)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []io.WriteCloser{zipped, packed} {
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(shards, "x.tgz"), gz.String())
	write(t, filepath.Join(shards, "x.tar.zst"), zst.String())
	server := httptest.NewServer(http.FileServer(http.Dir(shards)))
	defer server.Close()
	for name, c := range map[string]struct {
		archive string
		images  int
	}{
		".tar": {tarFile, 6}, ".tgz": {filepath.Join(shards, "x.tgz"), 6},
		".tar.zst": {filepath.Join(shards, "x.tar.zst"), 6}, "folder": {folder, 6},
		"shards": {filepath.Join(shards, "train-{0..1}.tar"), 12}, "URL": {server.URL + "/x.tgz", 6},
	} {
		t.Run(name, func(t *testing.T) {
			if _, help, _ := command(t, "train", "-h"); !strings.Contains(help, name) {
				t.Errorf("-h printed\n%s\nwant it to contain %q", help, name)
			}
			var out, errs bytes.Buffer
			if images, err := printClasses(t.Context(), c.archive, &cli.Images{}, &out,
				&errs); err != nil || images != c.images {
				t.Errorf("train counts %d images, %v, want no error, images = %v", images, err, c.images)
			}
			sheet := filepath.Join(t.TempDir(), "sheet.png")
			for _, args := range [][]string{{"inspect", c.archive},
				{"preview", "-size", "16", "-batch", "4", "-o", sheet, "-archive", c.archive},
				{"bench", "loader", "-size", "16", "-seconds", "0.01", "-archive", c.archive}} {
				if status, _, stderr := command(t, args...); status != 0 {
					t.Errorf("%q: status %d, %s, want 0", args, status, stderr)
				}
			}
			trainSmall(t, c.archive, filepath.Join(t.TempDir(), "out"), quick()...)
		})
	}
}

// Classes with less than a tenth of the median class's images are flagged, and classes of one image
// if others have more.
func TestFewImages(t *testing.T) {
	for _, c := range []struct {
		counts []int
		few    int // classes with fewer images are suspicious
	}{
		{nil, 0}, {[]int{1, 1, 1}, 0}, {[]int{1, 2, 2}, 2}, {[]int{5, 5}, 2}, {[]int{3, 100, 100}, 10},
		{[]int{105, 11, 10, 120, 110}, 11},
	} {
		if few := fewImages(c.counts, func(n int) int { return n }); few.below != c.few {
			t.Errorf("%v: %d, want %d", c.counts, few.below, c.few)
		}
	}
	var out, errs bytes.Buffer
	archive := clitest.FewPhotos(t, map[string]int{"cat": 5, "dog": 5, "cta": 1})
	if _, err := printClasses(t.Context(), archive, &cli.Images{}, &out, &errs); err != nil {
		t.Fatal(err)
	}
	if text := out.String(); !strings.Contains(text,
		"    1       1  cta    few images: is the name a typo?") || strings.Count(text, "typo") != 1 ||
		!strings.Contains(text, "1 of the classes") {
		t.Errorf("printed\n%s", text)
	}

	// inspect prints the same remarks. It prints none if labels are from a list, because they are
	// then not directory names.
	status, text, _ := command(t, "inspect", archive)
	if status != 0 || !strings.Contains(text, "######  few images: is the name a typo?\n    2  dog ") ||
		strings.Count(text, "typo") != 1 || !strings.Contains(text, "\n1 of the classes have less") {
		t.Errorf("status %d\n%s", status, text)
	}
	list := filepath.Join(t.TempDir(), "list.csv")
	write(t, list, "path,label\ncat/a.png,x\ncat/b.png,x\ncat/c.png,x\ndog/a.png,y\ndog/b.png,y\ncta/a.png,z\n")
	if status, text, stderr := command(t, "inspect", "-list", list, archive); status != 0 ||
		!strings.Contains(text, "in 3 classes") || strings.Contains(text, "typo") ||
		strings.Contains(text, "of the classes") {
		t.Errorf("status %d\n%s%s\nwant status 0, text with %q, text without %q, text without %q",
			status, text, stderr, "in 3 classes", "typo", "of the classes")
	}
}

// For an archive with one class, inspect says that train refuses it, but finds nothing bad.
func TestInspectOfOneClass(t *testing.T) {
	status, stdout, _ := command(t, "inspect", clitest.FewPhotos(t, map[string]int{"cat": 3}))
	if status != 0 || !strings.Contains(stdout, "\n\n"+oneClass+": `torchstream train` refuses it\n") {
		t.Errorf("status %d\n%s\nwant status 0, stdout with %q",
			status, stdout, "\n\n"+oneClass+": `torchstream train` refuses it\n")
	}
}

// If the samples of a class are in several directories, inspect and train name the class. They do
// so for an archive and for a directory, and name no other classes.
func TestClassesFromSeveralDirectoriesAreNamed(t *testing.T) {
	archive := clitest.FewPhotos(t, map[string]int{"train/cat": 3, "test/cat": 2, "dog": 4})
	folder := t.TempDir()
	for _, name := range []string{"train/cat/a.png", "test/cat/b.png", "dog/a.png"} {
		if err := os.MkdirAll(filepath.Join(folder, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		var file bytes.Buffer
		if err := png.Encode(&file, image.NewGray(image.Rect(0, 0, 8, 8))); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, name), file.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{archive, folder} {
		var out, errs bytes.Buffer
		if _, err := printClasses(t.Context(), path, &cli.Images{}, &out, &errs); err != nil {
			t.Fatal(err)
		}
		if text := out.String(); !strings.Contains(text, "cat    from test/cat, train/cat") ||
			strings.Count(text, "from ") != 2 || !strings.Contains(text, "1 class comes from several directories") {
			t.Errorf("printed\n%s", text)
		}
		status, stdout, _ := command(t, "inspect", path)
		if status != 0 || !strings.Contains(stdout, "1 class comes from several directories") ||
			!strings.Contains(stdout, "\n  cat: test/cat, train/cat\n") {
			t.Errorf("status %d, %s, want status 0, stdout with %q and %q",
				status, stdout, "1 class comes from several directories", "\n  cat: test/cat, train/cat\n")
		}
	}
	if status, stdout, _ := command(t, "inspect", photos); status != 0 ||
		strings.Contains(stdout, "several directories") {
		t.Errorf("status %d, %s, want status 0, stdout without %q", status, stdout, "several directories")
	}
}

// savedNetwork saves a network with three classes in a dtype.
func savedNetwork(t *testing.T, model string, dtype torch.DType) string {
	t.Helper()
	net, err := models.ByName(model, models.Options{NumClasses: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	if err := nn.ToDType(net, dtype); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), model+".pt")
	if err := nn.Save(path, net, nil); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestTrainConvertsPretrainedWeights(t *testing.T) {
	path, out := savedNetwork(t, "resnet18", torch.BFloat16), filepath.Join(t.TempDir(), "out")
	stdout := trainSmall(t, clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2, "hen": 2}), out,
		"-epochs", "1", "-pretrained", path, "-freeze")
	want := path + ": 122 tensors loaded: 62 of 62 parameters, 100 % of the numbers\ntensors converted: " +
		"102 from bfloat16 to float32\n\n"
	if !strings.Contains(stdout, want) {
		t.Errorf("got\n%s\nwant %q", stdout, want)
	}
	file, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	stored, err := file.Read("layer1.0.conv1.weight")
	if err != nil {
		t.Fatal(err)
	}
	defer stored.Close()
	wide := stored.ToDType(torch.Float32)
	defer wide.Close()
	weights, err := wide.Float32s()
	if err != nil {
		t.Fatal(err)
	}
	if got := tensorBits(t, filepath.Join(out, "last.pt"))["layer1.0.conv1.weight"]; !slices.Equal(got, weights) {
		t.Errorf("the frozen weights begin with %v, want the file's %v", got[:3], weights[:3])
	}
}

// The numbers count the tensors of torchvision's state_dicts whose names and shapes both networks
// share.
func TestTrainAsksAboutAnotherNetwork(t *testing.T) {
	path := savedNetwork(t, "resnet50", torch.Float32)
	stdout := trainSmall(t, clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2, "hen": 2}),
		filepath.Join(t.TempDir(), "out"), "-epochs", "1", "-pretrained", path)
	want := path + ": 98 tensors loaded: 44 of 62 parameters, 56.2 % of the numbers\nis this a resnet18? " +
		"The other numbers stay as they were before\ntensor layer"
	if !strings.Contains(stdout, want) {
		t.Errorf("got\n%s\nwant %q", stdout, want)
	}
}

// -pretrained-dict chooses between a file's weights and their averages. The messages name the
// chosen one.
func TestPretrainedDictChoosesAverages(t *testing.T) {
	net, err := models.ByName("resnet18", models.Options{NumClasses: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	weights, averages := map[string]any{}, map[string]any{}
	for _, n := range nn.State(net) {
		weights[n.Name], averages[n.Name] = n.Tensor, n.Tensor
	}
	ones, err := torch.Full(cuda.CPU, torch.Float32, 1, 64, 3, 7, 7)
	if err != nil {
		t.Fatal(err)
	}
	defer ones.Close()
	averages["conv1.weight"] = ones
	path := filepath.Join(t.TempDir(), "both.pt")
	if err := checkpoint.SavePyTorch(path,
		map[string]any{"state_dict": weights, "state_dict_ema": averages}); err != nil {
		t.Fatal(err)
	}
	archive := clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2, "hen": 2})
	run := func(dict string) (stdout string, first float32) {
		out := filepath.Join(t.TempDir(), "out")
		stdout = trainSmall(t, archive, out, "-epochs", "1", "-freeze", "-pretrained", path, "-pretrained-dict", dict)
		return stdout, tensorBits(t, filepath.Join(out, "last.pt"))["conv1.weight"][0]
	}
	stdout, first := run("")
	if want := `which are not loaded: "state_dict_ema" (122 tensors): -pretrained-dict names them`; !strings.Contains(stdout,
		want) || first == 1 {
		t.Errorf("without a dict: the first weight is %v, and it printed\n%s\nwant %q", first, stdout, want)
	}
	stdout, first = run("state_dict_ema")
	if want := `the weights are the averages "state_dict_ema" of the file`; !strings.Contains(stdout,
		want) || first != 1 {
		t.Errorf("state_dict_ema: the first weight is %v, want 1, and it printed\n%s\nwant %q", first, stdout, want)
	}
	status, _, stderr := command(t, "train", "-archive", archive, "-size", "32", "-device", "cpu", "-o",
		filepath.Join(t.TempDir(), "out"), "-pretrained", path, "-pretrained-dict", "ema")
	want := `there is no dict of tensors "ema"; the file has "state_dict" (122 tensors), "state_dict_ema"`
	if status != 1 || !strings.Contains(stderr, want) || !strings.Contains(stderr, path) {
		t.Errorf("status %d, %s, want 1 and %q", status, stderr, want)
	}
}

// flipTensor flips a bit in the last bytes of the largest tensor of a PyTorch file.
func flipTensor(t *testing.T, path string) {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	file, err := zip.NewReader(bytes.NewReader(content), int64(len(content)))
	if err != nil {
		t.Fatal(err)
	}
	largest := slices.MaxFunc(file.File,
		func(a, b *zip.File) int { return cmp.Compare(a.UncompressedSize64, b.UncompressedSize64) })
	at, err := largest.DataOffset()
	if err != nil {
		t.Fatal(err)
	}
	content[at+int64(largest.UncompressedSize64)-1] ^= 1
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
}

// If a bit of a checkpoint is wrong, predict, evaluate, -resume and -pretrained name the file and
// the tensor.
func TestCommandsNameTheDamagedTensor(t *testing.T) {
	archive, out := clitest.FewPhotos(t, map[string]int{"cat": 4, "dog": 4}), filepath.Join(t.TempDir(), "out")
	trainSmall(t, archive, out, "-epochs", "1")
	best, last := filepath.Join(out, "best.pt"), filepath.Join(out, "last.pt")
	flipTensor(t, best)
	flipTensor(t, last)
	small := []string{"train", "-archive", archive, "-size", "32", "-batch", "4", "-epochs", "1", "-device",
		"cpu", "-o"}
	for path, commands := range map[string][][]string{
		best: {
			{"predict", "-checkpoint", best, "-device", "cpu", archive},
			{"evaluate", "-checkpoint", best, "-archive", archive, "-device", "cpu"},
			append(slices.Clone(small), filepath.Join(t.TempDir(), "new"), "-pretrained", best),
		},
		last: {append(slices.Clone(small), out, "-resume")},
	} {
		for _, args := range commands {
			status, _, stderr := command(t, args...)
			if want := path + ": tensor "; status != 1 || !strings.Contains(stderr, want+"layer4.") &&
				!strings.Contains(stderr, want+"optimizer.state.") {
				t.Errorf("%q: status %d, %s, want 1, %q and the name of a tensor", args, status, stderr, want)
			}
		}
	}
}

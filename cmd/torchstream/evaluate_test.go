//go:build linux && cgo

package main

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"image"
	"image/png"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/clitest"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/train"
)

// evaluate and predict agree on each image. Labels are matched by class name: the checkpoint orders
// classes differently from the archive.
func TestEvaluateAgreesWithPredict(t *testing.T) {
	folder := unpacked(t, photos, 24)
	var classes []string
	for _, path := range glob(t, filepath.Join(folder, "*/*")) {
		classes = append(classes, filepath.Base(path))
	}
	slices.Reverse(classes)
	classes[0], classes[1] = classes[1], classes[0]
	checkpoint, _ := untrained(t, classes...)
	status, stdout, stderr := command(t, "predict", "-checkpoint", checkpoint, "-device", "cpu", "-top",
		"99", "-json", folder)
	if status != 0 {
		t.Fatalf("status %d, %s, want 0", status, stderr)
	}
	want := evaluation{Checkpoint: checkpoint, Model: "resnet18", Size: 32, Archive: folder}
	for _, class := range classes {
		want.Classes = append(want.Classes, evaluatedClass{Class: class})
	}
	taken := map[[2]string]int64{}
	for line := range strings.Lines(stdout) {
		var row predictedFile
		if err := json.Unmarshal([]byte(line), &row); err != nil {
			t.Fatal(err)
		}
		class := filepath.Base(filepath.Dir(row.File))
		label := slices.Index(classes, class)
		rank := slices.IndexFunc(row.Classes, func(g guess) bool { return g.Class == class })
		want.Images++
		want.Classes[label].Images++
		want.Loss -= math.Log(row.Classes[rank].Probability)
		if rank < 5 {
			want.Top5++
		}
		if rank == 0 {
			want.Top1++
			want.Classes[label].Right++
		} else {
			taken[[2]string{class, row.Classes[0].Class}]++
		}
	}
	n := float64(want.Images)
	want.Loss, want.Top1, want.Top5 = want.Loss/n, want.Top1/n, want.Top5/n

	out := filepath.Join(t.TempDir(), "out")
	status, stdout, stderr = command(t, "evaluate", "-checkpoint", checkpoint, "-archive", folder,
		"-device", "cpu", "-batch", "7", "-json", "-o", out)
	var got evaluation
	if err := json.Unmarshal([]byte(stdout), &got); status != 0 || err != nil {
		t.Fatalf("status %d, %s%v, want status 0, no error", status, stderr, err)
	}
	counted := map[[2]string]int64{}
	for _, c := range got.Confusions {
		counted[[2]string{c.Class, c.TakenFor}] = c.Images
		if at := want.Classes[slices.Index(classes, c.Class)]; c.Share != float64(c.Images)/float64(at.Images) {
			t.Errorf("%+v of %+v, want %v", c, at, float64(c.Images)/float64(at.Images))
		}
	}
	if !reflect.DeepEqual(counted, taken) || len(taken) == 0 {
		t.Errorf("confusions %v, want %v", counted, taken)
	}
	if math.Abs(got.Loss-want.Loss) > 1e-4 || math.Abs(got.Top1-want.Top1) > 1e-9 ||
		math.Abs(got.Top5-want.Top5) > 1e-9 {
		t.Errorf("%+v, want %+v", got, want)
	}
	got.Loss, got.Top1, got.Top5, got.Confusions = want.Loss, want.Top1, want.Top5, nil
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	text, err := os.ReadFile(filepath.Join(out, "confusion.csv"))
	if err != nil || !strings.HasPrefix(string(text), `true\predicted,`+strings.Join(classes, ",")+"\n") {
		t.Errorf("%v, %s", err, text)
	}
	if _, err := os.Stat(filepath.Join(out, "confusion.png")); err != nil {
		t.Error(err)
	}
}

// With the precision that train used, evaluate computes the same metrics for best.pt as train did
// in the best epoch.
func TestEvaluateATraining(t *testing.T) {
	archive, test := clitest.FewPhotos(t, map[string]int{"cat": 5, "dog": 5}), clitest.FewPhotos(t,
		map[string]int{"cat": 3, "dog": 4})
	out := filepath.Join(t.TempDir(), "run")
	trainSmall(t, archive, out, "-test", test, "-amp", "bf16")
	text, err := os.ReadFile(filepath.Join(out, "log.csv"))
	if err != nil {
		t.Fatal(err)
	}
	rows, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	loss, top1 := slices.Index(rows[0], "eval_loss"), slices.Index(rows[0], "eval_top1")
	again := filepath.Join(t.TempDir(), "again")
	args := []string{"evaluate", "-checkpoint", filepath.Join(out, "best.pt"), "-archive", test, "-device",
		"cpu", "-batch", "4", "-json", "-o", again}
	figures := map[string]string{}
	for _, amp := range []string{"", "bf16"} {
		status, stdout, stderr := command(t, append(args, "-amp", amp)...)
		var e evaluation
		if err := json.Unmarshal([]byte(stdout), &e); status != 0 || err != nil {
			t.Fatalf("status %d, %s%v, want status 0, no error", status, stderr, err)
		}
		format := func(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
		figures[amp] = format(e.Loss) + " " + format(e.Top1)
	}
	of := func(row []string) bool { return row[loss]+" "+row[top1] == figures["bf16"] }
	if !slices.ContainsFunc(rows[1:], of) || figures[""] == figures["bf16"] {
		t.Errorf("%q; log.csv:\n%s", figures, text)
	}
	for _, name := range []string{"confusion.csv", "confusion.png"} {
		a, err := os.ReadFile(filepath.Join(out, name))
		if err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(filepath.Join(again, name)); err != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs from that of the training: %v", name, err)
		}
	}
}

func TestEvaluateText(t *testing.T) {
	checkpoint, _ := untrained(t, "cat", "dog", "a hen")
	archive := clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 3, "a hen": 4})
	for n, want := range map[string]bool{"0": false, "9": true} {
		status, stdout, stderr := command(t, "evaluate", "-checkpoint", checkpoint, "-archive", archive,
			"-device", "cpu", "-confusions", n)
		if lines := strings.Split(stdout, "\n"); status != 0 ||
			lines[0] != checkpoint+": resnet18, 3 classes, images of 32 x 32" ||
			!strings.HasPrefix(lines[1], archive+": 9 images, loss ") ||
			!strings.Contains(lines[1], ", top-1 ") || strings.Contains(lines[1], "top-5") ||
			strings.Contains(stdout, "true class") != want {
			t.Errorf("-confusions %s: status %d, %s%s", n, status, stderr, stdout)
		}
	}
}

// The table shows the most frequent confusions and says how many more there are.
func TestConfusionsAreATable(t *testing.T) {
	m := &train.Metrics{Confusion: [][]int64{{5, 2, 0, 3}, {0, 9, 1, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}}}
	classes := []string{"cat", "a long name", "hen\x1b"}
	for most, want := range map[int]string{
		0: "",
		1: "\ntrue class  taken for  images  share of class\ncat         3               3          30.0 " +
			"%\nand 2 more pairs: see x\n",
		3: "\ntrue class   taken for    images  share of class\n" +
			"cat          3                 3          30.0 %\n" +
			"cat          a long name       2          20.0 %\n" +
			"a long name  \"hen\\x1b\"         1          10.0 %\n",
	} {
		var out bytes.Buffer
		if err := printConfusions(&out, m, classes, most, "see x"); err != nil || out.String() != want {
			t.Errorf("%d: %v\n%s\nwant\n%s", most, err, out.String(), want)
		}
	}
	m.Confusion = [][]int64{{1, 0}, {0, 1}}
	var out bytes.Buffer
	if err := printConfusions(&out, m, classes, 9, "see x"); err != nil || out.Len() > 0 {
		t.Errorf("%v, %q without a confusion, want no error, out.Len() = 0", err, out.String())
	}
}

// At its end, train prints the confusions of the best epoch.
func TestTrainPrintsConfusions(t *testing.T) {
	var out bytes.Buffer
	o := trainOptions{out: "run1", epochs: 1}
	report := &train.Report{Epochs: []train.Epoch{{Epoch: 1, Best: true,
		Eval: &train.Metrics{Samples: 4, Classes: 2, Top1: 0.75, Confusion: [][]int64{{1, 1}, {0, 2}}}}}}
	if err := o.finish(report, 0, []string{"cat", "dog"}, &out); err != nil ||
		!strings.Contains(out.String(), "\ncat         dog             1          50.0 %\n") {
		t.Errorf("%v, %s, want no error, out with %q",
			err, out.String(), "\ncat         dog             1          50.0 %\n")
	}
}

// Class names in two Unicode normal forms are two classes. train and evaluate report them.
func TestClassInAnotherNormalFormIsNamed(t *testing.T) {
	const nfc, nfd = "B\u00e4r", "Ba\u0308r"
	archive, test := clitest.FewPhotos(t, map[string]int{nfc: 2, "dog": 2}), clitest.FewPhotos(t,
		map[string]int{nfd: 1, "dog": 1})
	checkpoint, _ := untrained(t, nfc, "dog")
	want := `"Ba\u0308r" and "B\u00e4r" differ only in their Unicode normal form (NFD, NFC)`
	for _, args := range [][]string{
		{"train", "-archive", archive, "-test", test, "-size", "32", "-device", "cpu", "-epochs", "1",
			"-o", filepath.Join(t.TempDir(), "out")},
		{"evaluate", "-checkpoint", checkpoint, "-archive", test, "-device", "cpu"},
	} {
		if status, _, stderr := command(t, args...); status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%q: status %d, want 1; stderr %q, want it with %s", args, status, stderr, want)
		}
	}
	if got := otherClasses(`["B\u00e4r"]`, `["Ba\u0308r"]`); !strings.Contains(got, want) {
		t.Errorf("a resumed run: got %q, want it with %s", got, want)
	}
}

// The archive and the checkpoint must have the same classes, unless -subset is given.
func TestEvaluateComparesClasses(t *testing.T) {
	checkpoint, _ := untrained(t, "cat", "dog", "hen")
	for _, c := range []struct {
		counts map[string]int
		args   []string
		status int
		says   string
	}{
		{map[string]int{"cat": 1, "cta": 1, "dgo": 1, "hen": 1}, nil, 1,
			" has 2 classes that " + checkpoint + " does not know: cta, dgo: rename"},
		{map[string]int{"cat": 1, "cta": 1}, []string{"-subset"}, 1,
			" has 1 class that " + checkpoint + " does not know: cta: rename"},
		{map[string]int{"dog": 2}, nil, 1,
			" has no image of 2 of the 3 classes of " + checkpoint + ": cat, hen: -subset evaluates the others"},
		{map[string]int{"dog": 2}, []string{"-subset"}, 0, ""},
		{nil, nil, 1, ""},
	} {
		archive := clitest.FewPhotos(t, c.counts)
		status, stdout, stderr := command(t,
			append([]string{"evaluate", "-checkpoint", checkpoint, "-archive", archive, "-device", "cpu"},
				c.args...)...)
		want := "torchstream: imageloader: no samples in " + archive
		switch {
		case c.says != "":
			want = "torchstream: " + archive + c.says
		case c.status == 0:
			want = ""
		}
		if status != c.status || !strings.HasPrefix(stderr, want) || (stdout == "") != (status != 0) ||
			status == 0 && !strings.Contains(stdout, ": 2 images, loss ") {
			t.Errorf("%v %q: status %d, %s%s", c.counts, c.args, status, stdout, stderr)
		}
	}
}

// -bad-samples skip evaluates the good images. The result counts and names the bad ones. Without
// the option, evaluate fails and the error names the option.
func TestEvaluateSkipsBadImages(t *testing.T) {
	checkpoint, _ := untrained(t, "a", "b")
	var encoded bytes.Buffer
	if err := png.Encode(&encoded, image.NewGray(image.Rect(0, 0, 40, 40))); err != nil {
		t.Fatal(err)
	}
	good := encoded.String()
	archive := clitest.WriteTar(t, map[string]string{"a/1.png": good, "b/1.png": good, "b/bad.png": good[:50]})
	args := []string{"evaluate", "-checkpoint", checkpoint, "-archive", archive, "-device", "cpu"}
	fix := "`torchstream inspect -fix OUT.tgz " + archive + "` writes an archive without"
	status, stdout, stderr := command(t, args...)
	if says := "(" + fix + " the bad members, -bad-samples skip leaves them out)\n"; status != 1 ||
		stdout != "" || !strings.HasSuffix(stderr, says) {
		t.Errorf("status %d, %s%s, want status 1, stdout \"\", stderr ending with %q",
			status, stdout, stderr, says)
	}
	args = append(args, "-bad-samples", "skip")
	status, stdout, stderr = command(t, args...)
	if says := archive + ": 1 bad image left out: b/bad.png: " + fix + "\n"; status != 0 ||
		!strings.Contains(stdout, archive+": 2 images, loss ") || !strings.HasSuffix(stdout, says) {
		t.Errorf("status %d, %s%s, want status 0, stdout with %q, stdout ending with %q",
			status, stdout, stderr, archive+": 2 images, loss ", says)
	}
	status, stdout, stderr = command(t, append(args, "-json")...)
	var e evaluation
	if err := json.Unmarshal([]byte(stdout), &e); status != 0 || err != nil || e.Images != 2 || e.BadImages != 1 {
		t.Errorf("status %d, %v, %s%s, want status 0, no error, e.Images = 2, e.BadImages = 1",
			status, err, stdout, stderr)
	}
}

func TestListedNamesEnd(t *testing.T) {
	var names []string
	for n := range 11 {
		names = append(names, fmt.Sprintf("n%d\x1b", n))
	}
	if got := listed(names); !strings.HasSuffix(got, "\"n9\\x1b\", ...") ||
		strings.Contains(listed(names[:10]), "...") {
		t.Errorf("%q", got)
	}
}

func TestEvaluateMistakes(t *testing.T) {
	checkpoint, net := untrained(t, "cat", "dog")
	archive := clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2})
	huge, foreign := filepath.Join(t.TempDir(), "huge.pt"), filepath.Join(t.TempDir(), "foreign.pt")
	if err := nn.Save(huge, net, map[string]string{"model": "vit_b_16", "size": "1000000000",
		"classes": `["cat","dog"]`}); err != nil {
		t.Fatal(err)
	}
	if err := nn.Save(foreign, net, nil); err != nil {
		t.Fatal(err)
	}
	mine := t.TempDir()
	writeFile(t, filepath.Join(mine, "confusion.csv"), "my own")
	missing := filepath.Join(t.TempDir(), "missing")
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{"-checkpoint", checkpoint}, 2, "evaluate needs -archive FILE"},
		{[]string{"-device", "cpu", archive}, 2, "did you mean -archive " + archive + "?"},
		{[]string{"-archive", archive, "-batch", "0"}, 2, "-batch 0: must be at least 1"},
		{[]string{"-archive", archive, "-confusions", "-1"}, 2, "-workers and -confusions are at least 0"},
		{[]string{"-archive", archive, "-amp", "fp8"}, 2, "-amp \"fp8\": want bf16 or fp16"},
		{[]string{"-archive", archive, "-amp", "fp16", "-device", "cpu"}, 2, "use -amp bf16"},
		{[]string{"-archive", archive, "-decode", "device", "-device", "cpu"}, 2, "use -decode auto or host"},
		{[]string{"-archive", archive, "-bad-samples", "substitute"}, 2,
			"-bad-samples \"substitute\": want fail or skip"},
		{[]string{"-archive", archive, "-decode-sms", "8"}, 2, "-decode-sms 8: want"},
		{[]string{"-archive", archive, "-checkpoint", missing}, 1, missing + ": no such checkpoint"},
		{[]string{"-archive", archive, "-checkpoint", foreign}, 1, foreign + " was not written by torchstream train"},
		{[]string{"-archive", archive, "-checkpoint", huge}, 1, "1000000000"},
		{[]string{"-archive", missing, "-checkpoint", checkpoint}, 1, missing},
		{[]string{"-archive", archive, "-checkpoint", checkpoint, "-o", archive}, 1,
			"-o " + archive + ": " + archive + " is not a directory"},
		{[]string{"-archive", archive, "-checkpoint", checkpoint, "-json", "-o", mine}, 1,
			"confusion.csv is a file of another kind"},
	} {
		if !slices.Contains(c.args, "-device") {
			c.args = append(c.args, "-device", "cpu")
		}
		status, stdout, stderr := command(t, append([]string{"evaluate"}, c.args...)...)
		// The result is printed before the files are written.
		if status != c.status || !strings.Contains(stderr, c.says) || (stdout == "") != !slices.Contains(c.args, mine) {
			t.Errorf("evaluate %q: status %d, want %d; %q does not say %q; %s", c.args, status, c.status,
				stderr, c.says, stdout)
		}
	}
}

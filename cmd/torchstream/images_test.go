//go:build linux && cgo

package main

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"image"
	"image/color"
	"image/png"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/internal/clitest"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// Commands that read images have the same options for the same purposes.
func TestCommandsShareImageOptions(t *testing.T) {
	join := func(lists ...[]string) []string { return slices.Concat(lists...) }
	labels := []string{"image-column", "label-column", "labels", "list", "list-folder", "webdataset"}
	several := []string{"label-separator", "multi-label"}
	batches := join(labels, []string{"balanced", "cutmix", "mixup", "policy", "upright"})
	splits := []string{"group-column", "val", "val-seed"}
	training := []string{"accumulate", "label-smoothing", "test-list", "bad-samples", "freeze"}
	all := join(batches, several, splits, training)
	for command, want := range map[string][]string{
		"train": join(batches, several, splits, training), "preview": join(batches, several, splits),
		"bench loader": join(batches, several), "evaluate": join(labels, several, []string{"upright", "bad-samples"}),
		"inspect": join(labels, several), "index": join(labels, several), "predict": {"upright"},
		"pack": join(labels, splits, []string{"upright", "bad-samples"}),
	} {
		help := helpOf(t, strings.Fields(command)...)
		var got []string
		for _, option := range regexp.MustCompile(`(?m)^  -([a-z-]+)`).FindAllStringSubmatch(help, -1) {
			if slices.Contains(all, option[1]) {
				got = append(got, option[1])
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: got the options %q, want %q", command, got, want)
		}
	}
}

func helpOf(t *testing.T, args ...string) string {
	t.Helper()
	status, stdout, stderr := command(t, append(args, "-h")...)
	if status != 0 || stdout == "" {
		t.Fatalf("%q -h: got status %d, stdout %q, %s", args, status, stdout, stderr)
	}
	return stdout
}

// metadataOf returns the metadata of a checkpoint, and its classes.
func metadataOf(t *testing.T, path string) (metadata map[string]string, classes []string) {
	t.Helper()
	file, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := json.Unmarshal([]byte(file.Metadata()["classes"]), &classes); err != nil {
		t.Fatal(err)
	}
	return file.Metadata(), classes
}

func TestTrainTakesLabelsFromList(t *testing.T) {
	archive := clitest.WriteTar(t, map[string]string{
		"all/1.png": onePixel(t), "all/2.png": onePixel(t), "all/3.png": onePixel(t),
		"all/4.png": onePixel(t), "all/5.png": onePixel(t),
	})
	folder := t.TempDir()
	list, held, out := filepath.Join(folder, "train.csv"), filepath.Join(folder,
		"test.tsv"), filepath.Join(folder, "out")
	writeFile(t, list, "\xef\xbb\xbflabel,path\n\"hen, brown\",all/1.png\ndog,all/2.png\ndog,all/3.png\n")
	writeFile(t, held, "path\tlabel\nall/4.png\tdog\n")
	stdout := trainSmall(t, archive, out, quick("-list", list, "-test-list", held)...)
	for _, want := range []string{"3 images in 2 classes\n", "\n    0       2  dog",
		"\n    1       1  hen, brown", "of 1 held-back image\n"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("%q is not in\n%s", want, stdout)
		}
	}
	metadata, classes := metadataOf(t, filepath.Join(out, "best.pt"))
	if want := []string{"dog", "hen, brown"}; !reflect.DeepEqual(classes, want) || metadata["labels"] != "list" {
		t.Errorf("got classes %q, labels %q, want %q, list", classes, metadata["labels"], want)
	}

	evaluate := []string{"evaluate", "-archive", archive, "-checkpoint", filepath.Join(out, "best.pt"),
		"-device", "cpu", "-json", "-labels"}
	status, stdout, stderr := command(t, append(evaluate, list)...)
	if status != 0 || !strings.Contains(stdout, `"images":3`) {
		t.Errorf("evaluate -labels: got status %d, %s%s, want 3 images", status, stdout, stderr)
	}
	writeFile(t, list, "all/1.png,cat\nall/2.png,dog\n")
	if status, _, stderr := command(t, append(evaluate, list)...); status != 1 ||
		!strings.Contains(stderr, "1 class that") || !strings.Contains(stderr, "cat") {
		t.Errorf("evaluate with another class: got status %d, %s", status, stderr)
	}
	// A different list gives different training data, even with the same classes.
	writeFile(t, list, "all/3.png,\"hen, brown\"\nall/2.png,dog\nall/1.png,dog\n")
	resume := []string{"train", "-archive", archive, "-list", list, "-size", "32", "-batch", "4", "-epochs",
		"1", "-device", "cpu", "-o", out, "-resume"}
	if status, _, stderr := command(t, resume...); status != 1 ||
		!strings.Contains(stderr, "other images or labels in -archive") {
		t.Errorf("resume with other labels: got status %d, %s", status, stderr)
	}
}

// train and evaluate read a zip with a table of ids, labels and patients as it is.
func TestTrainTakesListInZip(t *testing.T) {
	archive := filepath.Join(t.TempDir(), "set.zip")
	var data bytes.Buffer
	z := zip.NewWriter(&data)
	add := func(name, content string) {
		w, err := z.Create(name)
		if err == nil {
			_, err = io.WriteString(w, content)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	table := "id;breed;age;patient\r\n"
	for i := range 12 {
		add(fmt.Sprintf("train/%d.png", i), onePixel(t))
		table += fmt.Sprintf("%d;%s;%d;p%d\r\n", i, []string{"cat", "dog"}[i%2], i, i/3)
	}
	add("test/0.png", onePixel(t))
	add("train.csv", table+"77;dog;1;p9\r\n1;dog;1;p0\r\n")
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	writeFile(t, archive, data.String())
	labels := []string{"-list", "train.csv", "-label-column", "breed", "-list-folder", "train"}
	out := filepath.Join(t.TempDir(), "out")
	stdout := trainSmall(t, archive, out, quick(append(labels, "-val", "0.25", "-group-column", "patient")...)...)
	for _, want := range []string{"9 images in 2 classes\n", ":train.csv: names in column 1 (id), labels in column 2 (breed), " +
		"groups in column 4 (patient)\n", "1 of 13 rows without an image in set.zip, and left out; the first is in line 14: 77\n",
		":train.csv: 1 row repeats another\n", "1 image without a row in", "the first is test/0.png\n", "of 3 held-back images"} {
		if !strings.Contains(strings.ReplaceAll(stdout, archive, "set.zip"), want) {
			t.Errorf("%q is not in\n%s", want, stdout)
		}
	}
	status, stdout, stderr := command(t, append([]string{"evaluate", "-archive", archive, "-checkpoint",
		filepath.Join(out, "best.pt"), "-device", "cpu"}, labels...)...)
	if status != 0 || !strings.Contains(stdout, "12 images, loss") || !strings.Contains(stdout, "1 row repeats another") {
		t.Errorf("evaluate: got status %d, %s%s, want 12 images", status, stdout, stderr)
	}
	for says, args := range map[string][]string{
		"-group-column needs -val SHARE":                                     append(labels, "-group-column", "patient"),
		"need -list FILE: they say how":                                      {"-list-folder", "train"},
		`no column "race": the first line has the columns 1 "id", 2 "breed"`: {"-list", "train.csv", "-label-column", "race"},
	} {
		args = append([]string{"train", "-archive", archive, "-device", "cpu", "-o", filepath.Join(t.TempDir(), "out")}, args...)
		if status, _, stderr := command(t, args...); status == 0 || !strings.Contains(stderr, says) {
			t.Errorf("%q: got status %d, %s, want %q", args, status, stderr, says)
		}
	}
}

func TestTrainTakesLabelsFromWebDataset(t *testing.T) {
	archive := clitest.WriteTar(t, map[string]string{
		"1.png": onePixel(t), "1.cls": "hen", "2.png": onePixel(t), "2.cls": "dog", "3.png": onePixel(t),
		"3.json": `{"label": "dog"}`,
	})
	out := filepath.Join(t.TempDir(), "out")
	stdout := trainSmall(t, archive, out, quick("-webdataset")...)
	if !strings.Contains(stdout, "3 images in 2 classes\n") || !strings.Contains(stdout, "\n    0       2  dog") {
		t.Errorf("got\n%s", stdout)
	}
	status, stdout, stderr := command(t, "evaluate", "-archive", archive, "-webdataset", "-checkpoint",
		filepath.Join(out, "best.pt"), "-device", "cpu", "-json")
	if status != 0 || !strings.Contains(stdout, `"images":3`) {
		t.Errorf("evaluate: got status %d, %s%s, want 3 images", status, stdout, stderr)
	}
}

// A run resumes only with the augmentation that it started with.
func TestResumeNeedsSameAugmentation(t *testing.T) {
	archive, out := clitest.FewPhotos(t, map[string]int{"cat": 5, "dog": 3}), filepath.Join(t.TempDir(), "out")
	augment := []string{"-policy", "randaugment", "-balanced", "-mixup", "0.2", "-cutmix", "1",
		"-label-smoothing", "0.1", "-upright"}
	trainSmall(t, archive, out, augment...)
	trainSmall(t, archive, out, append(augment, "-resume")...)
	for _, c := range []struct {
		args []string
		says string
	}{
		{augment[2:], "policy randaugment, not unset: resume"},
		{append(slices.Clone(augment), "-policy", "simclr"), "policy randaugment, not simclr: resume"},
		{append(slices.Clone(augment), "-mixup", "0.3"), "mixup 0.2, not 0.3: resume"},
		{append(slices.Clone(augment), "-mixup", "0", "-cutmix", "0"),
			"cutmix 1, not unset; mixup 0.2, not unset: resume"},
		{append(slices.Clone(augment), "-balanced=false", "-upright=false"),
			"balanced true, not unset; upright true, not unset: resume"},
		{append(slices.Clone(augment), "-label-smoothing", "0"), "label-smoothing 0.1, not unset: resume"},
		{append(slices.Clone(augment), "-accumulate", "2"), "accumulate unset, not 2: resume"},
	} {
		args := append([]string{"train", "-archive", archive, "-size", "32", "-batch", "4", "-epochs", "2",
			"-device", "cpu", "-o", out, "-resume"}, c.args...)
		if status, _, stderr := command(t, args...); status != 1 || !strings.Contains(stderr, c.says) {
			t.Errorf("%q: got status %d, %s, want %q", c.args, status, stderr, c.says)
		}
	}
}

// A checkpoint written at the end of an epoch has no loader state, so the command itself compares
// the images.
func TestResumeNeedsSameImages(t *testing.T) {
	archive := clitest.FewPhotos(t, map[string]int{"cat": 5, "dog": 3})
	test := clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2})
	out := filepath.Join(t.TempDir(), "out")
	trainSmall(t, archive, out, "-test", test)
	trainSmall(t, archive, out, "-test", test, "-resume")
	other := clitest.FewPhotos(t, map[string]int{"cat": 4, "dog": 4})
	for want, c := range map[string][2]string{
		"other images or labels in -archive: resume": {other, test},
		"other images or labels in -test: resume":    {archive, other},
	} {
		status, _, stderr := command(t, "train", "-archive", c[0], "-test", c[1], "-size", "32", "-batch", "4",
			"-epochs", "2", "-device", "cpu", "-o", out, "-resume")
		if status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("got status %d, %s, want %q", status, stderr, want)
		}
	}
}

// Resuming also compares the images in a -test directory. A run that started with -test needs -test
// to resume, and a run that started without it must not have it.
func TestResumeNeedsSameTest(t *testing.T) {
	archive := clitest.FewPhotos(t, map[string]int{"cat": 5, "dog": 3})
	test, other := t.TempDir(), t.TempDir()
	var picture bytes.Buffer
	if err := png.Encode(&picture, image.NewGray(image.Rect(0, 0, 40, 40))); err != nil {
		t.Fatal(err)
	}
	for dir, names := range map[string][]string{test: {"cat/0.png", "dog/0.png"}, other: {"cat/1.png", "dog/0.png"}} {
		for _, name := range names {
			writeFile(t, filepath.Join(dir, name), picture.String())
		}
	}
	with, without := filepath.Join(t.TempDir(), "with"), filepath.Join(t.TempDir(), "without")
	trainSmall(t, archive, with, "-epochs", "1", "-test", test)
	trainSmall(t, archive, without, "-epochs", "1")
	trainSmall(t, archive, with, "-epochs", "1", "-test", test, "-resume")
	for _, c := range []struct {
		want, out string
		test      []string
	}{
		{"a run with other images or labels in -test: resume", with, []string{"-test", other}},
		{"a run with -test: resume", with, nil},
		{"a run with no -test: resume", without, []string{"-test", test}},
	} {
		status, _, stderr := command(t, append([]string{"train", "-archive", archive, "-size", "32", "-batch", "4",
			"-epochs", "1", "-device", "cpu", "-o", c.out, "-resume"}, c.test...)...)
		if status != 1 || !strings.Contains(stderr, c.want) {
			t.Errorf("%q: got status %d, %s, want %q", c.test, status, stderr, c.want)
		}
	}
}

// -o must not be inside the directory of -archive or -test, not even through a symbolic link.
func TestResultsInsideImagesAreRefused(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	if err := errors.Join(os.Symlink(dir, filepath.Join(outside, "to")),
		os.Symlink(outside, filepath.Join(outside, "itself"))); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(outside, "to")
	for _, out := range []string{dir, filepath.Join(dir, "trained"), dir + "/a/../b/..", link, filepath.Join(link, "a/b")} {
		for option, args := range map[string][]string{"-archive": {"-archive", dir},
			"-archive by a link": {"-archive", link}, "-test": {"-archive", photos, "-test", dir}} {
			status, _, stderr := command(t, append([]string{"train", "-o", out, "-device", "cpu"}, args...)...)
			want, _, _ := strings.Cut(option, " ")
			if status != 2 || !strings.Contains(stderr, "is inside "+want) {
				t.Errorf("-o %s, %s: got status %d, %s, want an error of the options", out, option, status, stderr)
			}
		}
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 0 {
		t.Errorf("got %v, %v in the folder, want nothing", files, err)
	}
	o := trainOptions{out: filepath.Join(outside, "itself", "out")}
	o.archive, o.test = dir, dir
	if err := o.checkOutside(); err != nil {
		t.Errorf("-o outside: got %v, want no error", err)
	}
}

// The expected values are from torch.nn.functional.cross_entropy(torch.tensor([[1., 2.]]),
// torch.tensor([0])), with label_smoothing=0.1 and without.
func TestLabelSmoothingIsForTrainingAlone(t *testing.T) {
	o := trainOptions{smoothing: 0.1}
	labels, err := torch.FromSlice([]int64{0}, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer labels.Close()
	output, err := torch.FromSlice([]float32{1, 2}, 1, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer output.Close()
	for _, c := range []struct {
		gradients bool
		want      float64
	}{{false, 1.3132617}, {true, 1.2632617}} {
		if err := output.SetRequiresGrad(c.gradients); err != nil {
			t.Fatal(err)
		}
		loss := o.smoothedLoss(output, &prefetcher.Batch{Labels: labels})
		if got, err := loss.NoGrad().Float64(); err != nil || math.Abs(got-c.want) > 1e-6 {
			t.Errorf("gradients %v: got %v, %v, want %v", c.gradients, got, err, c.want)
		}
		loss.Close()
	}
}

func TestImageOptionsThatContradict(t *testing.T) {
	photos := clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2})
	for _, c := range []struct{ args, says string }{
		{"train -archive A -list a.csv -webdataset", "-list and -webdataset exclude each other"},
		{"train -archive A -list a.csv -labels b.csv", "the list is a.csv already"},
		{"train -archive A -list a.csv -test B", "-test-list FILE gives those of -test"},
		{"train -archive A -test-list a.csv", "-test-list needs -test FILE or -list FILE"},
		{"train -archive A -list a.csv -test-list a.csv", "need a list of their own"},
		{"train -archive A -test B -webdataset -test-list a.csv", "-test-list and -webdataset exclude each other"},
		{"train -archive A -policy blur", `no policy "blur"`},
		{"train -archive A -mixup 1e-9", "-mixup 1e-09: must be 0 (off), or from 0.001 to 1000"},
		{"train -archive A -cutmix -1", "-cutmix -1: must be 0"},
		{"train -archive A -label-smoothing 1", "-label-smoothing 1: must be from 0 to below 1"},
		{"train -archive A -val 0.1 -test B", "leave one of them out"},
		{"train -archive A -val 1", "-val 1: must be from 0 to below 1"},
		{"train -archive A -val-seed 1", "-val-seed needs -val"},
		{"preview -archive A -list a.csv -webdataset", "exclude each other"},
		{"bench loader -archive A -list a.csv -webdataset", "exclude each other"},
		{"bench loader -archive A -policy blur", `no policy "blur"`},
		{"evaluate -archive A -list a.csv -webdataset", "exclude each other"},
		{"index -list a.csv -webdataset A", "exclude each other"},
		{"inspect -list a.csv -webdataset A", "exclude each other"},
	} {
		args := strings.Fields(strings.ReplaceAll(c.args, " A", " "+photos))
		if status, _, stderr := command(t, args...); status != 2 || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: got status %d, %s, want 2, %q", c.args, status, stderr, c.says)
		}
	}
}

// A network that was trained with -upright gets upright images from predict and evaluate, without a
// further option.
func TestCheckpointSaysUpright(t *testing.T) {
	upright, turned := orientedPNGs(t)
	archive := clitest.WriteTar(t, map[string]string{"cat/1.png": upright, "dog/2.png": onePixel(t)})
	folder := t.TempDir()
	writeFile(t, filepath.Join(folder, "images", "turned.png"), turned)
	writeFile(t, filepath.Join(folder, "images", "upright.png"), upright)
	for _, option := range []string{"-upright=false", "-upright"} {
		out := filepath.Join(folder, option)
		trainSmall(t, archive, out, option, "-epochs", "1")
		best := filepath.Join(out, "best.pt")
		predict := []string{"predict", "-checkpoint", best, "-device", "cpu", "-json"}
		status, stdout, stderr := command(t, append(predict, filepath.Join(folder, "images"))...)
		rows := strings.Split(strings.TrimSpace(strings.ReplaceAll(stdout, "turned.png", "upright.png")), "\n")
		if status != 0 || len(rows) != 2 {
			t.Fatalf("predict: got status %d, %s%s, want two rows", status, stdout, stderr)
		}
		if same := rows[0] == rows[1]; same != (option == "-upright") {
			t.Errorf("%s: got %v for a turned image that equals an upright one: %s", option, same, stdout)
		}
		losses := map[string]float64{}
		for name, image := range map[string]string{"turned": turned, "upright": upright} {
			test := clitest.WriteTar(t, map[string]string{"cat/1.png": image, "dog/2.png": onePixel(t)})
			status, stdout, stderr := command(t, "evaluate", "-archive", test, "-checkpoint", best,
				"-device", "cpu", "-json")
			var e evaluation
			if err := json.Unmarshal([]byte(stdout), &e); status != 0 || err != nil {
				t.Fatalf("evaluate: got status %d, %v, %s", status, err, stderr)
			}
			losses[name] = e.Loss
		}
		if same := losses["turned"] == losses["upright"]; same != (option == "-upright") {
			t.Errorf("%s: got the losses %v", option, losses)
		}

		// The opposite is an error.
		opposite := map[string]string{"-upright": "-upright=false", "-upright=false": "-upright"}[option]
		for _, args := range [][]string{
			append(slices.Clone(predict), opposite, folder),
			{"evaluate", "-archive", archive, "-checkpoint", best, "-device", "cpu", opposite},
		} {
			if status, _, stderr := command(t, args...); status != 1 ||
				!strings.Contains(stderr, "was trained on images") ||
				!strings.Contains(stderr, "leave the option out") {
				t.Errorf("%q: got status %d, %s", args, status, stderr)
			}
		}
	}
}

// orientedPNGs returns an image, and the same image stored on its side with an EXIF orientation.
func orientedPNGs(t *testing.T) (upright, turned string) {
	t.Helper()
	const width, height = 24, 16
	one, other := image.NewGray(image.Rect(0, 0, width, height)), image.NewGray(image.Rect(0, 0, height, width))
	for y := range height {
		for x := range width {
			value := color.Gray{uint8(x*10 + y*y)}
			one.SetGray(x, y, value)
			other.SetGray(y, width-1-x, value) // orientation 6: a row is a column, from the right
		}
	}
	encode := func(m image.Image) string {
		var b bytes.Buffer
		if err := png.Encode(&b, m); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	tiff := "MM\x00*\x00\x00\x00\x08" + "\x00\x01" + "\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06\x00\x00" +
		"\x00\x00\x00\x00"
	chunk := binary.BigEndian.AppendUint32(nil, uint32(len(tiff)))
	chunk = append(chunk, "eXIf"+tiff...)
	chunk = binary.BigEndian.AppendUint32(chunk, crc32.ChecksumIEEE(chunk[4:]))
	const header = 8 + 12 + 13 // signature and IHDR
	stored := encode(other)
	return encode(one), stored[:header] + string(chunk) + stored[header:]
}

// preview shows the batches that train gets with the same options.
func TestPreviewMixes(t *testing.T) {
	square := func(value uint8) string {
		m := image.NewGray(image.Rect(0, 0, 8, 8))
		for i := range m.Pix {
			m.Pix[i] = value
		}
		var b bytes.Buffer
		if err := png.Encode(&b, m); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	archive := clitest.WriteTar(t, map[string]string{"black/1.png": square(0), "white/2.png": square(255)})
	out := filepath.Join(t.TempDir(), "sheet.png")
	status, _, stderr := command(t, "preview", "-archive", archive, "-size", "64", "-mixup", "100", "-o", out)
	if status != 0 {
		t.Fatalf("got status %d, %s", status, stderr)
	}
	f, err := os.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sheet, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	for column := range 2 {
		r, _, _, _ := sheet.At(sheetGap+column*(64+sheetGap)+20, sheetHeading+20).RGBA()
		if grey := r >> 8; grey < 80 || grey > 176 { // a weight from Beta(100, 100) is near 1/2
			t.Errorf("picture %d: got grey %d, want a mixture of black and white", column, grey)
		}
	}
}

func TestTrainCountsTurnedImages(t *testing.T) {
	upright, turned := orientedPNGs(t)
	archive := clitest.WriteTar(t, map[string]string{"cat/1.png": upright, "cat/2.png": turned, "dog/3.png": turned})
	for option, want := range map[string]string{
		"-upright=false": "2 of 3 images lie on their side by their EXIF orientation: -upright turns them\n",
		"-upright":       "2 of 3 images lie on their side by their EXIF orientation, and are turned upright\n",
	} {
		if got := trainSmall(t, archive, filepath.Join(t.TempDir(), "out"), quick(option)...); !strings.Contains(got, want) {
			t.Errorf("%s: got\n%s\nwant %q", option, got, want)
		}
	}
	if got := trainSmall(t, clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2}),
		filepath.Join(t.TempDir(), "out"), quick()...); strings.Contains(got, "side") {
		t.Errorf("upright images: got\n%s", got)
	}
}

// inspect says how many images lie on their side, also if none does: train refers to it.
func TestInspectCountsTurnedImages(t *testing.T) {
	upright, turned := orientedPNGs(t)
	for want, files := range map[string]map[string]string{
		"2 images lie on the side by the EXIF orientation: -upright turns them\n": {
			"cat/1.png": upright, "cat/2.png": turned, "dog/3.png": turned},
		"no image lies on its side by its EXIF orientation\n": {"cat/1.png": upright, "dog/2.png": upright},
	} {
		archive := clitest.WriteTar(t, files)
		for _, args := range [][]string{{"inspect", archive}, {"inspect", "-index", archive}} {
			status, stdout, stderr := command(t, args...)
			if status != 0 || !strings.Contains(stdout, want) || strings.Contains(stdout, "ApplyEXIFOrientation") {
				t.Errorf("%q: got status %d, %s%s, want 0, %q and no Go name", args, status, stdout, stderr, want)
			}
		}
	}
}

// An archive whose only folders of images are train and test has no classes to train on.
func TestTrainRefusesPartsOfASetAsClasses(t *testing.T) {
	for second, refused := range map[string]bool{"test": true, "Validation": true, "hens": false} {
		archive := clitest.FewPhotos(t, map[string]int{"train": 2, second: 2})
		status, stdout, stderr := command(t, append([]string{"train", "-archive", archive, "-size", "32", "-batch", "4",
			"-device", "cpu", "-o", filepath.Join(t.TempDir(), "out")}, quick()...)...)
		says := strings.Contains(stderr, "the classes have the names of parts of a set: give the labels of the images "+
			"with -list FILE, or name the folder of one part")
		if says != refused || (status == 1) != refused {
			t.Errorf("folders train and %s: got status %d, %s%s, want an error: %v", second, status, stdout, stderr, refused)
		}
	}
}

func TestTrainHoldsOutImages(t *testing.T) {
	archive, out := clitest.FewPhotos(t, map[string]int{"cat": 10, "dog": 10}), filepath.Join(t.TempDir(), "out")
	stdout := trainSmall(t, archive, out, quick("-val", "0.3")...)
	counts := regexp.MustCompile(
		`: (\d+) images in 2 classes\n(?s:.*) of (\d+) held-back images?\n`).FindStringSubmatch(stdout)
	if counts == nil {
		t.Fatalf("got\n%s\nwant the numbers of images", stdout)
	}
	trained, _ := strconv.Atoi(counts[1])
	held, _ := strconv.Atoi(counts[2])
	if trained+held != 20 || held < 2 || held > 12 {
		t.Errorf("got %d images for training and %d held back, want 20 together", trained, held)
	}
	for _, c := range []struct{ args, says string }{
		{"-val 0.2", "val 0.3, not 0.2"}, {"-val 0.3 -val-seed 2", "val-seed unset, not 2"}, {"", "val 0.3, not unset"},
	} {
		args := append([]string{"train", "-archive", archive, "-size", "32", "-batch", "4", "-epochs", "1",
			"-device", "cpu", "-o", out, "-resume"}, strings.Fields(c.args)...)
		if status, _, stderr := command(t, args...); status != 1 || !strings.Contains(stderr, c.says) {
			t.Errorf("resume with %q: got status %d, %s, want %q", c.args, status, stderr, c.says)
		}
	}
}

// If an archive has the folders train and test, torchstream train uses only the folder train for
// training.
func TestTrainUsesPartsOfASet(t *testing.T) {
	train := func(args ...string) (int, string, string) {
		out := filepath.Join(t.TempDir(), "out")
		return command(t, append([]string{"train", "-size", "32", "-batch", "4", "-epochs", "1", "-device",
			"cpu", "-o", out, "-archive"}, args...)...)
	}
	set := map[string]int{"set/train/cat": 3, "set/train/dog": 2, "set/val/cat": 1, "set/test/cat": 2,
		"set/test/dog": 2}
	status, stdout, stderr := train(clitest.FewPhotos(t, set))
	for _, want := range []string{
		"has the parts of a set: training on set/train, evaluating on set/val; not used: set/test\n",
		": 5 images in 2 classes\n", "of 1 held-back image\n",
	} {
		if status != 0 || !strings.Contains(stdout, want) {
			t.Errorf("got status %d, %s\n%s\nwant %q", status, stderr, stdout, want)
		}
	}
	other := clitest.FewPhotos(t, map[string]int{"cat": 1, "dog": 1})
	if status, stdout, stderr := train(clitest.FewPhotos(t, set), "-test", other); status != 0 ||
		!strings.Contains(stdout, "training on set/train; not used: set/val, set/test\n") ||
		!strings.Contains(stdout, "of 2 held-back images\n") {
		t.Errorf("-test: got status %d, %s\n%s", status, stderr, stdout)
	}
	folder := filepath.Join(t.TempDir(), "set")
	for _, name := range []string{"train/cat/1.png", "train/dog/2.png", "test/dog/3.png"} {
		writeFile(t, filepath.Join(folder, name), onePixel(t))
	}
	if status, stdout, stderr := train(folder); status != 0 ||
		!strings.Contains(stdout, "training on train, evaluating on test\n") ||
		!strings.Contains(stdout, "2 images in 2 classes") {
		t.Errorf("folder: got status %d, %s\n%s", status, stderr, stdout)
	}
	for says, set := range map[string]map[string]int{
		"has the folders train, test and hen": {"train/cat": 1, "train/dog": 1, "test/cat": 1, "hen": 1},
		"no image of the class hen in train":  {"train/cat": 1, "train/dog": 1, "test/hen": 1},
	} {
		if status, _, stderr := train(clitest.FewPhotos(t, set)); status != 1 || !strings.Contains(stderr, says) {
			t.Errorf("%v: got status %d, %s, want %q", set, status, stderr, says)
		}
	}
	// Classes themselves may be named like splits.
	if status, stdout, stderr := train(clitest.FewPhotos(t,
		map[string]int{"train": 2, "test": 1, "ship": 2})); status != 0 ||
		!strings.Contains(stdout, "5 images in 3 classes") {
		t.Errorf("classes: got status %d, %s\n%s", status, stderr, stdout)
	}
}

// train, evaluate and predict give an image several labels: the checkpoint says so, and the measure
// is the mean average precision.
func TestTrainWithSeveralLabels(t *testing.T) {
	members := map[string]string{}
	list := "id,cat,dog,hen\n"
	for i := range 12 {
		members[fmt.Sprintf("all/%d.png", i)] = onePixel(t)
		list += fmt.Sprintf("%d,%d,%d,%d\n", i, i%2, (i+1)%2, min(1, i%3))
	}
	members["list.csv"] = list
	archive, out := clitest.WriteTar(t, members), filepath.Join(t.TempDir(), "out")
	stdout := trainSmall(t, archive, out, quick("-list", "list.csv", "-multi-label", "-val", "0.25")...)
	for _, want := range []string{"10 images in 3 classes\n", "\n    2       6  hen", "test mAP", "mean average precision 0.",
		"on 2 held-back images"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("%q is not in\n%s", want, stdout)
		}
	}
	best := filepath.Join(out, "best.pt")
	metadata, classes := metadataOf(t, best)
	if want := []string{"cat", "dog", "hen"}; !reflect.DeepEqual(classes, want) || metadata["multi-label"] != "true" {
		t.Errorf("got the classes %q, multi-label %q, want %q, true", classes, metadata["multi-label"], want)
	}
	evaluate := []string{"evaluate", "-archive", archive, "-checkpoint", best, "-device", "cpu", "-list", "list.csv"}
	status, stdout, stderr := command(t, append(evaluate, "-json")...)
	var e evaluation
	if err := json.Unmarshal([]byte(stdout), &e); err != nil || status != 0 || e.Images != 12 || e.MAP <= 0 || e.MAP > 1 ||
		len(e.Classes) != 3 || e.Classes[2].Images != 8 || e.Classes[2].AveragePrecision == nil || e.Top1 != 0 {
		t.Errorf("evaluate: status %d, %v, %s%s, want a mean average precision and 8 images of hen", status, err, stdout, stderr)
	}
	if status, stdout, _ := command(t, append(evaluate, "-multi-label")...); status != 0 ||
		!strings.Contains(stdout, "mean average precision 0.") || !strings.Contains(stdout, "\nclass  average precision") {
		t.Errorf("evaluate: status %d, %s, want the precision of the classes", status, stdout)
	}
	image := filepath.Join(t.TempDir(), "1.png")
	writeFile(t, image, onePixel(t))
	status, stdout, stderr = command(t, "predict", "-checkpoint", best, "-device", "cpu", "-json", image)
	var p predictedFile
	if err := json.Unmarshal([]byte(stdout), &p); err != nil || status != 0 || len(p.Classes) != 3 {
		t.Fatalf("predict: status %d, %v, %s%s, want three classes", status, err, stdout, stderr)
	}
	if sum := p.Classes[0].Probability + p.Classes[1].Probability + p.Classes[2].Probability; sum > 0.99 && sum < 1.01 {
		t.Errorf("predict: got probabilities whose sum is %v, want one for each class by itself", sum)
	}

	// Lists of labels in a Parquet file need no list. The images of this file have no pixels.
	data, err := os.ReadFile("../../imageloader/testdata/parquet/datasets-lists.parquet")
	if err != nil {
		t.Fatal(err)
	}
	lists := filepath.Join(t.TempDir(), "lists.parquet")
	writeFile(t, lists, string(data))
	status, stdout, stderr = command(t, "train", "-archive", lists, "-multi-label", "-size", "32", "-batch", "4",
		"-epochs", "1", "-device", "cpu", "-val", "0.2", "-o", filepath.Join(t.TempDir(), "out"))
	if status != 1 || !strings.Contains(stdout, "13 images in 3 classes") || !strings.Contains(stderr, "truncated PNG") {
		t.Errorf("Parquet: status %d, %s%s, want 1, 13 images and a truncated PNG", status, stdout, stderr)
	}
	if status, _, stderr := command(t, "inspect", "-webdataset", "-multi-label", archive); status != 2 ||
		!strings.Contains(stderr, "from -list FILE alone") {
		t.Errorf("inspect: status %d, %s, want 2 and what it reads", status, stderr)
	}

	single := filepath.Join(t.TempDir(), "single")
	trainSmall(t, clitest.FewPhotos(t, map[string]int{"cat": 3, "dog": 3}), single, "-epochs", "1")
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{append(evaluate, "-o", t.TempDir()), 1, "-o is for the confusions"},
		{[]string{"evaluate", "-archive", archive, "-checkpoint", filepath.Join(single, "best.pt"), "-list", "list.csv",
			"-multi-label"}, 1, "one label for each image"},
		{[]string{"train", "-archive", archive, "-list", "list.csv", "-multi-label", "-label-smoothing", "0.1"}, 2,
			"-label-smoothing and -multi-label exclude each other"},
		{[]string{"train", "-archive", archive, "-multi-label", "-o", t.TempDir()}, 1, "-multi-label"},
		{[]string{"train", "-archive", archive, "-list", "list.csv", "-label-column", "cat", "-size", "32", "-batch", "4",
			"-val", "0.25", "-epochs", "1", "-device", "cpu", "-o", out, "-resume"}, 1, "multi-label true, not unset"},
	} {
		if status, _, stderr := command(t, c.args...); status != c.status || !strings.Contains(stderr, c.says) {
			t.Errorf("%q: got status %d, %s, want %d and %q", c.args, status, stderr, c.status, c.says)
		}
	}
}

//go:build linux && cgo

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/csv"
	"encoding/json"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// untrained saves a ResNet-18 as torchstream train does, for images of 32 x 32.
func untrained(t *testing.T, classes ...string) (checkpoint string, net nn.Module) {
	t.Helper()
	if err := torch.ManualSeed(1); err != nil {
		t.Fatal(err)
	}
	net, err := models.ByName("resnet18", models.Options{NumClasses: len(classes)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nn.Close(net) })
	names, err := json.Marshal(classes)
	if err != nil {
		t.Fatal(err)
	}
	checkpoint = filepath.Join(t.TempDir(), "best.pt")
	if err := nn.Save(checkpoint, net,
		map[string]string{"model": "resnet18", "size": "32", "classes": string(names)}); err != nil {
		t.Fatal(err)
	}
	nn.Train(net, false)
	return checkpoint, net
}

// unpacked writes some of an archive's photographs into a folder.
func unpacked(t *testing.T, archive string, count int) string {
	t.Helper()
	folder := t.TempDir()
	file, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	for members := tar.NewReader(unzipped); count > 0; {
		head, err := members.Next()
		if err != nil {
			t.Fatal(err)
		}
		if head.Typeflag != tar.TypeReg {
			continue
		}
		data, err := io.ReadAll(members)
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, filepath.Join(folder, head.Name), string(data))
		count--
	}
	return folder
}

// writeFile writes a file and makes its folder.
func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o666); err != nil {
		t.Fatal(err)
	}
}

// predict computes the same probabilities as an evaluation, which reads images through the loader
// and the prefetcher.
func TestPredictEqualsEvaluation(t *testing.T) {
	classes := []string{"cat", "dog", "hen", "emu"}
	checkpoint, net := untrained(t, classes...)
	folder := unpacked(t, photos, 5)
	writeFile(t, filepath.Join(folder, "notes.txt"), "no image")
	status, stdout, stderr := command(t, "predict", "-checkpoint", checkpoint, "-device", "cpu", "-batch",
		"2", "-top", "9", "-json", folder)
	if status != 0 || stderr != "torchstream: 1 file left out: no images\n" {
		t.Fatalf("status %d, %s, want status 0, stderr %q",
			status, stderr, "torchstream: 1 file left out: no images\n")
	}
	loader, err := imageloader.Open(folder, imageloader.Options{BatchSize: 8, Transform: imageloader.Eval(36, 32)})
	if err != nil {
		t.Fatal(err)
	}
	defer loader.Close()
	feed, err := prefetcher.New(loader, prefetcher.Options{Device: cuda.CPU})
	if err != nil {
		t.Fatal(err)
	}
	defer feed.Close()
	rows := json.NewDecoder(strings.NewReader(stdout))
	compared := 0
	for batch, err := range feed.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		want, err := net.Forward(batch.Images.NoGrad()).Softmax(1).Float32s()
		if err != nil {
			t.Fatal(err)
		}
		for i, sample := range batch.Info.(imageloader.Info).Samples {
			var row predictedFile
			if err := rows.Decode(&row); err != nil || row.File != filepath.Join(folder, sample.Name) ||
				len(row.Classes) != len(classes) {
				t.Fatalf("row %+v of %s, %v", row, sample.Name, err)
			}
			for j, g := range row.Classes {
				if math.Abs(g.Probability-float64(want[i*len(classes)+g.Label])) > 1e-5 ||
					g.Class != classes[g.Label] ||
					j > 0 && g.Probability > row.Classes[j-1].Probability {
					t.Errorf("%s: %+v, want the probabilities %v", row.File, row.Classes,
						want[i*len(classes):][:len(classes)])
				}
			}
			compared++
		}
	}
	if err := rows.Decode(&predictedFile{}); compared != 5 || err != io.EOF {
		t.Errorf("%d rows, and then %v, want compared = 5, err = %v", compared, err, io.EOF)
	}
}

// -csv writes the same rows that -json prints.
func TestPredictWritesCSV(t *testing.T) {
	checkpoint, _ := untrained(t, "cat", "a,\"b\"")
	folder := unpacked(t, photos, 3)
	path := filepath.Join(t.TempDir(), "predictions.csv")
	args := []string{"predict", "-checkpoint", checkpoint, "-device", "cpu", "-json", "-csv", path, folder}
	status, stdout, stderr := command(t, args...)
	if status != 0 {
		t.Fatalf("status %d, %s, want status 0", status, stderr)
	}
	want := [][]string{{"file", "class", "probability"}}
	for rows := json.NewDecoder(strings.NewReader(stdout)); rows.More(); {
		var row predictedFile
		if err := rows.Decode(&row); err != nil {
			t.Fatal(err)
		}
		for _, g := range row.Classes {
			want = append(want, []string{row.File, g.Class, strconv.FormatFloat(g.Probability, 'g', 6, 64)})
		}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	if err != nil || !reflect.DeepEqual(got, want) || len(got) != 1+3*2 {
		t.Errorf("got %q, %v, want %q, nil", got, err, want)
	}
	if status, _, stderr := command(t, args...); status != 0 { // its own output is replaced
		t.Errorf("again: status %d, %s, want status 0", status, stderr)
	}
	if err := os.WriteFile(path, []byte("notes"), 0o666); err != nil {
		t.Fatal(err)
	}
	if status, _, stderr := command(t, args...); status != 1 || !strings.Contains(stderr, "-csv: ") {
		t.Errorf("over notes: status %d, %s, want status 1 and stderr with %q", status, stderr, "-csv: ")
	}
}

// The table's columns are aligned for all names.
func TestPredictTable(t *testing.T) {
	checkpoint, _ := untrained(t, "cat", "Eichh\u00f6rnchen")
	folder := unpacked(t, photos, 3)
	var names []string
	for i, path := range glob(t, filepath.Join(folder, "*/*/*")) {
		names = append(names, filepath.Join(folder, strings.Repeat("\u00e4", 3*i+1)))
		if err := os.Rename(path, names[i]); err != nil {
			t.Fatal(err)
		}
	}
	status, stdout, stderr := command(t,
		append([]string{"predict", "-checkpoint", checkpoint, "-device", "cpu", "-batch", "1"}, names...)...)
	lines := strings.Split(strings.TrimSuffix(stdout, "\n"), "\n")
	if status != 0 || stderr != "" || len(lines) != 3 {
		t.Fatalf("status %d, %s%s, len(lines) %v, want status 0, stderr \"\", len(lines) = 3",
			status, stdout, stderr, len(lines))
	}
	column := utf8.RuneCountInString(names[2]) + 2 + len("Eichhornchen") + 2
	for i, line := range lines {
		characters := []rune(line)
		if fields := strings.Fields(line); len(fields) != 7 || fields[0] != names[i] ||
			len(characters) != 2*column-utf8.RuneCountInString(names[2])+2*len("100.0 %") ||
			characters[column+6] != '%' || characters[len(characters)-1] != '%' {
			t.Errorf("line %d is not aligned:\n%s", i, stdout)
		}
	}
}

// Bad files are named, the other files are classified, and the status is 1.
func TestPredictBadFiles(t *testing.T) {
	checkpoint, _ := untrained(t, "cat", "dog")
	folder := unpacked(t, photos, 2)
	good := glob(t, filepath.Join(folder, "*/*/*"))
	whole, err := os.ReadFile(good[0])
	if err != nil {
		t.Fatal(err)
	}
	cut, text, missing := filepath.Join(folder, "cut.jpg"), filepath.Join(t.TempDir(),
		"notes.txt"), filepath.Join(folder, "missing.jpg")
	writeFile(t, cut, string(whole[:len(whole)/2]))
	writeFile(t, text, "no image")
	large := filepath.Join(t.TempDir(), "large.jpg")
	writeFile(t, large, "")
	if err := os.Truncate(large, maxImageBytes+1); err != nil {
		t.Fatal(err)
	}
	parquet := filepath.Join(t.TempDir(), "rows.parquet")
	writeFile(t, parquet, "PAR1 and no more")
	for _, batch := range []string{"1", "2", "64"} {
		args := []string{"predict", "-checkpoint", checkpoint, "-device", "cpu", "-batch", batch, "-top",
			"1", "-json", missing, folder, text, large, photos, parquet}
		status, stdout, stderr := command(t, args...)
		var classified, bad []string
		for line := range strings.Lines(stdout) {
			var row predictedFile
			if err := json.Unmarshal([]byte(line), &row); err != nil {
				t.Fatal(err)
			}
			if row.Error == "" && len(row.Classes) == 1 {
				classified = append(classified, row.File)
			} else if row.Error != "" && row.Classes == nil {
				bad = append(bad, row.File)
			}
		}
		if status != 1 || !slices.Equal(classified, good) ||
			!slices.Equal(bad, []string{missing, cut, text, large, photos, parquet}) {
			t.Errorf("-batch %s: status %d, classified %q, bad %q, want status 1, classified = %v, bad "+
				"= %+v", batch, status, classified, bad, good, []string{missing, cut, text, large, photos, parquet})
		}
		for _, says := range []string{
			missing + ": no such file", cut + ": damaged: ", text + ": not an image",
			large + ": too large: more than 64 MiB", photos + ": an archive, not an image: unpack it",
			parquet + ": a Parquet file, not an image: torchstream evaluate -archive reads it",
			"torchstream: 6 of 8 files could not be classified\n",
		} {
			if !strings.Contains(stderr, says) {
				t.Errorf("-batch %s: %q is not in\n%s", batch, says, stderr)
			}
		}
	}
}

// Names are also read from standard input, and may be folders.
func TestPredictNames(t *testing.T) {
	folder := t.TempDir()
	for _, name := range []string{"b.jpg", "a/c.jpg", "a/d.jpg"} {
		writeFile(t, filepath.Join(folder, name), "")
	}
	if err := os.Symlink(folder, filepath.Join(folder, "loop")); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(filepath.Join(folder, "a"), link); err != nil {
		t.Fatal(err)
	}
	p := predictor{stderr: io.Discard}
	images, err := p.images(t.Context(), []string{"x.jpg", "-", link},
		strings.NewReader("y 1.jpg\n\n"+folder+"\nz.jpg"))
	if err != nil {
		t.Fatal(err)
	}
	want := []imageFile{
		{"x.jpg", false}, {"y 1.jpg", false}, {filepath.Join(folder, "a/c.jpg"), true},
		{filepath.Join(folder, "a/d.jpg"), true}, {filepath.Join(folder, "b.jpg"), true},
		{"z.jpg", false}, {filepath.Join(link, "c.jpg"), true}, {filepath.Join(link, "d.jpg"), true},
	}
	if !slices.Equal(images, want) || p.leftOut != 1 || p.bad != 0 {
		t.Errorf("%v, want %v; %d left out, %d bad", images, want, p.leftOut, p.bad)
	}
}

func TestPredictCommandLine(t *testing.T) {
	checkpoint, net := untrained(t, "cat", "dog")
	other := filepath.Join(t.TempDir(), "other.safetensors")
	if err := nn.Save(other, net, nil); err != nil {
		t.Fatal(err)
	}
	unsized := filepath.Join(t.TempDir(), "unsized.safetensors")
	if err := nn.Save(unsized, net, map[string]string{"model": "resnet18", "classes": `["cat","dog"]`}); err != nil {
		t.Fatal(err)
	}
	empty, begun := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(begun, "last.pt"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{"-checkpoint", filepath.Join(begun, "best.pt"), photos}, 1,
			"-checkpoint " + filepath.Join(begun, "last.pt")},
		{nil, 2, "predict needs an argument: IMAGE|FOLDER..."},
		{[]string{"-top", "0", photos}, 2, "-batch and -top are at least 1"},
		{[]string{photos, "-top", "2"}, 2, "options come before the images: -top"},
		{[]string{"-checkpoint", filepath.Join(empty, "best.pt"), photos}, 1, "torchstream train writes best.pt"},
		{[]string{"-checkpoint", begun, photos}, 1,
			"is a folder: name the checkpoint in it: -checkpoint " + filepath.Join(begun, "last.pt")},
		{[]string{"-checkpoint", empty, photos}, 1, empty + " is a folder, without a checkpoint"},
		{[]string{"-checkpoint", other, photos}, 1, other + " was not written by torchstream train"},
		{[]string{"-checkpoint", other, photos}, 1,
			`has no valid "model" (such as resnet18), "classes" (such as ["cat","dog"]), "size" (such as 224): choose`},
		{[]string{"-checkpoint", unsized, photos}, 1, `has no valid "size" (such as 224): choose`},
		{[]string{"-checkpoint", checkpoint, "-device", "cpu", empty}, 1, "nothing to classify"},
	} {
		status, stdout, stderr := command(t, append([]string{"predict"}, c.args...)...)
		if status != c.status || !strings.Contains(stderr, c.says) || stdout != "" {
			t.Errorf("predict %q: status %d, want %d; %q does not say %q; %s", c.args, status, c.status,
				stderr, c.says, stdout)
		}
	}
}

// predict refuses a checkpoint of examples/01-train, and names the command that reads it. The file
// has the metadata that this example writes.
func TestCheckpointOfTheDemoIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "demo.safetensors")
	net := nn.NewLinear(2, 2, nn.LinearOptions{})
	defer nn.Close(net)
	if err := nn.Save(path, net, map[string]string{"format": "torchstream 01-train 1", "classes": `["cat","dog"]`,
		"size": "32", "width": "8"}); err != nil {
		t.Fatal(err)
	}
	want := "`go run ./examples/01-train predict -checkpoint " + path + " FILE...` reads it"
	if status, _, stderr := command(t, "predict", "-checkpoint", path, photos); status != 1 ||
		!strings.Contains(stderr, want) {
		t.Errorf("got status %d, %s, want status 1 and %q", status, stderr, want)
	}
}

// glob returns the files that match a pattern.
func glob(t *testing.T, pattern string) []string {
	t.Helper()
	paths, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

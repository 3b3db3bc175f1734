//go:build linux && cgo

package main

import (
	"archive/zip"
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/clitest"
	"github.com/torchstream/torchstream/internal/parquettest"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/trace"
)

// imagesPackage is a package for images of 32 x 32, with the outputs features and logits.
// aoti/testdata/make_packages.py wrote it.
const imagesPackage = "../../aoti/testdata/images.pt2"

// pyTorchImages has PyTorch's outputs of imagesPackage for the first images of photos.
type pyTorchImages struct {
	Names    []string
	Features [][]float64
	Logits   [][]float64
}

func readPyTorchImages(t *testing.T) (want pyTorchImages) {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("the package has code for amd64")
	}
	text, err := os.ReadFile("../../aoti/testdata/images.json")
	if err == nil {
		err = json.Unmarshal(text, &want)
	}
	if err != nil {
		t.Fatal(err)
	}
	return want
}

// embed runs the command on the CPU, and returns the names, the classes and the vectors that it
// wrote.
func embed(t *testing.T, out string, args ...string) (names, classes []string, vectors [][]float32) {
	t.Helper()
	status, _, stderr := command(t, append([]string{"embed", "-device", "cpu", "-o", out}, args...)...)
	if status != 0 {
		t.Fatalf("%q: status %d, %s, want 0", args, status, stderr)
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(out), "*.part*"))
	if err != nil || len(left) > 0 {
		t.Errorf("%q leaves %v, %v, want nothing", args, left, err)
	}
	return readVectors(t, out)
}

func readVectors(t *testing.T, out string) (names, classes []string, vectors [][]float32) {
	t.Helper()
	list, err := os.Open(strings.TrimSuffix(out, filepath.Ext(out)) + ".csv")
	if err != nil {
		t.Fatal(err)
	}
	defer list.Close()
	rows, err := csv.NewReader(list).ReadAll()
	if err != nil || !slices.Equal(rows[0], []string{"name", "class"}) {
		t.Fatalf("got %v, %v, want the columns name and class", rows, err)
	}
	for _, row := range rows[1:] {
		names, classes = append(names, row[0]), append(classes, row[1])
	}
	file, err := checkpoint.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	x, err := file.Read("vectors")
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	values, err := x.Float32s()
	if err != nil {
		t.Fatal(err)
	}
	shape := x.Shape()
	if len(shape) != 2 || int(shape[0]) != len(names) {
		t.Fatalf("got vectors %v for %d names, want a row for each", shape, len(names))
	}
	return names, classes, slices.Collect(slices.Chunk(values, int(shape[1])))
}

func requireNear(t *testing.T, what string, got []float32, want []float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: got %v, want %v", what, got, want)
	}
	for i := range got {
		if math.Abs(float64(got[i])-want[i]) > 1e-5*max(1, math.Abs(want[i])) {
			t.Errorf("%s: got %v, want %v", what, got, want)
			return
		}
	}
}

// TestEmbedEqualsPyTorch checks a package whose images are normalised by other numbers than
// ImageNet's. The package's minimum and maximum batch sizes limit the steps.
func TestEmbedEqualsPyTorch(t *testing.T) {
	want := readPyTorchImages(t)
	for output, rows := range map[string][][]float64{"features": want.Features, "logits": want.Logits} {
		t.Run(output, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "vectors.safetensors")
			names, classes, vectors := embed(t, out, "-archive", photos, "-model", imagesPackage, "-output", output)
			if len(names) != 192 || !slices.Equal(names[:len(want.Names)], want.Names) || classes[0] != "test/astronaut" &&
				classes[0] != "astronaut" {
				t.Fatalf("got %d names from %v of %v, want 192 from %v", len(names), names[:3], classes[:3], want.Names[:3])
			}
			for i, row := range rows {
				requireNear(t, names[i], vectors[i], row)
			}
		})
	}
}

// The last batch of 191 images in steps of 10 has one image, fewer than the package accepts.
func TestEmbedFillsBatchesThatAreTooSmall(t *testing.T) {
	readPyTorchImages(t)
	folder := t.TempDir()
	args := []string{"-archive", unpacked(t, photos, 11), "-model", imagesPackage, "-output", "features"}
	_, _, want := embed(t, filepath.Join(folder, "a.safetensors"), append(args, "-batch", "11")...)
	_, _, got := embed(t, filepath.Join(folder, "b.safetensors"), append(args, "-batch", "10")...)
	if len(want) != 11 || len(got) != 11 {
		t.Fatalf("got %d and %d vectors, want 11", len(want), len(got))
	}
	for i := range got {
		if !slices.Equal(got[i], want[i]) {
			t.Errorf("vector %d in batches of 10 is %v, want %v as in one batch of 11", i, got[i], want[i])
		}
	}
}

// The vectors do not depend on the kind of the archive. A list chooses images and gives classes.
func TestEmbedReadsAllArchives(t *testing.T) {
	readPyTorchImages(t)
	files := map[string]string{}
	for _, name := range []string{"cat/000.jpg", "cat/001.jpg", "clock/000.jpg"} {
		files[name] = string(photo(t, "test/"+name))
	}
	tarred, folder, zipped := clitest.WriteTar(t, files), t.TempDir(), filepath.Join(t.TempDir(), "photos.zip")
	var data bytes.Buffer
	z := zip.NewWriter(&data)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		w, err := z.Create(name)
		if err == nil {
			_, err = w.Write([]byte(files[name]))
		}
		if err == nil {
			err = os.MkdirAll(filepath.Join(folder, filepath.Dir(name)), 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, filepath.Join(folder, name), files[name])
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	writeFile(t, zipped, data.String())
	list := filepath.Join(t.TempDir(), "list.csv")
	writeFile(t, list, "path,label\ncat/001.jpg,fluffy\nclock/000.jpg,round\n")
	args := []string{"-model", imagesPackage, "-output", "features", "-archive"}
	_, _, want := embed(t, filepath.Join(t.TempDir(), "v.safetensors"), append(args, tarred)...)
	for _, archive := range []string{folder, zipped} {
		names, classes, got := embed(t, filepath.Join(t.TempDir(), "v.safetensors"), append(args, archive)...)
		if !slices.Equal(names, slices.Sorted(maps.Keys(files))) || !slices.Equal(classes, []string{"cat", "cat", "clock"}) ||
			!slices.Equal(slices.Concat(got...), slices.Concat(want...)) {
			t.Errorf("%s: got %v of %v with %v, want the vectors %v of a .tar", archive, names, classes, got, want)
		}
	}
	names, classes, got := embed(t, filepath.Join(t.TempDir(), "v.safetensors"), append(args, tarred, "-list", list)...)
	if !slices.Equal(names, []string{"cat/001.jpg", "clock/000.jpg"}) || !slices.Equal(classes, []string{"fluffy", "round"}) ||
		!slices.Equal(slices.Concat(got...), slices.Concat(want[1:]...)) {
		t.Errorf("-list: got %v of %v with %v, want the last two of %v", names, classes, got, want)
	}
}

// Images need no class: all images of a flat archive have a vector, also if others are in folders
// or if a Parquet file has no column of labels.
func TestEmbedNeedsNoClasses(t *testing.T) {
	readPyTorchImages(t)
	photos := [3]string{string(photo(t, "test/cat/000.jpg")), string(photo(t, "test/cat/001.jpg")),
		string(photo(t, "test/clock/000.jpg"))}
	args := []string{"-model", imagesPackage, "-output", "features", "-archive"}
	_, _, want := embed(t, filepath.Join(t.TempDir(), "v.safetensors"), append(args, clitest.WriteTar(t, map[string]string{
		"cat/000.jpg": photos[0], "cat/001.jpg": photos[1], "clock/000.jpg": photos[2]}))...)
	folder, table, web := t.TempDir(), filepath.Join(t.TempDir(), "a.parquet"), map[string]string{}
	var rows []parquettest.Row
	for i, data := range photos {
		name := fmt.Sprintf("%d.jpg", i)
		rows = append(rows, parquettest.Row{Path: name, Image: data, Label: -1})
		writeFile(t, filepath.Join(folder, name), data)
		web[name], web[fmt.Sprintf("%d.cls", i)] = data, "7"
	}
	writeFile(t, table, string(parquettest.File(t, rows, parquettest.Layout{Label: "colour"})))
	mixed := clitest.WriteTar(t, map[string]string{"0.jpg": photos[0], "a/b/1.jpg": photos[1], "a/c/2.jpg": photos[2]})
	for _, c := range []struct {
		archive        string
		names, classes []string
	}{
		{folder, []string{"0.jpg", "1.jpg", "2.jpg"}, []string{"", "", ""}},
		{clitest.WriteTar(t, web), []string{"0.jpg", "1.jpg", "2.jpg"}, []string{"", "", ""}},
		{mixed, []string{"0.jpg", "a/b/1.jpg", "a/c/2.jpg"}, []string{"", "b", "c"}},
		{table, []string{"a/00000000/0.jpg", "a/00000001/1.jpg", "a/00000002/2.jpg"}, []string{"", "", ""}},
	} {
		names, classes, got := embed(t, filepath.Join(t.TempDir(), "v.safetensors"), append(args, c.archive)...)
		if _, err := imageloader.InspectIndex(t.Context(), mixed, imageloader.Options{}, nil); c.archive == mixed && err != nil {
			t.Errorf("the index of an archive with classes: %v, want their labels", err)
		}
		if !slices.Equal(names, c.names) || !slices.Equal(classes, c.classes) ||
			!slices.Equal(slices.Concat(got...), slices.Concat(want...)) {
			t.Errorf("%s: got %q of %q with %v, want %q of %q with %v", c.archive, names, classes, got, c.names, c.classes, want)
		}
	}
}

// Only missing or impossible labels are a reason to read an archive again, without labels. Another
// error is reported.
func TestEmbedReportsErrorsOtherThanLabels(t *testing.T) {
	readPyTorchImages(t)
	data := string(photo(t, "test/cat/000.jpg"))
	args := []string{"-model", imagesPackage, "-output", "features", "-archive"}
	damaged := filepath.Join(t.TempDir(), "a.parquet")
	writeFile(t, damaged, string(parquettest.File(t, []parquettest.Row{{Path: "a.jpg", Image: data, Label: 3}},
		parquettest.Layout{Classes: []string{"a", "b"}})))
	status, _, stderr := command(t, append([]string{"embed", "-o", filepath.Join(t.TempDir(), "v.npy")},
		append(args, damaged)...)...)
	if want := "the label is 3, and the file names 2 classes"; status != 1 || !strings.Contains(stderr, want) {
		t.Errorf("got status %d, %s, want 1 and %q", status, stderr, want)
	}
	table := filepath.Join(t.TempDir(), "a.parquet")
	writeFile(t, table, string(parquettest.File(t, []parquettest.Row{{Path: "a.jpg", Image: data, Label: 1 << 20}},
		parquettest.Layout{})))
	names, _, _ := embed(t, filepath.Join(t.TempDir(), "v.safetensors"), append(args, table)...)
	if !slices.Equal(names, []string{"a/00000000/a.jpg"}) {
		t.Errorf("a column label with numbers that are no classes: got %q, want the row", names)
	}
}

// A .npy file has the same rows, after a header of NumPy's format.
func TestEmbedWritesNumPyFiles(t *testing.T) {
	readPyTorchImages(t)
	folder := t.TempDir()
	_, _, want := embed(t, filepath.Join(folder, "a.safetensors"), "-archive", photos, "-model", imagesPackage, "-output", "features")
	out, names := filepath.Join(folder, "b.npy"), filepath.Join(folder, "b.txt")
	status, stdout, stderr := command(t, "embed", "-archive", photos, "-model", imagesPackage, "-output", "features",
		"-o", out, "-names", names)
	if status != 0 || !strings.Contains(stdout, "192 vectors of 5 numbers") {
		t.Fatalf("status %d, %s%s, want 0 and \"192 vectors of 5 numbers\"", status, stdout, stderr)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	const head = "\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (192, 5), }"
	if !strings.HasPrefix(string(data), head) || data[127] != '\n' || len(data) != 128+192*5*4 {
		t.Fatalf("got %d bytes starting with %q, want %d with %q", len(data), data[:128], 128+192*5*4, head)
	}
	got := make([]float32, 192*5)
	if _, err := binary.Decode(data[128:], binary.LittleEndian, got); err != nil || !slices.Equal(got, slices.Concat(want...)) {
		t.Errorf("%v: the rows differ from those of the .safetensors file", err)
	}
	list, err := os.ReadFile(names)
	if lines := strings.Split(string(list), "\n"); err != nil || len(lines) != 193 || lines[0] != "test/astronaut/000.jpg" {
		t.Errorf("%v: got %d lines from %q, want 192 names", err, len(lines), lines[0])
	}
}

// The vectors of a checkpoint of torchstream train are the input of its last layer.
func TestEmbedCheckpoint(t *testing.T) {
	path, net := untrained(t, "a", "b", "c")
	names, _, got := embed(t, filepath.Join(t.TempDir(), "vectors.safetensors"), "-archive", photos, "-model", path, "-batch", "64")
	features, err := models.Features(net)
	if err != nil {
		t.Fatal(err)
	}
	loader, err := imageloader.Open(photos, imageloader.Options{BatchSize: 64, Transform: imageloader.Eval(36, 32)})
	if err != nil {
		t.Fatal(err)
	}
	defer loader.Close()
	feed, err := prefetcher.New(loader, prefetcher.Options{Device: cuda.CPU})
	if err != nil {
		t.Fatal(err)
	}
	defer feed.Close()
	row := 0
	for batch, err := range feed.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		want, err := features.Forward(batch.Images.NoGrad()).Float32s()
		if err != nil {
			t.Fatal(err)
		}
		for i, sample := range batch.Info.(imageloader.Info).Samples {
			if names[row] != sample.Name || !slices.Equal(got[row], want[512*i:512*(i+1)]) {
				t.Errorf("row %d: got %s with %v, want %s with %v", row, names[row], got[row][:3], sample.Name, want[512*i:][:3])
			}
			row++
		}
	}
}

// TestEmbedOnGPU compares vectors that a GPU computes with those of the CPU, also if the GPU
// decodes the images. LibTorch's convolutions on a GPU round their operands to TF32, by up to 2^-11
// of their size. The error of a vector may be 8 times that, relative to the vector's length.
func TestEmbedOnGPU(t *testing.T) {
	if cuda.DeviceCount() == 0 {
		t.Skip("needs a GPU")
	}
	path, _ := untrained(t, "a", "b", "c")
	args := []string{"-archive", photos, "-model", path, "-batch", "7"}
	names, _, want := embed(t, filepath.Join(t.TempDir(), "cpu.safetensors"), args...)
	for _, decode := range []string{"host", "device"} {
		found, _, got := embed(t, filepath.Join(t.TempDir(), "gpu.safetensors"),
			append(args, "-device", "cuda", "-decode", decode)...)
		if !slices.Equal(found, names) {
			t.Fatalf("-decode %s: got the names %v, want %v", decode, found, names)
		}
		for i := range want {
			var squares, errors float64
			for j := range want[i] {
				x, diff := float64(want[i][j]), float64(got[i][j]-want[i][j])
				squares, errors = squares+x*x, errors+diff*diff
			}
			if relative := math.Sqrt(errors / squares); !(relative <= 8*0x1p-11) {
				t.Fatalf("-decode %s: %s: got a vector with a relative error of %g, want at most %g", decode, names[i],
					relative, 8*0x1p-11)
			}
		}
	}
}

// TestEmbedContinuesToTheSameBytes kills or interrupts the command after its second step. The next
// run must complete the files with the same bytes as an uninterrupted run.
func TestEmbedContinuesToTheSameBytes(t *testing.T) {
	readPyTorchImages(t)
	folder := t.TempDir()
	archive := filepath.Join(folder, "photos.tgz")
	data, err := os.ReadFile(photos)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, archive, string(data))
	model, err := filepath.Abs(imagesPackage)
	if err != nil {
		t.Fatal(err)
	}
	line := func(out string) []string {
		return []string{"embed", "-archive", archive, "-model", model, "-output", "features", "-batch", "7", "-o", out,
			"-save-steps", "2", "-log-every", "1"}
	}
	whole := filepath.Join(folder, "whole.safetensors")
	if status, _, stderr := command(t, line(whole)...); status != 0 {
		t.Fatalf("status %d, %s, want 0", status, stderr)
	}
	for name, stop := range map[string]func(t *testing.T, args []string){
		"killed":      killAfterLines,
		"interrupted": interruptAfterLines,
	} {
		t.Run(name, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "vectors.safetensors")
			stop(t, line(out))
			for _, file := range []string{out, strings.TrimSuffix(out, ".safetensors") + ".csv"} {
				if fileExists(file) {
					t.Errorf("%s exists before all vectors are written", file)
				}
			}
			changed := slices.Replace(line(out), 8, 9, "8")
			status, _, stderr := command(t, changed...)
			if status != 1 || !strings.Contains(stderr, "-batch 7, which is 8 now") {
				t.Errorf("with another -batch: status %d, %s, want 1 and what differs", status, stderr)
			}
			status, stdout, stderr := command(t, line(out)...)
			if status != 0 || !strings.Contains(stdout, "continues after") {
				t.Fatalf("status %d, %s%s, want 0 and \"continues after\"", status, stdout, stderr)
			}
			for _, end := range []string{".safetensors", ".csv"} {
				got, err := os.ReadFile(strings.TrimSuffix(out, ".safetensors") + end)
				if err != nil {
					t.Fatal(err)
				}
				want, err := os.ReadFile(strings.TrimSuffix(whole, ".safetensors") + end)
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, want) {
					t.Errorf("%s: %d bytes differ from the %d of an uninterrupted run", end, len(got), len(want))
				}
			}
		})
	}
}

// startEmbed opens what a run of embed on photos needs.
func startEmbed(t *testing.T, out string) (*embedder, *prefetcher.Prefetcher) {
	t.Helper()
	threads := 0
	o := &embedOptions{out: out, names: strings.TrimSuffix(out, ".safetensors") + ".csv", archive: photos, saveSteps: 1,
		network: networkOptions{path: imagesPackage, output: "features", device: "cpu"},
		feeding: feeding{batch: 7, decode: "host", threads: &threads}}
	n, err := o.network.open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.close() })
	loader, feed, err := o.open(t.Context(), n.device, photos, math.MaxInt, imageloader.Options{Transform: n.transform},
		trace.Window{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { feed.Close(); loader.Close() })
	settings, about, err := o.settings(n)
	if err != nil {
		t.Fatal(err)
	}
	file, err := openVectors(o.out, o.names, classOf(loader), about, settings)
	if err != nil {
		t.Fatal(err)
	}
	return &embedder{embedOptions: o, net: n, loader: loader, file: file, stdout: io.Discard}, feed
}

// TestFailedWriteSkipsNoBatch ends an epoch with an error while the vectors of its third batch
// cannot be read. The next run must compute this batch again.
func TestFailedWriteSkipsNoBatch(t *testing.T) {
	readPyTorchImages(t)
	args := []string{"-archive", photos, "-model", imagesPackage, "-output", "features", "-batch", "7"}
	names, _, want := embed(t, filepath.Join(t.TempDir(), "whole.safetensors"), args...)
	for _, canceled := range []bool{false, true} {
		out := filepath.Join(t.TempDir(), "vectors.safetensors")
		e, feed := startEmbed(t, out)
		ctx, cancel := context.WithCancel(t.Context())
		broken := errors.New("broken archive")
		err := e.epoch(ctx, func(yield func(*prefetcher.Batch, error) bool) {
			for batch, err := range feed.Epoch(t.Context(), 0) {
				if err != nil || e.steps == 3 {
					break
				}
				if !yield(batch, nil) {
					t.Error("step failed, want an error only after the third batch")
					return
				}
			}
			if err := e.hosts[0].Close(); err != nil { // it has the third batch
				t.Error(err)
			}
			if canceled {
				cancel()
				broken = ctx.Err()
			}
			yield(nil, broken)
		}, nil)
		if !errors.Is(err, broken) || !errors.Is(err, torch.ErrClosed) || errors.As(err, &cli.InterruptedError{}) {
			t.Errorf("canceled %v: got %v, want both errors and no InterruptedError", canceled, err)
		}
		if e.file.saved != 14 {
			t.Errorf("canceled %v: %d rows are saved, want 14", canceled, e.file.saved)
		}
		cancel()
		if err := e.hosts[1].Close(); err != nil {
			t.Error(err)
		}
		e.file.close()
		got, _, vectors := embed(t, out, args...)
		if !slices.Equal(got, names) || !slices.Equal(slices.Concat(vectors...), slices.Concat(want...)) {
			t.Errorf("canceled %v: got %d vectors that differ from the %d of an undisturbed run", canceled, len(got), len(names))
		}
	}
}

// An interruption in a step saves the vectors of the queued batch, and its message counts them.
func TestInterruptionCountsSavedRows(t *testing.T) {
	readPyTorchImages(t)
	e, feed := startEmbed(t, filepath.Join(t.TempDir(), "vectors.safetensors"))
	defer e.file.close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	e.saveSteps = 1000
	run := e.net.run
	e.net.run = func(ctx context.Context, x *torch.Tensor) (*torch.Tensor, error) {
		if e.steps == 2 {
			cancel()
			return nil, fmt.Errorf("waiting for an instance: %w", ctx.Err())
		}
		return run(ctx, x)
	}
	err := e.epoch(ctx, feed.Epoch(t.Context(), 0), nil)
	if closed := e.closeHosts(); closed != nil {
		t.Error(closed)
	}
	var interrupted cli.InterruptedError
	if !errors.As(err, &interrupted) || !strings.Contains(interrupted.Message, "after 14 images") || e.file.saved != 14 {
		t.Errorf("got %v with %d rows saved, want an InterruptedError after 14 images", err, e.file.saved)
	}
	// Another user who could write the journal could make the next run skip images.
	info, err := os.Stat(e.file.journalPath())
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm()&0o022 != 0 {
		t.Errorf("the journal has the mode %v, want a file that only its owner can write", info.Mode())
	}
}

// A continued run that is interrupted before its first batch keeps the position of the run before.
// An error that follows an interruption is printed.
func TestInterruptionBeforeFirstBatchKeepsPosition(t *testing.T) {
	readPyTorchImages(t)
	args := []string{"-archive", photos, "-model", imagesPackage, "-output", "features", "-batch", "7"}
	names, _, want := embed(t, filepath.Join(t.TempDir(), "whole.safetensors"), args...)
	out := filepath.Join(t.TempDir(), "vectors.safetensors")
	for _, after := range []int{2, 0} {
		e, feed := startEmbed(t, out)
		ctx, cancel := context.WithCancel(t.Context())
		run := e.net.run
		e.net.run = func(ctx context.Context, x *torch.Tensor) (*torch.Tensor, error) {
			if e.steps < after {
				return run(ctx, x)
			}
			cancel()
			if after > 0 {
				return nil, syscall.ENOSPC
			}
			return nil, ctx.Err()
		}
		var stderr bytes.Buffer
		err := e.all(ctx, feed, &stderr)
		cancel()
		e.file.close()
		switch {
		case after > 0 && (!errors.Is(err, syscall.ENOSPC) || !strings.Contains(stderr.String(), "no space left")):
			t.Errorf("got %v and %q, want ENOSPC and its text", err, stderr.String())
		case after == 0 && (!errors.As(err, &cli.InterruptedError{}) || e.file.saved != 7):
			t.Errorf("got %v with %d rows saved, want an InterruptedError with 7", err, e.file.saved)
		}
	}
	got, _, vectors := embed(t, out, args...)
	if !slices.Equal(got, names) || !slices.Equal(slices.Concat(vectors...), slices.Concat(want...)) {
		t.Errorf("got %d vectors that differ from the %d of an undisturbed run", len(got), len(names))
	}
}

func killAfterLines(t *testing.T, args []string) {
	t.Helper()
	c, stderr := clitest.Process(t, args...)
	stdout, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	for n := 0; n < 5; n++ {
		if !lines.Scan() {
			t.Fatalf("the command ends after %d lines: %s", n, stderr)
		}
	}
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait()
	if status, ok := c.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		t.Fatalf("the command ended with %v, %s, before it could be killed", c.ProcessState, stderr)
	}
}

func interruptAfterLines(t *testing.T, args []string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stdout, stderr := &interrupter{text: "35 of 192", cancel: cancel}, &bytes.Buffer{}
	if status := program().Run(ctx, args, stdout, stderr); status != 130 || !strings.Contains(stderr.String(), "continues") {
		t.Fatalf("status %d, %s%s, want 130 and how to continue", status, stdout, stderr)
	}
}

// A process that is killed after the last row, or while it renames the files, leaves the rest to
// the next run.
func TestEmbedCompletesFiles(t *testing.T) {
	readPyTorchImages(t)
	for _, c := range []struct {
		complete bool
		left     []string // the files that do not have their names yet
	}{
		{false, []string{".safetensors", ".csv"}},
		{true, []string{".safetensors", ".csv"}},
		{true, []string{".csv"}},
		{true, nil},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			base := filepath.Join(t.TempDir(), "vectors")
			args := []string{"-archive", photos, "-model", imagesPackage, "-output", "features"}
			_, _, want := embed(t, base+".safetensors", args...)
			o := embedOptions{out: base + ".safetensors", names: base + ".csv", network: networkOptions{path: imagesPackage,
				output: "features", device: "cpu"}, feeding: feeding{batch: 16}}
			n, err := o.network.open()
			if err != nil {
				t.Fatal(err)
			}
			defer n.close()
			settings, _, err := o.settings(n)
			if err != nil {
				t.Fatal(err)
			}
			info, err := os.Stat(o.names)
			if err != nil {
				t.Fatal(err)
			}
			f := vectorFile{out: o.out, journal: vectorJournal{Embed: settings, Rows: 192, Width: 5, Names: info.Size(),
				Complete: c.complete, State: lastState(t, imageloader.Options{Transform: n.transform, BatchSize: 16,
					Columns: imageloader.Columns{RowNames: true}})}}
			if err := f.writeJournal(); err != nil {
				t.Fatal(err)
			}
			for _, end := range c.left {
				if err := os.Rename(base+end, base+end+part); err != nil {
					t.Fatal(err)
				}
			}
			if _, _, got := embed(t, o.out, args...); !slices.Equal(slices.Concat(got...), slices.Concat(want...)) {
				t.Error("the vectors changed")
			}
		})
	}
}

// lastState returns a loader's state after the last batch of photos.
func lastState(t *testing.T, o imageloader.Options) (state *imageloader.State) {
	t.Helper()
	loader, err := imageloader.Open(photos, o)
	if err != nil {
		t.Fatal(err)
	}
	defer loader.Close()
	for batch, err := range loader.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		after := batch.State
		state = &after
	}
	return state
}

// An image that cannot be decoded ends the command. With -bad-samples skip, it has neither a vector
// nor a name in the files.
func TestEmbedBadImages(t *testing.T) {
	readPyTorchImages(t)
	folder := unpacked(t, photos, 5)
	writeFile(t, filepath.Join(folder, "broken.jpg"), "\xff\xd8\xff\xe0 no picture")
	parent := t.TempDir()
	if err := os.Rename(folder, filepath.Join(parent, "class")); err != nil {
		t.Fatal(err)
	}
	args := []string{"-archive", parent, "-model", imagesPackage, "-output", "features"}
	status, _, stderr := command(t, append([]string{"embed", "-o", filepath.Join(t.TempDir(), "v.npy")}, args...)...)
	if status != 1 || !strings.Contains(stderr, "broken.jpg") || !strings.Contains(stderr, "-bad-samples skip") {
		t.Errorf("status %d, %s, want 1, the bad image and -bad-samples skip", status, stderr)
	}
	names, _, vectors := embed(t, filepath.Join(t.TempDir(), "v.safetensors"), append(args, "-bad-samples", "skip")...)
	if len(vectors) != 5 || slices.ContainsFunc(names, func(n string) bool { return strings.Contains(n, "broken") }) {
		t.Errorf("got %d vectors of %v, want 5 without the bad image", len(vectors), names)
	}
}

func TestEmbedCommandLine(t *testing.T) {
	readPyTorchImages(t)
	text := filepath.Join(t.TempDir(), "text.safetensors")
	writeFile(t, text, "a letter")
	checkpoint, _ := untrained(t, "a", "b")
	for _, c := range []struct {
		args   string
		status int
		says   string
	}{
		{"", 2, "-archive FILE"},
		{"-archive " + photos + " -batch 0", 2, "-batch"},
		{"-archive " + photos + " -bad-samples substitute", 2, "fail or skip"},
		{"-archive " + photos + " -o v.pt -model " + checkpoint, 2, ".safetensors or a .npy"},
		{"-archive " + photos + " -model " + imagesPackage, 1, "choose one with -output: features, logits"},
		{"-archive " + photos + " -model " + imagesPackage + " -output x", 1, "no output x; it has features, logits"},
		{"-archive " + photos + " -model " + imagesPackage + " -output logits -batch 17", 2, "at most 16 images"},
		{"-archive " + photos + " -model " + imagesPackage + " -output logits -mean 1,2", 2, "-mean"},
		{"-archive " + photos + " -model " + imagesPackage + " -output logits -std 1,0,1", 2, "-std"},
		{"-archive " + photos + " -model " + imagesPackage + " -output logits -resize 20", 1, "-resize 20"},
		{"-archive " + photos + " -model " + imagesPackage + " -output logits -o " + text, 1, text},
		{"-archive " + photos + " -model ../../aoti/testdata/tiny.pt2", 1, "2 inputs"},
		{"-archive " + photos + " -model missing.pt2", 1, "missing.pt2"},
		{"-archive " + photos + " -model missing.pt", 1, "-model FILE"},
		{"-archive " + photos + " -model " + checkpoint + " -mean 1,1,1", 2, "for packages"},
		{"-archive " + photos + " -model " + checkpoint + " -upright", 2, "-upright"},
	} {
		status, stdout, stderr := command(t, append([]string{"embed", "-device", "cpu"}, strings.Fields(c.args)...)...)
		if status != c.status || !strings.Contains(stderr, c.says) || stdout != "" {
			t.Errorf("embed %s: status %d, %q, %q, want %d, and %q on stderr", c.args, status, stdout, stderr, c.status, c.says)
		}
	}
	if got, err := os.ReadFile(text); err != nil || string(got) != "a letter" {
		t.Errorf("got %q, %v, want the file of another kind unchanged", got, err)
	}
}

//go:build linux

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/examples/internal/lesson"
)

const (
	trainArchive = "../data/photos-train.tgz"
	testArchive  = "../data/photos-test.tgz"
)

// command runs one command line.
func command(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = run(context.Background(), args, &out, &errs)
	return status, out.String(), errs.String()
}

// small trains a small network briefly and returns the results and the checkpoint's path.
func small(t *testing.T, args ...string) (trainResult, string) {
	t.Helper()
	folder := t.TempDir()
	checkpoint, figures := filepath.Join(folder, "net.safetensors"), filepath.Join(folder, "figures.json")
	args = append([]string{"train", "-archive", trainArchive, "-size", "32", "-width", "8", "-epochs", "4",
		"-batch", "32", "-device", "cpu", "-checkpoint", checkpoint,
		"-json", figures}, args...)
	if status, _, stderr := command(t, args...); status != 0 {
		t.Fatalf("01-train %q: status %d, %s, want 0", args, status, stderr)
	}
	text, err := os.ReadFile(figures)
	if err != nil {
		t.Fatal(err)
	}
	var result trainResult
	if err := json.Unmarshal(text, &result); err != nil {
		t.Fatal(err)
	}
	return result, checkpoint
}

// Outside a clone the default archive does not exist. The error says what to do.
func TestTrainWithoutTheDefaultArchive(t *testing.T) {
	t.Chdir(t.TempDir())
	status, _, stderr := command(t, "train", "-device", "cpu")
	if status != 1 || !strings.Contains(stderr, lesson.TrainArchive) || !strings.Contains(stderr, "-archive FILE") {
		t.Errorf("status %d, %s, want 1 and the archive's name and \"-archive FILE\"", status, stderr)
	}
}

func TestTrainAndPredict(t *testing.T) {
	result, checkpoint := small(t, "-test", testArchive)
	if len(result.Epochs) != 4 || result.Samples != 576 || len(result.Classes) != 12 || result.Device != "cpu" {
		t.Fatalf("%+v", result)
	}
	first, last := result.Epochs[0], result.Epochs[3]
	if !(last.Loss < first.Loss) {
		t.Errorf("loss went from %g to %g", first.Loss, last.Loss)
	}
	if last.TestAccuracy == nil || *last.TestAccuracy < 4.0/12 {
		t.Errorf("test accuracy %v is not far over 1/12", last.TestAccuracy)
	}
	if second := result.Epochs[1]; last.LiveTensors != second.LiveTensors {
		t.Errorf("%d tensors live after epoch 2, %d after epoch 4: the loop leaks", second.LiveTensors,
			last.LiveTensors)
	}
	if last.WaitSeconds < 0 || last.WaitSeconds > last.Seconds || last.ImagesPerSecond <= 0 {
		t.Errorf("%+v", last)
	}

	// The checkpoint holds the tested network.
	status, stdout, stderr := command(t, "predict", "-checkpoint", checkpoint, "-device", "cpu", "-show",
		"2", testArchive)
	want := fmt.Sprintf("%d of 192 right", int(math.Round(*last.TestAccuracy*192)))
	if status != 0 || !strings.Contains(stdout, want) || !strings.Contains(stdout, "and 190 more") {
		t.Errorf("status %d; %q is not in\n%s%s", status, want, stdout, stderr)
	}
	// Single files get the same predictions as the archive's members, at any batch size.
	paths := extract(t, 5)
	status, stdout, stderr = command(t,
		append([]string{"predict", "-checkpoint", checkpoint, "-device", "cpu", "-batch", "2"}, paths...)...)
	_, members, _ := command(t, "predict", "-checkpoint", checkpoint, "-device", "cpu", "-show", "5", testArchive)
	files := strings.Split(stdout, "\n")
	if status != 0 || len(files) != len(paths)+1 {
		t.Fatalf("status %d, %s%s, want 0 and %d files", status, stdout, stderr, len(paths)+1)
	}
	for i, line := range strings.Split(members, "\n")[:len(paths)] {
		file, member := strings.Fields(files[i]), strings.Fields(strings.TrimSuffix(line, "wrong"))
		if file[0] != paths[i] || !slices.Equal(file[1:], member[1:]) {
			t.Errorf("%q for a file, %q for the archive's member", files[i], line)
		}
	}
	text, err := os.ReadFile("../data/PROVENANCE.md")
	if err != nil {
		t.Fatal(err)
	}
	notImage := filepath.Join(t.TempDir(), "notes.jpg")
	if err := os.WriteFile(notImage, text, 0o644); err != nil {
		t.Fatal(err)
	}
	// Bad files are named, alone and among good ones. The good files are still predicted.
	for path, says := range map[string]string{
		notImage: "not an image",
		"../data/make_photos.py-that-is-not-there.jpg": "no such file",
	} {
		t.Run(says, func(t *testing.T) {
			for _, list := range [][]string{{path}, {paths[0], path, paths[1], paths[2]}} {
				args := append([]string{"predict", "-checkpoint", checkpoint, "-device", "cpu", "-batch", "2"}, list...)
				status, stdout, stderr := command(t, args...)
				if status != 1 || !strings.Contains(stderr, path+": ") || !strings.Contains(stderr, says) ||
					!strings.Contains(stderr, "1 of the photographs could not be") {
					t.Errorf("predict %s: status %d, %q does not say %q", path, status, stderr, says)
				}
				if rows := strings.Count(stdout, "\n"); rows != len(list)-1 || strings.Contains(stdout, path) {
					t.Errorf("predict %q:\n%s", list, stdout)
				}
			}
		})
	}
	// A folder is predicted like an archive: directory = class.
	folder := t.TempDir()
	for name, from := range map[string]string{"cat/1.jpg": paths[0], "cat/2.jpg": notImage, "rocket/3.jpg": paths[1]} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(folder, name)), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(from, filepath.Join(folder, name)); err != nil {
			t.Fatal(err)
		}
	}
	status, stdout, stderr = command(t, "predict", "-checkpoint", checkpoint, "-device", "cpu", folder)
	if status != 1 || strings.Count(stdout, "\n") != 3 || !strings.Contains(stdout, " of 2 right") ||
		!strings.Contains(stderr, "cat/2.jpg") ||
		!strings.Contains(stderr, "1 of the photographs could not be") {
		t.Errorf("status %d, %s%s", status, stdout, stderr)
	}
}

// -h explains a command, and is not an error.
func TestHelp(t *testing.T) {
	for says, args := range map[string][]string{
		"Trains a small network on an archive": {"-h"}, "usage: 01-train train [options]\nTrains": {"train", "-h"},
		"usage: 01-train predict [options] FILE...\nPredicts": {"predict", "-h"},
		"usage: 01-train serve [options]\nPredicts":           {"serve", "-h"},
	} {
		if status, _, stderr := command(t, args...); status != 0 || !strings.Contains(stderr, says) {
			t.Errorf("%q: status %d, %s, want 0, it to contain %q", args, status, stderr, says)
		}
	}
}

// extract writes the first n photographs of the test archive to files, and returns their paths.
func extract(t *testing.T, n int) (paths []string) {
	t.Helper()
	f, err := os.Open(testArchive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(z); len(paths) < n; {
		h, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), filepath.Base(h.Name))
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	return paths
}

// The results do not depend on the number of decoding goroutines: the batches are identical.
func TestTrainIsReproducible(t *testing.T) {
	one, _ := small(t, "-workers", "1", "-epochs", "2", "-seed", "7")
	three, _ := small(t, "-workers", "3", "-epochs", "2", "-seed", "7")
	other, _ := small(t, "-workers", "3", "-epochs", "2", "-seed", "8")
	if a, b := one.Epochs[1].Loss, three.Epochs[1].Loss; a != b {
		t.Errorf("loss with one worker %v, with three %v", a, b)
	}
	if a, b := one.Epochs[1].Loss, other.Epochs[1].Loss; a == b {
		t.Errorf("loss %v with both seeds", a)
	}
}

func TestTrainWithoutTestArchive(t *testing.T) {
	checkpoint := filepath.Join(t.TempDir(), "net.safetensors")
	status, stdout, stderr := command(t, "train", "-archive", trainArchive, "-size", "16", "-width", "2",
		"-epochs", "1", "-device", "cpu", "-checkpoint", checkpoint)
	if status != 0 || !strings.Contains(stdout, "-test FILE") || strings.Contains(stdout, "held-back images (") {
		t.Errorf("status %d, %s%s", status, stdout, stderr)
	}
}

func TestWrongCommandLinesAreExplained(t *testing.T) {
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{nil, 2, "usage"},
		{[]string{"trian"}, 2, "there is no command \"trian\"\nusage"},
		{[]string{"train", "-epochs", "0"}, 2, "-epochs"},
		{[]string{"train", "photos.tgz"}, 2, "photos.tgz"},
		{[]string{"train", "-device", "tpu"}, 2, "tpu"},
		{[]string{"train", "-device", "cuda:x"}, 2, "cuda:x"},
		{[]string{"train", "-device", "cuda:99"}, 1, "99"},
		{[]string{"train", "-device", "cpu", "-archive", "missing.tgz"}, 1, "missing.tgz"},
		{[]string{"predict"}, 2, "predict needs"},
		{[]string{"predict", "-checkpoint", "missing.safetensors", testArchive}, 1, "missing.safetensors"},
		{[]string{"predict", "-checkpoint", testArchive, testArchive}, 1, "safetensors"},
	} {
		t.Run(strings.Join(append([]string{"01-train"}, c.args...), " "), func(t *testing.T) {
			status, _, stderr := command(t, c.args...)
			if status != c.status || !strings.Contains(stderr, c.says) {
				t.Errorf("status %d, want %d; stderr %q does not say %q", status, c.status, stderr, c.says)
			}
		})
	}
}

// Ctrl-C ends the training without a checkpoint.
func TestInterruptWritesNoCheckpoint(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	checkpoint := filepath.Join(t.TempDir(), "net.safetensors")
	var stderr bytes.Buffer
	stdout := writerFunc(func(p []byte) (int, error) {
		if bytes.Contains(p, []byte("epoch")) { // the table's header: the loop is about to start
			cancel()
		}
		return len(p), nil
	})
	status := run(ctx, []string{"train", "-archive", trainArchive, "-device", "cpu", "-checkpoint",
		checkpoint}, stdout, &stderr)
	if status != 130 || !strings.Contains(stderr.String(), "interrupted") {
		t.Errorf("status %d, %q, want 130, it to contain \"interrupted\"", status, stderr.String())
	}
	if _, err := os.Stat(checkpoint); err == nil {
		t.Error("an interrupted training wrote a checkpoint, want none")
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestTrainOnGPU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	result, checkpoint := small(t, "-test", testArchive, "-device", "cuda", "-epochs", "5")
	last := result.Epochs[4]
	if last.TestAccuracy == nil || *last.TestAccuracy < 4.0/12 {
		t.Errorf("test accuracy %v is not far over 1/12", last.TestAccuracy)
	}
	for _, e := range result.Epochs[2:] {
		if second := result.Epochs[1]; e.AllocatedBytes != second.AllocatedBytes ||
			e.ReservedBytes != second.ReservedBytes {
			t.Errorf("device memory after epoch 2: %d bytes used, %d held; after epoch %d: %d and %d",
				second.AllocatedBytes, second.ReservedBytes, e.Epoch,
				e.AllocatedBytes, e.ReservedBytes)
		}
	}
	// The CPU gets the same accuracy with the network trained on the GPU.
	status, stdout, _ := command(t, "predict", "-checkpoint", checkpoint, "-device", "cpu", "-show", "0", testArchive)
	var right int
	if _, err := fmt.Sscanf(stdout[strings.Index(stdout, testArchive):], testArchive+": %d of 192",
		&right); err != nil || status != 0 {
		t.Fatalf("status %d, %v: %s, want 0, nil", status, err, stdout)
	}
	if onGPU := int(math.Round(*last.TestAccuracy * 192)); right < onGPU-4 || right > onGPU+4 {
		t.Errorf("%d right on the GPU, want within 4 of the CPU's %d", onGPU, right)
	}
}

// No command blocks on an input that is a pipe without a writer.
func TestPipesAreRejected(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"train -archive":      {"train", "-checkpoint", "", "-device", "cpu", "-archive", pipe},
		"train -test":         {"train", "-checkpoint", "", "-device", "cpu", "-archive", testArchive, "-test", pipe},
		"train -checkpoint":   {"train", "-checkpoint", pipe},
		"predict -checkpoint": {"predict", "-device", "cpu", "-checkpoint", pipe, testArchive},
	} {
		t.Run(name, func(t *testing.T) {
			if status, _, stderr := command(t, args...); status != 1 || !strings.Contains(stderr, pipe) {
				t.Errorf("%q: status %d, %s, want 1, it to contain %q", args, status, stderr, pipe)
			}
		})
	}
	t.Run("predict FILE", func(t *testing.T) {
		var errs bytes.Buffer
		p := predictor{settings: settings{Size: 32}, device: cuda.CPU, batch: 1, out: io.Discard, errs: &errs}
		if bad, err := p.files(t.Context(), []string{pipe}); err != nil || bad != 1 ||
			!strings.Contains(errs.String(), pipe) {
			t.Errorf("%d bad, %v, %s, want 1, it to contain %q, nil", bad, err, errs.String(), pipe)
		}
	})
}

// Naming an archive as the checkpoint or as -json is an error before the training. The archive is
// not overwritten.
func TestOutputsReplaceNoOtherFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "train.tgz")
	const text = "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03 an archive"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, option := range []string{"-checkpoint", "-json"} {
		t.Run(option, func(t *testing.T) {
			status, stdout, stderr := command(t, "train", "-checkpoint", "", option, path)
			if status != 1 || stdout != "" || !strings.Contains(stderr, path+" is a file of another kind") {
				t.Errorf("status %d, %q, %q, want 1, \"\", it to contain %q",
					status, stdout, stderr, path+" is a file of another kind")
			}
			if now, err := os.ReadFile(path); err != nil || string(now) != text {
				t.Errorf("the file holds %q, %v, want %q, nil", now, err, text)
			}
		})
	}
}

package main

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
)

const testImages = "../../cshim/test/data" // includes a file that is not an image

// TestBenchServe checks that every way of decoding on this machine is measured, with the images of
// a folder.
func TestBenchServe(t *testing.T) {
	arguments := []string{"serve", "-images", testImages, "-seconds", "0.05", "-request", "3", "-clients",
		"2", "-size", "32"}
	status, stdout, stderr := command(t, append(arguments, "-json")...)
	if status != 0 {
		t.Fatal(stderr)
	}
	var report serveReport
	decoder := json.NewDecoder(strings.NewReader(stdout))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&report); err != nil {
		t.Fatal(err)
	}
	ways := 1
	if cuda.DeviceCount() > 0 {
		ways = 2
	}
	if len(report.Rows) != ways || report.Images < 20 || report.BytesPerImage < 100 ||
		report.Request != 3 || report.Clients != 2 {
		t.Errorf("%+v", report)
	}
	for i, row := range report.Rows {
		if row.Requests < 2 || row.ImagesPerSecond <= 0 || row.MedianMS <= 0 || row.P90MS < row.MedianMS ||
			row.P99MS < row.P90MS {
			t.Errorf("%+v", row)
		}
		if onDevice := i == 1; onDevice != (row.Decode == "device") || onDevice != (row.DecodedOnDevice > 0) {
			t.Errorf("%+v", row)
		}
	}
	if status, stdout, stderr := command(t, append(arguments, "-device", "cpu")...); status != 0 ||
		!strings.Contains(stdout, "decoded by") {
		t.Errorf("%d: %s%s, want 0, it to contain \"decoded by\"", status, stdout, stderr)
	}
}

// TestBenchServeOfClasses checks that images in subfolders are read and other files counted.
func TestBenchServeOfClasses(t *testing.T) {
	folder := t.TempDir()
	pixels, err := os.ReadFile(testImages + "/rgb.png")
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"a/1.png": pixels, "b/c/2.png": pixels,
		"b/notes.txt": []byte("no image"), "empty": nil} {
		path := filepath.Join(folder, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o777), os.WriteFile(path, data, 0o666)); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(folder, link); err != nil {
		t.Fatal(err)
	}
	arguments := []string{"serve", "-images", link, "-seconds", "0.01", "-request", "2", "-size", "32",
		"-device", "cpu"}
	status, stdout, stderr := command(t, append(arguments, "-json")...)
	var report serveReport
	if err := json.Unmarshal([]byte(stdout), &report); err != nil || status != 0 || report.Images != 2 ||
		report.LeftOut != 2 {
		t.Errorf("%d: %v: %+v %s, want 0, Images 2, LeftOut 2, nil", status, err, report, stderr)
	}
	if _, stdout, _ := command(t, arguments...); !strings.Contains(stdout, "2 images; 2 files left out") {
		t.Error(stdout)
	}
}

func TestBenchServeArguments(t *testing.T) {
	for words, c := range map[string]struct {
		status int
		args   []string
	}{
		"needs -images":                  {2, nil},
		"-request":                       {2, []string{"-images", testImages, "-request", "0"}},
		"-clients":                       {2, []string{"-images", testImages, "-clients", "65"}},
		"-device \"gpu\"":                {2, []string{"-images", testImages, "-device", "gpu"}},
		"is a file: -images is a folder": {1, []string{"-images", photos, "-device", "cpu"}},
		"has no images":                  {1, []string{"-images", t.TempDir(), "-device", "cpu"}},
		"no such file or d":              {1, []string{"-images", t.TempDir() + "/none", "-device", "cpu"}},
	} {
		if status, _, stderr := command(t, append([]string{"serve"}, c.args...)...); status != c.status ||
			!strings.Contains(stderr, words) {
			t.Errorf("%s: %d: %s", words, status, stderr)
		}
	}
}

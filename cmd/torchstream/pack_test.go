//go:build cgo

package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"image"
	"image/color"
	"image/jpeg"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// samplesOf returns the classes and counts in inspect's report.
func samplesOf(t *testing.T, args ...string) string {
	t.Helper()
	status, stdout, stderr := command(t, append([]string{"inspect", "-json"}, args...)...)
	if status != 0 {
		t.Fatalf("inspect %q: status %d, %s", args, status, stderr)
	}
	var found inspection
	if err := json.Unmarshal([]byte(stdout), &found); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, c := range found.Classes {
		fmt.Fprintf(&b, "%d %s %d %d;", c.Label, c.Name, c.Samples, c.Bytes)
	}
	return b.String()
}

// pack keeps the input's classes, counts and file contents. The test compares inspect's reports.
func TestPackKeepsClassesAndBytes(t *testing.T) {
	const photos = "../../examples/data/photos-train.tgz"
	want := samplesOf(t, photos)
	for _, format := range []string{"tar", "tgz", "webdataset"} {
		dir := filepath.Join(t.TempDir(), "out")
		status, stdout, stderr := command(t, "pack", "-archive", photos, "-o", dir, "-format", format, "-shard-size", "400K")
		if status != 0 || !strings.Contains(stdout, "samples in") {
			t.Fatalf("%s: status %d, %s%s", format, status, stdout, stderr)
		}
		shards := filepath.Join(dir, "train-*."+strings.Replace(format, "webdataset", "tar", 1))
		args := []string{shards}
		if format == "webdataset" {
			args = []string{"-webdataset", shards}
		}
		if got := samplesOf(t, args...); got != want {
			t.Errorf("%s: got %s, want %s", format, got, want)
		}
	}
}

// jpegOf returns a small JPEG, which is different for each number.
func jpegOf(t *testing.T, number int) []byte {
	t.Helper()
	m := image.NewGray(image.Rect(0, 0, 16, 16))
	for i := range m.Pix {
		m.SetGray(i%16, i/16, color.Gray{Y: uint8(number * 5)})
	}
	var b bytes.Buffer
	if err := jpeg.Encode(&b, m, nil); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// The splits of a dataset become the parts of the output, and -val divides the folder train.
func TestPackDividesFolders(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := range 40 {
		folder := []string{"train", "train", "train", "test"}[i/2%4]
		data := jpegOf(t, i)
		h := &tar.Header{Name: fmt.Sprintf("set/%s/%c/%d.jpg", folder, 'a'+i%2, i), Size: int64(len(data)), Mode: 0o644}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "a.tar")
	if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "train 30;test 10;"},
		{[]string{"-val", "0.2", "-val-seed", "3"}, "train 30-;val +;test 10;"},
	} {
		args := append([]string{"pack", "-json", "-archive", path, "-o", filepath.Join(t.TempDir(), "out")}, c.args...)
		status, stdout, stderr := command(t, args...)
		if status != 0 {
			t.Fatalf("%q: status %d, %s", c.args, status, stderr)
		}
		var found packResult
		if err := json.Unmarshal([]byte(stdout), &found); err != nil {
			t.Fatal(err)
		}
		got, val := "", 0
		for _, p := range found.Parts {
			switch {
			case p.Name == "val":
				val = p.Samples
				got += "val +;"
			case p.Name == "train" && len(c.args) > 0:
				got += fmt.Sprintf("train %d-;", p.Samples+found.Parts[1].Samples)
			default:
				got += fmt.Sprintf("%s %d;", p.Name, p.Samples)
			}
		}
		if got != c.want || val == 0 && len(c.args) > 0 {
			t.Errorf("%q: got %s (val %d), want %s", c.args, got, val, c.want)
		}
	}
}

// An error names a wrong option before any file is read.
func TestPackOptionsThatContradict(t *testing.T) {
	const photos = "../../examples/data/photos-train.tgz"
	for want, args := range map[string][]string{
		"pack needs -archive FILE and -o DIR":          {"-archive", photos},
		`-format "zip": want tar, tgz or webdataset`:   {"-archive", photos, "-o", "x", "-format", "zip"},
		"-upright needs -side":                         {"-archive", photos, "-o", "x", "-upright"},
		"excludes -shard-size":                         {"-archive", photos, "-o", "x", "-shards", "2", "-shard-size", "1G"},
		`-shard-size "much": want a size such as 256M`: {"-archive", photos, "-o", "x", "-shard-size", "much"},
		`-bad-samples "substitute": want fail or skip`: {"-archive", photos, "-o", "x", "-bad-samples", "substitute"},
		"-quality 101: must be from 1 to 100":          {"-archive", photos, "-o", "x", "-quality", "101"},
		"-list and -webdataset exclude each other":     {"-archive", photos, "-o", "x", "-list", "a", "-webdataset"},
	} {
		status, _, stderr := command(t, append([]string{"pack"}, args...)...)
		if status != 2 || !strings.Contains(stderr, want) {
			t.Errorf("%q: got status %d, %s; want 2 and %q", args, status, stderr, want)
		}
	}
	for text, want := range map[string]int64{"1": 1, "256M": 256 << 20, "1.5g": 3 << 29, "2GiB": 2 << 30, "10kB": 10 << 10} {
		if got, err := parseBytes(text); got != want || err != nil {
			t.Errorf("parseBytes(%q): got %d, %v; want %d", text, got, err, want)
		}
	}
	if got, err := parseBytes("1X"); err == nil {
		t.Errorf("parseBytes(\"1X\"): got %d, want an error", got)
	}
}

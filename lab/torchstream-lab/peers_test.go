package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/clitest"
	"github.com/torchstream/torchstream/internal/loaderbench"
)

func TestPeersAreChecked(t *testing.T) {
	gpu := cuda.Device(0)
	options := func(archive, contract, policy string) *loaderbench.Options {
		return &loaderbench.Options{Archive: archive, Contract: contract, Images: cli.Images{Policy: policy}}
	}
	for _, c := range []struct {
		names, archive, contract, policy string
		to                               cuda.Device
		says                             string
	}{
		{"nvjpeg,nvjpg", photos, "train", "none", gpu, `no peer "nvjpg"`},
		{"all", photos, "train", "none", cuda.CPU, "-device cuda"},
		{"all", photos, "train", "simclr", gpu, "-policy none"},
		{"dali", photos, "eval", "none", gpu, "random crop"},
		{"all", filepath.Join(t.TempDir(), "none.tar"), "train", "none", gpu, "none.tar"},
		{"all", clitest.WriteTar(t, map[string]string{"a/text.jpg": "not a JPEG"}), "train", "none", gpu, "no JPEGs"},
		{"all", "peers_test.go", "train", "none", gpu, ".tar or .tar.gz"},
	} {
		p, err := peersOf(c.names, options(c.archive, c.contract, c.policy), c.to)
		if err == nil || p != nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s, %s, %s: got %v, want it to say %q", c.names, c.archive, c.contract, err, c.says)
		}
	}
	if p, err := peersOf("", options("", "", ""), cuda.CPU); p != nil || err != nil {
		t.Errorf("no peers: got %v, %v, want nil, nil", p, err)
	}
	for contract, dtype := range map[string]string{"train": "uint8", "train-float": "float32",
		"train-bfloat16": "bfloat16"} {
		if p, err := peersOf("all", options(photos, contract, "none"), gpu); err != nil ||
			p.dtype != dtype || len(p.names) != 3 {
			t.Errorf("%s: got %+v, %v, want all peers with %s", contract, p, err, dtype)
		}
	}
	for _, args := range [][]string{{"-peers", "all"}, {"-peers", "all", "-device", "cpu"},
		{"-policy", "simclr", "-peers", "all"}} {
		if status, _, stderr := command(t,
			append([]string{"loader", "-archive", photos}, args...)...); status != 2 ||
			!strings.Contains(stderr, "-peers all") {
			t.Errorf("%q: got status %d, %s, want 2, it to contain \"-peers all\"", args, status, stderr)
		}
	}
}

// The peers get the first JPEGs of the archive and no other data.
func TestPeersReadJPEGs(t *testing.T) {
	jpeg := func(text string) string { return "\xff\xd8\xff" + text }
	path := clitest.WriteTar(t, map[string]string{"a/1.jpg": jpeg("one"), "a/2.png": "\x89PNG",
		"b/3.jpg": jpeg("three"), "b/4.jpg": jpeg("4")})
	data, sizes, err := readJPEGs(t.Context(), path, 2)
	if err != nil || string(data) != jpeg("one")+jpeg("three") || len(sizes) != 2 || sizes[0] != 6 || sizes[1] != 8 {
		t.Errorf("%q, %v, %v", data, sizes, err)
	}
	if _, sizes, err := readJPEGs(t.Context(), photos, 1<<20); err != nil || len(sizes) < 16 {
		t.Errorf("%d photographs of a .tgz, %v, want at least 16, nil", len(sizes), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := readJPEGs(ctx, path, 2); err != context.Canceled {
		t.Errorf("%v, want context.Canceled", err)
	}
}

// The Python rows contain its output, or the reason why it printed none.
func TestPeersInPython(t *testing.T) {
	python := func(lines string) string {
		path := filepath.Join(t.TempDir(), "python")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+lines+"\n"), 0o777); err != nil {
			t.Fatal(err)
		}
		return path
	}
	p := peerBench{archive: photos, batch: 16, size: 32, dtype: "uint8", seconds: 0.1}
	for _, c := range []struct{ name, python, says string }{
		{"none", "", "not requested"},
		{"missing", filepath.Join(t.TempDir(), "none"), "none"},
		{"without the library", python(
			"echo 'Traceback' >&2; echo \"ModuleNotFoundError: No module named 'nvidia'\" >&2; exit 1"),
			"No module named 'nvidia'"},
		{"no JSON", python("echo rows"), "cannot read"},
		{"no time", python(`echo '{"rows": [{"way": "decodes", "images": 5, "seconds": 0}]}'`),
			"without images or time"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p.python = c.python
			rows := p.inPython(t.Context(), "dali")
			if len(rows) != 1 || rows[0].Peer != "dali" || !strings.Contains(rows[0].WhyNot, c.says) ||
				rows[0].ImagesPerSecond != 0 {
				t.Errorf("%+v does not say %q", rows, c.says)
			}
		})
	}
	// The program gets the job as its last argument. The path in it must be absolute, since the
	// program runs in another folder.
	p.python = python(`case $3 in *'"archive":"/'*'"peer":"torchvision"'*) ;; *) echo "$3" >&2; exit 1 ;; esac
echo '{"rows": [{"way": "decodes", "threads": 4, "batch": 16, "images": 500, "seconds": 0.5, "cpu_seconds": 0.25},
 {"way": "more", "images": 1, "seconds": 1}]}'`)
	rows := p.inPython(t.Context(), "torchvision")
	want := gpuPeer{Peer: "torchvision", Way: "decodes", Threads: 4, Batch: 16, Images: 500, Seconds: 0.5,
		ImagesPerSecond: 1000, HostCores: 0.5}
	if len(rows) != 2 || rows[0] != want {
		t.Errorf("%+v", rows)
	}
}

// This runs on a GPU, or on devices that do nothing with a fake nvJPEG. A Python without the
// libraries is not an error.
func TestBenchLoaderPeers(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	status, stdout, stderr := command(t, "loader", "-archive", photos, "-batch", "16", "-size", "32",
		"-seconds", "0.1", "-device", "cuda", "-peers", "all",
		"-python", filepath.Join(t.TempDir(), "no-python"), "-json")
	var r struct{ Peers []gpuPeer }
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 {
		t.Fatalf("status %d, %v in %q, stderr %q, want 0, nil", status, err, stdout, stderr)
	}
	rows := map[string]int{}
	for _, p := range r.Peers {
		rows[p.Peer]++
		if (p.WhyNot == "") != (p.ImagesPerSecond > 0) || p.Way == "" {
			t.Errorf("neither a rate nor a reason, or both: %+v", p)
		}
		if p.WhyNot != "" {
			t.Logf("%s, %s: %s", p.Peer, p.Way, p.WhyNot)
		} else if (p.LoaderImagesPerSecond > 0) != strings.Contains(p.Way, "loader") || p.Batch != 16 ||
			p.Images < 16 || p.HostCores <= 0 || (p.Engines > 0) != strings.Contains(p.Way, "engines") {
			t.Errorf("%+v", p)
		}
	}
	if rows["nvjpeg"] < 3 || rows["torchvision"] != 1 || rows["dali"] != 1 {
		t.Errorf("rows %v, want at least 3, 1, 1", rows)
	}
}

func TestPeersArePrinted(t *testing.T) {
	var out strings.Builder
	err := printPeers(&out, []gpuPeer{
		{Peer: "nvjpeg", Way: "engines", Threads: 4, ImagesPerSecond: 20200.4, HostCores: 1.25, LeftOut: 3},
		{Peer: "nvjpeg", Way: "engines, while the loader runs", ImagesPerSecond: 19000, LoaderImagesPerSecond: 160000},
		{Peer: "dali", Way: "not measured", WhyNot: "there is no DALI"},
	})
	if err != nil || !strings.Contains(out.String(), "20200") ||
		!strings.Contains(out.String(), "3 images left out") ||
		!strings.Contains(out.String(), "runs, at 160000 images/s") ||
		!strings.Contains(out.String(), "not measured: there is no DALI") {
		t.Errorf("got %v, want nil and every figure and reason in\n%s", err, &out)
	}
	out.Reset()
	if err := printPeers(&out, nil); err != nil || out.Len() > 0 {
		t.Errorf("no peers: %v, %q, want none, nil", err, &out)
	}
}

package main

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
)

func TestPeersAreChecked(t *testing.T) {
	gpu := device{Device: cuda.Device(0)}
	for _, c := range []struct {
		names, archive, contract string
		where                    target
		says                     string
	}{
		{"nvjpeg,nvjpg", photos, "train", gpu, `no peer "nvjpg"`},
		{"all", photos, "train", nil, "-device cuda"},
		{"all", photos, "train", device{Device: cuda.CPU}, "-device cuda"},
		{"dali", photos, "eval", gpu, "random crop"},
		{"all", filepath.Join(t.TempDir(), "none.tar"), "train", gpu, "none.tar"},
		{"all", writeTar(t, map[string]string{"a/text.jpg": "not a JPEG"}), "train", gpu, "no JPEGs"},
		{"all", "bench_peers_test.go", "train", gpu, ".tar or .tar.gz"},
	} {
		p, err := peersOf(c.names, c.archive, c.contract, "none", c.where)
		if err == nil || p != nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s, %s, %s: %v does not say %q", c.names, c.archive, c.contract, err, c.says)
		}
	}
	if p, err := peersOf("", "", "", "none", nil); p != nil || err != nil {
		t.Errorf("no peers: %v, %v", p, err)
	}
	for contract, dtype := range map[string]string{"train": "uint8", "train-float": "float32", "train-bfloat16": "bfloat16"} {
		if p, err := peersOf("all", photos, contract, "none", gpu); err != nil || p.dtype != dtype || len(p.names) != 3 {
			t.Errorf("%s: %+v, %v", contract, p, err)
		}
	}
	checkUsage(t, [][]string{{"-peers", "all"}, {"-peers", "all", "-device", "cpu"}})
}

// The peers get the first JPEGs of the archive, and nothing else.
func TestPeersReadJPEGs(t *testing.T) {
	jpeg := func(text string) string { return "\xff\xd8\xff" + text }
	path := writeTar(t, map[string]string{"a/1.jpg": jpeg("one"), "a/2.png": "\x89PNG", "b/3.jpg": jpeg("three"), "b/4.jpg": jpeg("4")})
	data, sizes, err := readJPEGs(t.Context(), path, 2)
	if err != nil || string(data) != jpeg("one")+jpeg("three") || len(sizes) != 2 || sizes[0] != 6 || sizes[1] != 8 {
		t.Errorf("%q, %v, %v", data, sizes, err)
	}
	if _, sizes, err := readJPEGs(t.Context(), photos, 1<<20); err != nil || len(sizes) < 16 {
		t.Errorf("%d photographs of a .tgz, %v", len(sizes), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := readJPEGs(ctx, path, 2); err != context.Canceled {
		t.Errorf("%v, want context.Canceled", err)
	}
}

// The rows of Python are what it prints, or the reason why it prints none.
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
		{"without the library", python("echo 'Traceback' >&2; echo \"ModuleNotFoundError: No module named 'nvidia'\" >&2; exit 1"), "No module named 'nvidia'"},
		{"no JSON", python("echo rows"), "cannot read"},
		{"no time", python(`echo '{"rows": [{"way": "decodes", "images": 5, "seconds": 0}]}'`), "without images or time"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p.python = c.python
			rows := p.inPython(t.Context(), "dali")
			if len(rows) != 1 || rows[0].Peer != "dali" || !strings.Contains(rows[0].WhyNot, c.says) || rows[0].ImagesPerSecond != 0 {
				t.Errorf("%+v does not say %q", rows, c.says)
			}
		})
	}
	// The program gets the job as its last argument, with a path that holds in its folder.
	p.python = python(`case $3 in *'"archive":"/'*'"peer":"torchvision"'*) ;; *) echo "$3" >&2; exit 1 ;; esac
echo '{"rows": [{"way": "decodes", "threads": 4, "batch": 16, "images": 500, "seconds": 0.5, "cpu_seconds": 0.25}, {"way": "more", "images": 1, "seconds": 1}]}'`)
	rows := p.inPython(t.Context(), "torchvision")
	want := gpuPeer{Peer: "torchvision", Way: "decodes", Threads: 4, Batch: 16, Images: 500, Seconds: 0.5, ImagesPerSecond: 1000, HostCores: 0.5}
	if len(rows) != 2 || rows[0] != want {
		t.Errorf("%+v", rows)
	}
}

// On a GPU, and on devices that do nothing with a stand-in for nvJPEG. A Python without the
// libraries is no error.
func TestBenchLoaderPeers(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	status, stdout, stderr := command(t, "bench", "loader", "-archive", photos, "-batch", "16", "-size", "32", "-seconds", "0.1", "-device", "cuda", "-peers", "all",
		"-python", filepath.Join(t.TempDir(), "no-python"), "-json")
	var r struct{ Peers []gpuPeer }
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 {
		t.Fatalf("status %d, %v in %q, stderr %q", status, err, stdout, stderr)
	}
	rows := map[string]int{}
	for _, p := range r.Peers {
		rows[p.Peer]++
		if (p.WhyNot == "") != (p.ImagesPerSecond > 0) || p.Way == "" {
			t.Errorf("neither a rate nor a reason, or both: %+v", p)
		}
		if p.WhyNot != "" {
			t.Logf("%s, %s: %s", p.Peer, p.Way, p.WhyNot)
		} else if (p.LoaderImagesPerSecond > 0) != strings.Contains(p.Way, "loader") || p.Batch != 16 || p.Images < 16 || p.HostCores <= 0 || (p.Engines > 0) != strings.Contains(p.Way, "engines") {
			t.Errorf("%+v", p)
		}
	}
	if rows["nvjpeg"] < 3 || rows["torchvision"] != 1 || rows["dali"] != 1 {
		t.Errorf("rows %v", rows)
	}
}

// A loader runs in the background until the body has ended.
func TestLoaderRunsBeside(t *testing.T) {
	m := measurement{archive: photos, warm: 1, o: imageloader.Options{BatchSize: 16, Workers: 2, Transform: imageloader.Train(32)}}
	body := measurement{archive: photos, epochs: 2, o: m.o}
	var failed error
	rate, err := m.beside(t.Context(), func() { failed = body.run(t.Context(), io.Discard) })
	if err != nil || failed != nil || body.r.Images == 0 || rate <= 0 {
		t.Errorf("%v images a second, %v; %d images of the body, %v", rate, err, body.r.Images, failed)
	}
	m.archive = writeTar(t, map[string]string{"a/broken.jpg": "\xff\xd8\xff\xe0 not a picture"})
	if _, err := m.beside(t.Context(), func() { t.Error("nothing to run beside") }); err == nil {
		t.Error("no error of an archive without good samples")
	}
}

func TestPeersArePrinted(t *testing.T) {
	var out strings.Builder
	err := printPeers(&out, []gpuPeer{
		{Peer: "nvjpeg", Way: "engines", Threads: 4, ImagesPerSecond: 20200.4, HostCores: 1.25, LeftOut: 3},
		{Peer: "nvjpeg", Way: "engines, while the loader runs", ImagesPerSecond: 19000, LoaderImagesPerSecond: 160000},
		{Peer: "dali", Way: "not measured", WhyNot: "there is no DALI"},
	})
	if err != nil || !strings.Contains(out.String(), "20200") || !strings.Contains(out.String(), "3 images left out") || !strings.Contains(out.String(), "runs, at 160000 images/s") || !strings.Contains(out.String(), "not measured: there is no DALI") {
		t.Errorf("%v\n%s", err, &out)
	}
	out.Reset()
	if err := printPeers(&out, nil); err != nil || out.Len() > 0 {
		t.Errorf("no peers: %v, %q", err, &out)
	}
}

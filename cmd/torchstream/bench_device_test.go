package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
)

// TestBenchLoaderOnDevice: the same with a prefetcher, which does the finish.
func TestBenchLoaderOnDevice(t *testing.T) {
	checkContracts(t, []contractCase{
		{"-contract train-float -epochs 2", "RandomResizedCrop(16) antialiased + flip, normalised float32 NCHW", "cpu"},
		{"-contract train -device cpu -epochs 2", "RandomResizedCrop(16) antialiased + flip, uint8", "cpu"},
		{"-contract train-bfloat16 -epochs 2 -warm 1 -repeat 2 -decode host", "RandomResizedCrop(16) antialiased + flip, normalised bfloat16 channels_last", "cpu"},
		{"-contract train -device cpu -decode auto -decode-sms 16 -trust-index -epochs 2", "RandomResizedCrop(16) antialiased + flip, uint8", "cpu"},
		{"-contract train-float -policy trivialaugment -epochs 2", "RandomResizedCrop(16) antialiased + flip, normalised float32 NCHW, trivialaugment", "cpu"},
	})
	checkUsage(t, [][]string{{"-device", "tpu"}, {"-device", "cuda:x"}, {"-device", "cpu", "-decode", "gpu"}, {"-decode", "auto"}, {"-warm", "-1"}, {"-repeat", "0"},
		{"-device", "cpu", "-decode-sms", "16"}, {"-device", "cpu", "-decode", "auto", "-decode-sms", "-1"}, {"-policy", "cutout"}, {"-policy", "simclr", "-peers", "all"}})
	if status, _, stderr := command(t, "bench", "loader", "-archive", photos, "-device", "cuda:99"); status != 1 || !strings.Contains(stderr, "no such GPU") {
		t.Errorf("status %d, %s", status, stderr)
	}
}

// On a GPU with engines, and on devices that do nothing with a stand-in for nvJPEG.
func TestBenchLoaderDecodesByEngines(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	members := map[string]string{}
	for i := range 40 {
		name := []string{"444.jpg", "422.jpg"}[i%2] // large enough for entry points
		data, err := os.ReadFile(filepath.Join("..", "..", "cshim", "test", "data", name))
		if err != nil {
			t.Fatal(err)
		}
		members[fmt.Sprintf("%c/%02d-%s", 'a'+i%2, i, name)] = string(data)
	}
	archive := writeTar(t, members)
	loader := []string{"bench", "loader", "-archive", archive, "-batch", "16", "-size", "32", "-epochs", "2", "-json"}
	if status, _, stderr := command(t, loader...); status != 0 { // makes the index, with entry points
		t.Fatalf("status %d, %s", status, stderr)
	}
	status, stdout, stderr := command(t, append(loader, "-device", "cuda", "-decode", "engines", "-trust-index")...)
	if strings.Contains(stderr, "nvJPEG cannot be loaded") || strings.Contains(stderr, "does not offer") {
		t.Skip(stderr)
	}
	var r loaderResult
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 {
		t.Fatalf("status %d, %v in %q, stderr %q", status, err, stdout, stderr)
	}
	if r.DecodedOnDevice < 16 || r.DecodedByEngines != r.DecodedOnDevice || r.EngineFailures != 0 || r.DecoderBytes == 0 {
		t.Errorf("%d of %d images decoded by engines, %d on the device; %d failures", r.DecodedByEngines, r.Images, r.DecodedOnDevice, r.EngineFailures)
	}
}

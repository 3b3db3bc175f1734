//go:build linux && cgo

package main

import (
	"strings"
	"testing"
)

// TestBenchLoaderOnDevice covers the values of -contract that include a prefetcher, which copies
// batches to a device and finishes them there.
func TestBenchLoaderOnDevice(t *testing.T) {
	checkContracts(t, []contractCase{
		{"-contract train-float -epochs 2", "RandomResizedCrop(16) antialiased + flip, normalised float32 NCHW", "cpu"},
		{"-contract train -device cpu -epochs 2", "RandomResizedCrop(16) antialiased + flip, uint8", "cpu"},
		{"-contract train-bfloat16 -epochs 2 -warm 1 -repeat 2 -decode host",
			"RandomResizedCrop(16) antialiased + flip, normalised bfloat16 channels_last", "cpu"},
		{"-contract train -device cpu -decode auto -decode-sms 16 -trust-index -epochs 2",
			"RandomResizedCrop(16) antialiased + flip, uint8", "cpu"},
		{"-contract train-float -policy trivialaugment -epochs 2",
			"RandomResizedCrop(16) antialiased + flip, normalised float32 NCHW, trivialaugment", "cpu"},
	})
	checkUsage(t, [][]string{{"-device", "tpu"}, {"-device", "cuda:x"},
		{"-device", "cpu", "-decode", "gpu"}, {"-decode", "auto"}, {"-warm", "-1"}, {"-repeat", "0"},
		{"-device", "cpu", "-decode-sms", "16"}, {"-device", "cpu", "-decode", "auto", "-decode-sms", "-1"},
		{"-policy", "cutout"}})
	if status, _, stderr := command(t, "bench", "loader", "-archive", photos, "-device",
		"cuda:99"); status != 1 || !strings.Contains(stderr, "no such GPU") {
		t.Errorf("status %d, %s, want status 1, stderr with %q", status, stderr, "no such GPU")
	}
}

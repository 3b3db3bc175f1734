//go:build linux && cgo

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/clitest"
)

// doctorLinks runs doctor -dist on this machine.
func doctorLinks(t *testing.T, ranks string, args ...string) *linkReport {
	t.Helper()
	c, stderr := clitest.Process(t, append([]string{"doctor", "-dist", "-json", "-nproc", ranks}, args...)...)
	var out bytes.Buffer
	c.Stdout = &out
	err := c.Run()
	var r linkReport
	if json.Unmarshal(out.Bytes(), &r) != nil {
		t.Fatalf("%v\n%s%s", err, out.String(), stderr.String())
	}
	if (err != nil) != (r.Slow > 0) {
		t.Errorf("%v with %d slow: %+v", err, r.Slow, r.Findings)
	}
	return &r
}

func TestDoctorTestsLinks(t *testing.T) {
	r := doctorLinks(t, "3", "-cpu")
	if len(r.Ranks) != 3 || len(r.Links) != 3 || len(r.Reduce) != 3 || len(r.Findings) == 0 {
		t.Errorf("%+v, want len(r.Ranks) = 3, len(r.Links) = 3, len(r.Reduce) = 3, len(r.Findings) at "+
			"least 1", r)
	}
	for _, l := range r.Links {
		if l.Kind != "loopback" || !(l.GBps > 0) || !(l.LatencyUS > 0) || !(l.Expected > 0) {
			t.Errorf("%+v, want l.Kind = %q, (l.GBps > 0) = true, (l.LatencyUS > 0) = true, (l.Expected "+
				"> 0) = true", l, "loopback")
		}
	}
}

func TestGPUDoctorTestsLinks(t *testing.T) {
	cudatest.RequireGPUs(t, 2)
	r := doctorLinks(t, "2")
	t.Logf("%+v", r)
	if l := r.Links[0]; l.Kind == "loopback" || !(l.GBps > 0) {
		t.Errorf("%+v, want l.Kind not %q, (l.GBps > 0) = true", l, "loopback")
	}
	if r.Ranks[0].Place == "" || r.Ranks[0].Place == r.Ranks[1].Place {
		t.Errorf("%+v", r.Ranks)
	}
}

func TestDoctorRefusesOneRank(t *testing.T) {
	if status, _, stderr := command(t, "doctor", "-dist", "-nproc", "1"); status != 1 ||
		!strings.Contains(stderr, "-nproc") {
		t.Errorf("status %d, %s, want status 1, stderr with %q", status, stderr, "-nproc")
	}
}

// The report names each slow rank and each slow link once.
func TestSlowLinksAreNamed(t *testing.T) {
	report := func(rates map[[2]int]float64, expected float64, ms ...float64) *linkReport {
		r := &linkReport{}
		for rank, t := range ms {
			r.Ranks = append(r.Ranks, rankRow{Rank: rank, Host: "a", Device: "cuda:0", MS: t})
		}
		for _, p := range pairsOf(len(ms)) {
			r.Links = append(r.Links, linkRow{A: p[0], B: p[1], Kind: "NVLink x18", GBps: rates[p], Expected: expected})
		}
		r.judge()
		return r
	}
	even := map[[2]int]float64{{0, 1}: 340, {0, 2}: 350, {1, 2}: 345}
	for name, c := range map[string]struct {
		report *linkReport
		says   []string
	}{
		"all is well":     {report(even, 450, 1, 1.1, 1), []string{"ok links"}},
		"a rank computes": {report(even, 450, 1, 1, 2), []string{"slow rank 2 computes 2.0 times longer"}},
		"one of two computes": {report(map[[2]int]float64{{0, 1}: 350}, 450, 3, 1),
			[]string{"slow rank 0 computes 3.0 times"}},
		"a link of a busy rank": {report(map[[2]int]float64{{0, 1}: 77}, 450, 5, 1),
			[]string{"slow rank 0 computes 5.0 times", "note link of the ranks 0 and 1 77.0 GB/s"}},
		"a link": {report(map[[2]int]float64{{0, 1}: 40, {0, 2}: 350, {1, 2}: 345}, 450, 1,
			1, 1), []string{"slow link of the ranks 0 and 1 40.0 GB/s over NVLink x18, which carries 450"}},
		"all links of a rank": {report(map[[2]int]float64{{0, 1}: 40, {0, 2}: 350, {1, 2}: 45}, 450, 1, 1,
			1), []string{"slow rank 1 has 45.0 GB/s on its best link, and the others have 350.0"}},
		"two ranks": {report(map[[2]int]float64{{0, 1}: 12}, 450, 1, 1),
			[]string{"slow link of the ranks 0 and 1"}},
		"hardware unknown": {report(map[[2]int]float64{{0, 1}: 12}, 0, 1, 1), []string{"ok links"}},
	} {
		var got []string
		for _, f := range c.report.Findings {
			got = append(got, f.State+" "+f.What+" "+f.Found)
		}
		if len(got) != len(c.says) {
			t.Errorf("%s: %q, want %q", name, got, c.says)
			continue
		}
		for i, want := range c.says {
			if !strings.HasPrefix(got[i], want) {
				t.Errorf("%s: %q, want %q", name, got[i], want)
			}
		}
	}
}

// Ranks on the CPU share its cores, so one may be slow by chance. That is not an error.
func TestSlowRanksOnTheCPUAreNotes(t *testing.T) {
	r := &linkReport{Ranks: []rankRow{{Rank: 0, Device: "cpu", MS: 1}, {Rank: 1, Device: "cpu", MS: 5},
		{Rank: 2, Device: "cpu", MS: 1}},
		Links: []linkRow{{A: 0, B: 1, Kind: "loopback", GBps: 0.4, Expected: 1},
			{A: 0, B: 2, Kind: "loopback", GBps: 1, Expected: 1},
			{A: 1, B: 2, Kind: "loopback", GBps: 0.4, Expected: 1}}}
	r.judge()
	if len(r.Findings) != 2 || r.Findings[0].State != "note" || r.Findings[0].What != "rank 1" ||
		r.Findings[1].State != "note" || r.Slow != 0 {
		t.Errorf("%+v, %d slow, want len(r.Findings) = 2, r.Findings[0].State = %q, r.Findings[0].What "+
			"= %q, r.Findings[1].State = %q, r.Slow = 0", r.Findings, r.Slow, "note", "rank 1", "note")
	}
}

func TestPairsOfManyRanksAreNeighbours(t *testing.T) {
	if n := len(pairsOf(8)); n != 28 {
		t.Errorf("%d pairs of 8 ranks, want 28", n)
	}
	pairs := pairsOf(9)
	if len(pairs) != 9 || !reflect.DeepEqual(pairs[:3], [][2]int{{0, 1}, {0, 8}, {1, 2}}) {
		t.Errorf("%v, want len(pairs) = 9, pairs[:3] = %+v", pairs, [][2]int{{0, 1}, {0, 8}, {1, 2}})
	}
}

func TestTopologyOfGPUs(t *testing.T) {
	places := "0, 00000000:1B:00.0\n1, 00000000:43:00.0\n2, 0000000A:52:00.0\n"
	matrix := "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n" +
		"GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A\nGPU1\tNV18\t X " +
		"\tPHB\tNODE\t0-47\t0\t\tN/A\nGPU2\tSYS\tPHB\t X \tSYS\t48-95\t1\t\tN/A\n" +
		"NIC0\tPIX\tNODE\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n"
	got := parseTopology(places, matrix)
	one, two, three := busID("0000:1B:00.0"), busID("0000:43:00.0"), busID("000A:52:00.0")
	for pair, want := range map[[2]string]string{{one, two}: "NV18", {two, one}: "NV18",
		{one, three}: "SYS", {two, three}: "PHB"} {
		if got[pair] != want {
			t.Errorf("%v: %q, want %q", pair, got[pair], want)
		}
	}
	for device, want := range map[string]float64{"cuda:0 NVIDIA H200 (9.0)": 450,
		"cuda:0 NVIDIA A100 (8.0)": 450, "cuda:0 NVIDIA B200 (10.0)": 900} {
		if kind, rate := gpuLink("NV18", rankRow{Device: device}, rankRow{}); kind != "NVLink x18" || rate != want {
			t.Errorf("%s: %s, %v, want kind = %q, rate = %v", device, kind, rate, "NVLink x18", want)
		}
	}
	if kind, rate := gpuLink("", rankRow{Place: "none"}, rankRow{Place: "none"}); kind != "PCI Express" || rate != 0 {
		t.Errorf("%s, %v, want kind = %q, rate = 0", kind, rate, "PCI Express")
	}
}

// A hanging driver does not block the doctor.
func TestTopologyOfAHangingDriver(t *testing.T) {
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "nvidia-smi"),
		[]byte("#!/bin/sh\nexec cat /proc/self/fd/0 <>\"$0.pipe\"\n"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(folder, "nvidia-smi.pipe"), 0o666); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", folder+string(os.PathListSeparator)+os.Getenv("PATH"))
	ctx, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer stop()
	if got := readTopology(ctx); len(got) != 0 || ctx.Err() == nil {
		t.Errorf("%v", got)
	}
}

func TestPCIExpressCarries(t *testing.T) {
	root := t.TempDir()
	place := filepath.Join(root, "0000:1b:00.0")
	if err := os.Mkdir(place, 0o777); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"max_link_speed": "32.0 GT/s PCIe\n", "max_link_width": "16\n"} {
		if err := os.WriteFile(filepath.Join(place, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if got := pciGBps(root, "0000:1B:00.0"); got < 62.9 || got > 63.1 {
		t.Errorf("%v GB/s, want got from 62.9 to 63.1", got)
	}
	if got := pciGBps(root, "0000:1C:00.0"); got != 0 {
		t.Errorf("%v GB/s of a device that is not there, want 0", got)
	}
}

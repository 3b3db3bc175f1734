//go:build linux && cgo

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"image"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/torchstream/torchstream/internal/clitest"
)

const photos = "../../examples/data/photos-test.tgz"

// command runs one command line.
func command(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = program().Run(context.Background(), args, &out, &errs)
	return status, out.String(), errs.String()
}

func TestHelpIsATable(t *testing.T) {
	status, stdout, _ := command(t, "help")
	rows := 0
	for line := range strings.Lines(stdout) {
		if !strings.HasPrefix(line, "  torchstream ") {
			continue
		}
		rows++
		const column = 42
		if len(line) <= column || line[column-2:column] != "  " || line[column] == ' ' {
			t.Errorf("what the command does is not in column %d of %q, want len(line) above %v, "+
				"line[column-2 : column] = %q, line[column] not ' '", column, line, column, "  ")
		}
	}
	if status != 0 || rows != len(commands())-1+len(benchmarks()) {
		t.Errorf("status %d, %d rows\n%s", status, rows, stdout)
	}
}

func TestCommandLine(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing.tgz")
	for _, c := range []struct {
		args   []string
		status int
		says   string // on stdout if status is 0, and on stderr otherwise
	}{
		{nil, 2, "a command is needed"},
		{[]string{"dokter"}, 2, `no command "dokter": did you mean doctor?`},
		{[]string{"trian"}, 2, `no command "trian": did you mean train?`},
		{[]string{"bnech"}, 2, "did you mean bench?"},
		{[]string{"photographs"}, 2, `no command "photographs": want setup, doctor`},
		{[]string{"bench"}, 2, "a benchmark is needed: loader"},
		{[]string{"bench", "gpu"}, 2, `no benchmark "gpu": want loader`},
		{[]string{"bench", "lodaer"}, 2, "did you mean loader?"},
		{[]string{"bench", "loader"}, 2, "-archive"},
		{[]string{"bench", "loader", "-archive", photos, "-batch", "0"}, 2, "-batch"},
		{[]string{"bench", "loader", "-archive", photos, "-quick"}, 2, "-quick"},
		{[]string{"bench", "loader", "-archive", missing}, 1, missing},
		{[]string{"bench", "loader", "-h"}, 0, "usage: torchstream bench loader"},
		{[]string{"train", "-h"}, 0, "usage: torchstream train -archive FILE"},
		{[]string{"train", "-epoch", "3"}, 2,
			"torchstream: no option -epoch: did you mean -epochs?\nSee `torchstream train -h`.\n"},
		{[]string{"bench", "loader", "-zzzz"}, 2, "torchstream: no option -zzzz\nSee `torchstream bench loader -h`.\n"},
		{[]string{"dokter"}, 2, "Run `torchstream help`"},
		{[]string{"inspect"}, 2, "torchstream: inspect needs an argument: FILE\n"},
		{[]string{"predict"}, 2, "torchstream: predict needs an argument: IMAGE|FOLDER...\n"},
		{[]string{"doctor", "x", "y\x1b"}, 2,
			"torchstream: doctor takes options only, and no argument: x \"y\\x1b\"\n"},
		{[]string{"bench", "loader", "x"}, 2,
			"torchstream: bench loader takes its archive as an option: did you mean -archive x?\n"},
		{[]string{"inspect", missing}, 1, missing},
		{[]string{"inspect", missing, "-show", "3"}, 2, "options come before FILE: -show 3 " + missing},
		{[]string{"inspect", missing, missing}, 2,
			"inspect takes one argument, FILE, and has 2: " + missing + " " + missing + "\n"},
		{[]string{"preview", missing}, 2, "did you mean -archive " + missing + "?"},
	} {
		status, stdout, stderr := command(t, c.args...)
		if c.status == 0 {
			stdout, stderr = stderr, stdout
		}
		if status != c.status || !strings.Contains(stderr, c.says) {
			t.Errorf("torchstream %q: got status %d, want %d; got %q, want %q in it", c.args, status,
				c.status, stderr, c.says)
		}
		if c.status == 2 && strings.Contains(stderr, "usage:") {
			t.Errorf("torchstream %q: the list of options hides the mistake:\n%s", c.args, stderr)
		}
		if stdout != "" {
			t.Errorf("torchstream %q: got %q on the wrong one of stdout and stderr, want none there", c.args,
				stdout)
		}
	}
}

func TestHelp(t *testing.T) {
	status, stdout, stderr := command(t, "help")
	if status != 0 || stderr != "" {
		t.Fatalf("status %d, stderr %q, want status 0, stderr \"\"", status, stderr)
	}
	for _, name := range []string{"doctor", "inspect", "preview", "bench loader"} {
		if !strings.Contains(stdout, name) {
			t.Errorf("help does not mention %q:\n%s", name, stdout)
		}
	}
}

// Help fits a terminal of 100 columns and names the values of options.
func TestHelpFitsATerminal(t *testing.T) {
	texts := map[string][]string{}
	for _, e := range commands() {
		texts[e.Name] = []string{e.Name, "-h"}
	}
	delete(texts, "bench") // prints a list of benchmarks; TestBenchHelp checks it
	for _, e := range benchmarks() {
		texts["bench "+e.Name] = []string{"bench", e.Name, "-h"}
	}
	for name, args := range texts {
		status, stdout, stderr := command(t, args...)
		if status != 0 || stderr != "" || !strings.HasPrefix(stdout, "usage: torchstream "+name) {
			t.Errorf("%s -h: status %d, %s%s, want status 0, stderr \"\", stdout beginning with %q",
				name, status, stdout, stderr, "usage: torchstream "+name)
		}
		for line := range strings.Lines(stdout) {
			if n := utf8.RuneCountInString(line) - 1; n > 100 {
				t.Errorf("%s -h: %d columns: %s, want at most 100", name, n, line)
			}
			if strings.HasPrefix(line, "  -") && strings.HasSuffix(line, " value\n") {
				t.Errorf("%s -h: no name for the value of %s", name, line)
			}
		}
	}
	_, list, _ := command(t, "help")
	_, benchmarks, _ := command(t, "bench", "help")
	for line := range strings.Lines(list + benchmarks) {
		if n := utf8.RuneCountInString(line) - 1; n > 100 {
			t.Errorf("help: %d columns: %s, want at most 100", n, line)
		}
	}
}

// The list of benchmarks is requested in the same ways as the list of commands.
func TestBenchHelp(t *testing.T) {
	for _, name := range []string{"-h", "--help", "help"} {
		status, stdout, stderr := command(t, "bench", name)
		if status != 0 || stderr != "" || !strings.HasPrefix(stdout, "usage: torchstream bench NAME") ||
			strings.Contains(stdout, "torchstream inspect") {
			t.Errorf("bench %s: status %d, %q, %s, want status 0, stderr \"\", stdout beginning with "+
				"%q, stdout without %q",
				name, status, stderr, stdout, "usage: torchstream bench NAME", "torchstream inspect")
		}
		for _, e := range benchmarks() {
			if !strings.Contains(stdout, "  torchstream bench "+e.Name+" ") {
				t.Errorf("bench %s does not list %s:\n%s\nwant it with %q",
					name, e.Name, stdout, "  torchstream bench "+e.Name+" ")
			}
		}
	}
}

// Sizes are printed in a unit small enough that they do not round to 0.0.
func TestByteSize(t *testing.T) {
	for bytes, want := range map[int64]string{0: "0 bytes", 1: "1 byte", 99: "99 bytes", 100: "0.1 KB",
		4096: "4.1 KB", 999_949: "999.9 KB", 1e6: "1.0 MB", 3_456_000_000: "3456.0 MB"} {
		if got := byteSize(bytes); got != want {
			t.Errorf("%d: %s, want %s", bytes, got, want)
		}
	}
}

func TestBenchLoader(t *testing.T) {
	status, stdout, stderr := command(t, "bench", "loader", "-archive", photos, "-batch", "16", "-workers",
		"2", "-size", "32", "-seconds", "0.05", "-json")
	if status != 0 {
		t.Fatalf("status %d: %s, want 0", status, stderr)
	}
	var fields map[string]any
	if err := json.Unmarshal([]byte(stdout), &fields); err != nil {
		t.Fatalf("%v in %q, want no error", err, stdout)
	}
	for field, atLeast := range map[string]float64{
		"images_per_second": 1, "cpu_seconds_per_1000_images": 0.001, "peak_rss_bytes": 1 << 20,
		"workers": 2, "batch": 16, "bad_samples": 0, "images": 16, "epochs": 1,
	} {
		if n, ok := fields[field].(float64); !ok || n < atLeast {
			t.Errorf("%s is %v, want a number of at least %g", field, fields[field], atLeast)
		}
	}
	for field, want := range map[string]float64{"workers": 2, "batch": 16, "bad_samples": 0, "size": 32} {
		if fields[field] != want {
			t.Errorf("%s is %v, want %g", field, fields[field], want)
		}
	}
}

// TestBenchLoaderProfile checks that -cpuprofile writes a profile and replaces no other kind of
// file.
func TestBenchLoaderProfile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cpu.out")
	args := []string{"bench", "loader", "-archive", photos, "-size", "16", "-seconds", "0.05", "-cpuprofile", path}
	if status, _, stderr := command(t, args...); status != 0 {
		t.Fatalf("status %d: %s, want 0", status, stderr)
	}
	profile, err := os.ReadFile(path)
	if err != nil || !bytes.HasPrefix(profile, []byte("\x1f\x8b")) { // gzip's magic number
		t.Errorf("%d bytes, %v", len(profile), err)
	}
	if status, _, stderr := command(t, args...); status != 1 || !strings.Contains(stderr, path) {
		t.Errorf("status %d: %s, want status 1, stderr with %q", status, stderr, path)
	}
}

// Every contract reports the cost of each stage. With -epochs it also reports the memory after each
// epoch.
func TestBenchLoaderContracts(t *testing.T) {
	checkContracts(t, []contractCase{
		{"-contract train -seconds 0.5", "RandomResizedCrop(16) antialiased + flip, uint8", "host memory"},
		{"-contract eval -epochs 3", "Resize and CenterCrop(16) antialiased, uint8", "host memory"},
	})
	status, stdout, _ := command(t, "bench", "loader", "-archive", photos, "-size", "16", "-epochs", "1")
	if status != 0 || !strings.Contains(stdout, "decoding") || !strings.Contains(stdout, "after epoch 0") {
		t.Errorf("status %d: %s, want status 0, stdout with %q and %q",
			status, stdout, "decoding", "after epoch 0")
	}
	checkUsage(t, [][]string{{"-contract", "test"}, {"-epochs", "-1"}})
}

type contractCase struct{ args, contract, device string }

func checkContracts(t *testing.T, cases []contractCase) {
	t.Helper()
	for _, c := range cases {
		args := append([]string{"bench", "loader", "-archive", photos, "-batch", "16", "-size", "16",
			"-seconds", "0.05"}, strings.Fields(c.args)...)
		status, stdout, stderr := command(t, append(args, "-json")...)
		var r struct {
			Contract, Device, Bottleneck, Advice string
			Images, Epochs                       int
			Waited                               float64        `json:"workers_waited_for_data"`
			Finish                               float64        `json:"finish_seconds"`
			RSS                                  []int64        `json:"rss_bytes_after_epoch"`
			Stats                                map[string]any `json:"stats"`
		}
		if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 {
			t.Fatalf("%s: status %d, %v in %q, stderr %q, want no error, status 0",
				c.args, status, err, stdout, stderr)
		}
		decode, _ := r.Stats["decode_seconds"].(float64)
		if r.Contract != c.contract || r.Device != c.device || r.Images < 16 || r.Advice == "" ||
			decode <= 0 || (r.Finish > 0) != (c.device == "cpu") || r.Waited < 0 || r.Waited > 1 {
			t.Errorf("%s: %s", c.args, stdout)
		}
		if strings.Contains(r.Advice, "Options.") {
			t.Errorf("%s: got the advice %q, want flags instead of Go options", c.args, r.Advice)
		}
		if strings.Contains(c.args, "-epochs") && (len(r.RSS) != r.Epochs || r.RSS[0] < 1<<20) {
			t.Errorf("%s: memory after %d epochs: %v", c.args, r.Epochs, r.RSS)
		}
	}
}

// Errors name the flags of commands instead of Go options.
func TestErrorsOfCommandsNameFlags(t *testing.T) {
	labelled := clitest.WriteTar(t, map[string]string{"0.jpg": "", "0.cls": "1"})
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"inspect", "-list", "missing.csv", photos}, "-list: "},
		{[]string{"bench", "loader", "-archive", labelled}, "set -webdataset"},
		{[]string{"index", labelled}, "set -webdataset"},
		{[]string{"pack", "-archive", photos, "-o", filepath.Join(t.TempDir(), "shards"), "-shards", "999999"},
			"-shards is 999999"},
		{[]string{"index", "-label-column", "breed", photos}, "-label-column is for Parquet files"},
		{[]string{"index", breeds(t)}, "name the column of labels in -label-column: it has"},
	} {
		status, stdout, stderr := command(t, c.args...)
		if status != 1 || !strings.Contains(stderr, c.want) || strings.Contains(stdout+stderr, "Options.") {
			t.Errorf("%q: got status %d, %s%s, want %q and no Go option", c.args, status, stdout, stderr, c.want)
		}
	}
}

// checkUsage requires that every command line of `bench loader` is refused with an error that names
// the option.
func checkUsage(t *testing.T, lines [][]string) {
	t.Helper()
	for _, args := range lines {
		if status, _, stderr := command(t,
			append([]string{"bench", "loader", "-archive", photos}, args...)...); status != 2 ||
			!strings.Contains(stderr, args[0][1:]) {
			t.Errorf("%q: status %d, %s, want status 2, stderr with %q", args, status, stderr, args[0][1:])
		}
	}
}

// If the only sample of an archive is damaged, the benchmark must end with an error instead of
// looping forever.
func TestBenchLoaderWithoutGoodSamples(t *testing.T) {
	path := clitest.WriteTar(t, map[string]string{"a/broken.jpg": "\xff\xd8\xff\xe0 not a picture"})
	status, _, stderr := command(t, "bench", "loader", "-archive", path, "-seconds", "0.05", "-json")
	if status != 1 || stderr == "" {
		t.Errorf("status %d, stderr %q, want status 1, stderr not \"\"", status, stderr)
	}
}

func TestBenchLoaderInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var out, errs bytes.Buffer
	if status := program().Run(ctx, []string{"bench", "loader", "-archive", photos}, &out,
		&errs); status != 130 || out.Len() > 0 {
		t.Errorf("status %d, stdout %q, stderr %q, want status 130, out.Len() = 0",
			status, &out, &errs)
	}
}

func TestInspect(t *testing.T) {
	status, stdout, stderr := command(t, "inspect", "-json", photos)
	var r inspection
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 {
		t.Fatalf("status %d, %v in %q, stderr %q, want no error, status 0", status, err, stdout, stderr)
	}
	if r.Samples != 192 || len(r.Classes) != 12 || len(r.Bad) != 0 || r.Format != "tar.gz" {
		t.Errorf("%d samples, %d classes, %d bad, format %q; want 192, 12, 0, tar.gz", r.Samples,
			len(r.Classes), len(r.Bad), r.Format)
	}
	if c := r.Classes[3]; c.Name != "cat" || c.Label != 3 || c.Samples != 16 {
		t.Errorf("class 3 is %+v, want c.Name = %q, c.Label = 3, c.Samples = 16", c, "cat")
	}
	if r.Width.Min < 64 || r.Width.Max > 128 || r.Formats["PNG"] == 0 || r.Formats["JPEG grey"] == 0 ||
		r.Formats["JPEG progressive"] == 0 {
		t.Errorf("widths %+v, formats %v", r.Width, r.Formats)
	}
	status, stdout, _ = command(t, "inspect", photos)
	if status != 0 || !strings.Contains(stdout, "192 in 12 classes, 0 bad") {
		t.Errorf("status %d, %s, want status 0, stdout with %q", status, stdout, "192 in 12 classes, 0 bad")
	}
}

// inspect -index prints the same report as inspect. The first call makes the index, and the second
// one reads it.
func TestInspectIndex(t *testing.T) {
	data, err := os.ReadFile(photos)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "photos.tgz")
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	status, want, _ := command(t, "inspect", "-json", path)
	if status != 0 {
		t.Fatalf("status %d, want 0", status)
	}
	for range 2 {
		if status, got, stderr := command(t, "inspect", "-index", "-json", path); status != 0 || got != want {
			t.Errorf("status %d, %q\n%s\nwant\n%s", status, stderr, got, want)
		}
		if _, err := os.Stat(path + ".tsidx"); err != nil {
			t.Error(err)
		}
	}
}

func TestInspectBadMembers(t *testing.T) {
	path := clitest.WriteTar(t, map[string]string{"a/broken.jpg": "\xff\xd8\xff\xe0 not a picture",
		"a/empty.png": "", "a/notes.txt": "hello", "readme": "no class"})
	status, stdout, _ := command(t, "inspect", "-show", "1", path)
	if status != 1 {
		t.Errorf("status %d, want 1", status)
	}
	for _, want := range []string{"2 in 1 class, 2 bad", "ignored  2 members that are no images",
		"a/broken.jpg", "and 1 more"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("got\n%s\nwant it to contain %q", stdout, want)
		}
	}
	status, stdout, _ = command(t, "inspect", "-json", path)
	var r inspection
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 1 {
		t.Fatalf("status %d, %v in %q, want no error, status 1", status, err, stdout)
	}
	if len(r.Bad) != 2 || r.BadBy["empty"] != 1 || r.Ignored != 2 {
		t.Errorf("%+v, want 2 bad, one of them empty, and 2 ignored", r)
	}
}

// TestInspectForeignNames checks that names of members and classes cannot send control characters
// to the terminal.
func TestInspectForeignNames(t *testing.T) {
	const evil = "\x1b[2J\nsamples  1 in 1 class, 0 bad\u202e"
	path := clitest.WriteTar(t, map[string]string{"a" + evil + "/x" + evil + ".jpg": "", "b/y.jpg": "",
		"c" + evil + "/readme": ""})
	for _, args := range [][]string{{"inspect", path}, {"inspect", "-index", path},
		{"inspect", path + "\x1b[2J"}, {"bench", "loader", "-archive", path}} {
		status, stdout, stderr := command(t, args...)
		out := stdout + stderr
		if status != 1 || strings.ContainsAny(out, "\x1b\u202e") || strings.Contains(out, "\nsamples  1 in") {
			t.Errorf("%q: status %d\n%q", args, status, out)
		}
	}
	_, stdout, _ := command(t, "inspect", path)
	for _, want := range []string{`: "c\x1b[2J\n`, `  "a\x1b[2J\n`,
		"\n" + `"a\x1b[2J\nsamples  1 in 1 class, 0 bad\u202e/x\x1b[2J`, "  b  ", "\nb/y.jpg  "} {
		if !strings.Contains(stdout, want) {
			t.Errorf("got\n%s\nwant it to contain %s", stdout, want)
		}
	}
}

// inspect reports the contents before the damage, and the damage.
func TestInspectDamagedArchive(t *testing.T) {
	data, err := os.ReadFile(photos)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "cut.tgz")
	if err := os.WriteFile(path, data[:len(data)/2], 0o644); err != nil {
		t.Fatal(err)
	}
	status, stdout, _ := command(t, "inspect", path)
	if want := "the file is cut off: unexpected EOF: fetch it again\n"; status != 1 ||
		!strings.Contains(stdout, "The archive is damaged") || !strings.Contains(stdout, "12 classes") ||
		!strings.HasSuffix(stdout, want) {
		t.Errorf("status %d\n%s\nwant status 1, stdout with %q and %q, stdout ending with %q",
			status, stdout, "The archive is damaged", "12 classes", want)
	}
	// inspect lists the readable part itself, so only the other commands point to inspect.
	advice := "fetch it again (`torchstream inspect " + path + "` lists what is readable)\n"
	for _, c := range []struct {
		args []string
		says string
	}{{[]string{"inspect", "-index", path}, "fetch it again\n"}, {[]string{"index", path}, advice}} {
		if status, stdout, stderr := command(t, c.args...); status != 1 || stdout != "" ||
			!strings.HasSuffix(stderr, c.says) {
			t.Errorf("%q: status %d, %s%s, want status 1, stdout \"\", stderr ending with %q",
				c.args, status, stdout, stderr, c.says)
		}
	}
}

// A file that is not an archive is not reported as a damaged one.
func TestInspectOfAnotherFile(t *testing.T) {
	for name, data := range map[string]string{"short": "hello", "long": strings.Repeat("hello ", 500)} {
		path := filepath.Join(t.TempDir(), name+".txt")
		if err := os.WriteFile(path, []byte(data), 0o666); err != nil {
			t.Fatal(err)
		}
		status, stdout, stderr := command(t, "inspect", path)
		if status != 1 || stdout != "" || !strings.Contains(stderr, `it is no archive (it begins with "hello`) {
			t.Errorf("%s: status %d\n%s%s\nwant status 1, stdout \"\", stderr with %q",
				name, status, stdout, stderr, `it is no archive (it begins with "hello`)
		}
	}
}

// TestInspectOfPartsOfASet checks that image folders named train and test are flagged as unlikely
// classes.
func TestInspectOfPartsOfASet(t *testing.T) {
	for second, want := range map[string]bool{"Test": true, "validation": true, "testbed": false} {
		path := clitest.WriteTar(t, map[string]string{"train/a.png": "", second + "/b.jpg": ""})
		_, stdout, _ := command(t, "inspect", path)
		if got := strings.Contains(stdout, "the classes have the names of parts of a set"); got != want {
			t.Errorf("folders train and %s: %v, want %v:\n%s", second, got, want, stdout)
		}
	}
}

func TestSingleIgnoredMember(t *testing.T) {
	path := clitest.WriteTar(t, map[string]string{"a/broken.jpg": "", "a/notes.txt": "hello"})
	_, stdout, _ := command(t, "inspect", path)
	if want := "ignored  1 member that is no image in the folder"; !strings.Contains(stdout, want) {
		t.Errorf("got\n%s\nwant it to contain %q", stdout, want)
	}
}

// TestInspectOfImagesInNoDirectory checks that the report explains classes.
func TestInspectOfImagesInNoDirectory(t *testing.T) {
	path := clitest.WriteTar(t, map[string]string{"a.png": "", "b.jpg": ""})
	status, stdout, _ := command(t, "inspect", path)
	if status != 1 || !strings.Contains(stdout, "0 in 0 classes") ||
		!strings.Contains(stdout, "\n"+noClass+"\n-webdataset takes labels") {
		t.Errorf("status %d\n%s\nwant status 1, stdout with %q and %q",
			status, stdout, "0 in 0 classes", "\n"+noClass+"\n-webdataset takes labels")
	}
	path = clitest.WriteTar(t, map[string]string{"a/a.png": "", "b/b.jpg": ""})
	if _, stdout, _ := command(t, "inspect", path); strings.Contains(stdout, noClass) {
		t.Errorf("of samples:\n%s\nwant it without %q", stdout, noClass)
	}
}

// TestInspectDamagedImages checks that damaged images that still decode are listed separately, and
// that -damaged decides which ones decode.
func TestInspectDamagedImages(t *testing.T) {
	var encoded bytes.Buffer
	if err := png.Encode(&encoded, image.NewGray(image.Rect(0, 0, 8, 8))); err != nil {
		t.Fatal(err)
	}
	data := encoded.Bytes()
	path := clitest.WriteTar(t,
		map[string]string{"a/good.png": string(data), "a/short.png": string(data[:len(data)-12])})
	for _, c := range []struct {
		args        []string
		status      int
		bad, warned int
	}{{nil, 0, 0, 1}, {[]string{"-damaged", "partial"}, 0, 0, 1}, {[]string{"-damaged", "refuse"}, 1, 1, 0}} {
		status, stdout, _ := command(t, slices.Concat([]string{"inspect", "-json"}, c.args, []string{path})...)
		var r inspection
		if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != c.status ||
			len(r.Bad) != c.bad || len(r.Warned) != c.warned {
			t.Errorf("%v: status %d, %v in %s, want no error, status %v, len(r.Bad) = %v, len(r.Warned) "+
				"= %v", c.args, status, err, stdout, c.status, c.bad, c.warned)
		}
	}
	_, stdout, _ := command(t, "inspect", path)
	for _, want := range []string{"2 in 1 class, 0 bad", "damaged members that are decoded all the same: 1",
		"a/short.png  damaged  truncated PNG"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("got\n%s\nwant it to contain %q", stdout, want)
		}
	}
	if status, _, stderr := command(t, "inspect", "-damaged", "perhaps", path); status != 2 ||
		!strings.Contains(stderr, "not warned, partial or refuse") {
		t.Errorf("status %d, %q, want status 2, stderr with %q",
			status, stderr, "not warned, partial or refuse")
	}
}

// TestInspectWritesTheFixedArchive checks that a report on the fixed archive finds nothing bad.
func TestInspectWritesTheFixedArchive(t *testing.T) {
	var encoded bytes.Buffer
	if err := png.Encode(&encoded, image.NewGray(image.Rect(0, 0, 40, 40))); err != nil {
		t.Fatal(err)
	}
	good, bad := encoded.String(), encoded.String()[:50]
	path := clitest.WriteTar(t, map[string]string{"a/good.png": good, "a/bad.png": bad, "b/bad.png": bad})
	out := filepath.Join(t.TempDir(), "out.tgz")
	if status, _, stderr := command(t, "inspect", "-fix", out, path); status != 1 ||
		!strings.Contains(stderr, "-drop-classes") {
		t.Errorf("status %d, %q, want status 1, stderr with %q", status, stderr, "-drop-classes")
	}
	status, stdout, stderr := command(t, "inspect", "-drop-classes", "-fix", out, path)
	for _, want := range []string{"wrote " + out, "1 member; 2 left out, 0 written again",
		"class b has no member left", "refused        2  damaged: PNG"} {
		if status != 0 || !strings.Contains(stdout, want) {
			t.Errorf("status %d, no %q in\n%s%s\nwant status 0, stdout with %q",
				status, want, stdout, stderr, want)
		}
	}
	_, stdout, _ = command(t, "inspect", "-json", "-drop-classes", "-fix",
		filepath.Join(t.TempDir(), "again.tgz"), path)
	var r inspection
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || r.Fixed == nil || r.Fixed.Members != 1 ||
		r.Fixed.LeftOut != 2 || r.BadCount != 2 ||
		len(r.Findings) == 0 || r.Findings[0].Count != 2 ||
		!slices.Equal(r.Findings[0].First, []string{"a/bad.png", "b/bad.png"}) {
		t.Errorf("%v in %s", err, stdout)
	}
	if status, stdout, _ := command(t, "inspect", out); status != 0 ||
		!strings.Contains(stdout, "1 in 1 class, 0 bad") {
		t.Errorf("status %d\n%s\nwant status 0, stdout with %q", status, stdout, "1 in 1 class, 0 bad")
	}
	data, err := os.ReadFile(photos)
	if err != nil {
		t.Fatal(err)
	}
	cut := filepath.Join(t.TempDir(), "cut.tgz")
	if err := os.WriteFile(cut, data[:len(data)/2], 0o644); err != nil {
		t.Fatal(err)
	}
	before, _ := os.ReadFile(out) // compared below
	if status, _, stderr := command(t, "inspect", "-drop-classes", "-fix", out, path); status != 1 ||
		!strings.Contains(stderr, out+" exists, and") {
		t.Errorf("status %d, %q, want status 1, stderr with %q", status, stderr, out+" exists, and")
	}
	if now, err := os.ReadFile(out); err != nil || !bytes.Equal(now, before) {
		t.Errorf("the file that was there is gone: %v", err)
	}
	none := filepath.Join(t.TempDir(), "none.tgz")
	if status, _, stderr := command(t, "inspect", "-fix", none, cut); status != 1 ||
		!strings.Contains(stderr, "nothing was written to "+none) ||
		!strings.Contains(stderr, "fetch it again") || fileExists(none) {
		t.Errorf("status %d, %q", status, stderr)
	}
	for _, args := range [][]string{{"-fix", out, "-index"}, {"-drop-classes"}} {
		if status, _, stderr := command(t, slices.Concat([]string{"inspect"}, args, []string{path})...); status != 2 {
			t.Errorf("%v: status %d, %q, want 2", args, status, stderr)
		}
	}
	if status, _, stderr := command(t, "inspect", "-fix", path, path); status != 1 ||
		!strings.Contains(stderr, "is the archive that is read") {
		t.Errorf("status %d, %q, want status 1, stderr with %q",
			status, stderr, "is the archive that is read")
	}
}

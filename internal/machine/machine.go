// Package machine checks whether a machine meets the requirements for building and running
// torchstream. It opens no library and uses no cgo, so that it works before anything is built.
package machine

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/torchstream/torchstream/internal/library"
	"github.com/torchstream/torchstream/internal/setup"
	"github.com/torchstream/torchstream/internal/system"
)

// The states of a Finding.
const (
	OK      = "ok"
	Note    = "note" // works, but something is absent
	Missing = "missing"
)

// Finding is one row of the doctor's report.
type Finding struct {
	State string `json:"state"` // OK, Note or Missing
	What  string `json:"what"`
	Found string `json:"found"`
	ToDo  string `json:"to_do,omitempty"`
}

const (
	install  = "`make setup` as root, or: apt-get install "
	newestGo = "install Go 1.25 or newer: https://go.dev/dl"
)

// Clone returns a finding for each thing that building the clone at root needs. Programs and
// compilers are asked for their versions; ctx ends them.
func Clone(ctx context.Context, root string) []Finding {
	found := []Finding{operatingSystem(), clone(root), goTool(ctx), Compiler(ctx), program(ctx, "make", "apt-get install make"),
		cmake(ctx), program(ctx, "ninja", install+"ninja-build")}
	found = append(found, codecs()...)
	return append(found, optional(), disk(root))
}

// Compiler returns the finding for the C++ compiler.
func Compiler(ctx context.Context) Finding { return program(ctx, "g++", install+"g++") }

func operatingSystem() Finding {
	platform := runtime.GOOS + "/" + runtime.GOARCH
	if platform != "linux/amd64" {
		return Finding{Missing, "system", platform, "torchstream runs on Linux x86-64"}
	}
	return Finding{OK, "system", platform, ""}
}

func clone(root string) Finding {
	if strings.ContainsAny(root, " \t\n") {
		return Finding{Missing, "clone", root, "compiler flags cannot carry spaces: clone into a folder without them"}
	}
	return Finding{OK, "clone", root, ""}
}

func have(name string) bool {
	_, err := exec.LookPath(name)
	return err == nil
}

// firstLine returns the first line of a command's output, including stderr.
func firstLine(ctx context.Context, name string, args ...string) string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c := exec.CommandContext(ctx, name, args...)
	c.Env = append(os.Environ(), "GOTOOLCHAIN=local")
	out, err := c.CombinedOutput()
	line, _, _ := bytes.Cut(out, []byte("\n"))
	if len(line) == 0 && err != nil {
		return err.Error()
	}
	return string(line)
}

// program returns the finding for a program that must be in PATH.
func program(ctx context.Context, name, toDo string) Finding {
	if !have(name) {
		return Finding{Missing, name, "not in PATH", toDo}
	}
	return Finding{OK, name, firstLine(ctx, name, "--version"), ""}
}

var goVersion = regexp.MustCompile(`go(1\.(\d+)\S*)`)

func goTool(ctx context.Context) Finding {
	if !have("go") {
		return Finding{Missing, "Go", "not in PATH", newestGo}
	}
	line := firstLine(ctx, "go", "version")
	m := goVersion.FindStringSubmatch(line)
	if m == nil {
		return Finding{Missing, "Go", line, newestGo}
	}
	switch minor, err := strconv.Atoi(m[2]); {
	case err != nil || minor < 21:
		return Finding{Missing, "Go", m[1], newestGo}
	case minor < 25:
		return Finding{Note, "Go", m[1], "it downloads the Go that go.mod asks for, which needs the network"}
	}
	return Finding{OK, "Go", m[1], ""}
}

var twoNumbers = regexp.MustCompile(`(\d+)\.(\d+)\S*`)

func cmake(ctx context.Context) Finding {
	f := program(ctx, "cmake", install+"cmake")
	if f.State != OK {
		return f
	}
	m := twoNumbers.FindStringSubmatch(f.Found)
	if m == nil {
		return Finding{Missing, f.What, f.Found, "its version is unknown, and 3.25 or newer is needed"}
	}
	major, _ := strconv.Atoi(m[1]) // digits; a number too large for int is a new version
	minor, _ := strconv.Atoi(m[2])
	if major < 3 || major == 3 && minor < 25 {
		return Finding{Missing, f.What, m[0], "3.25 or newer is needed: update it, or put a newer one first in PATH"}
	}
	return Finding{OK, f.What, m[0], ""}
}

// in reports whether a file is in one of the folders.
func in(file string, folders ...string) bool {
	for _, folder := range folders {
		if _, err := os.Stat(filepath.Join(folder, file)); err == nil {
			return true
		}
	}
	return false
}

// codecs returns the findings for the libraries that are linked statically, and GoogleTest.
func codecs() []Finding {
	var found []Finding
	for _, c := range []struct{ name, header, library, debian string }{
		{"JPEG headers", "jpeglib.h", "libjpeg.a", "libjpeg-dev"},
		{"PNG headers", "png.h", "libpng.a", "libpng-dev"},
		{"WebP headers", "webp/decode.h", "libwebp.a", "libwebp-dev"},
		{"zlib headers", "zlib.h", "libz.a", "zlib1g-dev"},
		{"GoogleTest", "gtest/gtest.h", "libgtest.a", "libgtest-dev"},
	} {
		var lacks []string
		if !in(c.header, "/usr/local/include", "/usr/include", "/usr/include/x86_64-linux-gnu") {
			lacks = append(lacks, c.header)
		}
		if !in(c.library, "/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib") {
			lacks = append(lacks, c.library)
		}
		f := Finding{OK, c.name, c.header + ", " + c.library, ""}
		if len(lacks) > 0 {
			f = Finding{Missing, c.name, "no " + strings.Join(lacks, " "), install + c.debian}
		}
		found = append(found, f)
	}
	return found
}

func optional() Finding {
	var there, lacks []string
	for _, p := range [][2]string{{"ccache", "faster rebuilds"},
		{"python3", "make lint, make release, comparisons with PyTorch"}, {"clang-format", "make lint"},
		{"clang++", "make fuzz"}} {
		if have(p[0]) {
			there = append(there, p[0])
		} else {
			lacks = append(lacks, p[0]+" ("+p[1]+")")
		}
	}
	if len(lacks) > 0 {
		return Finding{Note, "optional", "not installed: " + strings.Join(lacks, ", "), ""}
	}
	return Finding{OK, "optional", strings.Join(there, ", "), ""}
}

// freeGB returns the free disk space in GB at the nearest parent of folder that exists.
func freeGB(folder string) (float64, error) {
	for {
		free, _, err := system.Disk(folder)
		if err == nil {
			return float64(free) / 1e9, nil
		}
		parent := filepath.Dir(folder)
		if parent == folder {
			return 0, err
		}
		folder = parent
	}
}

func disk(root string) Finding {
	free, err := freeGB(root)
	if err != nil {
		return Finding{Note, "disk", "free space of " + root + " is unknown: " + err.Error(), ""}
	}
	text := fmt.Sprintf("%.1f GB free in %s", free, root)
	if free < 1 {
		return Finding{Missing, "disk", text, "a build takes 1 GB: free space"}
	}
	return Finding{OK, "disk", text, ""}
}

// LibTorch returns the finding for the LibTorch that a build uses: LIBTORCH, or else the installed
// one.
func LibTorch() Finding {
	if given := os.Getenv("LIBTORCH"); given != "" {
		switch torch, cuda, err := setup.Given(given); {
		case err != nil:
			what, toDo, _ := strings.Cut(err.Error(), ": give ")
			if toDo != "" {
				toDo = "give " + toDo
			}
			return Finding{Missing, "LibTorch", what, toDo}
		case !cuda:
			return Finding{Note, "LibTorch", "LIBTORCH=" + given + ", which has no CUDA",
				"the shim is built without CUDA too, and uses no GPU"}
		default:
			return Finding{OK, "LibTorch", torch + " (LIBTORCH)", ""}
		}
	}
	cache, err := library.Cache()
	if err != nil {
		return Finding{Missing, "LibTorch", "there is no cache folder: " + err.Error(),
			"set TORCHSTREAM_CACHE to a folder of your own"}
	}
	folder, complete, err := setup.Installed(cache, os.Getenv("TORCHSTREAM_LIBTORCH"))
	if err != nil {
		return Finding{Missing, "LibTorch", err.Error(), ""}
	}
	if complete {
		return Finding{OK, "LibTorch", folder, ""}
	}
	text, toDo := "not in "+
		cache, "`make shim` installs it there (2.6 GB to download), or set LIBTORCH to an installed one"
	if free, err := freeGB(cache); err == nil {
		text += fmt.Sprintf(", where %.1f GB are free", free)
		if free < 8 {
			toDo = "the installation needs 8 GB: free space, set TORCHSTREAM_CACHE to a folder on a " +
				"larger disk, or LIBTORCH to an installed LibTorch"
		}
	}
	return Finding{Missing, "LibTorch", text, toDo}
}

var driverVersion = regexp.MustCompile(`\s(\d{3})(\.[\d.]+)`)

// GPU returns the finding for the NVIDIA driver and the GPUs that nvidia-smi names.
func GPU(ctx context.Context) Finding {
	version, major := "", 0
	text, err := os.ReadFile("/proc/driver/nvidia/version")
	if m := driverVersion.FindSubmatch(text); err == nil && m != nil {
		version = " " + string(m[1]) + string(m[2])
		major, _ = strconv.Atoi(string(m[1])) // three digits
	}
	if version == "" && !in("nvidiactl", "/dev") {
		return Finding{Note, "GPU", "none, and no NVIDIA driver",
			"everything runs on the CPU; to use a GPU, install NVIDIA driver 580 or newer"}
	}
	gpus := strings.Join(names(ctx), ", ")
	switch {
	case major != 0 && major < 580:
		return Finding{Missing, "GPU", "NVIDIA driver" + version + ": " + gpus,
			"CUDA 13 needs the driver 580 or newer: update it"}
	case gpus == "":
		return Finding{Note, "GPU", "NVIDIA driver" + version + ", but nvidia-smi names no GPU",
			"run nvidia-smi, and look at CUDA_VISIBLE_DEVICES and at /dev/nvidia*"}
	}
	return Finding{OK, "GPU", "NVIDIA driver" + version + ": " + gpus, ""}
}

// names returns the names of the GPUs, as nvidia-smi prints them.
func names(ctx context.Context) []string {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu=name", "--format=csv,noheader").Output()
	if err != nil {
		return nil // GPU reports that there is none
	}
	var all []string
	for s := bufio.NewScanner(bytes.NewReader(out)); s.Scan(); {
		if name := strings.TrimSpace(s.Text()); name != "" {
			all = append(all, name)
		}
	}
	return all
}

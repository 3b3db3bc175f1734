//go:build linux && cgo

package main

import (
	"bytes"
	"context"
	"fmt"
	"image"
	"image/color"
	"image/jpeg"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/library"
	"github.com/torchstream/torchstream/internal/machine"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/torch"
)

// doctor prints what is installed and what is missing. It reports a component as ok only after
// testing that component.
func doctor(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream doctor", "Says what is installed, what is missing and what to do about "+
		"it. Exit status 1 if something needed is missing; a machine without\n"+
		"a GPU is fine. With -dist it tests the links between processes instead: those of a launcher, or "+
		"-nproc that it starts. Exit status 1 if one is slow.", stderr)
	asJSON := set.Bool("json", false, "print one JSON object")
	links := set.Bool("dist", false, "test the links between processes, and name the slow ones")
	ranks := set.Int("nproc", 0, "with -dist: processes to start (default: one for each GPU, or 2 on the CPU)")
	cpu := set.Bool("cpu", false, "with -dist: test the CPU and Gloo")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	if *links {
		return doctorDist(ctx, *ranks, *cpu, *asJSON, stdout, stderr)
	}
	clone := library.Here(imagecapi.Version()).Clone
	report := examine(ctx, clone)
	missing := missingOf(report)
	var err error
	if *asJSON {
		err = cli.WriteJSON(stdout, map[string]any{"findings": report, "missing": missing})
	} else {
		_, err = printFindings(stdout, report, clone != "")
	}
	if err == nil && missing > 0 {
		err = cli.ErrFound
	}
	return err
}

// examine returns the findings about the machine. If the program was built in a clone of the
// repository, it also returns the findings about building that clone.
func examine(ctx context.Context, clone string) []finding {
	found := []finding{
		{"ok", "program", programVersion(debug.ReadBuildInfo()), ""},
	}
	if clone != "" {
		found = append(found, findings(machine.Clone(ctx, clone)...)...)
		found = append(found, findings(machine.Builds(clone, false)...)...)
	}
	imageErr := imagecapi.Check()
	if err := capi.Check(); err != nil {
		found = append(append(found, findings(machine.LibTorch(), machine.GPU(ctx))...), shimNotLoaded(err, imageErr))
	} else {
		found = append(found, libtorch()...)
	}
	if imageErr != nil {
		return append(found, notLoaded("image library", imageErr), installed())
	}
	found = append(found, codec("JPEG", imagecapi.JPEGVersion(), encodeJPEG),
		codec("PNG", "libpng", png.Encode), installed())
	if clone == "" {
		found = append(found, finding{"ok", "Python", "not needed to run", ""})
	}
	return found
}

// notLoaded returns the finding for a library that cannot be loaded. If the error has several
// lines, the last one has the advice. Each line in between names a folder.
func notLoaded(what string, err error) finding {
	lines := strings.Split(err.Error(), "\n")
	f := finding{State: "missing", What: what, Found: lines[0]}
	if last := len(lines) - 1; last > 0 {
		for i, line := range lines[1:last] {
			lines[1+i] = strings.TrimSpace(line)
		}
		f.Found = strings.Join(lines[:last], "\n")
		f.ToDo = lines[last]
	}
	return f
}

// shimNotLoaded returns the finding for a shim that cannot be loaded. The shim needs the image
// library. If err repeats imageErr, the finding only refers to the image library, which has a
// finding that gives the reason.
func shimNotLoaded(err, imageErr error) finding {
	if imageErr != nil && err.Error() == imageErr.Error() {
		return finding{"missing", "shim", "not loaded: it needs the image library, which is missing", ""}
	}
	return notLoaded("shim", err)
}

// libtorch examines the loaded shim and its libraries.
func libtorch() []finding {
	mapped := library.Mapped()
	found := []finding{
		{"ok", "shim", capi.LibraryName + at(mapped[capi.LibraryName]), ""},
		{"ok", "LibTorch", capi.LibTorchVersion() + at(mapped["libtorch_cpu.so"]), ""},
		{"ok", "CUDA", builtWith() + at(mapped["libcudart.so"]), ""},
	}
	if given := os.Getenv("LIBTORCH"); given != "" {
		found = append(found, givenLibTorch(given, mapped["libtorch_cpu.so"])...)
	}
	if capi.CUDAVersion() == "" {
		found = append(found, finding{"note", "GPU", "not used: the shim is for a LibTorch without CUDA",
			"everything runs on the CPU; for a GPU set up a LibTorch with CUDA: `torchstream setup`, or " +
				"`make shim` in a clone"})
	} else {
		found = append(found, driverAndDevices(mapped["libcuda.so"])...)
	}
	found = append(append(found, threads()), nodesAndCopies()...)
	found = append(found, compute(cuda.CPU))
	for d := range cuda.DeviceCount() {
		found = append(found, compute(cuda.Device(d)))
	}
	return found
}

// givenLibTorch returns a note if the variable LIBTORCH names another LibTorch than the one in use.
// They can differ because LIBTORCH only affects a build of the shim: the built shim remembers the
// folder.
func givenLibTorch(given, used string) []finding {
	for _, folder := range []string{filepath.Join(given, "torch", "lib"), filepath.Join(given, "lib")} {
		path, err := filepath.EvalSymlinks(filepath.Join(folder, "libtorch_cpu.so"))
		if err == nil && path == used {
			return nil
		}
	}
	return []finding{{"note", "LIBTORCH", used + " is used instead of " + printable.Name(given),
		"to use the folder in LIBTORCH, build the shim again with LIBTORCH set (`torchstream setup`, or " +
			"`make shim` in a clone); otherwise unset LIBTORCH"}}
}

// builtWith returns the CUDA version for which the shim was built.
func builtWith() string {
	if version := capi.CUDAVersion(); version != "" {
		return "built with CUDA " + version
	}
	return "built without CUDA"
}

func at(path string) string {
	if path == "" {
		return ""
	}
	return ", " + path
}

var driverVersion = regexp.MustCompile(`\b\d{3}\.\d+(\.\d+)?\b`)

// driverAndDevices looks for the NVIDIA driver and the GPUs. A machine with neither is fine. A
// driver without a usable GPU is an error.
func driverAndDevices(libcuda string) []finding {
	version := driverVersion.FindString(filepath.Base(libcuda))
	if text, err := os.ReadFile("/proc/driver/nvidia/version"); err == nil && version == "" {
		version = driverVersion.FindString(string(text))
	}
	_, statErr := os.Stat("/dev/nvidiactl")
	driver := version != "" || libcuda != "" || statErr == nil
	count := cuda.DeviceCount()
	switch {
	case count == 0 && !driver:
		return []finding{{"note", "GPU", "none, and no NVIDIA driver",
			"everything runs on the CPU; to use a GPU, install NVIDIA driver 580 or newer"}}
	case count == 0:
		toDo := "check that nvidia-smi works and that the driver is 580 or newer, which CUDA 13 needs"
		if visible, set := os.LookupEnv("CUDA_VISIBLE_DEVICES"); set {
			toDo = fmt.Sprintf("CUDA_VISIBLE_DEVICES is %q: unset it; if that does not help, %s", visible, toDo)
		}
		return []finding{{"missing", "GPU",
			"there is an NVIDIA driver " + version + " but no GPU that it lets this program use", toDo}}
	}
	if version == "" {
		version = "present, version unknown"
	}
	out := []finding{{"ok", "driver", version + at(libcuda), ""}}
	for d := range count {
		device := cuda.Device(d)
		p, err := device.Properties()
		if err != nil {
			out = append(out, finding{"missing", device.String(), err.Error(), "see whether nvidia-smi works"})
			continue
		}
		text := fmt.Sprintf("%s, compute capability %d.%d, %d multiprocessors, %s", p.Name, p.Major,
			p.Minor, p.Multiprocessors, gigabytes(p.TotalBytes))
		if m, err := device.Memory(); err == nil {
			text += ", " + gigabytes(m.Free) + " free"
		}
		f := finding{"ok", device.String(), text, ""}
		if p.Major < 8 {
			f.State, f.ToDo = "note", "the shim's own kernels are built for compute capability 8.0 and newer"
		}
		out = append(out, f)
	}
	return out
}

func gigabytes(bytes int64) string { return fmt.Sprintf("%.1f GB", float64(bytes)/1e9) }

// compute runs one operator on the device.
func compute(device cuda.Device) finding {
	f := finding{"ok", "compute on " + device.String(), "1 + 1 = 2", ""}
	sum, err := onePlusOne(device)
	if err == nil && sum != 2 {
		err = fmt.Errorf("1 + 1 came out as %g", sum)
	}
	if err != nil {
		f.State, f.Found, f.ToDo = "missing", err.Error(), "LibTorch does not compute here: rebuild with "+
			"`make shim`; for a GPU see whether nvidia-smi works"
	}
	return f
}

func onePlusOne(device cuda.Device) (float64, error) {
	one, err := torch.Ones(device, torch.Float32)
	if err != nil {
		return 0, err
	}
	defer one.Close()
	sum := one.Add(one)
	defer sum.Close()
	return sum.Float64()
}

// codec encodes a small picture with Go's own codec and decodes it with the shim.
func codec(name, version string, encode func(io.Writer, image.Image) error) finding {
	f := finding{"ok", name, version + ", decodes", ""}
	if err := tryCodec(encode); err != nil {
		f.State, f.Found, f.ToDo = "missing", version+": "+
			err.Error(), "the shim was built with a broken codec: `make clean shim`"
	}
	return f
}

func encodeJPEG(w io.Writer, i image.Image) error { return jpeg.Encode(w, i, nil) }

func tryCodec(encode func(io.Writer, image.Image) error) error {
	const side = 16
	picture := image.NewRGBA(image.Rect(0, 0, side, side))
	for i := range side * side {
		picture.Set(i%side, i/side, color.RGBA{200, 100, 50, 255})
	}
	var data bytes.Buffer
	if err := encode(&data, picture); err != nil {
		return err
	}
	decoder, err := imagecapi.NewDecoder(0)
	if err != nil {
		return err
	}
	defer imagecapi.FreeDecoder(decoder)
	pixels := make([]byte, side*side*3)
	whole := imagecapi.Geometry{CropWidth: side, CropHeight: side, ResizeWidth: side, ResizeHeight: side,
		WindowWidth: side, WindowHeight: side}
	if err := imagecapi.Decode(decoder, data.Bytes(), &whole, pixels, side*3); err != nil {
		return err
	}
	for i, want := range []int{200, 100, 50} {
		if got := int(pixels[i]); got < want-4 || got > want+4 {
			return fmt.Errorf("a plain picture of (200, 100, 50) came out as %v", pixels[:3])
		}
	}
	return nil
}

// installed checks the folder in which `make` installs LibTorch. The folder need not exist:
// LibTorch may be elsewhere.
func installed() finding {
	folder, err := library.Cache()
	if err != nil {
		return finding{"note", "cache", err.Error(),
			"set TORCHSTREAM_CACHE to a folder of your own if `make` is to install LibTorch"}
	}
	entries, err := os.ReadDir(folder)
	if err != nil {
		return finding{"note", "cache", folder + " is not there", "`make shim` fills it when LIBTORCH is not set"}
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() && strings.HasPrefix(e.Name(), "libtorch-") {
			names = append(names, e.Name())
		}
	}
	if len(names) == 0 {
		return finding{"note", "cache", folder + " has no LibTorch", "`make shim` fills it when LIBTORCH is not set"}
	}
	return finding{"ok", "cache", folder + ": " + strings.Join(names, ", "), ""}
}

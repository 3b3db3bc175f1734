package setup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/cshim"
	"github.com/torchstream/torchstream/internal/library"
)

// LibTorch returns the folder that contains LibTorch's folder torch and the CUDA libraries,
// arranged as in a Python site-packages folder. If o.LibTorch is "", LibTorch installs the wheels
// of o.Release into o.Cache, unless they are installed already. Otherwise it checks the LibTorch at
// o.LibTorch. A download stops when ctx ends.
func LibTorch(ctx context.Context, o Options) (site string, err error) {
	if o.LibTorch != "" {
		torch, err := given(o.LibTorch)
		return filepath.Dir(torch), err
	}
	lockText, err := lockOf(o.Release)
	if err != nil {
		return "", err
	}
	if err := usable("TORCHSTREAM_CACHE", o.Cache); err != nil {
		return "", err
	}
	if err := os.MkdirAll(o.Cache, 0o777); err != nil {
		return "", fmt.Errorf("%w: set TORCHSTREAM_CACHE to a folder of your own", err)
	}
	torch, err := o.libtorch(ctx, lockText)
	return filepath.Dir(torch), err
}

// Installed returns the folder in the cache for the LibTorch of a release ("": the default).
// complete says whether that LibTorch is installed.
func Installed(cache, release string) (folder string, complete bool, err error) {
	lockText, err := lockOf(release)
	if err != nil {
		return "", false, err
	}
	lines := wheels(lockText)
	all, err := lines.parse()
	if err != nil {
		return "", false, err
	}
	folder = lines.folder(cache, all[0].version)
	_, err = os.Stat(filepath.Join(folder, stamp))
	return folder, err == nil, nil
}

// Given returns the LibTorch folder for a value of LIBTORCH, and whether it has CUDA.
func Given(libtorch string) (torch string, cuda bool, err error) {
	torch, err = given(libtorch)
	return torch, err == nil && hasCUDA(torch), err
}

const wanted = "give the site-packages that contains torch/, the torch package folder, or an unpacked libtorch zip " +
	"(the folder with include/ and lib/), or unset LIBTORCH to have one installed"

// given returns the LibTorch folder for a value of LIBTORCH. If the version is known, it must be
// between the oldest and the newest release with a lock. A lock is the list of a release's wheels
// and their checksums.
func given(libtorch string) (torch string, err error) {
	path, err := library.Absolute(libtorch)
	if err != nil {
		return "", err
	}
	if err := usable("LIBTORCH", path); err != nil {
		return "", err
	}
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		return "", fmt.Errorf("LIBTORCH=%s: no such folder: %s", path, wanted)
	}
	for _, torch := range []string{filepath.Join(path, "torch"), path} {
		file := filepath.Join(torch, "lib", "libtorch_cpu.so")
		if _, err := os.Stat(file); err != nil {
			continue
		}
		releases := slices.DeleteFunc(Releases(), func(r string) bool { return strings.HasSuffix(r, WithoutCUDA) })
		oldest, newest := releases[0], releases[len(releases)-1]
		if have := library.LibTorchVersion(file); have != "" &&
			(minor(have) < minor(oldest) || minor(have) > minor(newest)) {
			return "", fmt.Errorf("LIBTORCH=%s is LibTorch %s, torchstream needs %s to %s: point "+
				"LIBTORCH at one, or unset LIBTORCH to have one installed (TORCHSTREAM_LIBTORCH=%s)",
				path, have, oldest, newest, strings.Join(Releases(), " or "))
		}
		return torch, nil
	}
	return "", fmt.Errorf("LIBTORCH=%s: neither torch/lib/libtorch_cpu.so nor lib/libtorch_cpu.so is in it: %s", path, wanted)
}

// hasCUDA reports whether the LibTorch in a folder has CUDA.
func hasCUDA(torch string) bool {
	_, err := os.Stat(filepath.Join(torch, "lib", "libtorch_cuda.so"))
	return err == nil
}

// minor returns a number for the first two numbers of a version, in the order of versions.
func minor(version string) int {
	parts := strings.SplitN(strings.TrimSuffix(version, WithoutCUDA)+".0", ".", 3)
	a, errA := strconv.Atoi(parts[0])
	b, errB := strconv.Atoi(parts[1])
	if errors.Join(errA, errB) != nil {
		return 0
	}
	return a*1000 + b
}

// usable returns an error if a path has characters that cannot be passed in compiler and linker
// flags.
func usable(variable, path string) error {
	if strings.ContainsAny(path, " \t\n\r\v\f:;'\"$\\#") {
		return fmt.Errorf("%s=%s: compiler and linker flags cannot carry a path with spaces or any of : "+
			"; ' \" $ \\ #; "+
			"use a path without them (a symbolic link to it will do)", variable, path)
	}
	return nil
}

// lockOf returns the lock of a release; "" is the default release.
func lockOf(release string) (string, error) {
	text, err := cshim.Sources.ReadFile("libtorch-" + cmp.Or(release, DefaultRelease) + ".lock")
	if err != nil {
		return "", fmt.Errorf("there is no LibTorch %s to install (option -libtorch, or "+
			"TORCHSTREAM_LIBTORCH): want %s; LIBTORCH=FOLDER uses another one",
			release, strings.Join(Releases(), " or "))
	}
	return string(text), nil
}

// Releases returns the LibTorch releases that can be installed for a build, the oldest first.
// Releases without CUDA are last.
func Releases() []string {
	names, _ := fs.Glob(cshim.Sources, "libtorch-*.lock") // the pattern is valid
	for i, name := range names {
		names[i] = strings.TrimSuffix(strings.TrimPrefix(name, "libtorch-"), ".lock")
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(strings.Count(a, WithoutCUDA), strings.Count(b, WithoutCUDA)),
			cmp.Compare(minor(a), minor(b)))
	})
	return names
}

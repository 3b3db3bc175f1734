package setup

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// TestFoldersOfTheCache holds the folder names of earlier versions. They must not change: otherwise
// users would download LibTorch again. A new lock gets a new folder.
func TestFoldersOfTheCache(t *testing.T) {
	for release, want := range map[string]string{"": "libtorch-2.11.0-730e56b0ba91",
		"2.11": "libtorch-2.11.0-730e56b0ba91", "2.15": "libtorch-2.15.0-ba5539abc596"} {
		cache := t.TempDir()
		folder, complete, err := Installed(cache, release)
		if err != nil || complete || folder != filepath.Join(cache, want) {
			t.Errorf("release %q: got %s, complete %v, error %v; want %s in the cache, not complete",
				release, folder, complete, err, want)
		}
		writeFile(t, filepath.Join(folder, stamp), "")
		site, err := LibTorch(t.Context(), Options{Release: release, Cache: cache, Log: io.Discard})
		if err != nil || site != folder {
			t.Errorf("release %q: got %s, %v; want %s without a download", release, site, err, folder)
		}
	}
	for _, release := range Releases() {
		if _, _, err := Installed("/cache", release); err != nil {
			t.Errorf("release %s: %v, want no error", release, err)
		}
	}
}

func TestUnknownReleaseIsAnError(t *testing.T) {
	_, err := LibTorch(t.Context(), Options{Release: "1.0", Cache: t.TempDir(), Log: io.Discard})
	if want := "there is no LibTorch 1.0 to install (option -libtorch, or TORCHSTREAM_LIBTORCH): want " +
		"2.11 or 2.15 or 2.11-cpu"; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestCacheInAFolderWithSpacesIsAnError(t *testing.T) {
	_, err := LibTorch(t.Context(), Options{Cache: filepath.Join(t.TempDir(), "a cache"), Log: io.Discard})
	if want := "flags cannot carry a path with spaces"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
}

// If several set-ups run at the same time, only the first installs. The others wait for it.
func TestConcurrentSetupsInstallOnce(t *testing.T) {
	files, lockText := libtorchWheels(t)
	s := serve(t, false, files)
	alone := installer{cache: t.TempDir(), from: index{urls: []string{s.URL + "/simple"}}, log: io.Discard}
	if _, err := alone.install(t.Context(), lockText); err != nil {
		t.Fatal(err)
	}
	once := s.requests.Load() - 2 // later requests for the two files are not interrupted
	s.requests.Store(0)
	together := installer{cache: t.TempDir(), from: alone.from, log: io.Discard}
	var wait sync.WaitGroup
	for range 4 {
		wait.Go(func() {
			if _, err := together.install(t.Context(), lockText); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	if got := s.requests.Load(); got != once {
		t.Errorf("got %d requests of four set-ups, want %d, as of one", got, once)
	}
}

// Several users may share a cache that they cannot write to. The test puts a folder where the lock
// file would be, so that not even root can take the lock.
func TestInstalledLibTorchNeedsNoWriteAccess(t *testing.T) {
	_, lockText := libtorchWheels(t)
	i := installer{cache: t.TempDir(), log: io.Discard}
	target := wheels(lockText).folder(i.cache, "2.11.0")
	if err := os.Mkdir(target+".lock", 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := i.install(t.Context(), lockText); err == nil {
		t.Error("without a LibTorch: got no error, want one about the lock")
	}
	writeFile(t, filepath.Join(target, stamp), "")
	if torch, err := i.install(t.Context(), lockText); err != nil || torch != filepath.Join(target, "torch") {
		t.Errorf("got %s, %v; want %s/torch", torch, err, target)
	}
	// Files that a killed set-up has left must be removed, under the lock.
	writeFile(t, filepath.Join(target+".wheels", "a.whl"), "")
	if _, err := i.install(t.Context(), lockText); err == nil {
		t.Error("with wheels of a killed set-up: got no error, want one about the lock")
	}
}

// The folder of find-links may be relative, and have symbolic links to wheels elsewhere.
func TestWheelsFromLinksInARelativeFolder(t *testing.T) {
	files, lockText := libtorchWheels(t)
	parent := t.TempDir()
	if err := os.Mkdir(filepath.Join(parent, "links"), 0o777); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		name = filepath.Base(name)
		writeFile(t, filepath.Join(parent, "wheels", name), string(text))
		if err := os.Symlink(filepath.Join("..", "wheels", name), filepath.Join(parent, "links", name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(parent)
	i := installer{cache: t.TempDir(), from: index{files: []string{"links"}}, log: io.Discard}
	if _, err := i.install(t.Context(), lockText); err != nil {
		t.Errorf("got %v, want an installed LibTorch", err)
	}
}

// An earlier version stored wheels under the names that pip gives them. If a killed set-up of that
// version has left such a wheel, it is used.
func TestWheelOfAnEarlierSetupIsUsed(t *testing.T) {
	files, lockText := libtorchWheels(t)
	i := installer{cache: t.TempDir(), log: io.Discard} // no index
	target := wheels(lockText).folder(i.cache, "2.11.0")
	for name, text := range files {
		writeFile(t, filepath.Join(target+".wheels", filepath.Base(name)), string(text))
	}
	if _, err := i.install(t.Context(), lockText); err != nil {
		t.Error(err)
	}
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
		t.Fatal(err)
	}
}

// fakeLibTorch writes a LibTorch of the given version into a folder. If cuda is set, it also writes
// the files of CUDA.
func fakeLibTorch(t *testing.T, torch, version string, cuda bool) {
	t.Helper()
	numbers := strings.Split(version, ".")
	writeFile(t, filepath.Join(torch, "include/torch/headeronly/version.h"),
		"#define TORCH_VERSION_MAJOR "+numbers[0]+"\n#define TORCH_VERSION_MINOR "+numbers[1]+
			"\n#define TORCH_VERSION_PATCH "+numbers[2]+"\n")
	writeFile(t, filepath.Join(torch, "version.py"), "__version__ = '"+version+"'\n")
	writeFile(t, filepath.Join(torch, "lib/libtorch_cpu.so"), "")
	if cuda {
		writeFile(t, filepath.Join(torch, "lib/libtorch_cuda.so"), "")
	}
}

// fakeToolkit writes a CUDA toolkit.
func fakeToolkit(t *testing.T, cuda, version string) {
	t.Helper()
	writeFile(t, filepath.Join(cuda, "bin/nvcc"), "")
	writeFile(t, filepath.Join(cuda, "include/cuda_runtime_api.h"), "#define CUDART_VERSION  "+version+"\n")
	writeFile(t, filepath.Join(cuda, "lib/libcudart.so.13"), "")
}

// settings runs libtorch.sh and returns the settings that it writes, or its message.
func settings(t *testing.T, file string, environment ...string) (text string, ok bool) {
	t.Helper()
	c := exec.Command("../../cshim/setup/libtorch.sh", file)
	c.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=/nowhere"}, environment...)
	if out, err := c.CombinedOutput(); err != nil {
		return string(out), false
	}
	return read(t, file), true
}

// LIBTORCH may be the site-packages, the torch folder or an unpacked zip. The function LibTorch and
// the build's script libtorch.sh find the same folder.
func TestLIBTORCHHasThreeForms(t *testing.T) {
	site, zip, cpu := t.TempDir(), filepath.Join(t.TempDir(), "libtorch"), t.TempDir()
	fakeLibTorch(t, filepath.Join(site, "torch"), "2.11.0", true)
	fakeToolkit(t, filepath.Join(site, "nvidia/cu13"), "13000")
	writeFile(t, filepath.Join(site, "nvidia/nccl/lib/libnccl.so.2"), "")
	fakeLibTorch(t, zip, "2.13.1", true)
	writeFile(t, filepath.Join(zip, "lib/libcudart-abc.so.13"), "")
	home := t.TempDir()
	fakeToolkit(t, home, "13020")
	fakeLibTorch(t, filepath.Join(cpu, "torch"), "2.15.0", false)
	for _, c := range []struct {
		name, libtorch, site string
		want                 []string
	}{
		{"site-packages", site, site,
			[]string{`TS_TORCH "` + site + `/torch"`, `TS_LIBTORCH_VERSION "2.11.0"`,
				`TS_CUDA "` + site + `/nvidia/cu13"`, `TS_CUDART "` + site + `/nvidia/cu13/lib/libcudart.so.13"`,
				`TS_LIBRARY_PATH "` + site + "/torch/lib;" + site + "/nvidia/cu13/lib;" + site + `/nvidia/nccl/lib"`}},
		{"the torch folder", site + "/torch", site,
			[]string{`TS_SITE "` + site + `"`, `TS_TORCH "` + site + `/torch"`}},
		{"a zip", zip + "/", filepath.Dir(zip),
			[]string{`TS_TORCH "` + zip + `"`, `TS_CUDA "` + home + `"`,
				`TS_CUDART "` + zip + `/lib/libcudart-abc.so.13"`}},
		{"without CUDA", cpu, cpu, []string{`TS_CUDA ""`, `TS_CUDART ""`, `TS_LIBRARY_PATH "` + cpu + `/torch/lib"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := LibTorch(t.Context(), Options{LibTorch: c.libtorch})
			if err != nil || got != c.site {
				t.Errorf("got %s, %v, want %s", got, err, c.site)
			}
			text, ok := settings(t, filepath.Join(t.TempDir(), "build", "libtorch.cmake"),
				"LIBTORCH="+c.libtorch, "CUDA_HOME="+home)
			for _, want := range c.want {
				if !ok || !strings.Contains(text, "set("+want+` CACHE STRING "" FORCE)`) {
					t.Errorf("got %s, want %s in it", text, want)
				}
			}
		})
	}
}

// An unusable LIBTORCH is an error that says what to do. The build and the set-up report the same
// error.
func TestUnusableLIBTORCHIsAnError(t *testing.T) {
	old, newer, lacks, bad := t.TempDir(), t.TempDir(), t.TempDir(), t.TempDir()
	fakeLibTorch(t, filepath.Join(old, "torch"), "2.9.1", false)
	fakeLibTorch(t, filepath.Join(newer, "torch"), "2.16.0", false)
	fakeLibTorch(t, filepath.Join(lacks, "torch"), "2.11.0", true)
	fakeLibTorch(t, filepath.Join(bad, "torch"), "2.11.0", true)
	fakeToolkit(t, filepath.Join(bad, "nvidia/cu13"), "12080")
	const versions = ", torchstream needs 2.11 to 2.15: point LIBTORCH at one, or unset LIBTORCH to have " +
		"one installed (TORCHSTREAM_LIBTORCH=2.11 or 2.15 or 2.11-cpu)"
	for _, c := range []struct {
		libtorch, want string
		build          bool // only the build reports the error
	}{
		{"/nope", "LIBTORCH=/nope: no such folder: " + wanted, false},
		{"/etc/passwd", "LIBTORCH=/etc/passwd: no such folder: " + wanted, false},
		{"/", "LIBTORCH=/: neither torch/lib/libtorch_cpu.so nor lib/libtorch_cpu.so is in it: " + wanted, false},
		{"/a folder", `LIBTORCH=/a folder: compiler and linker flags cannot carry a path with spaces or any of : ; ' " $ \ #; ` +
			`use a path without them (a symbolic link to it will do)`, false},
		{old, "LIBTORCH=" + old + " is LibTorch 2.9.1" + versions, false},
		{newer, "LIBTORCH=" + newer + " is LibTorch 2.16.0" + versions, false},
		{bad, bad + "/nvidia/cu13 is CUDA 12080, LIBTORCH=" + bad +
			" was built with CUDA 13: set CUDA_HOME to a CUDA 13 toolkit", true},
	} {
		_, err := LibTorch(t.Context(), Options{LibTorch: c.libtorch})
		if !c.build && (err == nil || err.Error() != c.want) {
			t.Errorf("got %v, want %s", err, c.want)
		}
		text, ok := settings(t, filepath.Join(t.TempDir(), "libtorch.cmake"), "LIBTORCH="+c.libtorch)
		if ok || !strings.HasSuffix(text, "libtorch: error: "+c.want+"\n") {
			t.Errorf("libtorch.sh: got %s, want %s", text, c.want)
		}
	}
}

// libtorch.sh removes CMake's cache only if the settings have changed.
func TestChangedLibTorchRemovesTheCMakeCache(t *testing.T) {
	first, second, build := t.TempDir(), t.TempDir(), t.TempDir()
	fakeLibTorch(t, first, "2.11.0", false)
	fakeLibTorch(t, second, "2.11.0", false)
	cache := filepath.Join(build, "CMakeCache.txt")
	for i, c := range []struct {
		libtorch string
		kept     bool
	}{{first, false}, {first, true}, {second, false}} {
		writeFile(t, cache, "")
		if text, ok := settings(t, filepath.Join(build, "libtorch.cmake"), "LIBTORCH="+c.libtorch); !ok {
			t.Fatal(text)
		}
		if _, err := os.Stat(cache); (err == nil) != c.kept {
			t.Errorf("call %d: got %v of the CMake cache, want it kept: %v", i, err, c.kept)
		}
	}
}

// Without Go and LIBTORCH, the message says that one of them is needed.
func TestBuildWithoutGoNeedsLIBTORCH(t *testing.T) {
	path := t.TempDir()
	for _, tool := range []string{"bash", "env", "sed", "sort", "cut"} {
		at, err := exec.LookPath(tool)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(at, filepath.Join(path, tool)); err != nil {
			t.Fatal(err)
		}
	}
	text, ok := settings(t, filepath.Join(t.TempDir(), "libtorch.cmake"), "PATH="+path)
	if want := "libtorch: error: Go installs LibTorch, and is not in PATH: install Go 1.25 or newer, or " +
		"set LIBTORCH to an installed LibTorch\n"; ok || text != want {
		t.Errorf("got %s, want %s", text, want)
	}
}

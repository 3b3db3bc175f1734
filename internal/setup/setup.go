// Package setup installs the shim (this module's C++ library over LibTorch), the image library and
// LibTorch for a user's programs. Package library finds them there. It needs neither Python nor a
// clone of the module.
package setup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/cshim"
	"github.com/torchstream/torchstream/internal/library"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/system"
)

// Options are the options of Run.
type Options struct {
	From     string // release archive: a path, or an https or file URL; "" builds the libraries
	SHA256   string // checksum of the archive; "" reads it from the file or URL at From's path plus .sha256
	Image    bool   // only the image library, which needs no LibTorch
	LibTorch string // an installed LibTorch: site-packages, its torch folder, or an unpacked archive; "" installs one
	Release  string // LibTorch release to install for a build, such as "2.15" or "2.11-cpu"; "" is the default
	Cache    string // where to install: see library.Cache
	Version  string // version of the C headers
	Log      io.Writer
	// Try, if not nil, tests the libraries in a folder. Run calls it before it replaces installed
	// libraries.
	Try func(folder string) error
}

const (
	// DefaultRelease is the LibTorch release for a build that names none.
	DefaultRelease = "2.11"
	// WithoutCUDA is the suffix of releases without CUDA.
	WithoutCUDA = "-cpu"
)

// Run installs the libraries and returns their folder. An earlier installation is kept until the
// new one is complete and has passed Try.
func Run(ctx context.Context, o Options) (folder string, err error) {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return "", fmt.Errorf("torchstream runs on linux/amd64, and this is %s/%s", runtime.GOOS, runtime.GOARCH)
	}
	if o.From != "" && o.Release != "" {
		return "", errors.New("a release archive is for one LibTorch: name a LibTorch only for a build")
	}
	if err := os.MkdirAll(o.Cache, 0o777); err != nil {
		return "", fmt.Errorf("%w: set TORCHSTREAM_CACHE to a folder of your own", err)
	}
	target := library.Installed(o.Cache, o.Version)
	unlock, err := lock(target+".lock", o.Log)
	if err != nil {
		return "", err
	}
	defer unlock()
	if err := recoverOld(target); err != nil {
		return "", err
	}
	stage := target + ".new" // a killed set-up may have left it
	if err := os.RemoveAll(stage); err != nil {
		return "", err
	}
	defer os.RemoveAll(stage)
	if o.From != "" {
		err = o.release(ctx, stage)
	} else {
		err = o.build(ctx, stage)
	}
	if err != nil {
		return "", err
	}
	if o.Try != nil {
		if err := o.Try(filepath.Join(stage, "lib")); err != nil {
			return "", fmt.Errorf("the libraries are not installed, because they do not work: %w", err)
		}
	}
	if err := syncFiles(stage); err != nil {
		return "", err
	}
	if err := replace(stage, target); err != nil {
		return "", err
	}
	return filepath.Join(target, "lib"), nil
}

// lock takes an exclusive lock, which the kernel releases when the process ends.
func lock(path string, log io.Writer) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, err
	}
	if system.TryLock(f.Fd()) != nil {
		fmt.Fprintf(log, "setup: waiting for another set-up that holds %s\n", path)
		if err := system.Lock(f.Fd()); err != nil {
			f.Close()
			return nil, err
		}
	}
	return func() { f.Close() }, nil
}

// old is the temporary name of a folder while its successor replaces it.
func old(target string) string { return target + ".old" }

// recoverOld restores a folder that a killed set-up was about to replace.
func recoverOld(target string) error {
	if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Rename(old(target), target); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// replace replaces a folder with another one. Programs that have already opened libraries of the
// replaced folder can still use them.
func replace(stage, target string) error {
	old := old(target)
	if err := os.RemoveAll(old); err != nil {
		return err
	}
	if err := os.Rename(target, old); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Rename(stage, target); err != nil {
		return errors.Join(err, recoverOld(target))
	}
	return os.RemoveAll(old)
}

// syncFiles flushes the folder's file system to disk. After a crash of the machine, a folder with
// the final name and the stamp is then complete.
func syncFiles(folder string) error {
	f, err := os.Open(folder)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := syncFileSystem(f); err != nil {
		return fmt.Errorf("writing %s to the disk: %w", folder, err)
	}
	return nil
}

// release unpacks a release archive and links its shim to the LibTorch release for which the shim
// was built.
func (o Options) release(ctx context.Context, stage string) error {
	downloaded := stage + ".tar.gz" // only the holder of stage's lock writes it
	archive, err := o.fetch(ctx, downloaded)
	if err != nil {
		return err
	}
	if archive == downloaded {
		defer os.Remove(archive)
	}
	if err := unpack(archive, stage); err != nil {
		return fmt.Errorf("%s: %w", printable.URL(o.From), err)
	}
	names := []string{"libtorchstream_image.so", "libtorchstream.so"}
	if o.Image {
		names = names[:1]
	}
	for _, name := range names {
		if _, err := os.Stat(filepath.Join(stage, "lib", name)); err != nil {
			return fmt.Errorf("%s has no lib/%s: it is no release archive of torchstream", printable.URL(o.From), name)
		}
	}
	if o.Image {
		return nil
	}
	locks, err := filepath.Glob(filepath.Join(stage, "share", "torchstream", "libtorch-*.lock"))
	if err != nil {
		return err
	}
	if len(locks) != 1 {
		return fmt.Errorf("%s has %d files share/torchstream/libtorch-*.lock, and a release archive has one", printable.URL(o.From),
			len(locks))
	}
	text, err := os.ReadFile(locks[0])
	if err != nil {
		return err
	}
	site, err := o.libtorch(ctx, string(text))
	if err != nil {
		return err
	}
	return link(site, filepath.Join(stage, "lib", "libtorch"))
}

// libtorch returns the LibTorch folder. It is the folder in the options or, without one, the folder
// of a lock's wheels, which libtorch installs if necessary.
func (o Options) libtorch(ctx context.Context, lockText string) (string, error) {
	if o.LibTorch == "" {
		return installer{o.Cache, environmentIndex(), o.Log}.install(ctx, lockText)
	}
	folder, err := given(o.LibTorch)
	if err != nil {
		return "", err
	}
	if !hasCUDA(folder) && !wheels(lockText).cpu() {
		return "", fmt.Errorf("LIBTORCH=%s is a LibTorch without CUDA, and the shim of this archive is "+
			"for one with CUDA, which also runs on a CPU: unset LIBTORCH", o.LibTorch)
	}
	want, have := wheels(lockText).release(), library.LibTorchVersion(filepath.Join(folder, "lib", "libtorch_cpu.so"))
	if have != "" && !strings.HasPrefix(have+".", want+".") {
		return "", fmt.Errorf("LIBTORCH=%s is LibTorch %s, and LibTorch %s is wanted: point LIBTORCH at "+
			"one, or unset it", o.LibTorch, have, want)
	}
	return folder, nil
}

// link creates the folder at path, with links to LibTorch and to the CUDA libraries installed with
// LibTorch. The shim of a release looks for the libraries there. torch is LibTorch's own folder.
func link(torch, path string) error {
	if err := os.MkdirAll(path, 0o777); err != nil {
		return err
	}
	if err := os.Symlink(torch, filepath.Join(path, "torch")); err != nil {
		return err
	}
	nvidia := filepath.Join(filepath.Dir(torch), "nvidia")
	if _, err := os.Stat(nvidia); err != nil {
		return nil // an unpacked archive has CUDA in its lib folder
	}
	return os.Symlink(nvidia, filepath.Join(path, "nvidia"))
}

// build compiles the libraries from the sources embedded in the program.
func (o Options) build(ctx context.Context, stage string) error {
	lockText, err := lockOf(o.Release)
	if err != nil {
		return err
	}
	if err := usable("TORCHSTREAM_CACHE", o.Cache); err != nil {
		return err
	}
	if err := needs(); err != nil {
		return err
	}
	root := stage + ".src"
	if err := os.RemoveAll(root); err != nil {
		return err
	}
	defer os.RemoveAll(root)
	if err := writeSources(filepath.Join(root, "cshim")); err != nil {
		return err
	}
	args, components := []string{filepath.Join(root, "build"),
		"-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON"}, []string{"image"}
	environment := os.Environ()
	if o.Image {
		args = append([]string{"--image"}, args...)
	} else {
		torch := o.LibTorch // setup/libtorch.sh checks it
		if torch == "" {
			if torch, err = o.libtorch(ctx, lockText); err != nil {
				return err
			}
		}
		environment = append(environment, "LIBTORCH="+torch)
		components = append(components, "torchstream")
	}
	if err := o.command(ctx, environment, filepath.Join(root, "cshim", "setup", "shim.sh"), args...); err != nil {
		return err
	}
	for _, c := range components {
		if err := o.command(ctx, environment, "cmake", "--install", filepath.Join(root, "build"),
			"--prefix", stage, "--component", c, "--strip"); err != nil {
			return err
		}
	}
	return nil
}

func (o Options) command(ctx context.Context, environment []string, name string, args ...string) error {
	c := exec.CommandContext(ctx, name, args...)
	c.Env = environment
	c.Stdout, c.Stderr = o.Log, o.Log
	if err := c.Run(); err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(name), err)
	}
	return nil
}

// needs returns an error that names the system packages that a build lacks.
func needs() error {
	var missing []string
	for _, p := range [][2]string{{"g++", "g++"}, {"cmake", "cmake"}, {"ninja", "ninja-build"}} {
		if _, err := exec.LookPath(p[0]); err != nil {
			missing = append(missing, p[1])
		}
	}
	for _, p := range [][2]string{{"jpeglib.h", "libjpeg-dev"}, {"png.h", "libpng-dev"},
		{"webp/decode.h", "libwebp-dev"}, {"zlib.h", "zlib1g-dev"}} {
		if !slices.ContainsFunc([]string{"/usr/include", "/usr/include/x86_64-linux-gnu",
			"/usr/local/include"}, func(folder string) bool {
			_, err := os.Stat(path.Join(folder, p[0]))
			return err == nil
		}) {
			missing = append(missing, p[1])
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("building the libraries needs system packages: run `apt-get install -y "+
		"--no-install-recommends %s` as root, "+
		"or install a release archive with -from", strings.Join(missing, " "))
}

// writeSources writes the sources to a folder.
func writeSources(folder string) error {
	return fs.WalkDir(cshim.Sources, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		to := filepath.Join(folder, name)
		if d.IsDir() {
			return os.MkdirAll(to, 0o777)
		}
		text, err := cshim.Sources.ReadFile(name)
		if err != nil {
			return err
		}
		mode := fs.FileMode(0o666)
		if path.Dir(name) == "setup" {
			mode = 0o777
		}
		return os.WriteFile(to, text, mode)
	})
}

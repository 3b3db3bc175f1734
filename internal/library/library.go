// Package library finds torchstream's shared libraries for a process, and explains why one cannot
// be used. internal/imagecapi opens them.
package library

import (
	"cmp"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
)

// Module is the path of the Go module.
const Module = "github.com/torchstream/torchstream"

// Search has the folders in which a process looks for the libraries. Empty fields are skipped.
type Search struct {
	Library    string // the variable TORCHSTREAM_LIBRARY; if set, the only folder
	LoaderPath string // the variable LD_LIBRARY_PATH: folders separated by colons
	Program    string // the folder of the program; ../lib is searched too
	Clone      string // the folder of this module's source, if the program was built from a clone
	Installed  string // the folder where setup installs: see [Installed]
	Version    string // version of the module, for [Search.Setup]; "latest" if unknown
}

// Here returns the Search of this process. version is the version of the C headers.
func Here(version string) Search {
	s := Search{Library: os.Getenv("TORCHSTREAM_LIBRARY"), LoaderPath: os.Getenv("LD_LIBRARY_PATH"),
		Clone: clone(), Version: "latest"}
	if info, ok := debug.ReadBuildInfo(); ok {
		s.Version = moduleVersion(info)
	}
	if program, err := os.Executable(); err == nil {
		if program, err = filepath.EvalSymlinks(program); err == nil {
			s.Program = filepath.Dir(program)
		}
	}
	if cache, err := Cache(); err == nil {
		s.Installed = Installed(cache, version)
	}
	return s
}

// Cache returns the folder for everything installed once for each user: TORCHSTREAM_CACHE, or
// ~/.cache/torchstream.
func Cache() (string, error) {
	if folder := os.Getenv("TORCHSTREAM_CACHE"); folder != "" {
		return Absolute(folder)
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(home, ".cache", "torchstream"), nil
}

// Absolute returns the absolute path of a folder in an environment variable. It replaces a leading
// ~ by the user's home, as a shell does.
func Absolute(path string) (string, error) {
	if below, ok := strings.CutPrefix(path, "~/"); ok {
		home, err := os.UserHomeDir()
		return filepath.Join(home, below), err
	}
	return filepath.Abs(path)
}

// Installed returns the folder in the cache for the libraries of a version on this platform.
func Installed(cache, version string) string {
	return filepath.Join(cache, "shim-"+version+"-"+runtime.GOOS+"-"+runtime.GOARCH)
}

// clone returns the root of the source tree from which this package was compiled, or "" if it is
// not a clone on this machine. The compiler records the path of this file, except with -trimpath.
func clone() string {
	_, file, _, _ := runtime.Caller(0)
	root := filepath.Dir(filepath.Dir(filepath.Dir(file)))
	if !filepath.IsAbs(file) || !exists(filepath.Join(root, "Makefile")) || inModuleCache(root) {
		return ""
	}
	return root
}

// inModuleCache reports whether a folder is a downloaded module, where nobody builds. The last
// element of its path then ends with the version.
func inModuleCache(root string) bool { return strings.Contains(filepath.Base(root), "@v") }

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// moduleVersion returns this module's version in a program, or "latest" if no server has the source
// that the program was built from.
func moduleVersion(info *debug.BuildInfo) string {
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == Module && m.Replace == nil && strings.HasPrefix(m.Version, "v") &&
			!strings.Contains(m.Version, "+") {
			return m.Version
		}
	}
	return "latest"
}

// place is a folder and the reason for searching it.
type place struct{ folder, why string }

func (s Search) places() []place {
	if s.Library != "" {
		return []place{{s.Library, "TORCHSTREAM_LIBRARY"}}
	}
	var all []place
	for _, folder := range strings.Split(s.LoaderPath, ":") {
		if folder != "" {
			all = append(all, place{folder, "LD_LIBRARY_PATH"})
		}
	}
	if s.Program != "" {
		all = append(all, place{s.Program, "beside the program"},
			place{filepath.Join(filepath.Dir(s.Program), "lib"), "../lib of the program"})
	}
	if s.Clone != "" {
		all = append(all, place{filepath.Join(s.Clone, "cshim", "build", "lib"), "the clone"})
	}
	if s.Installed != "" {
		all = append(all, place{filepath.Join(s.Installed, "lib"), "the cache"})
	}
	return all
}

// Find returns the path of a library, or "" if it is in no folder. Then the dynamic loader may
// still find it in another folder, unless TORCHSTREAM_LIBRARY is set.
func (s Search) Find(name string) string {
	for _, p := range s.places() {
		if path := filepath.Join(p.folder, name); exists(path) {
			if path, err := filepath.Abs(path); err == nil {
				return path
			}
		}
	}
	return ""
}

// Setup returns the command that installs a library where the process finds it.
func (s Search) Setup(name string) string {
	if s.Clone == "" {
		return "go run " + Module + "/cmd/torchstream@" + cmp.Or(s.Version, "latest") + " setup"
	}
	target := "shim"
	switch {
	case strings.Contains(name, "_image"):
		target = "image"
	case strings.Contains(name, "_lab"): // exists only in a clone
		target = "lab"
	}
	return "make -C " + s.Clone + " " + target
}

package library

import (
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// The functions below return messages that state what was found, what is required, and the command
// that fixes it.

// CannotCall explains that a program for this platform was built without the C code that calls the
// libraries, and says what to do.
func CannotCall(goos, goarch string) string {
	if goos != "linux" {
		return fmt.Sprintf("torchstream's libraries run on Linux on x86-64, and this program was built for %s/%s, where it "+
			"compiles but cannot call them: run it on Linux, for example in a container", goos, goarch)
	}
	return fmt.Sprintf("this program was built for linux/%s without cgo, which calls torchstream's libraries: install a C "+
		"compiler (apt-get install gcc libc6-dev, or dnf install gcc), and build it with CGO_ENABLED=1", goarch)
}

// Missing explains that the library is in no folder. It has a line for each folder, and a last
// line with advice.
func (s Search) Missing(name string) string {
	var searched []string
	for _, p := range s.places() {
		where := p.folder + " (" + p.why + ")"
		if len(searched) == 0 || searched[len(searched)-1] != where {
			searched = append(searched, where)
		}
	}
	if s.Library != "" {
		elsewhere := s
		elsewhere.Library = ""
		if path := elsewhere.Find(name); path != "" {
			return fmt.Sprintf("there is no %s in %s: unset the variable, and %s is used", name, searched[0], path)
		}
		return fmt.Sprintf("there is no %s in %s: unset the variable, and %s", name, searched[0], s.install(name))
	}
	return fmt.Sprintf("there is no %s in any of\n  %s\n%s, or set TORCHSTREAM_LIBRARY to the libraries' folder", name,
		strings.Join(searched, "\n  "), s.install(name))
}

// install returns the command to run if the library is in no folder. The command for all of
// torchstream is first, because a program with a loader opens the image library first.
func (s Search) install(name string) string {
	run := "run `" + s.Setup("libtorchstream.so") + "`"
	if own := s.Setup(name); "run `"+own+"`" != run {
		run += " (`" + own + "` for the loader alone, without LibTorch)"
	}
	return run
}

// OtherVersion explains that the library at path has another ABI version than the program needs.
func (s Search) OtherVersion(path string, have, want int) string {
	age := "an older"
	if have > want {
		age = "a newer"
	}
	return fmt.Sprintf("%s is of %s version of torchstream than the program: its ABI version is %d, and "+
		"the program needs %d: run `%s`",
		path, age, have, want, s.Setup(filepath.Base(path)))
}

// Lacks explains that the library at path does not have a function that the program needs.
func (s Search) Lacks(path, function string) string {
	return fmt.Sprintf("%s has no function %s, so it is of an older version of torchstream than the "+
		"program, or another library: run `%s`",
		path, function, s.Setup(filepath.Base(path)))
}

// OtherLibTorch explains that the process has another LibTorch than the library at path was built
// for. It returns "" if the first two numbers of their versions agree, or if the version of the
// loaded LibTorch is unknown.
func (s Search) OtherLibTorch(path, built string) string {
	loaded := Mapped()["libtorch_cpu.so"]
	have := LibTorchVersion(loaded)
	if have == "" || release(have) == release(built) {
		return ""
	}
	return s.otherLibTorch(path, built, loaded, have)
}

func (s Search) otherLibTorch(path, built, loaded, have string) string {
	if built == "" {
		built = "of another version"
	}
	return fmt.Sprintf("%s was built for LibTorch %s, and %s is LibTorch %s: run `%s`, with LIBTORCH= "+
		"and LD_LIBRARY_PATH= unset or of that version",
		path, built, loaded, have, s.Setup(filepath.Base(path)))
}

// release returns the first two numbers of a version.
func release(version string) string {
	parts := strings.SplitN(version, ".", 3)
	return strings.Join(parts[:min(2, len(parts))], ".")
}

var (
	cannotOpen = regexp.MustCompile(`^(\S+): cannot open shared object file`)
	oldSystem  = regexp.MustCompile("version [`']((?:GLIBC|GLIBCXX|CXXABI)_[0-9.]+)' not found")
)

// Unusable explains why the dynamic loader refused the library at path. why is the loader's
// message.
func (s Search) Unusable(path, why string) string {
	setup := s.Setup(filepath.Base(path))
	if m := cannotOpen.FindStringSubmatch(why); m != nil {
		if filepath.Base(m[1]) == filepath.Base(path) {
			return fmt.Sprintf("%s: run `%s`", why, setup)
		}
		return fmt.Sprintf("%s needs %s%s, which is neither in the system's folders nor in %q: run `%s`, "+
			"or name its folder in LD_LIBRARY_PATH",
			path, m[1], owner(m[1]), s.runPath(path), setup)
	}
	if m := oldSystem.FindStringSubmatch(why); m != nil {
		return fmt.Sprintf("%s: this system is older than the one that the library was built on, which "+
			"has %s: build it here with `%s`",
			why, m[1], setup)
	}
	if strings.Contains(why, "undefined symbol") {
		for _, folder := range s.runPath(path) {
			torch := filepath.Join(folder, "libtorch_cpu.so")
			if have := LibTorchVersion(torch); have != "" {
				return s.otherLibTorch(path, "", torch, have) + " (" + why + ")"
			}
		}
	}
	return fmt.Sprintf("%s: run `%s`", why, setup)
}

// owner returns a phrase for the product that a library belongs to.
func owner(name string) string {
	switch {
	case strings.HasPrefix(name, "libtorchstream"):
		return ""
	case strings.HasPrefix(name, "libtorch"), strings.HasPrefix(name, "libc10"), strings.HasPrefix(name, "libgomp-"):
		return " of LibTorch"
	case strings.HasPrefix(name, "libcu"), strings.HasPrefix(name, "libnv"), strings.HasPrefix(name, "libnccl"):
		return " of CUDA"
	}
	return ""
}

// runPath returns the folders in which the dynamic loader looks for the dependencies of the library
// at path, before the system's folders.
func (s Search) runPath(path string) []string {
	all := strings.Split(s.LoaderPath, ":")
	f, err := elf.Open(path)
	if err != nil {
		return nonEmpty(all)
	}
	defer f.Close()
	for _, tag := range []elf.DynTag{elf.DT_RUNPATH, elf.DT_RPATH} {
		if values, err := f.DynString(tag); err == nil && len(values) > 0 {
			origin := strings.NewReplacer("$ORIGIN", filepath.Dir(path), "${ORIGIN}", filepath.Dir(path))
			for _, v := range values {
				all = append(all, strings.Split(origin.Replace(v), ":")...)
			}
			break
		}
	}
	return nonEmpty(all)
}

func nonEmpty(list []string) []string {
	var out []string
	for _, s := range list {
		if s != "" {
			out = append(out, s)
		}
	}
	return out
}

var wheelVersion = regexp.MustCompile(`(?m)^__version__ = '([0-9.]+)`)

// LibTorchVersion returns the version of the LibTorch whose libtorch_cpu.so is at path, for example
// "2.11.0". It reads the version from files next to the library, and returns "" if there are none.
func LibTorchVersion(path string) string {
	root := filepath.Dir(filepath.Dir(path))
	if path == "" || !exists(path) {
		return ""
	}
	if text, err := os.ReadFile(filepath.Join(root, "version.py")); err == nil { // in a wheel
		if m := wheelVersion.FindSubmatch(text); m != nil {
			return string(m[1])
		}
	}
	if text, err := os.ReadFile(filepath.Join(root, "build-version")); err == nil { // in an archive without Python
		version, _, _ := strings.Cut(strings.TrimSpace(string(text)), "+")
		return version
	}
	return ""
}

// Mapped returns the paths of the process's shared libraries by name without version, such as
// "libcuda.so".
func Mapped() map[string]string {
	out := map[string]string{}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return out // no such file system
	}
	for line := range strings.SplitSeq(string(maps), "\n") {
		if i := strings.IndexByte(line, '/'); i >= 0 {
			path := line[i:]
			if name, _, ok := strings.Cut(filepath.Base(path), ".so"); ok {
				out[name+".so"] = path
			}
		}
	}
	return out
}

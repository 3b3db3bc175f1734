package machine

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// libraries are the libraries that a clone builds, the make targets that build them, and the files
// and folders of cshim/ that they are built from.
var libraries = []struct {
	what, file, target string
	sources            []string
}{
	{"build of the image library", "libtorchstream_image.so", "image",
		[]string{"CMakeLists.txt", "include/torchstream_image.h", "src/image", "src/jpeg", "src/deflate", "src/base"}},
	{"build of the shim", "libtorchstream.so", "shim",
		[]string{"CMakeLists.txt", "include", "src/base", "src/cuda", "src/torch", "src/decode", "src/jpeg",
			"src/deflate",
			"src/distributed", "src/nocuda"}},
}

// Builds returns a finding for each library in the build folder of the clone at root, and, if
// absent is true, for each that is not there.
func Builds(root string, absent bool) []Finding {
	build := filepath.Join(root, "cshim", "build")
	var found []Finding
	for _, l := range libraries {
		what, make := l.what, "`make "+l.target+"`"
		path := filepath.Join(build, "lib", l.file)
		info, err := os.Stat(path)
		if err != nil {
			if absent {
				found = append(found, Finding{Missing, what, "not built", make})
			}
			continue
		}
		sources := l.sources
		if l.target == "image" {
			sources = append(sources[:len(sources):len(sources)], imageHeaders(root)...)
		}
		home := configuredFor(build)
		newer := newerSources(filepath.Join(root, "cshim"), sources, info.ModTime())
		f := Finding{OK, what, path, ""}
		switch {
		case home != "" && !same(home, filepath.Join(root, "cshim")):
			f = Finding{Missing, what, build + " was configured for " + home + ", the sources of another clone", make}
		case len(newer) > 0:
			f = Finding{Note, what, fmt.Sprintf("older than %d of its sources, such as %s", len(newer), newer[0]), make}
		case home == "":
			f = Finding{Note, what, path + ", built elsewhere: there is no CMakeCache.txt",
				make + " builds this clone's own"}
		}
		found = append(found, f)
	}
	return found
}

var included = regexp.MustCompile(`(?m)^#include "(torchstream/.*)"$`)

// imageHeaders returns the headers that the image library's header includes.
func imageHeaders(root string) []string {
	text, err := os.ReadFile(filepath.Join(root, "cshim", "include", "torchstream_image.h"))
	if err != nil {
		return nil // not a whole clone
	}
	var headers []string
	for _, m := range included.FindAllSubmatch(text, -1) {
		headers = append(headers, filepath.Join("include", string(m[1])))
	}
	return headers
}

// configuredFor returns the source folder that a build folder is configured for, or "".
func configuredFor(build string) string {
	text, err := os.ReadFile(filepath.Join(build, "CMakeCache.txt"))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if home, ok := strings.CutPrefix(line, "CMAKE_HOME_DIRECTORY:INTERNAL="); ok {
			return strings.TrimSpace(home)
		}
	}
	return ""
}

// same reports whether two paths are the same folder.
func same(a, b string) bool {
	infoA, errA := os.Stat(a)
	infoB, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(infoA, infoB)
}

// newerSources returns the files in the given files and folders below cshim that are newer than
// built, as paths from cshim's parent.
func newerSources(cshim string, sources []string, built time.Time) []string {
	var newer []string
	for _, source := range sources {
		// Skip files that cannot be read: the compiler reports them.
		_ = filepath.WalkDir(filepath.Join(cshim, source), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return nil
			}
			if info, err := d.Info(); err == nil && info.ModTime().After(built) {
				newer = append(newer, strings.TrimPrefix(path, filepath.Dir(cshim)+"/"))
			}
			return nil
		})
	}
	return newer
}

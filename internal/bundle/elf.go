package bundle

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// object is a program or library as the dynamic loader sees it.
type object struct {
	path, dir   string // absolute, without symbolic links
	size        int64
	needed      []string
	runPath     []string // as written in the file, with $ORIGIN
	inherited   bool     // DT_RPATH, the older form, which also applies to the object's dependencies
	interpreter bool
}

func open(path string) (*object, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, err
	}
	if real, err = filepath.Abs(real); err != nil {
		return nil, err
	}
	info, err := os.Stat(real)
	if err != nil {
		return nil, err
	}
	f, err := elf.Open(real)
	if err != nil {
		return nil, fmt.Errorf("%s is no program or library of Linux: %w", path, err)
	}
	defer f.Close()
	if err := isLibrary(f); err != nil {
		return nil, fmt.Errorf("%s is no program or library of Linux on x86-64: %w", path, err)
	}
	o := &object{path: real, dir: filepath.Dir(real), size: info.Size()}
	o.interpreter = slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP })
	if o.needed, err = f.ImportedLibraries(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for _, tag := range []elf.DynTag{elf.DT_RUNPATH, elf.DT_RPATH} {
		values, err := f.DynString(tag)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if len(values) > 0 {
			o.runPath, o.inherited = strings.Split(strings.Join(values, ":"), ":"), tag == elf.DT_RPATH
			break
		}
	}
	return o, nil
}

// folders returns the folders of the run path.
func (o *object) folders() []string {
	var all []string
	for _, folder := range o.runPath {
		if folder != "" {
			all = append(all, filepath.Clean(strings.NewReplacer("$ORIGIN", o.dir, "${ORIGIN}", o.dir).Replace(folder)))
		}
	}
	return all
}

// systemFolders are searched after the run path. Distributions list other folders in the loader's
// cache, but those have no libraries that LibTorch needs.
var systemFolders = []string{
	"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib",
}

// find returns the file that the dynamic loader would load for name, or "".
func find(name string, of *object) string {
	folders := of.folders()
	for folder := range strings.SplitSeq(os.Getenv("LD_LIBRARY_PATH"), ":") {
		if folder != "" {
			folders = append(folders, folder)
		}
	}
	for _, folder := range append(folders, systemFolders...) {
		if path := filepath.Join(folder, name); exists(path) {
			return path
		}
	}
	return ""
}

// system reports whether a library must be the target machine's own: part of glibc, which works
// only with its own loader, or of the driver, which must match the kernel module.
func system(name string) bool {
	base, _, _ := strings.Cut(name, ".so")
	switch base {
	case "ld-linux-x86-64", "libc", "libm", "libmvec", "libdl", "libpthread", "librt", "libutil",
		"libresolv", "libanl", "libnsl",
		"libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler":
		return true
	}
	return false
}

// check resolves the objects of a bundle in order, as the dynamic loader would, and returns an
// error if a library would not be found in the bundle. All objects are in one process, where each
// loaded library serves all objects that need its name.
func check(out string, roots []string) error {
	loaded := map[string]bool{}
	for _, root := range roots {
		type entry struct {
			path      string
			inherited []string
		}
		queue := []entry{{path: filepath.Join(out, root)}}
		loaded[filepath.Base(root)] = true
		for len(queue) > 0 {
			next := queue[0]
			queue = queue[1:]
			o, err := open(next.path)
			if err != nil {
				return err
			}
			own := o.folders()
			search := slices.Clone(own)
			if o.inherited || len(own) == 0 {
				search = append(search, next.inherited...)
			}
			var passed []string
			if o.inherited {
				passed = search
			} else {
				passed = next.inherited
			}
			for _, name := range o.needed {
				if loaded[name] || system(name) {
					continue
				}
				path := ""
				for _, folder := range search {
					if _, inside := under(out, folder); inside && exists(filepath.Join(folder, name)) {
						path = filepath.Join(folder, name)
						break
					}
				}
				if path == "" {
					where, _ := under(out, next.path)
					return fmt.Errorf("the bundle would not work: %s needs %s, and looks for it in %s",
						where, name, strings.Join(o.runPath, ":"))
				}
				loaded[name] = true
				queue = append(queue, entry{path, passed})
			}
		}
	}
	return nil
}

// relativeRunPath removes this machine's folders from a library's run path.
func relativeRunPath(path string) error {
	o, err := open(path)
	if err != nil {
		return err
	}
	var relative []string
	for _, folder := range o.runPath {
		if strings.HasPrefix(folder, "$ORIGIN") {
			relative = append(relative, folder)
		}
	}
	if len(relative) == 0 {
		return fmt.Errorf("%s was built by an older version of torchstream, whose libraries cannot be "+
			"moved: build it again with `make shim`", filepath.Base(path))
	}
	if len(relative) == len(o.runPath) {
		return nil
	}
	return setRunPath(path, strings.Join(relative, ":"))
}

// setRunPath overwrites the run path of a program or library with a shorter one.
func setRunPath(path, value string) error {
	f, err := elf.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	old, at, err := runPathText(f)
	if err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(path), err)
	}
	if old == value {
		return nil
	}
	if len(old) < len(value) {
		return fmt.Errorf("the run path of %s (%q) is too short to become %q: link the program with "+
			"-ldflags '-extldflags \"-Wl,-rpath,%s\"'",
			filepath.Base(path), old, value, value)
	}
	names, err := dynamicNames(f)
	if err != nil {
		return err
	}
	w, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_, err = w.WriteAt(append([]byte(value), make([]byte, len(old)-len(value))...), at)
	if err := errors.Join(err, w.Close()); err != nil {
		return err
	}
	// The linker may let one string share the end of another, so check that no other name has
	// changed.
	changed, err := elf.Open(path)
	if err != nil {
		return err
	}
	defer changed.Close()
	now, err := dynamicNames(changed)
	if err != nil {
		return err
	}
	if text, _, err := runPathText(changed); err != nil || text != value || !slices.Equal(names, now) {
		return fmt.Errorf("%s: its run path cannot be changed, because it shares its text with a symbol: "+
			"link the program with -ldflags '-extldflags \"-Wl,-rpath,%s\"'",
			filepath.Base(path), value)
	}
	return nil
}

// runPathText returns the run path of an object and its offset in the file. Without a run path the
// text is empty.
func runPathText(f *elf.File) (text string, at int64, err error) {
	for _, tag := range []elf.DynTag{elf.DT_RUNPATH, elf.DT_RPATH} {
		values, err := f.DynString(tag)
		if err != nil {
			return "", 0, err
		}
		offsets, err := f.DynValue(tag)
		if err != nil {
			return "", 0, err
		}
		switch {
		case len(values) == 0:
			continue
		case len(values) > 1 || len(offsets) > 1:
			return "", 0, errors.New("it has several run paths")
		}
		strtab := f.Section(".dynstr")
		if strtab == nil {
			return "", 0, errors.New("it has no .dynstr")
		}
		return values[0], int64(strtab.Offset + offsets[0]), nil
	}
	return "", 0, nil
}

// dynamicNames returns all names that the dynamic loader reads, except the run path.
func dynamicNames(f *elf.File) ([]string, error) {
	names, err := f.ImportedLibraries()
	if err != nil {
		return nil, err
	}
	soname, err := f.DynString(elf.DT_SONAME)
	if err != nil {
		return nil, err
	}
	names = append(names, soname...)
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return nil, err
	}
	for _, s := range symbols {
		names = append(names, s.Name, s.Version, s.Library)
	}
	return names, nil
}

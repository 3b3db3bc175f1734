// Package bundle copies a program and the shared libraries that it loads into a folder that works
// on another machine. That machine needs glibc and, for GPUs, the driver.
//
// The folder is laid out as
//
//	bin/PROGRAM
//	lib/libtorchstream.so, libtorchstream_image.so, the C++ runtime
//	lib/libtorch/torch/lib/..., lib/libtorch/nvidia/...   LibTorch as it was installed
//	share/licenses/PACKAGE/...                            of LibTorch's packages, and of the shim if
//	                                                      it comes from a release archive
//
// Libraries find each other by run paths that start with $ORIGIN. Make resolves them as the dynamic
// loader would, and fails if the bundle is incomplete.
package bundle

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// The file names of this module's shared libraries.
const (
	shimName  = "libtorchstream.so"
	imageName = "libtorchstream_image.so"
)

// Options are the options of Make.
type Options struct {
	Program string // a Linux x86-64 program that uses this module or its libraries
	Out     string // a folder that does not exist or is empty
	// Find returns the path of libtorchstream.so or libtorchstream_image.so, or "". Make calls it
	// only for a library that the program opens on first use, not for a linked one.
	Find func(name string) string
}

// File is a file of a bundle.
type File struct {
	Path  string `json:"path"` // path in the bundle
	Bytes int64  `json:"bytes"`
	For   string `json:"for"` // "needed by NAME" or "opened by NAME"

	source string
	dir    string // destination folder in the bundle
}

// Report lists the contents of a bundle, and the parts of LibTorch that it omits.
type Report struct {
	Out          string `json:"out"`
	Files        []File `json:"files"` // in the order in which the dynamic loader finds them
	Bytes        int64  `json:"bytes"` // size of the whole bundle, including licences
	LeftOut      []File `json:"left_out"`
	LeftOutBytes int64  `json:"left_out_bytes"`
}

// Make writes the bundle. It leaves nothing behind if it fails or ctx ends.
func Make(ctx context.Context, o Options) (*Report, error) {
	if err := free(o.Out); err != nil {
		return nil, err
	}
	p, err := newPlan(o)
	if err != nil {
		return nil, err
	}
	out, err := filepath.Abs(o.Out)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return nil, err
	}
	// The temporary folder has the same parent folder as the bundle, so a rename completes the
	// bundle.
	tmp, err := os.MkdirTemp(filepath.Dir(out), filepath.Base(out)+".tmp-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	if tmp, err = filepath.EvalSymlinks(tmp); err != nil {
		return nil, err
	}
	if err := p.write(ctx, tmp); err != nil {
		return nil, fmt.Errorf("bundle into %s: %w", out, err)
	}
	if err := check(tmp, p.roots()); err != nil {
		return nil, err
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return nil, err
	}
	if err := os.Remove(out); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err // the folder is no longer empty
	}
	if err := os.Rename(tmp, out); err != nil {
		return nil, err
	}
	return p.report(out)
}

// free returns an error if the folder is not empty.
func free(out string) error {
	entries, err := os.ReadDir(out)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case len(entries) > 0:
		return fmt.Errorf("%s is not empty: remove it, or name another folder", out)
	}
	return nil
}

// uses says which libraries of this module a program uses, and whether it is linked to them.
type uses struct{ shim, image, linked bool }

// usesOf inspects a program. Go keeps the names of functions even in a stripped program.
func usesOf(program string, object *object) (uses, error) {
	var u uses
	for _, name := range object.needed {
		u.shim = u.shim || name == shimName
		u.image = u.image || name == imageName
	}
	if u.linked = u.shim || u.image; u.linked {
		return u, nil
	}
	text, err := os.ReadFile(program)
	if err != nil {
		return u, err
	}
	const module = "github.com/torchstream/torchstream/internal/"
	u.shim = bytes.Contains(text, []byte(module+"capi."))
	u.image = u.shim || bytes.Contains(text, []byte(module+"imagecapi."))
	if !u.image {
		return u, fmt.Errorf("%s does not use torchstream: it is linked to no %s, and has no package of "+
			"github.com/torchstream/torchstream that uses it", program, imageName)
	}
	return u, nil
}

// plan lists the contents of a bundle before it is written.
type plan struct {
	program *object
	linked  bool
	start   []string // this module's libraries that are loaded first
	files   []File   // libraries
	objects map[string]*object
	torch   string // the folder of LibTorch's packages; "" if LibTorch is not used
}

func newPlan(o Options) (*plan, error) {
	program, err := open(o.Program)
	if err != nil {
		return nil, err
	}
	if !program.interpreter {
		return nil, fmt.Errorf("%s is no program with a dynamic loader: build it with CGO_ENABLED=1, for "+
			"Linux on x86-64", o.Program)
	}
	u, err := usesOf(o.Program, program)
	if err != nil {
		return nil, err
	}
	p := &plan{program: program, linked: u.linked, objects: map[string]*object{}}
	if u.linked {
		err = p.walk(program, "lib", "needed by ")
	} else {
		if u.image {
			p.start = append(p.start, imageName)
		}
		if u.shim {
			p.start = append(p.start, shimName)
		}
		for _, name := range p.start {
			path := ""
			if o.Find != nil {
				path = o.Find(name)
			}
			if path == "" {
				return nil, fmt.Errorf("there is no %s for %s: name its folder with -shim", name, o.Program)
			}
			if err = p.add(name, path, "lib", "opened by "+filepath.Base(o.Program)); err != nil {
				break
			}
		}
	}
	if err != nil {
		return nil, err
	}
	if err := p.opened(); err != nil {
		return nil, err
	}
	return p, nil
}

// add plans a library and its dependencies.
func (p *plan) add(name, path, dir, why string) error {
	if _, known := p.objects[name]; known {
		return nil
	}
	object, err := open(path)
	if err != nil {
		return err
	}
	if name == "libtorch_cpu.so" {
		p.torch = filepath.Dir(filepath.Dir(object.dir))
	}
	if inside, ok := under(p.torchFolder(object), object.path); ok {
		dir = filepath.Join("lib", "libtorch", filepath.Dir(inside))
	}
	p.objects[name] = object
	p.files = append(p.files, File{Path: filepath.Join(dir, name), For: why, Bytes: object.size,
		source: object.path, dir: dir})
	return p.walk(object, dir, "needed by ")
}

// torchFolder returns the folder of LibTorch's packages. Dependencies of libtorch_cpu.so may be
// looked up before libtorch_cpu.so itself; they are in the same folders.
func (p *plan) torchFolder(object *object) string {
	if p.torch != "" {
		return p.torch
	}
	for folder := object.dir; folder != "/" && folder != "."; folder = filepath.Dir(folder) {
		if exists(filepath.Join(folder, "torch", "lib", "libtorch_cpu.so")) {
			p.torch = folder
			return folder
		}
		if exists(filepath.Join(folder, "lib", "libtorch_cpu.so")) {
			p.torch = filepath.Dir(folder)
			return p.torch
		}
	}
	return ""
}

// walk plans the dependencies of a program or library. A library that is neither this module's nor
// LibTorch's is placed in the folder of the first object that needs it.
func (p *plan) walk(of *object, dir, why string) error {
	for _, name := range of.needed {
		if p.objects[name] != nil || system(name) {
			continue
		}
		path := find(name, of)
		if path == "" {
			return fmt.Errorf("%s needs %s, which is not in %s, in LD_LIBRARY_PATH or in the system's "+
				"folders: build the shim with `make shim`, or install what has it",
				of.path, name, strings.Join(of.folders(), ", "))
		}
		if err := p.add(name, path, dir, why+filepath.Base(of.path)); err != nil {
			return err
		}
	}
	return nil
}

// opens lists the libraries that a library opens by name when it needs them. All others are never
// opened on behalf of this module: other bootstraps and transports of nvshmem and cufile, compilers
// and profilers.
var opens = []struct{ by, pattern string }{
	{"libtorch_cuda.so", "libtorch_cuda_linalg.so"},
	{"libtorch_cuda.so", "libcaffe2_nvrtc.so"},
	{"libcudnn.so.*", "libcudnn_*.so.*"},
	{"libnvrtc.so.*", "libnvrtc-builtins.so.*"},
}

// opened plans the libraries that planned libraries open by name.
func (p *plan) opened() error {
	for i := 0; i < len(p.files); i++ { // p.files grows in the loop
		f := p.files[i]
		for _, o := range opens {
			if ok, _ := filepath.Match(o.by, filepath.Base(f.Path)); !ok {
				continue
			}
			found, err := filepath.Glob(filepath.Join(filepath.Dir(f.source), o.pattern))
			if err != nil {
				return err
			}
			for _, path := range found {
				if err := p.add(filepath.Base(path), path, f.dir, "opened by "+filepath.Base(f.Path)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// roots returns the objects where the check starts: the program, or the libraries that it opens,
// and then the libraries that other libraries open.
func (p *plan) roots() []string {
	var roots []string
	if p.linked {
		roots = append(roots, filepath.Join("bin", filepath.Base(p.program.path)))
	}
	for _, f := range p.files {
		if strings.HasPrefix(f.For, "opened by ") {
			roots = append(roots, f.Path)
		}
	}
	return roots
}

func (p *plan) write(ctx context.Context, out string) error {
	for _, f := range p.files {
		if err := copyFile(ctx, filepath.Join(out, f.Path), f.source); err != nil {
			return err
		}
		if name := filepath.Base(f.Path); name == shimName || name == imageName {
			if err := relativeRunPath(filepath.Join(out, f.Path)); err != nil {
				return err
			}
		}
	}
	program := filepath.Join(out, "bin", filepath.Base(p.program.path))
	if err := copyFile(ctx, program, p.program.path); err != nil {
		return err
	}
	if p.linked {
		if err := setRunPath(program, "$ORIGIN/../lib"); err != nil {
			return err
		}
	}
	return p.licences(ctx, out)
}

// licences copies the licences shipped with the shim, and the licences of all LibTorch packages
// that have a file in the bundle.
func (p *plan) licences(ctx context.Context, out string) error {
	if image := p.objects[imageName]; image != nil {
		own := filepath.Join(filepath.Dir(image.dir), "share", "licenses", "torchstream")
		if err := copyFiles(ctx, filepath.Join(out, "share", "licenses", "torchstream"), own,
			func(string) bool { return true }); err != nil {
			return err
		}
	}
	if p.torch == "" {
		return nil
	}
	records, err := filepath.Glob(filepath.Join(quote(p.torch), "*.dist-info", "RECORD"))
	if err != nil {
		return err
	}
	for _, record := range records {
		text, err := os.ReadFile(record)
		if err != nil {
			return err
		}
		if !p.has(string(text)) {
			continue
		}
		info := filepath.Dir(record)
		name := strings.TrimSuffix(filepath.Base(info), ".dist-info")
		err = copyFiles(ctx, filepath.Join(out, "share", "licenses", name), info, func(name string) bool {
			name = strings.ToUpper(name)
			return strings.HasPrefix(name, "LICENSE") || strings.HasPrefix(name, "NOTICE")
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// has reports whether a package with this file list has a file in the bundle.
func (p *plan) has(record string) bool {
	for line := range strings.Lines(record) {
		name, _, _ := strings.Cut(line, ",")
		if slices.ContainsFunc(p.files, func(f File) bool { return f.Path == filepath.Join("lib", "libtorch", name) }) {
			return true
		}
	}
	return false
}

// report measures the bundle and lists LibTorch's libraries that are not in it.
func (p *plan) report(out string) (*Report, error) {
	r := &Report{Out: out, Files: append([]File{{Path: filepath.Join("bin", filepath.Base(p.program.path)),
		Bytes: p.program.size, For: "the program"}}, p.files...)}
	err := filepath.WalkDir(out, func(_ string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			r.Bytes += info.Size()
		}
		return err
	})
	if err != nil || p.torch == "" {
		return r, err
	}
	for _, pattern := range []string{filepath.Join("torch", "lib", "*.so*"),
		filepath.Join("nvidia", "*", "lib", "*.so*")} {
		found, err := filepath.Glob(filepath.Join(quote(p.torch), pattern))
		if err != nil {
			return r, err
		}
		for _, path := range found {
			info, err := os.Lstat(path)
			if err != nil || !info.Mode().IsRegular() || p.objects[filepath.Base(path)] != nil {
				continue
			}
			inside, _ := under(p.torch, path)
			r.LeftOut = append(r.LeftOut, File{Path: inside, Bytes: info.Size()})
			r.LeftOutBytes += info.Size()
		}
	}
	return r, nil
}

// under returns the path of a file relative to a folder, and whether the file is in the folder.
func under(folder, path string) (string, bool) {
	if folder == "" {
		return "", false
	}
	inside, err := filepath.Rel(folder, path)
	return inside, err == nil && inside != ".." && !strings.HasPrefix(inside, "../")
}

// quote returns a pattern that matches only this path.
func quote(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// copyFiles copies the wanted files below a folder, with their folders. If the folder does not
// exist, it copies nothing.
func copyFiles(ctx context.Context, to, from string, wanted func(name string) bool) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && path == from {
			return nil
		}
		if err != nil || !entry.Type().IsRegular() || !wanted(entry.Name()) {
			return err
		}
		inside, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		return copyFile(ctx, filepath.Join(to, inside), path)
	})
}

func copyFile(ctx context.Context, to, from string) (err error) {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644|info.Mode()&0o111)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	// Copy in pieces, so that the end of ctx is noticed during a file of a gigabyte.
	for err == nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		_, err = io.CopyN(out, in, 32<<20)
	}
	if err == io.EOF {
		return nil
	}
	return err
}

// isLibrary returns an error unless the file is a library or program for this platform.
func isLibrary(f *elf.File) error {
	if f.Class != elf.ELFCLASS64 || f.Machine != elf.EM_X86_64 || f.Type != elf.ET_DYN && f.Type != elf.ET_EXEC {
		return fmt.Errorf("it is for %v, %v", f.Class, f.Machine)
	}
	return nil
}

package setup

import (
	"archive/tar"
	"archive/zip"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
)

// unpack extracts a .tar.gz into folder, without the archive's single top folder. It writes nothing
// outside of folder.
func unpack(archive, folder string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return fmt.Errorf("it is no .tar.gz: %w", err)
	}
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return err
	}
	root, err := os.OpenRoot(folder)
	if err != nil {
		return err
	}
	defer root.Close()
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		_, name, _ := strings.Cut(strings.TrimSuffix(strings.TrimPrefix(h.Name, "./"), "/"), "/")
		if name == "" {
			continue // the top folder itself
		}
		switch h.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(name, 0o777)
		case tar.TypeReg:
			err = write(root, name, r, h.FileInfo().Mode())
		case tar.TypeSymlink:
			err = root.Symlink(h.Linkname, name) // root never follows a link that leads outside
		default:
			err = fmt.Errorf("is of the kind %q, which no release archive has", h.Typeflag)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
	}
}

// write writes a file and creates the folders above it. A file that its owner may execute becomes
// executable for everyone, as with pip.
func write(root *os.Root, name string, from io.Reader, mode fs.FileMode) error {
	if err := root.MkdirAll(filepath.Dir(name), 0o777); err != nil {
		return err
	}
	permissions := fs.FileMode(0o666)
	if mode&0o111 != 0 {
		permissions = 0o777
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, permissions)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	return errors.Join(err, f.Close())
}

// unzip extracts a wheel into a folder, as pip does. It moves the files of the wheel's
// .data/purelib and .data/platlib folders to the top. It skips the other folders of .data, such as
// scripts, because no program of a wheel is run.
func unzip(wheel, folder string) error {
	z, err := zip.OpenReader(wheel)
	if err != nil {
		return err
	}
	defer z.Close()
	root, err := os.OpenRoot(folder)
	if err != nil {
		return err
	}
	defer root.Close()
	files := make(chan *zip.File)
	var wait sync.WaitGroup
	var mu sync.Mutex
	var failed error
	for range min(4, runtime.NumCPU()) {
		wait.Go(func() {
			for f := range files {
				if err := unzipFile(root, f); err != nil {
					mu.Lock()
					failed = errors.Join(failed, fmt.Errorf("%s: %w", f.Name, err))
					mu.Unlock()
				}
			}
		})
	}
	for _, f := range z.File {
		files <- f
	}
	close(files)
	wait.Wait()
	return failed
}

func unzipFile(root *os.Root, f *zip.File) error {
	name := f.Name
	if first, rest, ok := strings.Cut(name, "/"); ok && strings.HasSuffix(first, ".data") {
		part, inside, _ := strings.Cut(rest, "/")
		if part != "purelib" && part != "platlib" {
			return nil
		}
		name = inside
	}
	if name == "" || strings.HasSuffix(name, "/") {
		return nil
	}
	r, err := f.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	return write(root, name, r, f.Mode())
}

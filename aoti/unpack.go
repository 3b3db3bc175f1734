package aoti

import (
	"archive/zip"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"time"

	"github.com/torchstream/torchstream/internal/safefile"
)

// A model's files are unpacked into a folder of this name in os.TempDir, because the system loads
// shared libraries from files. A claim in the folder tells other processes that it is in use.
const (
	folderPattern = "torchstream-aoti-*"
	claimName     = "claim"
)

// folder holds a model's unpacked files. The zero value means that there is no folder.
type folder struct {
	path  string
	claim *safefile.Claim
}

// unpack writes a model's files into a new folder.
func unpack(m member) (_ *folder, err error) {
	removeStale(os.TempDir())
	dir, err := os.MkdirTemp("", folderPattern)
	if err != nil {
		return nil, err
	}
	made := &folder{path: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, made.remove())
		}
	}()
	if made.claim, err = safefile.NewClaim(filepath.Join(dir, claimName)); err != nil {
		return nil, err
	}
	for _, f := range m.files {
		base := path.Base(f.Name)
		if base == claimName || path.Ext(base) == ".cpp" {
			continue // no code reads the sources
		}
		if err := unpackFile(f, filepath.Join(dir, base)); err != nil {
			return nil, err
		}
	}
	return made, nil
}

func unpackFile(f *zip.File, to string) (err error) {
	from, err := f.Open()
	if err != nil {
		return malformed("member %q: %v", f.Name, err)
	}
	defer from.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o700)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if _, err := io.Copy(out, from); err != nil {
		if errors.Is(err, zip.ErrChecksum) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, zip.ErrFormat) {
			return malformed("member %q: %v", f.Name, err)
		}
		return fmt.Errorf("member %q: %w", f.Name, err)
	}
	return nil
}

func (f *folder) remove() error {
	if f == nil {
		return nil
	}
	err := os.RemoveAll(f.path)
	if f.claim != nil {
		err = errors.Join(err, f.claim.Release())
	}
	return err
}

// minAge is the age from which an unclaimed folder is stale. A younger folder may belong to a
// process that is about to claim it.
const minAge = time.Minute

// removeStale removes the folders of processes that were killed. It ignores folders that it may not
// remove, such as another user's.
func removeStale(parent string) {
	folders, err := filepath.Glob(filepath.Join(parent, folderPattern))
	if err != nil {
		return
	}
	for _, dir := range folders {
		path := filepath.Join(dir, claimName)
		info, err := os.Lstat(path)
		if err != nil || time.Since(info.ModTime()) < minAge || safefile.Claimed(path) != nil {
			continue
		}
		claim, err := safefile.NewClaim(path)
		if err != nil {
			continue
		}
		_ = os.RemoveAll(dir)
		_ = claim.Release()
	}
}

package index

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// indexPaths returns the possible paths of an archive's index. The first path is the preferred one
// for writing. Load tries the paths from last to first. An index in the user's cache folder exists
// only because no file could be written next to the archive, so it is the index with the entry
// points.
func indexPaths(c *Config, a *archive.Archive) []string {
	shards := a.Shards()
	needsNone := func(s archive.Shard) bool { return s.Info.IsDir() || s.Format == archive.Zip }
	if c.NoFile || a.Format() == archive.Zip || slices.ContainsFunc(shards, needsNone) {
		return nil
	}
	if c.File != "" {
		return []string{c.File}
	}
	for _, s := range shards { // memory and other sources that are not files have no folder for an index
		if !s.Info.Mode().IsRegular() || s.Info.ModTime().IsZero() && !archive.IsURL(s.Path) {
			return nil
		}
	}
	first := shards[0].Path
	var paths []string
	name := first
	if !archive.IsURL(first) {
		if _, err := os.Lstat(first); err != nil {
			return nil // the path names another file than the open one
		}
		beside := first + sidecarSuffix
		if len(shards) > 1 {
			beside = fmt.Sprintf("%s+%d%s", first, len(shards)-1, sidecarSuffix)
		}
		paths = append(paths, beside)
		if whole, err := filepath.Abs(first); err == nil {
			name = whole
		}
	}
	if dir := cacheFolder(); dir != "" {
		sum := sha256.Sum256([]byte(fmt.Sprint(name, len(shards))))
		paths = append(paths, filepath.Join(dir, hex.EncodeToString(sum[:12])+sidecarSuffix))
	}
	return paths
}

// cacheFolder returns the folder for indexes in the user's cache folder, or "" if the user has
// none.
func cacheFolder() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	return filepath.Join(dir, "torchstream", "index")
}

// makeCacheFolder creates the folder for an index if it is in the user's cache folder. It creates
// no other folder: if another folder is missing, writing the file fails.
func makeCacheFolder(path string) {
	if dir := filepath.Dir(path); dir == cacheFolder() {
		_ = os.MkdirAll(dir, 0o755)
	}
}

// indexMode returns the mode of an index file. The file contains names and bytes from the archive,
// so users who can't read the archive must not be able to read it.
func indexMode(a *archive.Archive) fs.FileMode {
	mode := fs.FileMode(0o044)
	for _, s := range a.Shards() {
		mode &= s.Info.Mode().Perm()
	}
	return mode | 0o600
}

// spoolOf returns a function that creates unnamed files for the records and the entry points of an
// archive, or nil. If there is no index file, the unnamed files are in the cache folder. An archive
// may have millions of members, and without files, memory would hold their records twice while the
// index is made, and their entry points until Close.
func spoolOf(c *Config, a *archive.Archive) func() (*os.File, error) {
	paths := indexPaths(c, a)
	if dir := cacheFolder(); len(paths) == 0 && dir != "" {
		paths = []string{filepath.Join(dir, "unnamed"+sidecarSuffix)}
	}
	return spoolBeside(paths)
}

// spoolBeside returns a function that creates unnamed files in the folder of the index. It returns
// nil if there is no such folder.
func spoolBeside(paths []string) func() (*os.File, error) {
	if len(paths) == 0 {
		return nil
	}
	return func() (f *os.File, err error) {
		for _, path := range paths {
			makeCacheFolder(path)
			if f, err = namelessFile(path); err == nil {
				return f, nil
			}
		}
		return nil, err
	}
}

// namelessFile creates a file in the folder of path and removes its name at once. The file
// disappears when it is closed.
func namelessFile(path string) (*os.File, error) {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.tmp")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		_ = f.Close() // err says more
		return nil, err
	}
	return f, nil
}

package nn

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/torchstream/torchstream/internal/safefile"
)

// writeAtomically writes a file beside path, and then gives it the name. It replaces only a file of
// the given kind. The file gets the mode of the one at modeOf, as newUnfinished says.
func writeAtomically(path, modeOf string, kind safefile.Kind, write func(io.Writer) error) error {
	f, err := newUnfinished(path, modeOf, kind)
	if err != nil {
		return err
	}
	err = f.write(write)
	if err == nil {
		err = f.finish()
	}
	if err != nil {
		f.abandon()
	}
	return err
}

// unfinished is a file that will take the place of another. Its name is the other's with ".tmp-"
// and a number. The process holds a lock on it, so that a file without a lock is what a process
// left that was killed.
type unfinished struct {
	path string
	kind safefile.Kind
	file *os.File
}

// newUnfinished makes a file that will take the place of the file at path, which must be of the
// kind, and removes what killed processes have left there. The new file has the mode of the file at
// modeOf, or the one that the process's umask leaves if there is none. modeOf is path itself, or,
// for a file that belongs to a checkpoint of several, the file that names the others: all files of
// a checkpoint have one mode.
func newUnfinished(path, modeOf string, kind safefile.Kind) (*unfinished, error) {
	if err := safefile.Check(path, kind); err != nil {
		return nil, err
	}
	removeUnfinished(path)
	file, err := createBeside(path)
	if err != nil {
		return nil, err
	}
	f := &unfinished{path, kind, file}
	if like, err := os.Stat(modeOf); err == nil {
		if err := file.Chmod(like.Mode().Perm()); err != nil {
			f.abandon()
			return nil, err
		}
	}
	return f, nil
}

// write writes the file's content to the disk. Patches change it before it is there.
func (f *unfinished) write(content func(io.Writer) error, patches ...func(io.WriterAt) error) error {
	w := bufio.NewWriterSize(f.file, 1<<20)
	if err := content(w); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, patch := range patches {
		if err := patch(f.file); err != nil {
			return err
		}
	}
	return f.file.Sync()
}

// finish gives the file its name.
func (f *unfinished) finish() error {
	// Check again, because writing took a while.
	if err := safefile.Check(f.path, f.kind); err != nil {
		return err
	}
	if err := os.Rename(f.file.Name(), f.path); err != nil {
		return err
	}
	// Closing ends the lock, so it comes after the file has no name of an unfinished one.
	// Everything is on the disk, so that its error means nothing.
	f.file.Close()
	// A rename is durable only when the folder is on the disk. Some file systems cannot sync a
	// folder, which is no failure of the file.
	if dir, err := os.Open(filepath.Dir(f.path)); err == nil {
		dir.Sync()
		dir.Close()
	}
	return nil
}

// abandon removes the file, if it has not got its name.
func (f *unfinished) abandon() {
	os.Remove(f.file.Name())
	f.file.Close()
}

// createBeside makes an unfinished file with a lock.
func createBeside(path string) (*os.File, error) {
	for {
		var r [6]byte
		rand.Read(r[:]) // never fails
		file, err := os.OpenFile(path+unfinishedInfix+hex.EncodeToString(r[:]), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		// Another process may take the file for one that was left, before it has its lock. A file
		// system without locks has none that removeUnfinished could get either.
		locked := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if _, err := os.Lstat(file.Name()); err == nil && !errors.Is(locked, syscall.EWOULDBLOCK) {
			return file, nil
		}
		file.Close()
	}
}

// unfinishedInfix is what an unfinished file's name has between that of the file and the number.
const unfinishedInfix = ".tmp-"

// unfinishedNumber matches the end of an unfinished file's name.
var unfinishedNumber = regexp.MustCompile(`^[0-9a-f]{12}$`)

// removeUnfinished removes the files that killed processes have left beside path, those that an
// unfinished index names, and those that ranks have written for an unfinished checkpoint. What
// cannot be removed stays, and does no harm.
func removeUnfinished(path string) {
	files, _ := os.ReadDir(filepath.Dir(path))
	for _, entry := range files {
		number, ok := strings.CutPrefix(entry.Name(), filepath.Base(path)+unfinishedInfix)
		if !ok || !unfinishedNumber.MatchString(number) || !entry.Type().IsRegular() {
			continue
		}
		name := filepath.Join(filepath.Dir(path), entry.Name())
		file, err := os.OpenFile(name, os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		if syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil && names(name, file) {
			if isIndexPath(path) {
				live := ownShards(path, path)
				removeShards(path, slices.DeleteFunc(ownShards(path, name), func(shard string) bool { return slices.Contains(live, shard) }))
			}
			removeID(path, number) // of rank 0
			os.Remove(name)
		}
		file.Close()
	}
}

// names reports whether the path is the open file's still: a finished file has another.
func names(path string, file *os.File) bool {
	a, err := os.Lstat(path)
	if err != nil {
		return false
	}
	b, err := file.Stat()
	return err == nil && os.SameFile(a, b)
}

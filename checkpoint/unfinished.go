package checkpoint

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
	"github.com/torchstream/torchstream/internal/system"
)

// writeAtomically writes a temporary file in path's folder and renames it to path. It replaces only
// a file of the given kind. The file gets the mode of the file at modeOf, as newUnfinished
// documents.
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

// unfinished is a temporary file that will replace another file. Its name is the other file's name
// with ".tmp-" and a number. The process holds a lock on it: an unlocked temporary file was left by
// a killed process.
type unfinished struct {
	path    string
	kind    safefile.Kind
	file    *os.File
	removed []string // ids of checkpoints whose parts newMain has removed
}

// newUnfinished creates a temporary file that will replace the file at path, which must be of the
// kind. It removes the leftovers of killed processes there. The new file has the mode of the file
// at modeOf, which is the main file for a part: all files of a checkpoint have the same mode. For a
// new main file modeOf is path. If it does not exist, the process's umask gives the mode.
func newUnfinished(path, modeOf string, kind safefile.Kind) (*unfinished, error) {
	if err := safefile.Check(path, kind); err != nil {
		return nil, err
	}
	removeUnfinished(path)
	file, err := createBeside(path)
	if err != nil {
		return nil, err
	}
	f := &unfinished{path: path, kind: kind, file: file}
	like, err := os.Stat(modeOf)
	if err == nil {
		err = file.Chmod(like.Mode().Perm())
	}
	if err != nil && (modeOf != path || !errors.Is(err, fs.ErrNotExist)) {
		f.abandon()
		return nil, err
	}
	return f, nil
}

// write writes the content and syncs it to the disk. patches change the content before the sync.
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

// finish renames the file to its final name. If the error wraps ErrNotDurable, the file has been
// renamed.
func (f *unfinished) finish() error {
	// Check again: writing took time.
	if err := safefile.Check(f.path, f.kind); err != nil {
		return err
	}
	if err := safefile.Rename(f.file, f.path); err != nil {
		return err
	}
	// Close releases the lock, so it must follow the rename. The content is on the disk already, so
	// an error of Close has no meaning.
	f.file.Close()
	if err := safefile.SyncFolder(f.path); err != nil {
		return &notDurable{err}
	}
	return nil
}

// abandon removes the file unless finish has renamed it.
func (f *unfinished) abandon() {
	os.Remove(f.file.Name())
	f.file.Close()
}

// createBeside creates a locked temporary file in path's folder.
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
		// Another process may remove the file as a leftover before it is locked. On a file system
		// without locks, removeUnfinished cannot lock either, so an error here is harmless.
		locked := system.TryLock(file.Fd())
		err = lookUp(file.Name())
		if err == nil && !errors.Is(locked, syscall.EWOULDBLOCK) {
			return file, nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			os.Remove(file.Name())
			file.Close()
			return nil, err
		}
		file.Close()
	}
}

// lookUp returns an error if there is no file with the name, or if that cannot be seen. It opens
// the file, because a network disk may answer Lstat for a file that is gone.
func lookUp(name string) error {
	f, err := os.OpenFile(name, os.O_RDONLY|system.NoFollow|system.NonBlock, 0)
	if errors.Is(err, fs.ErrPermission) { // the file may belong to another user
		return nil
	}
	if err != nil {
		return err
	}
	return f.Close()
}

// unfinishedInfix separates the final name from the number in a temporary file's name.
const unfinishedInfix = ".tmp-"

// unfinishedNumber matches the number at the end of a temporary file's name.
var unfinishedNumber = regexp.MustCompile(`^[0-9a-f]{12}$`)

// abandonedSuffix follows the temporary name of a main file whose save has ended without it. The
// rename to this name decides on all hosts whether the file became the main file: a lookup of the
// other names may be out of date on a network disk.
const abandonedSuffix = "-abandoned"

// removeUnfinished removes the temporary files that killed processes left in path's folder, and the
// parts of their checkpoints. Files that it cannot remove do no harm.
func removeUnfinished(path string) {
	files, _ := os.ReadDir(filepath.Dir(path))
	for _, entry := range files {
		number, ok := strings.CutPrefix(entry.Name(), filepath.Base(path)+unfinishedInfix)
		number, abandoned := strings.CutSuffix(number, abandonedSuffix)
		if !ok || !unfinishedNumber.MatchString(number) || !entry.Type().IsRegular() {
			continue
		}
		if abandoned || abandonLeft(path+unfinishedInfix+number) {
			removeAbandoned(path, number)
		}
	}
}

// abandonLeft abandons a temporary file if its process was killed.
func abandonLeft(name string) bool {
	file, err := os.OpenFile(name, os.O_RDWR|system.NoFollow|system.NonBlock, 0)
	if err != nil {
		return false
	}
	defer file.Close() // releases the lock
	return system.TryLock(file.Fd()) == nil && names(name, file) && setAside(file) == nil
}

// setAside gives a main file that will not be finished the name of an abandoned one. A full disk
// may refuse the rename, or the name is too long: setAside then removes the file, so that its
// owner's rename fails too.
func setAside(file *os.File) error {
	err := safefile.Rename(file, file.Name()+abandonedSuffix)
	for _, refused := range []error{syscall.ENOSPC, syscall.EDQUOT, syscall.ENAMETOOLONG} {
		if errors.Is(err, refused) {
			return os.Remove(file.Name())
		}
	}
	return err
}

// removeAbandoned removes the parts of an abandoned main file, and then the file itself, by whose
// name the next save finds parts that are left.
func removeAbandoned(path, id string) {
	existing, err := readIDs(path)
	if err != nil {
		return
	}
	// A loss of power may leave the existing file under both names: it keeps its parts.
	if !slices.Contains(existing.own, id) {
		// Sync even if there are none: they may have been removed without a sync.
		if _, left := unlinkParts(path, id); left || safefile.SyncFolder(path) != nil {
			return
		}
	}
	os.Remove(path + unfinishedInfix + id + abandonedSuffix)
}

// names reports whether the path still names the open file: a finished file has been renamed.
func names(path string, file *os.File) bool {
	a, err := os.Lstat(path)
	if err != nil {
		return false
	}
	b, err := file.Stat()
	return err == nil && os.SameFile(a, b)
}

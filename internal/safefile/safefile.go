// Package safefile opens and creates files at paths that a user gives. Opening never blocks on a
// pipe or a device, and writing never replaces a file of another kind.
package safefile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/torchstream/torchstream/internal/system"
)

// ErrNotRegular is wrapped by Open's error for a pipe, a socket, a device or a directory.
var ErrNotRegular = errors.New("it is not a regular file")

// Open opens a regular file for reading. It never blocks on a pipe without a writer: it refuses a
// pipe before opening it, and uses O_NONBLOCK in case a pipe replaces the file in between.
func Open(path string) (*os.File, error) { return open(path, false) }

// OpenTree is like Open, but also accepts a directory.
func OpenTree(path string) (*os.File, error) { return open(path, true) }

func open(path string, tree bool) (*os.File, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: errors.Unwrap(err)}
	}
	if err := readable(path, info, tree); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|system.NonBlock, 0)
	if err != nil {
		return nil, err
	}
	if info, err = f.Stat(); err == nil {
		err = readable(path, info, tree)
	}
	if err == nil {
		err = setBlocking(f)
	}
	if err != nil {
		_ = f.Close() // err says more
		return nil, err
	}
	return f, nil
}

// setBlocking clears O_NONBLOCK, which is needed only while opening: open(2) does not promise that
// regular files will keep ignoring it.
func setBlocking(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	closed := raw.Control(func(fd uintptr) { err = system.SetBlocking(fd) })
	return errors.Join(closed, err)
}

func readable(path string, info fs.FileInfo, tree bool) error {
	if info.Mode().IsRegular() || tree && info.IsDir() {
		return nil
	}
	return &fs.PathError{Op: "open", Path: path, Err: fmt.Errorf("%w but %s", ErrNotRegular, kindOf(info.Mode()))}
}

// ReadFile reads a regular file.
func ReadFile(path string) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	return io.ReadAll(f)
}

func kindOf(mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return "a directory"
	case mode&fs.ModeNamedPipe != 0:
		return "a pipe"
	case mode&fs.ModeSocket != 0:
		return "a socket"
	}
	return "a device"
}

// headBytes is the number of leading bytes passed to Kind.Is: enough for the name of a zip
// archive's first member.
const headBytes = 512

// Kind is a kind of output file. Output of a Kind may replace a file of the same kind, or an empty
// file.
type Kind struct {
	Name string                 // with an article: "a PNG"
	Is   func(head []byte) bool // gets the first 512 bytes, or all of a shorter file
}

// Kinds of output that several packages write.
var (
	PNG         = Kind{"a PNG", prefix("\x89PNG\r\n\x1a\n")}
	Safetensors = Kind{"a safetensors file", isSafetensors}
	PyTorch     = Kind{"a PyTorch file", isPyTorch}
	// Raw is output that cannot be recognized. It may replace only an empty file.
	Raw = Kind{"an empty file", func([]byte) bool { return false }}
)

// Prefix returns a kind of output that starts with one of several strings.
func Prefix(name string, prefixes ...string) Kind {
	return Kind{name, func(head []byte) bool {
		for _, p := range prefixes {
			if prefix(p)(head) {
				return true
			}
		}
		return false
	}}
}

func prefix(p string) func([]byte) bool {
	return func(head []byte) bool { return bytes.HasPrefix(head, []byte(p)) }
}

// isSafetensors checks the length of the header, which is at most 100 MB, and the header's first
// two bytes.
func isSafetensors(head []byte) bool {
	const maxHeader = 100_000_000
	return len(head) > 9 && head[8] == '{' && strings.IndexByte("\"} \t\r\n", head[9]) >= 0 &&
		binary.LittleEndian.Uint64(head) <= maxHeader
}

// isPyTorch checks the name of the first member of a zip archive: torch.save writes its pickle
// first, in a folder. Any other zip archive, for example a document, is a file of another kind.
func isPyTorch(head []byte) bool {
	const header = 30 // bytes before the name, whose length is at 26
	if len(head) < header || !prefix("PK\x03\x04")(head) {
		return false
	}
	end := header + int(binary.LittleEndian.Uint16(head[26:]))
	if end > len(head) {
		return false
	}
	folder, ok := strings.CutSuffix(string(head[header:end]), "/data.pkl")
	return ok && folder != "" && !strings.Contains(folder, "/")
}

// Check returns nil if a rename may put a new file of the kind at path: the path must not exist, or
// be an empty file or a file of that kind. The error names the file and gives advice.
func Check(path string, kind Kind) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return refuse(path, kindOf(info.Mode()), kind)
	case info.Size() == 0:
		return nil
	}
	f, err := Open(path)
	if errors.Is(err, fs.ErrNotExist) { // removed since, or a network disk has told of a file that is gone
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: to replace it, remove it first", err)
	}
	defer f.Close() // only read
	return checkHead(f, path, kind)
}

// CheckWrite is like Check, for output that Create writes. It also accepts a character device and
// standard output.
func CheckWrite(path string, kind Kind) error {
	if info, err := os.Stat(path); err == nil && stream(path, info) {
		return nil
	}
	return Check(path, kind)
}

func checkHead(f *os.File, path string, kind Kind) error {
	head := make([]byte, headBytes)
	n, err := f.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return err
	}
	if n == 0 || kind.Is(head[:n]) {
		return nil
	}
	return refuse(path, "a file of another kind", kind)
}

func refuse(path, found string, kind Kind) error {
	return fmt.Errorf("%s is %s, and only %s is replaced here: give another name, or remove it first", path,
		found, kind.Name)
}

// stream reports whether the path is a stream, so there is nothing to replace: a character device
// such as /dev/null, or a pipe that the shell has already opened as /dev/stdout.
func stream(path string, info fs.FileInfo) bool {
	if info.Mode()&fs.ModeCharDevice != 0 {
		return true
	}
	path = filepath.Clean(path)
	inherited := path == "/dev/stdout" || path == "/dev/stderr" || strings.HasPrefix(path, "/dev/fd/") ||
		strings.HasPrefix(path, "/proc/self/fd/")
	return inherited && !info.IsDir() && !info.Mode().IsRegular()
}

// Create calls CheckWrite, opens the file for writing and truncates it. It refuses a file that
// replaced the checked one during or after the check.
func Create(path string, kind Kind) (*os.File, error) {
	was, err := os.Stat(path) // before the check, so that a later replacement is detected
	if err != nil {
		was = nil
	}
	if err := CheckWrite(path, kind); err != nil {
		return nil, err
	}
	if was != nil && stream(path, was) {
		return os.OpenFile(path, os.O_WRONLY, 0)
	}
	return create(path, was, kind)
}

// create opens and truncates the checked file; was is nil if the path did not exist.
func create(path string, was fs.FileInfo, kind Kind) (*os.File, error) {
	flags := os.O_WRONLY | system.NonBlock
	if was == nil {
		flags |= os.O_CREATE
		link, err := os.Lstat(path)
		if err != nil || link.Mode()&fs.ModeSymlink == 0 { // opening a dangling link creates its target
			flags |= os.O_EXCL
		}
	}
	f, err := os.OpenFile(path, flags, 0o666)
	if err != nil {
		return nil, err
	}
	now, err := f.Stat()
	if err == nil && !unchanged(was, now) {
		err = refuse(path, "no longer the file that was checked", kind)
	}
	if err == nil {
		err = setBlocking(f)
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err != nil {
		_ = f.Close() // err says more
		return nil, err
	}
	return f, nil
}

// unchanged reports whether the opened file is the checked one, or a new one if there was none.
func unchanged(was, now fs.FileInfo) bool {
	if was == nil {
		return now.Mode().IsRegular() && now.Size() == 0
	}
	return os.SameFile(was, now)
}

// SyncFolder syncs the folder of path, so that a rename in the folder is durable. A folder that the
// process may not read, or that the file system cannot sync, is not an error.
func SyncFolder(path string) error {
	dir, err := os.Open(filepath.Dir(path))
	if err == nil {
		err = errors.Join(dir.Sync(), dir.Close())
	}
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, errors.ErrUnsupported) || errors.Is(err, syscall.EINVAL) {
		return nil
	}
	return err
}

// Replace atomically puts a new file of the kind at path. write fills a temporary file (the path
// with a number and .tmp), which Replace then syncs and renames. Replace calls Check before and
// after write. It returns the new file open, since another process may already have replaced it at
// the path.
func Replace(path string, kind Kind, mode fs.FileMode, write func(f *os.File) error) (_ *os.File, err error) {
	if err := Check(path, kind); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.tmp")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close() // err says more
			_ = os.Remove(f.Name())
		}
	}()
	if err := write(f); err != nil {
		return nil, err
	}
	if err := f.Chmod(mode); err != nil {
		return nil, err
	}
	if err := f.Sync(); err != nil {
		return nil, err
	}
	if err := Check(path, kind); err != nil { // again: write may have taken a while
		return nil, err
	}
	if err := Rename(f, path); err != nil {
		return nil, err
	}
	return f, nil
}

// Rename gives an open file another name in its folder. A server may rename the file and still
// answer with an error: ENOENT for a request that it got twice, or EIO after a timeout. Rename then
// returns nil.
func Rename(f *os.File, to string) error {
	err := os.Rename(f.Name(), to)
	if err != nil && Names(to, f) {
		return nil
	}
	return err
}

// Names reports whether a path names an open file. It opens the path, because a network disk may
// answer Lstat for a file that is gone.
func Names(path string, f *os.File) bool {
	var info fs.FileInfo
	named, err := os.OpenFile(path, os.O_RDONLY|system.NoFollow|system.NonBlock, 0)
	if err == nil {
		info, err = named.Stat()
		_ = named.Close() // only read
	} else if !errors.Is(err, fs.ErrNotExist) { // the file may not be readable
		info, err = os.Lstat(path)
	}
	if err != nil {
		return false
	}
	own, err := f.Stat()
	return err == nil && os.SameFile(info, own)
}

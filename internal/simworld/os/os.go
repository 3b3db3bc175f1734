// Package os replaces the standard library's os in code that a simulation runs. Its files are on
// the simulated disk of the current world.
package os

import (
	"errors"
	"io/fs"
	"strings"
	"syscall"

	"github.com/torchstream/torchstream/internal/simworld/world"
)

// Types and errors of package io/fs, under the names that package os has for them.
type (
	FileInfo  = fs.FileInfo
	FileMode  = fs.FileMode
	DirEntry  = fs.DirEntry
	PathError = fs.PathError
)

// Errors of package io/fs.
var (
	ErrNotExist   = fs.ErrNotExist
	ErrExist      = fs.ErrExist
	ErrPermission = fs.ErrPermission
	ErrClosed     = fs.ErrClosed
)

// Flags of OpenFile.
const (
	O_RDONLY = world.ReadOnly
	O_WRONLY = world.WriteOnly
	O_RDWR   = world.ReadWrite
	O_CREATE = world.Create
	O_EXCL   = world.Exclusive
	O_TRUNC  = world.Truncate
)

// File is an open file on the simulated disk.
type File struct{ *world.File }

func file(f *world.File, err error) (*File, error) {
	if err != nil {
		return nil, err
	}
	return &File{f}, nil
}

// Fd returns the number under which package system finds the file.
func (f *File) Fd() uintptr { return world.Descriptor(f.File) }

// SyscallConn returns access to the descriptor.
func (f *File) SyscallConn() (syscall.RawConn, error) { return conn{f}, nil }

// WriteString writes a text at the current offset.
func (f *File) WriteString(s string) (int, error) { return f.Write([]byte(s)) }

type conn struct{ f *File }

func (c conn) Control(use func(fd uintptr)) error { use(c.f.Fd()); return nil }

func (conn) Read(func(uintptr) bool) error  { return errors.ErrUnsupported }
func (conn) Write(func(uintptr) bool) error { return errors.ErrUnsupported }

// Open opens a file for reading.
func Open(name string) (*File, error) { return OpenFile(name, O_RDONLY, 0) }

// OpenFile opens a file.
func OpenFile(name string, flags int, mode FileMode) (*File, error) {
	return file(world.Current().Open(name, flags, mode))
}

// Create creates or truncates a file.
func Create(name string) (*File, error) { return OpenFile(name, O_RDWR|O_CREATE|O_TRUNC, 0o666) }

// CreateTemp creates a file with a new name.
func CreateTemp(folder, pattern string) (*File, error) {
	return file(world.Current().CreateTemp(folder, pattern))
}

// Stat describes a file.
func Stat(name string) (FileInfo, error) { return world.Current().Stat(name) }

// Lstat is Stat: the simulated disk has no links.
func Lstat(name string) (FileInfo, error) { return world.Current().Stat(name) }

// Remove removes a name.
func Remove(name string) error { return world.Current().Remove(name) }

// Rename moves a name.
func Rename(from, to string) error { return world.Current().Rename(from, to) }

// MkdirAll makes a folder and its parents.
func MkdirAll(name string, mode FileMode) error { return world.Current().MkdirAll(name, mode) }

// ReadDir lists a folder.
func ReadDir(name string) ([]DirEntry, error) { return world.Current().ReadDir(name) }

// SameFile reports whether two descriptions are of one file.
func SameFile(a, b FileInfo) bool { return world.SameFile(a, b) }

// UserCacheDir fails: simulated users have no home.
func UserCacheDir() (string, error) {
	return "", errors.New("neither $XDG_CACHE_HOME nor $HOME are defined")
}

// Getpid returns the number of a process.
func Getpid() int { return 1 }

// Hostname returns the name of the simulated machine.
func Hostname() (string, error) { return "simulated", nil }

// IsNotExist reports whether an error says that a file does not exist.
func IsNotExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// NewSyscallError names the call of an error.
func NewSyscallError(call string, err error) error {
	if err == nil {
		return nil
	}
	return errors.Join(errors.New(strings.ToLower(call)), err)
}

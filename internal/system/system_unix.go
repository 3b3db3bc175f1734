//go:build linux || darwin

package system

import (
	"os"
	"runtime"
	"syscall"
	"time"
)

// Flags of os.OpenFile. NoFollow refuses a symbolic link. NonBlock does not wait for the other end
// of a pipe.
const (
	NoFollow = syscall.O_NOFOLLOW
	NonBlock = syscall.O_NONBLOCK
)

// Lock locks an open file exclusively, and waits for other holders (flock(2)).
func Lock(fd uintptr) error { return syscall.Flock(int(fd), syscall.LOCK_EX) }

// TryLock is like Lock, but returns syscall.EWOULDBLOCK if there is another holder.
func TryLock(fd uintptr) error { return syscall.Flock(int(fd), syscall.LOCK_EX|syscall.LOCK_NB) }

// TryShare is like TryLock, but the lock can have several holders.
func TryShare(fd uintptr) error { return syscall.Flock(int(fd), syscall.LOCK_SH|syscall.LOCK_NB) }

// SetBlocking clears O_NONBLOCK.
func SetBlocking(fd uintptr) error { return syscall.SetNonblock(int(fd), false) }

// Disk returns the bytes that a user may still write to the file system of a path, and its size.
func Disk(path string) (free, size uint64, err error) {
	var disk syscall.Statfs_t
	if err := syscall.Statfs(path, &disk); err != nil {
		return 0, 0, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	return disk.Bavail * uint64(disk.Bsize), disk.Blocks * uint64(disk.Bsize), nil
}

// Usage returns the CPU time of the process on all cores, and its largest resident memory in bytes.
func Usage() (cpu time.Duration, peak int64, err error) {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0, 0, os.NewSyscallError("getrusage", err)
	}
	peak = u.Maxrss
	if runtime.GOOS == "linux" {
		peak *= 1024
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), peak, nil
}

// Duplicate duplicates a descriptor, with close-on-exec from the start.
func Duplicate(fd uintptr) (uintptr, error) {
	duplicate, _, errno := syscall.Syscall(syscall.SYS_FCNTL, fd, syscall.F_DUPFD_CLOEXEC, 0)
	if errno != 0 {
		return 0, os.NewSyscallError("fcntl", errno)
	}
	return duplicate, nil
}

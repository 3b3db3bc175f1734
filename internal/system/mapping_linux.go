package system

import (
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"syscall"
	"unsafe"
)

// MapFile maps the first size bytes of an open file, for reading only. The mapping shows later
// writes to the file. A read of a page that the file no longer has, or that cannot be read, raises
// SIGBUS. UnmapFile removes the mapping. MapFile returns fs.ErrPermission for a file that the
// process neither owns nor may write to: InMemory would be wrong.
func MapFile(fd uintptr, size int) ([]byte, error) {
	var info syscall.Stat_t
	if err := syscall.Fstat(int(fd), &info); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	if !seesPages(syscall.Geteuid(), int(info.Uid), func() bool { return mayWrite(fd) }) {
		return nil, fmt.Errorf("mapping a file that another user owns: %w", fs.ErrPermission)
	}
	p, err := syscall.Mmap(int(fd), 0, size, syscall.PROT_READ, syscall.MAP_SHARED)
	return p, os.NewSyscallError("mmap", err)
}

// seesPages reports whether mincore tells a process which pages of a file are in memory. Since
// Linux 5.2 only the owner and those who may write to the file see it. For all others every page
// seems to be in memory (mincore(2)).
func seesPages(user, owner int, mayWrite func() bool) bool { return user == owner || mayWrite() }

// mayWrite reports whether the process may write to an open file.
func mayWrite(fd uintptr) bool {
	const effective = 0x200 // AT_EACCESS: the effective user counts, as for mincore
	return syscall.Faccessat(-1, fmt.Sprintf("/proc/self/fd/%d", fd), 2, effective) == nil
}

// UnmapFile removes a mapping of MapFile. p is the whole mapping.
func UnmapFile(p []byte) error { return os.NewSyscallError("munmap", syscall.Munmap(p)) }

// AdviseHugePages asks for huge pages in a part of the process's memory: writing it for the first
// time is then faster. The kernel may ignore it.
func AdviseHugePages(p []byte) {
	if len(p) > 0 {
		_ = syscall.Madvise(p, 14) // MADV_HUGEPAGE; an error means that there are none
	}
}

// ReadPages reads all pages of a part of a mapping into memory. The error is EFAULT if the file has
// lost some of them. Before Linux 5.14 ReadPages does nothing.
func ReadPages(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	err := syscall.Madvise(p, 22) // MADV_POPULATE_READ
	if err == syscall.EINVAL {
		return nil
	}
	return os.NewSyscallError("madvise", err)
}

// ChangeTime returns the time of the last change of a file or its attributes, in nanoseconds since
// 1970. Unlike the time of the last write, a program cannot set it. It is 0 for a FileInfo that
// package os has not made.
func ChangeTime(info fs.FileInfo) int64 {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return s.Ctim.Nano()
	}
	return 0
}

// InMemory reports whether all pages of a part of a mapping are in memory, so that reading them
// does not wait for a disk. It may be wrong for pages that the file has lost.
func InMemory(p []byte) bool {
	if len(p) == 0 {
		return true
	}
	var pages [64]byte
	size := uintptr(os.Getpagesize())
	begin := uintptr(unsafe.Pointer(unsafe.SliceData(p)))
	end := begin + uintptr(len(p))
	defer runtime.KeepAlive(p)
	for at := begin &^ (size - 1); at < end; at += uintptr(len(pages)) * size {
		bytes := min(end-at, uintptr(len(pages))*size)
		if _, _, errno := syscall.Syscall(syscall.SYS_MINCORE, at, bytes, uintptr(unsafe.Pointer(&pages))); errno != 0 {
			return false
		}
		for _, page := range pages[:(bytes+size-1)/size] {
			if page&1 == 0 {
				return false
			}
		}
	}
	return true
}

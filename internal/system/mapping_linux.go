package system

import (
	"io/fs"
	"os"
	"runtime"
	"syscall"
	"unsafe"
)

// MapFile maps the first size bytes of an open file, for reading only. The mapping shows later
// writes to the file. A read of a page that the file no longer has, or that cannot be read, raises
// SIGBUS. UnmapFile removes the mapping.
func MapFile(fd uintptr, size int) ([]byte, error) {
	p, err := syscall.Mmap(int(fd), 0, size, syscall.PROT_READ, syscall.MAP_SHARED)
	return p, os.NewSyscallError("mmap", err)
}

// UnmapFile removes a mapping of MapFile. p is the whole mapping.
func UnmapFile(p []byte) error { return os.NewSyscallError("munmap", syscall.Munmap(p)) }

// InMemory reports whether all pages of a part of a mapping are in memory, so that reading them
// does not wait for a disk. It may be wrong in two cases: for pages that the file has lost, and,
// unless TellsInMemory, for pages that this process has not used through this mapping (mincore(2)).
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

// TellsInMemory reports whether InMemory is right for a file with this description. The kernel
// tells its owner and the superuser, but not everybody who can read the file.
func TellsInMemory(info fs.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && (os.Geteuid() == 0 || uint32(os.Geteuid()) == stat.Uid)
}

// Memory returns the size of the machine's memory in bytes, or 0 if it is unknown.
func Memory() int64 {
	var info syscall.Sysinfo_t
	if syscall.Sysinfo(&info) != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit)
}

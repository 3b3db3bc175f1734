// Package foldersync makes syncing a folder fail, for tests of programs that save files.
package foldersync

import (
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Break makes os.Open fail with EIO on the calling goroutine's thread, as on a disk that cannot
// read a folder. Files can still be created, written, synced and renamed. Break locks the goroutine
// to the thread, and the thread ends with the goroutine: call Break in a goroutine that only the
// test uses.
func Break() error {
	runtime.LockOSThread()
	const number, flags = 0, 16 + 2*8 // offsets in struct seccomp_data: the call, and its third argument
	const load, equal, result = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K,
		unix.BPF_RET | unix.BPF_K
	filter := []unix.SockFilter{
		{Code: load, K: number},
		{Code: equal, K: unix.SYS_OPENAT, Jf: 3},
		{Code: load, K: flags},
		{Code: equal, K: uint32(syscall.O_RDONLY | syscall.O_CLOEXEC | syscall.O_LARGEFILE), Jf: 1},
		{Code: result, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EIO)},
		{Code: result, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("foldersync: PR_SET_NO_NEW_PRIVS: %w", err)
	}
	// unix.Prctl may move the stack, and program with it.
	if _, _, errno := syscall.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER,
		uintptr(unsafe.Pointer(&program))); errno != 0 {
		return fmt.Errorf("foldersync: a filter for the thread's system calls: %w", errno)
	}
	return nil
}

package torch

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// The control file of a shared tensor is an unnamed file in memory. Other processes open it through
// the owner's /proc/PID/fd. It disappears when all processes that use it have ended. Its first page
// has the handle's nonce. The elements of a tensor on the CPU follow.
//
// Locks on two of its bytes show which processes use the tensor. They belong to open file
// descriptions, so the kernel releases them when a process is killed.
const (
	controlMagic = "tscontrl"
	controlBytes = 4096

	ownerByte = 0 // locked by the owner until its Close
	usersByte = 1 // each user holds a shared lock, and Close takes an exclusive one
)

type lockKind int16

const (
	shared    = lockKind(syscall.F_RDLCK)
	exclusive = lockKind(syscall.F_WRLCK)
)

// newControl makes the control file with room for the elements, locked by the owner, and enters it
// into the handle.
func newControl(h *sharedHandle, bytes int64) (file *os.File, err error) {
	fd, err := unix.MemfdCreate("torchstream", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	file = os.NewFile(uintptr(fd), "shared tensor")
	defer func() {
		if err != nil {
			file.Close()
			file = nil
		}
	}()
	if _, err := rand.Read(h.nonce[:]); err != nil {
		return nil, err
	}
	if err := file.Truncate(controlBytes + bytes); err != nil {
		return nil, err
	}
	// Another process cannot shrink the file while others have it mapped.
	if _, err := control(file, unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW); err != nil {
		return nil, os.NewSyscallError("F_ADD_SEALS", err)
	}
	if _, err := file.WriteAt(append([]byte(controlMagic), h.nonce[:]...), 0); err != nil {
		return nil, err
	}
	if ok, err := lock(file, ownerByte, exclusive); err != nil || !ok {
		return nil, errors.Join(errors.New("the new file of a shared tensor cannot be locked"), err)
	}
	h.pid, h.fd = int32(os.Getpid()), int32(fd)
	return file, nil
}

// openControl opens the owner's control file. The handle may be forged: the file is opened only if
// it is a regular one, and must then be a control file with the handle's nonce.
func openControl(h *sharedHandle) (*os.File, error) {
	path := fmt.Sprintf("/proc/%d/fd/%d", h.pid, h.fd)
	if state, err := os.Stat(path); errors.Is(err, os.ErrPermission) {
		return nil, invalid("process %d, which owns the tensor, belongs to another user: %v", h.pid, err)
	} else if err != nil || !state.Mode().IsRegular() {
		return nil, goneOwner(h)
	}
	file, err := os.OpenFile(path, os.O_RDWR|syscall.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrPermission) {
		return nil, invalid("process %d, which owns the tensor, belongs to another user: %v", h.pid, err)
	} else if err != nil {
		return nil, goneOwner(h)
	}
	var head [len(controlMagic) + len(h.nonce)]byte
	seals, err := control(file, unix.F_GET_SEALS, 0)
	if err == nil {
		_, err = file.ReadAt(head[:], 0)
	}
	if err != nil && !errors.Is(err, io.EOF) || seals&(unix.F_SEAL_SHRINK|unix.F_SEAL_GROW) != unix.F_SEAL_SHRINK|unix.F_SEAL_GROW ||
		string(head[:len(controlMagic)]) != controlMagic || [16]byte(head[len(controlMagic):]) != h.nonce {
		file.Close()
		return nil, goneOwner(h)
	}
	return file, nil
}

// ownerHolds returns an error unless the owner still shares the tensor.
func ownerHolds(file *os.File, h *sharedHandle) error {
	held, err := isLocked(file, ownerByte)
	if err == nil && !held {
		err = goneOwner(h)
	}
	return err
}

// claim opens the control file and counts as a user of the tensor, until the descriptor is closed.
func claim(h *sharedHandle) (fd int, err error) {
	file, err := openControl(h)
	if err != nil {
		return -1, err
	}
	defer file.Close()
	// Take the lock first: from then on the owner cannot free the memory, unless it is already
	// freeing it.
	if ok, err := lock(file, usersByte, shared); err != nil {
		return -1, err
	} else if !ok {
		return -1, goneOwner(h)
	}
	if err := ownerHolds(file, h); err != nil {
		return -1, err
	}
	return duplicateDescriptor(file)
}

// reopen opens the owner's own control file once more, without its locks.
func reopen(h *sharedHandle) (fd int, err error) {
	file, err := openControl(h)
	if err != nil {
		return -1, err
	}
	defer file.Close()
	return duplicateDescriptor(file)
}

// duplicateDescriptor returns a descriptor that no os.File owns. Both descriptors share the locks.
func duplicateDescriptor(file *os.File) (int, error) {
	fd, err := control(file, syscall.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("fcntl", err)
	}
	return fd, nil
}

// control calls fcntl with an integer.
func control(file *os.File, command, argument uintptr) (result int, err error) {
	raw, err := file.SyscallConn()
	if err != nil {
		return 0, err
	}
	if outer := raw.Control(func(fd uintptr) {
		r, _, errno := syscall.Syscall(syscall.SYS_FCNTL, fd, command, argument)
		if result = int(r); errno != 0 {
			err = errno
		}
	}); outer != nil {
		return 0, outer
	}
	return result, err
}

// lock takes a lock on one byte. It returns false if another process, or another opening of the
// file, has a conflicting lock. It does not wait.
func lock(file *os.File, at int64, kind lockKind) (ok bool, err error) {
	l := syscall.Flock_t{Type: int16(kind), Start: at, Len: 1}
	err = locking(file, unix.F_OFD_SETLK, &l)
	if errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EACCES) {
		return false, nil
	}
	return err == nil, err
}

// isLocked reports whether another process, or another opening of the file, has a lock on the byte.
func isLocked(file *os.File, at int64) (bool, error) {
	l := syscall.Flock_t{Type: syscall.F_WRLCK, Start: at, Len: 1}
	err := locking(file, unix.F_OFD_GETLK, &l)
	return l.Type != syscall.F_UNLCK, err
}

func locking(file *os.File, command int, l *syscall.Flock_t) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	if outer := raw.Control(func(fd uintptr) {
		err = os.NewSyscallError("fcntl", syscall.FcntlFlock(fd, command, l))
	}); outer != nil {
		return outer
	}
	return err
}

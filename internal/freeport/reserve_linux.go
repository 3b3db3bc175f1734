package freeport

import (
	"errors"
	"fmt"
	"syscall"
)

// reserve binds an abstract Unix socket whose name contains the port. Such a name is unique in the
// network namespace, and the kernel frees it at the end of the process. Child processes do not
// inherit the socket.
func reserve(port int) error {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: fmt.Sprintf("@torchstream/port/%d", port)}); err != nil {
		return errors.Join(fmt.Errorf("port %d is another process's: %w", port, err), syscall.Close(fd))
	}
	return nil
}

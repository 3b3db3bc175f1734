package setup

import (
	"os"

	"golang.org/x/sys/unix"
)

// syncFileSystem writes the file system of an open folder to the disk.
func syncFileSystem(folder *os.File) error { return unix.Syncfs(int(folder.Fd())) }

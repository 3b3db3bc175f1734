//go:build !linux && !darwin

package system

import (
	"errors"
	"fmt"
	"runtime"
	"time"
)

const (
	NoFollow = 0
	NonBlock = 0
)

func unsupported(call string) error {
	return fmt.Errorf("%s: %w on %s", call, errors.ErrUnsupported, runtime.GOOS)
}

func Lock(uintptr) error     { return unsupported("locking a file") }
func TryLock(uintptr) error  { return unsupported("locking a file") }
func TryShare(uintptr) error { return unsupported("locking a file") }

func SetBlocking(uintptr) error { return nil } // NonBlock has no effect

func Disk(string) (free, size uint64, err error) {
	return 0, 0, unsupported("reading the free space of a disk")
}

func Usage() (cpu time.Duration, peak int64, err error) {
	return 0, 0, unsupported("reading the CPU time of the process")
}

func Duplicate(uintptr) (uintptr, error) { return 0, unsupported("duplicating a descriptor") }

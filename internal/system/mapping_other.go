//go:build !linux

package system

import (
	"errors"
	"fmt"
	"io/fs"
	"runtime"
)

// MapFile fails: only Linux says which pages of a mapping are in memory.
func MapFile(uintptr, int) ([]byte, error) {
	return nil, fmt.Errorf("mapping a file: %w on %s", errors.ErrUnsupported, runtime.GOOS)
}

// UnmapFile does nothing.
func UnmapFile([]byte) error { return nil }

// AdviseHugePages does nothing.
func AdviseHugePages([]byte) {}

// ReadPages does nothing.
func ReadPages([]byte) error { return nil }

// ChangeTime returns 0.
func ChangeTime(fs.FileInfo) int64 { return 0 }

// InMemory returns false.
func InMemory([]byte) bool { return false }

// Package system replaces internal/system in code that a simulation runs.
package system

import (
	"errors"
	"io/fs"

	"github.com/torchstream/torchstream/internal/simworld/world"
)

// Flags that the simulated disk ignores.
const (
	NonBlock = 0
	NoFollow = 0
)

// TryLock locks a file exclusively, without waiting.
func TryLock(fd uintptr) error { return world.Current().ByDescriptor(fd).Lock(false) }

// TryShare locks a file together with others, without waiting.
func TryShare(fd uintptr) error { return world.Current().ByDescriptor(fd).Lock(true) }

// SetBlocking does nothing.
func SetBlocking(uintptr) error { return nil }

// MapFile fails, so that its caller reads the file.
func MapFile(uintptr, int) ([]byte, error) { return nil, errors.ErrUnsupported }

// UnmapFile does nothing.
func UnmapFile([]byte) error { return nil }

// ReadPages does nothing.
func ReadPages([]byte) error { return nil }

// ChangeTime returns 0.
func ChangeTime(fs.FileInfo) int64 { return 0 }

// InMemory reports that no page is in memory.
func InMemory([]byte) bool { return false }

// AdviseHugePages does nothing.
func AdviseHugePages([]byte) {}

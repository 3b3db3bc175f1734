//go:build !linux

package hostmem

import (
	"context"
	"errors"
	"fmt"
	"runtime"
)

// Memory is not implemented: Join always fails.
type Memory struct{}

// Join fails.
func Join(context.Context, Config) (*Memory, error) {
	return nil, fmt.Errorf("memory shared on this host: %w on %s", errors.ErrUnsupported, runtime.GOOS)
}

// Flag returns false.
func (*Memory) Flag(int) bool { return false }

// SetFlag does nothing.
func (*Memory) SetFlag(int) {}

// Data returns nil.
func (*Memory) Data() []byte { return nil }

// Write fails.
func (*Memory) Write(int64, []byte) error { return errors.ErrUnsupported }

// Lock fails.
func (*Memory) Lock(context.Context) (func(), error) { return nil, errors.ErrUnsupported }

// Close does nothing.
func (*Memory) Close() {}

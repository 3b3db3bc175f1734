//go:build !linux

package setup

import (
	"errors"
	"os"
)

// syncFileSystem is never called: [Run] refuses this platform earlier.
func syncFileSystem(*os.File) error { return errors.ErrUnsupported }

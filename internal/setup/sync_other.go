//go:build !linux

package setup

import (
	"errors"
	"os"
)

// syncFileSystem fails: [Install] refuses this platform before.
func syncFileSystem(*os.File) error { return errors.ErrUnsupported }

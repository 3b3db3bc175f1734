//go:build !linux

package torch

import (
	"os"

	"github.com/torchstream/torchstream/internal/capi"
)

// Shared tensors exist on Linux only, where the C library is.

type lockKind int16

const (
	exclusive = lockKind(0)

	ownerByte = 0
	usersByte = 1

	controlBytes = 4096
)

func newControl(*sharedHandle, int64) (*os.File, error) { return nil, capi.Check() }
func ownerHolds(*os.File, *sharedHandle) error          { return capi.Check() }
func openControl(*sharedHandle) (*os.File, error)       { return nil, capi.Check() }
func claim(*sharedHandle) (int, error)                  { return -1, capi.Check() }
func reopen(*sharedHandle) (int, error)                 { return -1, capi.Check() }
func lock(*os.File, int64, lockKind) (bool, error)      { return false, capi.Check() }
func isLocked(*os.File, int64) (bool, error)            { return false, capi.Check() }

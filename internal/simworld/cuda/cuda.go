// Package cuda replaces package cuda in checkpoints that a simulation saves. It needs no library.
package cuda

import "errors"

// Device is a device. The simulated machine has only a CPU.
type Device int32

// CPU is the host.
const CPU Device = -1

// ErrInvalidArgument is wrapped by the errors of calls with invalid arguments.
var ErrInvalidArgument = errors.New("invalid argument")

//go:build !linux && !darwin

package resident

import "errors"

// Limit fails: this system has no such limit.
func Limit(int64) (restore func() error, err error) { return nil, errors.ErrUnsupported }

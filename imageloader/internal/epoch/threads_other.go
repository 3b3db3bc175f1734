//go:build !linux

package epoch

import (
	"errors"
	"fmt"
	"runtime"
)

func (t *Threads) checkCPUs() error {
	return fmt.Errorf("imageloader: Options.WorkerCPUs: %w on %s", errors.ErrUnsupported, runtime.GOOS)
}

func (t *Threads) lock() (unlock func(), err error) {
	if t.Nice == 0 && len(t.CPUs) == 0 {
		return func() {}, nil
	}
	return nil, fmt.Errorf("imageloader: Options.WorkerNice and WorkerCPUs: %w on %s", errors.ErrUnsupported, runtime.GOOS)
}

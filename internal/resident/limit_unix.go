//go:build linux || darwin

package resident

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Limit lets the process map no more than the given number of additional bytes, until restore is
// called (RLIMIT_AS of getrlimit(2)). It is for tests of out-of-memory errors. All threads share
// the limit.
func Limit(more int64) (restore func() error, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	mapped, err := parse(string(data), 0)
	if err != nil {
		return nil, err
	}
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_AS, &before); err != nil {
		return nil, fmt.Errorf("getrlimit: %w", err)
	}
	set := func(limit unix.Rlimit) error {
		if err := unix.Setrlimit(unix.RLIMIT_AS, &limit); err != nil {
			return fmt.Errorf("setrlimit: %w", err)
		}
		return nil
	}
	if err := set(unix.Rlimit{Cur: uint64(mapped + more), Max: before.Max}); err != nil {
		return nil, err
	}
	return func() error { return set(before) }, nil
}

// Package resident reads this process's memory use, and limits its growth.
package resident

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const path = "/proc/self/statm"

// Bytes returns the resident memory of the process: the pages of its address space that are in
// memory, including libraries and mapped files (proc_pid_statm(5)).
func Bytes() (int64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return parse(string(data), 1)
}

// Limit lets the process map at most more additional bytes, until restore is called (RLIMIT_AS of
// getrlimit(2)). It is for tests of out-of-memory errors. All threads share the limit.
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

// parse reads a number of a statm, in pages: number 0 is the mapped size, number 1 the resident
// size.
func parse(statm string, number int) (int64, error) {
	fields := strings.Fields(statm)
	if len(fields) <= number {
		return 0, fmt.Errorf("%s says %q", path, statm)
	}
	pages, err := strconv.ParseInt(fields[number], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return pages * int64(os.Getpagesize()), nil
}

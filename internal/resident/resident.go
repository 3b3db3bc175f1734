// Package resident reads how much memory this process has, and limits how much more it gets.
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
// memory, those of libraries and mapped files included (proc_pid_statm(5)).
func Bytes() (int64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return parse(string(data), 1)
}

// Limit lets the process map at most so many bytes more than it has mapped, until restore is called
// (RLIMIT_AS of getrlimit(2)). It is for tests of what runs out of memory. All threads share it.
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

// parse reads a number of a statm, which counts pages: 0 is for what is mapped, 1 for what is
// resident.
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

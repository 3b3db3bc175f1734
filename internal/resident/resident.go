// Package resident reads how much memory this process has.
package resident

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Bytes returns the resident memory of the process: the pages of its address space that are in
// memory, those of libraries and mapped files included (proc_pid_statm(5)).
func Bytes() (int64, error) {
	const path = "/proc/self/statm"
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return parse(path, string(data))
}

// parse reads the second number of a statm, which counts pages.
func parse(path, statm string) (int64, error) {
	fields := strings.Fields(statm)
	if len(fields) < 2 {
		return 0, fmt.Errorf("%s says %q", path, statm)
	}
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return pages * int64(os.Getpagesize()), nil
}

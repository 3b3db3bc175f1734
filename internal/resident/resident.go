// Package resident reads this process's memory use, and limits its growth.
package resident

import (
	"fmt"
	"os"
	"strconv"
	"strings"
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

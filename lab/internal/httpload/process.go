package httpload

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Usage is the use of a process group, from /proc.
type Usage struct {
	Processes   int
	CPU         float64 // seconds, of the processes that live
	Memory      int64   // bytes of resident memory
	Anonymous   int64   // bytes of Memory that no file backs
	Threads     int
	Descriptors int
}

// ticks is the unit of CPU times in /proc: USER_HZ is 100 on all platforms of Linux.
const ticks = 100

// UsageOf returns the use of all processes in a process group.
func UsageOf(group int) (Usage, error) {
	var u Usage
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return u, err
	}
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // the process has ended
		}
		// The name in parentheses may have spaces.
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		if len(fields) < 22 || fields[2] != strconv.Itoa(group) {
			continue
		}
		if err := u.add(filepath.Dir(path), fields); err != nil {
			return u, err
		}
	}
	if u.Processes == 0 {
		return u, fmt.Errorf("the process group %d has no process: the server has ended", group)
	}
	return u, nil
}

// add adds a process, whose fields of stat follow its name.
func (u *Usage) add(folder string, fields []string) error {
	number := func(i int) float64 {
		value, _ := strconv.ParseFloat(fields[i], 64) // the kernel writes numbers
		return value
	}
	u.Processes++
	u.CPU += (number(11) + number(12)) / ticks
	u.Threads += int(number(17))
	if status, err := os.ReadFile(filepath.Join(folder, "status")); err == nil {
		u.Memory += kilobytes(string(status), "VmRSS:")
		u.Anonymous += kilobytes(string(status), "RssAnon:")
	}
	list, err := os.ReadDir(filepath.Join(folder, "fd"))
	if err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("counting the server's descriptors: %w", err)
	}
	u.Descriptors += len(list)
	return nil
}

// kilobytes returns a size in /proc/PID/status, in bytes.
func kilobytes(status, name string) int64 {
	_, rest, _ := strings.Cut(status, name)
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return 0
	}
	n, _ := strconv.ParseInt(fields[0], 10, 64)
	return n << 10
}

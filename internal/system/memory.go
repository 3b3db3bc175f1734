package system

import (
	"io/fs"
	"strconv"
	"strings"
)

// PinnableMemory returns the number of bytes that a process may pin and still leave as much for
// everything else: half of the available memory, and of the limits of the process's cgroup and its
// parents. It returns 0 if the available memory is unknown. root is the machine's root directory.
func PinnableMemory(root fs.FS) int64 {
	limit := availableMemory(root)
	eachGroup(root, "memory", func(group string, v2 bool) {
		name := "memory.limit_in_bytes"
		if v2 {
			name = "memory.max"
		}
		// Without a limit the text is "max", or a number near 2^63.
		if n, err := strconv.ParseInt(firstLine(root, group, name), 10, 64); err == nil && n > 0 {
			limit = min(limit, n)
		}
	})
	return limit / 2
}

// availableMemory returns the MemAvailable of proc_meminfo(5) in bytes.
func availableMemory(root fs.FS) int64 {
	text, err := fs.ReadFile(root, "proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) == 3 && words[0] == "MemAvailable:" {
			kilobytes, _ := strconv.ParseInt(words[1], 10, 64)
			return kilobytes << 10
		}
	}
	return 0
}

package system

import (
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// PinnableMemory returns the number of bytes that the processes of a host may pin together and
// still leave as much for everything else: half of the available memory, and of the free part of
// the process's cgroup and its parents, where cached files count as free. It returns 0 if the
// available memory is unknown. root is the machine's root directory.
func PinnableMemory(root fs.FS) int64 {
	limit := availableMemory(root)
	eachGroup(root, "memory", func(group string, v2 bool) {
		most, used, files := "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
		if v2 {
			most, used, files = "memory.max", "memory.current", ""
		}
		// Without a limit the text is "max", or a number near 2^63.
		n, err := strconv.ParseInt(firstLine(root, group, most), 10, 64)
		if err != nil || n <= 0 {
			return
		}
		inUse, _ := strconv.ParseInt(firstLine(root, group, used), 10, 64) // 0 if it cannot be seen
		cached := statOf(root, group, files+"active_file") + statOf(root, group, files+"inactive_file")
		limit = min(limit, n-max(0, inUse-cached))
	})
	return max(0, limit) / 2
}

// statOf returns a number of a cgroup's memory.stat, or 0.
func statOf(root fs.FS, group, name string) int64 {
	text, err := fs.ReadFile(root, path.Join(group, "memory.stat"))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) == 2 && words[0] == name {
			n, _ := strconv.ParseInt(words[1], 10, 64)
			return n
		}
	}
	return 0
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

package system

import (
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Node is a NUMA node: CPUs, and the memory to which they have the shortest way.
type Node struct {
	Number int
	CPUs   []int
}

const nodeFolder = "sys/devices/system/node"

// Nodes returns the NUMA nodes that have CPUs, by number. It returns nil if the system does not
// say. root is the machine's root directory.
func Nodes(root fs.FS) (nodes []Node) {
	entries, _ := fs.ReadDir(root, nodeFolder) // without the folder there are no nodes
	for _, e := range entries {
		digits, ok := strings.CutPrefix(e.Name(), "node")
		number, err := strconv.Atoi(digits)
		if !ok || err != nil {
			continue
		}
		if cpus := parseCPUs(firstLine(root, path.Join(nodeFolder, e.Name()), "cpulist")); len(cpus) > 0 {
			nodes = append(nodes, Node{number, cpus})
		}
	}
	slices.SortFunc(nodes, func(a, b Node) int { return a.Number - b.Number })
	return nodes
}

// NodeOfPCI returns the number of the NUMA node to which a PCI device is attached, or -1 if the
// system does not say. The address has the form "0000:1B:00.0".
func NodeOfPCI(root fs.FS, address string) int {
	line := firstLine(root, path.Join("sys/bus/pci/devices", strings.ToLower(address)), "numa_node")
	if n, err := strconv.Atoi(line); err == nil && n >= 0 {
		return n
	}
	return -1
}

// AllowedCPUs returns the CPUs that the calling thread may use, after its cpuset and its affinity.
// They are those of the process, unless a thread has another affinity: the main thread may be bound
// by a goroutine that is locked to it. It returns nil if the system does not say.
func AllowedCPUs(root fs.FS) []int {
	text, _ := fs.ReadFile(root, "proc/thread-self/status") // without the file nothing is known
	for line := range strings.Lines(string(text)) {
		if list, ok := strings.CutPrefix(line, "Cpus_allowed_list:"); ok {
			return parseCPUs(list)
		}
	}
	return nil
}

const maxCPUs = 1 << 16

// parseCPUs reads a list such as "0-3,8". It returns nil if the text is no such list.
func parseCPUs(list string) (cpus []int) {
	for part := range strings.SplitSeq(strings.TrimSpace(list), ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		first, errFirst := strconv.Atoi(from)
		last, errLast := strconv.Atoi(to)
		if errFirst != nil || errLast != nil || first < 0 || first > last || last >= maxCPUs {
			return nil
		}
		for c := first; c <= last; c++ {
			cpus = append(cpus, c)
		}
	}
	return cpus
}

// FormatCPUs writes sorted CPUs as a list such as "0-3,8".
func FormatCPUs(cpus []int) string {
	var parts []string
	for i := 0; i < len(cpus); {
		j := i + 1
		for j < len(cpus) && cpus[j] == cpus[j-1]+1 {
			j++
		}
		part := strconv.Itoa(cpus[i])
		if j-i > 1 {
			part += "-" + strconv.Itoa(cpus[j-1])
		}
		parts = append(parts, part)
		i = j
	}
	return strings.Join(parts, ",")
}

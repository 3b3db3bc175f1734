package system

import (
	"reflect"
	"testing"
	"testing/fstest"
)

// twoNodes is the root directory of a machine with two NUMA nodes with CPUs. A third node is the
// memory of a GPU.
func twoNodes() fstest.MapFS {
	root := fstest.MapFS{}
	for path, text := range map[string]string{
		"sys/devices/system/node/node0/cpulist":      "0-1,4\n",
		"sys/devices/system/node/node1/cpulist":      "2-3\n",
		"sys/devices/system/node/node10/cpulist":     "\n",
		"sys/devices/system/node/online":             "0-1\n",
		"sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n",
		"sys/bus/pci/devices/0000:1c:00.0/numa_node": "-1\n",
		"proc/self/status":                           "Cpus_allowed_list:\t0\n", // of the main thread
		"proc/thread-self/status":                    "Name:\tx\nCpus_allowed:\t6\nCpus_allowed_list:\t1-2\nMems_allowed_list:\t0\n",
	} {
		root[path] = &fstest.MapFile{Data: []byte(text)}
	}
	return root
}

func TestTopologyComesFromSysfs(t *testing.T) {
	root := twoNodes()
	if got, want := Nodes(root), []Node{{0, []int{0, 1, 4}}, {1, []int{2, 3}}}; !reflect.DeepEqual(got, want) {
		t.Errorf("nodes: got %v, want %v", got, want)
	}
	if got, want := AllowedCPUs(root), []int{1, 2}; !reflect.DeepEqual(got, want) {
		t.Errorf("allowed CPUs: got %v, want %v", got, want)
	}
	for address, want := range map[string]int{"0000:1B:00.0": 1, "0000:1C:00.0": -1, "0000:1D:00.0": -1} {
		if got := NodeOfPCI(root, address); got != want {
			t.Errorf("the node of %s: got %d, want %d", address, got, want)
		}
	}
	if nodes, cpus := Nodes(fstest.MapFS{}), AllowedCPUs(fstest.MapFS{}); nodes != nil || cpus != nil {
		t.Errorf("without /sys and /proc: got %v and %v, want none", nodes, cpus)
	}
}

func TestListsOfCPUs(t *testing.T) {
	for _, c := range []struct {
		list string
		want []int
		back string
	}{
		{"0", []int{0}, "0"}, {" 0-3,8,10-11\n", []int{0, 1, 2, 3, 8, 10, 11}, "0-3,8,10-11"}, {"5,6", []int{5, 6}, "5-6"},
		{"", nil, ""}, {"3-1", nil, ""}, {"-1", nil, ""}, {"x", nil, ""}, {"0-99999999", nil, ""},
	} {
		got := parseCPUs(c.list)
		if !reflect.DeepEqual(got, c.want) || FormatCPUs(got) != c.back {
			t.Errorf("%q: got %v, written %q, want %v, %q", c.list, got, FormatCPUs(got), c.want, c.back)
		}
	}
}

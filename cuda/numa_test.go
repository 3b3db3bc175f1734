package cuda

import (
	"reflect"
	"testing"
	"testing/fstest"

	"github.com/torchstream/torchstream/internal/system"
)

// A GPU's node and its CPUs come from sysfs. The process's cpuset bounds the CPUs.
func TestNearCPUsAreTheNodesThatTheProcessMayUse(t *testing.T) {
	root := fstest.MapFS{}
	for path, text := range map[string]string{
		"sys/devices/system/node/node0/cpulist":      "0-3\n",
		"sys/devices/system/node/node1/cpulist":      "4-7\n",
		"sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n",
		"sys/bus/pci/devices/0000:1c:00.0/numa_node": "-1\n",
		"proc/thread-self/status":                    "Cpus_allowed_list:\t2-5\n",
	} {
		root[path] = &fstest.MapFile{Data: []byte(text)}
	}
	nodes := system.Nodes(root)
	node, found := nodeAt(root, nodes, "0000:1B:00.0")
	if !found || node.Number != 1 {
		t.Fatalf("got node %d, found: %v, want node 1, true", node.Number, found)
	}
	if got, want := allowedOn(root, node), []int{4, 5}; !reflect.DeepEqual(got, want) {
		t.Errorf("near CPUs: got %v, want %v", got, want)
	}
	if node, found := nodeAt(root, nodes, "0000:1C:00.0"); found {
		t.Errorf("a GPU of an unknown node: got node %d, want none", node.Number)
	}
	if _, found := CPU.hostNode(root); found {
		t.Error("the CPU: got a node, want none")
	}
	if cpus := CPU.NearCPUs(); cpus != nil {
		t.Errorf("the CPU: got near CPUs %v, want none", cpus)
	}
}

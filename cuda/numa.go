package cuda

import (
	"io/fs"
	"os"
	"slices"

	"github.com/torchstream/torchstream/internal/system"
)

// NearCPUs returns the CPUs of the NUMA node to which the GPU is attached, as far as this process
// may use them. They are the best ones for the workers that fill the GPU's pinned memory, as in
// imageloader.Options.WorkerCPUs. NearCPUs returns nil if all CPUs are equally near: the machine
// has one node, or the GPU's node is unknown. It also returns nil for [CPU].
func (d Device) NearCPUs() []int {
	root := os.DirFS("/")
	node, found := d.hostNode(root)
	if !found {
		return nil
	}
	return allowedOn(root, node)
}

// allowedOn returns the CPUs of a node that this process may use.
func allowedOn(root fs.FS, node system.Node) []int {
	allowed := system.AllowedCPUs(root)
	return slices.DeleteFunc(slices.Clone(node.CPUs), func(c int) bool { return !slices.Contains(allowed, c) })
}

// hostNode returns the NUMA node to which the GPU is attached. found is false if the machine has a
// single node, and if the GPU's node is unknown.
func (d Device) hostNode(root fs.FS) (node system.Node, found bool) {
	nodes := system.Nodes(root)
	if d < 0 || len(nodes) < 2 {
		return node, false
	}
	address, err := d.PCIBusID()
	if err != nil {
		return node, false // the caller's next call reports why
	}
	return nodeAt(root, nodes, address)
}

// nodeAt returns the NUMA node of the PCI device at an address.
func nodeAt(root fs.FS, nodes []system.Node, address string) (node system.Node, found bool) {
	number := system.NodeOfPCI(root, address)
	i := slices.IndexFunc(nodes, func(n system.Node) bool { return n.Number == number })
	if i < 0 {
		return node, false
	}
	return nodes[i], true
}

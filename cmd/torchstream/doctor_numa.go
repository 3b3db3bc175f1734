//go:build linux && cgo

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/system"
	"github.com/torchstream/torchstream/torch"
)

// topology describes the machine's NUMA nodes, the CPUs of this process, and the GPUs' nodes.
type topology struct {
	nodes   []system.Node
	allowed []int // the CPUs that this process may use
	gpus    []gpuPlace
}

// gpuPlace is the place of a GPU in a machine.
type gpuPlace struct {
	device cuda.Device
	node   int       // -1: unknown
	rates  []float64 // of copies from the memory of each of topology.nodes, GB/s or notAllowed; nil: not measured
}

// nodesAndCopies reports the NUMA nodes, and how fast each GPU copies from the memory of each node.
func nodesAndCopies() []finding {
	root := os.DirFS("/")
	t := readNodes(root)
	for d := range cuda.DeviceCount() {
		g := gpuPlace{device: cuda.Device(d), node: -1}
		address, err := g.device.PCIBusID()
		if err == nil {
			g.node = system.NodeOfPCI(root, address)
			g.rates, err = t.measure(g.device)
		}
		if err != nil {
			return append(t.findings(), finding{"note", "copies to " + g.device.String(), err.Error(), ""})
		}
		t.gpus = append(t.gpus, g)
	}
	return t.findings()
}

func readNodes(root fs.FS) topology {
	return topology{nodes: system.Nodes(root), allowed: system.AllowedCPUs(root)}
}

// notAllowed stands for the rate of copies from a node whose memory and CPUs this process may not
// use.
const notAllowed = 0

// measure returns the rate of copies to a GPU from the memory of each node, or from any memory if
// the nodes are unknown.
func (t *topology) measure(device cuda.Device) (rates []float64, err error) {
	for _, node := range t.nodes {
		rate := 0.0
		bound, err := system.OnNode(node, func() (err error) {
			rate, err = copyRate(device)
			return err
		})
		if err != nil {
			return nil, err
		}
		if !bound {
			rate = notAllowed
		}
		rates = append(rates, rate)
	}
	if len(t.nodes) == 0 {
		rate, err := copyRate(device)
		return []float64{rate}, err
	}
	return rates, nil
}

// copyRate measures copies to a GPU from new pinned memory, in GB/s. It returns the best of a few.
func copyRate(device cuda.Device) (rate float64, err error) {
	const bytes, copies = 64 << 20, 5
	pinned, err := cuda.NewPinned(bytes)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, pinned.Close()) }()
	host, err := torch.FromMemory(pinned.Bytes(), torch.Uint8, bytes)
	if err != nil {
		return 0, err
	}
	defer host.Close()
	target, err := torch.Zeros(device, torch.Uint8, bytes)
	if err != nil {
		return 0, err
	}
	defer target.Close()
	stream, err := cuda.NewStream(device, cuda.StreamOptions{})
	if err != nil {
		return 0, err
	}
	var ends [copies + 1]*cuda.Event
	for i := range ends {
		if ends[i], err = cuda.NewEvent(cuda.EventOptions{Timing: true}); err != nil {
			return 0, err
		}
		defer ends[i].Close()
	}
	if err := device.Synchronize(); err != nil { // target is filled
		return 0, err
	}
	err = cuda.WithStream(stream, func() error {
		for i, end := range ends {
			if i > 0 {
				if err := target.CopyFrom(host, torch.CopyOptions{NonBlocking: true}); err != nil {
					return err
				}
			}
			if err := end.Record(stream); err != nil {
				return err
			}
		}
		return ends[copies].Synchronize()
	})
	for i := 1; i <= copies && err == nil; i++ {
		took, e := cuda.Elapsed(ends[i-1], ends[i])
		rate, err = max(rate, bytes/1e9/max(took.Seconds(), 1e-9)), e
	}
	return rate, err
}

// slowNode is the share of a GPU's best rate below which copies from a node are slow.
const slowNode = 0.9

// findings returns a finding about the nodes and one about the copies to each GPU.
func (t *topology) findings() []finding {
	found := []finding{t.cpus()}
	for _, g := range t.gpus {
		found = append(found, t.copies(g))
	}
	return found
}

// cpus reports the nodes, and which CPUs the process may use of them.
func (t *topology) cpus() finding {
	if len(t.nodes) == 0 {
		return finding{"ok", "NUMA", "the system names no nodes; this process may use CPUs " +
			system.FormatCPUs(t.allowed), ""}
	}
	var nodes []string
	for _, n := range t.nodes {
		nodes = append(nodes, fmt.Sprintf("node %d has CPUs %s", n.Number, system.FormatCPUs(n.CPUs)))
	}
	f := finding{"ok", "NUMA", strings.Join(nodes, ", ") + "; this process may use CPUs " +
		system.FormatCPUs(t.allowed), ""}
	if len(nodes) > 8 {
		f.Found = printable.Counted(len(nodes), "node", "nodes") + "; this process may use CPUs " +
			system.FormatCPUs(t.allowed)
	}
	return f
}

// copies reports the copies to a GPU.
func (t *topology) copies(g gpuPlace) finding {
	f := finding{State: "ok", What: "copies to " + g.device.String()}
	if len(t.nodes) < 2 {
		f.Found = fmt.Sprintf("%.1f GB/s from pinned memory", g.rates[0])
		return f
	}
	var rates []string
	for i, n := range t.nodes {
		rate := "not allowed"
		if g.rates[i] != notAllowed {
			rate = fmt.Sprintf("%.1f GB/s", g.rates[i])
		}
		rates = append(rates, fmt.Sprintf("%s from node %d", rate, n.Number))
	}
	f.Found = strings.Join(rates, ", ")
	own := slices.IndexFunc(t.nodes, func(n system.Node) bool { return n.Number == g.node })
	if own < 0 {
		f.Found += "; its node is unknown"
		return f
	}
	f.Found += fmt.Sprintf("; its node is %d", g.node)
	near := func(c int) bool { return slices.Contains(t.nodes[own].CPUs, c) }
	switch {
	case !slices.ContainsFunc(t.allowed, near):
		f.State, f.ToDo = "note", fmt.Sprintf("this process may use none of that node's CPUs: run it there, as with "+
			"numactl --cpunodebind=%d or taskset -c %s", g.node, system.FormatCPUs(t.nodes[own].CPUs))
	case g.rates[own] != notAllowed && g.rates[own] < slowNode*slices.Max(g.rates):
		f.State, f.ToDo = "note", "copies from its own node are slower: see whether the BIOS reports the GPU's node, "+
			"and what else uses its PCI Express slot"
	}
	return f
}

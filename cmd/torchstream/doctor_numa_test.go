//go:build linux && cgo

package main

import (
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/system"
)

// The doctor shows the nodes, the process's CPUs, and the rate of copies from each node. It notes a
// process that may not use the CPUs near a GPU.
func TestDoctorShowsNodes(t *testing.T) {
	two := []system.Node{{Number: 0, CPUs: []int{0, 1}}, {Number: 1, CPUs: []int{2, 3}}}
	gpu := func(node int, rates ...float64) []gpuPlace { return []gpuPlace{{cuda.Device(0), node, rates}} }
	for _, c := range []struct {
		name        string
		t           topology
		cpus        string // what the row of nodes says
		state       string // of the row of copies
		found, toDo string
	}{
		{"one node", topology{two[:1], []int{0}, gpu(0, 55.04)}, "node 0 has CPUs 0-1; this process may use CPUs 0",
			"ok", "55.0 GB/s from pinned memory", ""},
		{"no nodes", topology{nil, []int{0, 1}, gpu(-1, 50)}, "the system names no nodes; this process may use CPUs 0-1",
			"ok", "50.0 GB/s from pinned memory", ""},
		{"two nodes", topology{two, []int{0, 1, 2, 3}, gpu(1, 30, 55)},
			"node 0 has CPUs 0-1, node 1 has CPUs 2-3; this process may use CPUs 0-3",
			"ok", "30.0 GB/s from node 0, 55.0 GB/s from node 1; its node is 1", ""},
		{"the wrong node", topology{two, []int{0, 1}, gpu(1, 30, 55)}, "may use CPUs 0-1", "note", "its node is 1",
			"numactl --cpunodebind=1 or taskset -c 2-3"},
		{"a slow node", topology{two, []int{0, 1}, gpu(0, 30, 55)}, "may use CPUs 0-1", "note", "its node is 0",
			"copies from its own node are slower"},
		{"a node that is not allowed", topology{two, []int{0, 1}, gpu(0, notAllowed, 55)}, "may use CPUs 0-1", "ok",
			"not allowed from node 0, 55.0 GB/s from node 1; its node is 0", ""},
		{"an unknown node", topology{two, []int{0, 1}, gpu(-1, 30, 55)}, "may use CPUs 0-1", "ok", "its node is unknown", ""},
	} {
		rows := c.t.findings()
		if len(rows) != 2 || !strings.HasSuffix(rows[0].Found, c.cpus) || rows[0].State != "ok" {
			t.Fatalf("%s: got %+v, want two rows, the first ok with %q", c.name, rows, c.cpus)
		}
		if f := rows[1]; f.State != c.state || !strings.HasSuffix(f.Found, c.found) || !strings.Contains(f.ToDo, c.toDo) ||
			(f.ToDo == "") != (c.toDo == "") {
			t.Errorf("%s: got %+v, want %s, %q and %q", c.name, f, c.state, c.found, c.toDo)
		}
	}
	if _, stdout, _ := command(t, "doctor"); !strings.Contains(stdout, "this process may use CPUs ") {
		t.Errorf("the doctor printed no CPUs:\n%s\nwant it with %q", stdout, "this process may use CPUs ")
	}
}

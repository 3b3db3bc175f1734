package system

import (
	"errors"
	"os"
	"reflect"
	"runtime"
	"syscall"
	"testing"
	"unsafe"
)

// policy returns the memory policy of the calling thread, and its first 64 nodes.
func policy(t *testing.T) (mode int32, nodes uint64) {
	t.Helper()
	var mask nodeMask
	_, _, errno := syscall.Syscall6(syscall.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&mode)),
		uintptr(unsafe.Pointer(&mask)), mask.bits()-1, 0, 0, 0)
	if errno != 0 {
		t.Skipf("get_mempolicy: %v", errno)
	}
	return mode, mask[0]
}

// allowed returns the CPUs of the calling thread.
func allowed(t *testing.T) (cpus []int) {
	t.Helper()
	mask := new(cpuMask)
	if _, _, errno := syscall.Syscall(syscall.SYS_SCHED_GETAFFINITY, 0, unsafe.Sizeof(*mask),
		uintptr(unsafe.Pointer(mask))); errno != 0 {
		t.Fatal(errno)
	}
	for c := range maxCPUs {
		if mask[c/64]>>(c%64)&1 != 0 {
			cpus = append(cpus, c)
		}
	}
	return cpus
}

// Inside of OnNode, memory comes from the node. Afterwards the thread has its old policy and CPUs.
func TestOnNodePrefersTheNodesMemory(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	nodes := Nodes(os.DirFS("/"))
	if len(nodes) == 0 {
		t.Skip("the system has no NUMA nodes")
	}
	node := nodes[len(nodes)-1]
	mode, mask := policy(t)
	cpus := allowed(t)
	want := errors.New("f's error")
	bound, err := OnNode(node, func() error {
		if m, n := policy(t); m != 1 || n != 1<<node.Number {
			if reflect.DeepEqual(allowed(t), node.CPUs) {
				t.Skip("the process may not set its memory policy") // the other way works
			}
			t.Errorf("inside: policy %d, nodes %b, want 1, %b", m, n, 1<<node.Number)
		}
		return want
	})
	if err != want || !bound {
		t.Errorf("OnNode: got %v, %v, want true, %v", bound, err, want)
	}
	if m, n := policy(t); m != mode || n != mask {
		t.Errorf("after OnNode: policy %d, nodes %b, want %d, %b", m, n, mode, mask)
	}
	if got := allowed(t); !reflect.DeepEqual(got, cpus) {
		t.Errorf("after OnNode: CPUs %v, want %v", got, cpus)
	}
}

// Without the privilege to set a policy, the thread runs on the node's CPUs. If that is not allowed
// either, OnNode still calls the function.
func TestOnNodeWithoutPolicyRunsOnTheNodesCPUs(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cpus := allowed(t)
	node := Node{0, cpus[len(cpus)-1:]}
	refused := func(Node) (func() error, error) { return nil, syscall.EPERM }
	for _, c := range []struct {
		ways  []func(Node) (func() error, error)
		want  []int
		bound bool
	}{
		{[]func(Node) (func() error, error){refused, runOn}, node.CPUs, true},
		{[]func(Node) (func() error, error){refused, refused}, cpus, false},
	} {
		called := false
		bound, err := onNode(node, c.ways, func() error {
			called = true
			if got := allowed(t); !reflect.DeepEqual(got, c.want) {
				t.Errorf("inside: CPUs %v, want %v", got, c.want)
			}
			return nil
		})
		if err != nil || !called || bound != c.bound {
			t.Errorf("onNode: error %v, called: %v, bound: %v, want nil, true, %v", err, called, bound, c.bound)
		}
		if got := allowed(t); !reflect.DeepEqual(got, cpus) {
			t.Errorf("afterwards: CPUs %v, want %v", got, cpus)
		}
	}
	// A node that does not exist is no error.
	if bound, err := OnNode(Node{63, []int{maxCPUs - 1}}, func() error { return nil }); err != nil || bound {
		t.Errorf("a node that does not exist: got %v, %v, want false, nil", bound, err)
	}
}

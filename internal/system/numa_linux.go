package system

import (
	"os"
	"runtime"
	"syscall"
	"unsafe"
)

// OnNode calls f on a thread whose new memory comes from the node, as long as the node has some.
// Where the process may not set the policy of its memory, as in many containers, the thread runs on
// the node's CPUs instead. If neither is allowed, f runs as it would without OnNode, and bound is
// false. OnNode returns f's error.
func OnNode(node Node, f func() error) (bound bool, err error) {
	return onNode(node, []func(Node) (restore func() error, err error){preferMemory, runOn}, f)
}

// onNode tries the ways to bind the thread, in turn, until one works.
func onNode(node Node, ways []func(Node) (restore func() error, err error), f func() error) (bound bool,
	err error) {
	runtime.LockOSThread()
	for _, way := range ways {
		restore, err := way(node)
		if err != nil {
			continue
		}
		defer func() {
			if restore() == nil { // otherwise the thread ends with its goroutine
				runtime.UnlockOSThread()
			}
		}()
		return true, f()
	}
	runtime.UnlockOSThread()
	return false, f()
}

// nodeMask is a set of NUMA nodes as the kernel reads it. The kernel has at most 1024 nodes.
type nodeMask [1024 / 64]uint64

// bits is the number of bits for set_mempolicy, which ignores the last one.
func (m *nodeMask) bits() uintptr { return uintptr(64*len(m) + 1) }

// preferMemory makes the node the first source of the calling thread's new memory.
func preferMemory(node Node) (restore func() error, err error) {
	const preferred = 1 // MPOL_PREFERRED
	var before nodeMask
	var mode int32
	if _, _, errno := syscall.Syscall6(syscall.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&mode)),
		uintptr(unsafe.Pointer(&before)), before.bits()-1, 0, 0, 0); errno != 0 {
		return nil, os.NewSyscallError("get_mempolicy", errno)
	}
	var mask nodeMask
	if node.Number < 0 || node.Number >= 64*len(mask) {
		return nil, syscall.EINVAL
	}
	mask[node.Number/64] = 1 << (node.Number % 64)
	if err := setPolicy(preferred, &mask); err != nil {
		return nil, err
	}
	return func() error { return setPolicy(mode, &before) }, nil
}

func setPolicy(mode int32, nodes *nodeMask) error {
	const defaultPolicy = 0 // MPOL_DEFAULT, which has no nodes
	var errno syscall.Errno
	if mode == defaultPolicy {
		_, _, errno = syscall.Syscall(syscall.SYS_SET_MEMPOLICY, defaultPolicy, 0, 0)
	} else {
		_, _, errno = syscall.Syscall(syscall.SYS_SET_MEMPOLICY, uintptr(mode), uintptr(unsafe.Pointer(nodes)),
			nodes.bits())
	}
	if errno != 0 {
		return os.NewSyscallError("set_mempolicy", errno)
	}
	return nil
}

// cpuMask is a set of CPUs as the kernel reads it.
type cpuMask [maxCPUs / 64]uint64

// runOn moves the calling thread to the node's CPUs. Linux gives a thread the memory of the node on
// which it runs.
func runOn(node Node) (restore func() error, err error) {
	before, after := new(cpuMask), new(cpuMask)
	n, _, errno := syscall.Syscall(syscall.SYS_SCHED_GETAFFINITY, 0, unsafe.Sizeof(*before),
		uintptr(unsafe.Pointer(before)))
	if errno != 0 {
		return nil, os.NewSyscallError("sched_getaffinity", errno)
	}
	for _, c := range node.CPUs {
		after[c/64] |= 1 << (c % 64)
	}
	set := func(mask *cpuMask) error {
		_, _, errno := syscall.Syscall(syscall.SYS_SCHED_SETAFFINITY, 0, n, uintptr(unsafe.Pointer(mask)))
		if errno != 0 {
			return os.NewSyscallError("sched_setaffinity", errno)
		}
		return nil
	}
	if err := set(after); err != nil {
		return nil, err
	}
	return func() error { return set(before) }, nil
}

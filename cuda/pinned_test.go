//go:build linux

package cuda

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"github.com/torchstream/torchstream/internal/capi"
)

func TestNewPinnedRefusesEmptyBuffers(t *testing.T) {
	for _, bytes := range []int{0, -1} {
		if _, err := NewPinned(bytes); !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("NewPinned(%d): got %v, want ErrInvalidArgument", bytes, err)
		}
	}
}

// NewPinned returns a nil Pinned with an error; Close and Bytes accept it.
func TestNilPinnedIsEmpty(t *testing.T) {
	var p *Pinned
	if err := p.Close(); err != nil || p.Bytes() != nil {
		t.Errorf("Close: %v; Bytes: %v, want nil, nil", err, p.Bytes())
	}
}

func TestPinned(t *testing.T) {
	onGPU(t, 1)
	const n = 1<<20 + 12
	before := PinnedBytes()
	p := must[*Pinned](t)(NewPinned(n))
	if got := PinnedBytes() - before; got != n {
		t.Errorf("%d more bytes are pinned, want %d", got, n)
	}
	memory := p.Bytes()
	if len(memory) != n || cap(memory) != n || !bytes.Equal(memory, make([]byte, n)) {
		t.Errorf("%d bytes with capacity %d, or not zeroed, want %d zeros", len(memory), cap(memory), n)
	}
	for i := range memory {
		memory[i] = byte(i % 251)
	}
	host := must[*capi.Tensor](t)(capi.TensorFromMemory(memory, []int64{n}, capi.Uint8))
	if info := must[capi.TensorInfo](t)(capi.DescribeTensor(host)); !info.Pinned {
		t.Error("Pinned of LibTorch's tensor over the memory = false, want true")
	}
	device := must[*capi.Tensor](t)(capi.EmptyTensor([]int64{n}, capi.Uint8, 0, capi.Contiguous))
	defer capi.FreeTensor(device)
	check(t, capi.CopyTensor(device, host, true))
	back := make([]byte, n)
	check(t, capi.ReadTensor(device, back))
	if !bytes.Equal(memory, back) {
		t.Errorf("byte %d is not the one sent to the device, want equal bytes", firstDifference(memory, back))
	}
	capi.FreeTensor(host)
	for range 2 {
		check(t, p.Close())
	}
	if got := p.Bytes(); got != nil {
		t.Errorf("Bytes after Close has %d bytes, want nil", len(got))
	}
	if got := PinnedBytes(); got != before {
		t.Errorf("%d bytes are pinned, %d were before", got, before)
	}
}

// The C side takes a buffer only when it succeeds, so that after an error Close may be repeated.
func TestPinnedStaysOpenWhenTheDriverFails(t *testing.T) {
	if DeviceCount() > 0 {
		t.Skip("needs a machine without a GPU, where every call of the driver fails")
	}
	memory := mapped(t, 64) // as a ts_pinned of 0 bytes
	p := newPinned((*capi.Pinned)(unsafe.Pointer(&memory[0])), memory)
	s := newSlab(p, 1, 1, 64)
	before := PinnedBytes()
	for range 2 {
		if err := p.Close(); err == nil {
			t.Error("Pinned.Close: got no error, want one")
		}
		if err := s.Close(); err == nil {
			t.Error("Slab.Close: got no error, want one")
		}
	}
	if got := PinnedBytes(); p.Bytes() == nil || got != before {
		t.Errorf("after a failed Close: buffer nil: %v, %d bytes pinned, want false, %d",
			p.Bytes() == nil, got, before)
	}
	p.c = nil
	check(t, s.Close())
	check(t, p.Close())
	if got := p.Bytes(); got != nil {
		t.Errorf("Bytes after Close has %d bytes, want nil", len(got))
	}
}

func TestRegisterPinnedRefusesGoMemory(t *testing.T) {
	for name, memory := range map[string][]byte{"nothing": nil, "small Go memory": make([]byte, 100),
		"large Go memory": make([]byte, 1<<22)} {
		t.Run(name, func(t *testing.T) {
			if _, err := RegisterPinned(memory); !errors.Is(err, ErrInvalidArgument) {
				t.Errorf("got %v, want ErrInvalidArgument", err)
			}
		})
	}
	if DeviceCount() > 0 {
		return
	}
	// Accepted memory gets as far as the missing GPU: memory outside of the Go heap, and Go memory
	// that a Pinner holds.
	held := make([]byte, 1<<16)
	var pinner runtime.Pinner
	defer pinner.Unpin()
	pinner.Pin(&held[0])
	for name, memory := range map[string][]byte{"a mapping": mapped(t, 4096), "held Go memory": held} {
		t.Run(name, func(t *testing.T) {
			if _, err := RegisterPinned(memory); !errors.Is(err, ErrNoDevice) {
				t.Errorf("got %v, want ErrNoDevice", err)
			}
		})
	}
}

func TestRegisterReadOnlyRefusesGoMemory(t *testing.T) {
	for name, memory := range map[string][]byte{"nothing": nil, "Go memory": make([]byte, 1<<22)} {
		t.Run(name, func(t *testing.T) {
			if _, err := RegisterReadOnly(memory); !errors.Is(err, ErrInvalidArgument) {
				t.Errorf("got %v, want ErrInvalidArgument", err)
			}
		})
	}
}

// TestRegisterReadOnlyFile: a copy from the mapping of a file gets the file's bytes.
func TestRegisterReadOnlyFile(t *testing.T) {
	onGPU(t, 1)
	want := bytes.Repeat([]byte("torchstream"), 100_000)
	path := filepath.Join(t.TempDir(), "file")
	check(t, os.WriteFile(path, want, 0o600))
	file := must[*os.File](t)(os.Open(path))
	defer file.Close()
	memory := must[[]byte](t)(syscall.Mmap(int(file.Fd()), 0, len(want), syscall.PROT_READ, syscall.MAP_SHARED))
	defer func() { check(t, syscall.Munmap(memory)) }()
	before := PinnedBytes()
	p := must[*Pinned](t)(RegisterReadOnly(memory))
	if got := PinnedBytes() - before; got != int64(len(memory)) {
		t.Errorf("%d more bytes are pinned, want %d", got, len(memory))
	}
	host := must[*capi.Tensor](t)(capi.TensorFromMemory(p.Bytes(), []int64{int64(len(memory))}, capi.Uint8))
	if info := must[capi.TensorInfo](t)(capi.DescribeTensor(host)); !info.Pinned {
		t.Error("Pinned of LibTorch's tensor over the memory = false, want true")
	}
	capi.FreeTensor(host)
	check(t, p.Close())
	if !bytes.Equal(memory, want) || PinnedBytes() != before {
		t.Errorf("after Close the bytes of the file are there: %v, %d bytes are pinned, want true, %d",
			bytes.Equal(memory, want), PinnedBytes(), before)
	}
}

func TestRegisterPinned(t *testing.T) {
	onGPU(t, 1)
	memory := mapped(t, 1<<20+4096)
	before := PinnedBytes()
	p := must[*Pinned](t)(RegisterPinned(memory))
	if got := PinnedBytes() - before; got != int64(len(memory)) {
		t.Errorf("%d more bytes are pinned, want %d", got, len(memory))
	}
	if again, err := RegisterPinned(memory[4096:]); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("pinned twice: got %v, %v, want ErrInvalidArgument", again, err)
	}
	host := must[*capi.Tensor](t)(capi.TensorFromMemory(p.Bytes(), []int64{int64(len(memory))}, capi.Uint8))
	if info := must[capi.TensorInfo](t)(capi.DescribeTensor(host)); !info.Pinned {
		t.Error("Pinned of LibTorch's tensor over the memory = false, want true")
	}
	capi.FreeTensor(host)
	check(t, p.Close())
	memory[0] = 1 // still mapped
	host = must[*capi.Tensor](t)(capi.TensorFromMemory(memory, []int64{int64(len(memory))}, capi.Uint8))
	defer capi.FreeTensor(host)
	if info := must[capi.TensorInfo](t)(capi.DescribeTensor(host)); info.Pinned {
		t.Error("Pinned of a tensor over the memory after Close = true, want false")
	}
}

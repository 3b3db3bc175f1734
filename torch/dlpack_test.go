//go:build linux

package torch_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// managedTensor is DLPack's DLManagedTensorVersioned on a 64-bit machine. Tests make such structs.
type managedTensor struct {
	major, minor uint32
	context      uintptr
	deleter      uintptr
	flags        uint64
	data         uintptr
	deviceType   int32
	device       int32
	ndim         int32
	code, bits   uint8
	lanes        uint16
	shape        uintptr
	strides      uintptr
	offset       uint64
}

// cMemory returns memory outside of the Go heap, which C may keep.
func cMemory(t *testing.T, bytes int) []byte {
	t.Helper()
	m, err := syscall.Mmap(-1, 0, bytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Munmap(m) })
	return m
}

// foreignStruct returns a struct without a deleter over 6 float32 in C memory.
func foreignStruct(t *testing.T) (*managedTensor, []float32) {
	t.Helper()
	memory := cMemory(t, 4096)
	m := (*managedTensor)(unsafe.Pointer(&memory[0]))
	sizes := unsafe.Slice((*int64)(unsafe.Pointer(&memory[1024])), 4)
	values := unsafe.Slice((*float32)(unsafe.Pointer(&memory[2048])), 6)
	copy(sizes, []int64{2, 3, 3, 1})
	copy(values, []float32{1, 2, 3, 4, 5, 6})
	*m = managedTensor{
		major: 1, data: uintptr(unsafe.Pointer(&values[0])), deviceType: 1, ndim: 2, code: 2, bits: 32, lanes: 1,
		shape: uintptr(unsafe.Pointer(&sizes[0])), strides: uintptr(unsafe.Pointer(&sizes[2])),
	}
	return m, values
}

// A tensor from another library's struct uses the struct's memory, and errors describe an invalid
// struct.
func TestFromDLPack(t *testing.T) {
	m, values := foreignStruct(t)
	x, err := torch.FromDLPack(unsafe.Pointer(m), torch.DLPackOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if x.AddScalar_(1).Err() != nil || !slices.Equal(values, []float32{2, 3, 4, 5, 6, 7}) ||
		!slices.Equal(x.Shape(), []int64{2, 3}) {
		t.Errorf("got %v and %v, want [2 3 4 5 6 7], [2 3], nil", x, values)
	}
	x.Close()

	for _, c := range []struct {
		name  string
		spoil func(*managedTensor)
		want  error
	}{
		{"dimensions", func(m *managedTensor) { m.ndim = 1 << 30 }, cuda.ErrInvalidArgument},
		{"shape", func(m *managedTensor) { m.shape = 0 }, cuda.ErrInvalidArgument},
		{"type", func(m *managedTensor) { m.code, m.bits = 5, 16 }, cuda.ErrInvalidArgument},
		{"read-only", func(m *managedTensor) { m.flags = 1 }, cuda.ErrInvalidArgument},
		{"device", func(m *managedTensor) { m.deviceType, m.device = 2, 1000 }, cuda.ErrNoDevice},
		{"version", func(m *managedTensor) { m.major = 7 }, cuda.ErrUnsupported},
	} {
		m, _ := foreignStruct(t)
		c.spoil(m)
		if x, err := torch.FromDLPack(unsafe.Pointer(m), torch.DLPackOptions{}); !errors.Is(err, c.want) ||
			x.Err() == nil {
			t.Errorf("%s: got %v, want %v", c.name, err, c.want)
		}
	}
	for name, pointer := range map[string]unsafe.Pointer{"nil": nil, "Go memory": unsafe.Pointer(new(managedTensor))} {
		if _, err := torch.FromDLPack(pointer, torch.DLPackOptions{}); !errors.Is(err, cuda.ErrInvalidArgument) {
			t.Errorf("%s: got %v, want ErrInvalidArgument", name, err)
		}
	}
	m.flags = 1
	y, err := torch.FromDLPack(unsafe.Pointer(m), torch.DLPackOptions{ReadOnly: true})
	if err != nil {
		t.Error(err)
	}
	y.Close()
}

// A tensor that is exported and imported again uses the same memory, which lives until both are
// closed.
func TestDLPackRoundTrip(t *testing.T) {
	for _, unversioned := range []bool{false, true} {
		o := torch.DLPackOptions{Unversioned: unversioned}
		values := []int64{1, 2, 3, 4, 5, 6}
		x, err := torch.Borrow(values, 2, 3)
		if err != nil {
			t.Fatal(err)
		}
		p, err := x.Transpose(0, 1).ToDLPack(o)
		if err != nil {
			t.Fatal(err)
		}
		x.Close()
		y, err := torch.FromDLPack(p, o)
		if err != nil {
			t.Fatal(err)
		}
		values[0] = 7
		got, err := y.Int64s()
		if err != nil || !slices.Equal(got, []int64{7, 4, 2, 5, 3, 6}) || !slices.Equal(y.Shape(), []int64{3, 2}) {
			t.Errorf("got %v, %v", got, err)
		}
		y.Close()
	}
	torch.FreeDLPack(nil, torch.DLPackOptions{})
}

// The memory of a struct that nobody takes lives until FreeDLPack.
func TestFreeDLPack(t *testing.T) {
	before := settled(t)
	values := new([1 << 16]float32)
	gone := make(chan struct{})
	runtime.AddCleanup(values, func(c chan struct{}) { close(c) }, gone)
	x, err := torch.Borrow(values[:])
	if err != nil {
		t.Fatal(err)
	}
	p, err := x.ToDLPack(torch.DLPackOptions{})
	if err != nil {
		t.Fatal(err)
	}
	x.Close()
	if n := torch.LiveTensors(); n != before {
		t.Errorf("%d tensors are open, want %d", n, before)
	}
	torch.FreeDLPack(p, torch.DLPackOptions{})
	torch.NewScope("").Close()
	values = nil
	for end := time.Now().Add(20 * time.Second); ; runtime.Gosched() {
		z, err := torch.Borrow([]float32{1}) // returns memory that no tensor uses
		if err != nil {
			t.Fatal(err)
		}
		z.Close()
		runtime.GC()
		select {
		case <-gone:
			return
		default:
		}
		if time.Now().After(end) {
			t.Fatal("20 s after the struct's deleter the memory is still held, want it to be freed")
		}
	}
}

func TestToDLPackRefuses(t *testing.T) {
	full := func() *torch.Tensor {
		x, err := torch.Ones(cuda.CPU, torch.Float32, 2)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { x.Close() })
		return x
	}
	grad, lent, closed := full(), full(), full()
	if err := errors.Join(grad.SetRequiresGrad(true), lent.Lend(true), closed.Close()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		x    *torch.Tensor
		want error
	}{
		{"gradient", grad, cuda.ErrInvalidArgument},
		{"slot", lent, cuda.ErrInvalidArgument},
		{"closed", closed, torch.ErrClosed},
		{"nil", nil, cuda.ErrInvalidArgument},
	} {
		if p, err := c.x.ToDLPack(torch.DLPackOptions{}); !errors.Is(err, c.want) || p != nil {
			t.Errorf("%s: got %v, want %v", c.name, err, c.want)
		}
	}
}

// The work on the consumer's stream runs after the export, and an import runs after the work on the
// producer's stream.
func TestDLPackIsOrdered(t *testing.T) {
	o := newOrdering(t)
	writer, other := o.streams[0], o.streams[1]
	pass := func(name string, export, in cuda.Stream, eo, io torch.DLPackOptions) {
		t.Helper()
		o.reset()
		var p unsafe.Pointer
		o.on(export, func() (err error) {
			if err := errors.Join(o.busy(), o.dst.Fill_(freshValue).Err()); err != nil {
				return err
			}
			p, err = o.dst.ToDLPack(eo)
			return err
		})
		o.on(in, func() error {
			y, err := torch.FromDLPack(p, io)
			if err != nil {
				return err
			}
			defer y.Close()
			return o.read.CopyFrom(y, torch.CopyOptions{})
		})
		o.want(name, freshValue)
	}
	// The export orders, and the import does not.
	pass("export", writer, other, torch.DLPackOptions{Stream: other}, torch.DLPackOptions{NoOrder: true})
	// The import orders, and the export does not.
	pass("import", writer, other, torch.DLPackOptions{NoOrder: true}, torch.DLPackOptions{Stream: writer})
}

// allocated returns the bytes in live tensors of the first GPU.
func allocated(t *testing.T) int64 {
	t.Helper()
	m, err := gpu.Memory()
	if err != nil {
		t.Fatal(err)
	}
	return m.Allocated
}

// untilAllocated waits until a thread of the library has given memory back.
func untilAllocated(t *testing.T, want int64) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); allocated(t) > want; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%d bytes are allocated after 20 s, want %d", allocated(t), want)
		}
	}
}

// fresh exports a new tensor of the stream, closes it, and returns the struct and the memory's
// address. It waits until the values are written.
func (o *ordering) fresh(on cuda.Stream, options torch.DLPackOptions) (p unsafe.Pointer, address uintptr) {
	o.t.Helper()
	o.on(on, func() error {
		x, err := torch.Full(gpu, torch.Float32, freshValue, orderedElements)
		if err != nil {
			return err
		}
		defer x.Close()
		if address, err = x.Pointer(); err != nil {
			return err
		}
		p, err = x.ToDLPack(options)
		return err
	})
	o.check(gpu.Synchronize())
	return p, address
}

// overwrite makes a tensor on the stream, in the memory at the address if it is free.
func (o *ordering) overwrite(on cuda.Stream, address uintptr, mustReuse bool) {
	o.t.Helper()
	o.on(on, func() error {
		z, err := torch.Full(gpu, torch.Float32, staleValue, orderedElements)
		if err != nil {
			return err
		}
		defer z.Close()
		is, err := z.Pointer()
		if err == nil && mustReuse && is != address {
			o.t.Log("the allocator did not reuse the memory: the case proves nothing")
		}
		return err
	})
}

// Memory that another library still reads on its stream is not reused, although the tensor and the
// struct are gone.
func TestDLPackMemoryWaitsForTheConsumer(t *testing.T) {
	o := newOrdering(t)
	owner, other := o.streams[0], o.streams[1]
	o.reset()
	before := allocated(t)
	p, address := o.fresh(owner, torch.DLPackOptions{Stream: other})
	// The other library reads late, and calls the deleter without waiting.
	o.on(other, func() error {
		y, err := torch.FromDLPack(p, torch.DLPackOptions{NoOrder: true})
		if err != nil {
			return err
		}
		defer y.Close()
		return errors.Join(o.busy(), o.read.CopyFrom(y, torch.CopyOptions{}))
	})
	untilAllocated(t, before)
	o.overwrite(owner, address, false)
	o.want("a late read", freshValue)
}

// When the last tensor over imported memory ends, the producer's stream comes after the work of the
// streams that used the memory.
func TestDLPackGivesMemoryBackInOrder(t *testing.T) {
	o := newOrdering(t)
	producer, user := o.streams[0], o.streams[1]
	for i, reader := range append([]cuda.Stream{user}, o.others()[1:]...) {
		name := "the stream of the import"
		o.reset()
		before := allocated(t)
		p, address := o.fresh(producer, torch.DLPackOptions{NoOrder: true})
		o.on(user, func() error {
			y, err := torch.FromDLPack(p, torch.DLPackOptions{Stream: producer})
			if err != nil {
				return err
			}
			defer y.Close()
			if reader != user {
				name = fmt.Sprintf("stream %d, of RecordStream", i)
				if err := errors.Join(reader.Wait(user), y.RecordStream(reader)); err != nil {
					return err
				}
			}
			return cuda.WithStream(reader, func() error {
				return errors.Join(o.busy(), o.read.CopyFrom(y, torch.CopyOptions{}))
			})
		})
		untilAllocated(t, before)
		o.overwrite(producer, address, true)
		o.want(name, freshValue)
	}
}

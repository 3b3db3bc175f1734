package torch

import (
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// Borrow returns a CPU tensor over the slice, without copying. Slice and tensor share the memory: a
// change of one is visible in the other. The shape must have as many elements as data; without a
// shape the tensor has one dimension. The slice stays in memory, and is not moved, until the tensor
// and everything that shares its storage (views, autograd) has gone. If data is not Go memory, the
// caller must keep it valid until then. Accesses are not ordered: do not use the slice while an
// operator uses the tensor.
func Borrow[T Element](data []T, shape ...int64) (*Tensor, error) {
	if len(shape) == 0 {
		shape = []int64{int64(len(data))}
	}
	strides := make([]int64, len(shape))
	elements := int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		strides[i] = elements
		elements *= max(shape[i], 0)
	}
	if elements != int64(len(data)) {
		err := opError("Borrow", nil, invalid("the shape %v has %d elements, and the slice has %d", shape,
			elements, len(data)))
		return failed(err), err
	}
	return borrow("Borrow", data, shape, strides)
}

// BorrowStrided is [Borrow] with strides: element [i j ...] is data[i*strides[0] + j*strides[1] +
// ...]. The slice may have elements that the tensor does not. For a matrix of gonum:
//
//	m := dense.RawMatrix()
//	x, err := torch.BorrowStrided(m.Data, []int64{int64(m.Rows), int64(m.Cols)}, []int64{int64(m.Stride), 1})
func BorrowStrided[T Element](data []T, shape, strides []int64) (*Tensor, error) {
	if len(shape) != len(strides) {
		err := opError("BorrowStrided", nil, invalid("%d sizes and %d strides", len(shape), len(strides)))
		return failed(err), err
	}
	return borrow("BorrowStrided", data, shape, strides)
}

// Matrix is a matrix of numbers. All matrices of gonum implement it.
type Matrix interface {
	Dims() (rows, columns int)
	At(row, column int) float64
}

// FromMatrix returns a CPU tensor with a copy of the matrix, float64 [rows columns].
func FromMatrix(m Matrix) (*Tensor, error) {
	if m == nil {
		err := opError("FromMatrix", nil, invalid("the matrix is nil"))
		return failed(err), err
	}
	rows, columns := m.Dims()
	values := make([]float64, 0, max(rows*columns, 0))
	for i := range rows {
		for j := range columns {
			values = append(values, m.At(i, j))
		}
	}
	return from("FromMatrix", bytesOf(values), len(values), Float64, []int64{int64(rows), int64(columns)})
}

// borrowed holds Go memory that tensors use, by token. LibTorch frees storages on any thread, where
// no Go code may run. So LibTorch only queues the tokens, and Go calls that make or close tensors
// release them.
var borrowed struct {
	mu    sync.Mutex
	next  int64
	pins  map[int64]*runtime.Pinner
	count atomic.Int64
}

func borrow[T Element](op string, data []T, shape, strides []int64) (*Tensor, error) {
	reclaim()
	pins := new(runtime.Pinner)
	if len(data) > 0 {
		pins.Pin(&data[0])
	}
	token := lend(pins)
	c, err := capi.BorrowTensor(bytesOf(data), shape, strides, int32(dtypeOf[T]()), token)
	if err != nil {
		unlend(token)
	}
	return made(op, c, err)
}

func lend(pins *runtime.Pinner) (token int64) {
	borrowed.mu.Lock()
	defer borrowed.mu.Unlock()
	if borrowed.pins == nil {
		borrowed.pins = map[int64]*runtime.Pinner{}
	}
	borrowed.next++
	borrowed.pins[borrowed.next] = pins
	borrowed.count.Add(1)
	return borrowed.next
}

func unlend(token int64) {
	borrowed.mu.Lock()
	defer borrowed.mu.Unlock()
	if pins := borrowed.pins[token]; pins != nil {
		pins.Unpin()
		delete(borrowed.pins, token)
		borrowed.count.Add(-1)
	}
}

// reclaim releases memory that no tensor uses any more, and Go functions that no graph calls.
func reclaim() {
	capi.ReleaseCallbacks()
	if borrowed.count.Load() == 0 {
		return
	}
	var tokens [32]int64
	for {
		n := capi.TakeBorrowed(tokens[:])
		for _, token := range tokens[:n] {
			unlend(token)
		}
		if n < len(tokens) {
			return
		}
	}
}

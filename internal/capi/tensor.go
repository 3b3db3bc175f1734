//go:build linux

package capi

/*
#include <stdlib.h>
#include "torchstream.h"
#cgo noescape ts_tensor_new
#cgo nocallback ts_tensor_new
#cgo noescape ts_tensor_new_pinned
#cgo nocallback ts_tensor_new_pinned
#cgo nocallback ts_tensor_set_lent
#cgo noescape ts_tensor_is_lent
#cgo nocallback ts_tensor_is_lent
#cgo noescape ts_tensor_from_data
#cgo nocallback ts_tensor_from_data
#cgo nocallback ts_tensor_borrow
#cgo noescape ts_borrowed_take
#cgo nocallback ts_borrowed_take
#cgo noescape ts_operator_call_results
#cgo nocallback ts_operator_call_results
#cgo noescape ts_results_take
#cgo nocallback ts_results_take
#cgo noescape ts_tensor_retain
#cgo nocallback ts_tensor_retain
#cgo nocallback ts_tensor_free
#cgo noescape ts_tensor_free_all
#cgo nocallback ts_tensor_free_all
#cgo noescape ts_tensor_get_info
#cgo nocallback ts_tensor_get_info
#cgo noescape ts_tensor_get_shape
#cgo nocallback ts_tensor_get_shape
#cgo noescape ts_tensor_get_address
#cgo nocallback ts_tensor_get_address
#cgo noescape ts_tensor_to
#cgo nocallback ts_tensor_to
#cgo noescape ts_tensor_cast_all
#cgo nocallback ts_tensor_cast_all
#cgo noescape ts_tensor_read
#cgo nocallback ts_tensor_read
#cgo noescape ts_tensor_get_item
#cgo nocallback ts_tensor_get_item
#cgo noescape ts_tensor_get_item_int
#cgo nocallback ts_tensor_get_item_int
#cgo noescape ts_tensor_resize_storage
#cgo nocallback ts_tensor_resize_storage
#cgo noescape ts_tensor_copy_batch
#cgo nocallback ts_tensor_copy_batch
#cgo noescape ts_tensor_normalize_images
#cgo nocallback ts_tensor_normalize_images
#cgo noescape ts_operator_find
#cgo nocallback ts_operator_find

// ts_operator_call with handles as numbers and without structs: cgo checks every pointer to memory
// with pointers in it, and these are C's.
static inline ts_error* call_operator(uintptr_t op, const ts_arg* args, int64_t arg_count, const int64_t* ints, int64_t int_count,
                                      const char* text, size_t text_bytes, const uintptr_t* tensors, int64_t tensor_count,
                                      int32_t flags, uintptr_t* results, int64_t capacity) {
  const ts_arguments arguments = {args, arg_count, ints, int_count, text, text_bytes};
  int64_t count;
  return ts_operator_call((const ts_operator*)op, arguments, (ts_tensor* const*)tensors, tensor_count, flags,
                          (ts_tensor**)results, capacity, &count);
}
#cgo noescape call_operator
#cgo nocallback call_operator

// ts_operator_call_one, as above. call_operator_one returns the error through a pointer, because
// cgo's code for a function with a result is longer.
static inline ts_error* call_one(uintptr_t op, const ts_arg* args, const uintptr_t* tensors, const int64_t* ints, ts_call_counts counts,
                                 uintptr_t* result) {
  return ts_operator_call_one((const ts_operator*)op, args, (ts_tensor* const*)tensors, ints, counts, (ts_tensor**)result);
}
static inline void call_operator_one(uintptr_t op, const ts_arg* args, const uintptr_t* tensors, const int64_t* ints, ts_call_counts counts,
                                     uintptr_t* result, uintptr_t* error) {
  *error = (uintptr_t)call_one(op, args, tensors, ints, counts, result);
}
#cgo noescape call_operator_one
#cgo nocallback call_operator_one

// ts_operator_call_list, as above: cgo would check a pointer to the list for pointers of Go.
static inline ts_error* call_operator_list(const ts_operator* op, ts_arguments arguments, const uintptr_t* tensors, int64_t tensor_count,
                                           int32_t flags, uintptr_t* results, int64_t capacity, uintptr_t* list, int64_t* count) {
  return ts_operator_call_list(op, arguments, (ts_tensor* const*)tensors, tensor_count, flags, (ts_tensor**)results, capacity,
                               (ts_tensor_list**)list, count);
}
#cgo noescape call_operator_list
#cgo nocallback call_operator_list

// ts_tensor_batch_norm_relu, as above.
static inline ts_error* batch_norm_relu(const uintptr_t* tensors, double momentum, double eps, int32_t flags, uintptr_t* result) {
  return ts_tensor_batch_norm_relu((ts_tensor* const*)tensors, momentum, eps, flags, (ts_tensor**)result);
}
#cgo noescape batch_norm_relu
#cgo nocallback batch_norm_relu

// The same for calls with many tensors.
static inline ts_error* get_grads(const uintptr_t* tensors, int64_t count, uintptr_t* gradients) {
  return ts_tensor_get_grads((ts_tensor* const*)tensors, count, (ts_tensor**)gradients);
}
#cgo noescape get_grads
#cgo nocallback get_grads
static inline ts_error* get_kinds(const uintptr_t* tensors, int64_t count, int32_t* devices, int32_t* dtypes) {
  return ts_tensor_get_kinds((ts_tensor* const*)tensors, count, devices, dtypes);
}
#cgo noescape get_kinds
#cgo nocallback get_kinds
#cgo noescape ts_tensor_list_take
#cgo nocallback ts_tensor_list_take
#cgo noescape ts_tensor_get_grad
#cgo nocallback ts_tensor_get_grad
#cgo noescape ts_random_get_state
#cgo nocallback ts_random_get_state
#cgo nocallback ts_random_set_state
#cgo noescape ts_generator_new
#cgo nocallback ts_generator_new
#cgo noescape ts_generator_new_default
#cgo nocallback ts_generator_new_default
#cgo noescape ts_generator_get_seed
#cgo nocallback ts_generator_get_seed
#cgo noescape ts_generator_get_offset
#cgo nocallback ts_generator_get_offset
#cgo noescape ts_generator_get_state
#cgo nocallback ts_generator_get_state
#cgo noescape ts_numerics_get
#cgo nocallback ts_numerics_get
#cgo noescape ts_tensor_clear_grads
#cgo nocallback ts_tensor_clear_grads
*/
import "C"

import (
	"errors"
	"math"
	"sync"
	"unsafe"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Tensor is a ts_tensor: one reference to a LibTorch tensor.
type Tensor = C.ts_tensor

const (
	Uint8    = C.TS_DTYPE_UINT8
	Int8     = C.TS_DTYPE_INT8
	Int16    = C.TS_DTYPE_INT16
	Int32    = C.TS_DTYPE_INT32
	Int64    = C.TS_DTYPE_INT64
	Float16  = C.TS_DTYPE_FLOAT16
	Float32  = C.TS_DTYPE_FLOAT32
	Float64  = C.TS_DTYPE_FLOAT64
	Bool     = C.TS_DTYPE_BOOL
	BFloat16 = C.TS_DTYPE_BFLOAT16

	Complex64    = C.TS_DTYPE_COMPLEX64
	Complex128   = C.TS_DTYPE_COMPLEX128
	Float8E5M2   = C.TS_DTYPE_FLOAT8_E5M2
	Float8E4M3FN = C.TS_DTYPE_FLOAT8_E4M3FN

	Contiguous   = C.TS_MEMORY_FORMAT_CONTIGUOUS
	ChannelsLast = C.TS_MEMORY_FORMAT_CHANNELS_LAST
)

func sizes(s []int64) *C.int64_t { return (*C.int64_t)(unsafe.SliceData(s)) }

func EmptyTensor(size []int64, dtype, device, memoryFormat int32) (t *Tensor, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	err = failure(C.ts_tensor_new(sizes(size), C.int64_t(len(size)), C.int32_t(dtype), C.int32_t(device),
		C.int32_t(memoryFormat), &t))
	if s != nil && err == nil {
		s.used("the allocation of torch.Empty", []*Tensor{t}, nil, nil)
	}
	return t, err
}

// PinnedTensor returns an undefined CPU tensor in pinned memory of LibTorch's caching allocator.
func PinnedTensor(size []int64, dtype, memoryFormat int32) (t *Tensor, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	err = failure(C.ts_tensor_new_pinned(sizes(size), C.int64_t(len(size)), C.int32_t(dtype),
		C.int32_t(memoryFormat), &t))
	if s != nil && err == nil {
		s.used("the allocation of torch.Empty", []*Tensor{t}, nil, nil)
	}
	return t, err
}

func SetLent(t *Tensor, lent bool) error { return failure(C.ts_tensor_set_lent(t, C.bool(lent))) }

func IsLent(t *Tensor) (bool, error) {
	var lent C.bool
	err := failure(C.ts_tensor_is_lent(t, &lent))
	return bool(lent), err
}

// TensorFromData returns a CPU tensor with a copy of data, which may be Go memory.
func TensorFromData(data []byte, size []int64, dtype int32) (t *Tensor, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	err = failure(C.ts_tensor_from_data((*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)),
		sizes(size), C.int64_t(len(size)), C.int32_t(dtype), &t))
	if s != nil && err == nil {
		s.used("torch.FromBytes", []*Tensor{t}, nil, nil)
	}
	return t, err
}

// TensorFromMemory returns a CPU tensor that shares memory. memory must be C memory (a pinned
// buffer or HostBytes) and must outlive the tensor.
func TensorFromMemory(memory []byte, size []int64, dtype int32) (t *Tensor, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	err = failure(C.ts_tensor_from_memory((*C.uint8_t)(unsafe.SliceData(memory)), C.size_t(len(memory)),
		sizes(size), C.int64_t(len(size)), C.int32_t(dtype), &t))
	return t, err
}

// BorrowTensor returns a CPU tensor that shares memory. Go memory must stay pinned until
// TakeBorrowed returns the token.
func BorrowTensor(memory []byte, size, stride []int64, dtype int32, token int64) (t *Tensor, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	err = failure(C.ts_tensor_borrow((*C.uint8_t)(unsafe.SliceData(memory)), C.size_t(len(memory)),
		sizes(size), sizes(stride),
		C.int64_t(len(size)), C.int32_t(dtype), C.int64_t(token), &t))
	return t, err
}

// TakeBorrowed fills tokens with the tokens of memory that no tensor uses any longer, and returns
// their number.
func TakeBorrowed(tokens []int64) int {
	return int(C.ts_borrowed_take(sizes(tokens), C.int64_t(len(tokens))))
}

func RetainTensor(t *Tensor) (r *Tensor, err error) {
	err = failure(C.ts_tensor_retain(t, &r))
	return r, err
}

func FreeTensor(t *Tensor) {
	computing.enter()
	C.ts_tensor_free(t)
	computing.leave()
	if s := sanitizer.Load(); s != nil {
		s.freed("Tensor.Close")
	}
}

func FreeTensors(ts []*Tensor) {
	if len(ts) > 0 {
		computing.enter()
		defer computing.leave()
		C.ts_tensor_free_all(unsafe.SliceData(ts), C.int64_t(len(ts)))
		if s := sanitizer.Load(); s != nil {
			s.freed("Scope.Close")
		}
	}
}

func TensorCount() int64 {
	if Check() != nil {
		return 0
	}
	return int64(C.ts_tensor_count())
}

type TensorInfo struct {
	NumElements, Bytes                             int64
	Dims, DType, Device, ElementSize               int32
	Contiguous, ChannelsLast, RequiresGrad, Pinned bool
}

func DescribeTensor(t *Tensor) (TensorInfo, error) {
	var i C.ts_tensor_info
	if err := failure(C.ts_tensor_get_info(t, &i)); err != nil {
		return TensorInfo{}, err
	}
	return TensorInfo{int64(i.numel), int64(i.bytes), int32(i.ndim), int32(i.dtype), int32(i.device),
		int32(i.element_size), bool(i.contiguous),
		bool(i.channels_last), bool(i.requires_grad), bool(i.pinned)}, nil
}

// TensorKinds writes the device and the dtype of each tensor.
func TensorKinds(ts []*Tensor, devices, dtypes []int32) error {
	if err := Check(); err != nil {
		return err
	}
	return failure(C.get_kinds(numbers(ts), C.int64_t(len(ts)), (*C.int32_t)(unsafe.SliceData(devices)),
		(*C.int32_t)(unsafe.SliceData(dtypes))))
}

// TensorShape fills size and stride, which have one element per dimension. Either may be nil.
func TensorShape(t *Tensor, size, stride []int64) error {
	return failure(C.ts_tensor_get_shape(t, sizes(size), sizes(stride), C.int64_t(max(len(size), len(stride)))))
}

// TensorData returns the address of a tensor on the device. For host memory it waits for pending
// copies to the tensor; otherwise it does not wait.
func TensorData(t *Tensor, device int32) (uintptr, error) {
	if device == DeviceCPU {
		waiting.enter()
		defer waiting.leave()
	}
	s := sanitizer.Load()
	if s == nil {
		var p C.uintptr_t
		err := failure(C.ts_tensor_get_address(t, &p))
		return uintptr(p), err
	}
	var at C.uintptr_t
	err := s.call(func() error { return failure(C.ts_tensor_get_address(t, &at)) },
		func() { s.freed("Tensor.Pointer") })
	return uintptr(at), err
}

// TensorBytes returns the memory of a contiguous CPU tensor without copying. The slice is valid
// until the tensor is freed; the Go garbage collector does not keep the tensor alive for it.
func TensorBytes(t *Tensor) ([]byte, error) {
	i, err := DescribeTensor(t)
	if err != nil {
		return nil, err
	}
	if i.Device != DeviceCPU || !i.Contiguous && !i.ChannelsLast {
		return nil, imagecapi.NewFailure(CodeInvalidArgument,
			"only a contiguous CPU tensor's memory can be seen from Go")
	}
	p, err := TensorData(t, i.Device)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), int(i.Bytes)), nil
}

// copying returns the gate for a copy. A copy that waits for the device must not block calls that
// give the device work.
func copying(nonBlocking bool) *gate {
	if nonBlocking || !haveGPU() {
		return computing
	}
	return waiting
}

var haveGPU = sync.OnceValue(func() bool { return DeviceCount() > 0 })

func CopyTensor(dst, src *Tensor, nonBlocking bool) error {
	gate := copying(nonBlocking)
	gate.enter()
	defer gate.leave()
	s := sanitizer.Load()
	if s == nil {
		return failure(C.ts_tensor_copy(dst, src, C.bool(nonBlocking)))
	}
	return s.call(func() error { return failure(C.ts_tensor_copy(dst, src, C.bool(nonBlocking))) },
		func() { s.moved("a copy", dst, src, false, nonBlocking) })
}

// TensorTo copies the tensor to the device and converts it to dtype. A dtype of -1 keeps the
// tensor's.
func TensorTo(t *Tensor, device, dtype int32, nonBlocking bool) (r *Tensor, err error) {
	gate := copying(nonBlocking)
	gate.enter()
	defer gate.leave()
	s := sanitizer.Load()
	if s == nil {
		err = failure(C.ts_tensor_to(t, C.int32_t(device), C.int32_t(dtype), C.bool(nonBlocking), &r))
		return r, err
	}
	var made *Tensor
	err = s.call(func() error {
		return failure(C.ts_tensor_to(t, C.int32_t(device), C.int32_t(dtype), C.bool(nonBlocking), &made))
	}, func() { s.moved("a copy", made, t, true, nonBlocking) })
	return made, err
}

// CastTensors casts tensors to dtype in one call. The result is nil for a tensor that is not
// float32.
func CastTensors(tensors []*Tensor, dtype int32) ([]*Tensor, error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	casts := make([]*Tensor, len(tensors))
	cast := func() error {
		return failure(C.ts_tensor_cast_all(unsafe.SliceData(tensors), C.int64_t(len(tensors)),
			C.int32_t(dtype), unsafe.SliceData(casts)))
	}
	s := sanitizer.Load()
	if s == nil {
		return casts, cast()
	}
	return casts, s.call(cast, func() {
		var made, from []*Tensor
		for i, c := range casts {
			if c != nil {
				made, from = append(made, c), append(from, tensors[i])
			}
		}
		s.used("a cast of parameters", made, nil, from)
	})
}

func ReadTensor(t *Tensor, data []byte) error {
	waiting.enter()
	defer waiting.leave()
	s := sanitizer.Load()
	if s == nil {
		return failure(C.ts_tensor_read(t, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data))))
	}
	return s.call(func() error {
		return failure(C.ts_tensor_read(t, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data))))
	}, func() { s.used("a read of values", nil, nil, []*Tensor{t}) })
}

func TensorItem(t *Tensor) (float64, error) {
	waiting.enter()
	defer waiting.leave()
	s := sanitizer.Load()
	if s == nil {
		var v C.double
		err := failure(C.ts_tensor_get_item(t, &v))
		return float64(v), err
	}
	var read C.double
	err := s.call(func() error { return failure(C.ts_tensor_get_item(t, &read)) },
		func() { s.used("a read of a value", nil, nil, []*Tensor{t}) })
	return float64(read), err
}

func TensorItemInt(t *Tensor) (int64, error) {
	waiting.enter()
	defer waiting.leave()
	s := sanitizer.Load()
	if s == nil {
		var v C.int64_t
		err := failure(C.ts_tensor_get_item_int(t, &v))
		return int64(v), err
	}
	var read C.int64_t
	err := s.call(func() error { return failure(C.ts_tensor_get_item_int(t, &read)) },
		func() { s.used("a read of a value", nil, nil, []*Tensor{t}) })
	return int64(read), err
}

func RecordStream(t *Tensor, s Stream) error {
	computing.enter()
	defer computing.leave()
	err := failure(C.ts_tensor_record_stream(t, s.c()))
	if on := sanitizer.Load(); on != nil && err == nil {
		on.recordStream(t, s)
	}
	return err
}

// ResizeStorage frees or reallocates the memory of a tensor and of all tensors that share it.
func ResizeStorage(t *Tensor, bytes int64) error {
	computing.enter()
	defer computing.leave()
	resize := func() error { return failure(C.ts_tensor_resize_storage(t, C.size_t(bytes))) }
	if s := sanitizer.Load(); s != nil {
		return s.call(resize, func() { s.freed("a resizing of memory") })
	}
	return resize()
}

// CopyBatch calls ts_tensor_copy_batch. after and done may be nil.
func CopyBatch(s Stream, after *Event, dst, src []*Tensor, done *Event) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	if len(dst) != len(src) {
		return imagecapi.NewFailure(CodeInvalidArgument, "dst and src have different lengths")
	}
	on := sanitizer.Load()
	on.begin()
	defer on.end()
	err := failure(C.ts_tensor_copy_batch(s.c(), after, unsafe.SliceData(dst), unsafe.SliceData(src),
		C.int64_t(len(dst)), done))
	if on != nil && err == nil {
		on.copyBatch(s, after, dst, src, done)
	}
	return err
}

func NormalizeImages(dst, src *Tensor, mean, std []float32) error {
	computing.enter()
	defer computing.leave()
	if len(mean) != len(std) {
		return imagecapi.NewFailure(CodeInvalidArgument, "mean and std have different lengths")
	}
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	err := failure(C.ts_tensor_normalize_images(dst, src, (*C.float)(unsafe.SliceData(mean)),
		(*C.float)(unsafe.SliceData(std)), C.int64_t(len(mean))))
	if s != nil && err == nil {
		s.used("torch.NormalizeImages", nil, []*Tensor{dst}, []*Tensor{src})
	}
	return err
}

// BatchNormReLU calls ts_tensor_batch_norm_relu. The tensors are x, weight, bias, running mean,
// running variance and residual. It returns nil if the inputs require LibTorch's separate
// operators.
func BatchNormReLU(tensors *[6]*Tensor, momentum, eps float64, flags int32) (*Tensor, error) {
	computing.enter()
	defer computing.leave()
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	var y *Tensor
	err := failure(C.batch_norm_relu(numbers(tensors[:]), C.double(momentum), C.double(eps),
		C.int32_t(flags), (*C.uintptr_t)(unsafe.Pointer(&y))))
	if s != nil && y != nil {
		s.used("a batch normalisation with ReLU", []*Tensor{y}, []*Tensor{tensors[3], tensors[4]},
			[]*Tensor{tensors[0], tensors[1], tensors[2], tensors[5]})
	}
	return y, err
}

// Operator is a ts_operator. It is never freed.
type Operator = C.ts_operator

func FindOperator(name, overload string) (op *Operator, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	n, o := C.CString(name), C.CString(overload)
	defer C.free(unsafe.Pointer(n))
	defer C.free(unsafe.Pointer(o))
	err = failure(C.ts_operator_find(n, o, &op))
	return op, err
}

func OperatorSchema(op *Operator) string { return C.GoString(C.ts_operator_schema(op)) }

const (
	ArgDefault = C.TS_ARG_KIND_DEFAULT
	ArgNone    = C.TS_ARG_KIND_NONE
	ArgTensor  = C.TS_ARG_KIND_TENSOR
	ArgTensors = C.TS_ARG_KIND_TENSORS
	ArgInt     = C.TS_ARG_KIND_INT
	ArgDouble  = C.TS_ARG_KIND_DOUBLE
	ArgBool    = C.TS_ARG_KIND_BOOL
	ArgInts    = C.TS_ARG_KIND_INTS
	ArgDoubles = C.TS_ARG_KIND_DOUBLES
	ArgBools   = C.TS_ARG_KIND_BOOLS
	ArgDevice  = C.TS_ARG_KIND_DEVICE
	ArgString  = C.TS_ARG_KIND_STRING

	ArgComplex   = C.TS_ARG_KIND_COMPLEX
	ArgGenerator = C.TS_ARG_KIND_GENERATOR
)

// Arg has the layout of ts_arg.
type Arg struct {
	Kind, Count int32
	Value       int64
}

const (
	CallNoGrad           = C.TS_OPERATOR_FLAG_NO_GRAD
	CallAutocastBFloat16 = C.TS_OPERATOR_FLAG_AUTOCAST_BFLOAT16
	CallAutocastFloat16  = C.TS_OPERATOR_FLAG_AUTOCAST_FLOAT16
)

const numericsAll = C.TS_NUMERICS_FLAG_MATMUL_TF32 | C.TS_NUMERICS_FLAG_CONVOLUTION_TF32 | C.TS_NUMERICS_FLAG_BENCHMARK |
	C.TS_NUMERICS_FLAG_DETERMINISTIC

// CallNumerics masks the flags of a call with separate numerics switches. CallOperator, Backward,
// Grads and Callback use them.
const CallNumerics = numericsAll * (numericsOn | numericsOff)

const (
	numericsOn  = C.TS_NUMERICS_ON
	numericsOff = C.TS_NUMERICS_OFF
)

// CallWaits is a flag of CallOperator only. The operator waits for the device, so the call passes
// the gate of waiting calls.
const CallWaits int32 = 1 << 30

// CallDrops is a flag of CallOperatorOne only. The result is dropped, as for an in-place operator.
const CallDrops int32 = 1 << 28

// Lists are the arrays that a call's arguments refer to, except the tensors.
type Lists struct {
	Ints []int64
	Text []byte
}

// arguments returns a value for the caller's stack. cgo checks none of its pointers, because they
// point to memory without pointers. lists may be nil.
func arguments(args []Arg, lists *Lists) C.ts_arguments {
	a := C.ts_arguments{args: (*C.ts_arg)(unsafe.Pointer(unsafe.SliceData(args))), arg_count: C.int64_t(len(args))}
	if lists != nil {
		a.ints, a.int_count = sizes(lists.Ints), C.int64_t(len(lists.Ints))
		a.text, a.text_bytes = (*C.char)(unsafe.Pointer(unsafe.SliceData(lists.Text))), C.size_t(len(lists.Text))
	}
	return a
}

// numbers converts the handles for call_operator.
func numbers(handles []*Tensor) *C.uintptr_t {
	return (*C.uintptr_t)(unsafe.Pointer(unsafe.SliceData(handles)))
}

// CallOperatorOne calls an operator with one result, and returns the result. It returns nil if the
// result is undefined or dropped. lists may be nil. Neither it nor the slices escape, so a caller
// can keep them on its stack. An operator that draws random numbers waits for the end of a running
// capture.
func CallOperatorOne(op *Operator, args []Arg, tensors []*Tensor, lists *Lists, flags int32) (*Tensor, error) {
	if flags&CallWaits != 0 || sanitizer.Load() != nil || len(args) > math.MaxUint8 || len(tensors) > math.MaxUint8 {
		return callOneOtherwise(op, args, tensors, lists, flags)
	}
	counts := C.ts_call_counts{flags: C.uint16_t(flags), args: C.uint8_t(len(args)), tensors: C.uint8_t(len(tensors))}
	var ints *C.int64_t
	if lists != nil {
		if len(lists.Text) > 0 || len(lists.Ints) > math.MaxUint32 {
			return callOneOtherwise(op, args, tensors, lists, flags)
		}
		ints, counts.ints = sizes(lists.Ints), C.uint32_t(len(lists.Ints))
	}
	var out *Tensor
	var e *C.ts_error
	result := (*C.uintptr_t)(unsafe.Pointer(&out))
	if flags&CallDrops != 0 {
		result = nil
	}
	computing.enter()
	C.call_operator_one(C.uintptr_t(uintptr(unsafe.Pointer(op))),
		(*C.ts_arg)(unsafe.Pointer(unsafe.SliceData(args))), numbers(tensors), ints,
		counts, result, (*C.uintptr_t)(unsafe.Pointer(&e)))
	computing.leave()
	if e == nil {
		return out, nil
	}
	if err := busy(failure(e)); err != nil {
		return nil, err
	}
	return callOneOtherwise(op, args, tensors, lists, flags)
}

// callOneOtherwise implements CallOperatorOne for all calls.
//
//go:noinline
func callOneOtherwise(op *Operator, args []Arg, tensors []*Tensor, lists *Lists, flags int32) (*Tensor, error) {
	var out [1]*Tensor
	capacity := 1
	if flags&CallDrops != 0 {
		capacity = 0
	}
	err := callOperator(op, args, tensors, lists, flags&^CallDrops, out[:capacity])
	return out[0], err
}

// CallOperator is CallOperatorOne for any number of results, written to out. If out is empty,
// results are dropped.
func CallOperator(op *Operator, args []Arg, tensors []*Tensor, lists *Lists, flags int32, out []*Tensor) error {
	if flags&CallWaits != 0 || sanitizer.Load() != nil {
		return callOperator(op, args, tensors, lists, flags, out)
	}
	computing.enter()
	e := passToC(op, args, tensors, lists, flags, out)
	computing.leave()
	if e == nil {
		return nil
	}
	if err := busy(failure(e)); err != nil {
		return err
	}
	return callOperator(op, args, tensors, lists, flags, out)
}

func passToC(op *Operator, args []Arg, tensors []*Tensor, lists *Lists, flags int32, out []*Tensor) *C.ts_error {
	a := arguments(args, lists)
	return C.call_operator(C.uintptr_t(uintptr(unsafe.Pointer(op))), a.args, a.arg_count, a.ints,
		a.int_count, a.text, a.text_bytes,
		numbers(tensors), C.int64_t(len(tensors)), C.int32_t(flags), numbers(out), C.int64_t(len(out)))
}

// callOperator implements CallOperator for all calls, including calls that may wait for a GPU or
// that the stream sanitizer observes.
func callOperator(op *Operator, args []Arg, tensors []*Tensor, lists *Lists, flags int32, out []*Tensor) error {
	s := sanitizer.Load()
	s.begin()
	gate := copying(flags&CallWaits == 0)
	for {
		gate.enter()
		e := passToC(op, args, tensors, lists, flags&^CallWaits, out)
		gate.leave()
		if e == nil {
			if s != nil {
				s.operated(op, args, tensors, out)
			}
			return nil
		}
		if err := busy(failure(e)); err != nil {
			s.failed("a failed operator")
			return err
		}
	}
}

// List holds an operator's results, however many.
type List struct {
	few  [8]*Tensor // all results if they fit: no second C call is needed to move them
	many []*Tensor  // all results, if there are more
	n    int
}

// Tensors returns the results; an undefined one is nil. The slice may be a part of l.
func (l *List) Tensors() []*Tensor {
	if l.many != nil {
		return l.many
	}
	return l.few[:l.n]
}

// CallOperatorList is CallOperator for operators that return lists. It writes all results to out,
// which must be empty.
func CallOperatorList(op *Operator, args []Arg, tensors []*Tensor, lists *Lists, flags int32, out *List) error {
	s := sanitizer.Load()
	s.begin()
	for {
		computing.enter()
		var n C.int64_t
		var list *C.ts_tensor_list
		e := C.call_operator_list(op, arguments(args, lists), numbers(tensors), C.int64_t(len(tensors)),
			C.int32_t(flags), numbers(out.few[:]), C.int64_t(len(out.few)), (*C.uintptr_t)(unsafe.Pointer(&list)), &n)
		computing.leave()
		if e == nil {
			out.n = int(n)
			if list != nil {
				out.many = make([]*Tensor, n)
				C.ts_tensor_list_take(list, unsafe.SliceData(out.many))
			}
			if s != nil {
				s.operated(op, args, tensors, out.Tensors())
			}
			return nil
		}
		if err := busy(failure(e)); err != nil {
			s.failed("a failed operator")
			return err
		}
	}
}

// Results are an operator's results, in the notation of arguments.
type Results struct {
	Args    []Arg
	Tensors []*Tensor // an undefined tensor is nil
	Ints    []int64
}

// CallOperatorResults is CallOperator for operators with results of any type. Reading a number may
// wait for the device.
func CallOperatorResults(op *Operator, args []Arg, tensors []*Tensor, lists *Lists, flags int32) (Results, error) {
	s := sanitizer.Load()
	s.begin()
	gate := copying(false)
	for {
		gate.enter()
		var size C.ts_results_size
		var results *C.ts_results
		e := C.ts_operator_call_results(op, arguments(args, lists), unsafe.SliceData(tensors), C.int64_t(len(tensors)),
			C.int32_t(flags), &results, &size)
		gate.leave()
		if e == nil {
			r := Results{make([]Arg, size.args), make([]*Tensor, size.tensors), make([]int64, size.ints)}
			C.ts_results_take(results, (*C.ts_arg)(unsafe.Pointer(unsafe.SliceData(r.Args))),
				unsafe.SliceData(r.Tensors),
				sizes(r.Ints))
			if s != nil {
				s.operated(op, args, tensors, r.Tensors)
			}
			return r, nil
		}
		if err := busy(failure(e)); err != nil {
			s.failed("a failed operator")
			return Results{}, err
		}
	}
}

// GeneratorArg returns a Generator as an argument. The generator must live until the call returns.
func GeneratorArg(g *Generator) Arg {
	return Arg{Kind: ArgGenerator, Value: int64(uintptr(unsafe.Pointer(g)))}
}

// busy handles a call that failed because of a running capture: it waits for the end of the capture
// and returns nil. The call had no effect, and the caller repeats it. busy returns any other error.
func busy(err error) error {
	if !errors.Is(err, CodeBusy) {
		return err
	}
	return waitForCapture()
}

// Backward computes gradients. gradient may be nil if t is a scalar. flags: 0 or GradRetainGraph,
// and CallNumerics.
func Backward(t, gradient *Tensor, flags int32) error {
	return differentiate("Tensor.Backward",
		func() *C.ts_error { return C.ts_tensor_backward(t, gradient, C.int32_t(flags)) })
}

// Grad returns nil, nil if there is no gradient.
func Grad(t *Tensor) (g *Tensor, err error) {
	err = failure(C.ts_tensor_get_grad(t, &g))
	return g, err
}

// LeafGrads writes the gradients of all tensors to out. A tensor without a gradient gets nil.
func LeafGrads(ts, out []*Tensor) error {
	if err := Check(); err != nil {
		return err
	}
	return failure(C.get_grads(numbers(ts), C.int64_t(len(ts)), numbers(out)))
}

// SetGrad sets the tensor's gradient. A nil gradient removes it.
func SetGrad(t, gradient *Tensor) error {
	computing.enter()
	defer computing.leave()
	err := failure(C.ts_tensor_set_grad(t, gradient))
	if s := sanitizer.Load(); s != nil {
		s.freed("Tensor.SetGrad")
	}
	return err
}

func ClearGrads(ts []*Tensor) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	err := failure(C.ts_tensor_clear_grads(unsafe.SliceData(ts), C.int64_t(len(ts))))
	if s := sanitizer.Load(); s != nil {
		s.freed("torch.ClearGrads")
	}
	return err
}

func SetRequiresGrad(t *Tensor, requires bool) error {
	return failure(C.ts_tensor_set_requires_grad(t, C.bool(requires)))
}

// ManualSeed seeds LibTorch's generators. It waits for the end of a running capture.
func ManualSeed(seed uint64) error {
	if err := Check(); err != nil {
		return err
	}
	return whileNotBusy(func() error { return failure(C.ts_random_seed(C.uint64_t(seed))) })
}

// Generator is a ts_generator.
type Generator = C.ts_generator

// NewGenerator makes a generator. Like the functions below, it waits for the end of a running
// capture.
func NewGenerator(device int32, seed uint64) (g *Generator, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	err = whileNotBusy(func() error { return failure(C.ts_generator_new(C.int32_t(device), C.uint64_t(seed), &g)) })
	return g, err
}

func DefaultGenerator(device int32) (g *Generator, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	err = whileNotBusy(func() error { return failure(C.ts_generator_new_default(C.int32_t(device), &g)) })
	return g, err
}

func FreeGenerator(g *Generator) {
	computing.enter()
	defer computing.leave()
	C.ts_generator_free(g)
}

func GeneratorSeed(g *Generator) (uint64, error) {
	var v C.uint64_t
	err := whileNotBusy(func() error { return failure(C.ts_generator_get_seed(g, &v)) })
	return uint64(v), err
}

func SeedGenerator(g *Generator, seed uint64) error {
	return whileNotBusy(func() error { return failure(C.ts_generator_set_seed(g, C.uint64_t(seed))) })
}

func GeneratorOffset(g *Generator) (uint64, error) {
	var v C.uint64_t
	err := whileNotBusy(func() error { return failure(C.ts_generator_get_offset(g, &v)) })
	return uint64(v), err
}

func SetGeneratorOffset(g *Generator, offset uint64) error {
	return whileNotBusy(func() error { return failure(C.ts_generator_set_offset(g, C.uint64_t(offset))) })
}

func ReadGenerator(g *Generator) (t *Tensor, err error) {
	err = whileNotBusy(func() error { return failure(C.ts_generator_get_state(g, &t)) })
	return t, err
}

func WriteGenerator(g *Generator, t *Tensor) error {
	return whileNotBusy(func() error { return failure(C.ts_generator_set_state(g, t)) })
}

const (
	GradRetainGraph = C.TS_GRAD_FLAG_RETAIN_GRAPH
	GradCreateGraph = C.TS_GRAD_FLAG_CREATE_GRAPH
	GradAllowUnused = C.TS_GRAD_FLAG_ALLOW_UNUSED
	GradNoLeafHooks = C.TS_GRAD_FLAG_NO_LEAF_HOOKS
)

// Grads calls ts_tensor_grads. flags may include CallNumerics. with has a gradient, or nil, for
// each output.
func Grads(outputs, with, inputs []*Tensor, flags int32) ([]*Tensor, error) {
	if err := Check(); err != nil {
		return nil, err
	}
	if len(with) != len(outputs) {
		return nil, imagecapi.NewFailure(CodeInvalidArgument, "outputs and their gradients have different lengths")
	}
	results := make([]*Tensor, len(inputs))
	return results, differentiate("torch.Grad", func() *C.ts_error {
		return C.ts_tensor_grads(unsafe.SliceData(outputs), unsafe.SliceData(with), C.int64_t(len(outputs)),
			unsafe.SliceData(inputs), C.int64_t(len(inputs)), C.int32_t(flags), unsafe.SliceData(results))
	})
}

// GeneratorState returns the state of the device's default generator as a CPU tensor. It waits for
// the end of a running capture.
func GeneratorState(device int32) (t *Tensor, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	err = whileNotBusy(func() error { return failure(C.ts_random_get_state(C.int32_t(device), &t)) })
	return t, err
}

// SetGeneratorState replaces the state of the device's default generator. It waits for the end of a
// running capture.
func SetGeneratorState(device int32, t *Tensor) error {
	if err := Check(); err != nil {
		return err
	}
	return whileNotBusy(func() error { return failure(C.ts_random_set_state(C.int32_t(device), t)) })
}

// whileNotBusy repeats a call until it no longer fails because of a running capture.
func whileNotBusy(call func() error) error {
	for {
		computing.enter()
		err := call()
		computing.leave()
		if err == nil {
			return nil
		}
		if err := busy(err); err != nil {
			return err
		}
	}
}

const (
	NumericsMatmulTF32      = C.TS_NUMERICS_FLAG_MATMUL_TF32
	NumericsConvolutionTF32 = C.TS_NUMERICS_FLAG_CONVOLUTION_TF32
	NumericsBenchmark       = C.TS_NUMERICS_FLAG_BENCHMARK
	NumericsDeterministic   = C.TS_NUMERICS_FLAG_DETERMINISTIC
)

// SetNumerics waits for operators with other switches.
func SetNumerics(flags int32) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	return failure(C.ts_numerics_set(C.int32_t(flags)))
}

func Numerics() (int32, error) {
	if err := Check(); err != nil {
		return 0, err
	}
	var flags C.int32_t
	err := failure(C.ts_numerics_get(&flags))
	return int32(flags), err
}

// SetNumThreads sets the number of LibTorch's threads for CPU operators. Like NumThreads, it
// creates the calling thread's team of threads.
func SetNumThreads(threads int32) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	return failure(C.ts_parallelism_set(C.int32_t(threads)))
}

func NumThreads() int {
	if Check() != nil {
		return 0
	}
	computing.enter()
	defer computing.leave()
	return int(C.ts_parallelism())
}

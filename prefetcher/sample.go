package prefetcher

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"unsafe"

	"github.com/torchstream/torchstream/internal/assembly"
	"github.com/torchstream/torchstream/internal/order"
	"github.com/torchstream/torchstream/torch"
)

// Sample gives the function of [Samples] the memory of one sample in a batch, and the values on
// which its results may depend. The function may use it, and the slices that its methods return,
// only until the function returns. All elements are 0 when the function is called.
//
// The accessors return a field's elements in the order of its memory. If no field has the given
// name, or if the field has another type, they return nil, and the epoch ends with an error that
// names the field.
type Sample struct {
	source *SampleSource
	ctx    context.Context
	index  int
	rows   [][]byte // the sample's memory, for each field
	wrong  error    // the first use of a wrong name or type

	draw   draw
	seeded bool // rng has been seeded for this sample
	pcg    rand.PCG
	rng    *rand.Rand
}

// draw has the arguments of order.SeedRepeat for a sample.
type draw struct {
	epoch  int // the argument of Fill
	round  int
	repeat uint64
}

// Uint8 returns the elements of a uint8 field.
func (s *Sample) Uint8(field string) []uint8 { return elements[uint8](s, field, torch.Uint8) }

// Int8 returns the elements of an int8 field.
func (s *Sample) Int8(field string) []int8 { return elements[int8](s, field, torch.Int8) }

// Int16 returns the elements of an int16 field.
func (s *Sample) Int16(field string) []int16 { return elements[int16](s, field, torch.Int16) }

// Int32 returns the elements of an int32 field.
func (s *Sample) Int32(field string) []int32 { return elements[int32](s, field, torch.Int32) }

// Int64 returns the elements of an int64 field. A label of an empty shape has one element.
func (s *Sample) Int64(field string) []int64 { return elements[int64](s, field, torch.Int64) }

// Float32 returns the elements of a float32 field.
func (s *Sample) Float32(field string) []float32 { return elements[float32](s, field, torch.Float32) }

// Float64 returns the elements of a float64 field.
func (s *Sample) Float64(field string) []float64 { return elements[float64](s, field, torch.Float64) }

// Bool returns the elements of a bool field.
func (s *Sample) Bool(field string) []bool { return elements[bool](s, field, torch.Bool) }

// Bytes returns the memory of a field of any type, in the machine's byte order.
func (s *Sample) Bytes(field string) []byte {
	if i := s.find(field); i >= 0 {
		return s.rows[i]
	}
	return nil
}

// elements returns the memory of a field as a slice of T, the Go type of dtype.
func elements[T any](s *Sample, field string, dtype torch.DType) []T {
	i := s.find(field)
	if i < 0 {
		return nil
	}
	if have := s.source.fields[i].DType; have != dtype {
		s.misused("field %q is %v, not %v", field, have, dtype)
		return nil
	}
	// The row starts at a multiple of its size from the start of a slot, which is aligned.
	row := s.rows[i]
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(row))), len(row)/dtype.Size())
}

// find returns the index of a field, or -1.
func (s *Sample) find(field string) int {
	for i := range s.source.fields {
		if s.source.fields[i].Name == field {
			return i
		}
	}
	s.misused("there is no field %q", field)
	return -1
}

// misused keeps the first wrong use.
func (s *Sample) misused(format string, args ...any) {
	if s.wrong == nil {
		s.wrong = fmt.Errorf("prefetcher: sample %d: "+format, append([]any{s.index}, args...)...)
	}
}

// Epoch returns the number of the epoch, as given to Prefetcher.Epoch.
func (s *Sample) Epoch() int { return s.draw.epoch }

// Rand returns the sample's random numbers. They depend on SamplesOptions.Seed, the epoch, the
// sample's number and its occurrence in the epoch, so a resumed epoch gets the same numbers.
func (s *Sample) Rand() *rand.Rand {
	if !s.seeded {
		order.SeedRepeat(&s.pcg, s.source.options.Seed, order.OfSample, s.draw.round, s.index, s.draw.repeat)
		s.seeded = true
	}
	return s.rng
}

// Context returns the epoch's context. A function that waits, for example for a network, must
// return when the context is done.
func (s *Sample) Context() context.Context { return s.ctx }

// set makes s the sample of a job.
func (s *Sample) set(j *sampleJob) {
	s.index, s.draw, s.wrong, s.seeded = j.index, j.draw, nil, false
	s.rows = s.rows[:0]
	for i := range s.source.fields {
		row := j.memory.row(i, j.row)
		clear(row)
		s.rows = append(s.rows, row)
	}
}

// call calls the function for a job, and returns its result.
func (s *Sample) call(j *sampleJob) (result assembly.Outcome, err error) {
	s.set(j)
	defer func() {
		if v := recover(); v != nil {
			result, err = assembly.Bad, &SampleError{Index: s.index, Err: panicError(v), Stack: debug.Stack()}
		}
		if s.wrong != nil { // the wrong use may be the reason for the error or the panic
			result, err = assembly.Fatal, s.wrong
		}
	}()
	if err := s.source.write(s.index, s); err != nil {
		return assembly.Bad, &SampleError{Index: s.index, Err: err}
	}
	return assembly.Good, nil
}

func panicError(v any) error {
	if err, ok := v.(error); ok {
		return fmt.Errorf("the function panicked: %w", err)
	}
	return fmt.Errorf("the function panicked: %v", v)
}

package torch

import (
	"errors"
	"math"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// operator is an index into the generated table of operators.
type operator int

type operatorInfo struct {
	method   string // the Go name, for errors
	aten     string // "aten::add"
	overload string // "Tensor"
	schema   string // as in native_functions.yaml
	gaps     bool   // an argument is a Tensor?[], whose elements may be nil
	waits    bool   // it waits for a GPU
}

// entry looks up the operator in LibTorch's registry once. The registry never changes and its
// entries live as long as the process, so the cached pointer is the same for every caller.
func (o operator) entry() (*capi.Operator, error) {
	if e := entries[o].Load(); e != nil {
		return e.op, nil
	}
	if err := capi.Check(); err != nil {
		return nil, err
	}
	e, err := capi.FindOperator(operators[o].aten, operators[o].overload)
	if err != nil {
		return nil, err
	}
	entries[o].Store(&entry{e})
	return e, nil
}

// The struct is complete, as atomic.Pointer requires; the C type is incomplete.
type entry struct{ op *capi.Operator }

var entries [len(operators)]atomic.Pointer[entry]

// provenance holds the properties that results inherit from operands.
type provenance struct {
	scope *Scope
	marks marks
}

// marks are the modes that a handle gives to the operators on it, and to their results. Their bits
// are those of the call's flags.
type marks uint8

const (
	noGrad           marks = capi.CallNoGrad
	autocastBFloat16 marks = capi.CallAutocastBFloat16
	autocastFloat16  marks = capi.CallAutocastFloat16
)

func (p provenance) tensor(c *capi.Tensor) *Tensor {
	if c == nil {
		return failed(invalid("LibTorch returned an undefined result"))
	}
	if p.scope == nil {
		o := newOwned(c)
		return &Tensor{h: &o.handle, more: &o.more, marks: p.marks}
	}
	t := p.scope.add(c)
	if t == nil {
		return failed(p.scope.s.ended())
	}
	t.marks = p.marks
	return t
}

// result returns the tensor of an operator's result.
func (p provenance) result(c *capi.Tensor) *Tensor {
	t := p.tensor(c)
	if t.scope == nil && t.h != nil {
		t.more.loose.Store(true)
	}
	return t
}

// call runs the operator. Operands that no argument refers to may be nil (absent optional
// arguments). call keeps no slice, so that the generated methods have their slices on the stack.
func (o operator) call(in []*Tensor, args []capi.Arg, ints []int64, text []byte, flags int32, out []*capi.Tensor) (provenance, error) {
	return o.run(in, args, ints, text, flags, out, nil, nil)
}

// run implements call, and with list or all the call of an operator whose results are not a fixed
// number of tensors.
func (o operator) run(in []*Tensor, args []capi.Arg, ints []int64, text []byte, flags int32, out []*capi.Tensor,
	list *capi.List, all *capi.Results) (provenance, error) {
	if operators[o].waits || o == opTo {
		flags |= capi.CallWaits
	}
	if operators[o].gaps {
		flags |= checkedNil
	}
	if o.castsOperands() {
		flags |= takesCasts
	}
	e, err := o.entry()
	return invoke(operators[o].method, e, err, in, args, ints, text, flags, out, list, all)
}

// checkedNil, a flag of invoke, says that nil operands were checked: an optional argument, or an
// absent element of a Tensor?[], refers to each.
const checkedNil int32 = 1 << 29

// takesCasts, a flag of invoke, says that the casts of a ParameterCasts may be the operands.
const takesCasts int32 = 1 << 27

// invoke runs the operator e, whose name in errors is op. unknown is the error of looking e up; an
// operand's own error precedes it. The results are in all, of any type, if it is not nil; else in
// list, any number of tensors, if that is not nil; else in out.
func invoke(op string, e *capi.Operator, unknown error, in []*Tensor, args []capi.Arg, ints []int64, text []byte,
	flags int32, out []*capi.Tensor, list *capi.List, all *capi.Results) (provenance, error) {
	var p provenance
	var few [8]*capi.Tensor
	cs := few[:]
	if len(in) > len(few) {
		cs = make([]*capi.Tensor, len(in))
	}
	cs = cs[:len(in)]
	var err error
	held := 0
	for i, t := range in {
		if t == nil {
			if flags&checkedNil == 0 && named(args, i) {
				err = opError(op, in, invalid("operand %d is nil", i+1))
				break
			}
			held++
			continue
		}
		if t.h != nil { // it did not fail
			cs[i] = t.h.acquire()
		}
		if cs[i] == nil {
			if cs[i], err = t.acquire(); err != nil {
				if t.failure() == nil {
					err = opError(op, in, err)
				}
				break
			}
		}
		held++
		p.scope = youngest(p.scope, t.scope)
		p.marks |= t.marks
	}
	if err == nil {
		if flags&takesCasts != 0 && p.scope != nil {
			if pass := p.scope.casts.Load(); pass != nil {
				pass.replace(in, cs, p.marks)
			}
		}
		flags &^= checkedNil | takesCasts
		flags |= int32(p.marks)
		switch {
		case unknown != nil:
			err = unknown
		case all != nil:
			*all, err = capi.CallOperatorResults(e, args, cs, ints, text, flags&^capi.CallWaits)
		case list != nil:
			err = capi.CallOperatorList(e, args, cs, ints, text, flags&^capi.CallWaits, list)
		default:
			_, err = capi.CallOperator(e, args, cs, ints, text, flags, out)
		}
		if err != nil {
			err = opError(op, in, err)
		}
	}
	for _, t := range in[:held] {
		if t != nil {
			t.h.release()
		}
	}
	return p, err
}

// named reports whether an argument refers to operand i.
func named(args []capi.Arg, i int) bool {
	for _, a := range args {
		switch {
		case a.Kind == capi.ArgTensor && a.Value == int64(i):
			return true
		case a.Kind == capi.ArgTensors && int64(i) >= a.Value && int64(i) < a.Value+int64(a.Count):
			return true
		}
	}
	return false
}

// one calls an operator with one result.
func (o operator) one(in []*Tensor, args []capi.Arg, ints []int64, text []byte) *Tensor {
	var out [1]*capi.Tensor
	p, err := o.run(in, args, ints, text, 0, out[:], nil, nil)
	if err != nil {
		return failed(err)
	}
	return o.result(p, in, out[0])
}

func (o operator) result(p provenance, in []*Tensor, c *capi.Tensor) *Tensor {
	r := p.result(c)
	if err := r.failure(); err != nil {
		return failed(opError(operators[o].method, in, err))
	}
	return r
}

// two calls an operator with two results.
func (o operator) two(in []*Tensor, args []capi.Arg, ints []int64, text []byte) (*Tensor, *Tensor) {
	var out [2]*capi.Tensor
	p, err := o.call(in, args, ints, text, 0, out[:])
	if err != nil {
		return failed(err), failed(err)
	}
	return o.result(p, in, out[0]), o.result(p, in, out[1])
}

// three calls an operator with three results.
func (o operator) three(in []*Tensor, args []capi.Arg, ints []int64, text []byte) (*Tensor, *Tensor, *Tensor) {
	var out [3]*capi.Tensor
	p, err := o.call(in, args, ints, text, 0, out[:])
	if err != nil {
		return failed(err), failed(err), failed(err)
	}
	return o.result(p, in, out[0]), o.result(p, in, out[1]), o.result(p, in, out[2])
}

// four calls an operator with four results.
func (o operator) four(in []*Tensor, args []capi.Arg, ints []int64, text []byte) (*Tensor, *Tensor, *Tensor, *Tensor) {
	var out [4]*capi.Tensor
	p, err := o.call(in, args, ints, text, 0, out[:])
	if err != nil {
		return failed(err), failed(err), failed(err), failed(err)
	}
	return o.result(p, in, out[0]), o.result(p, in, out[1]), o.result(p, in, out[2]), o.result(p, in, out[3])
}

// truth calls an operator that returns a bool.
func (o operator) truth(in []*Tensor, args []capi.Arg, ints []int64, text []byte) (bool, error) {
	var all capi.Results
	if _, err := o.run(in, args, ints, text, 0, nil, nil, &all); err != nil {
		return false, err
	}
	return len(all.Args) == 1 && all.Args[0].Value == 1, nil
}

// list calls an operator that returns a list.
func (o operator) list(in []*Tensor, args []capi.Arg, ints []int64, text []byte) ([]*Tensor, error) {
	var all capi.List
	p, err := o.run(in, args, ints, text, 0, nil, &all, nil)
	if err != nil {
		return nil, err
	}
	results := all.Tensors()
	out := make([]*Tensor, len(results))
	for i, c := range results {
		out[i] = o.result(p, in, c)
		if failure := out[i].failure(); failure != nil {
			err = errors.Join(err, failure)
		}
	}
	return out, err
}

// self calls an operator that changes its first operand and returns it.
func (o operator) self(in []*Tensor, args []capi.Arg, ints []int64, text []byte) *Tensor {
	p, err := o.call(in, args, ints, text, 0, nil)
	if err != nil {
		return failed(err)
	}
	return in[0].marked(p.marks) // the marks of other operands propagate
}

// none calls an operator without results.
func (o operator) none(in []*Tensor, args []capi.Arg, ints []int64, text []byte) error {
	_, err := o.call(in, args, ints, text, 0, nil)
	return err
}

// The following functions make the arguments of generated methods.

func tensorArg(i int) capi.Arg { return capi.Arg{Kind: capi.ArgTensor, Value: int64(i)} }

func optionalArg(i int, t *Tensor) capi.Arg {
	if t == nil {
		return capi.Arg{Kind: capi.ArgNone}
	}
	return tensorArg(i)
}

// tensorsArg returns a Tensor[] of count operands from operand i on.
func tensorsArg(i, count int) capi.Arg {
	return capi.Arg{Kind: capi.ArgTensors, Value: int64(i), Count: int32(count)}
}

func intArg(v int64) capi.Arg { return capi.Arg{Kind: capi.ArgInt, Value: v} }
func floatArg(v float64) capi.Arg {
	return capi.Arg{Kind: capi.ArgDouble, Value: int64(math.Float64bits(v))}
}
func deviceArg(d int32) capi.Arg { return capi.Arg{Kind: capi.ArgDevice, Value: int64(d)} }
func defaultArg() capi.Arg       { return capi.Arg{Kind: capi.ArgDefault} }
func noneArg() capi.Arg          { return capi.Arg{Kind: capi.ArgNone} }

func boolArg(v bool) capi.Arg {
	if v {
		return capi.Arg{Kind: capi.ArgBool, Value: 1}
	}
	return capi.Arg{Kind: capi.ArgBool}
}

func intsArg(ints, list []int64) (capi.Arg, []int64) {
	return capi.Arg{Kind: capi.ArgInts, Value: int64(len(ints)), Count: int32(len(list))}, append(ints, list...)
}

func floatsArg(ints []int64, list []float64) (capi.Arg, []int64) {
	at := len(ints)
	for _, v := range list {
		ints = append(ints, int64(math.Float64bits(v)))
	}
	return capi.Arg{Kind: capi.ArgDoubles, Value: int64(at), Count: int32(len(list))}, ints
}

func complexArg(ints []int64, v complex128) (capi.Arg, []int64) {
	return capi.Arg{Kind: capi.ArgComplex, Value: int64(len(ints))},
		append(ints, int64(math.Float64bits(real(v))), int64(math.Float64bits(imag(v))))
}

func stringArg(text []byte, s string) (capi.Arg, []byte) {
	return capi.Arg{Kind: capi.ArgString, Value: int64(len(text)), Count: int32(len(s))}, append(text, s...)
}

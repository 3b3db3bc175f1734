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

// entry has the fields of an operator that calls need. Calls read this small struct instead of a
// row of operators, which is large.
type entry struct {
	op      *capi.Operator
	name    string // for errors
	flags   int32  // flags of every call: the C function's flags, checkedNil, takesCasts
	unknown error  // the reason why op is nil
}

const (
	// checkedNil says that nil operands are allowed: each nil is an optional argument, or an absent
	// element of a Tensor?[].
	checkedNil int32 = 1 << 29
	// takesCasts says that the casts of a ParameterCasts may replace the operands.
	takesCasts int32 = 1 << 27

	entryFlags = checkedNil | takesCasts // bits that are not flags of the C function
)

var entries [len(operators)]atomic.Pointer[entry]

// entry returns the operator's entry.
func (o operator) entry() *entry {
	if e := entries[o].Load(); e != nil {
		return e
	}
	return o.lookUp()
}

// lookUp finds the operator in LibTorch's registry, once if it succeeds. The registry never changes
// and its entries live as long as the process, so every caller gets the same entry.
func (o operator) lookUp() *entry {
	info := &operators[o]
	e := &entry{name: info.method}
	if info.waits || o == opTo {
		e.flags |= capi.CallWaits
	}
	if info.gaps {
		e.flags |= checkedNil
	}
	if o.castsOperands() {
		e.flags |= takesCasts
	}
	if e.unknown = capi.Check(); e.unknown != nil {
		return e
	}
	if e.op, e.unknown = capi.FindOperator(info.aten, info.overload); e.unknown == nil {
		entries[o].Store(e)
	}
	return e
}

// provenance holds the properties that results inherit from operands.
type provenance struct {
	scope *Scope
	marks marks
}

// marks are the modes of a handle. They apply to operators on the handle, and to their results. The
// bits equal those of the call's flags.
type marks uint16

const (
	noGrad           marks = capi.CallNoGrad
	autocastBFloat16 marks = capi.CallAutocastBFloat16
	autocastFloat16  marks = capi.CallAutocastFloat16

	// Each of the switches is either on or off. A handle without Numerics has neither bit.
	numericsMarks marks = capi.CallNumerics
)

func (p provenance) tensor(c *capi.Tensor) *Tensor {
	if c == nil {
		return failed(invalid("LibTorch returned an undefined result"))
	}
	if p.scope == nil {
		o := newOwned(c)
		return &Tensor{h: &o.handle, more: &o.more, marks: p.marks}
	}
	if t := p.scope.add(c, p.marks); t != nil {
		return t
	}
	return failed(p.scope.s.ended())
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
// arguments). call keeps no slice, so the slices of the generated methods stay on the stack.
func (o operator) call(in []*Tensor, args []capi.Arg, lists *capi.Lists, out []*capi.Tensor) (provenance, error) {
	return invoke(o.entry(), in, args, lists, out)
}

// run runs an operator with one result. The operator is by, or o if by is nil. If the operator
// changes an operand in place, run returns that operand, in[inPlace], with the marks of all
// operands. For other operators inPlace is -1. If by is not nil, run returns nil for a result that
// LibTorch leaves undefined.
//
// run contains a copy of hold and letGo, because the size of the code and the depth of the calls
// matter. An operator runs so much code that the code of run has left the instruction cache before
// the next call, and the processor predicts returns only up to a limited depth.
func (o operator) run(by *entry, in []*Tensor, args []capi.Arg, lists *capi.Lists, inPlace int) *Tensor {
	e := by
	if e == nil {
		if e = entries[o].Load(); e == nil {
			e = o.lookUp()
		}
	}
	var cs operands
	if len(in) > len(cs) {
		return e.runMany(by == nil, in, args, lists, inPlace)
	}
	var scope *Scope
	var m marks
	for i, t := range in {
		if t == nil {
			if e.flags&checkedNil == 0 && named(args, i) {
				return e.refused(in, i)
			}
			continue
		}
		h := t.h
		if h == nil || h.state.Add(1) >= closing {
			return e.refused(in, i)
		}
		cs[i&(len(cs)-1)] = h.c
		m |= t.marks
		if t.scope != scope {
			scope = youngest(scope, t.scope)
		}
	}
	if e.op == nil {
		return e.refused(in, len(in))
	}
	if e.flags&takesCasts != 0 && scope != nil {
		if pass := scope.casts.Load(); pass != nil {
			pass.replace(in, cs[:len(in)], m)
		}
	}
	flags := e.flags&^entryFlags | int32(m)
	if inPlace >= 0 {
		flags |= capi.CallDrops
	}
	c, err := capi.CallOperatorOne(e.op, args, cs[:len(in)], lists, flags)
	for _, t := range in {
		if t != nil {
			t.h.release()
		}
	}
	if c != nil && scope != nil {
		if t := scope.add(c, m); t != nil {
			return t
		}
	} else if inPlace >= 0 && err == nil {
		return in[inPlace].marked(m) // the marks of other operands propagate
	}
	if err != nil {
		err = opError(e.name, in, err)
	}
	return e.otherwise(by == nil, provenance{scope, m}, in, c, err)
}

// runMany implements run for more operands than the type operands has room for.
//
//go:noinline
func (e *entry) runMany(defined bool, in []*Tensor, args []capi.Arg, lists *capi.Lists, inPlace int) *Tensor {
	var room [1]*capi.Tensor
	out := room[:]
	if inPlace >= 0 {
		out = nil
	}
	p, err := invoke(e, in, args, lists, out)
	if inPlace >= 0 && err == nil {
		return in[inPlace].marked(p.marks)
	}
	if c := room[0]; c != nil && p.scope != nil {
		if t := p.scope.add(c, p.marks); t != nil {
			return t
		}
	}
	return e.otherwise(defined, p, in, room[0], err)
}

// refused returns the error of refuse as a tensor. The acquire of operand n has failed.
//
//go:noinline
func (e *entry) refused(in []*Tensor, n int) *Tensor {
	// the operand is closed, but was counted as in use
	if n < len(in) && in[n] != nil && in[n].h != nil {
		in[n].h.release() // the count may have prevented the last user's free
	}
	return failed(e.refuse(in, n))
}

// otherwise finishes a run whose result joined no scope.
//
//go:noinline
func (e *entry) otherwise(defined bool, p provenance, in []*Tensor, c *capi.Tensor, err error) *Tensor {
	switch {
	case err != nil:
		return failed(err)
	case c == nil && !defined:
		return nil
	}
	return e.otherResult(p, in, c)
}

// invoke runs the operator e and writes its results to out. An operand's own error precedes the
// operator's.
func invoke(e *entry, in []*Tensor, args []capi.Arg, lists *capi.Lists, out []*capi.Tensor) (provenance, error) {
	var few operands
	cs := few.of(in)
	p, err := e.hold(in, args, cs)
	if err != nil {
		return p, err
	}
	err = capi.CallOperator(e.op, args, cs, lists, e.flags&^entryFlags|int32(p.marks), out)
	letGo(in)
	if err != nil {
		err = opError(e.name, in, err)
	}
	return p, err
}

// invokeList is invoke for an operator that returns any number of tensors.
func invokeList(e *entry, in []*Tensor, args []capi.Arg, lists *capi.Lists, list *capi.List) (provenance, error) {
	var few operands
	cs := few.of(in)
	p, err := e.hold(in, args, cs)
	if err != nil {
		return p, err
	}
	err = capi.CallOperatorList(e.op, args, cs, lists, e.flags&^(entryFlags|capi.CallWaits)|int32(p.marks), list)
	letGo(in)
	if err != nil {
		err = opError(e.name, in, err)
	}
	return p, err
}

// invokeResults is invoke for an operator with results of any type.
func invokeResults(e *entry, in []*Tensor, args []capi.Arg, lists *capi.Lists) (all capi.Results,
	p provenance, err error) {
	var few operands
	cs := few.of(in)
	if p, err = e.hold(in, args, cs); err != nil {
		return all, p, err
	}
	all, err = capi.CallOperatorResults(e.op, args, cs, lists, e.flags&^(entryFlags|capi.CallWaits)|int32(p.marks))
	letGo(in)
	if err != nil {
		err = opError(e.name, in, err)
	}
	return all, p, err
}

// operands has room for the operands of nearly all calls. Its length is a power of two.
type operands [8]*capi.Tensor

func (o *operands) of(in []*Tensor) []*capi.Tensor {
	if len(in) <= len(o) {
		return o[:len(in)]
	}
	return make([]*capi.Tensor, len(in))
}

// hold writes the operands to cs. Unless it fails, a call of letGo must follow. Rare cases are in
// separate functions, so that the code of common calls fits in few cache lines.
func (e *entry) hold(in []*Tensor, args []capi.Arg, cs []*capi.Tensor) (p provenance, err error) {
	for i, t := range in {
		if t == nil {
			if e.flags&checkedNil == 0 && named(args, i) {
				return p, e.refuse(in, i)
			}
			continue
		}
		if t.h == nil { // it failed
			return p, e.refuse(in, i)
		}
		if cs[i] = t.h.acquire(); cs[i] == nil {
			return p, e.refuse(in, i)
		}
		p.scope = youngest(p.scope, t.scope)
		p.marks |= t.marks
	}
	if e.op == nil {
		return p, e.refuse(in, len(in))
	}
	if e.flags&takesCasts != 0 && p.scope != nil {
		if pass := p.scope.casts.Load(); pass != nil {
			pass.replace(in, cs, p.marks)
		}
	}
	return p, nil
}

// letGo follows a hold that did not fail.
func letGo(in []*Tensor) {
	for _, t := range in {
		if t != nil {
			t.h.release()
		}
	}
}

// refuse releases the first n operands. It returns the error of the next operand, or the operator's
// error if there is none.
//
//go:noinline
func (e *entry) refuse(in []*Tensor, n int) error {
	letGo(in[:n])
	switch {
	case n == len(in):
		return opError(e.name, in, e.unknown)
	case in[n] == nil:
		return opError(e.name, in, invalid("operand %d is nil", n+1))
	case in[n].failure() != nil:
		return in[n].failure()
	}
	return opError(e.name, in, in[n].gone())
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
func (o operator) one(in []*Tensor, args []capi.Arg, lists *capi.Lists) *Tensor {
	return o.run(nil, in, args, lists, -1)
}

// result returns the tensor of an operator's result.
func (o operator) result(p provenance, in []*Tensor, c *capi.Tensor) *Tensor {
	if p.scope != nil && c != nil {
		if t := p.scope.add(c, p.marks); t != nil {
			return t
		}
	}
	return o.entry().otherResult(p, in, c)
}

// otherResult implements result if no scope took c. If p has a scope, the scope has ended and c is
// freed.
func (e *entry) otherResult(p provenance, in []*Tensor, c *capi.Tensor) *Tensor {
	if p.scope != nil && c != nil {
		return failed(opError(e.name, in, p.scope.s.ended()))
	}
	r := p.result(c)
	if err := r.failure(); err != nil {
		return failed(opError(e.name, in, err))
	}
	return r
}

// two calls an operator with two results.
func (o operator) two(in []*Tensor, args []capi.Arg, lists *capi.Lists) (*Tensor, *Tensor) {
	var out [2]*capi.Tensor
	p, err := o.call(in, args, lists, out[:])
	if err != nil {
		return failed(err), failed(err)
	}
	return o.result(p, in, out[0]), o.result(p, in, out[1])
}

// three calls an operator with three results.
func (o operator) three(in []*Tensor, args []capi.Arg, lists *capi.Lists) (*Tensor, *Tensor, *Tensor) {
	var out [3]*capi.Tensor
	p, err := o.call(in, args, lists, out[:])
	if err != nil {
		return failed(err), failed(err), failed(err)
	}
	return o.result(p, in, out[0]), o.result(p, in, out[1]), o.result(p, in, out[2])
}

// four calls an operator with four results.
func (o operator) four(in []*Tensor, args []capi.Arg, lists *capi.Lists) (*Tensor, *Tensor, *Tensor, *Tensor) {
	var out [4]*capi.Tensor
	p, err := o.call(in, args, lists, out[:])
	if err != nil {
		return failed(err), failed(err), failed(err), failed(err)
	}
	return o.result(p, in, out[0]), o.result(p, in, out[1]), o.result(p, in, out[2]), o.result(p, in, out[3])
}

// truth calls an operator that returns a bool.
func (o operator) truth(in []*Tensor, args []capi.Arg, lists *capi.Lists) (bool, error) {
	all, _, err := invokeResults(o.entry(), in, args, lists)
	if err != nil {
		return false, err
	}
	return len(all.Args) == 1 && all.Args[0].Value == 1, nil
}

// list calls an operator that returns a list.
func (o operator) list(in []*Tensor, args []capi.Arg, lists *capi.Lists) ([]*Tensor, error) {
	var all capi.List
	p, err := invokeList(o.entry(), in, args, lists, &all)
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
func (o operator) self(in []*Tensor, args []capi.Arg, lists *capi.Lists) *Tensor {
	return o.run(nil, in, args, lists, 0)
}

// none calls an operator without results.
func (o operator) none(in []*Tensor, args []capi.Arg, lists *capi.Lists) error {
	_, err := o.call(in, args, lists, nil)
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

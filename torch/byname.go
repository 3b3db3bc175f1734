package torch

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/torch/internal/schema"
)

// Keywords are arguments of [Call] by the names of the operator's schema. They follow the
// positional arguments.
type Keywords map[string]any

// Call runs any operator of LibTorch, by its name and overload: "aten::upsample_bilinear2d.vec". A
// name without a namespace is in aten. A name without an overload, or with the overload "default",
// selects the operator's overload without a name. If the operator has no such overload, the error
// lists the overloads.
//
//	y, err := torch.Call("upsample_bilinear2d", x, []int64{64, 64}, false)
//	y, err := torch.Call("scaled_dot_product_attention", q, k, v, torch.Keywords{"is_causal": true})
//
// The arguments are in the order of the operator's schema; the last one may be [Keywords].
// Arguments that are left out take the schema's defaults. Call checks each argument against the
// schema, and an error names the operator, the argument, the type that the schema demands and the
// type given:
//
//	schema                          Go
//	Tensor                          *Tensor
//	Tensor[], Tensor?[]             []*Tensor; elements of the latter may be nil
//	int                             int, int32, int64, Reduction
//	float                           float64, float32, int, int64
//	bool                            bool
//	Scalar                          int, int64, float64, bool, complex128
//	int[], float[], bool[]          []int64 or []int, []float64, []bool
//	int[2], bool[2]                 also a single value, which stands for all
//	Scalar[]                        []int64, []float64, []bool
//	str                             string
//	ScalarType                      DType
//	MemoryFormat                    MemoryFormat
//	Device                          cuda.Device
//	Generator                       *Generator
//	T?                              what T takes, or nil for none
//
// A nil for an argument that is not optional takes the schema's default. Other types, such as
// Dimname, take only nil.
//
// Call returns the tensors of the schema's results, in order. A list contributes its elements. A
// result that LibTorch leaves undefined is nil. The results join scopes, are recorded for backward
// and inherit NoGrad as the results of methods do. If the operator returns an argument that it has
// changed in place, the result is the argument's own handle. Call refuses operators that return
// something other than tensors (a number, a string): see [CallValues].
//
// If Call fails, it returns the error, and as many failed tensors as the schema has results (none
// for a list of tensors or an unknown operator). Call blocks as methods do. The first call of a
// name looks the operator up and reads its schema. Any goroutine may call it.
func Call(name string, args ...any) ([]*Tensor, error) {
	n, err := find(name)
	if err == nil {
		err = n.returnsTensors()
	}
	if err != nil {
		return nil, opError(name, operandsOf(args), err)
	}
	return n.call(args)
}

// CallValues is [Call] for an operator with results of any type:
//
//	same, err := torch.CallValues("equal", x, y) // same[0].(bool)
//
// There is one element for each result of the schema:
//
//	schema                          Go
//	Tensor                          *Tensor, nil if LibTorch leaves it undefined
//	Tensor[]                        []*Tensor
//	int, float, bool                int64, float64, bool
//	Scalar                          int64, float64, bool, complex128, as the element's dtype is
//	T?                              the same as for T, or nil
//
// No operator of LibTorch returns numbers of other types. Tensors are the same as for Call. If
// CallValues fails, it returns no results. It blocks until numbers are computed.
func CallValues(name string, args ...any) ([]any, error) {
	n, err := find(name)
	if err != nil {
		return nil, opError(name, operandsOf(args), err)
	}
	return n.values(args)
}

// Call1 is [Call] for an operator with one tensor as its result. Like the result of a method, this
// tensor carries the error:
//
//	y := torch.Call1("erf", x).Mul(z)
func Call1(name string, args ...any) *Tensor {
	n := findRecent(name)
	if n == nil || !n.single {
		var refusal *Tensor
		if n, refusal = findSingle(name, args); n == nil {
			return refusal
		}
	}
	if t := n.one(args); t != nil {
		return t
	}
	return undefinedResult(name, args)
}

// findSingle returns the operator of a name, or the failure of a Call1 if it is unknown or does not
// return one tensor.
//
//go:noinline
func findSingle(name string, args []any) (*namedOperator, *Tensor) {
	n, err := find(name)
	if err == nil {
		err = n.returnsTensors()
	}
	if err == nil && !n.single {
		err = invalid("it returns %s, not one tensor: use Call", n.returns)
	}
	if err != nil {
		return nil, failed(opError(name, operandsOf(args), err))
	}
	return n, nil
}

//go:noinline
func undefinedResult(name string, args []any) *Tensor {
	return failed(opError(name, operandsOf(args), invalid("LibTorch returned an undefined result")))
}

// Schema returns the schema of an operator, in LibTorch's notation. The name is as in [Call].
func Schema(name string) (string, error) {
	n, err := find(name)
	if err != nil {
		return "", opError(name, nil, err)
	}
	return n.schema, nil
}

// namedOperator is an operator that Call has looked up.
type namedOperator struct {
	entry   // its name is in full
	schema  string
	params  []parameter
	needed  int    // parameters up to the last one without a default
	leading int    // leading parameters that are tensors, at most len(tensorArgs)
	single  bool   // the only result is a tensor
	results int    // tensors in the schema's results
	list    bool   // a result is a list of tensors
	others  bool   // a result is neither a tensor nor a list of them
	returns string // the results in the schema's notation
	written []int  // for each result that is an argument: the argument's index; otherwise -1
}

type parameter struct {
	name     string
	text     string // the type in the schema's notation
	kind     kind
	optional bool
	def      bool // has a default
	size     int  // n of int[n]; 0 if the type has none
}

type kind uint8

const (
	kindOther kind = iota // only nil
	kindTensor
	kindTensors
	kindOptionalTensors
	kindInt
	kindFloat
	kindBool
	kindScalar
	kindInts
	kindFloats
	kindBools
	kindScalars
	kindString
	kindDType
	kindMemoryFormat
	kindDevice
	kindGenerator
)

var kinds = map[string]kind{
	"Tensor": kindTensor, "Tensor[]": kindTensors, "Tensor?[]": kindOptionalTensors,
	"int": kindInt, "float": kindFloat, "bool": kindBool, "Scalar": kindScalar,
	"int[]": kindInts, "float[]": kindFloats, "bool[]": kindBools, "Scalar[]": kindScalars,
	"str": kindString, "Device": kindDevice, "Generator": kindGenerator,
	"ScalarType": kindDType, "Layout": kindInt, "MemoryFormat": kindMemoryFormat,
	"SymInt": kindInt, "SymInt[]": kindInts,
}

// namedOperators maps each name that was looked up to its operator. It has at most as many
// operators as LibTorch's registry. Adding a name replaces the map, so that calls read it without a
// lock.
var namedOperators atomic.Pointer[map[string]*namedOperator]

// addingOperator is held while a name is added to namedOperators.
var addingOperator sync.Mutex

// recentOperators caches some of namedOperators. Its key is the address of the name's text, which
// is nearly always a constant. A call therefore seldom has to hash the name.
var recentOperators [64]atomic.Pointer[recentOperator]

type recentOperator struct {
	name string
	of   *namedOperator
}

// recentPlace returns a name's entry in recentOperators.
func recentPlace(name string) *atomic.Pointer[recentOperator] {
	at := uintptr(unsafe.Pointer(unsafe.StringData(name)))
	return &recentOperators[(at>>3^at>>9)%uintptr(len(recentOperators))]
}

// findRecent returns the operator in recentOperators whose name has its text at the same address.
// It returns nil if there is none.
func findRecent(name string) *namedOperator {
	r := recentPlace(name).Load()
	if r != nil && unsafe.StringData(r.name) == unsafe.StringData(name) && len(r.name) == len(name) {
		return r.of
	}
	return nil
}

func find(name string) (*namedOperator, error) {
	if n := findRecent(name); n != nil {
		return n, nil
	}
	return findElsewhere(name)
}

func findElsewhere(name string) (*namedOperator, error) {
	recent := recentPlace(name)
	if r := recent.Load(); r != nil && r.name == name {
		return r.of, nil
	}
	if known := namedOperators.Load(); known != nil {
		if n := (*known)[name]; n != nil {
			recent.Store(&recentOperator{name, n})
			return n, nil
		}
	}
	return addOperator(name)
}

// addOperator looks up an operator that is not in namedOperators.
func addOperator(name string) (*namedOperator, error) {
	full := name
	if !strings.Contains(full, "::") {
		full = "aten::" + full
	}
	base, overload, _ := strings.Cut(full, ".")
	if overload == "default" {
		overload = ""
	}
	if strings.ContainsRune(name, 0) {
		return nil, invalid("the name contains a zero byte")
	}
	e, err := capi.FindOperator(base, overload)
	if err != nil {
		return nil, err
	}
	n, err := describe(e, full)
	if err != nil {
		return nil, err
	}
	if castsOperandsOf(base, overload) {
		n.flags |= takesCasts
	}
	addingOperator.Lock()
	defer addingOperator.Unlock()
	known := map[string]*namedOperator{}
	if before := namedOperators.Load(); before != nil {
		if found := (*before)[name]; found != nil { // another goroutine was faster
			return found, nil
		}
		maps.Copy(known, *before)
	}
	known[name] = n
	namedOperators.Store(&known)
	return n, nil
}

// describe reads the schema of an operator.
func describe(e *capi.Operator, name string) (*namedOperator, error) {
	text := capi.OperatorSchema(e)
	s, err := schema.Parse(text)
	if err != nil {
		return nil, invalid("%v", err)
	}
	n := &namedOperator{entry: entry{op: e, name: name, flags: checkedNil}, schema: text,
		returns: text[strings.LastIndex(text, " -> ")+len(" -> "):]}
	written := map[string]int{} // arguments by their alias annotations
	for i, a := range s.Args {
		n.params = append(n.params, parameterOf(a))
		if !a.HasDefault {
			n.needed = i + 1
		}
		if a.Written && a.Type == "Tensor" {
			written[a.Alias] = i
		}
		if a.Name == "non_blocking" { // it may copy between host and device, and wait for the copy
			n.flags |= capi.CallWaits
		}
	}
	for _, r := range s.Returns {
		of := -1
		switch {
		case r.Type == "Tensor":
			if i, ok := written[r.Alias]; ok && r.Written {
				of = i
			}
			n.results++
		case r.Type == "Tensor[]":
			n.list = true
		default:
			n.others = true
		}
		n.written = append(n.written, of)
	}
	n.single = n.results == 1 && !n.list && !n.others
	for n.leading < min(len(n.params), len(tensorArgs)) && n.params[n.leading].kind == kindTensor {
		n.leading++
	}
	return n, nil
}

func (n *namedOperator) returnsTensors() error {
	if n.others {
		return invalid("it returns %s, and Call returns only tensors: use CallValues", n.returns)
	}
	return nil
}

func parameterOf(a schema.Arg) parameter {
	p := parameter{name: a.Name, text: a.Type, def: a.HasDefault}
	t, optional := strings.CutSuffix(a.Type, "?")
	p.optional = optional
	if open := strings.LastIndexByte(t, '['); open >= 0 && strings.HasSuffix(t, "]") {
		p.size, _ = strconv.Atoi(t[open+1 : len(t)-1]) // 0 for "[]"
		t = t[:open] + "[]"
	}
	p.kind = kinds[t]
	return p
}

// arguments collects the arguments of one call.
type arguments struct {
	in         short[*Tensor]
	args       short[capi.Arg]
	ints       short[int64]
	text       []byte
	generators []*Generator // to release after the call
	err        error
}

// short is a list that needs no allocation while it is short.
type short[T any] struct {
	first [8]T
	n     int // elements in first
	all   []T // instead of first, once there are more
}

func (s *short[T]) add(v T) {
	if s.n < len(s.first) {
		s.first[s.n] = v
		s.n++
		return
	}
	s.addMore(v)
}

//go:noinline
func (s *short[T]) addMore(v T) {
	if s.all == nil {
		s.all = slices.Clone(s.first[:])
	}
	s.all = append(s.all, v)
}

func (s *short[T]) list() []T {
	if s.all != nil {
		return s.all
	}
	return s.first[:s.n]
}

func (s *short[T]) len() int { return len(s.list()) }

func (a *arguments) release() {
	for _, g := range a.generators {
		g.release()
	}
}

func (n *namedOperator) call(given []any) ([]*Tensor, error) {
	if n.single {
		t := n.one(given)
		if t == nil {
			return []*Tensor{nil}, nil
		}
		return []*Tensor{t}, t.failure()
	}
	var a arguments
	defer a.release()
	if err := n.collect(&a, given); err != nil {
		return n.fail(opError(n.name, operandsOf(given), err))
	}
	var out []*capi.Tensor
	var p provenance
	var err error
	if n.list {
		var list capi.List
		p, err = invokeList(&n.entry, a.in.list(), a.args.list(), &capi.Lists{Ints: a.ints.list(), Text: a.text}, &list)
		out = list.Tensors()
	} else {
		out = make([]*capi.Tensor, n.results)
		p, err = invoke(&n.entry, a.in.list(), a.args.list(), &capi.Lists{Ints: a.ints.list(), Text: a.text}, out)
	}
	if err != nil {
		return n.fail(err)
	}
	return n.wrap(p, &a, out)
}

// tensorArgs are the arguments of a call that has only tensors.
var tensorArgs = [len(operands{})]capi.Arg{
	tensorArg(0), tensorArg(1), tensorArg(2), tensorArg(3), tensorArg(4), tensorArg(5), tensorArg(6), tensorArg(7),
}

// one calls an operator with one result, which is nil if LibTorch leaves it undefined. A call with
// only tensors needs no conversion.
func (n *namedOperator) one(given []any) *Tensor {
	if len(given) < n.needed || len(given) > n.leading {
		return n.oneOfAny(given)
	}
	var in [len(tensorArgs)]*Tensor
	for i, v := range given {
		t, ok := tensorIn(v)
		if !ok {
			return n.oneOfAny(given)
		}
		in[i%len(in)] = t
	}
	return operator(0).run(&n.entry, in[:len(given)], tensorArgs[:len(given)], nil, n.written[0])
}

// oneOfAny implements one for arguments of any type.
//
//go:noinline
func (n *namedOperator) oneOfAny(given []any) *Tensor {
	var a arguments
	if err := n.collect(&a, given); err != nil {
		return n.notCollected(&a, given, err)
	}
	inPlace := n.written[0]
	if inPlace >= 0 { // the result is an operand
		inPlace = int(a.args.list()[inPlace].Value)
	}
	t := operator(0).run(&n.entry, a.in.list(), a.args.list(), &capi.Lists{Ints: a.ints.list(), Text: a.text}, inPlace)
	if a.generators != nil {
		a.release()
	}
	return t
}

//go:noinline
func (n *namedOperator) notCollected(a *arguments, given []any, err error) *Tensor {
	a.release()
	return failed(opError(n.name, operandsOf(given), err))
}

// values implements CallValues.
func (n *namedOperator) values(given []any) ([]any, error) {
	var a arguments
	defer a.release()
	if err := n.collect(&a, given); err != nil {
		return nil, opError(n.name, operandsOf(given), err)
	}
	all, p, err := invokeResults(&n.entry, a.in.list(), a.args.list(), &capi.Lists{Ints: a.ints.list(), Text: a.text})
	if err != nil {
		return nil, err
	}
	tensors, err := n.wrapAll(p, &a, &all)
	out := make([]any, len(all.Args))
	for i, r := range all.Args {
		out[i] = valueOf(r, &all, tensors)
	}
	return out, err
}

// wrapAll makes the Tensors for the C tensors among results of any type.
func (n *namedOperator) wrapAll(p provenance, a *arguments, all *capi.Results) ([]*Tensor, error) {
	of := make([]int, len(all.Tensors))
	for i := range of {
		of[i] = -1
	}
	for i, r := range all.Args {
		if r.Kind == capi.ArgTensor {
			of[r.Value] = n.written[i]
		}
	}
	return n.wrapEach(p, a, all.Tensors, of)
}

// valueOf returns a result as a Go value.
func valueOf(r capi.Arg, all *capi.Results, tensors []*Tensor) any {
	switch r.Kind {
	case capi.ArgTensor:
		return tensors[r.Value]
	case capi.ArgTensors:
		return tensors[r.Value:][:r.Count:r.Count]
	case capi.ArgInt:
		return r.Value
	case capi.ArgDouble:
		return math.Float64frombits(uint64(r.Value))
	case capi.ArgBool:
		return r.Value != 0
	case capi.ArgComplex:
		return complex(math.Float64frombits(uint64(all.Ints[r.Value])),
			math.Float64frombits(uint64(all.Ints[r.Value+1])))
	}
	return nil
}

// fail returns err, and a failed tensor for each result.
func (n *namedOperator) fail(err error) ([]*Tensor, error) {
	if n.list {
		return nil, err
	}
	out := make([]*Tensor, n.results)
	for i := range out {
		out[i] = failed(err)
	}
	return out, err
}

// wrap makes the tensors of the results.
func (n *namedOperator) wrap(p provenance, a *arguments, results []*capi.Tensor) ([]*Tensor, error) {
	if n.list {
		return n.wrapEach(p, a, results, nil)
	}
	return n.wrapEach(p, a, results, n.written)
}

// wrapEach makes the tensors of results. written[i] is the number of the argument that result i is,
// or -1. written may be nil.
func (n *namedOperator) wrapEach(p provenance, a *arguments, results []*capi.Tensor, written []int) ([]*Tensor, error) {
	out := make([]*Tensor, len(results))
	var err error
	for i, c := range results {
		if written != nil && written[i] >= 0 {
			if c != nil {
				capi.FreeTensor(c)
			}
			out[i] = a.operand(written[i]).marked(p.marks) // the marks of other operands propagate
			continue
		}
		if c == nil {
			continue
		}
		out[i] = p.result(c)
		if e := out[i].failure(); e != nil {
			out[i] = failed(opError(n.name, a.in.list(), e))
			err = errors.Join(err, out[i].failure())
		}
	}
	return out, err
}

// operand returns the tensor of argument i.
func (a *arguments) operand(i int) *Tensor { return a.in.list()[a.args.list()[i].Value] }

// collect puts the arguments into the schema's order.
func (n *namedOperator) collect(a *arguments, given []any) error {
	if len(given) < n.needed || len(given) > min(len(n.params), len(a.args.first)) || endsInWords(given) {
		return n.collectWords(a, given)
	}
	params, args := n.params[:len(given)], a.args.first[:len(given)]
	for i, v := range given {
		p, arg := &params[i], &args[i]
		switch p.kind { // handles the values of most calls in few comparisons
		case kindTensor:
			if t, ok := tensorIn(v); ok && a.in.n < len(a.in.first) {
				*arg = tensorArg(a.in.n)
				a.in.first[a.in.n] = t
				a.in.n++
				continue
			}
		case kindInts:
			if list, ok := v.([]int64); ok && list != nil && len(list) <= len(a.ints.first)-a.ints.n {
				*arg = capi.Arg{Kind: capi.ArgInts, Value: int64(a.ints.n), Count: int32(len(list))}
				for _, n := range list {
					a.ints.first[a.ints.n%len(a.ints.first)] = n
					a.ints.n++
				}
				continue
			}
		case kindInt:
			if n, ok := v.(int); ok {
				*arg = intArg(int64(n))
				continue
			}
		case kindFloat, kindScalar:
			if f, ok := v.(float64); ok {
				*arg = floatArg(f)
				continue
			}
		case kindBool:
			if b, ok := v.(bool); ok {
				*arg = boolArg(b)
				continue
			}
		}
		var ok bool
		if *arg, ok = a.arg(p, v); a.err != nil || !ok {
			return a.refused(p, v)
		}
	}
	a.args.n = len(given)
	return nil
}

// tensorIn returns the tensor in v, and false for other values and nil.
func tensorIn(v any) (*Tensor, bool) {
	t, ok := v.(*Tensor)
	return t, ok && t != nil
}

func endsInWords(given []any) bool {
	if len(given) == 0 {
		return false
	}
	_, ok := given[len(given)-1].(Keywords)
	return ok
}

// refused returns the error of an argument that was not converted.
//
//go:noinline
func (a *arguments) refused(p *parameter, v any) error {
	if a.err != nil {
		return fmt.Errorf("argument %s: %w", p.name, a.err)
	}
	return invalid("argument %s is %s, and got %s", p.name, p.text, typeName(v))
}

// collectWords implements collect for all calls, including calls with Keywords or too few
// arguments.
func (n *namedOperator) collectWords(a *arguments, given []any) error {
	var words Keywords
	if len(given) > 0 {
		if w, ok := given[len(given)-1].(Keywords); ok {
			words, given = w, given[:len(given)-1]
		}
	}
	if len(given) > len(n.params) {
		return invalid("%d arguments, and it takes at most %d: %s", len(given), len(n.params), n.schema)
	}
	if len(words) > 0 {
		if err := n.checkWords(words, len(given)); err != nil {
			return err
		}
	}
	for i := range n.params {
		p := &n.params[i]
		var v any
		ok := i < len(given)
		if ok {
			v = given[i]
		} else if len(words) > 0 {
			v, ok = words[p.name]
		}
		if !ok && !p.def {
			return invalid("argument %s, a %s, is missing: %s", p.name, p.text, n.schema)
		}
		arg, known := defaultArg(), true
		if ok {
			arg, known = a.arg(p, v)
		}
		if a.err != nil || !known {
			return a.refused(p, v)
		}
		a.args.add(arg)
	}
	return nil
}

// checkWords checks the names of the arguments in words. positions is the number of positional
// arguments before them.
func (n *namedOperator) checkWords(words Keywords, positions int) error {
	for word := range words {
		i := slices.IndexFunc(n.params, func(p parameter) bool { return p.name == word })
		switch {
		case i < 0:
			return invalid("it has no argument %s: %s", word, n.schema)
		case i < positions:
			return invalid("argument %s is given by position and by name", word)
		}
	}
	return nil
}

// arg converts the value v. It returns false if the parameter does not take v's type.
func (a *arguments) arg(p *parameter, v any) (capi.Arg, bool) {
	if absent(v) {
		switch {
		case p.optional:
			return noneArg(), true
		case v == nil && p.def:
			return defaultArg(), true
		}
	}
	switch p.kind {
	case kindTensor:
		t, ok := tensorIn(v)
		if !ok {
			return capi.Arg{}, false
		}
		a.in.add(t)
		return tensorArg(a.in.len() - 1), true
	case kindTensors, kindOptionalTensors:
		return a.tensors(v, p.kind == kindOptionalTensors)
	case kindInts, kindFloats, kindBools, kindScalars:
		return a.numbers(p, v)
	case kindString:
		s, ok := v.(string)
		if !ok {
			return capi.Arg{}, false
		}
		var arg capi.Arg
		arg, a.text = stringArg(a.text, s)
		return arg, true
	case kindGenerator:
		return a.generator(v)
	case kindScalar:
		if c, ok := v.(complex128); ok {
			arg, parts := complexArg(nil, c)
			arg.Value = int64(a.ints.len())
			a.ints.add(parts[0])
			a.ints.add(parts[1])
			return arg, true
		}
	}
	return scalar(p.kind, v)
}

// absent reports whether v is nil, or a nil *Tensor or slice in it.
func absent(v any) bool {
	switch v := v.(type) {
	case nil:
		return true
	case *Tensor:
		return v == nil
	case []*Tensor:
		return v == nil
	case *Generator:
		return v == nil
	case []int64:
		return v == nil
	case []int:
		return v == nil
	case []float64:
		return v == nil
	case []bool:
		return v == nil
	}
	return false
}

// generator holds a generator until release.
func (a *arguments) generator(v any) (capi.Arg, bool) {
	g, ok := v.(*Generator)
	if !ok || g == nil {
		return capi.Arg{}, false
	}
	arg, err := g.arg()
	if err != nil {
		a.err = err
		return arg, true
	}
	a.generators = append(a.generators, g)
	return arg, true
}

func (a *arguments) tensors(v any, gaps bool) (capi.Arg, bool) {
	list, ok := v.([]*Tensor)
	if !ok || !gaps && slices.Contains(list, nil) {
		return capi.Arg{}, false
	}
	at := a.in.len()
	for _, t := range list {
		a.in.add(t)
	}
	return tensorsArg(at, len(list)), true
}

// scalar converts a value that is neither a tensor, a list nor a string.
func scalar(k kind, v any) (capi.Arg, bool) {
	switch v := v.(type) {
	case bool:
		return boolArg(v), k == kindBool || k == kindScalar
	case float64:
		return floatArg(v), k == kindFloat || k == kindScalar
	case float32:
		return floatArg(float64(v)), k == kindFloat || k == kindScalar
	case Reduction:
		return intArg(v.libtorch()), k == kindInt
	case DType:
		return intArg(int64(v)), k == kindDType
	case MemoryFormat:
		return intArg(int64(v)), k == kindMemoryFormat
	case cuda.Device:
		return deviceArg(int32(v)), k == kindDevice
	}
	i, ok := integer(v)
	if !ok {
		return capi.Arg{}, false
	}
	if k == kindFloat {
		return floatArg(float64(i)), true
	}
	return intArg(i), k == kindInt || k == kindScalar
}

func integer(v any) (int64, bool) {
	switch v := v.(type) {
	case int:
		return int64(v), true
	case int32:
		return int64(v), true
	case int64:
		return v, true
	}
	return 0, false
}

// numbers converts a list of numbers, or a number that stands for all elements of a list of fixed
// length.
func (a *arguments) numbers(p *parameter, v any) (capi.Arg, bool) {
	at := a.ints.len()
	made := func(kind int32) capi.Arg {
		return capi.Arg{Kind: kind, Value: int64(at), Count: int32(a.ints.len() - at)}
	}
	switch v := v.(type) {
	case []int64:
		for _, i := range v {
			a.ints.add(i)
		}
		return made(capi.ArgInts), p.kind == kindInts || p.kind == kindScalars
	case []int:
		for _, i := range v {
			a.ints.add(int64(i))
		}
		return made(capi.ArgInts), p.kind == kindInts || p.kind == kindScalars
	case []float64:
		for _, f := range v {
			a.ints.add(int64(math.Float64bits(f)))
		}
		return made(capi.ArgDoubles), p.kind == kindFloats || p.kind == kindScalars
	case []bool:
		for _, b := range v {
			a.ints.add(boolArg(b).Value)
		}
		return made(capi.ArgBools), p.kind == kindBools || p.kind == kindScalars
	case bool:
		a.repeat(boolArg(v).Value, p.size)
		return made(capi.ArgBools), p.kind == kindBools && p.size > 0
	}
	i, ok := integer(v)
	a.repeat(i, p.size)
	return made(capi.ArgInts), ok && p.kind == kindInts && p.size > 0
}

func (a *arguments) repeat(v int64, count int) {
	for range count {
		a.ints.add(v)
	}
}

// typeName describes an argument for an error.
func typeName(v any) string {
	switch v := v.(type) {
	case nil:
		return "nil"
	case *Tensor:
		if v == nil {
			return "a nil *Tensor"
		}
	case []*Tensor:
		if slices.Contains(v, nil) {
			return "a []*Tensor with a nil element"
		}
	case Keywords:
		return "Keywords, which must be the last argument"
	}
	return fmt.Sprintf("%T", v)
}

// operandsOf returns the tensors among the arguments, for errors.
func operandsOf(args []any) []*Tensor {
	var in []*Tensor
	for _, v := range args {
		switch v := v.(type) {
		case *Tensor:
			in = append(in, v)
		case []*Tensor:
			in = append(in, v...)
		case Keywords:
			for _, word := range slices.Sorted(maps.Keys(v)) {
				if t, ok := v[word].(*Tensor); ok {
					in = append(in, t)
				}
			}
		}
	}
	return in
}

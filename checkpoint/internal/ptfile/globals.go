package ptfile

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// function is the full name of a global that reduce can call.
type function string

// storageType is a storage class. An untyped storage has no element type, so its size is 1 byte.
type storageType struct {
	name    string
	element elementType
}

// view is a reference to a storage in a pickle, with a class and a number of elements.
type view struct {
	storage  *Storage
	of       storageType
	elements int64
}

const (
	fnOrderedDict   = "collections.OrderedDict"
	fnCounter       = "collections.Counter"
	fnEncode        = "_codecs.encode"
	fnBytes         = "builtins.bytes"
	fnSize          = "torch.Size"
	fnDevice        = "torch.device"
	fnLayout        = "torch.serialization._get_layout"
	fnTensor        = "torch._utils._rebuild_tensor_v2"
	fnTensorTyped   = "torch._utils._rebuild_tensor_v3"
	fnParameter     = "torch._utils._rebuild_parameter"
	fnParameterWith = "torch._utils._rebuild_parameter_with_state"
	fnFromType      = "torch._tensor._rebuild_from_type_v2"
	classTensor     = "torch.Tensor"
	classParameter  = "torch.nn.parameter.Parameter"
)

const untypedStorage = "UntypedStorage"

// global pushes a global of the whitelist: a function or class above, a storage class or a dtype.
// For any other global it pushes an Opaque with the global's name.
func (u *unpickler) global(module, name string) error {
	if module == "__builtin__" { // Python 2's name, used in protocol 2
		module = "builtins"
	}
	full := module + "." + name
	switch full {
	case fnOrderedDict, fnCounter, fnEncode, fnBytes, fnSize, fnDevice, fnLayout, fnTensor, fnTensorTyped,
		fnParameter, fnParameterWith,
		fnFromType, classTensor, classParameter:
		u.push(function(full))
		return nil
	}
	if name == untypedStorage && (module == "torch" || module == "torch.storage") {
		u.push(storageType{full, elementType{size: 1}})
		return nil
	}
	for _, e := range u.types {
		if e.storage != "" && e.storage == name && (module == "torch" || module == "torch.cuda") {
			u.push(storageType{full, e})
			return nil
		}
		if module == "torch" && name == e.name {
			u.push(Name(full))
			return nil
		}
	}
	u.push(u.opaque(full))
	return nil
}

// opaque returns the Opaque of a global, the same one for every reference.
func (u *unpickler) opaque(name string) *Opaque {
	o := u.opaques[name]
	if o == nil {
		o = &Opaque{What: printable(name), next: instead(name)}
		u.opaques[name] = o
	}
	return o
}

// instead returns advice on a replacement for an object that many files contain.
func instead(global string) string {
	for prefix, next := range map[string]string{
		"numpy.":                              "x.item() for a number and torch.from_numpy(x) for an array",
		"argparse.Namespace":                  "vars(args)",
		"torch.nn.modules.":                   "model.state_dict()",
		"torch._utils._rebuild_sparse_tensor": "tensor.to_dense()",
		"torch._utils._rebuild_qtensor":       "tensor.dequantize()",
	} {
		if strings.HasPrefix(global, prefix) {
			return "in Python, save " + next + " instead"
		}
	}
	return ""
}

// printable shortens a global's name and escapes control characters.
func printable(name string) string {
	const maxName = 200
	if len(name) > maxName {
		name = name[:maxName] + "..."
	}
	quoted := fmt.Sprintf("%q", name)
	return quoted[1 : len(quoted)-1]
}

// persistent pushes the storage that a tuple ("storage", class, key, location, elements) names.
func (u *unpickler) persistent(id any) error {
	bad := fmt.Errorf("refused: a persistent id that is no storage: %s", describe(id))
	tuple, ok := id.(*Tuple)
	if !ok || len(tuple.Items) != 5 || tuple.Items[0] != any("storage") {
		return bad
	}
	if class, ok := tuple.Items[1].(*Opaque); ok {
		u.push(class)
		return nil
	}
	of, ok1 := tuple.Items[1].(storageType)
	key, ok2 := tuple.Items[2].(string)
	location, ok3 := tuple.Items[3].(string)
	n, ok4 := tuple.Items[4].(int64)
	if !ok1 || !ok2 || !ok3 || !ok4 {
		return bad
	}
	s, err := u.open(key, location)
	if err != nil {
		return err
	}
	if n < 0 || n > s.Bytes/of.element.size {
		return fmt.Errorf("storage %q should have %d elements of %d bytes and has %d bytes", key, n,
			of.element.size, s.Bytes)
	}
	u.push(view{s, of, n})
	return nil
}

// reduce pushes the result of a call. Calling an Opaque returns the Opaque. If a function gets an
// Opaque where it needs another value, the call also returns the Opaque.
func (u *unpickler) reduce(callee, arguments any) error {
	if o, ok := callee.(*Opaque); ok {
		u.push(o)
		return nil
	}
	name, ok := callee.(function)
	if !ok {
		return fmt.Errorf("refused: a call of %s", describe(callee))
	}
	tuple, ok := arguments.(*Tuple)
	if !ok {
		return fmt.Errorf("%s is called with %s", name, describe(arguments))
	}
	v, err := u.call(name, tuple.Items)
	var unread *Opaque
	switch {
	case errors.As(err, &unread):
		v = unread
	case errors.Is(err, errArguments):
		o, searched := u.opaqueIn(tuple.Items)
		if searched != nil || o == nil {
			return fmt.Errorf("%s: %w", name, cmp.Or(searched, err))
		}
		v = o
	case err != nil:
		return fmt.Errorf("%s: %w", name, err)
	}
	u.push(v)
	return nil
}

// opaqueIn returns an Opaque among the arguments of a call, or in a list or tuple among them.
func (u *unpickler) opaqueIn(args []any) (*Opaque, error) {
	for _, arg := range args {
		items := []any{arg}
		switch arg := arg.(type) {
		case *List:
			items = arg.Items
		case *Tuple:
			items = arg.Items
		}
		for _, item := range items {
			if err := u.spend(1); err != nil {
				return nil, err
			}
			if o, ok := item.(*Opaque); ok {
				return o, nil
			}
		}
	}
	return nil, nil
}

func (u *unpickler) call(name function, args []any) (any, error) {
	switch name {
	case fnOrderedDict:
		return u.orderedDict(args)
	case fnCounter:
		return u.counter(args)
	case fnEncode:
		return u.encoded(args)
	case fnBytes:
		if len(args) == 0 {
			return []byte{}, nil
		}
	case fnSize:
		if len(args) == 1 {
			if sizes, ok := args[0].(*Tuple); ok {
				return sizes, nil
			}
		}
	case fnDevice:
		return device(args)
	case fnLayout:
		if len(args) == 1 {
			if s, ok := args[0].(string); ok && len(s) < 64 {
				return Name(s), nil
			}
		}
	case fnTensor, fnTensorTyped:
		return u.rebuild(name, args)
	case fnFromType:
		return u.fromType(args)
	case fnParameter, fnParameterWith:
		if len(args) >= 2 {
			t, ok1 := args[0].(*Tensor)
			grad, ok2 := args[1].(bool)
			if ok1 && ok2 {
				p := *t
				p.RequiresGrad, p.Parameter = grad, true
				return &p, nil
			}
		}
	}
	return nil, errArguments
}

var errArguments = errors.New("unexpected arguments")

// fromType returns a tensor that has attributes, such as an nn.Buffer, without the attributes. args
// holds the function that makes the tensor, the tensor's class, the function's arguments, and the
// attributes.
func (u *unpickler) fromType(args []any) (any, error) {
	if len(args) != 4 {
		return nil, errArguments
	}
	rebuild, ok1 := args[0].(function)
	class, ok2 := args[1].(function)
	own, ok3 := args[2].(*Tuple)
	if !ok1 || !ok2 || !ok3 || class != classTensor && class != classParameter {
		return nil, errArguments
	}
	switch rebuild {
	case fnTensor, fnTensorTyped, fnParameter, fnParameterWith:
		return u.call(rebuild, own.Items)
	}
	return nil, errArguments
}

// orderedDict accepts no arguments, or a list of pairs, as Python 2 wrote it.
func (u *unpickler) orderedDict(args []any) (any, error) {
	d := &Dict{Ordered: true}
	if len(args) == 0 {
		return d, nil
	}
	pairs, ok := args[0].(*List)
	if len(args) > 1 || !ok {
		return nil, errArguments
	}
	for _, p := range pairs.Items {
		var items []any
		switch p := p.(type) {
		case *List:
			items = p.Items
		case *Tuple:
			items = p.Items
		}
		if len(items) != 2 {
			return nil, errArguments
		}
		if err := u.add(d, items[0], items[1]); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// counter accepts a dict of counts.
func (u *unpickler) counter(args []any) (any, error) {
	if len(args) == 0 {
		return &Dict{}, nil
	}
	from, ok := args[0].(*Dict)
	if len(args) > 1 || !ok {
		return nil, errArguments
	}
	d := &Dict{}
	for k, v := range from.All() {
		if err := u.add(d, k, v); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// add is like set, for an entry that a call copies.
func (u *unpickler) add(d *Dict, key, value any) error {
	const entry = 64 // bytes
	if err := u.spend(entry); err != nil {
		return err
	}
	return u.set(d, key, value)
}

// encoded returns bytes. Protocol 2 writes them as text with one character per byte.
func (u *unpickler) encoded(args []any) (any, error) {
	if len(args) != 2 || args[1] != any("latin1") {
		return nil, errArguments
	}
	text, ok := args[0].(string)
	if !ok {
		return nil, errArguments
	}
	if err := u.spend(len(text)); err != nil {
		return nil, err
	}
	b := make([]byte, 0, len(text))
	for _, r := range text {
		if r > 0xff {
			return nil, fmt.Errorf("character %q is not in latin1", r)
		}
		b = append(b, byte(r))
	}
	return b, nil
}

// device accepts a type and optionally an index.
func device(args []any) (any, error) {
	if len(args) == 0 || len(args) > 2 {
		return nil, errArguments
	}
	kind, ok := args[0].(string)
	if !ok || len(kind) > 64 {
		return nil, errArguments
	}
	if len(args) == 1 {
		return Name(kind), nil
	}
	index, ok := args[1].(int64)
	if !ok {
		return nil, errArguments
	}
	return Name(fmt.Sprintf("%s:%d", kind, index)), nil
}

// rebuild returns a tensor from (storage, offset, shape, strides, requires_grad, hooks, [dtype,]
// [metadata]). Only version 3 of the function has a dtype.
func (u *unpickler) rebuild(name function, args []any) (any, error) {
	if len(args) < 6 {
		return nil, errArguments
	}
	const size = 256 // bytes of a tensor with few dimensions
	if err := u.spend(size); err != nil {
		return nil, err
	}
	v, ok1 := args[0].(view)
	offset, ok2 := args[1].(int64)
	shape, ok3 := u.integers(args[2])
	strides, ok4 := u.integers(args[3])
	grad, ok5 := args[4].(bool)
	if !ok1 || !ok2 || !ok3 || !ok4 || !ok5 {
		return nil, errArguments
	}
	element, rest := v.of.element, args[6:]
	available := v.elements
	if name == fnTensorTyped {
		if len(rest) == 0 {
			return nil, errArguments
		}
		dtype, ok := rest[0].(Name)
		i := slices.IndexFunc(u.types, func(e elementType) bool { return dtype == Name("torch."+e.name) })
		if !ok || i < 0 {
			return nil, errArguments
		}
		available = v.elements * v.of.element.size / u.types[i].size
		element, rest = u.types[i], rest[1:]
	}
	if element.name == "" {
		return nil, errors.New("an untyped storage without a dtype")
	}
	if strings.HasPrefix(element.name, "q") {
		return nil, &Opaque{What: "a tensor of dtype " + element.name,
			next: "in Python, save tensor.dequantize() instead"}
	}
	if len(rest) > 0 {
		if err := checkMetadata(rest[0]); err != nil {
			return nil, err
		}
	}
	t := &Tensor{Shape: shape, Strides: strides, Offset: offset, RequiresGrad: grad, Storage: v.storage,
		element: element}
	if err := t.validate(available); err != nil {
		return nil, err
	}
	return t, nil
}

// checkMetadata returns an Opaque for a bit that changes the meaning of a tensor's bytes: conj or
// neg.
func checkMetadata(v any) error {
	d, ok := v.(*Dict)
	if !ok {
		if v == nil {
			return nil
		}
		return errArguments
	}
	for k, v := range d.All() {
		if v != any(false) {
			return &Opaque{What: fmt.Sprintf("a tensor with the bit %v set", describeKey(k)),
				next: "in Python, save tensor.resolve_conj().resolve_neg() instead"}
		}
	}
	return nil
}

// describeKey returns a short text for a dict key.
func describeKey(k any) string {
	if s, ok := k.(string); ok {
		return printable(s)
	}
	return describe(k)
}

// integers returns the items of a tuple of integers.
func (u *unpickler) integers(v any) ([]int64, bool) {
	tuple, ok := v.(*Tuple)
	// Accept one dimension too many: validate reports it.
	if !ok || len(tuple.Items) > maxDims+1 || u.spend(8*len(tuple.Items)) != nil {
		return nil, false
	}
	n := make([]int64, len(tuple.Items))
	for i, item := range tuple.Items {
		if n[i], ok = item.(int64); !ok {
			return nil, false
		}
	}
	return n, true
}

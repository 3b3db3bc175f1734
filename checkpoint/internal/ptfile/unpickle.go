package ptfile

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"unicode/utf8"
)

// Limits for a pickle. They are far above the needs of a model with 200,000 tensors.
const (
	maxPickle = 64 << 20
	maxDepth  = 64 // nesting of containers
	// maxExpanded limits the values visited by a walk of the whole tree, per byte of the pickle.
	// Without it, lists of references to lists of references could grow exponentially.
	maxExpanded = 16
	// maxWork limits the bytes that opcodes copy or hash in addition to those read from the pickle,
	// per byte of the pickle: a call of 5 bytes can copy a dict of any size.
	maxWork = 64
)

// limits holds the limits that tests change.
type limits struct {
	steps int // opcodes
	stack int // values
}

func usual() limits { return limits{steps: 1 << 23, stack: 1 << 20} }

// Opcodes of protocols 2 to 5 that Python writes. The unpickler refuses all others.
const (
	opMark           = '('
	opStop           = '.'
	opBinInt         = 'J'
	opBinInt1        = 'K'
	opBinInt2        = 'M'
	opNone           = 'N'
	opBinPersID      = 'Q'
	opReduce         = 'R'
	opBinString      = 'T'
	opShortBinString = 'U'
	opBinUnicode     = 'X'
	opEmptyList      = ']'
	opAppend         = 'a'
	opBuild          = 'b'
	opGlobal         = 'c'
	opAppends        = 'e'
	opBinGet         = 'h'
	opLongBinGet     = 'j'
	opBinPut         = 'q'
	opLongBinPut     = 'r'
	opSetItem        = 's'
	opTuple          = 't'
	opSetItems       = 'u'
	opEmptyTuple     = ')'
	opEmptyDict      = '}'
	opBinFloat       = 'G'
	opBinBytes       = 'B'
	opShortBinBytes  = 'C'
	opProto          = 0x80
	opTuple1         = 0x85
	opTuple2         = 0x86
	opTuple3         = 0x87
	opNewTrue        = 0x88
	opNewFalse       = 0x89
	opLong1          = 0x8a
	opLong4          = 0x8b
	opShortBinUni    = 0x8c
	opBinUnicode8    = 0x8d
	opBinBytes8      = 0x8e
	opStackGlobal    = 0x93
	opMemoize        = 0x94
	opPop            = '0'
	opPopMark        = '1'
	opNewObj         = 0x81
	opEmptySet       = 0x8f
	opAddItems       = 0x90
	opFrozenSet      = 0x91
	opNewObjEx       = 0x92
	opByteArray8     = 0x96
	opFrame          = 0x95
)

// refusedOpcode returns the name of a refused opcode, for those that a user is most likely to look
// up.
func refusedOpcode(op byte) string {
	names := map[byte]string{
		'i': "INST", 'o': "OBJ", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 'P': "PERSID",
		'2': "DUP", 'S': "STRING", 'I': "INT", 'L': "LONG", 'F': "FLOAT", 'V': "UNICODE", 'd': "DICT",
		'l': "LIST", 'p': "PUT", 'g': "GET",
		0x97: "NEXT_BUFFER", 0x98: "READONLY_BUFFER",
	}
	if name, ok := names[op]; ok {
		return fmt.Sprintf("refused: opcode %s", name)
	}
	return fmt.Sprintf("refused: opcode 0x%02x", op)
}

var (
	errShort = errors.New("the pickle is cut short")
	errEmpty = errors.New("an opcode takes more values than there are")
)

// unpickler runs a pickle as a stack machine. It creates values and views of storages, and calls
// nothing outside this package. A pickle of n bytes makes at most about 300 n bytes of values and
// garbage.
type unpickler struct {
	data  []byte
	pos   int
	stack []any
	marks []int // stack lengths at the marks
	memo  map[uint32]any
	// open finds a storage of the file.
	open  func(key, location string) (*Storage, error)
	types []elementType
	work  int // bytes left: see maxWork
	// opaques maps names of globals that are not built to their Opaques.
	opaques map[string]*Opaque
}

// unpickle returns a pickle's value.
func unpickle(data []byte, limit limits, open func(key, location string) (*Storage, error)) (any, error) {
	u := &unpickler{data: data, memo: map[uint32]any{}, open: open, types: elementTypes(),
		work: maxWork * len(data), opaques: map[string]*Opaque{}}
	for steps := 0; ; steps++ {
		at := u.pos
		done, err := u.step()
		switch {
		case err != nil:
		case steps >= limit.steps:
			err = fmt.Errorf("more than %d opcodes", limit.steps)
		case len(u.stack) > limit.stack:
			err = fmt.Errorf("a stack of more than %d values", limit.stack)
		}
		if err != nil {
			return nil, fmt.Errorf("byte %d: %w", at, err)
		}
		if done {
			break
		}
	}
	if len(u.stack) != 1 || len(u.marks) != 0 {
		return nil, fmt.Errorf("the pickle ends with %d values and not with one", len(u.stack))
	}
	return u.checkTree(u.stack[0], len(data))
}

// step runs one opcode. It returns true after the last one.
func (u *unpickler) step() (done bool, err error) {
	b, err := u.take(1)
	if err != nil {
		return false, err
	}
	op := b[0]
	for _, run := range []func(*unpickler, byte) (bool, error){(*unpickler).constant, (*unpickler).text,
		(*unpickler).container, (*unpickler).object, (*unpickler).other} {
		if handled, err := run(u, op); handled || err != nil {
			return false, err
		}
	}
	switch op {
	case opStop:
		return true, nil
	case opProto:
		b, err := u.take(1)
		if err == nil && (b[0] < 2 || b[0] > 5) {
			err = fmt.Errorf("pickle protocol %d: 2 to 5 are handled", b[0])
		}
		return false, err
	case opFrame:
		_, err := u.take(8)
		return false, err
	}
	return false, errors.New(refusedOpcode(op))
}

// constant runs the opcodes that push a number or None, and the memo's opcodes.
func (u *unpickler) constant(op byte) (handled bool, err error) {
	switch op {
	case opNone:
		u.push(nil)
	case opNewTrue:
		u.push(true)
	case opNewFalse:
		u.push(false)
	case opBinInt:
		var n uint64
		n, err = u.uint(4)
		u.push(int64(int32(n)))
	case opBinInt1:
		err = u.pushUint(1)
	case opBinInt2:
		err = u.pushUint(2)
	case opLong1:
		err = u.long(1)
	case opLong4:
		err = u.long(4)
	case opBinFloat:
		var b []byte
		if b, err = u.take(8); err == nil {
			u.push(math.Float64frombits(binary.BigEndian.Uint64(b)))
		}
	case opBinGet:
		err = u.get(1)
	case opLongBinGet:
		err = u.get(4)
	case opBinPut:
		err = u.put(1)
	case opLongBinPut:
		err = u.put(4)
	case opMemoize:
		err = u.memoize(uint64(len(u.memo)))
	default:
		return false, nil
	}
	return true, err
}

// text runs the opcodes that push strings and bytes.
func (u *unpickler) text(op byte) (handled bool, err error) {
	var length int // bytes of the length prefix
	switch op {
	case opShortBinUni, opShortBinString, opShortBinBytes:
		length = 1
	case opBinUnicode, opBinString, opBinBytes:
		length = 4
	case opBinUnicode8, opBinBytes8:
		length = 8
	default:
		return false, nil
	}
	n, err := u.uint(length)
	if err != nil {
		return true, err
	}
	b, err := u.take(n)
	if err != nil {
		return true, err
	}
	switch op {
	case opShortBinBytes, opBinBytes, opBinBytes8:
		u.push(bytes.Clone(b))
	case opShortBinString, opBinString: // a Python 2 string
		if utf8.Valid(b) {
			u.push(string(b))
		} else {
			u.push(bytes.Clone(b))
		}
	default:
		if utf8.Valid(b) {
			u.push(string(b))
		} else { // with Python's surrogates
			u.push(u.opaque("a string that is not UTF-8"))
		}
	}
	return true, nil
}

// container runs the opcodes that make and fill lists, tuples and dicts.
func (u *unpickler) container(op byte) (handled bool, err error) {
	switch op {
	case opMark:
		u.marks = append(u.marks, len(u.stack))
	case opEmptyList:
		u.push(&List{})
	case opEmptyTuple:
		u.push(&Tuple{})
	case opEmptyDict:
		u.push(&Dict{})
	case opTuple1, opTuple2, opTuple3:
		var items []any
		if items, err = u.pop(int(op-opTuple1) + 1); err == nil {
			u.push(&Tuple{items})
		}
	case opTuple:
		var items []any
		if items, err = u.popMark(); err == nil {
			u.push(&Tuple{items})
		}
	case opAppend:
		err = u.extend(u.pop(1))
	case opAppends:
		err = u.extend(u.popMark())
	case opSetItem:
		err = u.setItems(u.pop(2))
	case opSetItems:
		err = u.setItems(u.popMark())
	default:
		return false, nil
	}
	return true, err
}

// object runs the opcodes that name globals, storages and calls.
func (u *unpickler) object(op byte) (handled bool, err error) {
	switch op {
	case opGlobal:
		var module, name string
		if module, err = u.line(); err == nil {
			if name, err = u.line(); err == nil {
				err = u.global(module, name)
			}
		}
	case opStackGlobal:
		var names []any
		if names, err = u.pop(2); err == nil {
			module, ok1 := names[0].(string)
			name, ok2 := names[1].(string)
			if !ok1 || !ok2 {
				return true, fmt.Errorf("STACK_GLOBAL names a global with %s and %s", describe(names[0]),
					describe(names[1]))
			}
			err = u.global(module, name)
		}
	case opReduce:
		var call []any
		if call, err = u.pop(2); err == nil {
			err = u.reduce(call[0], call[1])
		}
	case opBinPersID:
		var id []any
		if id, err = u.pop(1); err == nil {
			err = u.persistent(id[0])
		}
	case opBuild:
		// BUILD gives an object a state. Apart from an Opaque, only a state_dict gets one: its
		// _metadata, with the versions of the modules' classes. The state is dropped.
		if _, err = u.pop(1); err == nil {
			var target any
			if target, err = u.top(); err == nil {
				if d, ok := target.(*Dict); !isOpaque(target) && (!ok || !d.Ordered) {
					err = fmt.Errorf("refused: opcode BUILD of %s", describe(target))
				}
			}
		}
	default:
		return false, nil
	}
	return true, err
}

// other runs the opcodes that make values without a type in this package, and those that drop
// values.
func (u *unpickler) other(op byte) (handled bool, err error) {
	switch op {
	case opPop:
		if len(u.marks) > 0 && len(u.stack) == u.floor() {
			_, err = u.popMark()
		} else {
			_, err = u.pop(1)
		}
	case opPopMark:
		_, err = u.popMark()
	case opNewObj:
		err = u.newObject(u.pop(2))
	case opNewObjEx:
		err = u.newObject(u.pop(3))
	case opEmptySet:
		u.push(u.opaque("builtins.set"))
	case opFrozenSet:
		if _, err = u.popMark(); err == nil {
			u.push(u.opaque("builtins.frozenset"))
		}
	case opAddItems:
		var target any
		if _, err = u.popMark(); err == nil {
			target, err = u.top()
		}
		if err == nil && !isOpaque(target) {
			err = fmt.Errorf("refused: items are added to %s", describe(target))
		}
	case opByteArray8:
		var n uint64
		if n, err = u.uint(8); err == nil {
			_, err = u.take(n)
		}
		u.push(u.opaque("builtins.bytearray"))
	default:
		return false, nil
	}
	return true, err
}

// newObject pushes the Opaque for an object. call holds the class and its arguments.
func (u *unpickler) newObject(call []any, err error) error {
	if err != nil {
		return err
	}
	switch class := call[0].(type) {
	case *Opaque:
		u.push(class)
	case function:
		u.push(u.opaque(string(class)))
	default:
		return fmt.Errorf("refused: an object of the class %s", describe(call[0]))
	}
	return nil
}

func isOpaque(v any) bool {
	_, ok := v.(*Opaque)
	return ok
}

func (u *unpickler) push(v any) { u.stack = append(u.stack, v) }

// floor returns the stack length at the last mark. Opcodes must not pop values below it.
func (u *unpickler) floor() int {
	if len(u.marks) == 0 {
		return 0
	}
	return u.marks[len(u.marks)-1]
}

// pop removes the last n values and returns a copy of them.
func (u *unpickler) pop(n int) ([]any, error) {
	at := len(u.stack) - n
	if at < u.floor() {
		return nil, errEmpty
	}
	return u.cut(at), nil
}

// popMark removes the values after the last mark, and the mark.
func (u *unpickler) popMark() ([]any, error) {
	if len(u.marks) == 0 {
		return nil, errors.New("an opcode needs a mark and there is none")
	}
	items := u.cut(u.floor())
	u.marks = u.marks[:len(u.marks)-1]
	return items, nil
}

func (u *unpickler) cut(at int) []any {
	items := append([]any(nil), u.stack[at:]...)
	clear(u.stack[at:])
	u.stack = u.stack[:at]
	return items
}

func (u *unpickler) top() (any, error) {
	if len(u.stack) <= u.floor() {
		return nil, errEmpty
	}
	return u.stack[len(u.stack)-1], nil
}

// take returns the next n bytes of the pickle.
func (u *unpickler) take(n uint64) ([]byte, error) {
	if n > uint64(len(u.data)-u.pos) {
		return nil, errShort
	}
	b := u.data[u.pos : u.pos+int(n)]
	u.pos += int(n)
	return b, nil
}

// line returns the next bytes up to a newline.
func (u *unpickler) line() (string, error) {
	n := bytes.IndexByte(u.data[u.pos:], '\n')
	if n < 0 {
		return "", errShort
	}
	b, err := u.take(uint64(n) + 1)
	if err != nil {
		return "", err
	}
	return string(b[:n]), nil
}

// uint reads a little-endian integer of n bytes.
func (u *unpickler) uint(n int) (uint64, error) {
	b, err := u.take(uint64(n))
	if err != nil {
		return 0, err
	}
	var full [8]byte
	copy(full[:], b)
	return binary.LittleEndian.Uint64(full[:]), nil
}

func (u *unpickler) pushUint(n int) error {
	v, err := u.uint(n)
	u.push(int64(v))
	return err
}

// long reads a two's complement integer after its length in n bytes.
func (u *unpickler) long(n int) error {
	size, err := u.uint(n)
	if err != nil {
		return err
	}
	b, err := u.take(size)
	if err != nil {
		return err
	}
	if size > 8 {
		u.push(u.largeInteger(b))
		return nil
	}
	var full [8]byte
	if size > 0 && b[size-1] >= 0x80 {
		full = [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	}
	copy(full[:], b)
	u.push(int64(binary.LittleEndian.Uint64(full[:])))
	return nil
}

// largeInteger returns the Opaque for an integer over 64 bits. The text of a short integer contains
// its digits.
func (u *unpickler) largeInteger(b []byte) *Opaque {
	const shown = 32 // bytes
	if len(b) > shown {
		return u.opaque(fmt.Sprintf("an integer of %d bytes", len(b)))
	}
	digits := slices.Clone(b)
	slices.Reverse(digits)
	n := new(big.Int).SetBytes(digits)
	if digits[0] >= 0x80 {
		n.Sub(n, new(big.Int).Lsh(big.NewInt(1), uint(8*len(b))))
	}
	return &Opaque{What: "the integer " + n.String(), next: "it is over 64 bits: in Python, save it as text instead"}
}

func (u *unpickler) get(n int) error {
	i, err := u.uint(n)
	if err != nil {
		return err
	}
	v, ok := u.memo[uint32(i)]
	if !ok {
		return fmt.Errorf("memo %d is empty", i)
	}
	u.push(v)
	return nil
}

func (u *unpickler) put(n int) error {
	i, err := u.uint(n)
	if err != nil {
		return err
	}
	return u.memoize(i)
}

func (u *unpickler) memoize(i uint64) error {
	v, err := u.top()
	if err != nil {
		return err
	}
	u.memo[uint32(i)] = v
	return nil
}

// extend appends items to the list on the stack.
func (u *unpickler) extend(items []any, err error) error {
	if err != nil {
		return err
	}
	target, err := u.top()
	if err != nil {
		return err
	}
	list, ok := target.(*List)
	if isOpaque(target) {
		return nil
	}
	if !ok {
		return fmt.Errorf("refused: items are appended to %s", describe(target))
	}
	list.Items = append(list.Items, items...)
	return nil
}

// setItems puts alternating keys and values into the dict on the stack.
func (u *unpickler) setItems(items []any, err error) error {
	if err != nil {
		return err
	}
	target, err := u.top()
	if err != nil {
		return err
	}
	dict, ok := target.(*Dict)
	if isOpaque(target) {
		return nil
	}
	if !ok {
		return fmt.Errorf("refused: keys are set in %s", describe(target))
	}
	if len(items)%2 != 0 {
		return errors.New("a key of a dict has no value")
	}
	for i := 0; i < len(items); i += 2 {
		if err := u.set(dict, items[i], items[i+1]); err != nil {
			return err
		}
	}
	return nil
}

// set puts one key into a dict. Hashing counts as work, since a pickle can hash a long string
// repeatedly.
func (u *unpickler) set(d *Dict, key, value any) error {
	if s, ok := key.(string); ok {
		if err := u.spend(len(s)); err != nil {
			return err
		}
	}
	if !hashable(key) || isOpaque(key) {
		const entry = 64 // bytes; such keys cannot be compared
		if err := u.spend(entry); err != nil {
			return err
		}
		key = &Opaque{What: describe(key), next: "it is the key of a dict: in Python, make it a number or text"}
	}
	d.Set(key, value)
	return nil
}

// spend counts the bytes that an opcode copies or hashes.
func (u *unpickler) spend(n int) error {
	if u.work -= n; u.work < 0 {
		return fmt.Errorf("refused: more than %d bytes of work per byte of the pickle", maxWork)
	}
	return nil
}

// checkTree refuses a tree that a walk could not finish: a container that contains itself, or a
// tree that is too deep or too large, where a shared container counts each time. Globals and
// storages that no call has used become Opaques. checkTree returns the root.
func (u *unpickler) checkTree(root any, size int) (any, error) {
	root = u.plain(root)
	type extent struct{ depth, count int } // count includes the value itself
	limit := size * maxExpanded
	seen := map[any]extent{} // by pointer; zero while its walk is running
	var walk func(v any, depth int) (extent, error)
	walk = func(v any, depth int) (extent, error) {
		var children []any
		switch v := v.(type) {
		case *Dict:
			children = v.values
		case *List:
			children = v.Items
		case *Tuple:
			children = v.Items
		default:
			return extent{0, 1}, nil
		}
		if len(children) == 0 && depth < maxDepth {
			return extent{1, 1}, nil
		}
		known, ok := seen[v]
		if ok && known.count == 0 {
			return extent{}, fmt.Errorf("refused: %s contains itself", describe(v))
		}
		if !ok {
			if depth >= maxDepth {
				return extent{}, fmt.Errorf("refused: containers are nested more than %d deep", maxDepth)
			}
			seen[v] = extent{}
			known = extent{1, 1}
			for i := range children {
				children[i] = u.plain(children[i])
				e, err := walk(children[i], depth+1)
				if err != nil {
					return extent{}, err
				}
				known.depth, known.count = max(known.depth, e.depth+1), known.count+e.count
				if known.count > limit {
					return extent{}, fmt.Errorf("refused: shared containers expand to more than %d values", limit)
				}
			}
			seen[v] = known
		}
		if depth+known.depth > maxDepth {
			return extent{}, fmt.Errorf("refused: containers are nested more than %d deep", maxDepth)
		}
		return known, nil
	}
	_, err := walk(root, 0)
	return root, err
}

// plain returns v, or its Opaque if v is not a plain value.
func (u *unpickler) plain(v any) any {
	switch v := v.(type) {
	case function:
		return u.opaque(string(v))
	case storageType:
		return u.opaque(v.name)
	case view:
		return u.opaque("a storage without a tensor")
	}
	return v
}

package ptfile

import "iter"

// The values of a file are nil, bool, int64, float64, string, []byte, Name, *Dict, *List, *Tuple,
// *Tensor and *Opaque. If the file refers to a container or tensor twice, both references are the
// same pointer. No container contains itself.

// Name is the full name of a dtype, a layout or a device: "torch.float32", "torch.strided",
// "cuda:0".
type Name string

// Opaque replaces a value that the reader does not build: an object of a class, an integer over 64
// bits, or a kind of tensor without a Tensor. The reader keeps its name and drops its content.
type Opaque struct {
	What string // the full name of a global, or a noun with an article
	next string // what to save instead; "" for the usual advice
}

// Error says that the value cannot be read, and what to save instead.
func (o *Opaque) Error() string {
	next := o.next
	if next == "" {
		next = "in Python, save tensors, numbers, text, lists and dicts instead"
	}
	return o.What + " is not read: " + next
}

// List is a Python list.
type List struct{ Items []any }

// Tuple is a Python tuple or a torch.Size.
type Tuple struct{ Items []any }

// Dict is a Python dict, an OrderedDict or a Counter. It keeps the insertion order. Keys are nil,
// bool, int64, float64 and string. Any other key of a file is replaced by an *Opaque that occurs
// nowhere else. The zero value is an empty dict.
type Dict struct {
	Ordered bool // an OrderedDict
	keys    []any
	values  []any
	index   map[any]int // position in keys
}

// Len returns the number of keys.
func (d *Dict) Len() int { return len(d.keys) }

// Get returns the value of a key.
func (d *Dict) Get(key any) (value any, ok bool) {
	if !hashable(key) {
		return nil, false
	}
	i, ok := d.index[key]
	if !ok {
		return nil, false
	}
	return d.values[i], true
}

// Set adds a key at the end, or replaces the value of an existing key. It reports whether a Dict
// accepts keys of this type.
func (d *Dict) Set(key, value any) bool {
	if !hashable(key) {
		return false
	}
	if i, ok := d.index[key]; ok {
		d.values[i] = value
		return true
	}
	if d.index == nil {
		d.index = map[any]int{}
	}
	d.index[key] = len(d.keys)
	d.keys, d.values = append(d.keys, key), append(d.values, value)
	return true
}

// All iterates over keys and values in insertion order.
func (d *Dict) All() iter.Seq2[any, any] {
	return func(yield func(any, any) bool) {
		for i, k := range d.keys {
			if !yield(k, d.values[i]) {
				return
			}
		}
	}
}

// hashable excludes NaN, which would be a new key in every Set.
func hashable(key any) bool {
	switch k := key.(type) {
	case nil, bool, int64, string, *Opaque:
		return true
	case float64:
		return k == k
	}
	return false
}

// describe returns the name of a value's Python type, for errors.
func describe(v any) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case bool:
		return "a bool"
	case int64:
		return "an int"
	case float64:
		return "a float"
	case string:
		return "a string"
	case []byte:
		return "bytes"
	case Name:
		return string(v)
	case *Dict:
		return "a dict"
	case *List:
		return "a list"
	case *Tuple:
		return "a tuple"
	case *Tensor:
		return "a tensor"
	case *Opaque:
		return v.What
	case function:
		return "the global " + string(v)
	case storageType:
		return "the storage type " + v.name
	case view:
		return "a storage"
	}
	return "an unknown value"
}

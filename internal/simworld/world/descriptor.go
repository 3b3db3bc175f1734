package world

// descriptors numbers the files of the current world whose numbers were asked for.
type descriptors struct {
	files   []*File
	numbers map[*File]uintptr
}

// Descriptor returns a number for an open file.
func Descriptor(f *File) uintptr {
	d := &f.process.world.descriptors
	if n, ok := d.numbers[f]; ok {
		return n
	}
	if d.numbers == nil {
		d.numbers = map[*File]uintptr{}
	}
	d.files = append(d.files, f)
	n := uintptr(len(d.files))
	d.numbers[f] = n
	return n
}

// ByDescriptor returns the open file with a number.
func (w *World) ByDescriptor(n uintptr) *File { return w.descriptors.files[n-1] }

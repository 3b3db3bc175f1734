package racecheck

// Region is the memory of a tensor's elements: Rows rows of Row bytes, whose starts are Pitch bytes
// apart. A region of one row has no pitch.
type Region struct {
	Begin uintptr
	Row   uintptr
	Rows  int64
	Pitch uintptr
}

// Bytes returns the region of n bytes without gaps.
func Bytes(begin, n uintptr) Region { return Region{Begin: begin, Row: n, Rows: 1} }

// End returns the address after the last byte.
func (r Region) End() uintptr {
	if r.Row == 0 {
		return r.Begin
	}
	return r.Begin + uintptr(max(r.Rows, 1)-1)*r.Pitch + r.Row
}

func (r Region) dense() bool { return r.Rows <= 1 || r.Pitch <= r.Row }

// overlaps reports whether the regions share a byte. If the pitches differ and neither region is
// dense, it compares only the ranges from the first to the last byte.
func (r Region) overlaps(o Region) bool {
	if r.Row == 0 || o.Row == 0 || r.End() <= o.Begin || o.End() <= r.Begin {
		return false
	}
	switch {
	case r.dense() && o.dense():
		return true
	case r.dense():
		return o.touches(r.Begin, r.End())
	case o.dense():
		return r.touches(o.Begin, o.End())
	case r.Pitch != o.Pitch:
		return true
	}
	// With equal pitches, a row of o starts d bytes after a row of r, or pitch-d bytes before the
	// next row. Such a pair of rows must exist.
	if o.Begin < r.Begin {
		r, o = o, r
	}
	d := (o.Begin - r.Begin) % r.Pitch
	ahead := int64((o.Begin - r.Begin) / r.Pitch) // o's first row is in r's row number ahead
	if d < r.Row && ahead < r.Rows {
		return true
	}
	return d+o.Row > r.Pitch && ahead+1 < r.Rows
}

// touches reports whether a row has a byte in [begin, end), which must intersect the range from the
// region's first to its last byte.
func (r Region) touches(begin, end uintptr) bool {
	if begin < r.Begin {
		return true // end is after the region's first byte
	}
	row := (begin - r.Begin) / r.Pitch
	return begin < r.Begin+row*r.Pitch+r.Row || end > r.Begin+(row+1)*r.Pitch
}

// covers reports whether every byte of o is known to be in r. It may report false for regions with
// gaps.
func (r Region) covers(o Region) bool {
	if r == o || o.Row == 0 {
		return true
	}
	if r.dense() {
		return r.Begin <= o.Begin && o.End() <= r.End()
	}
	if r.Pitch != o.Pitch || o.Begin < r.Begin {
		return false
	}
	d := (o.Begin - r.Begin) % r.Pitch
	ahead := int64((o.Begin - r.Begin) / r.Pitch)
	return d+o.Row <= r.Row && ahead+o.Rows <= r.Rows
}

package archive

import (
	"errors"
	"math/bits"
)

// packWindow packs the used bytes of a window. For each run of used bytes it stores two varints,
// the number of unused bytes since the previous run and the length of the run, and then the run's
// bytes. It stores gaps of up to 3 bytes as well, because a new run would cost more.
func packWindow(window []byte, used []uint64) []byte {
	var packed []byte
	from, to := -1, 0 // the current run
	last := 0         // end of the previous run
	flush := func() {
		if from >= 0 {
			packed = appendUvarint(packed, uint64(from-last))
			packed = appendUvarint(packed, uint64(to-from))
			packed = append(packed, window[from:to]...)
			last = to
		}
	}
	for w, word := range used {
		for word != 0 {
			i := w*64 + bits.TrailingZeros64(word)
			n := bits.TrailingZeros64(^(word >> (i & 63)))
			if from < 0 || i-to > 3 {
				flush()
				from = i
			}
			to = i + n
			if n+i&63 >= 64 {
				word = 0
			} else {
				word &^= (1<<n - 1) << (i & 63)
			}
		}
	}
	flush()
	return packed
}

func appendUvarint(b []byte, v uint64) []byte {
	for v >= 0x80 {
		b = append(b, byte(v)|0x80)
		v >>= 7
	}
	return append(b, byte(v))
}

var errWindow = errors.New("damaged window of an inflate checkpoint")

// unpackWindow is the inverse of packWindow. Unused bytes become 0. It never writes outside of
// window, whatever packed contains.
func unpackWindow(packed, window []byte) error {
	clear(window)
	at := 0
	for len(packed) > 0 {
		skip, n := uvarint(packed)
		if n <= 0 {
			return errWindow
		}
		packed = packed[n:]
		length, n := uvarint(packed)
		if n <= 0 {
			return errWindow
		}
		packed = packed[n:]
		if skip > uint64(len(window)-at) || length > uint64(len(window)-at)-skip || length > uint64(len(packed)) {
			return errWindow
		}
		at += int(skip)
		at += copy(window[at:], packed[:length])
		packed = packed[length:]
	}
	return nil
}

// uvarint reads a number of up to 5 bytes that appendUvarint has written. n is the length in bytes,
// or 0 if the number has no end.
func uvarint(b []byte) (v uint64, n int) {
	for i, c := range b[:min(len(b), 5)] {
		v |= uint64(c&0x7f) << (7 * i)
		if c < 0x80 {
			return v, i + 1
		}
	}
	return 0, 0
}

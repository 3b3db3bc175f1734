//go:build !amd64

package digest

const alignment = 1

func fast() bool { return false }

func copyPiece(dst, src *byte, key *[stripes + lanes]uint64, lane *[lanes]uint64) {
	panic("digest: not called, because fast is false")
}

func sumPiece(src *byte, key *[stripes + lanes]uint64, lane *[lanes]uint64) {
	panic("digest: not called, because fast is false")
}

func fence() {}

package digest

import "golang.org/x/sys/cpu"

// alignment is the required alignment of copyPiece's destination.
const alignment = 16

// fast reports whether the processor has the instructions of the functions below.
func fast() bool { return cpu.X86.HasAVX2 }

// copyPiece copies a piece and adds it to the lanes. Its stores bypass the caches. Other threads
// and devices see the stores after fence.
//
//go:noescape
func copyPiece(dst, src *byte, key *[stripes + lanes]uint64, lane *[lanes]uint64)

// sumPiece is sumPieceGo.
//
//go:noescape
func sumPiece(src *byte, key *[stripes + lanes]uint64, lane *[lanes]uint64)

// fence orders the stores of copyPiece before all later stores.
func fence()

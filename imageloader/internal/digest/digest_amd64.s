#include "textflag.h"

// LANES adds the stripe in Y2 and Y3 to the lanes in Y0 and Y1. DX is the stripe's part of the key.
#define LANES \
	VPXOR    (DX), Y2, Y4    \
	VPXOR    32(DX), Y3, Y5  \
	VPSRLQ   $32, Y4, Y6     \
	VPSRLQ   $32, Y5, Y7     \
	VPMULUDQ Y6, Y4, Y4      \
	VPMULUDQ Y7, Y5, Y5      \
	VPSHUFD  $0x4E, Y2, Y6   \
	VPSHUFD  $0x4E, Y3, Y7   \
	VPADDQ   Y4, Y0, Y0      \
	VPADDQ   Y5, Y1, Y1      \
	VPADDQ   Y6, Y0, Y0      \
	VPADDQ   Y7, Y1, Y1      \
	ADDQ     $64, SI         \
	ADDQ     $8, DX          \
	DECQ     CX

// func copyPiece(dst, src *byte, key *[72]uint64, lane *[8]uint64)
TEXT ·copyPiece(SB), NOSPLIT, $0-32
	MOVQ    dst+0(FP), DI
	MOVQ    src+8(FP), SI
	MOVQ    key+16(FP), DX
	MOVQ    lane+24(FP), BX
	VMOVDQU (BX), Y0
	VMOVDQU 32(BX), Y1
	MOVQ    $64, CX

copyStripe:
	PREFETCHT0   1024(SI)
	VMOVDQU      (SI), Y2
	VMOVDQU      32(SI), Y3
	VEXTRACTI128 $1, Y2, X8
	VEXTRACTI128 $1, Y3, X9
	VMOVNTDQ     X2, (DI)
	VMOVNTDQ     X8, 16(DI)
	VMOVNTDQ     X3, 32(DI)
	VMOVNTDQ     X9, 48(DI)
	ADDQ         $64, DI
	LANES
	JNE          copyStripe
	VMOVDQU      Y0, (BX)
	VMOVDQU      Y1, 32(BX)
	VZEROUPPER
	RET

// func sumPiece(src *byte, key *[72]uint64, lane *[8]uint64)
TEXT ·sumPiece(SB), NOSPLIT, $0-24
	MOVQ    src+0(FP), SI
	MOVQ    key+8(FP), DX
	MOVQ    lane+16(FP), BX
	VMOVDQU (BX), Y0
	VMOVDQU 32(BX), Y1
	MOVQ    $64, CX

sumStripe:
	VMOVDQU (SI), Y2
	VMOVDQU 32(SI), Y3
	LANES
	JNE     sumStripe
	VMOVDQU Y0, (BX)
	VMOVDQU Y1, 32(BX)
	VZEROUPPER
	RET

// func fence()
TEXT ·fence(SB), NOSPLIT, $0-0
	SFENCE
	RET

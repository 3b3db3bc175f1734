package epoch

import (
	"encoding/binary"
	"testing"
)

// TestLabelsHaveNativeByteOrder: labels are in the byte order of the machine.
func TestLabelsHaveNativeByteOrder(t *testing.T) {
	var p [8]byte
	for _, label := range []int{0, 1, 999, 1 << 40, -1} {
		putLabel(p[:], label)
		if got := int64(binary.NativeEndian.Uint64(p[:])); got != int64(label) {
			t.Errorf("%d became %d, want %v", label, got, int64(label))
		}
	}
}

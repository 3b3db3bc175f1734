// Package rand replaces crypto/rand in code that a simulation runs.
package rand

import "github.com/torchstream/torchstream/internal/simworld/world"

// Read fills b with bytes that are different at each call. It never fails.
func Read(b []byte) (int, error) {
	n := world.Current().Number()
	for i := range b {
		b[len(b)-1-i] = byte(n >> (8 * i))
	}
	return len(b), nil
}

//go:build race || (!linux && !darwin)

package arena

// Under the race detector, and on systems without anonymous maps, arenas use Go's heap.

// chunkBytes is the size of one allocation. It is small, because most arenas in tests hold only a
// few KiB. Go zeroes the whole chunk, and the race detector writes several times as much shadow
// memory.
const chunkBytes = 256 << 10

// mapPages allocates from Go's heap, where an allocation of this size starts at a page boundary.
func mapPages(size int) []byte {
	size = (size + pageBytes - 1) &^ (pageBytes - 1)
	return make([]byte, size)
}

func adviseHuge([]byte) {}

func unmapPages([]byte) {}

func dropPages(p []byte) { clear(p) }

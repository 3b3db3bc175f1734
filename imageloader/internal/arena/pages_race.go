//go:build race

package arena

// chunkBytes is the size of one allocation. Go zeroes all of it, and the race detector writes
// several times as much shadow memory. So a chunk is small: most arenas of tests hold some KiB.
const chunkBytes = 256 << 10

// mapPages allocates from Go's heap, where an allocation of this size starts at a page.
func mapPages(size int) []byte {
	size = (size + pageBytes - 1) &^ (pageBytes - 1)
	return make([]byte, size)
}

func unmapPages([]byte) {}

func dropPages(p []byte) { clear(p) }

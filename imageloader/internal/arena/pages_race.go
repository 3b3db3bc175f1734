//go:build race

package arena

// mapPages allocates from Go's heap, where an allocation of this size begins at a page.
func mapPages(size int) []byte {
	size = (size + pageBytes - 1) &^ (pageBytes - 1)
	return make([]byte, size)
}

func unmapPages([]byte) {}

func dropPages(p []byte) { clear(p) }

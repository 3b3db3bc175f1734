//go:build !race

package arena

import "golang.org/x/sys/unix"

// chunkBytes is the size of one reservation of address space. A page of it takes memory at its
// first write.
const chunkBytes = 16 << 20

// mapPages maps whole pages of zeros. It returns nil if the system has none.
func mapPages(size int) []byte {
	p, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil
	}
	return p
}

func unmapPages(p []byte) {
	_ = unix.Munmap(p) // fails only for addresses that are not mapped
}

// dropPages gives the pages back to the system and keeps the address space. A failure costs only
// memory, so the error is ignored.
func dropPages(p []byte) { _ = unix.Madvise(p, unix.MADV_DONTNEED) }

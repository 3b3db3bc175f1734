//go:build !race && (linux || darwin)

package arena

import (
	"golang.org/x/sys/unix"

	"github.com/torchstream/torchstream/internal/system"
)

// chunkBytes is the size of one reservation of address space. A page in it takes no memory until
// the first write.
const chunkBytes = 16 << 20

// mapPages maps whole pages of zeros. It returns nil if the system can't map them.
func mapPages(size int) []byte {
	p, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil
	}
	return p
}

// adviseHuge asks for huge pages: a page's first write takes longer than filling the page.
func adviseHuge(p []byte) { system.AdviseHugePages(p) }

func unmapPages(p []byte) {
	_ = unix.Munmap(p) // fails only for addresses that are not mapped
}

// dropPages returns the pages to the system and keeps the addresses mapped. A failure only wastes
// memory, so the error is ignored.
func dropPages(p []byte) { _ = unix.Madvise(p, unix.MADV_DONTNEED) }

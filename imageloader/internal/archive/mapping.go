package archive

import (
	"io/fs"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/torchstream/torchstream/internal/system"
)

// maxMappings is the maximum number of mapped shards. A process has at most 65,530 mappings
// (vm.max_map_count in proc_sys_vm(5)).
const maxMappings = 4096

// minMapped is the size of the smallest part that is copied from a mapping. A read of a smaller
// part takes no longer.
const minMapped = 8 << 10

// Mappings holds memory mappings of an archive's local files. Copying cached bytes from a mapping
// takes half as long as reading them. Several Archives may share Mappings, at the same time or one
// after another, because mapping a file and touching its pages for the first time costs more than
// it saves. Mappings are safe for concurrent use.
type Mappings struct{ held *heldMappings }

// heldMappings is a separate object, because a cleanup of Mappings closes it.
type heldMappings struct {
	mu     sync.Mutex
	shards map[int]*mapping // nil after close
	left   map[int]*mapping // closed, and not yet removed
	holds  int              // uses of the memory, which removing has to wait for

	asked     []*mapping     // whose windows are to be registered
	running   bool           // a goroutine registers them
	refused   time.Time      // when a window was refused; zero: none. No more are registered for refusalTime
	registrar sync.WaitGroup // the goroutine
}

// mapping is a mapped file. Its bytes change if the file is written to, and pages vanish if the
// file is truncated.
type mapping struct {
	bytes   []byte
	info    fs.FileInfo
	windows []window // parts of bytes, for devices
	asked   atomic.Bool
}

// NewMappings returns Mappings without a file. Close frees them. The garbage collector also frees
// those that are no longer reachable.
func NewMappings() *Mappings {
	m := &Mappings{held: &heldMappings{shards: map[int]*mapping{}}}
	runtime.AddCleanup(m, (*heldMappings).close, m.held)
	return m
}

// Close removes all mappings, as soon as nothing holds them. No Reader may use them any more. Close
// may be called more than once, and on nil Mappings.
func (m *Mappings) Close() {
	if m != nil {
		m.held.close()
	}
}

// Hold keeps the mappings until release, which is called once. After Close it holds nothing.
func (m *Mappings) Hold() (release func()) {
	if m == nil || !m.held.hold() {
		return func() {}
	}
	return m.held.letGo
}

func (h *heldMappings) close() {
	h.mu.Lock()
	if h.shards != nil {
		h.left, h.shards = h.shards, nil // no further window is registered
	}
	h.mu.Unlock()
	h.registrar.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.unmapUnheld()
}

func (h *heldMappings) closed() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.shards == nil
}

// hold counts one more use of the memory, unless the mappings are closed.
func (h *heldMappings) hold() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.shards == nil {
		return false
	}
	h.holds++
	return true
}

// letGo ends a use that hold counted.
func (h *heldMappings) letGo() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.holds--
	h.unmapUnheld()
}

// unmapUnheld removes the mappings of closed Mappings that nothing holds. The caller holds mu.
func (h *heldMappings) unmapUnheld() {
	if h.holds > 0 || h.shards != nil {
		return
	}
	for _, s := range h.left {
		if err := s.releaseWindows(); err != nil {
			slog.Warn("imageloader: a mapping stays, because devices may still read it", "error", err)
			continue
		}
		_ = system.UnmapFile(s.bytes) // fails only for addresses that are not mapped
	}
	h.left = nil
}

// of returns the mapping of an open shard. It returns nil if the file cannot be mapped, such as a
// file that the process neither owns nor may write to, or if another file than now was mapped.
func (m *Mappings) of(shard int, opened File) *mapping {
	file, local := opened.(*os.File)
	if m == nil || !local {
		return nil
	}
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() == 0 || int64(int(info.Size())) != info.Size() {
		return nil
	}
	h := m.held
	h.mu.Lock()
	defer h.mu.Unlock()
	h.retry()
	s, known := h.shards[shard]
	if !known && h.shards != nil && len(h.shards) < maxMappings {
		if bytes, err := mapFile(file, int(info.Size())); err == nil {
			s = &mapping{bytes: bytes, info: info, windows: windowsOf(len(bytes))}
			h.shards[shard] = s
		}
	}
	if s == nil || !os.SameFile(s.info, info) || changed("", describe(info), describe(s.info)) != nil {
		return nil
	}
	return s
}

func mapFile(file *os.File, size int) (bytes []byte, err error) {
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, err
	}
	if e := raw.Control(func(fd uintptr) { bytes, err = system.MapFile(fd, size) }); e != nil {
		return nil, e
	}
	return bytes, err
}

// part returns the bytes of a part of the file. It returns nil if the caller has to read them: some
// are not in memory, and waiting for a page would block the processor on which the goroutine runs,
// or the file does not have them any more.
func (m *mapping) part(size int, at int64) []byte {
	if m == nil || size < minMapped || at < 0 || at > int64(len(m.bytes)-size) {
		return nil
	}
	if from := m.bytes[at:][:size]; system.InMemory(from) {
		return from
	}
	return nil
}

// try calls use, which reads the mapping. It returns false if a page is beyond the file's
// present end or cannot be read: the kernel then sends SIGBUS, which the Go runtime turns
// into a panic here. C code would crash.
func (m *mapping) try(use func()) (done bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if done {
			return
		}
		fault := recover()
		if at, ok := fault.(interface{ Addr() uintptr }); !ok || !contains(m.bytes, at.Addr()) {
			panic(fault)
		}
	}()
	use()
	return true
}

// contains reports whether an address is in p.
func contains(p []byte, address uintptr) bool {
	begin := uintptr(unsafe.Pointer(unsafe.SliceData(p)))
	return address >= begin && address-begin < uintptr(len(p))
}

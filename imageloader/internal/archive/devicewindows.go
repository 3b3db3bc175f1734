package archive

import (
	"fmt"
	"log/slog"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/torchstream/torchstream/internal/system"
)

// Register lets devices read a part of a mapping until release (decodeplan.Plans.Register).
type Register = func(memory []byte) (release func() error, err error)

// deviceWindow is the size of the parts in which a mapping is registered. A window takes some 15 ms
// if its pages are in memory.
const deviceWindow = 256 << 20

// window is a part of a mapping. It is registered at most once, in the background.
type window struct {
	asked    atomic.Bool
	readable atomic.Bool
	release  func() error // nil: not registered. mu of heldMappings protects it
}

// windowsOf returns the windows of a mapping of so many bytes.
func windowsOf(bytes int) []window { return make([]window, (bytes-1)/deviceWindow+1) }

// forDevices returns a part of the file if devices can read it, and otherwise nil. The part's
// windows are registered in the background when they are first asked for. Devices read the pages
// that the file had then, even if it is cut later.
func (m *mapping) forDevices(h *heldMappings, size int, at int64, register Register) []byte {
	if m == nil || register == nil || size <= 0 || at < 0 || at > int64(len(m.bytes)-size) {
		return nil
	}
	readable := true
	for w := at / deviceWindow; w <= (at+int64(size)-1)/deviceWindow; w++ {
		if window := &m.windows[w]; !window.readable.Load() {
			readable = false
			if !window.asked.Swap(true) && h.hold() {
				go h.register(m, int(w), register)
			}
		}
	}
	if !readable {
		return nil
	}
	return m.bytes[at:][:size]
}

// register registers a window. The caller has called hold.
func (h *heldMappings) register(m *mapping, w int, register Register) {
	defer h.letGo()
	h.registering.Lock() // one window at a time, so that reading its pages disturbs other reads less
	defer h.registering.Unlock()
	if h.closed() {
		return
	}
	// A mapping ends with a whole page, of which the file may have a part.
	bytes, page := m.bytes[w*deviceWindow:], syscall.Getpagesize()
	bytes = unsafe.Slice(unsafe.SliceData(bytes), min((len(bytes)+page-1)/page*page, deviceWindow))
	began := time.Now()
	release, err := registerPages(bytes, register)
	if err != nil {
		slog.Debug("imageloader: devices cannot read a part of an archive themselves, so the host reads it",
			"offset", w*deviceWindow, "bytes", len(bytes), "error", err)
		return
	}
	slog.Debug("imageloader: devices read a part of an archive themselves", "offset", w*deviceWindow,
		"bytes", len(bytes), "took", time.Since(began))
	window := &m.windows[w]
	h.mu.Lock()
	window.release = release
	h.mu.Unlock()
	window.readable.Store(true)
}

// releaseWindows ends the registration of all windows. Devices must not read them any more.
func (m *mapping) releaseWindows() error {
	for i := range m.windows {
		w := &m.windows[i]
		if w.release == nil {
			continue
		}
		if err := w.release(); err != nil {
			return err
		}
		w.release = nil
	}
	return nil
}

func registerPages(bytes []byte, register Register) (release func() error, err error) {
	// The driver waits for pages while it holds a lock that other threads of the process need.
	if err := system.ReadPages(bytes); err != nil {
		return nil, fmt.Errorf("reading its pages: %w", err)
	}
	return register(bytes)
}

package archive

import (
	"log/slog"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// Register lets devices read a part of a mapping until release (decodeplan.Plans.Register).
type Register = func(memory []byte) (release func() error, err error)

// deviceWindow is the size of the parts in which a mapping is registered. A window takes some 15 ms
// if its pages are in memory.
const deviceWindow = 256 << 20

// window is a part of a mapping.
type window struct {
	readable atomic.Bool
	release  func() error // nil: not registered. mu of heldMappings protects it
}

// windowsOf returns the windows of a mapping of so many bytes.
func windowsOf(bytes int) []window { return make([]window, (bytes-1)/deviceWindow+1) }

// forDevices returns a part of the file if devices can read it, and otherwise nil. The first call
// for a mapping asks for all its windows. Devices read the pages that the file had when its windows
// were registered, even if it is cut later.
func (m *mapping) forDevices(h *heldMappings, size int, at int64, register Register) []byte {
	if m == nil || register == nil || size <= 0 || at < 0 || at > int64(len(m.bytes)-size) {
		return nil
	}
	if !m.asked.Swap(true) {
		h.ask(m, register)
	}
	for w := at / deviceWindow; w <= (at+int64(size)-1)/deviceWindow; w++ {
		if !m.windows[w].readable.Load() {
			return nil
		}
	}
	return m.bytes[at:][:size]
}

// ask makes one goroutine register the windows of all mappings that are asked for.
func (h *heldMappings) ask(m *mapping, register Register) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.shards == nil || !h.refused.IsZero() {
		return
	}
	h.asked = append(h.asked, m)
	if len(h.asked) == 1 && !h.running {
		h.running = true
		h.registrar.Go(func() { h.registerAsked(register) })
	}
}

// registerAsked registers windows one after another, so that reading their pages disturbs other
// reads less. It follows the order of the file, so that all processes register the same ones first.
// After an error it registers no more for refusalTime: the limit of pinned memory or the device is
// the reason.
func (h *heldMappings) registerAsked(register Register) {
	for m := h.nextAsked(); m != nil; m = h.nextAsked() {
		for w := range m.windows {
			if !h.registerWindow(m, w, register) {
				break
			}
		}
	}
}

// refusalTime is the time after which windows may be registered again that were refused.
const refusalTime = time.Minute

// retry lets mappings ask again whose windows were refused some time ago. The caller holds mu.
func (h *heldMappings) retry() {
	if h.refused.IsZero() || time.Since(h.refused) < refusalTime {
		return
	}
	h.refused = time.Time{}
	for _, m := range h.shards {
		m.asked.Store(false)
	}
}

// nextAsked returns a mapping whose windows are to be registered, or nil.
func (h *heldMappings) nextAsked() *mapping {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.shards == nil || !h.refused.IsZero() || len(h.asked) == 0 {
		h.asked, h.running = nil, false
		return nil
	}
	m := h.asked[0]
	h.asked = h.asked[1:]
	return m
}

// registerWindow returns false if no further window is to be registered.
func (h *heldMappings) registerWindow(m *mapping, w int, register Register) bool {
	if h.closed() {
		return false
	}
	if m.windows[w].readable.Load() { // before a refusal
		return true
	}
	// A mapping ends with a whole page, of which the file may have a part.
	bytes, page := m.bytes[w*deviceWindow:], syscall.Getpagesize()
	bytes = unsafe.Slice(unsafe.SliceData(bytes), min((len(bytes)+page-1)/page*page, deviceWindow))
	began := time.Now()
	release, err := register(bytes)
	if err != nil {
		slog.Debug("imageloader: devices cannot read more of an archive themselves, so the host reads it",
			"offset", w*deviceWindow, "bytes", len(bytes), "error", err)
		h.mu.Lock()
		h.refused = time.Now()
		h.mu.Unlock()
		return false
	}
	slog.Debug("imageloader: devices read a part of an archive themselves", "offset", w*deviceWindow,
		"bytes", len(bytes), "took", time.Since(began))
	window := &m.windows[w]
	h.mu.Lock()
	window.release = release
	h.mu.Unlock()
	window.readable.Store(true)
	return true
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

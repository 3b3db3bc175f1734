//go:build debug

package origin

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// Enabled reports whether this build counts handles.
const Enabled = true

const maxDepth = 32 // maximum number of calls that are kept of a stack

// place is the key of a site.
type place struct {
	kind string
	pcs  [maxDepth]uintptr
}

type counts struct{ open, leaked atomic.Int64 }

// sites has an entry for each stack that ever made a handle. It grows with the number of places in
// the program's code, not with the number of handles.
var sites sync.Map // of *counts by place

// Origin is the place where one handle was made. It is the first field of its struct, because Go
// pads a struct whose last field is empty.
type Origin struct{ c *counts }

// New counts an open handle of the kind, made by the caller's stack.
func New(kind string) Origin { return at(kind) }

func at(kind string) Origin {
	p := place{kind: kind}
	runtime.Callers(3, p.pcs[:]) // skips Callers, at, and New or Add
	found, ok := sites.Load(p)
	if !ok {
		found, _ = sites.LoadOrStore(p, new(counts))
	}
	c := found.(*counts)
	c.open.Add(1)
	return Origin{c}
}

// Closed counts the handle as no longer open. It is called once.
func (o Origin) Closed() {
	if o.c != nil {
		o.c.open.Add(-1)
	}
}

// Leaked counts the handle as found by the garbage collector. Closed must follow, as for every
// handle.
func (o Origin) Leaked() {
	if o.c != nil {
		o.c.leaked.Add(1)
	}
}

// Holds are claims of one kind on one handle, each with the stack that made it.
type Holds struct {
	mu   sync.Mutex
	held []Origin
}

// Add adds a claim of the kind.
func (h *Holds) Add(kind string) {
	o := at(kind)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held = append(h.held, o)
}

// Drop ends the youngest claim, if there is one.
func (h *Holds) Drop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.held); n > 0 {
		h.held[n-1].Closed()
		h.held = h.held[:n-1]
	}
}

// DropAll ends every claim.
func (h *Holds) DropAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, o := range h.held {
		o.Closed()
	}
	h.held = nil
}

// Sites returns every place that has made a handle, in no particular order.
func Sites() []Site {
	var out []Site
	sites.Range(func(key, value any) bool {
		p, c := key.(place), value.(*counts)
		depth := slices.Index(p.pcs[:], 0)
		if depth < 0 {
			depth = maxDepth
		}
		out = append(out, Site{p.kind, slices.Clone(p.pcs[:depth]), c.open.Load(), c.leaked.Load()})
		return true
	})
	return out
}

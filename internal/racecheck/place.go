package racecheck

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
)

// maxPlaces is the maximum number of shared places that are remembered.
const maxPlaces = 1 << 16

// depth is the maximum number of stack frames that a place keeps.
const depth = 32

// Place is the location of a program's call: the operator or call, and the stack.
type Place struct {
	What    string // "aten::add.Tensor", "a copy"
	within  string // "" or "in a replay of a graph"
	pcs     [depth]uintptr
	n       int
	capture *Place // for a replay: the operator in the capture
	user    Frame  // found when it is first needed
	frames  []Frame
}

type placeKey struct {
	what    string
	pcs     [depth]uintptr
	capture *Place
}

// Frame is a line in a program.
type Frame struct {
	Function string `json:"function"`
	File     string `json:"file"`
	Line     int    `json:"line"`
}

func (f Frame) String() string {
	if f.File == "" {
		return "an unknown line"
	}
	return fmt.Sprintf("%s:%d", f.File, f.Line)
}

// Here returns the place of the caller's caller, after skipping skip further calls.
func (c *Checker) Here(what string, skip int) *Place {
	var k placeKey
	n := runtime.Callers(3+skip, k.pcs[:])
	k.what = what
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.place(k, n)
}

func (c *Checker) place(k placeKey, n int) *Place {
	p := c.places[k]
	if p == nil {
		if len(c.places) >= maxPlaces {
			clear(c.places) // accesses keep old places alive; a place that recurs is made again
		}
		p = &Place{What: k.what, pcs: k.pcs, n: n, capture: k.capture}
		c.places[k] = p
	}
	return p
}

// replayed returns the place of an access in a replay. The Checker is locked.
func (c *Checker) replayed(at, in *Place) *Place {
	if at == nil {
		at = &Place{What: "a replay"}
	}
	p := c.place(placeKey{at.What, at.pcs, in}, at.n)
	if in != nil {
		p.within = fmt.Sprintf("%s of the graph, which is captured at %v", in.What, in.Line())
	}
	return p
}

// root is the path of this module's packages.
const root = "github.com/torchstream/torchstream/"

// helpers are packages of Go's library that call functions for others. None of their lines is a
// program's.
var helpers = []string{"runtime.", "iter.", "maps.", "slices.", "sort.", "sync."}

// library reports whether a function belongs to this library, rather than to a program or a test.
func library(f runtime.Frame) bool {
	if strings.HasSuffix(f.File, "_test.go") {
		return false
	}
	path, ok := strings.CutPrefix(f.Function, root)
	if !ok {
		return f.Function == "" ||
			slices.ContainsFunc(helpers, func(p string) bool { return strings.HasPrefix(f.Function, p) })
	}
	return !strings.HasPrefix(path, "cmd/") && !strings.HasPrefix(path, "examples/") &&
		!strings.HasPrefix(path, "internal/streamprog")
}

// Line returns the program's line: the innermost frame outside this library. In a goroutine of the
// library it is the outermost frame.
func (p *Place) Line() Frame {
	p.resolve()
	return p.user
}

// Frames returns the stack, innermost call first, without the library's internal packages.
func (p *Place) Frames() []Frame {
	p.resolve()
	return p.frames
}

func (p *Place) resolve() {
	if p == nil || p.frames != nil || p.n == 0 {
		return
	}
	p.frames = []Frame{}
	frames := runtime.CallersFrames(p.pcs[:p.n])
	found := false
	for more := true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		if f.PC == 0 || strings.HasPrefix(f.Function, "runtime.") ||
			strings.HasPrefix(f.Function, root+"internal/capi") {
			continue
		}
		line := Frame{f.Function, f.File, f.Line}
		p.frames = append(p.frames, line)
		if !found {
			p.user = line
			found = !library(f)
		}
	}
}

// byPrefetcher reports whether the prefetcher's goroutine made the call.
func (p *Place) byPrefetcher() bool {
	if p == nil {
		return false
	}
	p.resolve()
	for _, f := range p.frames {
		if strings.HasPrefix(f.Function, root+"prefetcher.(*gpuDevice)") ||
			strings.HasPrefix(f.Function, root+"prefetcher.(*slots)") {
			return true
		}
	}
	return false
}

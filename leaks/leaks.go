// Package leaks shows where a program made its open handles, and the handles that it left to the
// garbage collector: tensors, scopes, events, graphs, streams, pinned memory, memory pools, batches
// and prefetchers.
//
// It needs a build with the tag debug, which keeps the stack that made each handle:
//
//	go test -tags debug ./...
//	go run -tags debug .
//
// Without the tag handles have no extra cost, and the functions of this package return nothing.
// torch.LiveTensors, torch.Caught and cuda.Leaks count in every build. A test can check that it
// closes every handle:
//
//	t.Cleanup(func() {
//		if open := leaks.Open(); len(open) > 0 {
//			t.Errorf("left open:\n%s", open)
//		}
//	})
//
// The functions are safe for concurrent use.
package leaks

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/torchstream/torchstream/internal/origin"
)

// Enabled reports whether the program was built with the tag debug.
const Enabled = origin.Enabled

// Site is one place of the program, and the number of handles of one kind that it made.
type Site struct {
	// Kind of the handles: "tensor", "scope", "event", "graph", "stream", "pinned memory", "memory
	// pool", "generator", "out-of-memory observer", "shared tensor", "image decoder", "batcher",
	// "prefetcher", "batch" (a batch that the loop has now, or that is retained) or "retained
	// batch" (once for each Retain; Release undoes the latest).
	Kind  string
	Count int64
	// Stack is the call stack that made the handles, innermost call first, at most 32 calls deep.
	// This module's unexported functions at the top are omitted, so the first frame is the function
	// that the program called.
	Stack []runtime.Frame
}

// Sites is the result of [Open] and [Caught], with the highest counts first.
type Sites []Site

// Open returns the places whose handles are still open. A tensor of a scope counts as open until
// its scope ends.
func Open() Sites { return collect(func(s origin.Site) int64 { return s.Open }) }

// Caught returns the places whose handles became unreachable before they were closed, since the
// start of the process. The garbage collector finds such handles some time later, and within
// seconds after a call of runtime.GC.
func Caught() Sites { return collect(func(s origin.Site) int64 { return s.Leaked }) }

func collect(count func(origin.Site) int64) Sites {
	var out Sites
	for _, s := range origin.Sites() {
		if n := count(s); n > 0 {
			out = append(out, Site{s.Kind, n, frames(s.PCs)})
		}
	}
	slices.SortFunc(out, func(a, b Site) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.String(), b.String()))
	})
	return out
}

// frames returns the stack without this module's unexported functions at its top.
func frames(pcs []uintptr) []runtime.Frame {
	var out []runtime.Frame
	for all := runtime.CallersFrames(pcs); ; {
		f, more := all.Next()
		if len(out) > 0 || !more || !inner(f.Function) {
			out = append(out, f)
		}
		if !more {
			return out
		}
	}
}

// inner reports whether programs cannot call the function, because it is unexported or in an
// internal package of this module. An exported function is written as
// github.com/torchstream/torchstream/torch.(*Tensor).Add.
func inner(function string) bool {
	rest, own := strings.CutPrefix(function, "github.com/torchstream/torchstream/")
	first, _ := utf8.DecodeRuneInString(rest[strings.LastIndexByte(rest, '.')+1:])
	return own && (strings.Contains("/"+rest, "/internal/") || !unicode.IsUpper(first))
}

// String formats the site like the stack of a goroutine.
func (s Site) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d x %s, made by\n", s.Count, s.Kind)
	for _, f := range s.Stack {
		fmt.Fprintf(&b, "\t%s\n\t\t%s:%d\n", f.Function, f.File, f.Line)
	}
	return b.String()
}

// String formats the sites one after another.
func (s Sites) String() string {
	var b strings.Builder
	for _, site := range s {
		b.WriteString(site.String())
	}
	return b.String()
}

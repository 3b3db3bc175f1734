// Package leaks says where a program made the handles that it has open, and those that it left to
// the garbage collector: tensors, scopes, events, graphs, streams, pinned memory, memory pools,
// batches and prefetchers.
//
// It knows this in builds with the tag debug, which keep the stack of every handle's making:
//
//	go test -tags debug ./...
//	go run -tags debug .
//
// Without the tag handles cost nothing more, and the functions here return nothing.
// torch.LiveTensors, torch.Caught and cuda.Leaks count in every build. A test that wants to leave
// nothing behind:
//
//	t.Cleanup(func() {
//		if open := leaks.Open(); len(open) > 0 {
//			t.Errorf("left open:\n%s", open)
//		}
//	})
//
// The functions may be called from any goroutine.
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

// Enabled says whether the program was built with the tag debug.
const Enabled = origin.Enabled

// Site is one place of the program, and how many handles were made there.
type Site struct {
	// Kind of the handles: "tensor", "scope", "event", "graph", "stream", "pinned memory", "memory
	// pool", "prefetcher", "batch" (in its turn of the loop, or retained) or "retained batch" (once
	// for each Retain; Release undoes the latest).
	Kind  string
	Count int64
	// Stack that made the handles, innermost call first, of at most 32 calls. The module's
	// unexported functions at its top are left out, so that it begins with the function that the
	// program called.
	Stack []runtime.Frame
}

// Sites are the result of [Open] and [Caught], those with the highest counts first.
type Sites []Site

// Open returns where the handles were made that are not closed now. A tensor of a scope counts
// until its scope ends.
func Open() Sites { return collect(func(s origin.Site) int64 { return s.Open }) }

// Caught returns where the handles were made that became unreachable before they were closed, since
// the start of the process. The garbage collector finds them some time later: call runtime.GC
// before it is a matter of seconds.
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

// frames leaves out the module's own unexported functions at the top of a stack.
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

// inner reports whether programs can't call the function because it is in an internal package of
// this module or unexported. An exported one is
// github.com/torchstream/torchstream/torch.(*Tensor).Add.
func inner(function string) bool {
	rest, own := strings.CutPrefix(function, "github.com/torchstream/torchstream/")
	first, _ := utf8.DecodeRuneInString(rest[strings.LastIndexByte(rest, '.')+1:])
	return own && (strings.Contains("/"+rest, "/internal/") || !unicode.IsUpper(first))
}

// String is the site as a goroutine's stack is printed.
func (s Site) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d x %s, made by\n", s.Count, s.Kind)
	for _, f := range s.Stack {
		fmt.Fprintf(&b, "\t%s\n\t\t%s:%d\n", f.Function, f.File, f.Line)
	}
	return b.String()
}

// String is one site after the other.
func (s Sites) String() string {
	var b strings.Builder
	for _, site := range s {
		b.WriteString(site.String())
	}
	return b.String()
}

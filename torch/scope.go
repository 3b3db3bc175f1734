package torch

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
)

// Scope owns tensors and frees them together. The result of an operator joins the youngest scope
// among its operands (the scope created last), so a scope travels with the data that is computed
// from its tensors. Any number of goroutines may use one scope.
//
// If a scope becomes unreachable before it was closed, the garbage collector closes it with all its
// tensors. [Caught] counts these tensors.
type Scope struct {
	s       *scopeState
	cleanup runtime.Cleanup
	// fresh holds the Tensors of the handles in s.last; guarded by s.mu. It is not in scopeState,
	// because a Tensor refers to its Scope.
	fresh *[len(scopeChunk{})]Tensor
	casts atomic.Pointer[passCasts] // set by ParameterCasts.Begin
	outer *Scope                    // of a Tidy: the scope of its result
}

// scopeState is the part of a Scope that the cleanup needs. It has no reference to the Scope,
// because that would keep the Scope alive for ever.
type scopeState struct {
	made   origin.Origin
	name   string
	born   uint64
	mu     sync.Mutex
	closed bool          // guarded by mu
	chunks []*scopeChunk // guarded by mu
	last   *scopeChunk   // of chunks; guarded by mu
	used   int           // entries in use of last, all if there is no last; guarded by mu
	// adopted holds tensors without a scope that In gave to this one; guarded by mu.
	adopted []adopted
}

// adopted is a loose tensor that the scope owns. The references keep the tensor's cleanup from
// running.
type adopted struct {
	h    *handle
	more *more
}

// scopeChunk holds handles. Handles and their Tensors are allocated in chunks, so that joining a
// scope needs no separate allocation.
type scopeChunk [32]handle

// scopesBorn numbers the scopes of the process in the order of their creation; youngest compares
// these numbers.
var scopesBorn atomic.Uint64

// NewScope returns an empty scope. Errors of tensors that are used after the scope's end contain
// the name.
func NewScope(name string) *Scope {
	s := newScope(name)
	s.cleanup = runtime.AddCleanup(s, (*scopeState).caught, s.s)
	return s
}

// newScope returns a scope that the collector does not close.
func newScope(name string) *Scope {
	return &Scope{s: &scopeState{made: origin.New("scope"), name: name, born: scopesBorn.Add(1),
		used: len(scopeChunk{})}}
}

// Name returns the name that was passed to NewScope.
func (s *Scope) Name() string {
	if s == nil || s.s == nil {
		return ""
	}
	return s.s.name
}

// String returns a name for messages: `scope "batch 3 of epoch 0" of 12 tensors`, `closed scope
// "step"`.
func (s *Scope) String() string {
	switch {
	case s == nil || s.s == nil:
		return "no scope"
	case s.s.isClosed():
		return fmt.Sprintf("closed scope %q", s.s.name)
	}
	return fmt.Sprintf("scope %q of %d tensors", s.s.name, s.Len())
}

// Close frees the tensors that the scope owns in one call. The memory of a tensor in use by an
// operator of another goroutine is freed when that operator returns. Device memory returns to the
// allocator in the order of the stream on which it was allocated; the host does not wait. Closing
// again does nothing. The error is always nil.
func (s *Scope) Close() error {
	if s == nil || s.s == nil {
		return nil
	}
	s.cleanup.Stop()
	s.s.close()
	runtime.KeepAlive(s)
	return nil
}

// Own moves t, which may have no scope or another scope, into this scope and returns its new
// handle; t is closed. Use it for the result of a constructor:
//
//	x, err := torch.Randn(cuda.CPU, torch.Float32, 8, 4)
//	if err != nil {
//		return err
//	}
//	x = scope.Own(x)
func (s *Scope) Own(t *Tensor) *Tensor {
	in := t.within(s)
	if in.failure() == nil {
		t.Close()
	}
	return in
}

// Len returns the number of tensors that the scope owns now, without those that were closed
// individually.
func (s *Scope) Len() int {
	if s == nil || s.s == nil {
		return 0
	}
	s.s.mu.Lock()
	defer s.s.mu.Unlock()
	n := 0
	for i, c := range s.s.chunks {
		for j := range s.s.filled(i) {
			if c[j].state.Load() < closing {
				n++
			}
		}
	}
	for _, a := range s.s.adopted {
		if a.h.state.Load() < closing {
			n++
		}
	}
	return n
}

func (s *scopeState) filled(chunk int) int {
	if chunk == len(s.chunks)-1 {
		return s.used
	}
	return len(scopeChunk{})
}

// add takes ownership of c and returns its tensor. If the scope has ended, add frees c and returns
// nil.
func (s *Scope) add(c *capi.Tensor, m marks) *Tensor {
	state := s.s
	state.mu.Lock()
	i := state.used
	if i >= len(state.last) {
		if !s.grow() {
			state.mu.Unlock()
			capi.FreeTensor(c)
			return nil
		}
		i = 0
	}
	state.used = i + 1
	h, t := &state.last[i], &s.fresh[i]
	h.made, h.c = origin.New("tensor"), c
	t.h, t.scope, t.marks = h, s, m
	state.mu.Unlock()
	return t
}

// grow makes room for more tensors, unless the scope has ended. It is called with the lock held.
//
//go:noinline
func (s *Scope) grow() bool {
	if s.s.closed {
		return false
	}
	s.s.grow()
	s.fresh = new([len(scopeChunk{})]Tensor)
	return true
}

// adopt makes the scope the owner of t, if t is loose.
func (s *Scope) adopt(t *Tensor) {
	if !t.more.loose.CompareAndSwap(true, false) {
		return
	}
	state := s.s
	state.mu.Lock()
	defer state.mu.Unlock()
	if state.closed {
		t.more.loose.Store(true)
		return
	}
	t.more.ends.Store(state)
	if len(state.adopted) == cap(state.adopted) {
		// A long-lived scope whose tensors are closed individually does not grow.
		state.adopted = slices.DeleteFunc(state.adopted, func(a adopted) bool { return a.h.state.Load() >= closing })
	}
	state.adopted = append(state.adopted, adopted{t.h, t.more})
}

// grow starts a new chunk. If the list of chunks has to grow too, it first drops chunks whose
// tensors are all closed, so that a long-lived scope whose tensors are closed individually does not
// grow.
func (s *scopeState) grow() {
	if len(s.chunks) == cap(s.chunks) {
		s.chunks = slices.DeleteFunc(s.chunks, (*scopeChunk).isClosed)
	}
	s.last, s.used = new(scopeChunk), 0
	s.chunks = append(s.chunks, s.last)
}

func (c *scopeChunk) isClosed() bool {
	for i := range c {
		if c[i].state.Load() < closing {
			return false
		}
	}
	return true
}

// caught closes a scope that the garbage collector has found unreachable.
func (s *scopeState) caught() {
	s.made.Leaked()
	for i, chunk := range s.chunks {
		for j := range s.filled(i) {
			if chunk[j].state.Load() < closing {
				chunk[j].made.Leaked()
			}
		}
	}
	for _, a := range s.adopted {
		if a.h.state.Load() < closing {
			a.h.made.Leaked()
		}
	}
	caught.Add(s.close())
}

func (s *scopeState) close() (freed int64) {
	s.mu.Lock()
	if !s.closed {
		s.made.Closed()
	}
	s.closed = true
	chunks, used, loose := s.chunks, s.used, s.adopted
	s.chunks, s.last, s.used, s.adopted = nil, nil, len(scopeChunk{}), nil
	s.mu.Unlock()
	if len(chunks) == 0 {
		return 0
	}
	dead := make([]*capi.Tensor, 0, (len(chunks)-1)*len(scopeChunk{})+used+len(loose))
	for _, a := range loose {
		a.more.cleanup.Stop()
		if c := a.h.detach(); c != nil {
			dead = append(dead, c)
		}
	}
	for i, chunk := range chunks {
		n := len(scopeChunk{})
		if i == len(chunks)-1 {
			n = used
		}
		for j := range n {
			if c := chunk[j].detach(); c != nil {
				dead = append(dead, c)
			}
		}
	}
	capi.FreeTensors(dead)
	reclaim()
	return int64(len(dead))
}

func (s *scopeState) ended() error {
	return closedError(fmt.Sprintf("the tensor's scope %q has ended: use the tensor before the scope's "+
		"Close, or Keep it (Clone it if it is a field of a batch)", s.name))
}

func (s *scopeState) endedByIn() error {
	return closedError(fmt.Sprintf(
		"In gave the tensor, an operator's result without a scope, to the scope %q, which has ended: "+
			"for use in several scopes, Own it by one that lives longer", s.name))
}

func (s *scopeState) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// youngest returns the younger of two scopes; either may be nil.
func youngest(a, b *Scope) *Scope {
	if a == nil || b != nil && b.s.born > a.s.born {
		return b
	}
	return a
}

package ring

import (
	"context"
	"sync"
)

// runtimeScheduler is the Scheduler outside of tests: goroutines, a mutex and a condition variable.
type runtimeScheduler struct {
	sync.Mutex
	changed *sync.Cond
}

func newRuntime() *runtimeScheduler {
	s := &runtimeScheduler{}
	s.changed = sync.NewCond(&s.Mutex)
	return s
}

func (s *runtimeScheduler) Go(_ string, fn func()) { go fn() }

func (s *runtimeScheduler) Wait(ready func() bool) {
	for !ready() {
		s.changed.Wait()
	}
}

func (s *runtimeScheduler) Wake() { s.changed.Broadcast() }

func (s *runtimeScheduler) Watch(ctx context.Context) func() bool {
	return context.AfterFunc(ctx, func() {
		s.Lock()
		defer s.Unlock()
		s.Wake()
	})
}

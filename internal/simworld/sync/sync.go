// Package sync replaces the standard library's sync in code that a simulation runs. Its locks wait
// on channels: testing/synctest then knows that a waiting goroutine is blocked, and lets time pass.
package sync

import "sync"

// Types that need no replacement.
type (
	WaitGroup = sync.WaitGroup
	Cond      = sync.Cond
	Locker    = sync.Locker
	Map       = sync.Map
	Pool      = sync.Pool
)

// NewCond returns a condition variable.
func NewCond(l Locker) *Cond { return sync.NewCond(l) }

// Mutex is a lock.
type Mutex struct{ rw RWMutex }

// Lock locks m.
func (m *Mutex) Lock() { m.rw.Lock() }

// TryLock locks m if it is free.
func (m *Mutex) TryLock() bool { return m.rw.TryLock() }

// Unlock unlocks m.
func (m *Mutex) Unlock() { m.rw.Unlock() }

// RWMutex is a lock for one writer or several readers, in the order of their calls.
type RWMutex struct {
	mu      sync.Mutex
	writer  bool
	readers int
	waiting []waiter
}

type waiter struct {
	write bool
	ready chan struct{}
}

// Lock locks m for writing.
func (m *RWMutex) Lock() { m.acquire(true) }

// RLock locks m for reading.
func (m *RWMutex) RLock() { m.acquire(false) }

// free reports whether a lock can be had now.
func (m *RWMutex) free(write bool) bool {
	return !m.writer && len(m.waiting) == 0 && (!write || m.readers == 0)
}

func (m *RWMutex) take(write bool) {
	if write {
		m.writer = true
	} else {
		m.readers++
	}
}

func (m *RWMutex) acquire(write bool) {
	m.mu.Lock()
	if m.free(write) {
		m.take(write)
		m.mu.Unlock()
		return
	}
	w := waiter{write, make(chan struct{})}
	m.waiting = append(m.waiting, w)
	m.mu.Unlock()
	<-w.ready
}

// TryLock locks m for writing if it is free.
func (m *RWMutex) TryLock() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	free := m.free(true)
	if free {
		m.take(true)
	}
	return free
}

// Unlock ends Lock.
func (m *RWMutex) Unlock() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.writer {
		panic("sync: Unlock of an unlocked lock")
	}
	m.writer = false
	m.pass()
}

// RUnlock ends RLock.
func (m *RWMutex) RUnlock() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.readers--
	m.pass()
}

// pass gives the lock to those who wait first.
func (m *RWMutex) pass() {
	for len(m.waiting) > 0 && !m.writer && (!m.waiting[0].write || m.readers == 0) {
		m.take(m.waiting[0].write)
		close(m.waiting[0].ready)
		m.waiting = m.waiting[1:]
	}
}

// Once calls a function once.
type Once struct {
	mu   Mutex
	done bool
}

// Do calls f, unless an earlier call did.
func (o *Once) Do(f func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.done {
		defer func() { o.done = true }()
		f()
	}
}

// OnceValue returns a function that calls f once.
func OnceValue[T any](f func() T) func() T {
	var once Once
	var value T
	return func() T {
		once.Do(func() { value = f() })
		return value
	}
}

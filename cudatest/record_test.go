package cudatest

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// record is a test within a test. It keeps what the inner test reports.
type record struct {
	testing.TB
	said            []string
	failed, skipped bool
	finished        bool
	cleanups        []func()
}

// inner runs fn as a separate test, with its cleanups, and returns its reports.
func inner(t *testing.T, fn func(t testing.TB)) *record {
	t.Helper()
	r := &record{TB: t}
	run := func(fn func()) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			fn()
		}()
		<-done
	}
	run(func() { fn(r); r.finished = true })
	for _, cleanup := range slices.Backward(r.cleanups) {
		run(cleanup)
	}
	return r
}

func (r *record) Helper()           {}
func (r *record) Cleanup(fn func()) { r.cleanups = append(r.cleanups, fn) }
func (r *record) text() string      { return strings.Join(r.said, "\n") }
func (r *record) Errorf(format string, args ...any) {
	r.failed = true
	r.said = append(r.said, fmt.Sprintf(format, args...))
}
func (r *record) Fatalf(format string, args ...any) { r.Errorf(format, args...); runtime.Goexit() }
func (r *record) Fatal(args ...any)                 { r.Errorf("%s", fmt.Sprint(args...)); runtime.Goexit() }
func (r *record) Skipf(format string, args ...any) {
	r.skipped = true
	r.said = append(r.said, fmt.Sprintf(format, args...))
	runtime.Goexit()
}

// mustFail fails t unless the inner test failed and its reports contain all of the words.
func (r *record) mustFail(t *testing.T, words ...string) {
	t.Helper()
	if !r.failed {
		t.Errorf("the inner test passed and said %q, want a failure", r.text())
	}
	for _, word := range words {
		if !strings.Contains(r.text(), word) {
			t.Errorf("nothing says %q in:\n%s", word, r.text())
		}
	}
}

func (r *record) mustPass(t *testing.T) {
	t.Helper()
	if r.failed || !r.finished {
		t.Errorf("the inner test failed (finished: %t):\n%s", r.finished, r.text())
	}
}

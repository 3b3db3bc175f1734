package archive

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// warnEvery is the time between two warnings about failed requests.
const warnEvery = 10 * time.Second

// Requests records the failed requests of an archive. The zero value works. Several goroutines may
// use it.
type Requests struct {
	Logger *slog.Logger // nil: silent

	mu     sync.Mutex
	warned time.Time   // of the last warning
	count  int         // failures since then
	last   *persistent // the request that failed last, until it ends
	err    error       // its failure
}

// persistent is a request with all its repetitions.
type persistent struct{ tries int }

// Failure returns the last failure of a request that is being repeated, or nil.
func (r *Requests) Failure() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// failed notes that a request for name has failed and will be repeated. It warns of the first
// failure, and then every warnEvery.
func (r *Requests) failed(q *persistent, name string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count++
	r.last, r.err = q, fmt.Errorf("%s: %w", Shown(name), err)
	if now := time.Now(); r.Logger != nil && (r.warned.IsZero() || now.Sub(r.warned) >= warnEvery) {
		r.Logger.Warn("request failed and is repeated", "archive", Shown(name), "tries", q.tries, "failures", r.count, "error", err)
		r.warned, r.count = now, 0
	}
}

// ended notes that a request is no longer repeated.
func (r *Requests) ended(q *persistent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last == q {
		r.last, r.err = nil, nil
	}
}

// stopped returns an error that is ErrStopped, and names the failure from which the request did not
// recover.
func (r *Requests) stopped() error {
	if err := r.Failure(); err != nil {
		return stopped{err}
	}
	return ErrStopped
}

// stopped is ErrStopped with the failure of a request that was still being repeated when the
// context ended.
type stopped struct{ failure error }

func (stopped) Error() string        { return ErrStopped.Error() }
func (stopped) Is(target error) bool { return target == ErrStopped }

// FailureOf returns the failure in err, an ErrStopped, of a request that was still being repeated.
// It returns nil if there is none.
func FailureOf(err error) error {
	if s := (stopped{}); errors.As(err, &s) {
		return s.failure
	}
	return nil
}

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

// Requests records the failed requests for an archive. The zero value is ready to use. It is safe
// for concurrent use.
type Requests struct {
	Logger *slog.Logger // nil: silent

	mu     sync.Mutex
	warned time.Time   // time of the last warning
	count  int         // failures since then
	last   *persistent // the request that failed last, until it ends
	err    error       // its failure
}

// persistent is a request together with its retries.
type persistent struct{ tries int }

// Failure returns the last failure of a request that is still being retried, or nil.
func (r *Requests) Failure() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// failed records that a request for name has failed and will be retried. It logs a warning at the
// first failure, and then every warnEvery.
func (r *Requests) failed(q *persistent, name string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count++
	r.last, r.err = q, fmt.Errorf("%s: %w", Shown(name), err)
	if now := time.Now(); r.Logger != nil && (r.warned.IsZero() || now.Sub(r.warned) >= warnEvery) {
		r.Logger.Warn("request failed and is repeated", "archive", Shown(name), "tries", q.tries,
			"failures", r.count, "error", err)
		r.warned, r.count = now, 0
	}
}

// ended records that a request is no longer retried.
func (r *Requests) ended(q *persistent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last == q {
		r.last, r.err = nil, nil
	}
}

// stopped returns an error that is ErrStopped. If a request was still being retried, the error
// names its failure.
func (r *Requests) stopped() error {
	if err := r.Failure(); err != nil {
		return stopped{err}
	}
	return ErrStopped
}

// stopped is ErrStopped with the failure of a request that was still being retried when the context
// ended.
type stopped struct{ failure error }

func (stopped) Error() string        { return ErrStopped.Error() }
func (stopped) Is(target error) bool { return target == ErrStopped }

// FailureOf returns the failure of a request that was still being retried when err, an ErrStopped,
// was made. It returns nil for any other error, and if no request had failed.
func FailureOf(err error) error {
	if s := (stopped{}); errors.As(err, &s) {
		return s.failure
	}
	return nil
}

package serve

import (
	"container/list"
	"context"
	"sync"
	"time"
)

// request is a Request that waits for a batch, or is in one.
type request struct {
	lent     []byte // the caller's memory: a row, or an image that a device decodes; otherwise nil
	input    []byte // the pixels of an image that the host has decoded; otherwise nil
	class    Priority
	entered  time.Time     // when Do was called
	ready    time.Time     // when it joined the queue
	at       *list.Element // its place in a line, nil outside; guarded by the line's lock
	turn     chan struct{} // closed when it may pass the gate; nil unless it waits there
	answered chan outcome  // has room for the only answer, so workers never wait

	// held has an element while a worker reads lent, and while a cancelled call sets gone. So Do
	// returns only when no worker reads the caller's memory. It is a channel and not a Mutex, so
	// that tests in a synctest bubble can wait for it.
	held chan struct{}
	gone bool // cancelled: no worker reads lent any more
}

// write writes the request's row, or zeros for a cancelled one.
func (r *request) write(row []byte) {
	if r.input != nil {
		copy(row, r.input)
		return
	}
	r.hold()
	defer r.release()
	if r.gone {
		clear(row)
		return
	}
	copy(row, r.lent)
}

// outcome is the answer to one request.
type outcome struct {
	answer Answer
	err    error
}

func newRequest(class Priority) *request {
	return &request{class: class, entered: time.Now(), answered: make(chan outcome, 1), held: make(chan struct{}, 1)}
}

// fail answers the request with an error.
func (r *request) fail(err error) { r.answered <- outcome{err: err} }

// leave ends the use of the caller's memory. It waits for a worker that reads it.
func (r *request) leave() {
	r.hold()
	r.gone = true
	r.release()
}

// hold keeps the call of Do from returning, until release.
func (r *request) hold()    { r.held <- struct{}{} }
func (r *request) release() { <-r.held }

// fair is the length of a turn in which each class gets at least one place.
const fair = 8

// line is a list of waiting requests in the order of their classes. Within a class the first comes
// first. Of each fair requests that leave, at least one is a Background request if one waits.
type line struct {
	classes [2]list.List // of *request
	passed  int          // Interactive requests that left while a Background request waited
}

func (l *line) len() int { return l.classes[Interactive].Len() + l.classes[Background].Len() }

func (l *line) push(r *request) { r.at = l.classes[r.class].PushBack(r) }

// remove takes out a request. It reports false if the request has left before.
func (l *line) remove(r *request) bool {
	if r.at == nil {
		return false
	}
	l.classes[r.class].Remove(r.at)
	r.at = nil
	return true
}

// pop takes out the next request. The line is not empty.
func (l *line) pop() *request {
	class := Interactive
	switch {
	case l.classes[Background].Len() == 0:
		l.passed = 0
	case l.classes[Interactive].Len() == 0 || l.passed >= fair-1:
		class, l.passed = Background, 0
	default:
		l.passed++
	}
	r := l.classes[class].Front().Value.(*request)
	l.remove(r)
	return r
}

// oldest returns the time at which the longest waiting request became ready. The line is not empty.
func (l *line) oldest() (t time.Time) {
	for i := range l.classes {
		if front := l.classes[i].Front(); front != nil {
			if at := front.Value.(*request).ready; t.IsZero() || at.Before(t) {
				t = at
			}
		}
	}
	return t
}

// device is a device of a Batcher. Its workers share it.
type device struct {
	name  string // for messages
	limit int    // maximum size of a batch. Guarded by queue.mu, as is lost
	lost  error  // the reason why its workers have left
}

// queue holds the requests between Do and the workers. It bounds them, and makes batches of them.
type queue struct {
	mu      sync.Mutex
	changed sync.Cond // a request has come, a batch is due, or the workers have to look again
	timer   *time.Timer
	delay   time.Duration
	places  int // maximum of entered
	entered int // requests that have a place: being decoded, or in the line
	line    line
	closed  bool  // no request enters
	stopped error // no request is served: the answer to all
	devices []*device
}

func newQueue(places int, delay time.Duration, devices []*device) *queue {
	q := &queue{places: places, delay: delay, devices: devices}
	q.changed.L = &q.mu
	return q
}

// enter gives a request a place, or returns the reason why there is none.
func (q *queue) enter() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.stopped != nil:
		return q.stopped
	case q.closed:
		return ErrClosed
	case q.entered >= q.places:
		return ErrQueueFull
	}
	q.entered++
	return nil
}

// exit frees the place of a request that is not in the line.
func (q *queue) exit() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.free(1)
}

// free frees places. The caller holds mu.
func (q *queue) free(n int) {
	q.entered -= n
	if q.closed && q.entered == 0 {
		q.changed.Broadcast() // the workers leave
	}
}

// push puts a request that has a place into the line. After stop it answers the request instead.
func (q *queue) push(r *request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.stopped != nil {
		r.fail(q.stopped)
		q.free(1)
		return
	}
	r.ready = time.Now()
	q.line.push(r)
	q.wake()
}

// wake wakes a worker that takes the requests of the line. With a delay only the devices whose
// batch is full take them before it ends, so all workers look. The caller holds mu.
func (q *queue) wake() {
	if q.delay > 0 && len(q.devices) > 1 {
		q.changed.Broadcast()
		return
	}
	q.changed.Signal()
}

// cancel takes a request out of the line and frees its place. It reports false if a worker has the
// request, or it was answered.
func (q *queue) cancel(r *request) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.line.remove(r) {
		return false
	}
	q.free(1)
	return true
}

// take waits for a batch for the device: its maximum number of requests, or those that wait when
// the oldest has waited for the delay. It returns nil when the worker has to leave.
func (q *queue) take(d *device) (batch []*request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		n := q.line.len()
		switch {
		case q.stopped != nil || d.lost != nil || q.closed && q.entered == 0:
			q.changed.Signal() // a signal for a request may have woken this worker
			return nil
		case n > 0 && (n >= d.limit || q.closed || q.due()):
			for range min(n, d.limit) {
				batch = append(batch, q.line.pop())
			}
			if n > len(batch) {
				q.wake()
			}
			q.free(len(batch))
			return batch
		}
		q.changed.Wait()
	}
}

// due reports whether the oldest request has waited for the delay. If not, it sets the timer. The
// caller holds mu, and the line is not empty.
func (q *queue) due() bool {
	left := time.Until(q.line.oldest().Add(q.delay))
	if left <= 0 {
		return true
	}
	if q.timer == nil {
		q.timer = time.AfterFunc(left, func() {
			q.mu.Lock()
			defer q.mu.Unlock()
			q.changed.Broadcast()
		})
		return false
	}
	q.timer.Reset(left)
	return false
}

// close lets no further request enter. The workers leave when all requests have been taken.
func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.changed.Broadcast()
}

// stop answers all requests of the line, and every later one, with err. The workers leave.
func (q *queue) stop(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.end(err)
}

// end is stop for a caller that holds mu.
func (q *queue) end(err error) {
	if q.stopped != nil {
		return
	}
	q.stopped = err
	for q.line.len() > 0 {
		q.line.pop().fail(err)
		q.entered--
	}
	if q.timer != nil {
		q.timer.Stop()
	}
	q.changed.Broadcast()
}

// lose makes the device's workers leave. It reports false if they have left before. Without
// another device the queue stops.
func (q *queue) lose(d *device, err error) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if d.lost != nil {
		return false
	}
	d.lost = err
	for _, other := range q.devices {
		if other.lost == nil {
			q.changed.Broadcast()
			return true
		}
	}
	q.end(err)
	return true
}

// shrink lowers the device's maximum batch.
func (q *queue) shrink(d *device, limit int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	d.limit = min(d.limit, limit)
}

// limitOf returns the device's maximum batch.
func (q *queue) limitOf(d *device) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return d.limit
}

func (q *queue) isLost(d *device) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return d.lost != nil
}

// err returns the reason why a request cannot enter, except for want of a place.
func (q *queue) err() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.stopped != nil:
		return q.stopped
	case q.closed:
		return ErrClosed
	}
	return nil
}

// waiting returns the number of requests that have a place.
func (q *queue) waiting() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.entered
}

// gate bounds the requests that the host decodes at a time. They pass in the order of their
// classes.
type gate struct {
	mu   sync.Mutex
	room int // requests that may enter without waiting
	line line
}

// enter waits until the request may pass, or ctx ends. The request calls leave afterwards.
func (g *gate) enter(ctx context.Context, r *request) error {
	g.mu.Lock()
	if g.room > 0 {
		g.room--
		g.mu.Unlock()
		return nil
	}
	r.turn = make(chan struct{})
	g.line.push(r)
	g.mu.Unlock()
	select {
	case <-r.turn:
		return nil
	case <-ctx.Done():
	}
	g.mu.Lock()
	waits := g.line.remove(r)
	g.mu.Unlock()
	if !waits { // it has had its turn meanwhile
		g.leave()
	}
	return context.Cause(ctx)
}

// leave lets the next request pass.
func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.line.len() == 0 {
		g.room++
		return
	}
	close(g.line.pop().turn)
}

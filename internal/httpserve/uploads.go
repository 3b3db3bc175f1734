// Package httpserve has the parts of an HTTP server for images that torchstream serve,
// examples/15-serve and examples/01-train share: bodies in bounded memory, the statuses of errors,
// metrics, a page to try the server, and the shutdown.
package httpserve

import (
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// A client that sends nothing for maxPause, or whose body takes maxUpload, gives up its memory.
const (
	maxPause  = 5 * time.Second
	maxUpload = time.Minute
)

// ErrBusy is returned by Uploads.Read if the bodies in memory leave no room.
var ErrBusy = errors.New("the server has no memory for another upload now: try again")

// ErrIncomplete is returned by Uploads.Read for a body that did not arrive whole.
var ErrIncomplete = errors.New("the body did not arrive whole")

// Uploads bounds the memory of request bodies.
type Uploads struct {
	maxBytes int64 // of a body
	mu       sync.Mutex
	free     int64
}

// NewUploads returns Uploads that allow maxBytes for a body, and memory bytes for all together,
// at least one body's.
func NewUploads(maxBytes, memory int64) *Uploads {
	return &Uploads{maxBytes: maxBytes, free: max(maxBytes, memory)}
}

// Read reads a request's body. The caller calls release when it no longer uses the data.
//
// A body over the limit is an *http.MaxBytesError. If its Content-Length says so, no byte of it is
// read. If there is no memory for the body, the error is [ErrBusy], and no byte of it is read
// either. A body without a Content-Length needs the memory of the largest allowed body. All other
// errors are [ErrIncomplete]: the client left, sent nothing for 5 seconds, or took over a minute.
func (u *Uploads) Read(w http.ResponseWriter, r *http.Request) (data []byte, release func(), err error) {
	length := r.ContentLength
	if length > u.maxBytes {
		return nil, nil, &http.MaxBytesError{Limit: u.maxBytes}
	}
	size := length
	if length < 0 {
		size = u.maxBytes
	}
	if !u.take(size) {
		return nil, nil, ErrBusy
	}
	release = sync.OnceFunc(func() { u.give(size) })
	body := &timedBody{http.MaxBytesReader(w, r.Body, u.maxBytes), http.NewResponseController(w), time.Now().Add(maxUpload)}
	if data, err = u.read(body, length); err != nil {
		release()
		if !errors.As(err, new(*http.MaxBytesError)) {
			err = ErrIncomplete
		}
		return nil, nil, err
	}
	// The server now waits for more to notice a client that leaves. At a deadline it would end the
	// request's context.
	body.limit(time.Time{})
	return data, release, nil
}

// timedBody is a body whose reads have deadlines.
type timedBody struct {
	io.Reader
	connection *http.ResponseController
	end        time.Time
}

func (b *timedBody) Read(p []byte) (int, error) {
	pause := time.Now().Add(maxPause)
	if pause.After(b.end) {
		pause = b.end
	}
	b.limit(pause)
	return b.Reader.Read(p)
}

// limit sets the deadline of reads. It has no effect on a ResponseWriter without a connection.
func (b *timedBody) limit(deadline time.Time) { _ = b.connection.SetReadDeadline(deadline) }

func (u *Uploads) take(size int64) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if size > u.free {
		return false
	}
	u.free -= size
	return true
}

func (u *Uploads) give(size int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.free += size
}

// read reads a body of length bytes, or of an unknown length if length is -1. If the length is
// known, it allocates the buffer once. Otherwise the buffer doubles up to an eighth of maxBytes,
// and then grows to maxBytes, so that the old and the new one have at most 9/8 of maxBytes.
func (u *Uploads) read(body io.Reader, length int64) ([]byte, error) {
	if length < 0 {
		length = min(64<<10, u.maxBytes)
	}
	data := make([]byte, 0, length+1) // room for a read that finds the end
	for {
		n, err := body.Read(data[len(data):cap(data)])
		data = data[:len(data)+n]
		if err == io.EOF {
			return data, nil
		}
		if err != nil {
			return nil, err
		}
		if len(data) == cap(data) {
			size := 2 * int64(cap(data))
			if size > u.maxBytes/8 {
				size = u.maxBytes + 1
			}
			data = append(make([]byte, 0, size), data...)
		}
	}
}

package imageloader

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"
)

// Retries of a request: after 0.1, 0.2, 0.4, ... seconds.
const (
	httpTries   = 6
	httpBackoff = 100 * time.Millisecond
	httpSilence = 30 * time.Second // before a response's header, or in its body
)

// httpTimes are how long a request waits: before it is tried again the first time, and for a server that says nothing.
type httpTimes struct{ backoff, silence time.Duration }

func isURL(path string) bool {
	return strings.HasPrefix(path, "http://") || strings.HasPrefix(path, "https://")
}

// urlFile is a file behind an http(s) URL whose server answers range requests. What is read in order comes through one response that is read ahead of by the
// network; a response that breaks off is asked for again from where it broke off. Every response must be of the same version of the file (ETag, or length and time).
//
// No server makes anybody wait for long: a response that pauses has broken off, and everything ends with errStopped when the context does.
type urlFile struct {
	ctx    context.Context
	url    string
	client *http.Client
	size   int64
	etag   string
	time   time.Time
	times  httpTimes

	at   int64
	body io.ReadCloser // of a response that continues at at; nil: none is open
}

func openURL(ctx context.Context, url string) (source, error) {
	transport, ok := http.DefaultTransport.(*http.Transport)
	if ok {
		transport = transport.Clone()
	} else { // a program's own
		transport = &http.Transport{Proxy: http.ProxyFromEnvironment}
	}
	transport.ResponseHeaderTimeout = httpSilence
	return openURLWith(ctx, url, &http.Client{Transport: transport}, httpTimes{httpBackoff, httpSilence})
}

func openURLWith(ctx context.Context, url string, client *http.Client, times httpTimes) (source, error) {
	f := &urlFile{ctx: ctx, url: url, client: client, size: -1, times: times}
	body, err := f.get(0, 1)
	if err != nil {
		return nil, err
	}
	_ = body.Close() // one byte
	return f, nil
}

// temporaryError is a failure that another try may not meet.
type temporaryError struct{ error }

// get asks for n bytes from at on (n < 0: for all), several times if it has to.
func (f *urlFile) get(at, n int64) (io.ReadCloser, error) {
	wait := f.times.backoff
	for try := 1; ; try++ {
		body, err := f.request(at, n)
		var again temporaryError
		if err == nil || !errors.As(err, &again) || try == httpTries {
			return body, err
		}
		if err := f.pause(&wait); err != nil {
			return nil, err
		}
	}
}

// pause waits before another try, longer from time to time.
func (f *urlFile) pause(wait *time.Duration) error {
	timer := time.NewTimer(*wait)
	defer timer.Stop()
	*wait *= 2
	select {
	case <-timer.C:
		return nil
	case <-f.ctx.Done():
		return errStopped
	}
}

// body is a response's. A server that sends nothing for a while, or a context that ends, breaks it off.
type body struct {
	io.ReadCloser
	silence time.Duration
	timer   *time.Timer
	cancel  context.CancelFunc
}

func (b *body) Read(p []byte) (int, error) {
	b.timer.Reset(b.silence)
	defer b.timer.Stop()
	return b.ReadCloser.Read(p)
}

func (b *body) Close() error {
	b.timer.Stop()
	b.cancel()
	return b.ReadCloser.Close()
}

func (f *urlFile) request(at, n int64) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancel(f.ctx)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, f.url, nil)
	if err != nil {
		cancel()
		return nil, err
	}
	last := ""
	if n >= 0 {
		last = strconv.FormatInt(at+n-1, 10)
	}
	request.Header.Set("Range", fmt.Sprintf("bytes=%d-%s", at, last))
	request.Header.Set("Accept-Encoding", "identity") // the file's own bytes
	response, err := f.client.Do(request)
	if err != nil {
		cancel()
		if f.ctx.Err() != nil {
			return nil, errStopped
		}
		return nil, temporaryError{err}
	}
	timer := time.AfterFunc(f.times.silence, cancel)
	timer.Stop()
	b := &body{response.Body, f.times.silence, timer, cancel}
	if err := f.check(response, at); err != nil {
		_ = b.Close() // err says more
		return nil, err
	}
	return b, nil
}

// check looks at the header of a response to a request from at on.
func (f *urlFile) check(r *http.Response, at int64) error {
	switch {
	case r.StatusCode == http.StatusPartialContent:
	case r.StatusCode == http.StatusTooManyRequests, r.StatusCode == http.StatusRequestTimeout, r.StatusCode >= 500:
		return temporaryError{fmt.Errorf("%s: the server answers %s", f.url, r.Status)}
	case r.StatusCode == http.StatusNotFound:
		return fmt.Errorf("%s: the server answers %s: %w", f.url, r.Status, fs.ErrNotExist)
	case r.StatusCode == http.StatusOK, r.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		return fmt.Errorf("%s: the server does not answer range requests (%s, or the file is empty): download the archive", f.url, r.Status)
	default:
		return fmt.Errorf("%s: the server answers %s", f.url, r.Status)
	}
	var first, last, size int64
	if _, err := fmt.Sscanf(r.Header.Get("Content-Range"), "bytes %d-%d/%d", &first, &last, &size); err != nil || first != at || last < first || size <= last {
		return fmt.Errorf("%s: the server answers with the range %q to a request for what begins at %d", f.url, r.Header.Get("Content-Range"), at)
	}
	etag := r.Header.Get("ETag")
	changed, _ := http.ParseTime(r.Header.Get("Last-Modified")) // none: the zero time
	if f.size < 0 {
		f.size, f.etag, f.time = size, etag, changed
	}
	if f.size != size || f.etag != etag || !f.time.Equal(changed) {
		return fmt.Errorf("%s has changed since it was opened: open the loader again", f.url)
	}
	return nil
}

// Read reads on, with a new request if the response breaks off.
func (f *urlFile) Read(p []byte) (int, error) {
	wait := f.times.backoff
	for try := 1; ; try++ {
		if f.at >= f.size {
			return 0, io.EOF
		}
		if f.body == nil {
			body, err := f.get(f.at, -1)
			if err != nil {
				return 0, err
			}
			f.body = body
		}
		n, err := f.body.Read(p)
		f.at += int64(n)
		if n > 0 || err == nil {
			return n, nil
		}
		f.drop()
		if f.ctx.Err() != nil {
			return 0, errStopped
		}
		if f.at < f.size && try == httpTries {
			return 0, fmt.Errorf("%s: the response breaks off at byte %d of %d, again and again: %w", f.url, f.at, f.size, io.ErrUnexpectedEOF)
		}
		if err := f.pause(&wait); err != nil {
			return 0, err
		}
	}
}

func (f *urlFile) drop() {
	if f.body != nil {
		_ = f.body.Close() // only read
		f.body = nil
	}
}

// ReadAt is a request of its own; it may be called by several goroutines.
func (f *urlFile) ReadAt(p []byte, at int64) (n int, err error) {
	if at >= f.size {
		return 0, io.EOF
	}
	want := p[:min(int64(len(p)), f.size-at)]
	wait := f.times.backoff
	for try := 1; n < len(want) && try <= httpTries; try++ {
		if try > 1 {
			if err := f.pause(&wait); err != nil {
				return n, err
			}
		}
		body, err := f.get(at+int64(n), int64(len(want)-n))
		if err != nil {
			return n, err
		}
		got, _ := io.ReadFull(body, want[n:]) // what is missing is asked for again
		_ = body.Close()                      // only read
		n += got
	}
	switch {
	case n < len(want):
		return n, fmt.Errorf("%s: the response to a request for %d bytes at %d breaks off, again and again: %w", f.url, len(want), at, io.ErrUnexpectedEOF)
	case n < len(p):
		return n, io.EOF
	}
	return n, nil
}

// Seek over a short distance reads on, for that the next response need not be waited for.
func (f *urlFile) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += f.at
	case io.SeekEnd:
		offset += f.size
	}
	if offset < 0 {
		return f.at, errors.New("seek before the beginning")
	}
	if ahead := offset - f.at; f.body != nil && ahead > 0 && ahead <= 1<<20 {
		n, _ := io.CopyN(io.Discard, f.body, ahead) // a failure is met again by Read
		f.at += n
	}
	if offset != f.at {
		f.drop()
		f.at = offset
	}
	return f.at, nil
}

func (f *urlFile) Close() error {
	f.drop()
	f.client.CloseIdleConnections()
	return nil
}

func (f *urlFile) Stat() (fs.FileInfo, error) { return urlInfo{f}, nil }

type urlInfo struct{ f *urlFile }

func (i urlInfo) Name() string       { return path.Base(i.f.url) }
func (i urlInfo) Size() int64        { return i.f.size }
func (i urlInfo) Mode() fs.FileMode  { return 0o444 }
func (i urlInfo) ModTime() time.Time { return i.f.time }
func (i urlInfo) IsDir() bool        { return false }
func (i urlInfo) Sys() any           { return nil }

package world

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"time"
)

// RoundTrip answers a request for a range of a file on the simulated disk, as a server of files
// does. World is an http.RoundTripper for URLs whose path is the one of a process.
func (w *World) RoundTrip(r *http.Request) (*http.Response, error) {
	p, at, n, err := w.find("get", r.URL.Path)
	if err != nil {
		return nil, err
	}
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	a := &answer{w: w, r: r, header: http.Header{}, fault: p.chance("fault get "+path.Base(at), w.Disk.Faults.Server, 12)}
	if n == nil {
		return a.text(http.StatusNotFound), nil
	}
	switch a.fault {
	case 1, 2, 3, 6, 7, 8:
		w.transient++
	case 9: // a replica has another version
		if other := w.Disk.Other[at]; other != nil {
			n = &inode{number: -n.number, changed: n.changed.Add(-time.Hour), data: other}
		}
	}
	return a.file(n)
}

// Transient returns the number of faults of servers so far after which the same request succeeds.
func (w *World) Transient() int { return w.transient }

// answer makes the response to a request.
type answer struct {
	w      *World
	r      *http.Request
	header http.Header
	fault  int // 0: none
}

func (a *answer) response(code int, body io.ReadCloser) *http.Response {
	return &http.Response{Status: fmt.Sprintf("%d %s", code, http.StatusText(code)), StatusCode: code, Proto: "HTTP/1.1",
		ProtoMajor: 1, ProtoMinor: 1, Header: a.header, Body: body, ContentLength: -1, Request: a.r}
}

func (a *answer) text(code int) *http.Response {
	return a.response(code, io.NopCloser(bytes.NewReader([]byte(http.StatusText(code)))))
}

// file answers with a range of a file, or as a fault does.
func (a *answer) file(n *inode) (*http.Response, error) {
	var from, to int
	if _, err := fmt.Sscanf(a.r.Header.Get("Range"), "bytes=%d-%d", &from, &to); err != nil || from >= len(n.data) {
		return a.text(http.StatusRequestedRangeNotSatisfiable), nil
	}
	to = min(to+1, len(n.data))
	a.header.Set("Last-Modified", n.changed.UTC().Format(http.TimeFormat))
	a.header.Set("ETag", fmt.Sprintf(`"%d-%d"`, n.number, n.changed.UnixNano()))
	body := &body{w: a.w, ctx: a.r.Context(), stop: -1}
	switch a.fault {
	case 1:
		return nil, errors.New("connection refused")
	case 2:
		return a.text(http.StatusServiceUnavailable), nil
	case 3:
		a.header.Set("Retry-After", "3")
		return a.text(http.StatusTooManyRequests), nil
	case 4: // the server ignores ranges
		body.data = n.data
		return a.response(http.StatusOK, body), nil
	case 5, 12: // the server compresses, perhaps to as many bytes
		b, err := compress(n.data[from:to], a.fault == 12)
		if err != nil {
			return nil, err
		}
		a.header.Set("Content-Encoding", "gzip")
		body.data = b
	case 6:
		body.stall = true
	case 7:
		body.stop = (to - from) / 2
	case 8: // a shorter range than the client asks for
		to = from + max(1, (to-from)/2)
	case 10:
		return a.text(http.StatusNotFound), nil
	case 11: // another range
		from = max(0, from-1)
	}
	a.header.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to-1, len(n.data)))
	if body.data == nil {
		body.data = n.data[from:to]
	}
	return a.response(http.StatusPartialContent, body), nil
}

// compress returns a gzip stream of data, if possible one that is as long as data.
func compress(data []byte, same bool) ([]byte, error) {
	pack := func(extra int) ([]byte, error) {
		var b bytes.Buffer
		g := gzip.NewWriter(&b)
		g.Extra = make([]byte, extra) // its length takes two bytes, even if there is none
		_, err := g.Write(data)
		err = errors.Join(err, g.Close())
		return b.Bytes(), err
	}
	b, err := pack(0)
	if more := len(data) - len(b); same && err == nil && more > 0 {
		b, err = pack(more)
	}
	return b, err
}

// body is the body of a response.
type body struct {
	w     *World
	ctx   context.Context
	data  []byte
	at    int
	stop  int  // where the connection breaks; -1: nowhere
	stall bool // nothing arrives
}

func (b *body) Read(p []byte) (int, error) {
	b.w.delay("body")
	if b.stall {
		<-b.ctx.Done()
	}
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	if b.at == b.stop {
		return 0, io.ErrUnexpectedEOF
	}
	if b.at == len(b.data) {
		return 0, io.EOF
	}
	end := len(b.data)
	if b.stop > b.at {
		end = b.stop
	}
	n := copy(p, b.data[b.at:min(end, b.at+4000)])
	b.at += n
	return n, nil
}

func (b *body) Close() error { return nil }

var _ http.RoundTripper = (*World)(nil)

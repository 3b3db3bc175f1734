package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"sync"
	"time"

	"github.com/torchstream/torchstream/internal/printable"
)

// Timing and sizes of requests to a Source.
const (
	// A failed request is retried until it has been made at least sourceTries times. The first
	// pause is sourceBackoff. Each further pause is twice as long, up to sourcePause. If the
	// archive is or was open, retries do not stop before sourceBudget has passed without any bytes.
	sourceTries   = 6
	sourceBackoff = 100 * time.Millisecond
	sourcePause   = 10 * time.Second
	sourceBudget  = 2 * time.Minute
	sourceSilence = 30 * time.Second // before a response, and between minProgress bytes of it
	minProgress   = firstPiece / 2   // a response with fewer bytes in sourceSilence counts as stopped

	// Sequential reads request several pieces at a time, because one response from an object store
	// is slower than the network. The first piece is small, because the reader may need only a few
	// bytes.
	firstPiece  = 64 << 10
	maxPiece    = 4 << 20
	piecesAhead = 4
)

// openSource is the type of Config.OpenSource.
type openSource = func(ctx context.Context, url string) (Source, error)

// sourceTimes are the times of a request: the pause before its second try, the limit for a silent
// server, and the limit for all waits together.
type sourceTimes struct{ backoff, silence, budget time.Duration }

var defaultSourceTimes = sourceTimes{sourceBackoff, sourceSilence, sourceBudget}

// retryAfter is the error of a server that asks the client to wait before the next request.
type retryAfter struct {
	error
	wait time.Duration
}

func (e retryAfter) Unwrap() error { return e.error }

// remoteFile implements File for an open Source. It reads ahead for sequential reads. A request
// that fails or breaks off is retried from the byte where it broke off.
//
// No call blocks for long. A response that pauses or trickles counts as broken off, and every call
// returns ErrStopped once the context is done.
type remoteFile struct {
	ctx      context.Context
	stop     context.CancelFunc
	name     string
	from     Source
	info     SourceInfo
	times    sourceTimes
	requests *Requests

	ahead readAhead
}

// readAhead holds the pieces that are requested ahead of a position. Only Read and Seek use it, and
// one goroutine calls them.
type readAhead struct {
	at       int64
	pieces   []*piece // without gaps; at is in the first piece
	next     int64    // offset of the piece after pieces
	size     int64    // size of the piece at next
	spare    [][]byte // memory of consumed pieces, for reuse
	fetching sync.WaitGroup
}

// advance drops the pieces before the position. If none is left, the next piece starts there.
func (r *readAhead) advance() {
	for len(r.pieces) > 0 && r.pieces[0].end() <= r.at {
		r.recycle(r.pieces[0])
		r.pieces = r.pieces[1:]
	}
	if len(r.pieces) == 0 && r.next != r.at {
		r.next, r.size = r.at, firstPiece
	}
}

// add adds the next piece of a file of the given size.
func (r *readAhead) add(fileSize int64) *piece {
	p := &piece{at: r.next, data: r.room(min(r.size, fileSize-r.next)), ready: make(chan struct{})}
	r.pieces = append(r.pieces, p)
	r.next = p.end()
	r.size = min(2*r.size, maxPiece)
	return p
}

// recycle keeps a piece's memory for reuse, unless its request may still write there.
func (r *readAhead) recycle(p *piece) {
	p.stop()
	select {
	case <-p.ready:
		if len(p.data) == maxPiece {
			r.spare = append(r.spare, p.data)
		}
	default:
	}
}

// room returns memory for a piece of n bytes.
func (r *readAhead) room(n int64) []byte {
	if last := len(r.spare) - 1; n == maxPiece && last >= 0 {
		p := r.spare[last]
		r.spare = r.spare[:last]
		return p
	}
	return make([]byte, n)
}

// seek moves the position. If no piece contains the new position, it drops all pieces.
func (r *readAhead) seek(at int64) {
	if len(r.pieces) > 0 && (at < r.pieces[0].at || at >= r.next) {
		r.drop()
	}
	r.at = at
}

// drop cancels the requests of all pieces.
func (r *readAhead) drop() {
	for _, p := range r.pieces {
		p.stop()
	}
	r.pieces = nil
}

// piece is a requested range.
type piece struct {
	at    int64
	data  []byte
	stop  context.CancelFunc
	ready chan struct{} // closed once n and err are set
	n     int           // number of bytes that have arrived
	err   error         // why n is less than len(data)
}

// remoteOptions are options for openRemote.
type remoteOptions struct {
	again    bool // the archive was open before
	requests *Requests
}

// openRemote opens the Source called name by calling open.
func openRemote(ctx context.Context, name string, open openSource, times sourceTimes,
	o remoteOptions) (*remoteFile, error) {
	f := &remoteFile{name: name, times: times, requests: o.requests, ahead: readAhead{size: firstPiece}}
	f.ctx, f.stop = context.WithCancel(ctx)
	var budget time.Duration
	if o.again {
		budget = times.budget
	}
	err := f.persist(f.ctx, budget, func() (_ bool, err error) {
		once, cancel := context.WithTimeout(f.ctx, times.silence)
		defer cancel()
		f.from, err = open(once, name)
		return false, err
	})
	if err != nil {
		f.stop()
		return nil, err
	}
	if f.info = f.from.Info(); f.info.Size < 0 {
		_ = f.Close() // err says more
		return nil, fmt.Errorf("%s: its Source reports a size of %d bytes", Shown(name), f.info.Size)
	}
	return f, nil
}

// persist calls try until it succeeds, until it fails with an error that a retry can't fix, or
// until it has failed at least sourceTries times and for more than budget since the last progress.
// try returns further = true if it made progress. persist waits as long as the server asks, but
// fails at once if all waits together would exceed times.budget.
func (f *remoteFile) persist(ctx context.Context, budget time.Duration, try func() (further bool, err error)) error {
	q := &persistent{}
	err := f.repeat(ctx, q, budget, try)
	if !errors.Is(err, ErrStopped) || f.ctx.Err() == nil {
		f.requests.ended(q)
	}
	return err
}

// repeat implements persist. q is the record of the request.
func (f *remoteFile) repeat(ctx context.Context, q *persistent, budget time.Duration,
	try func() (further bool, err error)) error {
	wait, began := f.times.backoff, time.Now()
	for q.tries = 1; ; q.tries++ {
		further, err := try()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return f.requests.stopped()
		}
		if further {
			q.tries, wait, began = 1, f.times.backoff, time.Now()
		}
		err = printable.Error(err) // a store's library quotes request URLs
		if lasting(err) {
			return fmt.Errorf("%s: %w", Shown(f.name), err)
		}
		pause, spent := wait, time.Since(began)
		wait = min(2*wait, sourcePause)
		var asked retryAfter
		if errors.As(err, &asked) && asked.wait > pause {
			if pause = asked.wait; spent+pause > f.times.budget {
				return fmt.Errorf("%s: %w, and asks to wait %v: the loader waits up to %v in all",
					Shown(f.name), err, asked.wait, f.times.budget)
			}
		} else if q.tries >= sourceTries && spent+pause > budget {
			return fmt.Errorf("%s: %w (%d tries in %v)", Shown(f.name), err, q.tries, spent.Round(time.Millisecond))
		}
		f.requests.failed(q, f.name, err)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return f.requests.stopped()
		}
	}
}

// lasting reports whether a retry would fail with the same error.
func lasting(err error) bool {
	for _, e := range []error{ErrSourceChanged, fs.ErrNotExist, fs.ErrPermission, errors.ErrUnsupported} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// read fills p with a part of the file. at is the part's offset. The whole part must be within the
// file. It is safe for concurrent use.
func (f *remoteFile) read(ctx context.Context, p []byte, at int64) (n int, err error) {
	err = f.persist(ctx, f.times.budget, func() (bool, error) {
		got, err := f.once(ctx, p[n:], at+int64(n))
		n += got
		return got >= minProgress, err
	})
	return n, err
}

// once requests the part of the file that read describes. If a response ends early without an
// error, it requests the rest.
func (f *remoteFile) once(ctx context.Context, p []byte, at int64) (n int, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := time.AfterFunc(f.times.silence, func() {
		cancel(fmt.Errorf("less than %d bytes have come in %v", minProgress, f.times.silence))
	})
	defer silent.Stop()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
	}()
	came := progress{silent: silent, silence: f.times.silence}
	for n < len(p) {
		got, err := f.response(ctx, p[n:], at+int64(n), &came)
		if n += got; err != nil {
			return n, err
		}
	}
	return n, nil
}

// progress counts the bytes of responses. Every minProgress bytes extend the deadline of the
// request.
type progress struct {
	silent  *time.Timer
	silence time.Duration
	began   bool
	since   int
}

func (c *progress) add(n int) {
	if c.since += n; c.since >= minProgress || !c.began {
		c.silent.Reset(c.silence)
		c.since, c.began = 0, true
	}
}

// response makes one request for the part of the file that read describes, and reads the response
// into p. If the response ends early without an error, n is less than len(p), but at least 1.
func (f *remoteFile) response(ctx context.Context, p []byte, at int64, came *progress) (n int, err error) {
	body, err := f.from.ReadRange(ctx, at, int64(len(p)))
	if err != nil {
		return 0, err
	}
	defer func() { _ = body.Close() }() // only read
	came.add(0)
	for empty := 0; n < len(p); {
		got, err := body.Read(p[n:])
		n += got
		came.add(got)
		if empty++; got > 0 {
			empty = 0
		}
		switch {
		case n == len(p):
		case err == io.EOF && n > 0:
			return n, nil
		case err == io.EOF, errors.Is(err, io.ErrUnexpectedEOF):
			return n, dropped(at+int64(n), f.info.Size)
		case err != nil:
			return n, err
		case empty == 100:
			return n, io.ErrNoProgress
		}
	}
	return n, nil
}

// dropped returns the error for a response that ends too early. It does not wrap
// io.ErrUnexpectedEOF, because that means that the archive itself is cut off.
func dropped(at, size int64) error {
	return fmt.Errorf("the connection was dropped at byte %d of %d", at, size)
}

// Read reads from the current offset.
func (f *remoteFile) Read(p []byte) (int, error) {
	if f.ahead.at >= f.info.Size {
		return 0, io.EOF
	}
	f.ask()
	first := f.ahead.pieces[0]
	select {
	case <-first.ready:
	case <-f.ctx.Done():
		return 0, f.requests.stopped()
	}
	begin := f.ahead.at - first.at
	if begin >= int64(first.n) && len(p) > 0 {
		return 0, first.err
	}
	n := copy(p, first.data[begin:first.n])
	f.ahead.at += int64(n)
	return n, nil
}

// ask requests the next pieces.
func (f *remoteFile) ask() {
	f.ahead.advance()
	for len(f.ahead.pieces) < piecesAhead && f.ahead.next < f.info.Size {
		p := f.ahead.add(f.info.Size)
		var ctx context.Context
		ctx, p.stop = context.WithCancel(f.ctx)
		f.ahead.fetching.Go(func() {
			p.n, p.err = f.read(ctx, p.data, p.at)
			close(p.ready)
		})
	}
}

func (p *piece) end() int64 { return p.at + int64(len(p.data)) }

// Seek makes no request if the offset is in a requested piece.
func (f *remoteFile) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += f.ahead.at
	case io.SeekEnd:
		offset += f.info.Size
	}
	if offset < 0 {
		return f.ahead.at, errors.New("seek before the beginning")
	}
	f.ahead.seek(offset)
	return offset, nil
}

// ReadAt makes a separate request. It is safe for concurrent use.
//
// ReadAt reads the body of a Source into Go memory and then copies it to p, because p may be
// unmapped later. A faulty body that still writes after its Read has returned must not crash the
// process.
func (f *remoteFile) ReadAt(p []byte, at int64) (n int, err error) {
	if at >= f.info.Size {
		return 0, io.EOF
	}
	content := make([]byte, min(int64(len(p)), f.info.Size-at))
	n, err = f.read(f.ctx, content, at)
	copy(p, content[:n])
	if err == nil && n < len(p) {
		err = io.EOF
	}
	return n, err
}

func (f *remoteFile) Close() error {
	f.ahead.drop()
	f.stop()
	f.ahead.fetching.Wait()
	return f.from.Close()
}

func (f *remoteFile) Stat() (fs.FileInfo, error) { return remoteInfo{f}, nil }

// remoteInfo describes a remoteFile. Sys is its SourceInfo.
type remoteInfo struct{ f *remoteFile }

func (i remoteInfo) Name() string       { return path.Base(Shown(i.f.name)) }
func (i remoteInfo) Size() int64        { return i.f.info.Size }
func (i remoteInfo) Mode() fs.FileMode  { return 0o444 }
func (i remoteInfo) ModTime() time.Time { return i.f.info.ModTime }
func (i remoteInfo) IsDir() bool        { return false }
func (i remoteInfo) Sys() any           { return i.f.info }

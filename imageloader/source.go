package imageloader

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
	"sync"
	"time"
)

// Source is an archive that is no file of this machine: an object of a store, or what an http server has. [Options.OpenSource] opens it; package imageloader/blob has
// one for S3, Google Cloud Storage and Azure. Retries, reading ahead and waiting for what does not come are the loader's: a Source only asks once.
type Source interface {
	// Info is of the version that was opened.
	Info() SourceInfo
	// ReadRange reads n bytes (at least 1) from offset on, all of which lie in the archive. They must be of the version that was opened: ErrSourceChanged if there is another
	// one by now. It may be called by several goroutines at a time. When ctx ends, which may be after the call, reading ends with an error; whoever called closes the
	// reader in any case.
	//
	// After an error the range is asked for again, up to 6 times and later from time to time, unless the error is (errors.Is) ErrSourceChanged, fs.ErrNotExist,
	// fs.ErrPermission or errors.ErrUnsupported.
	ReadRange(ctx context.Context, offset, n int64) (io.ReadCloser, error)
	Close() error
}

// SourceInfo tells the versions of an archive apart.
type SourceInfo struct {
	Size    int64     // bytes
	ModTime time.Time // when it was last written; the zero value: not known. The index of a plain .tar is only used again if it is.
	Version string    // what the store calls this version, an ETag for example; "": nothing
}

// ErrSourceChanged says that an archive has been replaced by another one since it was opened.
var ErrSourceChanged = errors.New("it has changed since it was opened: open the loader again")

// How a Source is read.
const (
	sourceTries   = 6 // of a request that fails, after 0.1, 0.2, 0.4, ... seconds
	sourceBackoff = 100 * time.Millisecond
	sourceSilence = 30 * time.Second // before a response, and between leastProgress bytes of it
	leastProgress = firstPiece / 2   // not a few bytes a second

	// What is read in order is asked for in pieces, several at a time: one response of an object store is slower than the network. The first piece is small,
	// since not much may be read from there.
	firstPiece  = 64 << 10
	mostPiece   = 4 << 20
	piecesAhead = 4
)

// sourceTimes are how long a request waits: before it is tried again the first time, and for a store that says nothing.
type sourceTimes struct{ backoff, silence time.Duration }

var defaultSourceTimes = sourceTimes{sourceBackoff, sourceSilence}

// isURL says whether path has a scheme.
func isURL(path string) bool {
	scheme, _, found := strings.Cut(path, "://")
	return found && scheme != "" && strings.Trim(scheme, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.") == ""
}

// opener opens shards: files by file (tests have readers that misbehave), and what has a scheme by source.
type opener struct {
	file   func(string) (source, error)
	source func(context.Context, string) (Source, error) // nil: OpenHTTP
}

// during is the opener as long as ctx lasts.
func (o opener) during(ctx context.Context) func(path string) (source, error) {
	if o.source == nil {
		o.source = func(ctx context.Context, url string) (Source, error) { return OpenHTTP(ctx, url, nil) }
	}
	return func(path string) (source, error) {
		if !isURL(path) {
			return o.file(path)
		}
		f, err := openRemote(ctx, path, o.source, defaultSourceTimes)
		if err != nil {
			return nil, err
		}
		return f, nil
	}
}

func (i SourceInfo) same(other SourceInfo) bool {
	return i.Size == other.Size && i.Version == other.Version && i.ModTime.Equal(other.ModTime)
}

// sameArchive says whether what was opened is still what it was.
func sameArchive(now, before fs.FileInfo) bool {
	return now.Size() == before.Size() && now.ModTime().Equal(before.ModTime()) && version(now) == version(before)
}

// version is that of a Source, or of an archive's together; "": it is a file.
func version(info fs.FileInfo) string {
	switch s := info.Sys().(type) {
	case SourceInfo:
		return s.Version
	case string:
		return s
	}
	return ""
}

// remoteFile is an open Source as a file. What is read in order is read ahead of; what fails or breaks off is asked for again from where it broke off.
//
// No store makes anybody wait for long: a response that pauses, or trickles, has broken off, and everything ends with errStopped when the context does.
type remoteFile struct {
	ctx   context.Context
	stop  context.CancelFunc
	name  string
	from  Source
	info  SourceInfo
	times sourceTimes

	// For reading in order: of one goroutine.
	at       int64
	ahead    []*piece // that begin where the one before ends; the first has at, or begins there
	next     int64    // where the piece after ahead begins
	size     int64    // of that piece
	spare    [][]byte // of pieces that were read
	fetching sync.WaitGroup
}

// piece is a range on its way.
type piece struct {
	at    int64
	data  []byte
	stop  context.CancelFunc
	ready chan struct{} // closed when the next two are set
	n     int           // so many bytes have come
	err   error         // why not all have
}

func openRemote(ctx context.Context, name string, open func(context.Context, string) (Source, error), times sourceTimes) (*remoteFile, error) {
	f := &remoteFile{name: name, times: times, size: firstPiece}
	f.ctx, f.stop = context.WithCancel(ctx)
	err := f.persist(f.ctx, func() (_ bool, err error) {
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
		return nil, fmt.Errorf("%s: its Source says that it has %d bytes", name, f.info.Size)
	}
	return f, nil
}

// persist tries until there is no error, it is one that stays, or it was tried often enough. try says whether it came further.
func (f *remoteFile) persist(ctx context.Context, try func() (further bool, err error)) error {
	wait := f.times.backoff
	for tries := 1; ; tries++ {
		further, err := try()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return errStopped
		}
		if further {
			tries, wait = 1, f.times.backoff
		}
		if tries >= sourceTries || lasting(err) {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		timer := time.NewTimer(wait)
		wait *= 2
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return errStopped
		}
	}
}

// lasting says whether another try would fail too.
func lasting(err error) bool {
	for _, e := range []error{ErrSourceChanged, fs.ErrNotExist, fs.ErrPermission, errors.ErrUnsupported} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// read fills p from offset at on; p lies inside of the file. It may be called by several goroutines.
func (f *remoteFile) read(ctx context.Context, p []byte, at int64) (n int, err error) {
	err = f.persist(ctx, func() (bool, error) {
		got, err := f.once(ctx, p[n:], at+int64(n))
		n += got
		return got >= leastProgress, err
	})
	return n, err
}

// once asks once.
func (f *remoteFile) once(ctx context.Context, p []byte, at int64) (n int, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := time.AfterFunc(f.times.silence, func() { cancel(fmt.Errorf("less than %d bytes have come in %v", leastProgress, f.times.silence)) })
	defer silent.Stop()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
	}()
	body, err := f.from.ReadRange(ctx, at, int64(len(p)))
	if err != nil {
		return 0, err
	}
	defer func() { _ = body.Close() }() // only read
	silent.Reset(f.times.silence)
	since := 0
	for empty := 0; n < len(p); {
		got, err := body.Read(p[n:])
		n += got
		if since += got; since >= leastProgress {
			silent.Reset(f.times.silence)
			since = 0
		}
		if empty++; got > 0 {
			empty = 0
		}
		switch {
		case n == len(p):
		case err == io.EOF:
			return n, fmt.Errorf("a response breaks off at byte %d of %d: %w", at+int64(n), f.info.Size, io.ErrUnexpectedEOF)
		case err != nil:
			return n, err
		case empty == 100:
			return n, io.ErrNoProgress
		}
	}
	return n, nil
}

// Read reads on.
func (f *remoteFile) Read(p []byte) (int, error) {
	if f.at >= f.info.Size {
		return 0, io.EOF
	}
	f.ask()
	first := f.ahead[0]
	select {
	case <-first.ready:
	case <-f.ctx.Done():
		return 0, errStopped
	}
	begin := f.at - first.at
	if begin >= int64(first.n) && len(p) > 0 {
		return 0, first.err
	}
	n := copy(p, first.data[begin:first.n])
	f.at += int64(n)
	return n, nil
}

// ask makes the pieces that come next be on their way.
func (f *remoteFile) ask() {
	for len(f.ahead) > 0 && f.ahead[0].end() <= f.at {
		f.recycle(f.ahead[0])
		f.ahead = f.ahead[1:]
	}
	if len(f.ahead) == 0 && f.next != f.at {
		f.next, f.size = f.at, firstPiece
	}
	for len(f.ahead) < piecesAhead && f.next < f.info.Size {
		p := &piece{at: f.next, data: f.room(min(f.size, f.info.Size-f.next)), ready: make(chan struct{})}
		var ctx context.Context
		ctx, p.stop = context.WithCancel(f.ctx)
		f.fetching.Go(func() {
			p.n, p.err = f.read(ctx, p.data, p.at)
			close(p.ready)
		})
		f.ahead = append(f.ahead, p)
		f.next = p.end()
		f.size = min(2*f.size, mostPiece)
	}
}

// recycle keeps a piece's memory, if nobody writes to it any more.
func (f *remoteFile) recycle(p *piece) {
	p.stop()
	select {
	case <-p.ready:
		if len(p.data) == mostPiece {
			f.spare = append(f.spare, p.data)
		}
	default:
	}
}

func (f *remoteFile) room(n int64) []byte {
	if last := len(f.spare) - 1; n == mostPiece && last >= 0 {
		p := f.spare[last]
		f.spare = f.spare[:last]
		return p
	}
	return make([]byte, n)
}

func (p *piece) end() int64 { return p.at + int64(len(p.data)) }

// drop gives up the pieces that are on their way.
func (f *remoteFile) drop() {
	for _, p := range f.ahead {
		p.stop()
	}
	f.ahead = nil
}

// Seek within what was asked for already costs nothing.
func (f *remoteFile) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += f.at
	case io.SeekEnd:
		offset += f.info.Size
	}
	if offset < 0 {
		return f.at, errors.New("seek before the beginning")
	}
	if len(f.ahead) > 0 && (offset < f.ahead[0].at || offset >= f.next) {
		f.drop()
	}
	f.at = offset
	return offset, nil
}

// ReadAt is a request of its own; it may be called by several goroutines.
func (f *remoteFile) ReadAt(p []byte, at int64) (n int, err error) {
	if at >= f.info.Size {
		return 0, io.EOF
	}
	want := p[:min(int64(len(p)), f.info.Size-at)]
	if n, err = f.read(f.ctx, want, at); err == nil && n < len(p) {
		err = io.EOF
	}
	return n, err
}

func (f *remoteFile) Close() error {
	f.drop()
	f.stop()
	f.fetching.Wait()
	return f.from.Close()
}

func (f *remoteFile) Stat() (fs.FileInfo, error) { return remoteInfo{f}, nil }

// remoteInfo describes a remoteFile. Sys is its SourceInfo.
type remoteInfo struct{ f *remoteFile }

func (i remoteInfo) Name() string       { return path.Base(i.f.name) }
func (i remoteInfo) Size() int64        { return i.f.info.Size }
func (i remoteInfo) Mode() fs.FileMode  { return 0o444 }
func (i remoteInfo) ModTime() time.Time { return i.f.info.ModTime }
func (i remoteInfo) IsDir() bool        { return false }
func (i remoteInfo) Sys() any           { return i.f.info }

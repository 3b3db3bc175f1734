package archive

import (
	"context"
	"errors"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/digest"
)

// The tests are external, because package sourcetest imports this package. These names give them
// access to internals.

const (
	FirstPiece  = firstPiece
	PiecesAhead = piecesAhead
	MinUncopied = minUncopied
)

// OpenRemote opens a Source that has not been open before.
func OpenRemote(ctx context.Context, name string, open openSource, times sourceTimes) (*remoteFile, error) {
	return openRemote(ctx, name, open, times, remoteOptions{requests: &Requests{}})
}

// ReopenRemote opens a Source that has been open before, and watches its requests.
func ReopenRemote(ctx context.Context, name string, open openSource, times sourceTimes,
	requests *Requests) (*remoteFile, error) {
	return openRemote(ctx, name, open, times, remoteOptions{again: true, requests: requests})
}

// DefaultTimes are the times of every source.
var DefaultTimes = defaultSourceTimes

// Times returns times with the given pause between tries and the given limit for a silent response.
// A request gives up after 6 tries.
func Times(backoff, silence time.Duration) sourceTimes { return sourceTimes{backoff, silence, 0} }

// RetryAfter returns the error of a server that asks to wait.
func RetryAfter(err error, wait time.Duration) error { return retryAfter{err, wait} }

// AskedToWait returns the time that an error asks to wait, or 0.
func AskedToWait(err error) time.Duration {
	var asked retryAfter
	errors.As(err, &asked)
	return asked.wait
}

// Offset returns the offset of the next read.
func (f *remoteFile) Offset() int64 { return f.ahead.at }

// Await waits until all requested pieces have come.
func (f *remoteFile) Await() {
	for _, p := range f.ahead.pieces {
		<-p.ready
	}
}

// MinMapped is the size of the smallest part that ReadPieces copies from a mapping.
const MinMapped = minMapped

// CopyMapped copies a part of shard 0 from its mapping, without asking whether it is in memory. It
// returns false if there is no mapping.
func (r *Reader) CopyMapped(p []byte, at int64) bool {
	if r.enter(0) != nil || r.mapped == nil {
		return false
	}
	return r.mapped.try(func() { copy(p, r.mapped.bytes[at:][:len(p)]) })
}

// SumMapped is CopyMapped by the code that also computes digests.
func (r *Reader) SumMapped(p []byte, at int64) bool {
	if r.enter(0) != nil || r.mapped == nil {
		return false
	}
	key, sums := digest.NewKey(), make([]uint64, digest.Count(len(p)))
	return r.mapped.try(func() { key.Copy(p, r.mapped.bytes[at:][:len(p)], sums) })
}

// Mapped returns the mapping of shard 0.
func (r *Reader) Mapped() []byte {
	if r.enter(0) != nil || r.mapped == nil {
		return nil
	}
	return r.mapped.bytes
}

// RowName returns the name of a row of the last of several Parquet files.
func RowName(image string, rowNames bool, paths ...string) string {
	a := &Archive{config: Config{RowNames: rowNames}}
	for _, p := range paths {
		a.shards = append(a.shards, Shard{Path: p})
	}
	return a.rowName(a.stem(len(paths)-1), image, 7)
}

// DeviceWindow is the size of the parts of a mapping that are registered.
const DeviceWindow = deviceWindow

// DeviceLooks is the number of parts for which DeviceBytes looks at the file once.
const DeviceLooks = deviceLooks

// Holding reports whether the mappings are not closed.
func (m *Mappings) Holding() bool { return !m.held.closed() }

// AwaitRegistrar waits until all asked windows are registered or refused.
func (m *Mappings) AwaitRegistrar() { m.held.registrar.Wait() }

// ForgetRefusal makes a refusal older than refusalTime.
func (m *Mappings) ForgetRefusal() {
	m.held.mu.Lock()
	defer m.held.mu.Unlock()
	m.held.refused = m.held.refused.Add(-refusalTime)
}

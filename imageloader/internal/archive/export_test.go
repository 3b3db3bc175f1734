package archive

import (
	"errors"
	"time"
)

// The tests of remote files use package sourcetest, which imports this one: so they are external,
// and see these parts of the inside.

const (
	FirstPiece  = firstPiece
	PiecesAhead = piecesAhead
)

var OpenRemote = openRemote

// DefaultTimes are those of every source.
var DefaultTimes = defaultSourceTimes

// Times are those of a source whose requests are tried again after backoff, and end after silence.
// It gives up after 6 tries.
func Times(backoff, silence time.Duration) sourceTimes { return sourceTimes{backoff, silence, 0} }

// RetryAfter is the error of a server that asks to wait.
func RetryAfter(err error, wait time.Duration) error { return retryAfter{err, wait} }

// AskedToWait is how long an error asks to wait; 0: it does not.
func AskedToWait(err error) time.Duration {
	var asked retryAfter
	errors.As(err, &asked)
	return asked.wait
}

// Offset is where the file is read next.
func (f *remoteFile) Offset() int64 { return f.at }

// Await waits until the pieces have come that were asked for.
func (f *remoteFile) Await() {
	for _, p := range f.ahead {
		<-p.ready
	}
}

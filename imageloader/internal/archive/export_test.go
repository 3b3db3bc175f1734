package archive

import "time"

// The tests of remote files use package sourcetest, which imports this one: so they are external,
// and see these parts of the inside.

const (
	FirstPiece  = firstPiece
	PiecesAhead = piecesAhead
)

var OpenRemote = openRemote

// Times are those of a source whose requests are tried again after backoff, and end after silence.
func Times(backoff, silence time.Duration) sourceTimes { return sourceTimes{backoff, silence} }

// Offset is where the file is read next.
func (f *remoteFile) Offset() int64 { return f.at }

// Await waits until the pieces have come that were asked for.
func (f *remoteFile) Await() {
	for _, p := range f.ahead {
		<-p.ready
	}
}

package archive

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
)

// Error reports damage in the archive itself. The members after the damage can't be read. The
// samples before it have been delivered.
type Error struct {
	File     string
	Member   string // the last member whose header was read, or ""
	Position int    // number of members that were read
	Offset   int64  // in the (uncompressed) tar stream; 0 in a zip or a directory
	Err      error
}

func (e *Error) Error() string {
	if e.Position == 0 {
		return fmt.Sprintf("imageloader: %s: %v", e.File, e.Err)
	}
	if e.Offset == 0 {
		return fmt.Sprintf("imageloader: %s: at or after member %d, %q: %v", e.File, e.Position, e.Member, e.Err)
	}
	return fmt.Sprintf("imageloader: %s: at or after member %d, %q, byte %d of the tar stream: %v",
		e.File, e.Position, e.Member, e.Offset, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

var (
	// ErrSourceChanged reports that an archive has been replaced since it was opened.
	ErrSourceChanged = errors.New("it has changed since it was opened: open the loader again")

	// ErrStopped reports a read that stopped because the context has ended. The caller reports the
	// context's own error instead.
	ErrStopped = errors.New("imageloader: stopped")
)

// trailing reports bytes after the last member of a gzip file that are neither another member nor
// padding.
type trailing struct{ at int64 } // offset of these bytes in the file

func (e trailing) Error() string      { return "bytes behind the last gzip member" }
func (trailing) Is(target error) bool { return target == gzip.ErrHeader }

// explainTrailing says how many bytes of a file are trailing, and how to remove them.
func explainTrailing(err error, size int64) error {
	var e trailing
	if !errors.As(err, &e) || size <= e.at {
		return err
	}
	return fmt.Errorf("%d bytes follow the last gzip member, such as a signature, or they are a damaged member: "+
		"if `gzip -t` of the file names nothing else, cut them off with `truncate -s %d FILE`%w", size-e.at,
		e.at, quietly{err})
}

// Explain rewords an error of a decompressor or of archive/tar for users.
func Explain(err error) error {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF), err == io.EOF:
		return fmt.Errorf("the file is cut off: %w: fetch it again", io.ErrUnexpectedEOF)
	case errors.Is(err, tar.ErrHeader):
		return fmt.Errorf("damaged header, or not a tar archive: %w", err)
	case errors.Is(err, gzip.ErrChecksum):
		return fmt.Errorf("the bytes differ from their checksum: %w", err)
	case errors.Is(err, zstd.ErrWindowSizeExceeded):
		return fmt.Errorf("its zstd window is over %d MiB: pack it from a file, or without --long: %w",
			maxZstdWindow>>20, err)
	case errors.Is(err, zstd.ErrMagicMismatch):
		return fmt.Errorf("bytes follow the last zstd frame, or a frame is damaged (zstd -t checks the file): %w", err)
	}
	return err
}

// StopCause returns the context's cause if err only reports that the context is done. Otherwise it
// returns err.
func StopCause(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil && (errors.Is(err, ErrStopped) || errors.Is(err, ctx.Err())) {
		return CauseAfter(ctx, FailureOf(err))
	}
	return err
}

// CauseAfter returns the cause of the context's end. failure is the error of a request that was
// still being retried, or nil. If there is one, the returned error names it.
func CauseAfter(ctx context.Context, failure error) error {
	if failure == nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("%w; the last request failed: %v", context.Cause(ctx), failure)
}

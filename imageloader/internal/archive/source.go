package archive

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"

	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/safefile"
)

// Source is an archive that is not a local file, such as an object in a store or a file on an HTTP
// server. Config.OpenSource opens it (imageloader's Options.OpenSource). Package imageloader/blob
// has a Source for S3, Google Cloud Storage and Azure.
//
// A Source makes each request once. Its caller retries, reads ahead and sets timeouts.
type Source interface {
	// Info describes the version that was opened.
	Info() SourceInfo
	// ReadRange reads n bytes (at least 1) starting at offset. The caller asks only for bytes
	// within the archive. The bytes must be of the opened version: if another version has replaced
	// it, ReadRange returns ErrSourceChanged. ReadRange must be safe for concurrent use. Reads must
	// fail once ctx is done, even if ReadRange has already returned. The caller always closes the
	// reader.
	//
	// A reader may return io.EOF before the end of the range, but not before the first byte. The
	// caller then requests the rest at once. If the connection breaks, the reader must return
	// another error, such as io.ErrUnexpectedEOF.
	//
	// After an error the caller requests the range again, at least 6 times and for at least 2
	// minutes, with growing pauses. It does not retry an error that is (errors.Is)
	// ErrSourceChanged, fs.ErrNotExist, fs.ErrPermission or errors.ErrUnsupported.
	ReadRange(ctx context.Context, offset, n int64) (io.ReadCloser, error)
	Close() error
}

// SourceInfo identifies a version of an archive.
type SourceInfo struct {
	Size int64 // bytes
	// ModTime is the time of the last write, or the zero value if it is unknown. The index of a
	// plain .tar is only reused if ModTime is known.
	ModTime time.Time
	Version string // the store's name for this version, for example an ETag; "": none
}

// changed compares two descriptions of a file, or of all shards of an archive. If they describe
// different versions, it returns an error that wraps ErrSourceChanged and names the difference.
// Otherwise it returns nil.
func changed(path string, now, before SourceInfo) error {
	var difference string
	switch {
	case now.Size != before.Size:
		difference = fmt.Sprintf("has %d bytes, and had %d", now.Size, before.Size)
	case !now.ModTime.Equal(before.ModTime):
		difference = fmt.Sprintf("was last written at %s, and before at %s",
			now.ModTime.UTC().Format(time.RFC3339Nano), before.ModTime.UTC().Format(time.RFC3339Nano))
	case now.Version != before.Version:
		difference = fmt.Sprintf("has the version %.80q, and had %.80q", now.Version, before.Version)
	default:
		return nil
	}
	if IsURL(path) {
		difference += " (servers that share a name need the same Last-Modified)"
	}
	return fmt.Errorf("it %s: %w", difference, ErrSourceChanged)
}

// IsURL reports whether path has a scheme.
func IsURL(path string) bool {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-."
	scheme, _, found := strings.Cut(path, "://")
	return found && scheme != "" && strings.Trim(scheme, letters) == ""
}

// Shown returns the path of an archive or a shard as messages show it. It removes secrets from a
// URL.
func Shown(path string) string { return printable.Archive(path) }

// opener returns a function that opens shards until ctx is done. Its parameter again says that the
// archive was open before.
func (c Config) opener(ctx context.Context) func(path string, again bool) (File, error) {
	if c.OpenFile == nil {
		c.OpenFile = openFile
	}
	if c.OpenSource == nil {
		c.OpenSource = func(ctx context.Context, url string) (Source, error) { return OpenHTTP(ctx, url, nil) }
	}
	if c.Requests == nil {
		c.Requests = &Requests{}
	}
	return func(path string, again bool) (File, error) {
		if !IsURL(path) {
			return c.OpenFile(path)
		}
		f, err := openRemote(ctx, path, c.OpenSource, defaultSourceTimes,
			remoteOptions{again: again, requests: c.Requests})
		if err != nil {
			return nil, err
		}
		return f, nil
	}
}

// OpenFile opens a regular file or a URL in the same way as an archive's shards.
func OpenFile(ctx context.Context, path string, c Config) (File, error) {
	if IsURL(path) {
		return c.opener(ctx)(path, c.Again)
	}
	return safefile.Open(path)
}

// Changed compares an open archive with an earlier description of it, an Info. If they describe
// different versions, it returns an error that wraps ErrSourceChanged and names the difference.
// Otherwise it returns nil.
func (a *Archive) Changed(before fs.FileInfo) error {
	if was, ok := before.(totalInfo); ok && len(was.shards) == len(a.shards) {
		for i := range a.shards { // a shard's new time may be before the latest of all
			s := &a.shards[i]
			if err := changed(s.Path, describe(s.Info), describe(was.shards[i].Info)); err != nil {
				return fmt.Errorf("imageloader: %s: %w", Shown(s.Path), err)
			}
		}
		return nil
	}
	if err := changed(a.path, describe(a.info), describe(before)); err != nil {
		return fmt.Errorf("imageloader: %s: %w", a.Path(), err)
	}
	return nil
}

// describe returns the description of a local file, a remote file, or all shards of an archive.
func describe(info fs.FileInfo) SourceInfo {
	s := SourceInfo{Size: info.Size(), ModTime: info.ModTime()}
	switch sys := info.Sys().(type) {
	case SourceInfo:
		s.Version = sys.Version
	case string:
		s.Version = sys
	}
	return s
}

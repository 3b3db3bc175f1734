package archive

import (
	"context"
	"io"
	"io/fs"
	"strings"
	"time"

	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/safefile"
)

// Source is an archive that is not a local file: an object of a store, or a file of an HTTP server.
// Config.OpenSource opens it (imageloader's Options.OpenSource); package imageloader/blob has one
// for S3, Google Cloud Storage and Azure.
//
// A Source makes each request once. Its caller retries, reads ahead and sets timeouts.
type Source interface {
	// Info describes the version that was opened.
	Info() SourceInfo
	// ReadRange reads n bytes (at least 1) from offset on, all of which are in the archive. They
	// must be of the version that was opened. If there is another version by now, ReadRange returns
	// ErrSourceChanged. Several goroutines may call it at the same time. When ctx ends, which may
	// be after the call, reading ends with an error. The caller closes the reader in any case.
	//
	// After an error the caller requests the range again, at least 6 times and for at least 2
	// minutes, with growing pauses, unless the error is (errors.Is) ErrSourceChanged,
	// fs.ErrNotExist, fs.ErrPermission or errors.ErrUnsupported.
	ReadRange(ctx context.Context, offset, n int64) (io.ReadCloser, error)
	Close() error
}

// SourceInfo tells the versions of an archive apart.
type SourceInfo struct {
	Size int64 // bytes
	// ModTime is the time of the last write, or the zero value if it is unknown. The index of a
	// plain .tar is only reused if ModTime is known.
	ModTime time.Time
	Version string // the store's name for this version, for example an ETag; "": none
}

func (i SourceInfo) same(other SourceInfo) bool {
	return i.Size == other.Size && i.Version == other.Version && i.ModTime.Equal(other.ModTime)
}

// IsURL reports whether path has a scheme.
func IsURL(path string) bool {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-."
	scheme, _, found := strings.Cut(path, "://")
	return found && scheme != "" && strings.Trim(scheme, letters) == ""
}

// Shown returns the path of an archive or a shard as messages show it: of a URL without what may be
// secret.
func Shown(path string) string {
	if strings.Contains(path, "://") { // also in braces, which IsURL does not look into
		return printable.URL(path)
	}
	return path
}

// opener returns a function that opens shards as long as ctx lasts.
func (c Config) opener(ctx context.Context) func(path string) (File, error) {
	if c.OpenFile == nil {
		c.OpenFile = openFile
	}
	if c.OpenSource == nil {
		c.OpenSource = func(ctx context.Context, url string) (Source, error) { return OpenHTTP(ctx, url, nil) }
	}
	return func(path string) (File, error) {
		if !IsURL(path) {
			return c.OpenFile(path)
		}
		f, err := openRemote(ctx, path, c.OpenSource, defaultSourceTimes)
		if err != nil {
			return nil, err
		}
		return f, nil
	}
}

// OpenFile opens a regular file, or what is behind a URL, as the shards of an archive are opened.
func OpenFile(ctx context.Context, path string, c Config) (File, error) {
	if IsURL(path) {
		return c.opener(ctx)(path)
	}
	return safefile.Open(path)
}

// SameFile reports whether two descriptions, of a file or of all shards of an archive, are of the
// same version.
func SameFile(now, before fs.FileInfo) bool {
	return now.Size() == before.Size() && now.ModTime().Equal(before.ModTime()) && version(now) == version(before)
}

// version returns the version of a Source, or the versions of an archive's shards together. It
// returns "" for a file.
func version(info fs.FileInfo) string {
	switch s := info.Sys().(type) {
	case SourceInfo:
		return s.Version
	case string:
		return s
	}
	return ""
}

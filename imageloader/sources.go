package imageloader

import (
	"context"
	"net/http"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Source is an archive that is not a local file: an object of a store, or a file of an HTTP
// server. [Options.OpenSource] opens it; package imageloader/blob has one for S3, Google Cloud
// Storage and Azure.
//
// It has three methods, each of which makes a request once. The loader adds retries, reading ahead
// and timeouts.
//
//	Info() SourceInfo
//	ReadRange(ctx context.Context, offset, n int64) (io.ReadCloser, error)
//	Close() error
//
// Info describes the version that was opened. ReadRange reads n bytes (at least 1) from offset on,
// all of which are in the archive, of that version. If there is another version by now, ReadRange
// returns [ErrSourceChanged]. Several goroutines may call it at once. When ctx ends, which may be
// after the call, reading ends with an error. The loader closes the reader in any case. A reader
// that ends with io.EOF after at least one byte has sent a shorter range, and the loader requests
// the rest at once; a broken connection is another error, such as io.ErrUnexpectedEOF. After an
// error the loader requests the range again, at least 6 times and for at least 2 minutes, with
// growing pauses, unless the error is (errors.Is) ErrSourceChanged, fs.ErrNotExist,
// fs.ErrPermission or errors.ErrUnsupported.
type Source = archive.Source

// SourceInfo tells the versions of an archive apart.
type SourceInfo = archive.SourceInfo

// ErrSourceChanged reports that an archive has been replaced since it was opened.
var ErrSourceChanged = archive.ErrSourceChanged

// OpenHTTP opens the file behind an http(s) URL, whose server has to answer range requests. It is
// what a loader without [Options.OpenSource] calls; a program's own OpenSource can call it with a
// client of its own, which adds credentials for example. client may be nil; the caller keeps it.
func OpenHTTP(ctx context.Context, url string, client *http.Client) (Source, error) {
	return archive.OpenHTTP(ctx, url, client)
}

package imageloader

import (
	"context"
	"net/http"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Source is an archive that is not a local file, such as an object of a store or a file of an HTTP
// server. [Options.OpenSource] opens it. Package imageloader/blob has a Source for S3, Google Cloud
// Storage and Azure.
//
// It has three methods, and each call makes one request. The loader adds retries, reading ahead and
// timeouts.
//
//	Info() SourceInfo
//	ReadRange(ctx context.Context, offset, n int64) (io.ReadCloser, error)
//	Close() error
//
// Info describes the opened version. ReadRange reads n bytes (at least 1) of that version, starting
// at offset. The whole range is in the archive. If the archive has been replaced by another
// version, ReadRange returns [ErrSourceChanged]. It must be safe for concurrent use. When ctx ends,
// reading must fail, even if ReadRange has already returned. The loader always closes the reader.
//
// A reader may return io.EOF before the end of the range, but not before the first byte. The loader
// then requests the rest at once. If the connection breaks, the reader returns another error, such
// as io.ErrUnexpectedEOF. After an error the loader requests the range again, at least 6 times and
// for at least 2 minutes, with growing pauses. It does not retry an error that is (errors.Is)
// ErrSourceChanged, fs.ErrNotExist, fs.ErrPermission or errors.ErrUnsupported.
type Source = archive.Source

// SourceInfo identifies a version of an archive.
type SourceInfo = archive.SourceInfo

// ErrSourceChanged reports that an archive has been replaced since it was opened.
var ErrSourceChanged = archive.ErrSourceChanged

// OpenHTTP opens the file at an http(s) URL. The server must answer range requests. A loader
// without [Options.OpenSource] calls it. A program's OpenSource can call it with a custom client,
// for example one that adds credentials. client may be nil. The caller still owns client.
func OpenHTTP(ctx context.Context, url string, client *http.Client) (Source, error) {
	return archive.OpenHTTP(ctx, url, client)
}

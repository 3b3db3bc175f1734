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
// A Source makes each request once. The loader adds retries, reading ahead and timeouts.
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

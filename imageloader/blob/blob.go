// Package blob opens archives that are objects of an object store: Amazon S3 and S3-compatible
// stores (s3://bucket/key), Google Cloud Storage (gs://bucket/key), and Azure Blob Storage
// (azblob://container/key). It is a separate module, so that programs that do not use it do not
// depend on the stores' client libraries.
//
//	loader, err := imageloader.Open("s3://bucket/train-{000..015}.tgz?region=eu-central-1",
//		imageloader.Options{OpenSource: blob.Open, ...})
//
// Credentials come from the same places as for the stores' own tools. The parameters of a URL are
// the parameters of gocloud.dev/blob. Every request is for the version of the object that was
// opened, so replacing an object while a loader has it open is an error.
package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"path"
	"strings"

	"cloud.google.com/go/storage"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	azblob "github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blob"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"gocloud.dev/blob"
	_ "gocloud.dev/blob/azureblob" // this import and the next three register URL schemes
	_ "gocloud.dev/blob/fileblob"
	_ "gocloud.dev/blob/gcsblob"
	_ "gocloud.dev/blob/s3blob"
	"gocloud.dev/gcerrors"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/printable"
)

// Open opens the object at a URL. Use it as [imageloader.Options.OpenSource]. The path after the
// bucket's name is the object's key, with the usual escapes of a URL. Besides the stores' schemes,
// Open accepts file:///path/to/an/archive, http and https.
func Open(ctx context.Context, name string) (imageloader.Source, error) {
	if strings.HasPrefix(name, "http://") || strings.HasPrefix(name, "https://") {
		return imageloader.OpenHTTP(ctx, name, nil)
	}
	u, key, err := split(name)
	if err != nil {
		return nil, err
	}
	// The clients keep the context to request tokens later, so it must outlive this call.
	bucket, err := blob.OpenBucket(context.WithoutCancel(ctx), u.String())
	if err != nil {
		return nil, lasting{printable.Error(err), errors.ErrUnsupported} // opening a bucket makes no request
	}
	s, err := open(ctx, bucket, key)
	if err != nil {
		_ = bucket.Close() // err is the more useful error
		return nil, err
	}
	s.owned = true
	return s, nil
}

// In returns an [imageloader.Options.OpenSource] for the objects of a bucket that the program has
// opened itself, with its own credentials or client. Of a URL it uses only the path after the host,
// as the object's key. The caller keeps ownership of the bucket.
func In(bucket *blob.Bucket) func(ctx context.Context, name string) (imageloader.Source, error) {
	return func(ctx context.Context, name string) (imageloader.Source, error) {
		u, err := parse(name)
		if err != nil {
			return nil, err
		}
		s, err := open(ctx, bucket, strings.TrimPrefix(u.Path, "/"))
		if err != nil {
			return nil, err
		}
		return s, nil
	}
}

// parse parses a URL. The error of package url quotes the URL, which may contain secrets.
func parse(name string) (*url.URL, error) {
	u, err := url.Parse(name)
	if err != nil {
		return nil, lasting{fmt.Errorf("%s is no valid URL", printable.URL(name)), errors.ErrUnsupported}
	}
	return u, nil
}

// split splits the URL of an object into its bucket's URL and its key.
func split(name string) (bucket *url.URL, key string, err error) {
	u, err := parse(name)
	if err != nil {
		return nil, "", err
	}
	u.RawPath = ""
	if u.Scheme == "file" {
		u.Path, key = path.Split(u.Path)
	} else {
		u.Path, key = "", strings.TrimPrefix(u.Path, "/")
	}
	if key == "" {
		return nil, "", lasting{fmt.Errorf("%s names no object: it should be like %s://bucket/key",
			printable.URL(name), u.Scheme), errors.ErrUnsupported}
	}
	return u, key, nil
}

// lasting wraps the error err with a kind of error that the loader does not retry.
type lasting struct{ err, kind error }

func (e lasting) Error() string   { return e.err.Error() }
func (e lasting) Unwrap() []error { return []error{e.err, e.kind} }

// failed wraps a store's error with its kind.
func failed(err error) error {
	err = printable.Error(err) // Azure's signature is in the URL of every request
	switch gcerrors.Code(err) {
	case gcerrors.NotFound:
		return lasting{err, fs.ErrNotExist}
	case gcerrors.PermissionDenied:
		return lasting{err, fs.ErrPermission}
	case gcerrors.FailedPrecondition:
		return fmt.Errorf("%w (%w)", imageloader.ErrSourceChanged, err)
	case gcerrors.Unimplemented, gcerrors.InvalidArgument:
		return lasting{err, errors.ErrUnsupported}
	}
	return err
}

// source is an object of a bucket.
type source struct {
	bucket *blob.Bucket
	owned  bool
	key    string
	info   imageloader.SourceInfo

	generation int64 // version number of Google Cloud Storage; 0 for other stores
}

func open(ctx context.Context, bucket *blob.Bucket, key string) (*source, error) {
	a, err := bucket.Attributes(ctx, key)
	if err != nil {
		return nil, failed(err)
	}
	s := &source{bucket: bucket, key: key, info: imageloader.SourceInfo{Size: a.Size, ModTime: a.ModTime,
		Version: a.ETag}}
	var object storage.ObjectAttrs
	if a.As(&object) {
		s.generation = object.Generation
		s.info.Version = fmt.Sprint(object.Generation)
	}
	return s, nil
}

func (s *source) Info() imageloader.SourceInfo { return s.info }

func (s *source) Close() error {
	if s.owned {
		return s.bucket.Close()
	}
	return nil
}

func (s *source) ReadRange(ctx context.Context, offset, n int64) (io.ReadCloser, error) {
	matches := false
	r, err := s.bucket.NewRangeReader(ctx, s.key, offset, n,
		&blob.ReaderOptions{BeforeRead: func(as func(any) bool) error {
			matches = s.match(as)
			return nil
		}})
	if err != nil {
		return nil, failed(err)
	}
	// A store that cannot match versions reports which version it has sent.
	if r.Size() != s.info.Size || !matches && !r.ModTime().Equal(s.info.ModTime) {
		_ = r.Close() // only read
		return nil, imageloader.ErrSourceChanged
	}
	return r, nil
}

// match restricts a request to the version that was opened. It returns false if the store does not
// support such requests.
func (s *source) match(as func(any) bool) bool {
	var aws *s3.GetObjectInput
	var google **storage.ObjectHandle
	var azure *azblob.DownloadStreamOptions
	switch {
	case s.info.Version == "":
		return false
	case as(&aws):
		aws.IfMatch = &s.info.Version
	case as(&google):
		*google = (*google).If(storage.Conditions{GenerationMatch: s.generation})
	case as(&azure):
		etag := azcore.ETag(s.info.Version)
		azure.AccessConditions = &azblob.AccessConditions{ModifiedAccessConditions: &azblob.ModifiedAccessConditions{IfMatch: &etag}}
	default:
		return false
	}
	return true
}

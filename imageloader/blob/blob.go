// Package blob opens archives that are objects of a store: Amazon S3 and what speaks its language
// (s3://bucket/key), Google Cloud Storage (gs://bucket/key), Azure Blob Storage
// (azblob://container/key). It is a module of its own, so that who does not need it does not get
// the stores' client libraries.
//
//	loader, err := imageloader.Open("s3://bucket/train-{000..015}.tgz?region=eu-central-1", imageloader.Options{OpenSource: blob.Open, ...})
//
// Credentials are looked for where the stores' own tools look for them; parameters of a URL are
// those of gocloud.dev/blob. An object that is replaced while a loader has it open is an error:
// every request is for the version that was opened.
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
	_ "gocloud.dev/blob/azureblob" // the schemes of URLs
	_ "gocloud.dev/blob/fileblob"
	_ "gocloud.dev/blob/gcsblob"
	_ "gocloud.dev/blob/s3blob"
	"gocloud.dev/gcerrors"

	"github.com/torchstream/torchstream/imageloader"
)

// Open opens the object behind a URL: it is an [imageloader.Options.OpenSource]. What comes after
// the bucket's name is the object's key, escaped as in every URL. Beside the stores' schemes there
// are file:///path/to/an/archive, http and https.
func Open(ctx context.Context, name string) (imageloader.Source, error) {
	if strings.HasPrefix(name, "http://") || strings.HasPrefix(name, "https://") {
		return imageloader.OpenHTTP(ctx, name, nil)
	}
	u, key, err := split(name)
	if err != nil {
		return nil, err
	}
	// The clients keep the context, for tokens that they ask for later.
	bucket, err := blob.OpenBucket(context.WithoutCancel(ctx), u.String())
	if err != nil {
		return nil, lasting{err, errors.ErrUnsupported} // no request was made
	}
	s, err := open(ctx, bucket, key)
	if err != nil {
		_ = bucket.Close() // err says more
		return nil, err
	}
	s.owned = true
	return s, nil
}

// In returns an [imageloader.Options.OpenSource] for the objects of a bucket that the program has
// opened itself, with credentials or a client of its own. Of a URL only the key counts, which comes
// after the host. The bucket stays the caller's.
func In(bucket *blob.Bucket) func(ctx context.Context, name string) (imageloader.Source, error) {
	return func(ctx context.Context, name string) (imageloader.Source, error) {
		u, err := url.Parse(name)
		if err != nil {
			return nil, lasting{err, errors.ErrUnsupported}
		}
		s, err := open(ctx, bucket, strings.TrimPrefix(u.Path, "/"))
		if err != nil {
			return nil, err
		}
		return s, nil
	}
}

// split makes the URL of a bucket and a key out of that of an object.
func split(name string) (bucket *url.URL, key string, err error) {
	u, err := url.Parse(name)
	if err != nil {
		return nil, "", lasting{err, errors.ErrUnsupported}
	}
	u.RawPath = ""
	if u.Scheme == "file" {
		u.Path, key = path.Split(u.Path)
	} else {
		u.Path, key = "", strings.TrimPrefix(u.Path, "/")
	}
	if key == "" {
		return nil, "", lasting{fmt.Errorf("%s names no object: it should be like %s://bucket/key", name, u.Scheme), errors.ErrUnsupported}
	}
	return u, key, nil
}

// lasting is err, of a kind that the loader does not try again.
type lasting struct{ err, kind error }

func (e lasting) Error() string   { return e.err.Error() }
func (e lasting) Unwrap() []error { return []error{e.err, e.kind} }

// failed gives a store's error its kind.
func failed(err error) error {
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

// source is an object.
type source struct {
	bucket *blob.Bucket
	owned  bool
	key    string
	info   imageloader.SourceInfo

	generation int64 // of Google Cloud Storage; 0: it is another store
}

func open(ctx context.Context, bucket *blob.Bucket, key string) (*source, error) {
	a, err := bucket.Attributes(ctx, key)
	if err != nil {
		return nil, failed(err)
	}
	s := &source{bucket: bucket, key: key, info: imageloader.SourceInfo{Size: a.Size, ModTime: a.ModTime, Version: a.ETag}}
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
	r, err := s.bucket.NewRangeReader(ctx, s.key, offset, n, &blob.ReaderOptions{BeforeRead: func(as func(any) bool) error {
		matches = s.match(as)
		return nil
	}})
	if err != nil {
		return nil, failed(err)
	}
	// Other stores say what they have sent.
	if r.Size() != s.info.Size || !matches && !r.ModTime().Equal(s.info.ModTime) {
		_ = r.Close() // only read
		return nil, imageloader.ErrSourceChanged
	}
	return r, nil
}

// match makes a request one for the version that was opened, if the store knows such requests.
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

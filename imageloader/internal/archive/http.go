package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// OpenHTTP opens the file behind an http(s) URL, whose server must answer range requests. client
// may be nil, and stays the caller's.
func OpenHTTP(ctx context.Context, address string, client *http.Client) (Source, error) {
	if !strings.HasPrefix(address, "http://") && !strings.HasPrefix(address, "https://") {
		scheme, _, _ := strings.Cut(address, "://")
		return nil, fmt.Errorf("%s:// is not opened without Options.OpenSource "+
			"(package imageloader/blob has one for s3, gs, azblob and file): %w", scheme, errors.ErrUnsupported)
	}
	s := &httpSource{url: address, client: client, idle: func() {}}
	if client == nil {
		transport, ok := http.DefaultTransport.(*http.Transport)
		if ok {
			transport = transport.Clone()
		} else { // a program's own scheme
			transport = &http.Transport{Proxy: http.ProxyFromEnvironment}
		}
		transport.MaxIdleConnsPerHost = 2 * piecesAhead
		s.client, s.idle = &http.Client{Transport: transport}, transport.CloseIdleConnections
	}
	r, err := s.request(ctx, 0, 1)
	if err != nil {
		return nil, err
	}
	_ = r.Body.Close() // one byte
	if s.info, err = rangeInfo(r, 0); err != nil {
		return nil, err
	}
	return s, nil
}

// httpSource is a file behind a URL. Every response must be of the same version of the file (ETag,
// or length and time).
type httpSource struct {
	url    string
	client *http.Client
	idle   func() // closes connections
	info   SourceInfo
}

func (s *httpSource) Info() SourceInfo { return s.info }

func (s *httpSource) Close() error {
	s.idle()
	return nil
}

func (s *httpSource) ReadRange(ctx context.Context, offset, n int64) (io.ReadCloser, error) {
	r, err := s.request(ctx, offset, n)
	if err != nil {
		return nil, err
	}
	info, err := rangeInfo(r, offset)
	if err == nil && !info.same(s.info) {
		err = ErrSourceChanged
	}
	if err != nil {
		_ = r.Body.Close() // err says more
		return nil, err
	}
	return r.Body, nil
}

// request requests n bytes from offset on. Any other response is an error.
func (s *httpSource) request(ctx context.Context, offset, n int64) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url, nil)
	if err != nil {
		// The error of the parser quotes the URL, in which there may be secrets.
		return nil, fmt.Errorf("it is no valid URL%w", quietly{errors.ErrUnsupported})
	}
	request.Header.Set("Range", "bytes="+strconv.FormatInt(offset, 10)+"-"+strconv.FormatInt(offset+n-1, 10))
	request.Header.Set("Accept-Encoding", "identity") // the file's own bytes
	r, err := s.client.Do(request)
	if named := (*url.Error)(nil); errors.As(err, &named) {
		err = &url.Error{Op: named.Op, URL: Shown(named.URL), Err: named.Err}
	}
	if err != nil {
		return nil, err
	}
	var kind error
	switch {
	case r.StatusCode == http.StatusPartialContent:
		return r, nil
	case r.StatusCode == http.StatusOK, r.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		err = fmt.Errorf("the server does not answer range requests (%s, or the file is empty): download the archive%w",
			r.Status, quietly{errors.ErrUnsupported})
	case r.StatusCode == http.StatusTooManyRequests, r.StatusCode == http.StatusRequestTimeout, r.StatusCode >= 500:
		err = fmt.Errorf("the server answers %s", r.Status)
		if wait := waitOf(r, time.Now()); wait > 0 {
			err = retryAfter{err, wait}
		}
	case r.StatusCode == http.StatusNotFound:
		kind = fs.ErrNotExist
	case r.StatusCode == http.StatusUnauthorized, r.StatusCode == http.StatusForbidden:
		kind = fs.ErrPermission
	default:
		kind = errors.ErrUnsupported
	}
	if kind != nil {
		err = fmt.Errorf("the server answers %s: %w", r.Status, kind)
	}
	_ = r.Body.Close() // err says more
	return nil, err
}

// waitOf returns the time that a response's Retry-After, in seconds or as a date, asks to wait. It
// returns 0 without a Retry-After.
func waitOf(r *http.Response, now time.Time) time.Duration {
	text := r.Header.Get("Retry-After")
	if seconds, err := strconv.ParseUint(text, 10, 32); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if date, err := http.ParseTime(text); err == nil {
		return max(0, date.Sub(now))
	}
	return 0
}

// quietly is an error that errors.Is finds, but that adds no text.
type quietly struct{ error }

func (quietly) Error() string   { return "" }
func (q quietly) Unwrap() error { return q.error }

// rangeInfo returns the version of the file that a response belongs to. The response must begin at
// offset.
func rangeInfo(r *http.Response, offset int64) (SourceInfo, error) {
	var first, last, size int64
	text := r.Header.Get("Content-Range")
	_, err := fmt.Sscanf(text, "bytes %d-%d/%d", &first, &last, &size)
	if err != nil || first != offset || last < first || size <= last {
		return SourceInfo{}, fmt.Errorf("the server answers with the range %q to a request for the bytes from %d on%w",
			text, offset, quietly{errors.ErrUnsupported})
	}
	changed, _ := http.ParseTime(r.Header.Get("Last-Modified")) // the zero time without the header
	return SourceInfo{Size: size, ModTime: changed, Version: r.Header.Get("ETag")}, nil
}

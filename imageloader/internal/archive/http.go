package archive

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// OpenHTTP opens the file at an http(s) URL. The server must support range requests. client may be
// nil. The caller still owns client.
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
		} else { // the program's own RoundTripper
			transport = &http.Transport{Proxy: http.ProxyFromEnvironment}
		}
		transport.MaxIdleConnsPerHost = 2 * piecesAhead
		s.client, s.idle = &http.Client{Transport: transport}, transport.CloseIdleConnections
	}
	answer, err := s.answer(ctx, 0, 1)
	if err != nil {
		return nil, err
	}
	_ = answer.Close() // only one byte is unread
	s.info = answer.info
	return s, nil
}

// httpSource is a file behind a URL. All responses must be of the same version of the file: see
// rangeInfo.
type httpSource struct {
	url    string
	client *http.Client
	idle   func() // closes idle connections
	info   SourceInfo
}

func (s *httpSource) Info() SourceInfo { return s.info }

func (s *httpSource) Close() error {
	s.idle()
	return nil
}

// ReadRange may read fewer than n bytes, because a server may send less than requested (RFC 9110,
// 15.3.7).
func (s *httpSource) ReadRange(ctx context.Context, offset, n int64) (io.ReadCloser, error) {
	answer, err := s.answer(ctx, offset, n)
	if err != nil {
		return nil, err
	}
	if err := changed(s.url, answer.info, s.info); err != nil {
		_ = answer.Close() // err says more
		return nil, err
	}
	return answer, nil
}

// answer requests n bytes starting at offset, and checks the headers of the response.
func (s *httpSource) answer(ctx context.Context, offset, n int64) (*httpAnswer, error) {
	r, err := s.request(ctx, offset, n)
	if err != nil {
		return nil, err
	}
	answer := &httpAnswer{body: r.Body}
	if answer.info, answer.left, err = rangeInfo(r, offset); err == nil {
		err = answer.refuseEncoded(r)
	}
	if err != nil {
		_ = r.Body.Close() // err says more
		return nil, err
	}
	return answer, nil
}

// httpAnswer is the body of a 206 response. It returns io.EOF only at the end of the range that the
// header announces.
type httpAnswer struct {
	body io.ReadCloser
	info SourceInfo
	left int64
}

func (a *httpAnswer) Read(p []byte) (int, error) {
	if a.left == 0 {
		return 0, io.EOF
	}
	n, err := a.body.Read(p[:min(int64(len(p)), a.left)])
	if a.left -= int64(n); err == io.EOF && a.left > 0 {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

func (a *httpAnswer) Close() error { return a.body.Close() }

// refuseEncoded returns an error if the body is compressed for the transfer although its
// Content-Range counts bytes of the file. Some servers send a Content-Encoding header for a .tgz
// that names the file's own compression. That is harmless: the body then has as many bytes as the
// header announces. A compressed range may have as many bytes by chance, but it is a whole gzip
// stream.
func (a *httpAnswer) refuseEncoded(r *http.Response) error {
	encoding := r.Header.Get("Content-Encoding")
	if encoding == "" || strings.EqualFold(encoding, "identity") {
		return nil
	}
	body, err := io.ReadAll(io.LimitReader(a.body, a.left+1))
	if err != nil {
		return err
	}
	if int64(len(body)) != a.left || inflatesTo(body, a.left) {
		return fmt.Errorf("the server compresses ranges of the file (%s with Content-Encoding %.20q, "+
			"though asked for identity): "+
			"switch off compression for this file, or download the archive%w", r.Status, encoding,
			quietly{errors.ErrUnsupported})
	}
	a.body = struct {
		io.Reader
		io.Closer
	}{bytes.NewReader(body), a.body}
	return nil
}

// inflatesTo reports whether body is a gzip stream of n bytes.
func inflatesTo(body []byte, n int64) bool {
	z, err := gzip.NewReader(bytes.NewReader(body))
	if err != nil {
		return false
	}
	got, err := io.Copy(io.Discard, io.LimitReader(z, n+1))
	return err == nil && got == n
}

// request requests n bytes starting at offset. Any response other than 206 is an error.
func (s *httpSource) request(ctx context.Context, offset, n int64) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url, nil)
	if err != nil {
		// The parser's error quotes the URL, which may contain secrets.
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
	if r.StatusCode == http.StatusPartialContent {
		return r, nil
	}
	err = refusal(r)
	_ = r.Body.Close() // err says more
	return nil, err
}

// refusal returns the error for a response that is not a 206.
func refusal(r *http.Response) error {
	switch code := r.StatusCode; {
	case code == http.StatusOK, code == http.StatusRequestedRangeNotSatisfiable:
		return fmt.Errorf("the server does not answer range requests (%s, or the file is empty): "+
			"download the archive%w",
			r.Status, quietly{errors.ErrUnsupported})
	case code == http.StatusTooManyRequests, code == http.StatusRequestTimeout, code >= 500:
		err := fmt.Errorf("the server answers %s", r.Status)
		if wait := waitOf(r, time.Now()); wait > 0 {
			return retryAfter{err, wait}
		}
		return err
	case code == http.StatusNotFound:
		return fmt.Errorf("the server answers %s: %w", r.Status, fs.ErrNotExist)
	}
	kind := errors.ErrUnsupported
	if r.StatusCode == http.StatusUnauthorized || r.StatusCode == http.StatusForbidden {
		kind = fs.ErrPermission
	}
	code := storeCode(r.Body)
	switch {
	case slices.Contains(expiryCodes, code), kind == fs.ErrPermission && r.Request.URL.RawQuery != "":
		return fmt.Errorf("the server answers %s%s: if the signature of the URL has expired, "+
			"open the archive again with a new URL, or resume with it%w", r.Status, code.shown(),
			quietly{fs.ErrPermission})
	case code != "":
		return fmt.Errorf("the server answers %s%s%w", r.Status, code.shown(), quietly{kind})
	}
	return fmt.Errorf("the server answers %s: %w", r.Status, kind)
}

// storeError is an object store's error code, such as NoSuchBucket, or "".
type storeError string

// expiryCodes are the names that S3, Google Cloud Storage and Azure give to an expired signature or
// token. S3 answers AccessDenied for a signed URL that has expired.
var expiryCodes = []storeError{"AccessDenied", "AuthenticationFailed", "ExpiredToken", "InvalidToken",
	"RequestExpired", "TokenRefreshRequired"}

// storeCodes matches the code in the XML or JSON of an error. The surrounding text may contain
// secrets.
var storeCodes = regexp.MustCompile(
	`<Code>\s*([A-Za-z0-9.]{1,64})\s*</Code>|"(?:code|Code|__type)"\s*:\s*"([A-Za-z0-9.]{1,64})"`)

// storeCode finds the error code in the first bytes of a body.
func storeCode(body io.Reader) storeError {
	text, _ := io.ReadAll(io.LimitReader(body, 4<<10)) // what has arrived is enough
	m := storeCodes.FindSubmatch(text)
	if m == nil {
		return ""
	}
	return storeError(m[1]) + storeError(m[2])
}

func (c storeError) shown() string {
	if c == "" {
		return ""
	}
	return " (" + string(c) + ")"
}

// waitOf returns the time for which a response's Retry-After, in seconds or as a date, asks the
// client to wait. It returns 0 if there is no Retry-After.
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

// quietly wraps an error for errors.Is without adding its text to the message.
type quietly struct{ error }

func (quietly) Error() string   { return "" }
func (q quietly) Unwrap() error { return q.error }

// rangeInfo returns the version of the file that a response belongs to, and the length of the
// response. The response must start at offset. The version is the Last-Modified, or else the ETag.
// The ETag comes second because servers behind one name may send different ETags for the same file:
// weak ones, or ones that contain an inode number.
func rangeInfo(r *http.Response, offset int64) (_ SourceInfo, length int64, err error) {
	var first, last, size int64
	text := r.Header.Get("Content-Range")
	_, err = fmt.Sscanf(text, "bytes %d-%d/%d", &first, &last, &size)
	if err != nil || first != offset || last < first || size <= last {
		return SourceInfo{}, 0, fmt.Errorf(
			"the server answers with the range %q to a request for the bytes from %d on%w",
			text, offset, quietly{errors.ErrUnsupported})
	}
	info := SourceInfo{Size: size}
	if info.ModTime, err = http.ParseTime(r.Header.Get("Last-Modified")); err != nil {
		info.ModTime, info.Version = time.Time{}, r.Header.Get("ETag")
	}
	return info, last + 1 - first, nil
}

package setup

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/torchstream/torchstream/internal/printable"
)

var hexSHA256 = regexp.MustCompile(`^[0-9a-f]{64}$`)

// fetch returns the path of the release archive after verifying its checksum. An archive at an
// https URL is downloaded to the given path; the caller removes it.
func (o Options) fetch(ctx context.Context, downloaded string) (string, error) {
	u, err := url.Parse(o.From)
	remote := err == nil && u.Scheme != "" && u.Scheme != "file"
	if remote && u.Scheme != "https" {
		return "", fmt.Errorf("-from %s: want a path, or a URL that begins with https:// or file://",
			printable.URL(o.From))
	}
	archive := o.From
	if err == nil && u.Scheme == "file" {
		archive = u.Path
	}
	want := strings.ToLower(o.SHA256)
	if want == "" {
		var text []byte
		if remote {
			text, err = get(ctx, http.DefaultClient, checksumOf(u), "")
		} else {
			if _, err := os.Stat(archive); err != nil {
				return "", fmt.Errorf("the archive: %w", err)
			}
			text, err = os.ReadFile(archive + ".sha256")
		}
		if err != nil {
			return "", fmt.Errorf("the archive's checksum: %w: give it with -sha256", err)
		}
		want, _, _ = strings.Cut(strings.ToLower(string(text)), " ")
	}
	if !hexSHA256.MatchString(strings.TrimSpace(want)) {
		return "", fmt.Errorf("the archive's checksum is %q, and a SHA-256 has 64 hexadecimal digits", want)
	}
	if remote {
		return downloaded, download(ctx, http.DefaultClient, o.From, downloaded, strings.TrimSpace(want), lines(o.Log))
	}
	return archive, verify(archive, strings.TrimSpace(want))
}

// checksumOf returns the URL of an archive's checksum. It keeps the archive URL's query, which may
// contain credentials that are valid for both files.
func checksumOf(archive *url.URL) string {
	u := *archive
	u.Path += ".sha256"
	if u.RawPath != "" { // set if the URL's path has special escapes
		u.RawPath += ".sha256"
	}
	return u.String()
}

// verify compares a file's SHA-256 with want, which may be only the first digits.
func verify(path, want string) error {
	have, err := sumOf(path)
	if err != nil {
		return err
	}
	if len(want) < 8 || !strings.HasPrefix(have, want) {
		return fmt.Errorf("%s has the SHA-256 %s, and %s is wanted: it is damaged or another file", path, have, want)
	}
	return nil
}

// sumOf returns the SHA-256 of a file.
func sumOf(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// invalid is the error for an invalid URL. The error of package url would quote the whole text,
// including a password.
func invalid(address string) error { return fmt.Errorf("%s is no valid URL", printable.URL(address)) }

// request sends a request and returns the response if its status is one of statuses.
func request(ctx context.Context, client *http.Client, address, accept string, header http.Header,
	statuses ...int) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, invalid(address)
	}
	if header != nil {
		r.Header = header
	}
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	answer, err := client.Do(r)
	var named *url.Error
	if errors.As(err, &named) {
		return nil, fmt.Errorf("%s: %w", printable.URL(named.URL), named.Err)
	}
	if err != nil {
		return nil, err
	}
	for _, s := range statuses {
		if answer.StatusCode == s {
			return answer, nil
		}
	}
	answer.Body.Close()
	return nil, &statusError{printable.URL(address), answer.StatusCode}
}

type statusError struct {
	address string
	status  int
}

func (e *statusError) Error() string {
	return fmt.Sprintf("%s: %d %s", e.address, e.status, http.StatusText(e.status))
}

// get downloads a small document.
func get(ctx context.Context, client *http.Client, address, accept string) ([]byte, error) {
	ctx, end, stop := watch(ctx)
	defer stop()
	answer, err := request(ctx, client, address, accept, nil, http.StatusOK)
	if err != nil {
		return nil, silenced(ctx, address, err)
	}
	defer answer.Body.Close()
	const limit = 64 << 20
	text, err := io.ReadAll(io.LimitReader(awake{answer.Body, end}, limit))
	if err == nil && len(text) == limit {
		err = fmt.Errorf("%s is longer than %d bytes", printable.URL(address), limit)
	}
	return text, silenced(ctx, address, err)
}

// attempts is the maximum number of times that a download is started or continued.
const attempts = 5

// Progress is called with the number of bytes of a file that are downloaded, and the file's size.
// The size is 0 if the server does not report it.
type Progress func(name string, have, size int64)

var leadingSHA256 = regexp.MustCompile(`^[0-9a-f]{8,64}$`)

// Download writes the contents of an http or https URL to a file whose SHA-256 begins with want, at
// least 8 hexadecimal digits. It does nothing if path already is a file with that checksum. An
// interrupted download leaves path.part, and the next call continues that file. Download removes a
// downloaded file with another checksum. It returns all digits of the file's SHA-256.
func Download(ctx context.Context, address, path, want string, report Progress) (sum string, err error) {
	if u, err := url.Parse(address); err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" {
		return "", fmt.Errorf("%s: want a URL that begins with https:// or http://", printable.URL(address))
	}
	if want = strings.ToLower(want); !leadingSHA256.MatchString(want) {
		return "", fmt.Errorf("SHA-256 %q: want 8 to 64 hexadecimal digits", want)
	}
	if err := download(ctx, http.DefaultClient, address, path, want, report); err != nil {
		return "", err
	}
	return sumOf(path)
}

// download implements Download.
func download(ctx context.Context, client *http.Client, address, path, want string, report Progress) error {
	if verify(path, want) == nil {
		return nil
	}
	part := path + ".part"
	var err error
	for n := range attempts {
		info, statErr := os.Stat(part)
		resumed := statErr == nil && info.Size() > 0
		if err = continued(ctx, client, address, part, report); err == nil {
			if err = verify(part, want); err == nil {
				return os.Rename(part, path)
			}
			os.Remove(part)
			if !resumed {
				return fmt.Errorf("%s: %w", printable.URL(address), err) // the server has a different file
			}
		}
		var status *statusError
		if ctx.Err() != nil || errors.As(err, &status) && status.status < 500 {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(n) * time.Second):
		}
	}
	return err
}

// silence is the maximum time without data from a server.
const silence = time.Minute

// watch returns a context, and the timer that cancels the context after a minute. Each read of data
// restarts the timer: see awake.
func watch(ctx context.Context) (watched context.Context, end *time.Timer, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	end = time.AfterFunc(silence, func() { cancel(fmt.Errorf("the server has sent nothing for %v", silence)) })
	return ctx, end, func() {
		end.Stop()
		cancel(nil)
	}
}

// silenced replaces err by the reason for which a watched context was cancelled, if the
// cancellation caused err.
func silenced(ctx context.Context, address string, err error) error {
	if errors.Is(err, context.Canceled) {
		return fmt.Errorf("%s: %w", printable.URL(address), context.Cause(ctx))
	}
	return err
}

// awake is a reader of a response. Every read restarts the timer that cancels the request.
type awake struct {
	io.Reader
	end *time.Timer
}

func (a awake) Read(p []byte) (int, error) {
	a.end.Reset(silence)
	return a.Reader.Read(p)
}

// reportEvery is the time between two lines about the progress of a download.
const reportEvery = 15 * time.Second

// progress is a reader that reports how much of a file has been downloaded.
type progress struct {
	io.Reader
	report     Progress
	name       string
	have, size int64 // bytes; size 0 is unknown
}

func (p *progress) Read(b []byte) (int, error) {
	n, err := p.Reader.Read(b)
	p.have += int64(n)
	p.report(p.name, p.have, p.size)
	return n, err
}

// lines returns a Progress that writes a line from time to time.
func lines(log io.Writer) Progress { return linesAfter(log, time.Now().Add(reportEvery)) }

func linesAfter(log io.Writer, next time.Time) Progress {
	return func(name string, have, size int64) {
		now := time.Now()
		if !now.After(next) {
			return
		}
		next = now.Add(reportEvery)
		of := ""
		if size > 0 {
			of = fmt.Sprintf(" of %d", size/1e6)
		}
		fmt.Fprintf(log, "setup: downloading %s: %d%s MB\n", name, have/1e6, of)
	}
}

// continued downloads the missing tail of a partly downloaded file.
func continued(ctx context.Context, client *http.Client, address, part string, report Progress) error {
	ctx, end, stop := watch(ctx)
	defer stop()
	f, err := os.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o666)
	if err != nil {
		return err
	}
	defer f.Close()
	at, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	header := http.Header{}
	if at > 0 {
		header.Set("Range", fmt.Sprintf("bytes=%d-", at))
	}
	answer, err := request(ctx, client, address, "", header, http.StatusOK, http.StatusPartialContent,
		http.StatusRequestedRangeNotSatisfiable)
	if err != nil {
		return silenced(ctx, address, err)
	}
	defer answer.Body.Close()
	switch answer.StatusCode {
	case http.StatusRequestedRangeNotSatisfiable:
		return nil // the file is complete, or the server has another file: the checksum decides
	case http.StatusOK:
		if err := f.Truncate(0); err != nil {
			return err
		}
		at = 0
	}
	body := &progress{Reader: awake{answer.Body, end}, report: report,
		name: strings.TrimSuffix(filepath.Base(part), ".part"), have: at}
	if answer.ContentLength > 0 {
		body.size = at + answer.ContentLength
	}
	_, err = io.Copy(f, body)
	return errors.Join(silenced(ctx, address, err), f.Close())
}

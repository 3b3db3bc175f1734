package archive_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// lastModified is the Last-Modified of the servers of these tests.
var lastModified = time.Unix(1e9, 0).UTC().Format(http.TimeFormat)

// rangeServer answers each range request for data with the function answer. The range starts at
// first and has at most n bytes. k counts the requests from 1.
func rangeServer(t *testing.T, data []byte,
	answer func(w http.ResponseWriter, k int, first, last int)) *httptest.Server {
	var count atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var first, last int
		if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last); err != nil {
			t.Errorf("the range %q: %v, want no error", r.Header.Get("Range"), err)
		}
		answer(w, int(count.Add(1)), first, min(last, len(data)-1))
	}))
	t.Cleanup(server.Close)
	return server
}

// announce sends the header of a 206 for the bytes from first to last of size.
func announce(w http.ResponseWriter, first, last, size int) {
	w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, size))
	w.WriteHeader(http.StatusPartialContent)
}

// readAll opens a URL, and reads the file in order and at random. A second try would wait for an
// hour.
func readAll(t *testing.T, server *httptest.Server, r *archive.Requests) ([]byte, error) {
	f, err := archive.ReopenRemote(t.Context(), server.URL+"/a.tar?token=SECRET", byHTTP(server.Client()),
		archive.Times(time.Hour, time.Minute), r)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(f)
	if err != nil {
		return data, err
	}
	part := make([]byte, len(data)/2)
	if _, err := f.ReadAt(part, int64(len(data)/3)); err != nil || !bytes.Equal(part, data[len(data)/3:][:len(part)]) {
		t.Errorf("at random: error %v, or other bytes than in order", err)
	}
	return data, nil
}

func randomBytes(n int) []byte {
	data := make([]byte, n)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	return data
}

// A server may send fewer bytes than requested (RFC 9110, 15.3.7). That is not a failure: the
// loader requests the rest at once. A second try would pause for an hour, so a wait would not end.
func TestShortRangeIsProgress(t *testing.T) {
	archivetest.Within(t)
	data := randomBytes(3_000_000)
	for _, most := range []int{1 << 20, 64 << 10, 1000} {
		var log bytes.Buffer
		server := rangeServer(t, data, func(w http.ResponseWriter, _, first, last int) {
			last = min(last, first+most-1)
			w.Header().Set("Last-Modified", lastModified)
			announce(w, first, last, len(data))
			_, _ = w.Write(data[first : last+1])
		})
		requests := &archive.Requests{Logger: slog.New(slog.NewTextHandler(&log, nil))}
		got, err := readAll(t, server, requests)
		if err != nil || !bytes.Equal(got, data) || log.Len() > 0 {
			t.Errorf("at most %d bytes a response: got %d bytes, error %v, log %q, want all %d bytes and no log", most, len(got), err,
				&log, len(data))
		}
	}
}

// A body that is compressed for the transfer does not have the bytes of its Content-Range. A
// Content-Encoding header without such a compression, which servers send for the encoding of the
// file itself, does no harm.
func TestCompressedRangeIsNamed(t *testing.T) {
	data := randomBytes(300_000)
	compress := func(w http.ResponseWriter, p []byte) {
		z := gzip.NewWriter(w)
		_, _ = z.Write(p)
		_ = z.Close()
	}
	for _, c := range []struct {
		name, encoding string
		least          int // shorter ranges are not compressed
		compress       bool
		want           string
	}{
		{"every response", "gzip", 0, true, `Content-Encoding "gzip"`},
		{"responses of 1 KiB", "gzip", 1024, true, `Content-Encoding "gzip"`},
		{"the name alone", "x-gzip", 0, false, ""},
		{"identity", "identity", 0, false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := rangeServer(t, data, func(w http.ResponseWriter, _, first, last int) {
				w.Header().Set("Last-Modified", lastModified)
				if last+1-first >= c.least {
					w.Header().Set("Content-Encoding", c.encoding)
				}
				announce(w, first, last, len(data))
				if p := data[first : last+1]; c.compress && len(p) >= c.least {
					compress(w, p)
				} else {
					_, _ = w.Write(p)
				}
			})
			got, err := readAll(t, server, &archive.Requests{})
			if c.want == "" && (err != nil || !bytes.Equal(got, data)) {
				t.Errorf("got %d bytes, error %v, want all %d bytes", len(got), err, len(data))
			}
			if c.want != "" && (!strings.Contains(fmt.Sprint(err), c.want) ||
				!errors.Is(err, errors.ErrUnsupported) || len(got) > 0) {
				t.Errorf("got %d bytes, error %v, want none and an error with %s", len(got), err, c.want)
			}
		})
	}
}

// A compressed range may have as many bytes as it announces by chance.
func TestCompressedRangeOfTheSameLengthIsNamed(t *testing.T) {
	data := randomBytes(300)
	var packed bytes.Buffer
	for packed.Len() != len(data) { // zeros make the data longer, but not what it compresses to
		data = append(data, 0)
		packed.Reset()
		z := gzip.NewWriter(&packed)
		_, _ = z.Write(data)
		_ = z.Close()
	}
	server := rangeServer(t, data, func(w http.ResponseWriter, _, first, last int) {
		w.Header().Set("Last-Modified", lastModified)
		body := data[first : last+1]
		if len(body) == len(data) {
			w.Header().Set("Content-Encoding", "gzip")
			body = packed.Bytes()
		}
		announce(w, first, last, len(data))
		_, _ = w.Write(body)
	})
	got, err := readAll(t, server, &archive.Requests{})
	if !strings.Contains(fmt.Sprint(err), `Content-Encoding "gzip"`) || len(got) > 0 {
		t.Errorf("got %d bytes, error %v, want none and an error with Content-Encoding", len(got), err)
	}
}

// Servers that share a name may have different ETags for the same file. Last-Modified and length
// decide. The ETag decides only without a Last-Modified.
func TestVersionOfFileOverHTTP(t *testing.T) {
	data := randomBytes(300_000)
	for _, c := range []struct {
		name    string
		headers func(k int) (etag, modified string)
		want    string // of the error; "": none
	}{
		{"weak ETags of replicas", func(k int) (string, string) {
			return fmt.Sprintf(`W/"r%d"`, k%3),
				lastModified
		}, ""},
		{"strong ETags of replicas", func(k int) (string, string) {
			return fmt.Sprintf(`"r%d"`, k%3),
				lastModified
		}, ""},
		{"one ETag and no time", func(int) (string, string) { return `"r"`, "" }, ""},
		{"neither", func(int) (string, string) { return "", "" }, ""},
		{"ETags and no time", func(k int) (string, string) { return fmt.Sprintf(`"r%d"`, k), "" },
			`it has the version "\"r2\"", and had "\"r1\""`},
		{"another time", func(k int) (string, string) {
			return `"r"`, time.Unix(1e9+int64(k), 0).UTC().Format(http.TimeFormat)
		}, "was last written at 2001-09-09T01:46:42Z, and before at 2001-09-09T01:46:41Z (servers that " +
			"share a name need the same Last-Modified)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := rangeServer(t, data, func(w http.ResponseWriter, k, first, last int) {
				// ranges that are read ahead come in any order
				etag, modified := c.headers(min(k, 2))
				if k > 2 && c.want == "" {
					etag, modified = c.headers(k)
				}
				w.Header().Set("ETag", etag)
				w.Header().Set("Last-Modified", modified)
				announce(w, first, last, len(data))
				_, _ = w.Write(data[first : last+1])
			})
			got, err := readAll(t, server, &archive.Requests{})
			if c.want == "" && (err != nil || !bytes.Equal(got, data)) {
				t.Errorf("got %d bytes, error %v, want all %d bytes", len(got), err, len(data))
			}
			if c.want != "" && (!strings.Contains(fmt.Sprint(err), c.want) ||
				!errors.Is(err, archive.ErrSourceChanged)) {
				t.Errorf("error %v, want one with %s", err, c.want)
			}
		})
	}
}

// The error of an expired signature has the store's code, and advises to use another URL. The text
// around the code may contain secrets and is not shown.
func TestExpiredSignatureIsNamed(t *testing.T) {
	const xml = `<?xml version="1.0"?><Error><Code>%s</Code><Message>SECRET</Message></Error>`
	const advice = "open the archive again with a new URL, or resume with it"
	for _, c := range []struct {
		status      int
		query, body string
		want        string
		kind        error
	}{
		{400, "?sig=SECRET", fmt.Sprintf(xml, "ExpiredToken"),
			"400 Bad Request (ExpiredToken): if the signature of the URL has expired, " + advice, fs.ErrPermission},
		{403, "?sig=SECRET", fmt.Sprintf(xml, "AccessDenied"),
			"403 Forbidden (AccessDenied): if the signature", fs.ErrPermission},
		{403, "?sig=SECRET", "SECRET", "403 Forbidden: if the signature of the URL has expired, " + advice,
			fs.ErrPermission},
		{401, "", `{"error": {"code": "RequestExpired", "message": "SECRET"}}`,
			"401 Unauthorized (RequestExpired): if the signature", fs.ErrPermission},
		{403, "", fmt.Sprintf(xml, "QuotaExceeded"), "403 Forbidden (QuotaExceeded)", fs.ErrPermission},
		{403, "", "SECRET", "403 Forbidden: permission denied", fs.ErrPermission},
		{400, "?sig=SECRET", fmt.Sprintf(xml, "InvalidURI"), "400 Bad Request (InvalidURI)", errors.ErrUnsupported},
		{400, "", fmt.Sprintf(xml, "SECRET SECRET"), "400 Bad Request: unsupported operation", errors.ErrUnsupported},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(c.status)
			_, _ = io.WriteString(w, c.body)
		}))
		_, err := archive.OpenHTTP(t.Context(), server.URL+"/a.tar"+c.query, server.Client())
		server.Close()
		if text := fmt.Sprint(err); !strings.Contains(text, c.want) || strings.Contains(text, "SECRET") ||
			!errors.Is(err, c.kind) ||
			!strings.Contains(c.want, "signature") && strings.Contains(text, "signature") {
			t.Errorf("%d with %q: error %v, want %q, which is %v", c.status, c.body, err, c.want, c.kind)
		}
	}
}

// An archive that has been open before waits for its server as long on opening as on reading. Both
// warn at the second try and then every 10 s.
func TestReopeningWaitsLikeReading(t *testing.T) {
	busy := errors.New("busy")
	for _, c := range []struct {
		name  string
		fails func(n int) bool // the n-th request
		want  string           // of the error; "": none
		warns int
	}{
		{"is back in 8 s", func(n int) bool { return n < 8 }, "", 1},
		{"is back in a minute", func(n int) bool { return n < 12 }, "", 5},
		{"stays away", func(int) bool { return true }, "busy (18 tries in 1m52.7s)", 11},
	} {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			requests := &archive.Requests{Logger: slog.New(slog.NewTextHandler(&log, nil))}
			s := &failing{began: time.Now(), fail: func(n int) error {
				if c.fails(n) {
					return busy
				}
				return nil
			}}
			f, err := archive.ReopenRemote(t.Context(), "store://SECRET@x", s.open, archive.DefaultTimes, requests)
			if err == nil {
				f.Close()
			}
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: error %v after %v, want %q", c.name, err, time.Since(s.began), c.want)
			}
			if got := strings.Count(log.String(), "level=WARN"); got != c.warns ||
				!strings.Contains(log.String(), "archive=store://x tries=1 failures=1 error=busy") {
				t.Errorf("%s: %d warnings, want %d, the first of the first try:\n%s", c.name, got, c.warns, &log)
			}
		})
	}
}

// A context that ends while a request is repeated stops it with ErrStopped. The error includes the
// request's failure. A request that succeeds clears the failure.
func TestFailureIsKeptWhenTheContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		busy := errors.New("busy")
		requests := &archive.Requests{}
		s := &failing{began: time.Now(), fail: func(n int) error {
			if n > 1 && n != 4 {
				return busy
			}
			return nil
		}}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		f, err := archive.ReopenRemote(ctx, "store://x", s.open, archive.DefaultTimes, requests)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.ReadAt(make([]byte, 10), 0); err != nil || requests.Failure() != nil { // the fourth try
			t.Errorf("error %v, failure %v, want none of a request that succeeded", err, requests.Failure())
		}
		_, err = f.ReadAt(make([]byte, 10), 0)
		if !errors.Is(err, archive.ErrStopped) || !errors.Is(archive.FailureOf(err), busy) ||
			!errors.Is(requests.Failure(), busy) {
			t.Errorf("error %v with the failure %v, and %v is kept: want ErrStopped with %v", err,
				archive.FailureOf(err), requests.Failure(), busy)
		}
	})
}

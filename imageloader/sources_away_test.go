package imageloader

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/sourcetest"
)

// outage is a store that is unreachable until a given time.
type outage struct {
	*sourcetest.Store
	mu    sync.Mutex
	until time.Time
	url   string // URL that is unreachable; "": all
}

func (o *outage) away(url string, until time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.until, o.url = until, url
}

func (o *outage) open(ctx context.Context, url string) (archive.Source, error) {
	o.mu.Lock()
	away := time.Now().Before(o.until) && (o.url == "" || o.url == url)
	o.mu.Unlock()
	if away {
		return nil, sourcetest.ErrBusy
	}
	return o.OpenSource(ctx, url)
}

// awayLoader opens a loader of two shards in a store. It is closed when the test ends.
func awayLoader(t *testing.T, log *bytes.Buffer) (*Loader, *outage) {
	t.Helper()
	store := &outage{Store: sourcetest.New(1, map[string]sourcetest.Object{
		"store://user:SECRET@b/0.tar": {Data: string(archivetest.Numbered(t, 0, 1, 2, 3)), Version: "1"},
		"store://user:SECRET@b/1.tar": {Data: string(archivetest.Numbered(t, 4, 5, 6, 7)), Version: "1"},
	})}
	o := Options{BatchSize: 2, Transform: Eval(4, 4), NoIndex: true, OpenSource: store.open,
		Logger: slog.New(slog.NewTextHandler(log, nil))}
	l, err := open(t.Context(), "store://user:SECRET@b/{0,1}.tar", o, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	return l, store
}

// samplesOf counts the samples of an epoch, up to its error.
func samplesOf(ctx context.Context, l *Loader, epoch int) (n int, err error) {
	for batch, err := range l.Epoch(ctx, epoch) {
		if err != nil {
			return n, err
		}
		n += batch.N
	}
	return n, nil
}

// If a server is unreachable for less than two minutes between epochs, or when the next shard is
// opened, no epoch fails.
func TestServerOutageBetweenEpochsEndsNoEpoch(t *testing.T) {
	for _, url := range []string{"", "store://user:SECRET@b/1.tar"} {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			l, store := awayLoader(t, &log)
			defer l.Close()
			for epoch, away := range []time.Duration{0, 8 * time.Second, 100 * time.Second} {
				store.away(url, time.Now().Add(away))
				began := time.Now()
				if n, err := samplesOf(t.Context(), l, epoch); n != 8 || err != nil || time.Since(began) < away {
					t.Errorf("%q is away for %v: %d samples after %v, error %v, want 8 samples", url, away,
						n, time.Since(began), err)
				}
			}
			if text := log.String(); !strings.Contains(text, "request failed and is repeated") ||
				strings.Contains(text, "SECRET") {
				t.Errorf("want warnings without the secret, got\n%s", text)
			}
		})
	}
}

// If the context ends while a request is repeated, the epoch's error includes the request's
// failure.
func TestContextErrorNamesTheFailedRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		l, store := awayLoader(t, &log)
		defer l.Close()
		for _, away := range []time.Duration{time.Hour, 0} {
			store.away("", time.Now().Add(away))
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			if away == 0 {
				cancel()
			}
			_, err := samplesOf(ctx, l, 0)
			cancel()
			if err == nil {
				t.Fatalf("away for %v: got no error, want one", away)
			}
			named := strings.Contains(err.Error(), sourcetest.ErrBusy.Error()) &&
				strings.Contains(err.Error(), "store://b/0.tar")
			if named != (away > 0) || away > 0 && !errors.Is(err, context.DeadlineExceeded) ||
				strings.Contains(err.Error(), "SECRET") {
				t.Errorf("away for %v: error %v, want the context's, with the failure if the store is away", away, err)
			}
		}
	})
}

package index

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// errChaos is an error that a test causes.
var errChaos = errors.New("chaos")

// fakeCodec reports an image of 40 x 30 pixels for any bytes.
type fakeCodec struct{}

func (fakeCodec) Header([]byte) (imagecapi.Info, error) {
	return imagecapi.Info{Format: imagecapi.PNG, Width: 40, Height: 30, Components: 3, BitDepth: 8}, nil
}

// testConfig returns the Config of a loader with default options.
func testConfig() Config {
	return Config{
		MaxSampleBytes: 256 << 20,
		MaxPixels:      178_956_970,
		HoldBytes:      256 << 20,
		Codec:          fakeCodec{},
		Logger:         slog.New(slog.DiscardHandler),
	}
}

func openArchive(t testing.TB, path string) *archive.Archive {
	t.Helper()
	a, err := archive.Open(t.Context(), path, archive.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// tryOpen loads an archive's index, or makes it, like a loader.
func tryOpen(t testing.TB, path string, c Config) (*Index, error) {
	t.Helper()
	a := openArchive(t, path)
	defer func() { _ = a.Close() }()
	x, err := Load(a, c)
	if x == nil && err == nil {
		x, err = Build(a, c)
	}
	return x, err
}

func open(t testing.TB, path string, c Config) *Index {
	t.Helper()
	x, err := tryOpen(t, path, c)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func closeIndex(t testing.TB, x *Index) {
	t.Helper()
	if err := x.Close(); err != nil {
		t.Error(err)
	}
}

// indexed writes an archive and its index.
func indexed(t testing.TB, name string, data []byte) (path string) {
	t.Helper()
	path = archivetest.WriteFile(t, name, data)
	closeIndex(t, open(t, path, testConfig()))
	return path
}

// logged collects log lines.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) has(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), s)
}

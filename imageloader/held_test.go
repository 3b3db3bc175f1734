package imageloader

import (
	"archive/tar"
	"compress/gzip"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// heldVariable names the archive that a child process of TestHeldArchiveTakesItsSize loads, and the
// case.
const heldVariable = "TORCHSTREAM_TEST_HELD"

// heldArchive writes a .tar.gz of n samples of the given size in bytes, for the fakeCodec.
func heldArchive(t *testing.T, n, size int) string {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), "a.tgz"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
	}()
	z, err := gzip.NewWriterLevel(file, gzip.NoCompression)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(z)
	source := rand.NewChaCha8([32]byte{1})
	data := append([]byte(archivetest.Image("")), make([]byte, size)...)[:size]
	for i := range n {
		if _, err := io.ReadFull(source, data[len(archivetest.Image("")):]); err != nil {
			t.Fatal(err)
		}
		h := &tar.Header{Name: fmt.Sprintf("class%d/%05d.png", i%5, i), Size: int64(size), Mode: 0o644,
			Typeflag: tar.TypeReg}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return file.Name()
}

var garbage []byte

// loadHeld runs in a child process. It runs five epochs, and prints the process's peak of resident
// memory and the largest heap.
func loadHeld(t *testing.T, how, path string) {
	o := Options{BatchSize: 32, Transform: Eval(16, 16), Shuffle: true, Workers: 4, ShuffleBytes: 1 << 30}
	switch how {
	case "made index", "index":
		o.IndexFile = path + ".tsidx"
	case "first epoch":
		o.Classes = []string{"class0", "class1", "class2", "class3", "class4"}
	}
	l := openFake(t, path, o)
	heap := uint64(0)
	for epoch := range 5 {
		n := 0
		for b, err := range l.Epoch(t.Context(), epoch) {
			if err != nil {
				t.Fatal(err)
			}
			garbage = make([]byte, 1<<20) // a heap with much live memory would double
			if n += b.N; b.State.Batches()%64 == 0 {
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				heap = max(heap, m.HeapAlloc)
			}
		}
		if n != l.Len() {
			t.Errorf("%d samples of %d", n, l.Len())
		}
	}
	fmt.Println("held", peakBytes(t), heap)
}

// TestHeldArchiveTakesItsSize: an archive that is held in memory needs little more memory than its
// size over five epochs, and almost nothing of Go's heap. Each case is measured in a separate
// process.
func TestHeldArchiveTakesItsSize(t *testing.T) {
	if underRace {
		t.Skip("with the race detector compressed images lie in Go's heap")
	}
	if value := os.Getenv(heldVariable); value != "" {
		how, path, _ := strings.Cut(value, ":")
		loadHeld(t, how, path)
		return
	}
	const n, size = 3000, 100_000
	path := heldArchive(t, n, size)
	for _, c := range []struct {
		how  string
		peak float64 // in multiples of the archive's size
	}{
		{"no index", 1.25},   // Open reads it
		{"made index", 1.25}, // Open reads it, and writes an index
		{"index", 1.25},      // the first epoch reads it
		{"first epoch", 2.4}, // the first epoch reads it, and its shuffle buffer holds a second copy
	} {
		t.Run(c.how, func(t *testing.T) {
			child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestHeldArchiveTakesItsSize$",
				"-test.count=1")
			child.Env = append(os.Environ(), heldVariable+"="+c.how+":"+path)
			out, err := child.CombinedOutput()
			_, after, found := strings.Cut(string(out), "held ")
			var peak, heap int64
			if _, scanned := fmt.Sscan(after, &peak, &heap); err != nil || !found || scanned != nil {
				t.Fatalf("%v, %s, scanned %v, want no error, found = true, scanned = nil",
					err, out, scanned)
			}
			if _, err := os.Stat(path + ".tsidx"); c.how == "made index" && err != nil {
				t.Errorf("no index was written: %v", err)
			}
			t.Logf("%.2f times the archive at the peak, a heap of %.1f MB", float64(peak)/(n*size), float64(heap)/1e6)
			if float64(peak) > c.peak*n*size || heap > 32<<20 {
				t.Errorf("the peak is %d MB for an archive of %d MB, the heap %d MB, "+
					"want at most %.2f times the archive and 32 MB",
					peak>>20, n*size>>20, heap>>20, c.peak)
			}
		})
	}
}

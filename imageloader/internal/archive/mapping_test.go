package archive_test

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/digest"
)

// mappedTar writes a tar with a member of 100,000 bytes and returns its path and its bytes.
func mappedTar(t *testing.T, seed byte) (path string, file []byte) {
	t.Helper()
	data := make([]byte, 100_000)
	for i := range data {
		data[i] = byte(i>>8) ^ byte(i)*7 ^ seed
	}
	file = archivetest.Tar(t, archivetest.Member{Name: "a/1.jpg", Data: string(data)})
	path = filepath.Join(t.TempDir(), "a.tar")
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	return path, file
}

// mappedReader opens an archive with mappings.
func mappedReader(t *testing.T, path string, m *archive.Mappings) *archive.Reader {
	t.Helper()
	a, err := archive.Open(t.Context(), path, archive.Config{Mappings: m})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	r := archive.NewReader(a)
	t.Cleanup(r.Close)
	return r
}

// sameReads compares ReadPieces with ReadAt, for parts of all kinds.
func sameReads(t *testing.T, when string, r *archive.Reader, size int) {
	t.Helper()
	key := digest.NewKey()
	for _, n := range []int{1, 5000, archive.MinMapped, 40_000, 90_001} {
		for _, at := range []int{0, 1, 4096, max(0, size-n), max(0, size-n/2), size, size + 4096} {
			want, got := make([]byte, n), make([]byte, n)
			wantN, wantErr := r.ReadAt(0, want, int64(at))
			wantSums, sums := make([]uint64, digest.Count(n)), make([]uint64, digest.Count(n))
			key.Sum(want, wantSums)
			gotN, err := r.ReadPieces(0, got, int64(at), key, sums)
			if gotN != wantN || err != wantErr || !bytes.Equal(got[:gotN], want[:wantN]) ||
				err == nil && !slices.Equal(sums, wantSums) {
				t.Errorf("%s: %d bytes from %d: ReadPieces = %d, %v, same bytes: %v, digests %x; ReadAt = %d, %v, digests %x",
					when, n, at, gotN, err, bytes.Equal(got, want), sums, wantN, wantErr, wantSums)
			}
		}
	}
}

func TestReadPiecesEqualsReadAt(t *testing.T) {
	path, file := mappedTar(t, 1)
	m := archive.NewMappings()
	defer m.Close()
	r := mappedReader(t, path, m)
	sameReads(t, "mapped", r, len(file))
	if copied := r.CopyMapped(make([]byte, 50_000), 4000); copied != (runtime.GOOS == "linux") {
		t.Errorf("a part was copied from a mapping: %v, want %v", copied, runtime.GOOS == "linux")
	}
	sameReads(t, "mapped by another archive", mappedReader(t, path, m), len(file))
	sameReads(t, "without mappings", mappedReader(t, path, nil), len(file))
	r = mappedReader(t, path, m)
	m.Close()
	sameReads(t, "after Close", r, len(file))
}

// TestReadPiecesReadsAReplacedFile: a file that has replaced the mapped one is read, even if it has
// the same size and time.
func TestReadPiecesReadsAReplacedFile(t *testing.T) {
	path, file := mappedTar(t, 1)
	m := archive.NewMappings()
	defer m.Close()
	sameReads(t, "before", mappedReader(t, path, m), len(file))
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	other, want := mappedTar(t, 2)
	if err := os.Chtimes(other, info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other, path); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 50_000)
	sums := make([]uint64, digest.Count(len(got)))
	if n, err := mappedReader(t, path, m).ReadPieces(0, got, 4000, digest.NewKey(), sums); n != len(got) || err != nil {
		t.Errorf("ReadPieces = %d, %v, want %d, nil", n, err, len(got))
	}
	if !bytes.Equal(got, want[4000:54_000]) {
		t.Error("ReadPieces has read the file that was mapped first, want the file at the path")
	}
}

// TestTruncatedMappingIsNoCrash: reading a page that a mapped file has lost raises SIGBUS, by which
// a process ends unless it handles the signal.
func TestTruncatedMappingIsNoCrash(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("files are mapped on Linux only")
	}
	path, file := mappedTar(t, 1)
	m := archive.NewMappings()
	defer m.Close()
	r := mappedReader(t, path, m)
	if !r.CopyMapped(make([]byte, 50_000), 4000) {
		t.Fatal("CopyMapped of a whole file = false, want true")
	}
	if err := os.Truncate(path, 30_000); err != nil {
		t.Fatal(err)
	}
	if r.CopyMapped(make([]byte, 50_000), 4000) {
		t.Error("CopyMapped beyond the end of a truncated file = true, want false")
	}
	if r.SumMapped(make([]byte, 50_000), 4000) {
		t.Error("SumMapped beyond the end of a truncated file = true, want false")
	}
	if !r.CopyMapped(make([]byte, 20_000), 4000) {
		t.Error("CopyMapped of bytes that a truncated file still has = false, want true")
	}
	sameReads(t, "truncated", r, 30_000)
	sameReads(t, "truncated", r, len(file))
}

// TestMappingPassesOtherPanicsOn: only faults in the mapping are read errors.
func TestMappingPassesOtherPanicsOn(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("files are mapped on Linux only")
	}
	path, _ := mappedTar(t, 1)
	lost, _ := mappedTar(t, 2)
	m, other := archive.NewMappings(), archive.NewMappings()
	defer m.Close()
	defer other.Close()
	from := mappedReader(t, lost, other)
	to := from.Mapped()[4096:] // read-only memory: writing to it is a fault, too
	defer func() {
		if recover() == nil {
			t.Error("a write to read-only memory did not panic")
		}
	}()
	mappedReader(t, path, m).CopyMapped(to[:50_000], 4000)
}

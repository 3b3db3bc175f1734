package archive

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// TestGzipOfAnyFormIsRead: the reader reads gzip files of every form, in pieces of every size, and
// names damage.
func TestGzipOfAnyFormIsRead(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 8))
	data := make([]byte, 700_000)
	for i := range data {
		data[i] = byte(rng.IntN(1 + i%200))
	}
	for _, every := range []int{1, 1000, 65_280, len(data)} {
		part := data
		if every == 1 {
			part = data[:300]
		}
		file := archivetest.GzipSplit(t, part, every, 6)
		for _, chunk := range []int{1, 13, 4096, 1 << 20} {
			r, err := newGzipReader(&archivetest.Chunked{Reader: bytes.NewReader(file), N: chunk})
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(r)
			r.close()
			if err != nil || !bytes.Equal(got, part) {
				t.Fatalf("members of %d bytes, read by %d: %d bytes, error %v", every, chunk, len(got), err)
			}
		}
	}
	good := archivetest.GzipSplit(t, data, len(data), 6)
	for _, zeros := range []int{1, 511, gzipReadBytes, 3*gzipReadBytes + 1} {
		r, err := newGzipReader(&archivetest.Chunked{Reader: bytes.NewReader(append(bytes.Clone(good),
			make([]byte, zeros)...)), N: 4096})
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		r.close()
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("padded by %d zeros: %d bytes, error %v", zeros, len(got), err)
		}
	}
	for name, c := range map[string]struct {
		change func([]byte) []byte
		want   error
	}{
		"length":             {func(b []byte) []byte { b[len(b)-1] ^= 1; return b }, gzip.ErrChecksum},
		"checksum":           {func(b []byte) []byte { b[len(b)-5] ^= 1; return b }, gzip.ErrChecksum},
		"junk after":         {func(b []byte) []byte { return append(b, "some junk that follows"...) }, gzip.ErrHeader},
		"junk after zeros":   {func(b []byte) []byte { return append(b, "\x00\x00\x00junk"...) }, gzip.ErrHeader},
		"member after zeros": {func(b []byte) []byte { return append(append(b, 0), b...) }, gzip.ErrHeader},
		"zeros at once":      {func(b []byte) []byte { return make([]byte, 100) }, gzip.ErrHeader},
		"cut off trailer":    {func(b []byte) []byte { return b[:len(b)-1] }, io.ErrUnexpectedEOF},
		"cut off":            {func(b []byte) []byte { return b[:len(b)/2] }, io.ErrUnexpectedEOF},
		"cut off at 9":       {func(b []byte) []byte { return b[:9] }, io.ErrUnexpectedEOF},
	} {
		r, err := newGzipReader(bytes.NewReader(c.change(bytes.Clone(good))))
		if err == nil {
			_, err = io.ReadAll(r)
			r.close()
		}
		if !errors.Is(err, c.want) {
			t.Errorf("%s: error %v, want %v", name, err, c.want)
		}
	}
}

// FuzzGzip: the reader takes any bytes, in any pieces, and returns the bytes of compress/gzip.
// Inflating from every checkpoint gives the same bytes.
func FuzzGzip(f *testing.F) {
	f.Add(archivetest.GzipSplit(f, []byte("hello hello hello"), 5, 6), uint16(3))
	f.Add(archivetest.GzipSplit(f, bytes.Repeat([]byte("abc"), 30_000), 40_000, 1), uint16(1000))
	f.Fuzz(func(t *testing.T, data []byte, step uint16) {
		const most = 4 << 20
		reference := func() ([]byte, error) {
			r, err := gzip.NewReader(bytes.NewReader(data))
			if err != nil {
				return nil, err
			}
			return io.ReadAll(io.LimitReader(r, most))
		}
		want, wantErr := reference()
		r, err := newGzipReader(&archivetest.Chunked{Reader: bytes.NewReader(data), N: int(step) + 1})
		// Reserved flags are an error by RFC 1952, but Go's reader accepts them.
		reserved := func(header int64) bool { return header+3 < int64(len(data)) && data[header+3]&0xe0 != 0 }
		if err != nil {
			if wantErr == nil && !reserved(0) {
				t.Errorf("%v: Go's reads %d bytes", err, len(want))
			}
			return
		}
		defer r.close()
		var marks []Mark
		var windows []byte
		if err := r.mark(func(c Checkpoint) {
			marks = append(marks, Mark{c.Bit, c.Output, int64(len(windows)), int32(len(c.Window))})
			windows = append(windows, c.Window...)
		}); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(io.LimitReader(r, most))
		if err == gzip.ErrHeader && reserved(r.in.offset-10) {
			return
		}
		if wantErr == nil && (err != nil || !bytes.Equal(got, want)) {
			t.Fatalf("%d bytes, %v: Go's reads %d", len(got), err, len(want))
		}
		// Go's reader refuses names of 512 bytes and more. Of a damaged file it returns a prefix of
		// the data.
		if err != nil || wantErr != nil || len(got) == most {
			return
		}
		in, err := newRangeInflater()
		if err != nil {
			t.Fatal(err)
		}
		defer in.close()
		for i, c := range marks {
			part := make([]byte, int64(len(got))-c.Output)
			if i > 8 {
				part = part[:min(len(part), 1<<12)]
			}
			if err := in.read(bytes.NewReader(data), bytes.NewReader(windows), &c, c.Output,
				int64(len(data)), nil, part); err != nil && len(part) > 0 {
				t.Fatalf("checkpoint %d at %d of %d: %v", i, c.Output, len(got), err)
			}
			if !bytes.Equal(part, got[c.Output:][:len(part)]) {
				t.Fatalf("checkpoint %d at %d of %d: other bytes", i, c.Output, len(got))
			}
		}
	})
}

// A gzip header is recognised only if all of it has been read.
func TestGzipHeaderIsWholeOrNone(t *testing.T) {
	fixed := []byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255}
	for flags, fields := range map[byte]string{0: "", 2: "hc", 4: "\x05\x00extra", 8: "name\x00", 16: "comment\x00",
		4 | 8 | 16 | 2: "\x05\x00extraname\x00comment\x00hc"} {
		header := append(bytes.Clone(fixed), fields...)
		header[3] = flags
		for n := range len(header) {
			if got := gzipHeader(header[:n]); got != 0 {
				t.Errorf("flags %d, %d of %d bytes: got a header of %d bytes, want none", flags, n, len(header), got)
			}
		}
		if got := gzipHeader(append(header, "data"...)); got != len(header) {
			t.Errorf("flags %d: got a header of %d bytes, want %d", flags, got, len(header))
		}
	}
	for i := range 3 {
		wrong := bytes.Clone(fixed)
		wrong[i]++
		if got := gzipHeader(wrong); got != 0 {
			t.Errorf("with another byte %d: got a header of %d bytes, want none", i, got)
		}
	}
}

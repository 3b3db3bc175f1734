package imageloader

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// fuzzArchive has samples enough for some checkpoints, of few bytes, and an index with entry points. It is the same in every run.
func fuzzArchive(f *testing.F, name string, pack func([]byte) []byte) (path string, index []byte, members []tarMember) {
	f.Helper()
	for i := range 6 {
		members = append(members, tarMember{name: "c/" + string(rune('a'+i)) + ".png", data: fakeImage(string(bytes.Repeat([]byte{byte(i), 1, 2, byte(i * i)}, 2000+i*3000)))})
	}
	path = writeFile(f, name, pack(tarBytes(f, members...)))
	day := time.Unix(1_700_000_000, 0)
	if err := os.Chtimes(path, day, day); err != nil {
		f.Fatal(err)
	}
	l, err := open(f.Context(), path, Options{}, openFile, fakeCodec{})
	if err != nil {
		f.Fatal(err)
	}
	for i := range 4 {
		l.index.Load().keepEntries(i, bytes.Repeat([]byte{byte(i)}, 20+i))
	}
	if err := l.Close(); err != nil {
		f.Fatal(err)
	}
	if index, err = os.ReadFile(path + sidecarSuffix); err != nil {
		f.Fatal(err)
	}
	return path, index, members
}

// indexParts are the sections of an index that lie inside of it, as far as its table can be read, and before them the header and the table.
func indexParts(index []byte) (parts [][]byte) {
	le := binary.LittleEndian
	if len(index) < sidecarHeader {
		return [][]byte{index}
	}
	end := sidecarHeader + sectionBytes*uint64(min(le.Uint32(index[12:]), mostSections))
	parts = [][]byte{index[:min(end, uint64(len(index)))]}
	for at := uint64(sidecarHeader); at+sectionBytes <= uint64(len(parts[0])); at += sectionBytes {
		offset, size := le.Uint64(index[at+8:]), le.Uint64(index[at+16:])
		if offset > uint64(len(index)) || size > uint64(len(index))-offset {
			parts = append(parts, nil)
			continue
		}
		parts = append(parts, index[offset:offset+size])
	}
	return parts
}

// resealed makes an index's checksums right, whatever it holds.
func resealed(index []byte) {
	le := binary.LittleEndian
	parts := indexParts(index)
	if len(parts[0]) < sidecarHeader {
		return
	}
	table := parts[0][sidecarHeader:]
	for i, part := range parts[1:] {
		le.PutUint32(table[i*sectionBytes+4:], crc32.ChecksumIEEE(part))
	}
	le.PutUint64(index[16:], uint64(len(index)))
	le.PutUint32(index[24:], crc32.ChecksumIEEE(table))
	le.PutUint32(index[28:], crc32.ChecksumIEEE(index[:28]))
}

// edited changes an index: eight bytes an edit, which say in which part, how, where and to what.
func edited(index, edits []byte) []byte {
	const most = 64
	index = bytes.Clone(index)
	for ; len(edits) >= 8; edits = edits[8:] {
		parts := indexParts(index)
		part := parts[int(edits[0])%len(parts)]
		at, value := int(binary.LittleEndian.Uint16(edits[2:])), binary.LittleEndian.Uint32(edits[4:])
		if len(part) < 8 {
			continue
		}
		word := part[at%(len(part)-7):]
		switch edits[1] % 8 {
		case 0:
			word[0] = byte(value)
		case 1:
			word[0] ^= 1 << (value % 8)
		case 2:
			binary.LittleEndian.PutUint32(word, value)
		case 3: // also negative
			binary.LittleEndian.PutUint64(word, uint64(int64(int32(value))))
		case 4:
			binary.LittleEndian.PutUint64(word, binary.LittleEndian.Uint64(word)+uint64(int64(int32(value))))
		case 5: // of another place of the same part
			copy(word, part[int(value)%len(part):][:min(len(part)-int(value)%len(part), most)])
		case 6: // of another part
			other := parts[int(value)%len(parts)]
			copy(word, other[min(len(other), int(value>>8)):])
		case 7: // cut off, or longer
			index = append(index[:len(index)-min(len(index), int(value%256))], make([]byte, value>>8%256)...)
		}
	}
	return index
}

// FuzzIndex: whatever an index file holds, its checksums right or not, loaders open, samples have their bytes or an error says that they don't, epochs end, and
// nothing hangs.
func FuzzIndex(f *testing.F) {
	packed, packedIndex, members := fuzzArchive(f, "a.tgz", func(data []byte) []byte { return gzipSplit(f, data, 1<<20, 1) })
	plain, plainIndex, _ := fuzzArchive(f, "a.tar", func(data []byte) []byte { return data })
	want := contentOf(members)
	for how := range byte(4) {
		f.Add([]byte{}, how)
		f.Add([]byte{0, 7, 0, 0, 100, 0, 0, 0}, how)
	}
	for part := range byte(11) {
		for edit := range byte(8) {
			f.Add([]byte{part, edit, 16 * edit, 0, 1 + 50*edit, part, 0, 0}, 1+part%3)
		}
	}
	// how: whether the checksums are made right; of which archive the index is.
	f.Fuzz(func(t *testing.T, edits []byte, how uint8) {
		side := filepath.Join(t.TempDir(), "index")
		path, index := packed, packedIndex
		if how&2 != 0 {
			path, index = plain, plainIndex
		}
		data := edited(index, edits)
		if how&1 != 0 {
			resealed(data)
		}
		if err := os.WriteFile(side, data, 0o644); err != nil {
			t.Fatal(err)
		}
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), IndexFile: side, ShuffleBytes: 1, MaxSampleBytes: 1 << 20, Workers: 2, BadSamples: Skip}, openFile, fakeCodec{})
		other := len(data) > 0 && !bytes.HasPrefix(data, []byte(sidecarMagic)) // no index: it is not replaced
		if err != nil {
			if !errors.Is(err, ErrNoSamples) && !other {
				t.Fatal(err)
			}
			return
		}
		if other {
			t.Fatal("a file that is no index was taken")
		}
		defer l.Close()
		x := l.index.Load()
		a, err := openArchive(t.Context(), path, opener{file: openFile})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		r := newSampleReader(a, x)
		defer r.close()
		for i := range x.entries {
			_ = x.entriesOf(i, nil) // whatever it is, it is the decoder's to check
			e := &x.entries[i]
			if e.kind != kindFile || e.size > 1<<20 || e.size == 0 || x.work == 0 {
				continue
			}
			b := make([]byte, e.size)
			if r.read(i, b) == nil && e.flags&entrySummed != 0 && want[x.name(i)] != "" && len(want[x.name(i)]) == len(b) && want[x.name(i)] != string(b) {
				// Only where the index has the name of one sample and the place and checksum of another.
				if !contains(want, string(b)) {
					t.Errorf("%s has bytes of no sample", x.name(i))
				}
			}
		}
		if batches, err := collect(t, l, 0, 2); len(names(batches)) > len(x.entries) {
			t.Errorf("%d samples of %d, error %v", len(names(batches)), len(x.entries), err)
		}
	})
}

func contains(m map[string]string, data string) bool {
	for _, d := range m {
		if d == data {
			return true
		}
	}
	return false
}

// FuzzGzip: the reader of gzip files takes any bytes, in any steps, and gives what Go's gives; and so does every checkpoint.
func FuzzGzip(f *testing.F) {
	f.Add(gzipSplit(f, []byte("hello hello hello"), 5, 6), uint16(3))
	f.Add(gzipSplit(f, bytes.Repeat([]byte("abc"), 30_000), 40_000, 1), uint16(1000))
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
		r, err := newGzipReader(&chunked{bytes.NewReader(data), int(step) + 1})
		// Reserved flags are an error by RFC 1952, which Go's forgives.
		reserved := func(header int64) bool { return header+3 < int64(len(data)) && data[header+3]&0xe0 != 0 }
		if err != nil {
			if wantErr == nil && !reserved(0) {
				t.Errorf("%v: Go's reads %d bytes", err, len(want))
			}
			return
		}
		defer r.close()
		var marks []mark
		var windows []byte
		if err := r.mark(func(c checkpoint) {
			marks = append(marks, mark{c.bit, c.output, int64(len(windows)), int32(len(c.window))})
			windows = append(windows, c.window...)
		}); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(io.LimitReader(r, most))
		if err == gzip.ErrHeader && reserved(r.offset-10) {
			return
		}
		if wantErr == nil && (err != nil || !bytes.Equal(got, want)) {
			t.Fatalf("%d bytes, %v: Go's reads %d", len(got), err, len(want))
		}
		// Go's refuses names of 512 bytes and more. What it reads of a damaged file is no more than what is there.
		if err != nil || wantErr != nil || len(got) == most {
			return
		}
		in, err := newInflateRange()
		if err != nil {
			t.Fatal(err)
		}
		defer in.close()
		for i, c := range marks {
			part := make([]byte, int64(len(got))-c.output)
			if i > 8 {
				part = part[:min(len(part), 1<<12)]
			}
			if err := in.read(bytes.NewReader(data), bytes.NewReader(windows), &c, c.output, int64(len(data)), part); err != nil && len(part) > 0 {
				t.Fatalf("checkpoint %d at %d of %d: %v", i, c.output, len(got), err)
			}
			if !bytes.Equal(part, got[c.output:][:len(part)]) {
				t.Fatalf("checkpoint %d at %d of %d: other bytes", i, c.output, len(got))
			}
		}
	})
}

// FuzzWindow: unpackWindow writes inside of the window alone.
func FuzzWindow(f *testing.F) {
	f.Add([]byte{1, 2, 3, 4})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0x0f, 1, 1})
	f.Fuzz(func(t *testing.T, packed []byte) {
		room := bytes.Repeat([]byte{0x5a}, 1200)
		_ = unpackWindow(packed, room[100:1100:1100]) // an error or not
		if len(bytes.Trim(room[:100], "\x5a")) > 0 || len(bytes.Trim(room[1100:], "\x5a")) > 0 {
			t.Error("written outside of the window")
		}
	})
}

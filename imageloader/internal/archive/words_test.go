package archive_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// walkFile reads an archive through, and counts its members.
func walkFile(t *testing.T, data []byte) (members int, err error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	a, err := archive.Open(t.Context(), path, archive.Config{})
	if err != nil {
		return 0, err
	}
	defer a.Close()
	for _, err := range a.Members() {
		if err != nil {
			return members, err
		}
		members++
	}
	return members, nil
}

// longWindow is a zstd frame whose window is larger than 128 MiB: RFC 8878, 3.1.1.1.2. It has one
// empty last block.
var longWindow = []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 18 << 3, 0x01, 0x00, 0x00}

// The error of an unreadable archive names its format and the next step.
func TestUnreadArchiveSaysWhatToDo(t *testing.T) {
	plain := archivetest.Images(t, 3, nil)
	packed := archivetest.Gzip(t, plain)
	var twice bytes.Buffer
	z := gzip.NewWriter(&twice)
	_, _ = z.Write(packed)
	_ = z.Close()
	volume := bytes.Clone(plain)
	volume[156] = 'M'
	sum := 0
	copy(volume[148:156], "        ")
	for _, c := range volume[:512] {
		sum += int(c)
	}
	copy(volume[148:156], fmt.Sprintf("%06o\x00 ", sum))
	behind := func(data []byte, text string) []byte { return append(bytes.Clone(data), text...) }
	cut := fmt.Sprintf("cut them off with `truncate -s %d FILE`", len(packed))
	for _, c := range []struct {
		name string
		data []byte
		want []string // nil: it is read
	}{
		{"a newline behind gzip", behind(packed, "\n"), []string{"1 bytes follow the last gzip member", cut}},
		{"a signature behind gzip", behind(packed, "-----BEGIN PGP SIGNATURE-----\n"),
			[]string{"30 bytes follow the last gzip member", cut}},
		{"zeros behind gzip", behind(packed, strings.Repeat("\x00", 700)), nil},
		{"two gzip members", behind(packed, string(packed)), nil},
		{"bytes behind zstd", behind(archivetest.Zstd(t, plain), "-----BEGIN PGP"),
			[]string{"bytes follow the last zstd frame"}},
		{"a long window", longWindow, []string{"window is over 128 MiB", "pack it from a file, or without --long"}},
		{"a second volume", volume, []string{"a volume of a multi-volume tar", "tar -xM"}},
		{"Parquet in gzip", archivetest.Gzip(t, append([]byte("PAR1"), make([]byte, 1000)...)),
			[]string{"inside the compression", "a Parquet file"}},
		{"7z", []byte("7z\xbc\xaf\x27\x1c\x00\x04"), []string{"a 7z archive", "repack it"}},
		{"Arrow of datasets", []byte("\xff\xff\xff\xff\x20\x02\x00\x00\x10\x00\x00\x00"),
			[]string{"an Arrow file", "save_to_disk", `.to_parquet("train.parquet")`}},
		{"Arrow", []byte("ARROW1\x00\x00\xff\xff\xff\xff"), []string{"an Arrow file", `.to_parquet("train.parquet")`}},
		{"gzip twice", twice.Bytes(), []string{"compressed twice", "decompress it once"}},
		{"zip in gzip", archivetest.Gzip(t, append([]byte("PK\x03\x04"), make([]byte, 1000)...)),
			[]string{"inside the compression", "a zip file"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			members, err := walkFile(t, c.data)
			if c.want == nil {
				if err != nil || members < 3 {
					t.Errorf("got %d members, error %v, want 3 and more", members, err)
				}
				return
			}
			for _, want := range c.want {
				if !strings.Contains(fmt.Sprint(err), want) {
					t.Errorf("error %v, want one with %q", err, want)
				}
			}
			if errors.Is(err, io.ErrUnexpectedEOF) || strings.Contains(fmt.Sprint(err), "fetch it again") {
				t.Errorf("error %v, want none of a file that is cut off", err)
			}
			if c.name == "a long window" && !errors.Is(err, zstd.ErrWindowSizeExceeded) {
				t.Errorf("error %v, want zstd's", err)
			}
		})
	}
}

package index

import (
	"bytes"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// TestDevicesReadPackedBytes: the compressed bytes that devices read are those of ReadPacked, which
// then reads the window alone.
func TestDevicesReadPackedBytes(t *testing.T) {
	data := archivetest.Tar(t, archivetest.Photos(12)...)
	path := archivetest.WriteFile(t, "a.tgz", archivetest.GzipSplit(t, data, len(data), 6))
	x, host := readerOf(t, path)
	m := archive.NewMappings()
	defer m.Close()
	a, err := archive.Open(t.Context(), path, archive.Config{Mappings: m})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	r := NewReader(x, a)
	defer r.Close()
	register := func([]byte) (func() error, error) { return func() error { return nil }, nil }
	for i := range x.samples {
		if err := host.Read(i, make([]byte, x.samples[i].size)); err != nil {
			t.Fatal(err)
		}
		p, _ := x.Packed(i)
		p.Within(host.Inflated(i))
		window, input := make([]byte, p.Window), make([]byte, p.Input)
		if err := host.ReadPacked(&p, window, input); err != nil {
			t.Fatal(err)
		}
		if got := r.DevicePacked(&p, nil); got != nil {
			t.Fatalf("%s: DevicePacked without devices = %d bytes, want nil", x.Name(i), len(got))
		}
		var got []byte
		for began := time.Now(); got == nil && time.Since(began) < time.Minute; { // registered in the background
			got = r.DevicePacked(&p, register)
		}
		if !bytes.Equal(got, input) {
			t.Errorf("%s: devices read %d bytes, want the %d of ReadPacked", x.Name(i), len(got), len(input))
		}
		alone := make([]byte, p.Window)
		if err := r.ReadPacked(&p, alone, nil); err != nil || !bytes.Equal(alone, window) {
			t.Errorf("%s: the window read alone has error %v, the same bytes: %t, want no error and true", x.Name(i), err,
				bytes.Equal(alone, window))
		}
	}
}

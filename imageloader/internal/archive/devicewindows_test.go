//go:build linux

package archive_test

import (
	"bytes"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// registry counts registered memory.
type registry struct {
	calls, live, bytes atomic.Int64
	fails              error
}

func (r *registry) register(memory []byte) (release func() error, err error) {
	r.calls.Add(1)
	if r.fails != nil {
		return nil, r.fails
	}
	r.live.Add(1)
	r.bytes.Add(int64(len(memory)))
	return func() error { r.live.Add(-1); return nil }, nil
}

// awaitDeviceBytes calls DeviceBytes until the part is registered, which happens in the background.
func awaitDeviceBytes(t *testing.T, r *archive.Reader, size int, at int64, to archive.Register) []byte {
	t.Helper()
	for began := time.Now(); time.Since(began) < time.Minute; {
		if p := r.DeviceBytes(0, size, at, to); p != nil {
			return p
		}
	}
	t.Fatalf("no device can read %d bytes from %d in a minute", size, at)
	return nil
}

func TestDevicesReadAMappedFile(t *testing.T) {
	path, file := mappedTar(t, 1)
	m := archive.NewMappings()
	defer m.Close()
	r := mappedReader(t, path, m)
	var to registry
	if p := r.DeviceBytes(0, 100, 4000, nil); p != nil {
		t.Errorf("DeviceBytes without devices = %d bytes, want nil", len(p))
	}
	got := awaitDeviceBytes(t, r, 50_001, 4001, to.register)
	if !bytes.Equal(got, file[4001:54_002]) {
		t.Error("DeviceBytes has other bytes, want those of the file")
	}
	page := os.Getpagesize()
	if n := int64((len(file) + page - 1) / page * page); to.calls.Load() != 1 || to.bytes.Load() != n {
		t.Errorf("%d bytes are registered in %d calls, want whole pages, %d, in 1", to.bytes.Load(), to.calls.Load(), n)
	}
	for _, part := range [][2]int64{{1, int64(len(file))}, {int64(len(file)) + 1, 0}, {1, -1}, {0, 0}} {
		if p := r.DeviceBytes(0, int(part[0]), part[1], to.register); p != nil {
			t.Errorf("DeviceBytes of %d bytes from %d of %d = %d bytes, want nil", part[0], part[1], len(file), len(p))
		}
	}
	// Another archive with the same mappings finds the memory registered.
	if p := mappedReader(t, path, m).DeviceBytes(0, 10, 0, to.register); len(p) != 10 || to.calls.Load() != 1 {
		t.Errorf("another reader gets %d bytes after %d calls, want 10 after 1", len(p), to.calls.Load())
	}
	m.Close()
	if n := to.live.Load(); n != 0 {
		t.Errorf("%d windows are registered after Close, want 0", n)
	}
}

// TestPartOfTwoWindowsNeedsBoth: a part at the end of a window is readable when both windows are.
func TestPartOfTwoWindowsNeedsBoth(t *testing.T) {
	path, _ := mappedTar(t, 1)
	if err := os.Truncate(path, archive.DeviceWindow+1<<20); err != nil { // zeros, which take no disk
		t.Fatal(err)
	}
	m := archive.NewMappings()
	defer m.Close()
	r := mappedReader(t, path, m)
	var to registry
	if p := awaitDeviceBytes(t, r, 5000, archive.DeviceWindow-2000, to.register); len(p) != 5000 || to.calls.Load() != 2 {
		t.Errorf("%d bytes are readable after %d windows are registered, want 5000 after 2", len(p), to.calls.Load())
	}
	if n := to.bytes.Load(); n != archive.DeviceWindow+1<<20 {
		t.Errorf("%d bytes are registered, want %d", n, archive.DeviceWindow+1<<20)
	}
}

// TestHoldOutlivesClose: Close leaves memory mapped and registered that a device may still read.
func TestHoldOutlivesClose(t *testing.T) {
	path, file := mappedTar(t, 1)
	m := archive.NewMappings()
	r := mappedReader(t, path, m)
	var to registry
	got := awaitDeviceBytes(t, r, 1000, 4000, to.register)
	first, second := m.Hold(), m.Hold()
	m.Close()
	first()
	if n := to.live.Load(); n != 1 || !bytes.Equal(got, file[4000:5000]) {
		t.Errorf("%d windows are registered while a hold is left, want 1 with the file's bytes", n)
	}
	second()
	if n := to.live.Load(); n != 0 {
		t.Errorf("%d windows are registered after the last hold, want 0", n)
	}
	m.Hold()() // holds nothing, and releases nothing
	if p := r.DeviceBytes(0, 1000, 4000, to.register); p != nil && to.live.Load() != 0 {
		t.Error("closed mappings are registered again, want none")
	}
}

// TestRefusedRegistrationIsRepeatedLater: until then the host reads the file as without devices.
func TestRefusedRegistrationIsRepeatedLater(t *testing.T) {
	path, file := mappedTar(t, 1)
	m := archive.NewMappings()
	r := mappedReader(t, path, m)
	to := registry{fails: errors.New("no room")}
	for began := time.Now(); to.calls.Load() == 0 && time.Since(began) < time.Minute; {
		r.DeviceBytes(0, 1000, 4000, to.register)
	}
	for range 100 {
		if p := r.DeviceBytes(0, 1000, 4000, to.register); p != nil {
			t.Fatalf("DeviceBytes after a failed registration = %d bytes, want nil", len(p))
		}
	}
	m.AwaitRegistrar()
	if n := to.calls.Load(); n != 1 {
		t.Errorf("the window was registered %d times, want once", n)
	}
	to.fails = nil
	m.ForgetRefusal()
	if p := awaitDeviceBytes(t, mappedReader(t, path, m), 1000, 4000, to.register); !bytes.Equal(p, file[4000:5000]) {
		t.Error("DeviceBytes has other bytes when registering succeeds later, want those of the file")
	}
	m.Close()
	sameReads(t, "refused", r, len(file))
}

// TestDevicesReadNoChangedFile: a file that is written to, cut, or replaced after it was mapped is
// the host's, which sees the change. A changed time of the last write is not needed.
func TestDevicesReadNoChangedFile(t *testing.T) {
	for name, change := range map[string]func(path string) error{
		"cut": func(path string) error { return os.Truncate(path, 60_000) },
		"written to, with the time of before": func(path string) error {
			info, err := os.Stat(path)
			return errors.Join(err, os.WriteFile(path, make([]byte, info.Size()), 0o600),
				os.Chtimes(path, info.ModTime(), info.ModTime()))
		},
		"other rights": func(path string) error { return os.Chmod(path, 0o640) },
	} {
		t.Run(name, func(t *testing.T) {
			path, _ := mappedTar(t, 1)
			m := archive.NewMappings()
			defer m.Close()
			r := mappedReader(t, path, m)
			var to registry
			awaitDeviceBytes(t, r, 1000, 4000, to.register)
			if err := change(path); err != nil {
				t.Fatal(err)
			}
			calls := 0
			for r.DeviceBytes(0, 1000, 4000, to.register) != nil && calls <= archive.DeviceLooks {
				calls++
			}
			if calls >= archive.DeviceLooks {
				t.Errorf("a device reads %d parts of a changed file, want fewer than %d", calls, archive.DeviceLooks)
			}
		})
	}
}

// TestCloseWaitsForOneWindow: the windows after the one that is being registered are left out.
func TestCloseWaitsForOneWindow(t *testing.T) {
	path, _ := mappedTar(t, 1)
	if err := os.Truncate(path, 3*archive.DeviceWindow); err != nil {
		t.Fatal(err)
	}
	m := archive.NewMappings()
	r := mappedReader(t, path, m)
	var to registry
	began, resume := make(chan struct{}), make(chan struct{})
	slow := func(memory []byte) (func() error, error) {
		if to.calls.Load() == 0 {
			close(began)
			<-resume
		}
		return to.register(memory)
	}
	r.DeviceBytes(0, 1000, 0, slow)
	<-began
	closed := make(chan struct{})
	go func() { m.Close(); close(closed) }()
	for r.DeviceBytes(0, 1000, 0, slow) == nil && m.Holding() { // until Close is waiting
	}
	close(resume)
	<-closed
	if calls, live := to.calls.Load(), to.live.Load(); calls != 1 || live != 0 {
		t.Errorf("%d windows were registered and %d are after Close, want 1 and 0", calls, live)
	}
}

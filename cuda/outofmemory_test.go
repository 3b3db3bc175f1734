//go:build linux

package cuda

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/internal/capi"
)

// An observer calls its function for each failure, in order, and Close waits for those before it.
func TestOutOfMemoryObserverDelivers(t *testing.T) {
	var mu sync.Mutex
	var queue []OutOfMemory
	var got []int64
	freed := false
	fd, _, errno := syscall.Syscall(syscall.SYS_EVENTFD2, 0, syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	fail := func(number int64) {
		mu.Lock()
		queue = append(queue, OutOfMemory{Number: number})
		mu.Unlock()
		if _, err := syscall.Write(int(fd), []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
			t.Error(err)
		}
	}
	take := func() []OutOfMemory {
		mu.Lock()
		defer mu.Unlock()
		taken := queue
		queue = nil
		return taken
	}
	called := make(chan struct{}, 10)
	o := observe(func(failed OutOfMemory) { got = append(got, failed.Number); called <- struct{}{} }, take,
		func() { freed = true }, os.NewFile(fd, "test"))
	fail(1)
	<-called
	fail(2)
	fail(3)
	check(t, o.Close())
	check(t, o.Close())
	if !slices.Equal(got, []int64{1, 2, 3}) || !freed {
		t.Errorf("got the failures %v, freed %t", got, freed)
	}
	check(t, (*OutOfMemoryObserver)(nil).Close())
}

func TestObserveOutOfMemoryChecksItsArguments(t *testing.T) {
	if _, err := ObserveOutOfMemory(nil, OutOfMemoryOptions{}); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %v, want ErrInvalidArgument", err)
	}
	if _, err := ObserveOutOfMemory(func(OutOfMemory) {},
		OutOfMemoryOptions{MaxSnapshots: -1}); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %v, want ErrInvalidArgument", err)
	}
	if DeviceCount() > 0 {
		return
	}
	if _, err := ObserveOutOfMemory(func(OutOfMemory) {}, OutOfMemoryOptions{}); !errors.Is(err, ErrNoDevice) {
		t.Errorf("got %v, want ErrNoDevice", err)
	}
	if _, err := AllocatorSettings(); !errors.Is(err, ErrNoDevice) {
		t.Errorf("got %v, want ErrNoDevice", err)
	}
}

// An allocation that fails is observed with its figures and a snapshot, and one that succeeds is
// not.
func TestObserveOutOfMemoryOnAGPU(t *testing.T) {
	onGPU(t, 1)
	check(t, EmptyCache())
	dir := filepath.Join(t.TempDir(), "oom")
	failures := make(chan OutOfMemory, 10)
	o := must[*OutOfMemoryObserver](t)(ObserveOutOfMemory(func(failed OutOfMemory) {
		if _, err := failed.Device.Pools(); err != nil { // fn may call everything
			t.Error(err)
		}
		failures <- failed
	}, OutOfMemoryOptions{SnapshotDir: dir, MaxSnapshots: 1}))
	defer o.Close()
	m := must[MemoryStats](t)(Device(0).Memory())
	const wanted = 1 << 30
	check(t, Device(0).LimitMemory(float64(m.Reserved+wanted/2)/float64(m.Total)))
	allocate := func(bytes int64) error {
		x, err := capi.EmptyTensor([]int64{bytes}, capi.Uint8, 0, capi.Contiguous)
		if err == nil {
			capi.FreeTensor(x)
		}
		return err
	}
	check(t, allocate(1<<20))
	for range 2 {
		if err := allocate(wanted); !errors.Is(err, ErrOutOfMemory) {
			t.Errorf("got %v, want ErrOutOfMemory", err)
		}
	}
	check(t, Device(0).LimitMemory(1))
	check(t, allocate(wanted))
	check(t, o.Close())
	close(failures)
	var got []OutOfMemory
	for failed := range failures {
		t.Log(failed)
		got = append(got, failed)
	}
	if len(got) != 2 {
		t.Fatalf("%d failures were observed, want 2", len(got))
	}
	for i, failed := range got {
		if failed.Number != int64(i)+1 || failed.Device != 0 || failed.Wanted < wanted ||
			failed.Wanted > wanted+32<<20 ||
			failed.Limit >= m.Total || failed.Free <= 0 || failed.Reserved < failed.Allocated {
			t.Errorf("got %+v", failed)
		}
	}
	if filepath.Dir(got[0].Snapshot) != dir || got[1].Snapshot != "" {
		t.Errorf("the snapshots are %q and %q, want one in %s, and none",
			got[0].Snapshot, got[1].Snapshot, dir)
	}
	if b := must[[]byte](t)(os.ReadFile(got[0].Snapshot)); !bytes.Contains(b, []byte("segments")) {
		t.Errorf("the snapshot has %d bytes and no segments", len(b))
	}
	check(t, EmptyCache())
}

func TestAllocatorSettingsAreReturned(t *testing.T) {
	onGPU(t, 1)
	const settings = "garbage_collection_threshold:0.9"
	check(t, ConfigureAllocator(settings))
	defer func() { check(t, ConfigureAllocator("")) }()
	if got := must[string](t)(AllocatorSettings()); got != settings {
		t.Errorf("got %q, want %q", got, settings)
	}
}

// Memory counts for the pool that it comes from.
func TestPoolStats(t *testing.T) {
	onGPU(t, 1)
	p := must[*MemoryPool](t)(NewMemoryPool(0))
	empty := must[PoolStats](t)(p.Stats())
	if empty.Kind != OwnPool || empty.ID == 0 || empty.Allocated != 0 || empty.Allocations != 0 {
		t.Errorf("an empty pool has %+v", empty)
	}
	var x *capi.Tensor
	check(t, p.Use(func() (err error) {
		x, err = capi.EmptyTensor([]int64{3 << 20}, capi.Uint8, 0, capi.Contiguous)
		return err
	}))
	s := must[PoolStats](t)(p.Stats())
	if s.Allocations != 1 || s.Requested != 3<<20 || s.Allocated < 3<<20 || s.Active != s.Allocated ||
		s.Reserved < s.Allocated || s.Segments != 1 ||
		s.MaxFree > s.Reserved-s.Allocated || s.ID != empty.ID {
		t.Errorf("got %+v", s)
	}
	t.Log(s)
	find := func(id int64) (PoolStats, bool) {
		pools := must[[]PoolStats](t)(Device(0).Pools())
		if len(pools) == 0 || pools[0].Kind != DefaultPool || pools[0].ID != 0 {
			t.Errorf("the pools are %+v", pools)
		}
		i := slices.IndexFunc(pools, func(s PoolStats) bool { return s.ID == id })
		if i < 0 {
			return PoolStats{}, false
		}
		return pools[i], true
	}
	if got, _ := find(s.ID); got != s {
		t.Errorf("got %+v among all pools, want %+v", got, s)
	}
	check(t, p.Close())
	if got, ok := find(s.ID); !ok || got.Kind != EndedPool {
		t.Errorf("the pool of a live tensor is %+v after its Close, found %t", got, ok)
	}
	capi.FreeTensor(x)
	check(t, EmptyCache())
	if got, ok := find(s.ID); ok && got.Reserved > 0 {
		t.Errorf("the pool is %+v after its last tensor", got)
	}
	if _, err := p.Stats(); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
}

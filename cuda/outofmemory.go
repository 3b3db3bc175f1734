package cuda

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
	"github.com/torchstream/torchstream/internal/system"
)

// OutOfMemory describes one failed allocation of device memory. The allocator had already returned
// its unused memory to the driver and tried again.
type OutOfMemory struct {
	// Number counts the failures from 1 on. A gap means that the queue dropped failures because too
	// many came at once.
	Number int64
	Device Device
	// Wanted is the size in bytes that the allocator requested from the driver: the tensor's size,
	// rounded up to a segment.
	Wanted int64
	Free   int64 // bytes that the driver could give, to all processes
	// Limit is the number of bytes that the allocator may hold: the device's memory, or the share
	// of LimitMemory.
	Limit     int64
	Allocated int64 // bytes in live tensors
	Reserved  int64 // bytes held from the driver by the allocator
	// Snapshot is the file of the allocator's state at the failure, in the form of MemorySnapshot;
	// "" if there is none.
	Snapshot string
}

// String returns the failure in one line: "cuda:0 is out of memory: 2 GiB wanted, 1.1 GiB free, 70
// GiB allocated, 72 GiB reserved of 80 GiB (snapshot in oom/17-1.pickle)".
func (o OutOfMemory) String() string {
	s := fmt.Sprintf("%v is out of memory: %s wanted, %s free, %s allocated, %s reserved of %s",
		o.Device, size(o.Wanted), size(o.Free), size(o.Allocated), size(o.Reserved), size(o.Limit))
	if o.Snapshot != "" {
		s += " (snapshot in " + o.Snapshot + ")"
	}
	return s
}

// OutOfMemoryOptions are the options of [ObserveOutOfMemory]. The zero value writes no snapshots.
type OutOfMemoryOptions struct {
	// SnapshotDir is a folder for a snapshot of each failure. It is created if it does not exist. A
	// snapshot is a file that PyTorch's memory viewer opens, as [MemorySnapshot] returns. With
	// [RecordMemoryHistory] it shows the preceding allocations. The name of a snapshot has the
	// numbers of the process and of the failure. Existing files are not replaced. "" means no
	// snapshots.
	SnapshotDir string
	// MaxSnapshots is the maximum number of snapshots; 0 means 3. A snapshot may have tens of
	// megabytes.
	MaxSnapshots int
}

// OutOfMemoryObserver is the registration of a function by [ObserveOutOfMemory].
type OutOfMemoryObserver struct {
	*outOfMemoryObserver
	cleanup runtime.Cleanup
}

type outOfMemoryObserver struct {
	made    origin.Origin
	take    func() []OutOfMemory
	free    func()
	wake    *os.File
	closing sync.Once
	ended   chan struct{} // closed by the goroutine
}

// ObserveOutOfMemory calls fn for every allocation of device memory that fails from now on, on any
// device and thread, including failures that LibTorch or a program recovers from. Successful
// allocations cost the same with and without an observer.
//
// fn runs in a goroutine of the observer, one call at a time, soon after the failure. The call that
// failed may return its error before fn runs. fn may therefore call everything, and cannot deadlock
// the allocator. The figures and the snapshot describe the moment of the failure. The thread that
// allocates writes the snapshot before its call returns.
//
// Any number of observers may be open. Close each of them.
func ObserveOutOfMemory(fn func(OutOfMemory), o OutOfMemoryOptions) (*OutOfMemoryObserver, error) {
	if fn == nil {
		return nil, invalid("ObserveOutOfMemory", "fn is nil: pass the function to call")
	}
	if o.MaxSnapshots < 0 {
		return nil, invalid("ObserveOutOfMemory",
			"OutOfMemoryOptions.MaxSnapshots is %d: must be 0 or more", o.MaxSnapshots)
	}
	if o.MaxSnapshots == 0 {
		o.MaxSnapshots = 3
	}
	prefix := ""
	if o.SnapshotDir != "" {
		if err := os.MkdirAll(o.SnapshotDir, 0o777); err != nil {
			return nil, fmt.Errorf("cuda: OutOfMemoryOptions.SnapshotDir: %w", err)
		}
		prefix = filepath.Join(o.SnapshotDir, fmt.Sprintf("out-of-memory-%d-", os.Getpid()))
	}
	c, err := capi.NewMemoryObserver(prefix, int64(o.MaxSnapshots))
	if err != nil {
		return nil, checked(err)
	}
	wake, err := duplicate(capi.MemoryObserverFD(c), "out of memory")
	if err != nil {
		capi.FreeMemoryObserver(c)
		return nil, err
	}
	take := func() (all []OutOfMemory) {
		for _, e := range capi.TakeOutOfMemory(c) {
			failed := OutOfMemory{
				Number: e.Number, Device: Device(e.Device), Wanted: e.Wanted, Free: e.Free, Limit: e.Limit,
				Allocated: e.Allocated, Reserved: e.Reserved,
			}
			if e.Snapshot {
				failed.Snapshot = fmt.Sprintf("%s%d.pickle", prefix, e.Number)
			}
			all = append(all, failed)
		}
		return all
	}
	return observe(fn, take, func() { capi.FreeMemoryObserver(c) }, wake), nil
}

// observe starts the goroutine that calls fn.
func observe(fn func(OutOfMemory), take func() []OutOfMemory, free func(), wake *os.File) *OutOfMemoryObserver {
	inner := &outOfMemoryObserver{made: origin.New("out-of-memory observer"), take: take, free: free,
		wake: wake, ended: make(chan struct{})}
	o := &OutOfMemoryObserver{outOfMemoryObserver: inner}
	o.cleanup = runtime.AddCleanup(o, func(inner *outOfMemoryObserver) {
		inner.made.Leaked()
		slog.Debug("cuda: an OutOfMemoryObserver became unreachable before Close; closed")
		inner.close()
	}, inner)
	go inner.deliver(fn)
	return o
}

// deliver calls fn for failures until the observer closes. It then calls fn for the failures before
// the Close.
func (o *outOfMemoryObserver) deliver(fn func(OutOfMemory)) {
	defer close(o.ended)
	defer o.free()
	defer o.wake.Close()
	for {
		var count [8]byte
		_, err := o.wake.Read(count[:])
		for _, failed := range o.take() {
			fn(failed)
		}
		if err != nil {
			return
		}
	}
}

// close makes deliver end.
func (o *outOfMemoryObserver) close() {
	o.closing.Do(func() {
		o.wake.SetReadDeadline(time.Unix(1, 0)) // a Read that waits returns
		o.made.Closed()
	})
}

// Close ends the observer. It waits for the calls of fn for failures until now, so fn must not call
// Close. Further calls, and calls on nil, do nothing. Close never fails.
func (o *OutOfMemoryObserver) Close() error {
	if o == nil || o.outOfMemoryObserver == nil {
		return nil
	}
	o.cleanup.Stop()
	o.close()
	<-o.ended
	return nil
}

// duplicate duplicates a descriptor that becomes readable. Reads of the returned file wait in the
// runtime's poller.
func duplicate(descriptor int, name string) (*os.File, error) {
	fd, err := system.Duplicate(uintptr(descriptor))
	if err != nil {
		return nil, err
	}
	return os.NewFile(fd, name), nil
}
